"""The rules that a configuration must keep, checked before anything is loaded or compiled.

`validate` and `check_mesh` raise ValueError with one line: `FIELD must be RULE, got VALUE`.
"""

import importlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.field_rules import RULES

# Fields that came later → what every run ran with before there was the field. A run whose
# config.json lacks one goes on with this value; one that lacks any other field is refused.
ADDED_FIELDS: dict[str, Any] = {
    "algorithm.advantage": "auto",
    "lora.rank": 0,
    "lora.alpha": 32.0,
    "lora.targets": "proj",
    "model.attention": "reference",
    "updates.skip_nonfinite": 0,
    "reward.keep_special_tokens": False,
    "reward.format": "",
    "rollout.refresh_unsolved": 0.0,
    "rollout.noise_epochs": 1,
    "rollout.noise_refresh": 0.0,
    "rollout.head.learning_rate": 1e-3,
    "rollout.head.depth": 1,
    "rollout.head.vocab": 0,
    "tokenizer.continue_final_message": False,
    "log.print_every": 0,
    "tokenizer.system_prompt": "",
    "data.solution_field": "",
    "algorithm.solution_coef": 0.0,
}
# Sections whose fields have the user's names.
OPTIONS = ("data.options", "tokenizer.template_options")
_OPTIONAL = (*(f"{section}." for section in OPTIONS), "resume_from")  # and of the command line

# Field → its names. "module:TABLE" stands for those of a table below specrl_jax.
CHOICES: dict[str, str | tuple[str, ...]] = {
    "model.family": "models.families:FAMILIES",
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.attention": ("auto", "reference", "kernel"),
    "data.source": "data.readers:READERS",
    "rollout.draft": "rollout.drafts.sources:DRAFT_SOURCES",
    "rollout.accept": "rollout.acceptance:ACCEPTANCE_RULES",
    "algorithm.advantage": ("auto", "algorithms.advantages:ADVANTAGES"),
    "algorithm.objective": "algorithms.losses:OBJECTIVES",
    "algorithm.ratio": "algorithms.losses:RATIOS",
    "algorithm.aggregation": "algorithms.losses:AGGREGATIONS",
    "algorithm.kl_estimator": "algorithms.losses:KL_ESTIMATORS",
    "critic.kind": ("none", "models.transformer:CRITIC_KINDS"),
    "curriculum.name": "data.curriculum:CURRICULA",
    "updates.schedule": "algorithms.update_spec:SCHEDULES",
    "updates.old_logprobs": ("rollout", "recompute"),
    "updates.packing": "packing:PACKINGS",
    "log.tracker": "telemetry.tracking:TRACKERS",
}

# Of one rule: the field, the rule in words, whether the configuration keeps it.
Check = tuple[str, str, bool]


def validate(config: ConfigDict) -> None:
    """Check a whole configuration; ValueError in one line on the first broken rule."""
    fields = dict(flatten(config))
    _check_fields(fields)
    for field, rules in RULES.items():
        for rule, holds in rules:
            _require(field, rule, holds(fields[field]), fields[field])
    for field in CHOICES:
        names = choices(field)
        _require(field, f"one of {', '.join(names)}", fields[field] in names, fields[field])
    checked = (_memory, _batches, _groups, _drafts, _carry_over, _environment, _task, _solutions)
    for checks in (*checked, _sizes, _adapters):
        for field, rule, holds in checks(config):
            _require(field, rule, holds, fields[field])


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless a configuration has all fields, and no other ones."""
    known = {*RULES, *CHOICES}
    if missing := sorted(known - fields.keys()):
        raise ValueError(f"{missing[0]} must be set ({len(missing)} missing); see configs/grpo.py")
    options = tuple(f"{section}." for section in OPTIONS)
    unknown = sorted(f for f in fields.keys() - known if not f.startswith(options))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of the config; see configs/grpo.py")


def choices(field: str) -> tuple[str, ...]:
    """The names that a field may have."""
    names = CHOICES[field]
    names = (names,) if isinstance(names, str) else names
    return tuple(n for name in names for n in (table(name) if ":" in name else [name]))


def table(name: str) -> Mapping[str, Any]:
    """A table of the package by "module:TABLE"; imported only when it is asked for."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"specrl_jax.{module}"), attribute)


def _chosen(config: ConfigDict, field: str) -> Any:
    """Look up what the name in `field` stands for."""
    section, _, name = field.partition(".")
    return table(CHOICES[field])[config[section][name]]


def complete_saved(values: dict[str, Any]) -> dict[str, Any]:
    """Add to a run's saved configuration the `ADDED_FIELDS` that it lacks; returns it."""
    for field, value in ADDED_FIELDS.items():
        *sections, name = field.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node.setdefault(name, value)
    for path in OPTIONS:
        section, name = path.split(".")
        values.setdefault(section, {}).setdefault(name, {})
    return values


def check_version(saved: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError in one line where a saved configuration has other fields than are known now.

    Fields that no version requires are not compared.
    """
    before = {name for name in saved if not name.startswith(_OPTIONAL)}
    now = {name for name in known if not name.startswith(_OPTIONAL)}
    differs = [f"{name} came later" for name in sorted(now - before)]
    differs += [f"{name} is no field any more" for name in sorted(before - now)]
    if differs:
        raise ValueError(
            f"{where} is of another version of specrl_jax: {', '.join(differs)}; go on with that "
            "version, or begin a new run"
        )


def check_mesh(config: ConfigDict, mesh: Any) -> None:
    """Check batch sizes against the mesh; ValueError in one line that says what would fit."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    for field, size in (
        ("rollout.prompts_per_step", config.rollout.prompts_per_step),
        ("rollout.partial", config.rollout.partial),
        ("updates.micro_batch_size", config.updates.micro_batch_size),
        ("updates.mini_batch_size", config.updates.mini_batch_size),
        ("warmup.batch_size", config.warmup.batch_size if config.warmup.steps else 0),
        ("evaluate.batch_size", config.evaluate.batch_size if config.evaluate.every else 0),
    ):
        below, above = size // shards * shards, -(-size // shards) * shards
        fits = f"{below} or {above} fits" if below else f"{above} fits"
        rule = f"divisible by mesh.data x mesh.fsdp = {shards} ({fits})"
        _require(field, rule, size % shards == 0, size)


def flatten(config: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _require(field: str, rule: str, holds: bool, value: Any) -> None:
    if not holds:
        raise ValueError(f"{field} must be {rule}, got {_short(value)}")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}.."


# What is made of numbers that are each in their bounds: the fields whose product counts it → bytes
# of one. Less than a run that uses them needs, so that it is not refused if it fits.
_BYTES = {
    # The layers' weights with their optimizer state.
    "model.num_layers model.embed_dim model.mlp_dim": 48,
    "model.num_layers model.embed_dim model.num_heads model.head_dim": 32,
    # Prompts: to train on, held out, of demonstrations, of a rollout.
    "data.prompts data.prompt_len": 4,
    "data.eval_prompts data.prompt_len": 4,
    "warmup.examples data.prompt_len": 4,
    "rollout.prompts_per_step rollout.group_size data.prompt_len": 4,
    # Responses: of a rollout, finished a step later, of an evaluation.
    "rollout.prompts_per_step rollout.group_size rollout.response_len": 32,
    "rollout.partial rollout.group_size rollout.response_len": 32,
    "evaluate.batch_size evaluate.samples rollout.response_len": 32,
    # Stored responses to draft from, and stored log-probs.
    "rollout.tree.history rollout.prompts_per_step rollout.group_size rollout.response_len": 4,
    "rollout.stored_logprobs rollout.prompts_per_step rollout.group_size rollout.response_len": 8,
}
_MAX_GIB = 16_384  # of one array: more than 200 devices of 80 GB have


def _memory(config: ConfigDict) -> Iterator[Check]:
    fields = dict(flatten(config))
    for product, size in _BYTES.items():
        values = {name: fields[name] for name in product.split()}
        gib = size * math.prod(values.values()) / 2**30
        largest = max(values, key=values.get)
        rule = f"smaller: {' x '.join(values)} would take {gib:.3g} GiB, more than {_MAX_GIB}"
        yield largest, rule, gib <= _MAX_GIB


def _batches(config: ConfigDict) -> Iterator[Check]:
    group_size = table("group_buffer:trained_group_size")(config)
    rows = config.rollout.prompts_per_step * group_size
    mini = config.updates.mini_batch_size
    micro = config.updates.micro_batch_size
    yield (
        "updates.mini_batch_size",
        f"a divisor of the {rows} responses that a step trains on "
        "(rollout.prompts_per_step x rollout.group_size)",
        rows % mini == 0,
    )
    rule = f"0 or a divisor of updates.mini_batch_size = {mini}"
    yield "updates.micro_batch_size", rule, not micro or mini % micro == 0
    rule = "> 0 where train.steps is 0"
    yield "train.epochs", rule, bool(config.train.epochs or config.train.steps)
    held_out = config.data.eval_prompts or config.data.eval_path or config.data.eval_split
    rule = "> 0 where evaluate.every is > 0"
    yield "data.eval_prompts", rule, bool(held_out or not config.evaluate.every)
    length = config.rollout.response_len
    rule = f"<= rollout.response_len = {length}"
    yield "reward.overlong_tokens", rule, config.reward.overlong_tokens <= length


def _groups(config: ConfigDict) -> Iterator[Check]:
    group = config.rollout.group_size
    settings = config.curriculum
    compares = table("algorithms.advantages:choose_advantage")(config).min_group_size > 1
    rule = ">= 2 where critic.kind is none (responses of a group are compared)"
    yield "rollout.group_size", rule, not compares or group >= 2
    rule = ">= 2 where algorithm.dynamic_sampling is True (one reward never differs)"
    yield "rollout.group_size", rule, not config.algorithm.dynamic_sampling or group >= 2
    if not _chosen(config, "curriculum.name").screens:
        return
    first = settings.screening
    where = f"where curriculum.name is {settings.name}"
    yield "curriculum.screening", f">= 2 {where}", first >= 2
    rule = f"a divisor of rollout.group_size = {group} and less"
    yield "curriculum.screening", rule, group % first == 0 and first < group
    yield "curriculum.low", f"< curriculum.high = {settings.high}", settings.low < settings.high


def _drafts(config: ConfigDict) -> Iterator[Check]:
    rollout = config.rollout
    drafts = _chosen(config, "rollout.draft")
    accept = _chosen(config, "rollout.accept")
    rule = f"1 where rollout.draft is {rollout.draft}"
    yield "rollout.draft_age", rule, drafts.drafts or rollout.draft_age == 1
    rule = f"< rollout.max_width = {rollout.max_width}, tokens of a draft and one more"
    depth = rollout.head.depth
    yield "rollout.head.depth", rule, not drafts.head or depth < rollout.max_width
    where = f"where rollout.accept is {rollout.accept}"
    rule = f"0 {where} (it samples every token anew)"
    yield "rollout.draft_refresh", rule, not (rollout.draft_refresh and accept.samples_anew)
    lenient = accept.lenient_share is not None or not drafts.previous
    rule = f"1 {where} (ratio has a lenience)"
    yield "rollout.lenience", rule, lenient or rollout.lenience == 1
    weighted = accept.exact or accept.importance_weight is not None
    rule = f"0 {where} (it is not exact and has no importance weight)"
    cap = config.algorithm.importance_cap
    yield "algorithm.importance_cap", rule, weighted or not (cap and drafts.previous)
    size = rollout.prompts_per_step
    rule = f"0 or >= rollout.prompts_per_step = {size}"
    yield "rollout.store_prompts", rule, not 0 < rollout.store_prompts < size
    rule = f"False {where} (it is not exact for responses that were not finished)"
    runs_ahead = rollout.run_ahead and drafts.previous
    yield "rollout.run_ahead", rule, accept.samples_anew or not runs_ahead


def _carry_over(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules that exclude rows and groups that wait for a later step."""
    partial = config.rollout.partial
    curriculum = _chosen(config, "curriculum.name")
    by_name = f"curriculum.name is {config.curriculum.name}"
    waits = ["algorithm.dynamic_sampling is True"] if config.algorithm.dynamic_sampling else []
    if curriculum.screens:
        waits.append(by_name)
    unforeseen = waits or ([] if curriculum.foresees else [by_name])
    for reason in unforeseen:
        yield "rollout.partial", f"0 where {reason}", not partial
    partial_rows = ["rollout.partial is > 0"] if partial else []
    for reason in unforeseen + partial_rows:
        yield "rollout.run_ahead", f"False where {reason}", not config.rollout.run_ahead
    for reason in waits + partial_rows:
        from_rollout = config.updates.old_logprobs == "rollout"
        yield "updates.old_logprobs", f"rollout where {reason}", from_rollout


def _environment(config: ConfigDict) -> Iterator[Check]:
    if not config.environment.name:
        return
    rollout = config.rollout
    accept = _chosen(config, "rollout.accept")
    previous = _chosen(config, "rollout.draft").previous
    yield "rollout.partial", "0 where environment.name is set", not rollout.partial
    yield "rollout.run_ahead", "False where environment.name is set", not rollout.run_ahead
    rule = "another rule where environment.name is set (a random part of an episode is no turn)"
    yield "rollout.accept", rule, not (previous and accept.cuts_draft)
    rule = "one function where environment.name is set (the environment gives the reward)"
    yield "reward.name", rule, len(table("inputs:reward_terms")(config.reward.name)) == 1


def _task(config: ConfigDict) -> Iterator[Check]:
    source = config.tokenizer.source
    model = config.model.source
    by_character = source in table("data.tokenizer:OF_ALPHABET")
    rule = f'"" or of a model where model.source is {model!r}'
    yield "tokenizer.source", rule, not (model and by_character)
    rule = f"False where tokenizer.source is {source}"
    chat = config.tokenizer.chat
    yield "tokenizer.chat", rule, not (by_character and chat)
    for field, _ in flatten(config.tokenizer.template_options, "tokenizer.template_options."):
        yield field, "left out where tokenizer.chat is False", chat
    rule = "False where tokenizer.chat is False"
    continues = config.tokenizer.continue_final_message
    yield "tokenizer.continue_final_message", rule, chat or not continues
    rule = '"" where tokenizer.chat is False'
    yield "tokenizer.system_prompt", rule, chat or not config.tokenizer.system_prompt
    data = config.data.source
    reward = config.reward.name
    own = table("rewards.scorers:OWN_TASKS")
    for function in table("inputs:reward_terms")(reward):
        rule = f"another one where data.source is {data} ({function} scores only its own tasks)"
        yield "reward.name", rule, own.get(function, data) == data


def _adapters(config: ConfigDict) -> Iterator[Check]:
    weights = importlib.import_module("specrl_jax.models.parameters").ADAPTED
    rule = f"a regular expression that is found in one of {', '.join(weights)}"
    yield "lora.targets", rule, _is_found(config.lora.targets, weights)


def _is_found(pattern: str, names: Iterable[str]) -> bool:
    try:
        return any(re.search(pattern, name) for name in names)
    except re.error:
        return False


def _solutions(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of solutions that are learned, before step 1 or in unsolved groups."""
    source = config.data.source
    field = config.data.solution_field
    warmup = config.warmup
    endless = _chosen(config, "data.source").endless
    turns = config.environment.name
    if warmup.steps:
        rule = f"0 where environment.name is set and data.source is {source} (it has no solutions)"
        yield "warmup.steps", rule, endless or not turns
        rule = f"> 0 where data.source is {source} (it has no end)"
        yield "warmup.examples", rule, warmup.examples > 0 or not endless
        where = f"data.solution_field is {field!r}" if field else f"data.source is {source}"
        rule = f"0 where {where} (solutions are learned as they are)"
        yield "warmup.mistake_rate", rule, not warmup.mistake_rate or (endless and not field)
    if not config.algorithm.solution_coef:
        return
    coef = "algorithm.solution_coef"
    yield coef, "0 where environment.name is set (a solution is one response)", not turns
    critic = config.critic.kind
    rule = f"0 where critic.kind is {critic} (it values what the policy wrote)"
    yield coef, rule, not table("algorithms.advantages:has_critic")(critic)
    rule = "0 where algorithm.dynamic_sampling is True (it leaves unsolved groups out)"
    yield coef, rule, not config.algorithm.dynamic_sampling
    curriculum = config.curriculum.name
    rule = f"0 where curriculum.name is {curriculum} (it leaves unsolved groups out)"
    yield coef, rule, not _chosen(config, "curriculum.name").screens


def _sizes(config: ConfigDict) -> Iterator[Check]:
    model = config.model
    rule = f"a divisor of model.num_heads = {model.num_heads}"
    yield "model.num_kv_heads", rule, model.num_heads % model.num_kv_heads == 0
    yield "model.head_dim", "even (rotary halves)", model.head_dim % 2 == 0
