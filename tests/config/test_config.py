"""Every rule of a configuration broken once; every preset keeps them."""

import math
import re

import pytest
import small_runs
from small_runs import line_of

from specrl_jax.command_line import cli
from specrl_jax.config import flatten
from specrl_jax.rollout import acceptance
from specrl_jax.settings import schema

SCHEMA = schema()

# rule → values that break it
BROKEN = {
    "text": [None, 3, ["a"]],
    r'texts separated by blanks, or a JSON list like ["\n\n", "Final answer: "]': [
        " ",
        "\n",
        "a\nb",
        r"\n",
        r"a \n\n",
        '["a',
        "['a']",
        '["a", 1]',
        '["a", ""]',
        '["\\ud83d"]',
        "a\udcff",
    ],
    "True or False": [None, 1, "no"],
    "a number": [None, "1", math.nan, True],
    "an integer": [None, "1", 2.5, True],
    "finite": [math.inf, -math.inf, 1e39],
    ">= 0 and finite": [-0.1, math.inf, 1e39],
    "in [0, 1)": [-0.1, 1.0],
    "in (0, 1]": [0.0, 1.1],
    "1 or 2": [0, 3],
    "0 (off) or in (1, 1e6]": [1.0, -3.0, 1e7, math.inf],
    "0 (greedy) or in [0.01, 100]": [0.001, -1.0, 101.0, math.inf],
}
SPEED = {"curriculum.name": "speed"}
DAPO = {"algorithm.dynamic_sampling": True}
GUESS = {"environment.name": "guess"}
GAME = {"data.source": "textarena", "data.name": "2048-v0"}
PLAYED = {"environment.name": "textarena:2048-v0"}
SOLUTIONS = {"algorithm.solution_coef": 1.0}
MATCH = {"rollout.accept": "match"}
RECOMPUTE = {"updates.old_logprobs": "recompute"}
KEPT_MASK = {"rollout.top_k": 4, "algorithm.keep_sampling_mask": True}
LONE = {"rollout.group_size": 1, "updates.mini_batch_size": 4}
CURRENT = {"updates.old_logprobs": "current"}
ONE_UPDATE = {"updates.mini_batch_size": 32}
TURNS = {"algorithm.advantage": "turn", "environment.name": "guess"}
FORKS = MATCH | {"treepo.segment": 2}
GDPO = {"algorithm.advantage": "gdpo", "reward.name": "exact+format"}
DPO = {"algorithm.advantage": "pair", "algorithm.objective": "dpo", "algorithm.kl_coef": 0.1}
PAIRS = {"updates.select": "outer_pairs"}
BUDGET = {"updates.token_budget": 20}
# changes, the field that is refused, words of its rule
IMPOSSIBLE = [
    ({"updates.mini_batch_size": 5}, "updates.mini_batch_size", "a divisor of the 32 responses"),
    ({"train.epochs": 0}, "train.epochs", "train.steps is 0"),
    ({"evaluate.every": 1, "data.eval_prompts": 0}, "data.eval_prompts", "evaluate.every is > 0"),
    ({"reward.overlong_tokens": 7}, "reward.overlong_tokens", "<= rollout.response_len = 6"),
    ({"algorithm.advantage": "gae"}, "algorithm.advantage", "auto or group or .* or tree"),
    (LONE, "rollout.group_size", ">= 2 where critic.kind is none"),
    (LONE | DAPO | {"critic.kind": "head"}, "rollout.group_size", "dynamic_sampling is True"),
    (SPEED | {"curriculum.screening": 3}, "curriculum.screening", "a divisor of .* = 8"),
    (SPEED | {"curriculum.screening": 8}, "curriculum.screening", "a divisor of .* = 8 and less"),
    (SPEED | {"curriculum.screening": 1}, "curriculum.screening", ">= 2 where curriculum.name is"),
    (SPEED | {"curriculum.low": 1.0}, "curriculum.low", "< curriculum.high = 1.0"),
    ({"rollout.draft": "head", "rollout.head.depth": 8}, "rollout.head.depth", "< .*max_width = 8"),
    ({"rollout.store_prompts": 3}, "rollout.store_prompts", ">= rollout.prompts_per_step = 4"),
    ({"rollout.run_ahead": True}, "rollout.run_ahead", "False where rollout.accept is"),
    (RECOMPUTE | {"rollout.partial": 1}, "updates.old_logprobs", "rollout.partial is > 0"),
    (KEPT_MASK | {"rollout.partial": 1}, "updates.packing", "True and rollout.partial is > 0"),
    (KEPT_MASK | {"curriculum.name": "speed"}, "updates.packing", "curriculum.name is speed"),
    (KEPT_MASK | SOLUTIONS, "algorithm.solution_coef", "0 where algorithm.keep_sampling_mask"),
    (RECOMPUTE | SPEED, "updates.old_logprobs", "curriculum.name is speed"),
    (RECOMPUTE | DAPO, "updates.old_logprobs", "dynamic_sampling is True"),
    (CURRENT, "updates.old_logprobs", "a rollout feeds 2 updates"),
    (CURRENT | ONE_UPDATE | {"updates.passes": 2}, "updates.old_logprobs", "feeds 2 updates"),
    (CURRENT | ONE_UPDATE | DAPO, "updates.old_logprobs", "dynamic_sampling is True"),
    ({"rollout.staleness": 2, "updates.old_logprobs": "recompute"}, "algorithm.importance_cap",
     "> 0 where rollout.staleness is 2 and updates.old_logprobs is recompute"),
    ({"curriculum.name": "mopps", "rollout.partial": 4}, "rollout.partial", "is mopps"),
    ({"algorithm.advantage": "turn"}, "environment.name", "an environment where .* is turn"),
    (TURNS | {"updates.select": "outer_pairs"}, "updates.select", "all where .* is turn"),
    (TURNS | DAPO, "algorithm.dynamic_sampling", "False where .* is turn"),
    ({"algorithm.advantage": "tree"}, "algorithm.advantage", "treepo.segment is 0"),
    (FORKS | {"treepo.segment": 6}, "treepo.segment", "< rollout.response_len = 6"),
    (FORKS | {"treepo.roots": 9}, "treepo.roots", "<= rollout.group_size = 8"),
    (FORKS | {"rollout.accept": "ratio"}, "rollout.accept", "match where treepo.segment is"),
    (FORKS | {"rollout.noise_epochs": 2, "rollout.noise_refresh": 0.5}, "rollout.noise_refresh",
     "0 where treepo.segment is"),
    (FORKS | {"rollout.run_ahead": True}, "rollout.run_ahead", "treepo.segment is > 0"),
    (FORKS | {"rollout.partial": 2}, "rollout.partial", "treepo.segment is > 0"),
    (FORKS | GUESS, "environment.name", "treepo.segment is > 0"),
    (FORKS | SPEED, "curriculum.name", "does not screen where treepo.segment is"),
    (GUESS | {"rollout.partial": 4}, "rollout.partial", "environment.name is set"),
    (GUESS | {"rollout.accept": "random"}, "rollout.accept", "environment.name is set"),
    ({"model.source": "a/b"}, "tokenizer.source", "of a model where model.source is 'a/b'"),
    ({"tokenizer.chat": True}, "tokenizer.chat", "tokenizer.source is characters"),
    ({"sft.steps": 1, "data.source": "jsonl"}, "sft.mistake_rate", "data.source is jsonl"),
    ({"sft.steps": 1, "data.solution_field": "b"}, "sft.mistake_rate", "field is 'b'"),
    ({"sft.steps": 1, "sft.examples": 0}, "sft.examples", "> 0 where data.source is sort"),
    (GUESS | {"sft.steps": 1, "data.source": "guess"}, "sft.steps", "source is guess"),
    (GUESS | GAME, "environment.name", "textarena:2048-v0 where data.source is textarena"),
    (GAME | PLAYED | {"sft.steps": 1}, "sft.steps", "source is textarena"),
    (GUESS | SOLUTIONS, "algorithm.solution_coef", "0 where environment.name is set"),
    (SOLUTIONS | {"critic.kind": "head"}, "algorithm.solution_coef", "0 where critic.kind is head"),
    (SOLUTIONS | DAPO, "algorithm.solution_coef", "0 where algorithm.dynamic_sampling is True"),
    (SOLUTIONS | SPEED, "algorithm.solution_coef", "0 where curriculum.name is speed"),
    ({"reward.name": "reasoning_gym", "data.source": "jsonl"}, "reward.name", "is jsonl"),
    ({"reward.name": "exact+reasoning_gym"}, "reward.name", "is sort .reasoning_gym scores only"),
    (GDPO | {"reward.name": "exact"}, "reward.name", "a sum of functions where .* is gdpo"),
    (GDPO | {"reward.threshold": 1.0}, "reward.threshold", "0 where algorithm.advantage is gdpo"),
    (GDPO | GUESS, "environment.name", '"" where algorithm.advantage is gdpo'),
    (GDPO | DAPO, "algorithm.dynamic_sampling", "False where algorithm.advantage is gdpo"),
    (GDPO | SPEED, "curriculum.name", "does not screen where algorithm.advantage is gdpo"),
    ({"algorithm.advantage": "pair"}, "algorithm.advantage", "another one than pair"),
    (DPO | {"algorithm.advantage": "group"}, "algorithm.advantage", "pair where .* is dpo"),
    (DPO | {"algorithm.kl_coef": 0.0}, "algorithm.kl_coef", "> 0 where .* is dpo"),
    (DPO | {"algorithm.aggregation": "sequence"}, "algorithm.aggregation", "token or constant"),
    (DPO | {"algorithm.importance_cap": 2.0}, "algorithm.importance_cap", "0 where .* is dpo"),
    (DPO | SOLUTIONS, "algorithm.solution_coef", "0 where .* is dpo"),
    (DPO | {"updates.mini_batch_size": 4, "updates.micro_batch_size": 4},
     "updates.mini_batch_size", "a multiple of rollout.group_size = 8"),
    (DPO | SPEED | {"curriculum.reuse_screening": False, "updates.mini_batch_size": 8},
     "curriculum.reuse_screening", "True where algorithm.objective is dpo"),
    (PAIRS | {"rollout.group_size": 6, "updates.mini_batch_size": 8}, "updates.select",
     "all where a step trains on groups of 6"),
    (PAIRS | DPO, "updates.select", "all where algorithm.objective is dpo"),
    (PAIRS | {"critic.kind": "head"}, "critic.kind", "none where updates.select is outer_pairs"),
    (PAIRS | SOLUTIONS, "algorithm.solution_coef", "0 where updates.select is outer_pairs"),
    (PAIRS | BUDGET, "updates.token_budget", "0 where updates.select is outer_pairs"),
    ({"updates.token_budget": 5}, "updates.token_budget", r"0 or in \[6, 96\]"),
    ({"updates.token_budget": 97}, "updates.token_budget", r"0 or in \[6, 96\]"),
    (BUDGET | DPO, "updates.token_budget", "0 where algorithm.objective is dpo"),
    (BUDGET | SOLUTIONS, "algorithm.solution_coef", "0 where updates.token_budget is > 0"),
    (BUDGET | {"algorithm.aggregation": "sequence"}, "algorithm.aggregation",
     "token where updates.token_budget is > 0"),
    ({"model.num_kv_heads": 3}, "model.num_kv_heads", "a divisor of model.num_heads = 4"),
    ({"model.head_dim": 3}, "model.head_dim", "even"),
]  # fmt: skip


def _line(changes: dict) -> str:
    return line_of(SCHEMA.validate, small_runs.small_config(changes))


def _breaking(rule: str) -> list:
    """Values just beyond the bounds that the words of a rule name."""
    if bound := re.fullmatch(r"([<>]=) (-?\d+)( \(.*\))?", rule):
        return [int(bound[2]) + (1 if bound[1] == "<=" else -1)]
    if bounds := re.fullmatch(r"in \[(\S+), (\S+)\]", rule):
        low, high = map(float, bounds.groups())
        return [math.nextafter(low, -math.inf), high * 1.001, -math.inf, math.inf]
    return BROKEN[rule]


@pytest.mark.parametrize(
    ("field", "rule"),
    [(field, rule) for field, row in SCHEMA.fields.items() for rule, _ in row.kind.rules],
)
def test_a_broken_rule_names_field_rule_and_value(field, rule):
    config = small_runs.small_config()
    for value in _breaking(rule):
        small_runs.set_field(config, field, value)
        assert line_of(SCHEMA.validate, config) == f"{field} must be {rule}, got {value!r}"


def test_fields_that_are_missing_or_none_of_the_config():
    config = small_runs.small_config()
    config.rollout.leniense = 1.0  # as a config file may
    with pytest.raises(ValueError, match=r"^rollout.leniense is not a field of the config; see "):
        SCHEMA.validate(config)
    del config.rollout.leniense, config.rollout.lenience
    with pytest.raises(ValueError, match=r"^rollout.lenience must be set \(1 missing\); see "):
        SCHEMA.validate(config)


@pytest.mark.parametrize(
    "field", [field for field, row in SCHEMA.fields.items() if row.kind.choices()]
)
def test_an_unknown_choice_lists_the_known_ones(field):
    known = ", ".join(SCHEMA.fields[field].kind.choices())
    assert _line({field: "no"}) == f"{field} must be one of {known}, got 'no'"


@pytest.mark.parametrize(("changes", "field", "words"), IMPOSSIBLE)
def test_impossible_combinations(changes, field, words):
    value = dict(flatten(small_runs.small_config(changes)))[field]
    rule = rf"{re.escape(field)} must be [^\n]*{words}[^\n]*, got {re.escape(repr(value))}"
    assert re.fullmatch(rule, _line(changes))


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"rollout.partial": 2, "rollout.run_ahead": True}, "rollout.partial, rollout.run_ahead"),
        (DAPO | {"rollout.run_ahead": True}, "rollout.run_ahead, algorithm.dynamic_sampling"),
        (DAPO | {"rollout.partial": 2}, "rollout.partial, algorithm.dynamic_sampling"),
        (SPEED | {"rollout.partial": 2}, "rollout.partial, curriculum.name"),
    ],
)
def test_two_recipes_for_one_slot_are_refused(changes, fields):
    first, second = fields.split(", ")
    line = _line(MATCH | changes)
    assert line.startswith(f"{first} and {second} must not be set together, as each is the run's ")


@pytest.mark.parametrize("name", ["smollm2", "gemma3_270m", "qwen3_0p6b", "gemma3_1b"])
def test_presets_of_one_device_take_eight_too(make_mesh, name):
    config = small_runs.preset(name, "one_device")
    SCHEMA.check_mesh(config, make_mesh(1, 8, 1))


@pytest.mark.parametrize(("name", "config"), cli.presets().items())
def test_every_preset_is_valid_and_has_all_fields(name, config):
    SCHEMA.validate(config)
    fields = {field for field, _ in flatten(config) if not field.startswith(tuple(SCHEMA.options))}
    assert fields == SCHEMA.fields.keys()
    idle = {field for field in SCHEMA.fields if SCHEMA.without_effect(config, field)}
    assert idle  # sections that are off keep their defaults
    assert idle.isdisjoint({"rollout.draft", "model.source", "updates.learning_rate"})


def test_every_file_has_its_presets():
    """Eight of grpo, ppo, dapo and lenience_sweep, two of multiturn, five of one_device, a tool."""
    assert len(cli.presets()) == 4 * 8 + 2 + 5 + 1


def test_values_at_the_limits_are_taken():
    for lenience in (0.0, math.inf):
        SCHEMA.validate(small_runs.small_config({"rollout.lenience": lenience}))
    for name in ("k2", "k1+", "k3+"):
        penalty = {"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": name}
        SCHEMA.validate(small_runs.small_config(penalty))


def test_a_preset_that_multiturn_does_not_have():
    with pytest.raises(ValueError, match=r"^preset must be tiny or micro, got 'gsm8k'"):
        small_runs.preset("gsm8k", "multiturn")


@pytest.mark.parametrize(
    ("changes", "field", "fits", "value"),
    [
        ({"rollout.prompts_per_step": 6}, "rollout.prompts_per_step", "4 or 8 fits", 6),
        ({"rollout.partial": 2}, "rollout.partial", "4 fits", 2),
        ({"sft.batch_size": 3, "sft.steps": 1}, "sft.batch_size", "4 fits", 3),
        ({"evaluate.batch_size": 9, "evaluate.every": 1}, "evaluate.batch_size", "8 or 12 fits", 9),
    ],
)  # fmt: skip
def test_batches_that_the_mesh_cannot_cut(make_mesh, changes, field, fits, value):
    SCHEMA.check_mesh(small_runs.small_config(), make_mesh(2, 2, 2))
    rule = f"divisible by mesh.data x mesh.fsdp = 4 ({fits})"
    line = line_of(SCHEMA.check_mesh, small_runs.small_config(changes), make_mesh(2, 2, 2))
    assert line == f"{field} must be {rule}, got {value}"


def test_batches_that_the_mesh_of_rollouts_cannot_cut(make_mesh):
    """Updates have a mesh of their own, which cuts mini-batches alone."""
    config = small_runs.small_config({"updates.mini_batch_size": 2})
    SCHEMA.check_mesh(config, make_mesh(2, 1, 1), make_mesh(4, 1, 1))
    line = line_of(SCHEMA.check_mesh, config, make_mesh(2, 1, 1), make_mesh(8, 1, 1))
    rule = "divisible by mesh.rollout_devices / mesh.tensor = 8 (8 fits)"
    assert line == f"rollout.prompts_per_step must be {rule}, got 4"


def test_a_lossy_rule_without_a_weight_is_refused_with_importance_cap(monkeypatch):
    class Lossy(acceptance.AcceptanceRule):
        pass

    monkeypatch.setitem(acceptance.ACCEPTANCE_RULES, "lossy", Lossy)
    SCHEMA.validate(small_runs.small_config({"rollout.accept": "lossy"}))
    line = _line({"rollout.accept": "lossy", "algorithm.importance_cap": 2.0})
    assert line.startswith("algorithm.importance_cap must be 0 ")
