"""Groups of responses that wait: for the rest of their group, or for a full batch.

`GroupBuffer` takes prompt ids and rewards; it returns which prompts to roll out next and which
groups to train on. A response is named by its row id (rollout, row). `pick_rows` returns the row
ids of groups, and `rows.assemble` gathers the rows.

*Dynamic sampling* (DAPO, arXiv 2503.14476, section 3.2) generates until the batch is full of groups
with differing rewards. *Screening* (SPEED, arXiv 2506.09016) first rolls out a part of each group
and finishes the groups whose part is neither all wrong nor all right. Surplus groups wait for the
next step, first in first out; they keep the log-probs of the policy that sampled them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from specrl_jax import hosts
from specrl_jax.config.fields import Check, Section, Values, When, field
from specrl_jax.config.kinds import SWITCH, integer
from specrl_jax.data import curriculum
from specrl_jax.data.curriculum import PromptStream, part_of
from specrl_jax.data.settings import RATES
from specrl_jax.responses import Responses
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import assemble
from specrl_jax.training.collect import Collector
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Prompts, Rollout

KEPT = 0  # rollout number of rows kept from earlier steps; this step's rollouts are 1, 2, ...


@dataclasses.dataclass(frozen=True)
class Group:
    """Responses to one prompt."""

    prompt_id: str
    row_ids: tuple[tuple[int, int], ...] = ()  # (rollout, row) of each response
    rewards: tuple[float, ...] = ()
    ended: tuple[bool, ...] = ()  # False: the length limit cut the response

    def joined(self, part: "Group") -> "Group":
        """Return the group with a further part of its responses added."""
        return Group(
            self.prompt_id,
            self.row_ids + part.row_ids,
            self.rewards + part.rewards,
            self.ended + part.ended,
        )

    def without_first(self, count: int) -> "Group":
        """Return the group without its first `count` responses."""
        return Group(self.prompt_id, self.row_ids[count:], self.rewards[count:], self.ended[count:])


class WaitingGroups(Collector):
    """Rolls out until groups with a signal fill the batch; surplus groups wait."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.groups = GroupBuffer(run.config, len(run.prompts.lens))
        self.groups.kept_rows = run.rollout_spec.empty_rollout(self.groups.max_waiting_rows)

    @staticmethod
    def asked_by(config) -> str:
        if config.algorithm.dynamic_sampling:
            return "algorithm.dynamic_sampling"
        return "curriculum.name" if part_size(config) < config.rollout.group_size else ""

    @classmethod
    def rollout_group_size(cls, config) -> int:
        return part_size(config)

    @classmethod
    def trained_group_size(cls, config) -> int:
        group_size = config.rollout.group_size
        part = part_size(config)
        keeps_all = part >= group_size or config.curriculum.reuse_screening
        return group_size if keeps_all else group_size - part

    @classmethod
    def check_enough(cls, config, prompts: int) -> None:
        """Raise ValueError if no prompts are left for a rollout besides all that may wait."""
        size = config.rollout.prompts_per_step
        least = 2 * size
        reason = cls.asked_by(config)
        if part_size(config) < config.rollout.group_size:
            parts = config.rollout.group_size // part_size(config)
            least = (3 * parts + 1) * size
            reason = f"curriculum.name = {config.curriculum.name}"
        if prompts < least:
            raise ValueError(
                f"data.prompts must be >= {least} for {reason} with rollout.prompts_per_step = "
                f"{size}, got {prompts}; or use fewer prompts per step"
            )

    @staticmethod
    def keeps_signal(config) -> bool:
        return config.algorithm.dynamic_sampling

    def wants_rollout(self, done: Sequence[Responses]) -> bool:
        return self.groups.wants_rollout()

    def choose_prompts(self, state: RolloutState) -> Requests:
        """Return new prompts, then the remaining parts of the groups to finish."""
        groups = self.groups
        prompts = state.stream.take(groups.num_new_prompts, busy=tuple(groups.busy))
        if groups.to_finish:
            to_finish = state.stream.find(groups.to_finish)
            parts = (part_of(to_finish, first) for first in groups.first_samples)
            prompts = Prompts.concatenate(prompts, *parts)
        return Requests(prompts, state.noise_key(prompts))

    def history(self, state: RolloutState, prompts: Prompts) -> DraftHistory:
        """Return the earlier responses of whole groups, whose parts are stored separately."""
        groups = self.groups
        whole = state.stream.find([example.prompt_id for example in prompts.examples])
        parts = [part_of(whole, first) for first in (0, *groups.first_samples)]
        stored = [super(WaitingGroups, self).history(state, part) for part in parts]
        tokens = jnp.concatenate([tokens for tokens, _ in stored], axis=2)
        return tokens, jnp.concatenate([lens for _, lens in stored], axis=2)

    def observe(self, state: RolloutState, responses: Responses) -> None:
        super().observe(state, responses)
        ids = [example.prompt_id for example in responses.prompts.examples]
        ended = responses.ended[: responses.num_rows].reshape(-1, responses.group_size)
        self.groups.add(ids, responses.group_rewards, ended)

    def finish_step(self, state: RolloutState, done: Sequence[Responses]) -> Collected:
        """Return the groups from the buffer; the rows of the others wait in it."""
        filler = done[0].prompts.examples[0].prompt_id
        groups, metrics = self.groups.take_batch(filler)
        row_ids, rewards, ended = pick_rows(groups, self.run.trained_group_size)
        sources = [self.groups.kept_rows, *(x.rollout for x in done)]
        rollout = assemble(sources, row_ids)
        lens = hosts.fetch(rollout.lens)
        stale = int(lens[row_ids[:, 0] == KEPT].sum())
        metrics["rollout/stale_fraction"] = stale / max(int(lens.sum()), 1)
        self.groups.kept_rows = assemble(sources, self.groups.keep())
        prompts = state.stream.find([group.prompt_id for group in groups])
        metrics |= Stats.total([x.stats for x in done]).metrics()
        return Collected(
            prompts,
            rollout,
            rewards,
            metrics,
            state.step,
            state.epoch,
            stale=stale > 0,
            ended=ended,
        )

    def arrays(self) -> Rollout | None:
        return self.groups.arrays()

    def host(self) -> dict[str, list]:
        return self.groups.host()

    def restore(self, host, arrays: Rollout | None) -> "WaitingGroups":
        self.groups.restore(host, arrays)
        return self


COLLECTOR = WaitingGroups


class Screened(PromptStream):
    """Uniform, as in SPEED (arXiv 2506.09016); `GroupBuffer` screens prompts with few responses."""

    by_parts = True


CURRICULA = {"speed": Screened}


def part_size(config) -> int:
    """Return how many responses per prompt one rollout has: a group, or the screening part."""
    settings = config.curriculum
    screens = curriculum.CURRICULA[settings.name].by_parts
    return settings.screening if screens else config.rollout.group_size


class GroupBuffer:
    """Groups of a step, and those that wait for a later one."""

    def __init__(self, config, total_prompts: int):
        self.config = config
        self.total_prompts = total_prompts
        self.groups_per_batch = config.rollout.prompts_per_step
        self.group_size = config.rollout.group_size
        self.part_size = part_size(config)
        self.num_rows = self.groups_per_batch * self.group_size  # of one rollout
        self.ready: list[Group] = []  # to train on, the oldest first
        self.unfinished: dict[str, Group] = {}  # screened, and worth finishing
        self.kept_rows: Rollout | None = None  # the rows of these groups, [max_waiting_rows]
        self.start_step()

    @property
    def screens(self) -> bool:
        return self.part_size < self.group_size

    @property
    def max_waiting_rows(self) -> int:
        """Most rows that wait between steps: a batch, and with screening two rollouts."""
        ready = self.groups_per_batch * WaitingGroups.trained_group_size(self.config)
        return ready + 2 * self.num_rows * self.screens

    def start_step(self) -> None:
        self.no_signal: list[Group] = []  # finished in this step, with equal rewards
        self.gen_batches = self.screened = self.worth_finishing = 0
        # A prompt is rolled out at most once in a step.
        self.busy = {group.prompt_id for group in self.ready} | self.unfinished.keys()

    # Rollouts -----------------------------------------------------------------------------------

    @property
    def to_finish(self) -> list[str]:
        """Ids of the prompts whose groups the next rollout finishes: as many as the batch needs."""
        missing = max(self.groups_per_batch - len(self.ready), 0)
        return list(self.unfinished)[:missing]

    @property
    def first_samples(self) -> list[int]:
        """Number of the first response in each part that finishes a group."""
        return list(range(self.part_size, self.group_size, self.part_size))

    @property
    def num_new_prompts(self) -> int:
        """Number of prompts that the next rollout starts, in the rows that `to_finish` leaves."""
        parts = self.num_rows // self.part_size
        return parts - len(self.to_finish) * len(self.first_samples)

    def wants_rollout(self) -> bool:
        """Return whether the batch needs another rollout and the limits allow it."""
        if not self.gen_batches:
            return True
        return (
            len(self.ready) < self.groups_per_batch
            and self.gen_batches < self.config.algorithm.max_gen_batches
            and self.total_prompts - len(self.busy) >= self.num_new_prompts
            # The unfinished groups must fit `max_waiting_rows`, two rollouts: another rollout
            # starts only while the unfinished groups are at most those of one rollout.
            and len(self.unfinished) <= self.num_rows // self.part_size
        )

    def add(self, prompt_ids: Sequence[str], rewards: np.ndarray, ended: np.ndarray) -> None:
        """Add the next rollout, of new groups or of further parts.

        rewards: [groups, part_size]. ended: bool [groups, part_size], responses that were not cut.
        """
        self.gen_batches += 1
        parts = zip(prompt_ids, rewards.tolist(), ended.tolist(), strict=True)
        for number, (prompt_id, row, ends) in enumerate(parts):
            first = number * self.part_size
            row_ids = tuple((self.gen_batches, first + i) for i in range(len(row)))
            self._add(Group(prompt_id, row_ids, tuple(row), tuple(ends)))

    def _add(self, part: Group) -> None:
        name = part.prompt_id
        self.busy.add(name)
        begun = self.unfinished.get(name, Group(name))
        group = begun.joined(part)
        if len(group.rewards) == self.group_size:
            self.unfinished.pop(name, None)
            self._finish(group)
        elif begun.rewards or self._is_worth_finishing(group):
            self.unfinished[name] = group

    def _is_worth_finishing(self, group: Group) -> bool:
        settings = self.config.curriculum
        worth = settings.low < float(np.mean(group.rewards)) < settings.high
        self.screened += 1
        self.worth_finishing += worth
        return worth

    def _finish(self, group: Group) -> None:
        first = self.group_size - WaitingGroups.trained_group_size(self.config)
        group = group.without_first(first)
        has_signal = min(group.rewards) < max(group.rewards)
        learns = has_signal or not self.config.algorithm.dynamic_sampling
        (self.ready if learns else self.no_signal).append(group)

    # The batch ----------------------------------------------------------------------------------

    def take_batch(self, filler_id: str) -> tuple[list[Group], dict[str, float]]:
        """Return the groups to train on, and the step's metrics.

        A batch that could not be filled gets groups without signal, then empty groups of the prompt
        `filler_id`.
        """
        size = self.groups_per_batch
        batch, self.ready = self.ready[:size], self.ready[size:]
        no_signal = self.no_signal[: size - len(batch)]
        empty = [Group(filler_id)] * (size - len(batch) - len(no_signal))
        metrics = {
            "rollout/gen_batches": self.gen_batches,
            "rollout/groups_waiting": len(self.ready),
            "rollout/groups_filled": len(no_signal) + len(empty),
        }
        if self.screens:
            metrics["curriculum/waiting"] = len(self.unfinished)
            metrics["curriculum/screened"] = self.screened
            if self.screened:
                metrics["curriculum/kept"] = self.worth_finishing / self.screened
        return batch + no_signal + empty, metrics

    def keep(self) -> np.ndarray:
        """End the step; return the ids of all rows that wait, int32 [max_waiting_rows, 2].

        From then on the groups' row ids are (KEPT, their index in this array). The caller sets
        `kept_rows` to these rows.
        """
        waiting = [*self.ready, *self.unfinished.values()]
        row_ids = [x for group in waiting for x in group.row_ids]
        self.restore(self.host(), self.kept_rows)
        return _padded(row_ids, self.max_waiting_rows)

    # Checkpoints --------------------------------------------------------------------------------

    def arrays(self) -> Rollout | None:
        return self.kept_rows

    def host(self) -> dict[str, list]:
        return {
            "ready": [[x.prompt_id, x.rewards, x.ended] for x in self.ready],
            "unfinished": [[x.prompt_id, x.rewards, x.ended] for x in self.unfinished.values()],
        }

    def restore(self, host, arrays: Rollout | None) -> "GroupBuffer":
        kept_row = itertools.count()

        def kept(prompt_id: str, rewards: Sequence[float], ended: Sequence[bool]) -> Group:
            row_ids = tuple((KEPT, next(kept_row)) for _ in rewards)
            return Group(prompt_id, row_ids, tuple(rewards), tuple(ended))

        self.ready = [kept(*group) for group in host["ready"]]
        self.unfinished = {group[0]: kept(*group) for group in host["unfinished"]}
        self.kept_rows = arrays
        self.start_step()
        return self


def pick_rows(
    groups: Sequence[Group], group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of groups: row ids int32 [B, 2], rewards float32 [B] and ended bool [B].

    For a missing response, the rollout is -1 and the reward 0.
    """
    rewards = np.zeros((len(groups), group_size), np.float32)
    ended = np.ones((len(groups), group_size), np.bool_)
    for i, group in enumerate(groups):
        rewards[i, : len(group.rewards)] = group.rewards
        ended[i, : len(group.ended)] = group.ended
    row_ids = np.concatenate([_padded(group.row_ids, group_size) for group in groups])
    return row_ids, rewards.reshape(-1), ended.reshape(-1)


def _padded(row_ids: Sequence[tuple[int, int]], rows: int) -> np.ndarray:
    return np.asarray([*row_ids, *[(-1, 0)] * (rows - len(row_ids))], np.int32)


SCREENS = When("curriculum.name", lambda c: c.meaning("curriculum.name").by_parts)
EFFECTS = {RATES: SCREENS}
SEVERAL_ROLLOUTS = When(
    "algorithm.dynamic_sampling",
    lambda c: c.algorithm.dynamic_sampling or c.meaning("curriculum.name").by_parts,
    "True",
)
# fmt: off
SECTIONS = (
    Section("algorithm", "", (
        field("dynamic_sampling", False, "DAPO: sample until a whole batch of groups has signal",
              SWITCH),
        field("max_gen_batches", 10, "most rollouts per step (dynamic_sampling, speed)",
              integer(1), SEVERAL_ROLLOUTS, neutral=1),
    )),
    Section("curriculum", "", (
        field("screening", 2, "speed: responses per group that screen its prompt; paper 4",
              integer(1), SCREENS),
        field("reuse_screening", True, "speed: train on the screening responses too (biased)",
              SWITCH, SCREENS),
    )),
)
# fmt: on


def _dynamic_sampling(config: Values) -> Iterator[Check]:
    if not config.algorithm.dynamic_sampling:
        return
    where = "where algorithm.dynamic_sampling is True"
    rule = f">= 2 {where} (one reward never differs)"
    yield "rollout.group_size", rule, config.rollout.group_size >= 2
    by_update = config.meaning("updates.old_logprobs").by_update
    yield "updates.old_logprobs", f"rollout {where}", not by_update


def _screening(config: Values) -> Iterator[Check]:
    if not config.meaning("curriculum.name").by_parts:
        return
    settings = config.curriculum
    group_size = config.rollout.group_size
    first = settings.screening
    where = f"where curriculum.name is {settings.name}"
    yield "curriculum.screening", f">= 2 {where}", first >= 2
    rule = f"a divisor of rollout.group_size = {group_size} and less"
    yield "curriculum.screening", rule, group_size % first == 0 and first < group_size
    yield "curriculum.low", f"< curriculum.high = {settings.high}", settings.low < settings.high
    by_update = config.meaning("updates.old_logprobs").by_update
    yield "updates.old_logprobs", f"rollout {where}", not by_update
    # Rows that share a prefix in a trie also share the tokens the sampler allowed.
    mixes = config.algorithm.keep_sampling_mask and config.meaning("updates.packing").share
    rule = (
        f"sequences or rows where algorithm.keep_sampling_mask is True and curriculum.name is "
        f"{settings.name} (a group comes from several policies)"
    )
    yield "updates.packing", rule, not mixes


RULES = (_dynamic_sampling, _screening)
