"""Rules between fields: what one may hold depends on another. `RULES` has them all.

Each yields (field, the rule in words, whether the configuration keeps it), in any order.
"""

import contextlib
import re
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from specrl_jax.config.fields import meaning
from specrl_jax.config.kinds import load

Check = tuple[str, str, bool]


def _batches(config: ConfigDict) -> Iterator[Check]:
    group_size = load("training.slots:trained_group_size")(config)
    rows = config.rollout.prompts_per_step * group_size
    mini = config.updates.mini_batch_size
    yield (
        "updates.mini_batch_size",
        f"a divisor of the {rows} responses that a step trains on "
        "(rollout.prompts_per_step x rollout.group_size)",
        rows % mini == 0,
    )
    updates = rows // mini * config.updates.passes
    rule = f"rollout or recompute where a rollout feeds {updates} updates (their ratio is not 1)"
    one_update = meaning(config, "updates.old_logprobs").one_update
    yield "updates.old_logprobs", rule, updates == 1 or not one_update
    rule = "> 0 where train.steps is 0"
    yield "train.epochs", rule, bool(config.train.epochs or config.train.steps)
    held_out = config.data.eval_prompts or config.data.eval_path or config.data.eval_split
    rule = "> 0 where evaluate.every is > 0"
    yield "data.eval_prompts", rule, bool(held_out or not config.evaluate.every)
    length = config.rollout.response_len
    rule = f"<= rollout.response_len = {length}"
    yield "reward.overlong_tokens", rule, config.reward.overlong_tokens <= length


def _groups(config: ConfigDict) -> Iterator[Check]:
    group_size = config.rollout.group_size
    settings = config.curriculum
    advantage = load("algorithms.advantages:choose_advantage")(config)
    compares = advantage.min_group_size > 1
    rule = ">= 2 where critic.kind is none (responses of a group are compared)"
    yield "rollout.group_size", rule, not compares or group_size >= 2
    yield from advantage.rules(config)
    rule = ">= 2 where algorithm.dynamic_sampling is True (one reward never differs)"
    yield "rollout.group_size", rule, not config.algorithm.dynamic_sampling or group_size >= 2
    if not meaning(config, "curriculum.name").screens:
        return
    first = settings.screening
    where = f"where curriculum.name is {settings.name}"
    yield "curriculum.screening", f">= 2 {where}", first >= 2
    rule = f"a divisor of rollout.group_size = {group_size} and less"
    yield "curriculum.screening", rule, group_size % first == 0 and first < group_size
    yield "curriculum.low", f"< curriculum.high = {settings.high}", settings.low < settings.high


def _objective(config: ConfigDict) -> Iterator[Check]:
    algorithm = config.algorithm
    objective = meaning(config, "algorithm.objective")
    where = f"where algorithm.objective is {algorithm.objective}"
    name = algorithm.advantage
    needs = objective.advantage
    owned = {other.advantage for other in load("algorithms.losses:OBJECTIVES").values()}
    rule = f"another one than {name} {where}"
    yield "algorithm.advantage", rule, not name or name == needs or name not in owned
    yield "algorithm.advantage", f"{needs} {where}", not needs or name == needs
    yield from objective.rules(config)


def _selected_rows(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of updates that do not take every row once."""
    algorithm = config.algorithm
    updates = config.updates
    pairs = meaning(config, "algorithm.objective").whole_groups
    objective = f"where algorithm.objective is {algorithm.objective} (its pairs stay whole)"
    if meaning(config, "updates.select") is not None:
        where = f"where updates.select is {updates.select}"
        group_size = load("training.slots:trained_group_size")(config)
        rule = f"all where a step trains on groups of {group_size} (half of a group's pairs stay)"
        yield "updates.select", rule, group_size % 4 == 0
        yield "updates.select", f"all {objective}", not pairs
        advantage = load("algorithms.advantages:choose_advantage")(config)
        rule = f"none {where} (it compares responses of a group)"
        yield "critic.kind", rule, not advantage.needs_critic
        rule = f"0 {where} (a solution has no advantage)"
        yield "algorithm.solution_coef", rule, not algorithm.solution_coef
        yield "updates.token_budget", f"0 {where}", not updates.token_budget
    if not updates.token_budget:
        return
    where = "where updates.token_budget is > 0"
    least = config.rollout.response_len
    rule = f"0 or in [{least}, {least * updates.mini_batch_size}], one to all responses of a "
    fits = least <= updates.token_budget <= least * updates.mini_batch_size
    yield "updates.token_budget", rule + "mini-batch at their longest", fits
    yield "updates.token_budget", f"0 {objective}", not pairs
    rule = f"0 {where} (it may leave the solution out)"
    yield "algorithm.solution_coef", rule, not algorithm.solution_coef
    by_token = meaning(config, "algorithm.aggregation") is load("algorithms.losses:TOKEN_MEAN")
    yield "algorithm.aggregation", f"token {where} (it is what the sum is divided by)", by_token


def _drafts(config: ConfigDict) -> Iterator[Check]:
    rollout = config.rollout
    drafts = meaning(config, "rollout.draft")
    accept = meaning(config, "rollout.accept")
    rule = f"< rollout.max_width = {rollout.max_width}, tokens of a draft and one more"
    depth = rollout.head.depth
    yield "rollout.head.depth", rule, not drafts.head or depth < rollout.max_width
    where = f"where rollout.accept is {rollout.accept}"
    weighted = accept.exact or accept.importance_weight is not None
    rule = f"0 {where} (it is not exact and has no importance weight)"
    cap = config.algorithm.importance_cap
    yield "algorithm.importance_cap", rule, weighted or not (cap and drafts.verifies_previous)
    size = rollout.prompts_per_step
    rule = f"0 or >= rollout.prompts_per_step = {size}"
    yield "rollout.store_prompts", rule, not 0 < rollout.store_prompts < size
    rule = f"False {where} (it is not exact for responses that were not finished)"
    runs_ahead = rollout.run_ahead and drafts.verifies_previous
    yield "rollout.run_ahead", rule, accept.samples_anew or not runs_ahead


def _carry_over(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules that exclude rows and groups that wait for a later step."""
    partial = config.rollout.partial
    curriculum = meaning(config, "curriculum.name")
    by_name = f"curriculum.name is {config.curriculum.name}"
    waits = ["algorithm.dynamic_sampling is True"] if config.algorithm.dynamic_sampling else []
    if curriculum.screens:
        waits.append(by_name)
    if not curriculum.foresees:
        yield "rollout.partial", f"0 where {by_name}", not partial
        yield "rollout.run_ahead", f"False where {by_name}", not config.rollout.run_ahead
    partial_rows = ["rollout.partial is > 0"] if partial else []
    for reason in waits + partial_rows:
        by_update = meaning(config, "updates.old_logprobs").by_update
        yield "updates.old_logprobs", f"rollout where {reason}", not by_update


def _sampling_mask(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of an update on the tokens that the sampler allowed."""
    if not config.algorithm.keep_sampling_mask:
        return
    where = "where algorithm.keep_sampling_mask is True"
    rule = f"0 {where} (no sampler wrote a solution)"
    yield "algorithm.solution_coef", rule, not config.algorithm.solution_coef
    # Rows that share a prefix in a trie also share what the sampler allowed.
    shares = meaning(config, "updates.packing").share
    several = {
        "rollout.partial is > 0": config.rollout.partial > 0,
        f"curriculum.name is {config.curriculum.name}": meaning(config, "curriculum.name").screens,
    }
    for reason, holds in several.items():
        rule = f"sequences or rows {where} and {reason} (a group is of several policies)"
        yield "updates.packing", rule, not (shares and holds)


def _staleness(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of batches that earlier weights sampled."""
    old = config.updates.old_logprobs
    by_update = config.rollout.staleness and meaning(config, "updates.old_logprobs").by_update
    rule = (
        f"> 0 where rollout.staleness is {config.rollout.staleness} and updates.old_logprobs is "
        f"{old} (only the weight knows which weights sampled)"
    )
    yield "algorithm.importance_cap", rule, config.algorithm.importance_cap > 0 or not by_update


def _forks(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of groups whose rows fork."""
    rollout = config.rollout
    if not rollout.fork.segment:
        return
    where = "where rollout.fork.segment is > 0"
    rule = f"< rollout.response_len = {rollout.response_len}"
    yield "rollout.fork.segment", rule, rollout.fork.segment < rollout.response_len
    rule = f"<= rollout.group_size = {rollout.group_size}"
    yield "rollout.fork.roots", rule, rollout.fork.roots <= rollout.group_size
    lossless = load("rollout.engine.spec:acceptance_rule")(config).samples_anew
    rule = f"match {where} (other rules draw with the noise of the row itself)"
    yield "rollout.accept", rule, lossless
    rule = f"0 {where} (a response has the noise of those that it forked from)"
    yield "rollout.noise_refresh", rule, not rollout.noise_refresh
    yield "rollout.run_ahead", f"False {where}", not rollout.run_ahead
    yield "rollout.partial", f"0 {where}", not rollout.partial
    yield "environment.name", f'"" {where}', not config.environment.name
    screens = meaning(config, "curriculum.name").screens
    yield "curriculum.name", f"a curriculum that does not screen {where}", not screens


def _environment(config: ConfigDict) -> Iterator[Check]:
    if meaning(config, "data.source").plays:
        name = f"{config.data.source}:{config.data.name}"
        rule = f"{name} where data.source is {config.data.source} and data.name {config.data.name}"
        yield "environment.name", rule, config.environment.name == name
    if not config.environment.name:
        return
    rollout = config.rollout
    accept = meaning(config, "rollout.accept")
    previous = meaning(config, "rollout.draft").verifies_previous
    yield "rollout.partial", "0 where environment.name is set", not rollout.partial
    yield "rollout.run_ahead", "False where environment.name is set", not rollout.run_ahead
    rule = "another rule where environment.name is set (a random part of an episode is no turn)"
    yield "rollout.accept", rule, not (previous and accept.cuts_draft)


def _task(config: ConfigDict) -> Iterator[Check]:
    source = config.tokenizer.source
    model = config.model.source
    by_character = source in load("data.tokenizer:OF_ALPHABET")
    rule = f'"" or of a model where model.source is {model!r}'
    yield "tokenizer.source", rule, not (model and by_character)
    rule = f"False where tokenizer.source is {source}"
    chat = config.tokenizer.chat
    yield "tokenizer.chat", rule, not (by_character and chat)
    data = config.data.source
    reward = config.reward.name
    find_scorer = load("rewards.scorers:find_scorer")
    for function in load("inputs:reward_terms")(reward):
        rule = f"another one where data.source is {data} ({function} scores only its own tasks)"
        yield "reward.name", rule, find_scorer(function).source in ("", data)


def _adapters(config: ConfigDict) -> Iterator[Check]:
    weights = load("models.parameters:ADAPTED")
    found = False
    with contextlib.suppress(re.error):
        found = any(re.search(config.lora.targets, name) for name in weights)
    rule = f"a regular expression that is found in one of {', '.join(weights)}"
    yield "lora.targets", rule, found


def _solutions(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of solutions that are learned, before step 1 or in unsolved groups."""
    source = config.data.source
    field = config.data.solution_field
    warmup = config.warmup
    endless = meaning(config, "data.source").endless
    plays = meaning(config, "data.source").plays
    turns = config.environment.name
    if warmup.steps:
        rule = f"0 where environment.name is set and data.source is {source} (it has no solutions)"
        yield "warmup.steps", rule, not turns or (endless and not plays)
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
    yield coef, rule, not load("algorithms.advantages:has_critic")(critic)
    rule = "0 where algorithm.dynamic_sampling is True (it leaves unsolved groups out)"
    yield coef, rule, not config.algorithm.dynamic_sampling
    curriculum = config.curriculum.name
    rule = f"0 where curriculum.name is {curriculum} (it leaves unsolved groups out)"
    yield coef, rule, not meaning(config, "curriculum.name").screens


def _sizes(config: ConfigDict) -> Iterator[Check]:
    model = config.model
    rule = f"a divisor of model.num_heads = {model.num_heads}"
    yield "model.num_kv_heads", rule, model.num_heads % model.num_kv_heads == 0
    yield "model.head_dim", "even (rotary halves)", model.head_dim % 2 == 0


def _terms(config: ConfigDict) -> Iterator[Check]:
    """Yield the rules of terms that recipes add to the loss."""
    for term in load("recipes:all_chosen")(config, "TERM"):
        yield from term.rules(config)


RULES: tuple[Callable[[ConfigDict], Iterator[Check]], ...] = (
    _batches,
    _groups,
    _objective,
    _selected_rows,
    _drafts,
    _carry_over,
    _sampling_mask,
    _staleness,
    _forks,
    _environment,
    _task,
    _solutions,
    _sizes,
    _adapters,
    _terms,
)
