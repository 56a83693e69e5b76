"""Partial rollouts (CoPRIS, arXiv 2511.05589; APRIL, 2509.18521): a step ends once enough is done.

Q + X groups run, and the step ends once Q of them are done. The others keep tokens and log-probs
and resume in the next step. This is off-policy: each token keeps the log-prob of the policy that
sampled it, so the update's ratio is its importance weight. Within a step short responses finish
first; none is dropped.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.config.fields import Check, Section, Shards, Values, field
from specrl_jax.config.kinds import integer
from specrl_jax.responses import CompletedGroups, Responses
from specrl_jax.rollout.drafts.edit import without_drafts
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import rows_of, take
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.training.collect import Collector
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Drafts, Prompts, Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BegunRows:
    """Rows of X groups that have started."""

    rollout: Rollout  # the responses so far
    done: Array  # bool [X * G]
    # int32 [X * G], tokens of the row's draft; if the row is unfinished and nothing was rejected
    # yet, only the accepted ones: it loses the rest.
    spent_lens: Array

    @classmethod
    def empty(cls, spec: RolloutSpec, rows: int) -> "BegunRows":
        rollout = spec.empty_rollout(rows)
        return cls(rollout, rollout.lens > 0, rollout.lens)


class PartialRollout(Collector):
    """One rollout of more groups than are trained on; unfinished ones resume later."""

    def __init__(self, run: Run):
        super().__init__(run)
        settings = run.config.rollout
        rows = settings.partial * settings.group_size
        # Groups that have started: the first ones are in use, one per id.
        self.begun = BegunRows.empty(run.rollout_spec, rows)
        self.prompt_ids: tuple[str, ...] = ()
        # By group and sample: the step whose noise the row uses until its end.
        self.noise_steps: tuple[tuple[int, ...], ...] = ()
        self.held_lens = np.zeros(0, np.int32)  # of all rows, at the start of the step's rollout
        self.trained_lens = self.held_lens  # of the rows that are trained on

    @staticmethod
    def asked_by(config) -> str:
        return "rollout.partial" if config.rollout.partial else ""

    @classmethod
    def rows_per_rollout(cls, config) -> tuple[int, int]:
        rows, none = super().rows_per_rollout(config)
        return rows + config.rollout.partial * config.rollout.group_size, none

    @property
    def prompts_waiting(self) -> int:
        return len(self.prompt_ids)

    def choose_prompts(self, state: RolloutState) -> Requests:
        config = self.run.config.rollout
        size = config.prompts_per_step
        begun = len(self.prompt_ids)
        # The prompts for the rest of the run: the last step leaves none unfinished.
        rest = max(self.run.total_steps - state.step + 1, 1) * size
        # All groups that have started resume, even if the run was made shorter.
        count = max(min(size + config.partial, rest), begun)
        new = state.stream.take(count - begun, busy=self.prompt_ids)
        prompts = Prompts.concatenate(state.stream.find(self.prompt_ids), new)
        # Prompts that only pad the rollout: no token is spent on them.
        total = size + config.partial
        prompts = prompts.select(np.append(np.arange(count), np.zeros(total - count, int)))
        noise = state.noise_key(prompts)
        if begun:
            steps = noise.noise_steps.copy()
            steps[:begun] = self.noise_steps
            noise = dataclasses.replace(noise, noise_steps=steps)
        group_size = config.group_size
        held = take(self.begun, np.arange(begun * group_size), total * group_size)
        self.held_lens, done = hosts.fetch((held.rollout.lens, held.done))
        return Requests(
            prompts,
            noise,
            held=held.rollout,
            done=done | np.repeat(np.arange(total) >= count, group_size),
            first=np.arange(total) < begun,
            enough_groups=size + total - count,
        )

    def drafts(
        self, state: RolloutState, requests: Requests, stored: Drafts | None
    ) -> Drafts | None:
        """Return the drafts of groups without tokens."""
        if stored is None:
            return None
        group_size = self.run.rollout_spec.group_size
        holds = self.held_lens.reshape(-1, group_size).any(axis=1)
        return without_drafts(stored, np.repeat(holds, group_size))

    def take(
        self, state: RolloutState, requests: Requests, result: RolloutResult
    ) -> CompletedGroups:
        """Keep the groups that resume later; return the first that are done."""
        config = self.run.config.rollout
        group_size = config.group_size
        rows = len(result.finished)
        spent = hosts.fetch(self.begun.spent_lens)[: len(self.prompt_ids) * group_size]
        draft_lens = result.draft_lens + np.pad(spent, (0, rows - len(spent)))
        # An unfinished row without a rejection so far loses the rest of its draft, which then does
        # not count as rejected. A row that has not started gets its draft again.
        lens, prefix_lens = hosts.fetch((result.rollout.lens, result.rollout.prefix_lens))
        unspoilt = ~result.finished & (prefix_lens == lens)
        spent = np.where(unspoilt, prefix_lens, draft_lens)
        group_done = result.finished.reshape(-1, group_size).all(axis=1)
        fillers = requests.enough_groups - config.prompts_per_step
        finished = np.flatnonzero(group_done)[: config.prompts_per_step]
        others = np.setdiff1d(np.arange(len(group_done) - fillers), finished)
        kept = BegunRows(result.rollout, put(result.finished, "batch"), put(spent, "batch"))
        self.begun = take(kept, rows_of(others, group_size), len(self.begun.done))
        self.prompt_ids = tuple(requests.prompts.examples[q].prompt_id for q in others)
        self.noise_steps = tuple(map(tuple, requests.noise.noise_steps[others].tolist()))
        self.trained_lens = self.held_lens[rows_of(finished, group_size)]
        return CompletedGroups(finished, dataclasses.replace(result, draft_lens=draft_lens))

    def finish_step(self, state: RolloutState, done: list[Responses]) -> Collected:
        batch = super().finish_step(state, done)
        total = int(np.sum(hosts.fetch(batch.rollout.lens)))
        metrics = {
            "rollout/tokens_resumed": int(self.held_lens.sum()),
            "rollout/stale_fraction": int(self.trained_lens.sum()) / max(total, 1),
        }
        metrics = batch.metrics | metrics
        return dataclasses.replace(batch, metrics=metrics, stale=bool(self.trained_lens.any()))

    def arrays(self) -> BegunRows:
        return self.begun

    def host(self) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        return self.prompt_ids, self.noise_steps

    def restore(self, host, arrays: BegunRows) -> "PartialRollout":
        prompt_ids, noise_steps = host
        self.begun = arrays
        self.prompt_ids = tuple(prompt_ids)
        self.noise_steps = tuple(map(tuple, noise_steps))
        return self


COLLECTOR = PartialRollout

# fmt: off
SECTIONS = (Section("rollout", "", (
    field("partial", 0, "extra prompts in a rollout, finished in a later step; 0: off",
          integer(), shards=Shards("rollout")),
)),)
# fmt: on


def _rules(config: Values) -> Iterator[Check]:
    if not config.rollout.partial:
        return
    name = "rollout.partial"
    where = f"where {name} is > 0"
    chooser = config.curriculum.name
    foresees = config.meaning("curriculum.name").foresees
    yield name, f"0 where curriculum.name is {chooser}", foresees
    yield name, "0 where environment.name is set", not config.environment.name
    by_update = config.meaning("updates.old_logprobs").by_update
    yield "updates.old_logprobs", f"rollout {where}", not by_update
    # Rows that share a prefix in a trie also share the tokens the sampler allowed.
    mixes = config.algorithm.keep_sampling_mask and config.meaning("updates.packing").share
    rule = (
        f"sequences or rows where algorithm.keep_sampling_mask is True and {name} is > 0 (a group "
        "comes from several policies)"
    )
    yield "updates.packing", rule, not mixes


RULES = (_rules,)
