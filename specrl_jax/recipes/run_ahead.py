"""Run-ahead (SRT, arXiv 2601.09083): prompts of the next step fill slots that would be idle.

They are rolled out with that step's noise. Their tokens are its drafts for the match rule, so they
change nothing.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.config.fields import Check, Section, Values, When, field
from specrl_jax.config.kinds import SWITCH
from specrl_jax.responses import CompletedGroups, Responses
from specrl_jax.rollout.drafts.edit import as_drafts, without_drafts
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import assemble, rows_of, take, where_rows
from specrl_jax.rollout.settings import GENERATIONS
from specrl_jax.sharding import reshard, shards
from specrl_jax.training.collect import Collector
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Drafts, Prompts, Rollout


class RunningAhead(Collector):
    """One rollout whose background rows start the prompts of the next step."""

    def __init__(self, run: Run):
        super().__init__(run)
        rows, _ = self.rows_per_rollout(run.config)
        # Responses started for the next step, [Q * G]; length 0 for rows that were not started.
        self.begun = as_drafts(Rollout.empty(rows, run.config.rollout.response_len))
        self.prompt_ids: tuple[str, ...] = ()  # of their Q prompts; () before the first step
        self.used_lens = np.zeros(rows, np.int32)  # of those that this step's rows started with

    @staticmethod
    def asked_by(config) -> str:
        return "rollout.run_ahead" if config.rollout.run_ahead else ""

    @classmethod
    def rows_per_rollout(cls, config) -> tuple[int, int]:
        rows, _ = super().rows_per_rollout(config)
        return rows, rows

    @staticmethod
    def has_drafts(config) -> bool:
        return True

    @staticmethod
    def generations(stored: int) -> int:
        return stored + 1 if stored else 0

    def choose_prompts(self, state: RolloutState) -> Requests:
        requests = super().choose_prompts(state)
        now = requests.prompts
        noise = requests.noise
        later = state.stream.peek()
        later_steps = state.reused_noise.noise_steps(later, state.step + 1)
        order = _order(len(now.lens))
        steps = np.concatenate([noise.noise_steps, later_steps])[order]
        return Requests(
            Prompts.concatenate(now, later).select(order),
            dataclasses.replace(noise, noise_steps=steps),
            background=np.repeat(order >= len(now.lens), steps.shape[1]),
        )

    def drafts(self, state: RolloutState, requests: Requests, stored: Drafts | None) -> Drafts:
        group_size = self.run.rollout_spec.group_size
        order = _order(len(requests.prompts.lens) // 2)
        rows = rows_of(order, group_size)
        picks = np.stack([np.where(requests.background, -1, 0), rows], axis=1)
        begun = assemble([self.begun], picks)
        if stored is not None:
            # On reused noise a row's previous response matches for longer than its early start.
            on_reused_noise = requests.noise.noise_steps < state.step
            begun = without_drafts(begun, on_reused_noise.reshape(-1))
            stored = without_drafts(stored, requests.background)
        return _over(begun, stored, np.bool_(self._is_of(requests.prompts)))

    def history(self, state: RolloutState, prompts: Prompts) -> DraftHistory:
        tokens, lens = super().history(state, prompts)
        count = len(prompts.lens)
        order = _order(count // 2)
        groups = (count // 2, 1, -1)
        ahead_tokens = reshard(self.begun.tokens.ids, None, None)
        ahead_tokens = ahead_tokens.reshape(*groups, ahead_tokens.shape[1])
        ahead_lens = reshard(self.begun.lens, None).reshape(groups)
        if not self._is_of(prompts):
            ahead_lens = jnp.zeros_like(ahead_lens)
        ahead_tokens = _with_zeros(ahead_tokens)[order]
        ahead_lens = _with_zeros(ahead_lens)[order]
        # Newest: a sibling may continue where one stopped.
        tokens = jnp.concatenate([ahead_tokens, tokens], axis=1)
        return tokens, jnp.concatenate([ahead_lens, lens], axis=1)

    def take(
        self, state: RolloutState, requests: Requests, result: RolloutResult
    ) -> CompletedGroups:
        """Keep what was started; return this step's groups."""
        now, later = np.split(np.argsort(_order(len(requests.prompts.lens) // 2)), 2)
        self.used_lens = np.zeros(1, np.int32)
        if self.prompt_ids:
            self.used_lens = hosts.fetch(self.begun.lens)
        rows = rows_of(later, self.run.rollout_spec.group_size)
        self.begun = as_drafts(take(result.rollout, rows))
        self.prompt_ids = _ids(requests.prompts.select(later))
        return CompletedGroups(now, result)

    def finish_step(self, state: RolloutState, done: list[Responses]) -> Collected:
        batch = super().finish_step(state, done)
        metrics = {"rollout/tokens_run_ahead": int(np.sum(hosts.fetch(self.begun.lens)))}
        lens = self.used_lens
        if DRAFT_SOURCES[self.run.config.rollout.draft].verifies_previous:  # see `drafts`
            lens = np.where(done[0].on_reused_noise, 0, lens)
        if lens.any():
            prefix_lens = hosts.fetch(batch.rollout.prefix_lens)
            share = int(prefix_lens[lens > 0].sum()) / int(lens.sum())
            metrics["rollout/run_ahead_accepted"] = share
        return dataclasses.replace(batch, metrics=batch.metrics | metrics)

    def _is_of(self, prompts: Prompts) -> bool:
        """Return whether the responses belong to the prompts that are not in the background."""
        now, _ = np.split(np.argsort(_order(len(prompts.lens) // 2)), 2)
        return self.prompt_ids == _ids(prompts.select(now))

    def arrays(self) -> Drafts:
        return self.begun

    def host(self) -> tuple[str, ...]:
        return self.prompt_ids

    def restore(self, host, arrays: Drafts) -> "RunningAhead":
        self.begun = arrays
        self.prompt_ids = tuple(host)
        return self


COLLECTOR = RunningAhead


def _order(count: int) -> np.ndarray:
    """Return the order of `count` groups and as many of the next step, int [2 * count], such that
    every shard has equally many background rows.
    """
    parts = np.arange(2 * count).reshape(2, shards("batch"), -1)
    return parts.swapaxes(0, 1).reshape(-1)


def _ids(prompts: Prompts) -> tuple[str, ...]:
    return tuple(example.prompt_id for example in prompts.examples)


def _with_zeros(groups: Array) -> Array:
    return jnp.concatenate([groups, jnp.zeros_like(groups)])


@jax.jit
def _over(begun: Drafts, stored: Drafts | None, own: Array) -> Drafts:
    """Return the drafts of rows that have started, and `stored` elsewhere; own: they are ours."""
    has_started = (begun.lens > 0) & own
    if stored is None:
        return dataclasses.replace(begun, lens=jnp.where(has_started, begun.lens, 0))
    stored = as_drafts(stored)
    return jax.tree.map(lambda new, old: where_rows(has_started, new, old), begun, stored)


# fmt: off
SECTIONS = (Section("rollout", "", (
    field("run_ahead", False, "background rows start the next step's responses (match rule only)",
          SWITCH),
)),)
# fmt: on
# What was started is one more generation.
EFFECTS = {GENERATIONS: When("rollout.run_ahead", lambda c: c.rollout.run_ahead, "True")}


def _rules(config: Values) -> Iterator[Check]:
    if not config.rollout.run_ahead:
        return
    name = "rollout.run_ahead"
    verifies = config.meaning("rollout.draft").verifies_previous
    exact = config.meaning("rollout.accept").samples_every_token
    accept = config.rollout.accept
    rule = f"False where rollout.accept is {accept} (it is not exact for responses that were not "
    yield name, rule + "finished)", exact or not verifies
    foresees = config.meaning("curriculum.name").foresees
    yield name, f"False where curriculum.name is {config.curriculum.name}", foresees
    yield name, "False where environment.name is set", not config.environment.name


RULES = (_rules,)
