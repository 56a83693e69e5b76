"""Rollout of groups that fork: rows that start with the tokens of another (TreePO, 2508.17445).

A group starts with a few rows, the roots; its other rows wait, without cost. At each boundary,
every `segment` tokens, waiting rows start as copies of their group's unfinished rows. A row draws
noise by its own number, before and after a fork.

    roots 2, branches 2, G = 4, segments of 3 tokens       row 0    a b c|d e f g ■
                                                           row 1    a h i|j ■
                                                           row 2   (a b c)k l m ■
                                                           row 3   (a h i)n o p q ■

When all rows of a group have ended and some still wait, these start with the tokens of an ended row
up to one of its boundaries, drawn at random; it may be the prompt's end. Which rows fork depends on
lengths. So a fork is distributed as the policy given its start, and a root without conditions; but
a group as a whole contains more of the prefixes that lead to long responses.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.advantages import EPSILON, for_all_tokens, whole
from specrl_jax.algorithms.evidence import Advantage, AdvantageConfig, Estimate, Evidence
from specrl_jax.config.fields import Check, Section, Values, When, field
from specrl_jax.config.kinds import integer
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.drafts.edit import turn_drafts
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import RolloutResult, generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import where_rows
from specrl_jax.rollout.spec import RolloutSpec, acceptance_rule
from specrl_jax.sharding import put, reshard, take_rows
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.types import Batch, Rollout, Source


@dataclasses.dataclass(frozen=True)
class Forks:
    """Rolls out groups that grow from few rows."""

    segment: int  # tokens between two boundaries, at which rows fork
    roots: int  # rows that start at the prompt
    branches: int  # continuations of a row at a boundary

    @staticmethod
    def asked_by(config) -> str:
        return "treepo.segment" if config.treepo.segment else ""

    @classmethod
    def from_config(cls, config) -> "Forks":
        return cls(**config.treepo)

    def __call__(
        self,
        spec: RolloutSpec,
        weights: Params,
        requests: Requests,
        *,
        speculation: Speculation | None = None,
        clock: Stopwatch,
    ) -> RolloutResult:
        """Roll out G responses to each of Q prompts. Arguments: see `Responder.roll_out`.

        Rows of the requests are empty, and neither done nor in the background.
        """
        with clock.timed("time/rollout"):
            return self._grow(spec, weights, requests, speculation)

    def _grow(
        self,
        spec: RolloutSpec,
        weights: Params,
        requests: Requests,
        speculation: Speculation | None,
    ) -> RolloutResult:
        groups = _Groups(self, spec, requests)
        stats = []
        while True:
            result = generate(spec, weights, groups.requests_up_to(groups.limits), speculation)
            stats.append(result.stats)
            draft_lens = groups.draft_lens + result.draft_lens
            if not groups.waiting.any():
                total = Stats.total(stats)
                return dataclasses.replace(result, draft_lens=draft_lens, stats=total)
            groups.fork(result.rollout, draft_lens)


ROLL_OUT = Forks


class _Groups:
    """Groups in progress; arrays are [Q, G], except those of rows."""

    def __init__(self, forks: Forks, spec: RolloutSpec, requests: Requests):
        shape = (len(requests.prompts.lens), spec.group_size)
        self.forks = forks
        self.spec = spec
        self.requests = requests
        self.key_words = hosts.fetch(jax.random.key_data(requests.noise.key)).tolist()
        self.waiting = np.broadcast_to(np.arange(shape[1]) >= forks.roots, shape)
        self.done = self.waiting  # rows that get no more tokens now
        self.lens = np.zeros(shape, np.int32)
        self.draft_lens = np.zeros(self.lens.size, np.int32)
        self.rollout = spec.empty_rollout(self.lens.size)

    @property
    def limits(self) -> np.ndarray:
        """Return the lengths at which rows stop, int32 [B]: the next boundary; R if none waits."""
        slots = self.spec.response_slots
        stop = slots
        if self.waiting.any():
            stop = np.minimum(self.lens + self.forks.segment, slots)
        return np.where(self.done, self.lens, stop).astype(np.int32).reshape(-1)

    def requests_up_to(self, limits: np.ndarray) -> Requests:
        """Return the requests with the rows' tokens, and their drafts up to the limits [B]."""
        done = self.done.reshape(-1)
        drafts = self.requests.drafts
        if drafts is not None:
            done_rows = put(done, "batch")
            drafts = turn_drafts(drafts, self.rollout, done_rows, self.spec.eos_ids, self.spec.stop)
            lens = jnp.minimum(drafts.lens, put(limits, "batch"))
            drafts = dataclasses.replace(drafts, lens=lens)
        return dataclasses.replace(
            self.requests, drafts=drafts, held=self.rollout, done=done, max_lens=limits
        )

    def fork(self, rollout: Rollout, draft_lens: np.ndarray) -> None:
        """Start waiting rows with the current tokens of others.

        draft_lens: int32 [B], tokens of the rows' drafts so far.
        """
        groups, size = self.lens.shape
        tokens, lens = hosts.fetch((rollout.tokens.ids, rollout.lens))
        ended = (lens == self.spec.response_slots) | self.spec.ended(tokens, lens)
        ended = ended.reshape(groups, size)
        parents = plan_forks(self.waiting, ended, self.forks.branches)
        forked = parents != np.arange(size)
        self.lens = np.take_along_axis(lens.reshape(groups, size), parents, axis=1)
        for group, row in np.argwhere(forked & np.take_along_axis(ended, parents, axis=1)).tolist():
            self.lens[group, row] = self._boundary(group, row)
        self.waiting = self.waiting & ~forked
        self.done = (ended | self.waiting) & ~forked
        rows = np.arange(groups)[:, None] * size + parents
        self.rollout = fork_rows(rollout, rows.reshape(-1).astype(np.int32), self.lens.reshape(-1))
        self.draft_lens = np.where(forked.reshape(-1), 0, draft_lens).astype(np.int32)

    def _boundary(self, group: int, row: int) -> int:
        """Draw a boundary before the last token of the ended row that `row` forks from."""
        step = self.requests.noise.steps_of(*self.lens.shape)[group, row]
        segment = self.forks.segment
        ids = self.requests.prompts.ids[group].tolist()
        rng = np.random.default_rng([*self.key_words, int(step), *ids, row])
        return int(rng.integers(-(-self.lens[group, row] // segment))) * segment


def plan_forks(waiting: np.ndarray, ended: np.ndarray, branches: int) -> np.ndarray:
    """Return int [Q, G]: the row of its group that each waiting row starts with, if any now.

    Other rows have their own number. Unfinished rows are continued `branches` times in all, in
    turn, while rows wait; if there are none, ended rows are, equally often.

    waiting, ended: bool [Q, G]; rows that wait, and which of the others have ended.
    """
    parents = np.tile(np.arange(waiting.shape[1]), (len(waiting), 1))
    for own, waits, over in zip(parents, waiting, ended):
        free = np.flatnonzero(waits)
        unfinished = np.flatnonzero(~waits & ~over)
        turns = np.tile(unfinished, branches - 1)
        if not len(unfinished):
            turns = np.tile(np.flatnonzero(~waits), branches)
        count = min(len(free), len(turns))
        own[free[:count]] = turns[:count]
    return parents


@jax.jit
def fork_rows(rollout: Rollout, parents: Array, lens: Array) -> Rollout:
    """Return rows [B], each starting with the first tokens of its parent row.

    parents, lens: int32 [B]. A row that is its own parent is unchanged.
    """
    taken = take_rows(rollout, parents)
    own = reshard(parents == jnp.arange(len(parents)), "batch")
    lens = reshard(lens, "batch")
    copied = jnp.arange(rollout.tokens.ids.shape[1])[None, :] < lens[:, None]
    sources = jnp.where(copied, jnp.int8(Source.COPIED), jnp.int8(Source.SAMPLED))
    sources = where_rows(own, taken.tokens.sources, sources)
    return Rollout(
        tokens=dataclasses.replace(taken.tokens, sources=sources),
        lens=jnp.where(own, taken.lens, lens),
        prefix_lens=jnp.where(own, taken.prefix_lens, 0),
    )


# The advantage over responses that share a prefix -------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TreeConfig(AdvantageConfig):
    segment: int = 0  # tokens between two boundaries at which responses fork

    @classmethod
    def of(cls, config, group_size: int) -> "TreeConfig":
        return cls.from_config(config, group_size, segment=config.treepo.segment)


def prefix_relative(rewards: Array, tokens: Array, lens: Array, config: TreeConfig) -> Array:
    """Return the advantage [B] of a response over those that share its prefixes (arXiv 2508.17445).

        Aᵢ = Σ_d w_d·(rᵢ − mean(r of the responses that share the first d segments)) / Σ_d w_d

    w_d is 1, or 0 if a response shares its first d segments with no other, or ends with them. At
    d = 0 the whole group shares the prompt. As options of `group_relative`, the sums are divided by
    their std over the batch, and each difference gets the factor n / (n − 1), with n the number of
    these responses. Differs from the authors' code, which whitens over tokens: here a group of
    equal rewards gets exactly 0. Worked row, G = 4: rewards 1 0 0 0, the first two share a segment,
    and so do the others. d = 0: 0.75 −0.25 −0.25 −0.25; d = 1: 0.5 −0.5 0 0; advantages 0.625
    −0.375 −0.125 −0.125.

    rewards: float32 [B], not split; B = Q·G, the rows of a group are contiguous.
    tokens, lens: int32 [B, R] and [B], the responses, not split.
    """
    size = config.group_size
    rewards = rewards.reshape(-1, size)
    tokens = tokens.reshape(-1, size, tokens.shape[1])
    lens = lens.reshape(-1, size)
    differences = rewards[:, :, None] - rewards[:, None, :]
    alike = jnp.ones(differences.shape, bool)  # [Q, G, G]: two responses share the first segments
    total = jnp.zeros_like(rewards)
    weights = jnp.zeros_like(rewards)
    for first in range(0, tokens.shape[2], config.segment):
        if first:
            segment = tokens[:, :, first - config.segment : first]
            alike &= jnp.all(segment[:, :, None] == segment[:, None, :], axis=3)
            goes_on = lens > first
            alike &= goes_on[:, :, None] & goes_on[:, None, :]
        count = jnp.sum(alike, axis=2)
        others = count - 1 if config.leave_one_out else count
        centred = jnp.sum(jnp.where(alike, differences, 0), axis=2) / jnp.maximum(others, 1)
        weight = jnp.where(count > 1, 1, 0)
        total += weight * centred
        weights += weight
    advantages = total / weights
    if config.normalize_std:
        advantages = advantages / (jnp.std(advantages, ddof=1) + EPSILON)
    return advantages.reshape(-1)


def estimate(evidence: Evidence, config: TreeConfig) -> Estimate:
    """Estimate by `prefix_relative`, the same for all tokens of a response."""
    return _by_prefix(evidence.rewards, evidence.batch, config)


@functools.partial(jax.jit, static_argnums=2)
def _by_prefix(rewards: Array, batch: Batch, config: TreeConfig) -> Estimate:
    slots = whole(batch.prompt_lens)[:, None] + jnp.arange(batch.old_logprobs.shape[1])[None, :]
    tokens = jnp.take_along_axis(whole(batch.tokens), slots, axis=1)
    lens = whole(batch.response_lens)
    advantages = prefix_relative(whole(rewards), tokens, lens, config)
    return for_all_tokens(advantages, batch)


def rules(config: Values) -> Iterator[Check]:
    """Yield the rules of advantages over shared prefixes."""
    rule = "another one where treepo.segment is 0 (no responses fork)"
    yield "algorithm.advantage", rule, config.treepo.segment > 0


ADVANTAGES = {"tree": Advantage(estimate, TreeConfig.of, rules=rules)}


# Configuration ------------------------------------------------------------------------------------

_ON = When("treepo.segment", lambda c: c.treepo.segment > 0, "4")
# fmt: off
SECTIONS = (Section("treepo", "a group grows from a few responses (TreePO)", (
    field("segment", 0, "tokens after which unfinished responses fork; 0: off; TreePO 512",
          integer()),
    field("roots", 2, "responses that a group starts with; TreePO 2 to 8", integer(1)),
    field("branches", 2, "continuations of a response that forks; TreePO 2", integer(2)),
), on=_ON),)
# fmt: on
RENAMED = {f"rollout.fork.{name}": f"treepo.{name}" for name in ("segment", "roots", "branches")}


def _rules(config: Values) -> Iterator[Check]:
    rollout = config.rollout
    fork = config.treepo
    if not fork.segment:
        return
    where = "where treepo.segment is > 0"
    rule = f"< rollout.response_len = {rollout.response_len}"
    yield "treepo.segment", rule, fork.segment < rollout.response_len
    rule = f"<= rollout.group_size = {rollout.group_size}"
    yield "treepo.roots", rule, fork.roots <= rollout.group_size
    rule = f"match {where} (other rules draw with the noise of the row itself)"
    yield "rollout.accept", rule, acceptance_rule(config).samples_every_token
    rule = f"0 {where} (a response has the noise of those that it forked from)"
    yield "rollout.noise_refresh", rule, not rollout.noise_refresh
    yield "rollout.run_ahead", f"False {where}", not config.get("rollout.run_ahead")
    yield "rollout.partial", f"0 {where}", not config.get("rollout.partial")
    yield "environment.name", f'"" {where}', not config.environment.name
    screens = config.meaning("curriculum.name").by_parts
    yield "curriculum.name", f"a curriculum that does not screen {where}", not screens


RULES = (_rules,)
