"""Table of the fields: one row a field, in the order of configs/grpo.py, which has its default.

A row says what a field may hold, when it has an effect, who may change it, and whether it belongs
to a task. To add a field, write its line in configs/grpo.py and its row in `FIELDS`. Fields below
`data.options` and `tokenizer.template_options` are free: they have no row (`OPTIONS`).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.config.kinds import (
    ABOVE_ZERO,
    BELOW_ONE,
    BETA,
    FINITE,
    GREEDY_OR_WARM,
    NOT_NEGATIVE,
    OFF_OR_ABOVE_ONE,
    ONE_OR_TWO,
    SHARE,
    STRINGS,
    SWITCH,
    TEXT,
    TOKENS_OF_A_STEP,
    WEIGHT,
    Kind,
    get,
    integer,
    key_of,
    load,
    one_of,
    within,
)
from specrl_jax.inputs import reward_terms

# Effects --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class When:
    """Condition under which a field has an effect."""

    field: str  # whose value decides
    holds: Callable[[ConfigDict], bool]
    value: str | None = None  # of `field` that gives the effect; None: its first choice that does


def meaning(config: ConfigDict, field: str) -> Any:
    """Return what the name in `field` stands for, in the table of its choices."""
    return load(FIELDS[field].kind.table)[get(config, field)]


def _draft(config: ConfigDict) -> Any:
    return meaning(config, "rollout.draft")


def _rule(config: ConfigDict) -> Any:
    return meaning(config, "rollout.accept")


def _old(config: ConfigDict) -> Any:
    return meaning(config, "updates.old_logprobs")


def _chooses_prompts(name: str) -> Callable[[ConfigDict], bool]:
    """Test whether the curriculum is the class of this name."""

    def holds(config: ConfigDict) -> bool:
        return issubclass(meaning(config, "curriculum.name"), load(f"data.curriculum:{name}"))

    return holds


def _has_splits(config: ConfigDict) -> bool:
    root = config.data.path or config.data.name
    return not Path(root).expanduser().is_file()


RANDOM_WEIGHTS = When("model.source", lambda c: not c.model.source, "")
ADAPTERS = When("lora.rank", lambda c: c.lora.rank > 0, "8")
ALPHABET = When(
    "tokenizer.source",
    lambda c: c.tokenizer.source in load("text.tokenizer:OF_ALPHABET"),
    "characters",
)
SPECIAL_TOKENS = When("tokenizer.source", lambda c: not ALPHABET.holds(c), "")
CHAT = When("tokenizer.chat", lambda c: c.tokenizer.chat, "True")
FILES = When("data.source", lambda c: meaning(c, "data.source").reads_files, "jsonl")
DATA_OPTIONS = When("data.source", lambda c: meaning(c, "data.source").takes_options, "hf")
HAS_AN_END = When("data.source", lambda c: not meaning(c, "data.source").endless, "jsonl")
SPLITS = When("data.path", _has_splits, "FOLDER")
EVAL_SPLITS = When("data.path", lambda c: c.data.eval_path or _has_splits(c), "FOLDER")
COLUMNS = When("data.render", lambda c: not c.data.render, "")
SOLUTIONS = When("warmup.steps", lambda c: c.warmup.steps or c.algorithm.solution_coef, "100")
STOP = When("rollout.stop", lambda c: c.rollout.stop, "'</answer>'")
ONE_TURN = When("environment.name", lambda c: not c.environment.name, "")
TURNS = When("environment.name", lambda c: c.environment.name, "guess")
FORMAT = When("reward.name", lambda c: "format" in reward_terms(c.reward.name), "math+format")
ANSWER_PART = When(
    "reward.name",
    lambda c: (
        c.environment.name
        or load("rewards.scorers:reads_answer_part")(c.reward.name, c.reward.extract)
    ),
    "math",
)
OVERLONG = When("reward.overlong_tokens", lambda c: c.reward.overlong_tokens > 0, "4")
PREVIOUS = When("rollout.draft", lambda c: _draft(c).verifies_previous)
STORED = When(
    "rollout.draft", lambda c: _draft(c).verifies_previous or _draft(c).make_source is not None
)
TREE = When("rollout.draft", lambda c: _draft(c).make_source is not None)
HEAD = When("rollout.draft", lambda c: _draft(c).head)
WIDE = When("rollout.draft", lambda c: _draft(c).proposes)
FORKS = When("rollout.fork.segment", lambda c: c.rollout.fork.segment > 0, "4")
GENERATIONS = When(
    "rollout.tree.history", lambda c: c.rollout.tree.history > 1 or c.rollout.run_ahead, "2"
)
LENIENT = When("rollout.accept", lambda c: _rule(c).lenient_share is not None)
VERIFIED = When("rollout.accept", lambda c: not _rule(c).samples_anew)
INEXACT = When("rollout.accept", lambda c: not _rule(c).exact)
DISTRIBUTION = When("rollout.accept", lambda c: _rule(c).needs_distribution)
KEPT_NOISE = When(
    "rollout.accept", lambda c: load("rollout.engine.spec:acceptance_rule")(c).samples_anew
)
SEVERAL_VISITS = When("rollout.noise_epochs", lambda c: c.rollout.noise_epochs > 1, "4")
BY_GROUP = When(
    "critic.kind",
    lambda c: not load("algorithms.advantages:choose_advantage")(c).needs_critic,
    "none",
)
BY_TURN = When(
    "algorithm.advantage",
    lambda c: load("algorithms.advantages:choose_advantage")(c).by_turn,
    "turn",
)
DUAL_CLIP = When(
    "algorithm.objective",
    lambda c: meaning(c, "algorithm.objective") is load("algorithms.losses:clipped_surrogate"),
)


def _compares_pairs(config: ConfigDict) -> bool:
    return load("algorithms.losses:compares_pairs")(config.algorithm.objective)


TOP_K = When("rollout.top_k", lambda c: c.rollout.top_k > 0, "20")
BY_TOKEN = When("algorithm.objective", lambda c: not _compares_pairs(c))
KL = When("algorithm.kl_coef", lambda c: c.algorithm.kl_coef > 0, "0.001")
RATIO = When("updates.old_logprobs", lambda c: not _old(c).one_update)
WEIGHTED_DRAFTS = When("rollout.draft", lambda c: _old(c).by_update or _draft(c).verifies_previous)
WEIGHTED_RULE = When(
    "rollout.accept", lambda c: _old(c).by_update or _rule(c).importance_weight is not None
)
SEVERAL_ROLLOUTS = When(
    "algorithm.dynamic_sampling",
    lambda c: c.algorithm.dynamic_sampling or meaning(c, "curriculum.name").screens,
    "True",
)
CRITIC = When("critic.kind", lambda c: load("algorithms.advantages:has_critic")(c.critic.kind))
NO_CRITIC = When("critic.kind", lambda c: not CRITIC.holds(c), "none")
NO_KL = When("algorithm.kl_coef", lambda c: not c.algorithm.kl_coef or _compares_pairs(c), "0")
NO_ENTROPY = When("algorithm.entropy_coef", lambda c: not c.algorithm.entropy_coef, "0")
SCREENS = When("curriculum.name", lambda c: meaning(c, "curriculum.name").screens)
BY_PASS_RATE = When("curriculum.name", _chooses_prompts("ByPassRate"))
RATES = When(
    "curriculum.name",
    lambda c: SCREENS.holds(c) or (BY_PASS_RATE.holds(c) and not NEAREST.holds(c)),
)
NEAREST = When(
    "curriculum.select",
    lambda c: meaning(c, "curriculum.select") is load("data.curriculum:DISTANCES")["nearest"],
    "nearest",
)
EASY_TO_HARD = When("curriculum.name", _chooses_prompts("EasyToHard"))
GAUSSIAN = When(
    "curriculum.schedule",
    lambda c: meaning(c, "curriculum.schedule") is load("data.curriculum:SCHEDULES")["gaussian"],
    "gaussian",
)
STALE = When("rollout.staleness", lambda c: c.rollout.staleness > 0, "1")
BY_EPOCHS = When("train.steps", lambda c: not c.train.steps, "0")
WARM_UP = When("warmup.steps", lambda c: c.warmup.steps > 0, "100")
SAMPLED = When("evaluate.temperature", lambda c: c.evaluate.temperature > 0, "1.0")
EVALUATED = When("evaluate.every", lambda c: c.evaluate.every > 0, "8")

# Rows -----------------------------------------------------------------------------------------

# When a field may change.
NEW_RUN = "where a new run begins with another run's checkpoint"
RESUMED = "where a run is resumed, and where a new run begins with another run's checkpoint"


@dataclasses.dataclass(frozen=True)
class Field:
    """One row: all that is said of a field, but for its default and its comment."""

    kind: Kind
    when: tuple[When, ...]  # it has an effect where all hold; the first that does not is named
    idle: Any = None  # the one value that may be given where the field has no effect
    may_change: str = ""  # NEW_RUN or RESUMED; "": never, once a run has begun
    task: Any = None  # value for "no task chosen"; None: the field does not depend on the task
    files: Any = None  # the same value where the task comes from files or a data set


def _row(kind: Kind, *when: When, **more: Any) -> Field:
    return Field(kind, when, **more)


FIELDS: dict[str, Field] = {
    "seed": _row(integer()),
    # -- the policy --------------------------------------------------------------------------------
    "model.source": _row(TEXT),
    "model.family": _row(key_of("models.families:FAMILIES"), RANDOM_WEIGHTS),
    "model.embed_dim": _row(integer(1), RANDOM_WEIGHTS),
    "model.mlp_dim": _row(integer(1), RANDOM_WEIGHTS),
    "model.num_layers": _row(integer(1, 4096, "a loop over them is compiled"), RANDOM_WEIGHTS),
    "model.num_heads": _row(integer(1), RANDOM_WEIGHTS),
    "model.num_kv_heads": _row(integer(1), RANDOM_WEIGHTS),
    "model.head_dim": _row(integer(1), RANDOM_WEIGHTS),
    "model.rope_theta": _row(within(1, 1e12), RANDOM_WEIGHTS),
    "model.tie_embeddings": _row(SWITCH, RANDOM_WEIGHTS),
    "model.dtype": _row(one_of("auto", "float32", "bfloat16")),
    "model.attention": _row(one_of("auto", "reference", "kernel"), may_change=RESUMED),
    "model.remat": _row(SWITCH),
    "lora.rank": _row(integer()),
    "lora.alpha": _row(within(1e-6, 1e6), ADAPTERS),
    "lora.targets": _row(TEXT, ADAPTERS),
    "tokenizer.source": _row(TEXT),
    "tokenizer.alphabet": _row(TEXT, ALPHABET),
    "tokenizer.chat": _row(SWITCH),
    "tokenizer.system_prompt": _row(TEXT, CHAT, idle=""),
    "tokenizer.continue_final_message": _row(SWITCH, CHAT, idle=False),
    # -- the task ----------------------------------------------------------------------------------
    "data.source": _row(key_of("data.readers:READERS")),
    "data.name": _row(TEXT, files=""),
    "data.path": _row(TEXT, FILES, idle=""),
    "data.eval_path": _row(TEXT, HAS_AN_END, idle=""),
    "data.render": _row(TEXT, task=""),
    "data.prompt_field": _row(TEXT, COLUMNS),
    "data.answer_field": _row(TEXT, COLUMNS),
    "data.answer_pattern": _row(TEXT, COLUMNS, idle="", task=""),
    "data.solution_field": _row(TEXT, SOLUTIONS, idle="", task=""),
    "data.instruction": _row(TEXT, task=""),
    "data.split": _row(TEXT, FILES, SPLITS),
    "data.eval_split": _row(TEXT, FILES, EVAL_SPLITS, idle=""),
    "data.prompts": _row(integer(), files=0),
    "data.eval_prompts": _row(integer()),
    "data.prompt_len": _row(integer(1)),
    # Where strings are compared, time, memory and workers limit nothing. They have an effect all
    # the same: launch/evaluate.py scores other tasks with them.
    "reward.name": _row(TEXT, ONE_TURN, may_change=NEW_RUN),
    "reward.format": _row(TEXT, ONE_TURN, FORMAT, idle="", may_change=NEW_RUN, task=""),
    "reward.timeout": _row(within(0.01, 86_400), may_change=NEW_RUN),
    "reward.memory_mib": _row(integer(1), may_change=NEW_RUN),
    "reward.readable": _row(TEXT, may_change=NEW_RUN),
    "reward.workers": _row(integer(0, 4096, "processes"), may_change=NEW_RUN),
    "reward.threshold": _row(within(0, 1e6), may_change=NEW_RUN, task=0.0),
    "reward.overlong_tokens": _row(integer(), may_change=NEW_RUN),
    "reward.overlong_penalty": _row(within(0, 1e6), OVERLONG, idle=0.0, may_change=NEW_RUN),
    "reward.keep_stop": _row(SWITCH, STOP, idle=True, may_change=NEW_RUN),
    "reward.keep_special_tokens": _row(SWITCH, SPECIAL_TOKENS, idle=False, may_change=NEW_RUN),
    "reward.thought_tags": _row(TEXT, ANSWER_PART, idle="", may_change=NEW_RUN),
    "reward.extract": _row(TEXT, may_change=NEW_RUN, task=""),
    # -- the rollout -------------------------------------------------------------------------------
    "rollout.prompts_per_step": _row(integer(1)),
    "rollout.group_size": _row(integer(1)),
    "rollout.response_len": _row(integer(1)),
    "rollout.stop": _row(STRINGS),
    "rollout.temperature": _row(within(0.01, 100)),
    "rollout.top_k": _row(integer()),
    "rollout.top_p": _row(ABOVE_ZERO),
    "rollout.draft": _row(key_of("rollout.drafts.sources:DRAFT_SOURCES")),
    "rollout.draft_age": _row(ONE_OR_TWO, PREVIOUS, idle=1),
    "rollout.accept": _row(key_of("rollout.acceptance:ACCEPTANCE_RULES"), PREVIOUS, idle="match"),
    "rollout.lenience": _row(NOT_NEGATIVE, PREVIOUS, LENIENT, idle=1.0),
    "rollout.noise_epochs": _row(integer(1), KEPT_NOISE, idle=1),
    "rollout.noise_refresh": _row(SHARE, KEPT_NOISE, SEVERAL_VISITS, idle=0.0),
    "rollout.stored_logprobs": _row(integer(1), PREVIOUS, DISTRIBUTION),
    "rollout.tree.history": _row(integer(1), TREE),
    "rollout.tree.depth": _row(TOKENS_OF_A_STEP, TREE),
    "rollout.tree.factor": _row(within(0, 1e6), TREE),
    "rollout.tree.offset": _row(within(-1e6, 1e6), TREE),
    "rollout.tree.min_prob": _row(SHARE, TREE),
    "rollout.tree.decay": _row(ABOVE_ZERO, TREE, GENERATIONS, idle=1.0),
    "rollout.head.learning_rate": _row(WEIGHT, HEAD, may_change=NEW_RUN),
    "rollout.head.depth": _row(integer(1, 16, "each is a pass of the head in the update"), HEAD),
    "rollout.head.vocab": _row(integer(), HEAD),
    "rollout.fork.segment": _row(integer()),
    "rollout.fork.roots": _row(integer(1), FORKS),
    "rollout.fork.branches": _row(integer(2), FORKS),
    "rollout.max_width": _row(TOKENS_OF_A_STEP, WIDE, idle=1),
    "rollout.adaptive": _row(SWITCH, WIDE, idle=False),
    "rollout.row_buckets": _row(integer(1, 32, "each is half of the last")),
    "rollout.max_rows": _row(integer()),
    "rollout.store_prompts": _row(integer(), STORED, idle=0),
    "rollout.store_age": _row(integer(), STORED, idle=0),
    "rollout.staleness": _row(integer(0, 64, "each is a batch that waits")),
    "rollout.run_ahead": _row(SWITCH),
    "rollout.partial": _row(integer()),
    "environment.name": _row(TEXT),
    "environment.max_turns": _row(integer(1), TURNS, idle=1),
    "environment.allow_unfinished": _row(BELOW_ONE, TURNS, idle=0.0),
    "environment.on_timeout": _row(one_of("end", "tell"), TURNS, idle="end"),
    # -- the algorithm -----------------------------------------------------------------------------
    "algorithm.advantage": _row(key_of("algorithms.advantages:ADVANTAGES", "auto")),
    "algorithm.turn_discount": _row(SHARE, BY_TURN, idle=1.0, may_change=NEW_RUN),
    "algorithm.normalize_std": _row(SWITCH, BY_GROUP, BY_TOKEN),
    "algorithm.leave_one_out": _row(SWITCH, BY_GROUP, BY_TOKEN, idle=False),
    "algorithm.objective": _row(key_of("algorithms.losses:OBJECTIVES")),
    "algorithm.ratio": _row(key_of("algorithms.losses:RATIOS"), BY_TOKEN, RATIO),
    "algorithm.clip_low": _row(SHARE, BY_TOKEN, RATIO, may_change=NEW_RUN),
    "algorithm.clip_high": _row(within(0, 1e6), BY_TOKEN, RATIO, may_change=NEW_RUN),
    "algorithm.dual_clip": _row(OFF_OR_ABOVE_ONE, DUAL_CLIP, RATIO, idle=0.0, may_change=NEW_RUN),
    "algorithm.aggregation": _row(key_of("algorithms.losses:AGGREGATIONS")),
    "algorithm.kl_coef": _row(WEIGHT, may_change=NEW_RUN),
    "algorithm.kl_estimator": _row(
        key_of("algorithms.losses:KL_ESTIMATORS"), KL, BY_TOKEN, may_change=NEW_RUN
    ),
    "algorithm.entropy_coef": _row(FINITE, may_change=NEW_RUN),
    "algorithm.balance_coef": _row(WEIGHT, may_change=NEW_RUN),
    "algorithm.solution_coef": _row(WEIGHT, may_change=NEW_RUN),
    "algorithm.importance_cap": _row(within(0, 1e6), WEIGHTED_DRAFTS, WEIGHTED_RULE, idle=0.0),
    "algorithm.keep_sampling_mask": _row(SWITCH, TOP_K, idle=False),
    "algorithm.mask.token_low": _row(BELOW_ONE, may_change=NEW_RUN),
    "algorithm.mask.token_high": _row(OFF_OR_ABOVE_ONE, may_change=NEW_RUN),
    "algorithm.mask.row_low": _row(BELOW_ONE, may_change=NEW_RUN),
    "algorithm.mask.row_high": _row(OFF_OR_ABOVE_ONE, may_change=NEW_RUN),
    "algorithm.mask.outlier_low": _row(BELOW_ONE, may_change=NEW_RUN),
    "algorithm.mask.outlier_high": _row(OFF_OR_ABOVE_ONE, may_change=NEW_RUN),
    "algorithm.mask.negative_kl": _row(WEIGHT, may_change=NEW_RUN),
    "algorithm.mask.binary_kl": _row(WEIGHT, may_change=NEW_RUN),
    "algorithm.mask.truncated": _row(SWITCH, BY_TOKEN, idle=False, may_change=NEW_RUN),
    "algorithm.dynamic_sampling": _row(SWITCH),
    "algorithm.max_gen_batches": _row(integer(1), SEVERAL_ROLLOUTS, idle=1),
    "critic.kind": _row(key_of("models.transformer:CRITIC_KINDS", "none")),
    "critic.learning_rate": _row(WEIGHT, CRITIC, may_change=NEW_RUN),
    "critic.schedule_warmup": _row(integer(), CRITIC, idle=0, may_change=NEW_RUN),
    "critic.warmup_steps": _row(integer(), CRITIC, idle=0, may_change=NEW_RUN),
    "critic.coef": _row(within(1e-6, 1e6), CRITIC, may_change=NEW_RUN),
    "critic.clip": _row(within(0, 1e6), CRITIC, may_change=NEW_RUN),
    "critic.gamma": _row(SHARE, CRITIC),
    "critic.gae_lambda": _row(SHARE, CRITIC),
    "curriculum.name": _row(key_of("data.curriculum:CURRICULA")),
    "curriculum.screening": _row(integer(1), SCREENS),
    "curriculum.low": _row(FINITE, RATES),
    "curriculum.high": _row(FINITE, RATES),
    "curriculum.reuse_screening": _row(SWITCH, SCREENS),
    "curriculum.candidates": _row(within(1, 1e6), BY_PASS_RATE),
    "curriculum.select": _row(key_of("data.curriculum:DISTANCES"), BY_PASS_RATE),
    "curriculum.target": _row(SHARE, BY_PASS_RATE, NEAREST),
    "curriculum.decay": _row(SHARE, BY_PASS_RATE),
    "curriculum.difficulty": _row(TEXT, EASY_TO_HARD),
    "curriculum.levels": _row(integer(), EASY_TO_HARD),
    "curriculum.schedule": _row(key_of("data.curriculum:SCHEDULES"), EASY_TO_HARD),
    "curriculum.sigma": _row(within(1e-6, 1e6), EASY_TO_HARD, GAUSSIAN),
    "curriculum.mean_exponent": _row(within(1e-6, 1e6), EASY_TO_HARD, GAUSSIAN),
    "curriculum.floor": _row(SWITCH, EASY_TO_HARD, GAUSSIAN),
    "updates.mini_batch_size": _row(integer(1), may_change=NEW_RUN),
    "updates.micro_batch_size": _row(integer(), may_change=NEW_RUN),
    "updates.logits_chunk": _row(integer(1), may_change=NEW_RUN),
    "updates.packing": _row(key_of("packing:PACKINGS"), may_change=NEW_RUN),
    "updates.skip_no_signal": _row(
        SWITCH, NO_CRITIC, NO_KL, NO_ENTROPY, idle=False, may_change=NEW_RUN
    ),
    "updates.select": _row(key_of("algorithms.row_selection:ROW_SELECTIONS"), may_change=NEW_RUN),
    "updates.token_budget": _row(integer(), may_change=NEW_RUN),
    "updates.passes": _row(integer(1), may_change=NEW_RUN),
    "updates.learning_rate": _row(WEIGHT, may_change=NEW_RUN),
    "updates.schedule": _row(key_of("algorithms.update_spec:SCHEDULES"), may_change=NEW_RUN),
    "updates.schedule_warmup": _row(integer(), may_change=NEW_RUN),
    "updates.weight_decay": _row(WEIGHT, may_change=NEW_RUN),
    "updates.beta1": _row(BETA, may_change=NEW_RUN),
    "updates.beta2": _row(BETA, may_change=NEW_RUN),
    "updates.epsilon": _row(within(1e-20, 1), may_change=NEW_RUN),  # less vanishes in a float32
    "updates.clip_norm": _row(within(0, 1e6), may_change=NEW_RUN),
    "updates.skip_nonfinite": _row(integer(), may_change=NEW_RUN),
    "updates.old_logprobs": _row(key_of("algorithms.corrections:OLD_LOGPROBS"), may_change=NEW_RUN),
    "train.epochs": _row(integer(), BY_EPOCHS, may_change=RESUMED),
    "train.steps": _row(integer(), may_change=RESUMED),
    "warmup.steps": _row(integer()),
    "warmup.batch_size": _row(integer(1), WARM_UP),
    "warmup.examples": _row(integer(), WARM_UP),
    "warmup.mistake_rate": _row(SHARE, WARM_UP, idle=0.0),
    "warmup.learning_rate": _row(WEIGHT, WARM_UP),
    # -- the run -----------------------------------------------------------------------------------
    # launch/evaluate.py and generate.py read temperature and batch size too.
    "evaluate.every": _row(integer(), may_change=RESUMED),
    "evaluate.samples": _row(integer(1), EVALUATED, SAMPLED, idle=1, may_change=RESUMED),
    "evaluate.temperature": _row(GREEDY_OR_WARM, may_change=NEW_RUN),
    "evaluate.batch_size": _row(integer(1), may_change=RESUMED),
    "checkpoint.every": _row(integer(1), may_change=RESUMED),
    "checkpoint.keep_last": _row(integer(2), may_change=RESUMED),
    "checkpoint.keep_best": _row(integer(), EVALUATED, idle=0, may_change=RESUMED),
    "log.tracker": _row(key_of("telemetry.tracking:TRACKERS"), may_change=RESUMED),
    "log.report": _row(SWITCH, may_change=RESUMED),
    "log.print_every": _row(integer(), may_change=RESUMED),
    "log.rollouts": _row(SHARE, may_change=RESUMED),
    "mesh.data": _row(integer(-1), may_change=RESUMED),
    "mesh.fsdp": _row(integer(-1), may_change=RESUMED),
    "mesh.tensor": _row(integer(-1), may_change=RESUMED),
    "mesh.rollout_devices": _row(integer(), STALE, idle=0, may_change=RESUMED),
}


# Sections whose fields have the user's names: when they have an effect.
OPTIONS: dict[str, tuple[When, ...]] = {
    "data.options": (DATA_OPTIONS,),
    "tokenizer.template_options": (CHAT,),
}
OF_TASK = {name: row.task for name, row in FIELDS.items() if row.task is not None}


def may_change(*who: str) -> tuple[str, ...]:
    """Return the fields that these may change; a section stands for all of its fields."""
    names: list[str] = []
    for section in dict.fromkeys(field.partition(".")[0] for field in FIELDS):
        fields = [field for field in FIELDS if field.split(".")[0] == section]
        free = [field for field in fields if FIELDS[field].may_change in who]
        names += [section] if free == fields else free
    return tuple(names)


def without_effect(config: ConfigDict, field: str) -> str:
    """Say in one line that a field does nothing in a configuration, and what would give it an
    effect; "" where it does something, or its value is what holds anyway."""
    row = FIELDS.get(field)
    if row and row.idle is not None and get(config, field) == row.idle:
        return ""
    conditions = row.when if row else OPTIONS.get(field.rpartition(".")[0], ())
    for when in conditions:
        if not when.holds(config):
            now = get(config, when.field)
            shown = repr(now) if now == "" else now
            flag = f"--config.{when.field}={_remedy(config, when)}"
            return f"{field} has no effect with {when.field} = {shown}; add {flag}"
    return ""


def _remedy(config: ConfigDict, when: When) -> str:
    """Return the value of `when.field` under which the condition holds."""
    if when.value is not None:
        return when.value
    section, _, name = when.field.partition(".")
    tried = config.copy_and_resolve_references()
    for choice in FIELDS[when.field].kind.choices():
        tried[section][name] = choice
        if when.holds(tried):
            return choice
    raise AssertionError(f"no choice of {when.field} gives an effect")
