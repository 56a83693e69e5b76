"""When a field has an effect, and what is said of one that was given and has none."""

from typing import NamedTuple

import pytest
import small_runs
from small_runs import line_of

from specrl_jax.command_line import cli
from specrl_jax.config.fields import NEW_RUN, RESUMED
from specrl_jax.settings import schema

SCHEMA = schema()

NONE = {"rollout.draft": "none"}
TREE = {"rollout.draft": "tree"}
RATIO = {"rollout.accept": "ratio"}
BLOCK = {"rollout.accept": "block"}
PPO = {"critic.kind": "network"}
GUESS = {"environment.name": "guess", "data.source": "guess", "sft.steps": 0}
HF = {"model.source": "a/b", "tokenizer.source": ""}
CURRENT = {"updates.old_logprobs": "current"}
DPO = {"algorithm.objective": "dpo", "algorithm.kl_coef": 0.1}
FILE = {"data.source": "jsonl", "data.path": __file__, "sft.steps": 0}


class Idle(NamedTuple):
    """Fields without an effect, and the reason."""

    changes: dict  # of `tiny`
    decides: str  # the field that takes the effect away
    now: str  # its value, as the error shows it
    better: str  # a value that would give an effect
    fields: dict  # that have no effect, with a value each


IDLE_BY_REASON = [
    Idle(HF, "model.source", "a/b", "",
     {"model.family": "llama", "model.embed_dim": 64, "model.mlp_dim": 64, "model.num_layers": 1,
      "model.num_heads": 8, "model.num_kv_heads": 4, "model.head_dim": 64,
      "model.rope_theta": 1000000.0, "model.tie_embeddings": False}),
    Idle({}, "lora.rank", "0", "8", {"lora.alpha": 32.0, "lora.targets": "q_proj"}),
    Idle(HF, "tokenizer.source", "''", "characters", {"tokenizer.alphabet": "01"}),
    Idle({}, "tokenizer.chat", "False", "True",
     {"tokenizer.system_prompt": "Hi", "tokenizer.continue_final_message": True}),
    Idle({}, "data.source", "sort", "jsonl",
     {"data.path": "x.jsonl", "data.eval_path": "x.jsonl", "data.split": "test"}),
    Idle(GUESS, "data.source", "guess", "jsonl", {"data.path": "x.jsonl"}),
    Idle(FILE, "data.path", __file__, "FOLDER", {"data.split": "test", "data.eval_split": "test"}),
    Idle({"data.render": "a:b"}, "data.render", "a:b", "",
     {"data.prompt_field": "q", "data.answer_field": "a", "data.answer_pattern": "(a)"}),
    Idle({"sft.steps": 0}, "sft.steps", "0", "100",
     {"data.solution_field": "s", "sft.batch_size": 8, "sft.examples": 8,
      "sft.mistake_rate": 0.1, "sft.learning_rate": 0.1}),
    Idle(GUESS, "environment.name", "guess", "",
     {"reward.name": "math", "reward.format": ".*"}),
    Idle({}, "reward.name", "exact", "math+format", {"reward.format": ".*"}),
    Idle({"reward.name": "format"}, "reward.name", "format", "math",
     {"reward.thought_tags": "[T] [/T]"}),
    Idle({}, "tokenizer.source", "characters", "", {"reward.keep_special_tokens": True}),
    Idle({}, "rollout.stop", "''", "'</answer>'", {"reward.keep_stop": False}),
    Idle({}, "reward.overlong_tokens", "0", "4", {"reward.overlong_penalty": 1.0}),
    Idle({}, "algorithm.advantage", "auto", "turn", {"algorithm.turn_discount": 0.5}),
    Idle(NONE, "rollout.draft", "none", "previous",
     {"rollout.draft_age": 2, "rollout.accept": "ratio", "rollout.lenience": 2.0,
      "rollout.store_prompts": 64, "algorithm.importance_cap": 2.0}),
    Idle(TREE, "rollout.draft", "tree", "previous", {"rollout.draft_age": 2}),
    Idle({}, "rollout.accept", "match", "ratio",
     {"rollout.lenience": 2.0}),
    Idle(BLOCK, "rollout.accept", "block", "ratio",
     {"rollout.lenience": 0.0, "algorithm.importance_cap": 2.0}),
    Idle(RATIO, "rollout.accept", "ratio", "match",
     {"rollout.noise_epochs": 4, "rollout.noise_refresh": 0.5}),
    Idle({"rollout.noise_epochs": 1}, "rollout.noise_epochs", "1", "4",
     {"rollout.noise_refresh": 0.5}),
    Idle({}, "rollout.accept", "match", "block", {"rollout.stored_logprobs": 8}),
    Idle({}, "rollout.draft", "previous", "tree",
     {"rollout.tree.history": 4, "rollout.tree.depth": 4, "rollout.tree.factor": 1.0,
      "rollout.tree.offset": 1.0, "rollout.tree.min_prob": 0.5, "rollout.max_width": 4}),
    Idle(RATIO, "rollout.draft", "previous", "tree", {"rollout.adaptive": True}),
    Idle({}, "treepo.segment", "0", "4",
     {"treepo.roots": 4, "treepo.branches": 3}),
    Idle(TREE | {"rollout.tree.history": 1}, "rollout.tree.history", "1", "2",
     {"rollout.tree.decay": 0.5}),
    Idle(TREE, "rollout.draft", "tree", "head", {"rollout.head.learning_rate": 0.1}),
    Idle({}, "rollout.draft", "previous", "head",
     {"rollout.head.depth": 2, "rollout.head.vocab": 8}),
    Idle({"rollout.draft": "head"}, "rollout.draft", "head", "previous", {"rollout.store_age": 9}),
    Idle({}, "environment.name", "''", "guess",
     {"environment.max_turns": 4, "environment.allow_unfinished": 0.25,
      "environment.on_timeout": "tell"}),
    Idle(PPO, "critic.kind", "network", "none",
     {"algorithm.normalize_std": False, "algorithm.leave_one_out": True,
      "updates.skip_no_signal": True}),
    Idle({"algorithm.objective": "cispo"}, "algorithm.objective", "cispo", "clip",
     {"algorithm.dual_clip": 3.0}),
    Idle(DPO, "algorithm.objective", "dpo", "clip",
     {"algorithm.ratio": "sequence", "algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1,
      "algorithm.dual_clip": 4.0, "algorithm.kl_estimator": "k2", "algorithm.normalize_std": False,
      "algorithm.leave_one_out": True, "algorithm.mask.truncated": True}),
    Idle(CURRENT, "updates.old_logprobs", "current", "rollout",
     {"algorithm.ratio": "sequence", "algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1,
      "algorithm.dual_clip": 4.0}),
    Idle({}, "rollout.top_k", "0", "20", {"algorithm.keep_sampling_mask": True}),
    Idle({}, "distill.teacher", "''", "MODEL",
     {"distill.coef": 2.0, "distill.estimator": "score", "distill.reward_weight": 1.0}),
    Idle({}, "algorithm.kl_coef", "0.0", "0.001", {"algorithm.kl_estimator": "k2"}),
    Idle({}, "algorithm.dynamic_sampling", "False", "True", {"algorithm.max_gen_batches": 4}),
    Idle({}, "critic.kind", "none", "head",
     {"critic.learning_rate": 0.001, "critic.lr_warmup_steps": 1, "critic.critic_only_steps": 1,
      "critic.coef": 0.5, "critic.clip": 0.2, "critic.gamma": 1.0, "critic.gae_lambda": 1.0}),
    Idle({}, "curriculum.name", "uniform", "speed",
     {"curriculum.screening": 4, "curriculum.low": 0.1, "curriculum.high": 0.9,
      "curriculum.reuse_screening": False}),
    Idle({}, "curriculum.name", "uniform", "mopps",
     {"curriculum.candidates": 2.0, "curriculum.target": 0.5}),
    Idle({"curriculum.name": "speed"}, "curriculum.name", "speed", "mopps",
     {"curriculum.decay": 0.5}),
    Idle({}, "curriculum.name", "uniform", "easy_to_hard",
     {"curriculum.difficulty": "prompt_len", "curriculum.levels": 2,
      "curriculum.schedule": "cosine"}),
    Idle({}, "curriculum.name", "uniform", "mopps", {"curriculum.select": "threshold"}),
    Idle({"curriculum.name": "easy_to_hard", "curriculum.schedule": "cosine"},
     "curriculum.schedule", "cosine", "gaussian",
     {"curriculum.sigma": 1.0, "curriculum.mean_exponent": 1.0, "curriculum.floor": False}),
    Idle({"curriculum.name": "mopps", "curriculum.select": "threshold"}, "curriculum.select",
     "threshold", "nearest", {"curriculum.target": 0.4}),
    Idle({"algorithm.kl_coef": 0.5}, "algorithm.kl_coef", "0.5", "0",
     {"updates.skip_no_signal": True}),
    Idle({"algorithm.entropy_coef": 0.5}, "algorithm.entropy_coef", "0.5", "0",
     {"updates.skip_no_signal": True}),
    Idle({}, "rollout.staleness", "0", "1", {"mesh.rollout_devices": 2}),
    Idle({"train.steps": 8}, "train.steps", "8", "0", {"train.epochs": 2}),
    Idle({"evaluate.every": 0}, "evaluate.every", "0", "8",
     {"evaluate.samples": 4, "checkpoint.keep_best": 2}),
    Idle({"evaluate.temperature": 0.0}, "evaluate.temperature", "0.0", "1.0",
     {"evaluate.samples": 4}),
]  # fmt: skip
IDLE = [
    (field, value, reason) for reason in IDLE_BY_REASON for field, value in reason.fields.items()
]
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
    ("algorithm.importance_cap", 2.0, CURRENT),
    ("algorithm.max_gen_batches", 4, {"curriculum.name": "speed"}),
    ("data.split", "test", FILE | {"data.path": "folder"}),
    ("data.eval_path", "x.jsonl", GUESS),
    ("data.eval_split", "test", FILE | {"data.eval_path": "folder"}),
    ("data.solution_field", "s", {"algorithm.solution_coef": 0.1, "sft.steps": 0}),
    ("reward.timeout", 1.0, {}),
]


def _config(field, value, changes):
    config = small_runs.preset("tiny")
    config.update_from_flattened_dict(changes | {field: value})
    return config


@pytest.mark.parametrize(("field", "value", "reason"), IDLE)
def test_a_field_that_was_given_and_does_nothing_is_refused(field, value, reason):
    config = _config(field, value, reason.changes)
    flag = f"--config.{reason.decides}={reason.better}"
    line = f"{field} has no effect with {reason.decides} = {reason.now}; add {flag}"
    assert line_of(SCHEMA.validate, config, given=[field]) == line
    assert SCHEMA.without_effect(config, field) == line
    config = cli.override(config, [flag])
    assert f"with {reason.decides} = " not in SCHEMA.without_effect(config, field)


def test_options_that_nobody_reads_are_refused():
    config = _config("data.source", "jsonl", {"sft.steps": 0})
    config.tokenizer.template_options.mine = 1
    config.data.options.mine = 1
    assert line_of(SCHEMA.validate, config, given=["tokenizer.template_options.mine"]) == (
        "tokenizer.template_options.mine has no effect with tokenizer.chat = False; add "
        "--config.tokenizer.chat=True"
    )
    assert line_of(SCHEMA.validate, config, given=["data.options.mine"]) == (
        "data.options.mine has no effect with data.source = jsonl; add --config.data.source=hf"
    )
    config.data.source = "hf"
    assert SCHEMA.without_effect(config, "data.options.mine") == ""


@pytest.mark.parametrize(("field", "value", "changes"), ALLOWED)
def test_a_field_that_does_something_is_taken(field, value, changes):
    assert SCHEMA.without_effect(_config(field, value, changes), field) == ""


def test_every_condition_is_in_the_table():
    conditions = {when for row in SCHEMA.fields.values() for when in row.when}
    met = set()
    for field, value, reason in IDLE:
        config = _config(field, value, reason.changes)
        met.add(next(when for when in SCHEMA.fields[field].when if not SCHEMA.holds(when, config)))
    assert conditions == met
    assert {field for field, row in SCHEMA.fields.items() if row.when} == {
        field for field, *_ in IDLE
    }


def test_what_holds_without_an_effect_is_a_value_of_the_field():
    for field, row in SCHEMA.fields.items():
        for value in (row.neutral, row.task, row.files):
            assert value is None or not row.kind.broken(value), field


def test_what_may_change_later():
    resumed = set(SCHEMA.may_change(RESUMED))
    assert {"log", "checkpoint", "mesh", "train", "model.attention"} <= resumed
    assert {"evaluate.every", "evaluate.samples", "evaluate.batch_size"} <= resumed
    assert len(resumed) == 8
    begun = set(SCHEMA.may_change(RESUMED, NEW_RUN))
    assert resumed - begun == {"evaluate.every", "evaluate.samples", "evaluate.batch_size"}
    assert {"evaluate", "updates", "reward", "critic.clip", "algorithm.kl_coef"} <= begun
    assert begun.isdisjoint({"algorithm", "rollout", "data", "critic", "seed", "lora.rank"})
