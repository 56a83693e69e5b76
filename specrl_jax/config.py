"""Every rule that a configuration must keep, checked before anything is loaded or compiled.

`validate` raises ValueError with one line: field path, rule, value.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.models.families import FAMILIES

# Old name → new name: who gives an old one is told the new one.
RENAMED_FIELDS = {
    "rollout.row_rungs": "rollout.row_buckets",
    "rollout.windows": "rollout.cache_lengths",
    "rollout.verify_chunk": "rollout.verify_width",
    "algorithm.max_rounds": "algorithm.max_gen_batches",
    "environment.behind": "environment.allow_unfinished",
}

# field → (rule in words, test). Fields that name a choice are in CHOICES.
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "seed": (">= 0", lambda x: x >= 0),
    "data.prompts": (">= 0", lambda x: x >= 0),
    "data.eval_prompts": (">= 0", lambda x: x >= 0),
    "data.prompt_len": (">= 1", lambda x: x >= 1),
    "reward.timeout": ("> 0", lambda x: x > 0),
    "rollout.prompts_per_step": (">= 1", lambda x: x >= 1),
    "rollout.group_size": (">= 1", lambda x: x >= 1),
    "rollout.response_len": (">= 1", lambda x: x >= 1),
    "rollout.temperature": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "rollout.top_k": (">= 0", lambda x: x >= 0),
    "rollout.top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
    "rollout.draft_age": ("1 or 2", lambda x: x in (1, 2)),
    "rollout.lenience": (">= 0", lambda x: x >= 0),
    "rollout.lenience_target": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "rollout.lenience_gain": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "rollout.lenience_min": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "rollout.lenience_max": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "rollout.draft_refresh": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "rollout.token_age": (">= 0", lambda x: x >= 0),
    "rollout.stored_logprobs": (">= 1", lambda x: x >= 1),
    "rollout.tree.history": (">= 1", lambda x: x >= 1),
    "rollout.tree.depth": (">= 1", lambda x: x >= 1),
    "rollout.tree.factor": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "rollout.tree.offset": ("finite", math.isfinite),
    "rollout.tree.min_prob": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "rollout.tree.decay": ("in (0, 1]", lambda x: 0 < x <= 1),
    "rollout.max_width": (">= 1", lambda x: x >= 1),
    "rollout.verify_width": (">= 1", lambda x: x >= 1),
    "rollout.row_buckets": (">= 1", lambda x: x >= 1),
    "rollout.cache_lengths": (">= 1", lambda x: x >= 1),
    "rollout.max_rows": (">= 0", lambda x: x >= 0),
    "rollout.max_cache_gib": (">= 0", lambda x: x >= 0),
    "rollout.logits_chunk": (">= 1", lambda x: x >= 1),
    "rollout.store_prompts": (">= 0", lambda x: x >= 0),
    "rollout.store_age": (">= 0", lambda x: x >= 0),
    "rollout.partial": (">= 0", lambda x: x >= 0),
    "algorithm.clip_low": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "algorithm.clip_high": (">= 0", lambda x: x >= 0),
    "algorithm.dual_clip": ("0 (off) or > 1", lambda x: x == 0 or x > 1),
    "algorithm.kl_coef": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "algorithm.entropy_coef": ("finite", math.isfinite),
    "algorithm.importance_cap": (">= 0", lambda x: x >= 0),
    "algorithm.max_gen_batches": (">= 1", lambda x: x >= 1),
    "reward.overlong_tokens": (">= 0", lambda x: x >= 0),
    "reward.overlong_penalty": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "critic.learning_rate": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "critic.schedule_warmup": (">= 0", lambda x: x >= 0),
    "critic.warmup_steps": (">= 0", lambda x: x >= 0),
    "critic.coef": ("> 0 and finite", lambda x: 0 < x < math.inf),
    "critic.clip": (">= 0", lambda x: x >= 0),
    "critic.gamma": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "critic.gae_lambda": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "environment.max_turns": (">= 1", lambda x: x >= 1),
    "environment.allow_unfinished": ("in [0, 1)", lambda x: 0 <= x < 1),
    "curriculum.screening": (">= 1", lambda x: x >= 1),
    "curriculum.low": ("finite", math.isfinite),
    "curriculum.high": ("finite", math.isfinite),
    "curriculum.candidates": (">= 1", lambda x: x >= 1),
    "curriculum.target": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "curriculum.decay": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "curriculum.width": ("> 0", lambda x: x > 0),
    "updates.mini_batch_size": (">= 1", lambda x: x >= 1),
    "updates.micro_batch_size": (">= 0", lambda x: x >= 0),
    "updates.passes": (">= 1", lambda x: x >= 1),
    "updates.learning_rate": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "updates.schedule_warmup": (">= 0", lambda x: x >= 0),
    "updates.weight_decay": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "updates.beta1": ("in [0, 1)", lambda x: 0 <= x < 1),
    "updates.beta2": ("in [0, 1)", lambda x: 0 <= x < 1),
    "updates.epsilon": ("> 0", lambda x: x > 0),
    "updates.clip_norm": (">= 0", lambda x: x >= 0),
    "train.epochs": (">= 0", lambda x: x >= 0),
    "train.steps": (">= 0", lambda x: x >= 0),
    "warmup.steps": (">= 0", lambda x: x >= 0),
    "warmup.batch_size": (">= 1", lambda x: x >= 1),
    "warmup.examples": (">= 1", lambda x: x >= 1),
    "warmup.mistake_rate": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "warmup.learning_rate": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "evaluate.every": (">= 0", lambda x: x >= 0),
    "evaluate.samples": (">= 1", lambda x: x >= 1),
    "evaluate.temperature": (">= 0 and finite", lambda x: 0 <= x < math.inf),
    "evaluate.batch_size": (">= 1", lambda x: x >= 1),
    "checkpoint.every": (">= 1", lambda x: x >= 1),
    "checkpoint.keep_last": (">= 1", lambda x: x >= 1),
    "checkpoint.keep_best": (">= 0", lambda x: x >= 0),
    "log.rollouts": ("in [0, 1]", lambda x: 0 <= x <= 1),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": tuple(FAMILIES),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "data.source": ("reasoning_gym", "guess", "tfds", "jsonl", "parquet", "hf"),
    "rollout.draft": ("none", "previous", "tree", "previous+tree"),
    "rollout.accept": ("ratio", "random", "ratio_residual", "block", "match"),
    "rollout.store": ("device", "host"),
    "rollout.lenience_measure": ("share", "kl"),
    "algorithm.objective": ("clip", "cispo"),
    "algorithm.ratio": ("token", "sequence"),
    "algorithm.aggregation": ("token", "sequence", "constant"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "critic.kind": ("none", "head", "network"),
    "curriculum.name": ("uniform", "speed", "mopps", "easy_to_hard"),
    "updates.schedule": ("constant", "linear", "cosine"),
    "updates.old_logprobs": ("rollout", "recompute"),
    "log.wandb": ("off", "offline", "online", "auto"),
}


def validate(config: ConfigDict) -> None:
    """Check a whole configuration. Raises ValueError in one line on the first broken rule."""
    fields = dict(flatten(config))
    check_names(fields)
    for field, value in fields.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{field} must be a number, got nan")
    for field, (rule, holds) in RULES.items():
        if not holds(fields[field]):
            raise ValueError(f"{field} must be {rule}, got {fields[field]}")
    for field, names in CHOICES.items():
        if fields[field] not in names:
            raise ValueError(f"{field} must be one of {', '.join(names)}, got {fields[field]!r}")
    _check_batches(config)
    _check_sources(config)
    if not config.model.source:
        _check_sizes(config.model)


def check_names(fields: Iterable[str]) -> None:
    """Raise ValueError in one line where a field has an old name."""
    for field in fields:
        if field in RENAMED_FIELDS:
            raise ValueError(f"{field} is now named {RENAMED_FIELDS[field]}")


def check_mesh(config: ConfigDict, mesh: Any) -> None:
    """Batch sizes against the mesh. Raises ValueError in one line that says what would fit."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    for field, size in (
        ("rollout.prompts_per_step", config.rollout.prompts_per_step),
        ("rollout.partial", config.rollout.partial),
        ("updates.micro_batch_size", config.updates.micro_batch_size),
        ("updates.mini_batch_size", config.updates.mini_batch_size),
        ("warmup.batch_size", config.warmup.batch_size if config.warmup.steps else 0),
        ("evaluate.batch_size", config.evaluate.batch_size if config.evaluate.every else 0),
    ):
        if size % ways:
            up, down = -(-size // ways) * ways, size // ways * ways
            fits = f"{down} or {up}" if down else f"{up}"
            raise ValueError(
                f"{field} must be divisible by mesh.data x mesh.fsdp = {ways}, got {size}; "
                f"{fits} would fit"
            )

    for field, group in (
        ("rollout.group_size", config.rollout.group_size),
        ("evaluate.samples", config.evaluate.samples),
    ):
        if 0 < config.rollout.max_rows < ways * group:
            raise ValueError(
                f"rollout.max_rows must be 0 or hold {ways} groups of {field} = {group} rows "
                f"(mesh.data x mesh.fsdp of them), got {config.rollout.max_rows}"
            )


def flatten(config: Mapping, prefix: str = ""):
    """(path, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_batches(config: ConfigDict) -> None:
    group = config.rollout.group_size
    if config.curriculum.name == "speed" and not config.curriculum.reuse_screening:
        group -= config.curriculum.screening
    rows = config.rollout.prompts_per_step * group
    mini, micro = config.updates.mini_batch_size, config.updates.micro_batch_size
    if rows % mini:
        raise ValueError(
            f"updates.mini_batch_size must divide the {rows} responses that a step trains on "
            f"(rollout.prompts_per_step x rollout.group_size), got {mini}"
        )
    if micro and mini % micro:
        raise ValueError(
            f"updates.micro_batch_size must divide updates.mini_batch_size = {mini}, got {micro}"
        )
    if not config.train.epochs and not config.train.steps:
        raise ValueError("train.epochs or train.steps must be > 0, got 0 for both")
    held_out = config.data.eval_prompts or config.data.eval_path or config.data.eval_split
    if config.evaluate.every and not held_out:
        raise ValueError(
            "data.eval_prompts must be > 0 where evaluate.every is, got 0; or set evaluate.every 0"
        )
    if config.critic.kind == "none" and config.rollout.group_size < 2:
        raise ValueError(
            "rollout.group_size must be >= 2 where critic.kind is none (responses of a group are "
            f"compared), got {config.rollout.group_size}"
        )
    if config.algorithm.dynamic_sampling and config.rollout.group_size < 2:
        raise ValueError(
            "rollout.group_size must be >= 2 where algorithm.dynamic_sampling is True (a lone "
            f"reward never differs), got {config.rollout.group_size}"
        )
    if config.algorithm.objective == "cispo" and config.algorithm.ratio != "token":
        raise ValueError(
            "algorithm.ratio must be token where algorithm.objective is cispo, "
            f"got {config.algorithm.ratio!r}"
        )
    if config.reward.overlong_tokens > config.rollout.response_len:
        raise ValueError(
            f"reward.overlong_tokens must be <= rollout.response_len = "
            f"{config.rollout.response_len}, got {config.reward.overlong_tokens}"
        )
    _check_rollout(config.rollout)
    _check_curriculum(config)
    if config.environment.name:
        _check_environment(config)
    if config.rollout.partial and config.updates.old_logprobs != "rollout":
        raise ValueError(
            "updates.old_logprobs must be rollout where rollout.partial is > 0 (a carried token's "
            f"weight is against the policy that sampled it), got {config.updates.old_logprobs!r}"
        )
    if config.rollout.draft == "none" and config.rollout.draft_age != 1:
        raise ValueError(
            f"rollout.draft_age must be 1 where rollout.draft is none, "
            f"got {config.rollout.draft_age}"
        )


def _check_curriculum(config: ConfigDict) -> None:
    """What goes with groups that wait for a later step, and with prompts not known beforehand."""
    settings, waits = config.curriculum, []
    if config.algorithm.dynamic_sampling:
        waits.append("algorithm.dynamic_sampling is True")
    if settings.name == "speed":
        waits.append("curriculum.name is speed")
        _check_screening(config)
    unforeseen = waits or ([f"curriculum.name is {settings.name}"] * (settings.name != "uniform"))
    for reasons, field, value, wanted in (
        (unforeseen, "rollout.partial", config.rollout.partial, 0),
        (unforeseen, "rollout.run_ahead", config.rollout.run_ahead, False),
        (waits, "updates.old_logprobs", config.updates.old_logprobs, "rollout"),
        (
            _judged_earlier(config, waits),
            "rollout.lenience_auto",
            config.rollout.lenience_auto,
            False,
        ),
    ):
        if reasons and value != wanted:
            raise ValueError(f"{field} must be {wanted} where {reasons[0]}, got {value}")


def _judged_earlier(config: ConfigDict, waits: list[str]) -> list[str]:
    """Why a batch with importance weights may hold drafts that an earlier lenience has judged."""
    if config.rollout.partial:
        waits = [*waits, "rollout.partial is > 0"]
    if not waits or not config.algorithm.importance_cap:
        return []
    return [f"algorithm.importance_cap is > 0 and {waits[0]}"]


def _check_environment(config: ConfigDict) -> None:
    for field, value, wanted in (
        ("rollout.partial", config.rollout.partial, 0),
        ("rollout.run_ahead", config.rollout.run_ahead, False),
    ):
        if value != wanted:
            raise ValueError(f"{field} must be {wanted} with an environment, got {value}")
    previous = "previous" in config.rollout.draft
    if previous and config.rollout.accept == "random":
        raise ValueError(
            "rollout.accept must not be random with an environment (a random part of an episode is "
            "no turn), got 'random'"
        )
    if previous and config.rollout.accept == "block" and config.rollout.max_cache_gib:
        raise ValueError(
            "rollout.max_cache_gib must be 0 where rollout.accept is block with an environment (a "
            "pass over what is left of a draft needs a window behind what rows hold), "
            f"got {config.rollout.max_cache_gib}"
        )


def _check_screening(config: ConfigDict) -> None:
    settings, group = config.curriculum, config.rollout.group_size
    if settings.screening < 2:
        raise ValueError(
            "curriculum.screening must be >= 2 where curriculum.name is speed (one response is all "
            f"right or all wrong), got {settings.screening}"
        )
    if group % settings.screening or settings.screening == group:
        raise ValueError(
            f"curriculum.screening must divide rollout.group_size = {group} and be less, "
            f"got {settings.screening}"
        )
    if settings.low >= settings.high:
        raise ValueError(
            f"curriculum.low must be < curriculum.high = {settings.high}, got {settings.low}"
        )
    trained = group - (0 if settings.reuse_screening else settings.screening)
    if config.critic.kind == "none" and trained < 2:
        raise ValueError(
            "curriculum.screening must leave 2 responses of a group to compare where "
            f"curriculum.reuse_screening is False, got {settings.screening} of {group}"
        )


def _check_lenience(rollout: ConfigDict) -> None:
    by_ratio = "previous" in rollout.draft and rollout.accept == "ratio"
    if rollout.lenience_auto and not by_ratio:
        raise ValueError(
            "rollout.lenience_auto must be False where previous drafts are not judged by ratio, "
            f"got True with rollout.draft = {rollout.draft!r}, rollout.accept = {rollout.accept!r}"
        )
    if rollout.lenience_auto and not (
        rollout.lenience_min <= rollout.lenience <= rollout.lenience_max
    ):
        raise ValueError(
            f"rollout.lenience must be in [rollout.lenience_min, rollout.lenience_max] = "
            f"[{rollout.lenience_min}, {rollout.lenience_max}] where it is adapted, "
            f"got {rollout.lenience}"
        )
    for field in ("draft_refresh", "token_age"):
        if rollout[field] and rollout.accept == "match":
            raise ValueError(
                f"rollout.{field} must be 0 where rollout.accept is match (every token is drawn "
                f"anew there), got {rollout[field]}"
            )


def _check_rollout(rollout: ConfigDict) -> None:
    _check_lenience(rollout)
    if 0 < rollout.store_prompts < rollout.prompts_per_step:
        raise ValueError(
            f"rollout.store_prompts must be 0 or >= rollout.prompts_per_step = "
            f"{rollout.prompts_per_step}, got {rollout.store_prompts}"
        )
    if rollout.run_ahead and "previous" in rollout.draft and rollout.accept != "match":
        raise ValueError(
            "rollout.run_ahead must be False where rollout.accept is not match (its drafts are "
            f"only exact under that rule), got True with rollout.accept = {rollout.accept!r}"
        )
    if rollout.run_ahead and rollout.partial:
        raise ValueError(
            "rollout.run_ahead must be False where rollout.partial is > 0 (a place that is left "
            f"idle ends the step there), got True with rollout.partial = {rollout.partial}"
        )


def _check_sources(config: ConfigDict) -> None:
    if not config.model.source and not config.tokenizer.source:
        raise ValueError(
            'tokenizer.source must be given where model.source is "", got ""; '
            'e.g. tokenizer.source = "characters"'
        )
    if config.tokenizer.source == "characters":
        if config.model.source:
            raise ValueError(
                f"tokenizer.source must be the model's for model.source={config.model.source!r}, "
                'got "characters"; set it to ""'
            )
        if config.tokenizer.chat:
            raise ValueError(
                'tokenizer.chat must be False for tokenizer.source="characters", got True'
            )
    if config.warmup.steps and config.data.source != "reasoning_gym":
        raise ValueError(
            f"warmup.steps must be 0 for data.source={config.data.source!r} (there are no "
            f"demonstrations), got {config.warmup.steps}"
        )
    if config.reward.name == "reasoning_gym" and config.data.source != "reasoning_gym":
        raise ValueError(
            'reward.name must not be "reasoning_gym" (it scores its own tasks) for '
            f"data.source={config.data.source!r}"
        )
    if config.data.source in ("jsonl", "parquet") and not config.data.path:
        raise ValueError(
            f'data.path must name a file for data.source={config.data.source!r}, got ""'
        )


def _check_sizes(model: ConfigDict) -> None:
    for field in ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
        if model[field] < 1:
            raise ValueError(f"model.{field} must be >= 1, got {model[field]}")
    if model.num_heads % model.num_kv_heads:
        raise ValueError(
            f"model.num_kv_heads must divide model.num_heads = {model.num_heads}, "
            f"got {model.num_kv_heads}"
        )
    if model.head_dim % 2:
        raise ValueError(f"model.head_dim must be even (rotary halves), got {model.head_dim}")
