"""When a field has an effect, and what is said of one that was given and has none."""

import pytest
import small_runs
from small_runs import line_of

from specrl_jax.config import cli, validate
from specrl_jax.config.fields import FIELDS, ORIGIN, RUN, may_change, without_effect

NONE = {"rollout.draft": "none"}
TREE = {"rollout.draft": "tree"}
RATIO = {"rollout.accept": "ratio"}
BLOCK = {"rollout.accept": "block"}
PPO = {"critic.kind": "network"}
GUESS = {"environment.name": "guess", "data.source": "guess", "warmup.steps": 0}
HF = {"model.source": "a/b", "tokenizer.source": ""}
FILE = {"data.source": "jsonl", "data.path": __file__, "warmup.steps": 0}
# fields, their value, other changes of `tiny`, and what follows "has no effect with ".
IDLE = [
    ("model.family", "llama", HF, "model.source = a/b; add --config.model.source="),
    ("model.embed_dim", 64, HF, "model.source = a/b; add --config.model.source="),
    ("model.mlp_dim", 64, HF, "model.source = a/b; add --config.model.source="),
    ("model.num_layers", 1, HF, "model.source = a/b; add --config.model.source="),
    ("model.num_heads", 8, HF, "model.source = a/b; add --config.model.source="),
    ("model.num_kv_heads", 4, HF, "model.source = a/b; add --config.model.source="),
    ("model.head_dim", 64, HF, "model.source = a/b; add --config.model.source="),
    ("model.rope_theta", 1e6, HF, "model.source = a/b; add --config.model.source="),
    ("model.tie_embeddings", False, HF, "model.source = a/b; add --config.model.source="),
    ("lora.alpha", 32.0, {}, "lora.rank = 0; add --config.lora.rank=8"),
    ("lora.targets", "q_proj", {}, "lora.rank = 0; add --config.lora.rank=8"),
    ("tokenizer.alphabet", "01", HF, "tokenizer.source = ''; add "
     "--config.tokenizer.source=characters"),
    ("tokenizer.system_prompt", "Hi", {}, "tokenizer.chat = False; add "
     "--config.tokenizer.chat=True"),
    ("tokenizer.continue_final_message", True, {}, "tokenizer.chat = False; add "
     "--config.tokenizer.chat=True"),
    ("data.path", "x.jsonl", {}, "data.source = sort; add --config.data.source=jsonl"),
    ("data.path", "x.jsonl", GUESS, "data.source = guess; add --config.data.source=jsonl"),
    ("data.eval_path", "x.jsonl", {}, "data.source = sort; add --config.data.source=jsonl"),
    ("data.split", "test", {}, "data.source = sort; add --config.data.source=jsonl"),
    ("data.split", "test", FILE, f"data.path = {__file__}; add --config.data.path=FOLDER"),
    ("data.eval_split", "test", FILE, f"data.path = {__file__}; add --config.data.path=FOLDER"),
    ("data.prompt_field", "q", {"data.render": "a:b"}, "data.render = a:b; add "
     "--config.data.render="),
    ("data.answer_field", "a", {"data.render": "a:b"}, "data.render = a:b; add "
     "--config.data.render="),
    ("data.answer_pattern", "(a)", {"data.render": "a:b"}, "data.render = a:b; add "
     "--config.data.render="),
    ("data.solution_field", "s", {"warmup.steps": 0}, "warmup.steps = 0; add "
     "--config.warmup.steps=100"),
    ("reward.name", "math", GUESS, "environment.name = guess; add --config.environment.name="),
    ("reward.extract", "(a)", GUESS, "environment.name = guess; add --config.environment.name="),
    ("reward.format", ".*", GUESS, "environment.name = guess; add --config.environment.name="),
    ("reward.format", ".*", {}, "reward.name = exact; add --config.reward.name=math+format"),
    ("reward.thought_tags", "[T] [/T]", GUESS, "environment.name = guess; add "
     "--config.environment.name="),
    ("reward.thought_tags", "[T] [/T]", {"reward.name": "format"}, "reward.name = format; add "
     "--config.reward.name=math"),
    ("reward.keep_special_tokens", True, {}, "tokenizer.source = characters; add "
     "--config.tokenizer.source="),
    ("reward.overlong_penalty", 1.0, {}, "reward.overlong_tokens = 0; add "
     "--config.reward.overlong_tokens=4"),
    ("rollout.draft_age", 2, NONE, "rollout.draft = none; add --config.rollout.draft=previous"),
    ("rollout.draft_age", 2, TREE, "rollout.draft = tree; add --config.rollout.draft=previous"),
    ("rollout.accept", "ratio", NONE, "rollout.draft = none; add --config.rollout.draft=previous"),
    ("rollout.lenience", 2.0, NONE, "rollout.draft = none; add --config.rollout.draft=previous"),
    ("rollout.lenience", 2.0, {}, "rollout.accept = match; add --config.rollout.accept=ratio"),
    ("rollout.lenience", 0.0, BLOCK, "rollout.accept = block; add --config.rollout.accept=ratio"),
    ("rollout.draft_refresh", 0.1, {}, "rollout.accept = match; add --config.rollout.accept=ratio"),
    ("rollout.refresh_unsolved", 0.5, BLOCK, "rollout.accept = block; add "
     "--config.rollout.accept=ratio"),
    ("rollout.noise_epochs", 4, RATIO, "rollout.accept = ratio; add --config.rollout.accept=match"),
    ("rollout.noise_refresh", 0.5, RATIO, "rollout.accept = ratio; add "
     "--config.rollout.accept=match"),
    ("rollout.noise_refresh", 0.5, {"rollout.noise_epochs": 1}, "rollout.noise_epochs = 1; add "
     "--config.rollout.noise_epochs=4"),
    ("rollout.stored_logprobs", 8, {}, "rollout.accept = match; add --config.rollout.accept=block"),
    ("rollout.tree.history", 4, {}, "rollout.draft = previous; add --config.rollout.draft=tree"),
    ("rollout.tree.depth", 4, {}, "rollout.draft = previous; add --config.rollout.draft=tree"),
    ("rollout.tree.factor", 1.0, {}, "rollout.draft = previous; add --config.rollout.draft=tree"),
    ("rollout.tree.offset", 1.0, {}, "rollout.draft = previous; add --config.rollout.draft=tree"),
    ("rollout.tree.min_prob", 0.5, {}, "rollout.draft = previous; add "
     "--config.rollout.draft=tree"),
    ("rollout.tree.decay", 0.5, TREE | {"rollout.tree.history": 1}, "rollout.tree.history = 1; add "
     "--config.rollout.tree.history=2"),
    ("rollout.head.learning_rate", 0.1, TREE, "rollout.draft = tree; add "
     "--config.rollout.draft=head"),
    ("rollout.head.depth", 2, {}, "rollout.draft = previous; add --config.rollout.draft=head"),
    ("rollout.head.vocab", 8, {}, "rollout.draft = previous; add --config.rollout.draft=head"),
    ("rollout.max_width", 4, {}, "rollout.draft = previous; add --config.rollout.draft=tree"),
    ("rollout.adaptive", True, {}, "rollout.draft = previous; add --config.rollout.draft=tree"),
    ("rollout.store_prompts", 64, NONE, "rollout.draft = none; add "
     "--config.rollout.draft=previous"),
    ("rollout.store_age", 9, {"rollout.draft": "head"}, "rollout.draft = head; add "
     "--config.rollout.draft=previous"),
    ("environment.max_turns", 4, {}, "environment.name = ''; add --config.environment.name=guess"),
    ("environment.allow_unfinished", 0.5, {}, "environment.name = ''; add "
     "--config.environment.name=guess"),
    ("algorithm.normalize_std", False, PPO, "critic.kind = network; add --config.critic.kind=none"),
    ("algorithm.leave_one_out", True, PPO, "critic.kind = network; add --config.critic.kind=none"),
    ("algorithm.dual_clip", 3.0, {"algorithm.objective": "cispo"}, "algorithm.objective = cispo; "
     "add --config.algorithm.objective=clip"),
    ("algorithm.kl_estimator", "k2", {}, "algorithm.kl_coef = 0.0; add "
     "--config.algorithm.kl_coef=0.001"),
    ("algorithm.importance_cap", 2.0, NONE, "rollout.draft = none; add "
     "--config.rollout.draft=previous"),
    ("algorithm.importance_cap", 2.0, BLOCK, "rollout.accept = block; add "
     "--config.rollout.accept=ratio"),
    ("algorithm.max_gen_batches", 4, {}, "algorithm.dynamic_sampling = False; add "
     "--config.algorithm.dynamic_sampling=True"),
    ("critic.learning_rate", 1e-3, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("critic.schedule_warmup", 1, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("critic.warmup_steps", 1, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("critic.coef", 0.5, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("critic.clip", 0.2, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("critic.gamma", 1.0, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("critic.gae_lambda", 1.0, {}, "critic.kind = none; add --config.critic.kind=head"),
    ("curriculum.screening", 4, {}, "curriculum.name = uniform; add "
     "--config.curriculum.name=speed"),
    ("curriculum.low", 0.1, {}, "curriculum.name = uniform; add --config.curriculum.name=speed"),
    ("curriculum.high", 0.9, {}, "curriculum.name = uniform; add --config.curriculum.name=speed"),
    ("curriculum.reuse_screening", False, {}, "curriculum.name = uniform; add "
     "--config.curriculum.name=speed"),
    ("curriculum.candidates", 2.0, {}, "curriculum.name = uniform; add "
     "--config.curriculum.name=mopps"),
    ("curriculum.target", 0.5, {}, "curriculum.name = uniform; add --config.curriculum.name=mopps"),
    ("curriculum.decay", 0.5, {"curriculum.name": "speed"}, "curriculum.name = speed; add "
     "--config.curriculum.name=mopps"),
    ("curriculum.difficulty", "prompt_len", {}, "curriculum.name = uniform; add "
     "--config.curriculum.name=easy_to_hard"),
    ("curriculum.width", 0.5, {}, "curriculum.name = uniform; add "
     "--config.curriculum.name=easy_to_hard"),
    ("updates.skip_no_signal", True, PPO, "critic.kind = network; add --config.critic.kind=none"),
    ("updates.skip_no_signal", True, {"algorithm.kl_coef": 0.5}, "algorithm.kl_coef = 0.5; add "
     "--config.algorithm.kl_coef=0"),
    ("updates.skip_no_signal", True, {"algorithm.entropy_coef": 0.5}, "algorithm.entropy_coef = "
     "0.5; add --config.algorithm.entropy_coef=0"),
    ("train.epochs", 2, {"train.steps": 8}, "train.steps = 8; add --config.train.steps=0"),
    ("warmup.batch_size", 8, {"warmup.steps": 0}, "warmup.steps = 0; add "
     "--config.warmup.steps=100"),
    ("warmup.examples", 8, {"warmup.steps": 0}, "warmup.steps = 0; add --config.warmup.steps=100"),
    ("warmup.mistake_rate", 0.1, {"warmup.steps": 0}, "warmup.steps = 0; add "
     "--config.warmup.steps=100"),
    ("warmup.learning_rate", 0.1, {"warmup.steps": 0}, "warmup.steps = 0; add "
     "--config.warmup.steps=100"),
    ("evaluate.samples", 4, {"evaluate.every": 0}, "evaluate.every = 0; add "
     "--config.evaluate.every=8"),
    ("checkpoint.keep_best", 2, {"evaluate.every": 0}, "evaluate.every = 0; add "
     "--config.evaluate.every=8"),
]  # fmt: skip
# Field, value, other changes of `tiny`: it has an effect, or its value is what holds anyway.
ALLOWED = [
    ("rollout.noise_epochs", 1, NONE),  # without drafts too noise may be kept
    ("rollout.noise_epochs", 2, TREE | RATIO),  # the rule is of previous drafts alone
    ("rollout.accept", "match", TREE),
    ("rollout.lenience", 1.0, {}),
    ("rollout.lenience", 2.0, RATIO),
    ("rollout.noise_epochs", 1, RATIO),
    ("algorithm.leave_one_out", False, PPO),
    ("algorithm.dual_clip", 0.0, {"algorithm.objective": "cispo"}),
    ("algorithm.importance_cap", 2.0, {"updates.old_logprobs": "recompute"}),
    ("algorithm.max_gen_batches", 4, {"curriculum.name": "speed"}),
    ("data.split", "test", FILE | {"data.path": "folder"}),
    ("data.eval_path", "x.jsonl", GUESS),
    ("data.eval_split", "test", FILE | {"data.eval_path": "folder"}),
    ("data.solution_field", "s", {"algorithm.solution_coef": 0.1, "warmup.steps": 0}),
    ("reward.timeout", 1.0, {}),
]


def _config(field, value, changes):
    config = small_runs.preset("tiny")
    config.update_from_flattened_dict(changes | {field: value})
    return config


@pytest.mark.parametrize(("field", "value", "changes", "remedy"), IDLE)
def test_a_field_that_was_given_and_does_nothing_is_refused(field, value, changes, remedy):
    config = _config(field, value, changes)
    line = f"{field} has no effect with {remedy}"
    assert line_of(validate, config, given=[field]) == line
    assert without_effect(config, field) == line
    # What the line says to add is a value of a field under which its reason is gone.
    other, _, text = remedy.partition("--config.")[2].partition("=")
    config = cli.override(config, [f"--config.{other}={text}"])
    assert f"with {other} = " not in without_effect(config, field)


def test_options_that_nobody_reads_are_refused():
    config = _config("data.source", "jsonl", {"warmup.steps": 0})
    config.tokenizer.template_options.mine = 1
    config.data.options.mine = 1
    assert line_of(validate, config, given=["tokenizer.template_options.mine"]) == (
        "tokenizer.template_options.mine has no effect with tokenizer.chat = False; add "
        "--config.tokenizer.chat=True"
    )
    assert line_of(validate, config, given=["data.options.mine"]) == (
        "data.options.mine has no effect with data.source = jsonl; add --config.data.source=hf"
    )
    config.data.source = "hf"
    assert without_effect(config, "data.options.mine") == ""


@pytest.mark.parametrize(("field", "value", "changes"), ALLOWED)
def test_a_field_that_does_something_is_taken(field, value, changes):
    assert without_effect(_config(field, value, changes), field) == ""


def test_every_condition_is_in_the_table():
    conditions = {when for row in FIELDS.values() for when in row.when}
    met = set()
    for field, value, changes, _ in IDLE:
        config = _config(field, value, changes)
        met.add(next(when for when in FIELDS[field].when if not when.holds(config)))
    assert conditions == met
    assert {field for field, row in FIELDS.items() if row.when} == {field for field, *_ in IDLE}


@pytest.mark.parametrize(("name", "config"), cli.presets().items())
def test_presets_and_defaults_may_do_nothing(name, config):
    validate(config)
    idle = [field for field in FIELDS if without_effect(config, field)]
    assert idle  # sections that are off keep their defaults
    assert set(idle).isdisjoint({"rollout.draft", "model.source", "updates.learning_rate"})


def test_what_holds_without_an_effect_is_a_value_of_the_field():
    for field, row in FIELDS.items():
        for value in (row.idle, row.task, row.files):
            assert value is None or not row.kind.broken(value), field


def test_what_may_change_later():
    resumed = set(may_change(RUN))
    assert {"log", "checkpoint", "mesh", "train", "model.attention"} <= resumed
    assert {"evaluate.every", "evaluate.samples", "evaluate.batch_size"} <= resumed
    assert len(resumed) == 8
    begun = set(may_change(RUN, ORIGIN))
    assert resumed - begun == {"evaluate.every", "evaluate.samples", "evaluate.batch_size"}
    assert {"evaluate", "updates", "reward", "critic.clip", "algorithm.kl_coef"} <= begun
    assert begun.isdisjoint({"algorithm", "rollout", "data", "critic", "seed", "lora.rank"})
