"""Rounds: one rollout and its rewards each, and how many of them a step needs.

Most steps are one round. Two ways to choose what is trained on take as many as it needs:

*Dynamic sampling* (DAPO, arXiv 2503.14476, section 3.2) goes on until the batch is full of groups
whose rewards differ. Groups of equal rewards, which no update would learn from, only become drafts.

*Screening* (SPEED, arXiv 2506.09016): a round samples a part of a group for new prompts, and the
rest of the group for prompts whose first part was neither all wrong nor all right; both in one
rollout of always the same size: what the second parts take, screening does not get, so that the
prompts that wait for theirs never outgrow two rounds.

In both, groups that are over wait for the next step, first in first out, with the log-probs of the
policy that sampled them, so that the update's ratio is their importance weight. Nothing is dropped.
A batch that `algorithm.max_gen_batches` rounds, or the prompts there are, could not fill is
trained on as it is: with groups of equal rewards, or without responses, in the empty places.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.build import Trainer, TrainerState, policy_copy
from specrl_jax.data.curriculum import base_id, part_of
from specrl_jax.data.prompts import concatenate, select
from specrl_jax.episodes import respond
from specrl_jax.rewards.workers import Scores
from specrl_jax.rollout.carry_over import CarryOver, Waiting, assemble
from specrl_jax.rollout.drafts.suffix_match import SuffixIndex
from specrl_jax.rollout.generate import DraftInputs, Noise, RolloutResult, make_corpus
from specrl_jax.types import Drafts, Prompts, Rollout, Source


@dataclasses.dataclass(frozen=True)
class Round:
    """One rollout: whole groups, with tokens, lens and prefix_lens on the host too.

    forced: int [B], tokens that were not the policy's. previous_tokens, previous_lens: the rows'
    last responses. turns: int [B].
    """

    prompts: Prompts
    outcome: RolloutResult
    tokens: np.ndarray
    lens: np.ndarray
    prefix_lens: np.ndarray
    forced: np.ndarray
    previous_tokens: np.ndarray
    previous_lens: np.ndarray
    scores: Scores
    turns: np.ndarray


def play_round(
    run: Trainer, state: TrainerState, prompts: Prompts, ahead: Prompts | None, *clocks
) -> Round:
    """Rolls `prompts` out, scores the responses and stores them as drafts.

    clocks: context managers for rollouts, and for rewards.
    """
    settings, group = run.config.rollout, run.plan.group_size
    with clocks[0]:
        previous = state.store.get(prompts, group, step=state.step)
        weights = policy_copy(run.model, state.train.params)
        drafts = _drafts(run, state, prompts)
        corpus = _corpus(run, state, prompts, ahead)
    found = respond(
        run.plan,
        weights,
        prompts,
        Noise(run.key, state.step),
        pool=run.pool,
        tokenizer=run.tokenizer,
        max_turns=run.max_turns,
        behind=run.config.environment.allow_unfinished,
        clocks=clocks,
        drafts=DraftInputs(drafts, state.log_lenience, corpus),
        speculation=state.cost,
        carry_over=CarryOver(
            next_prompts=ahead,
            resumed=state.carried,
            stop_after_groups=settings.prompts_per_step if settings.partial else 0,
        ),
    )
    outcome = found.outcome
    rollout, prompts = outcome.rollout, select(prompts, outcome.groups)
    prefix_lens, sources = jax.device_get((rollout.prefix_lens, rollout.sources))
    before = [x[outcome.rows] for x in jax.device_get((previous.tokens, previous.lens))]
    state.store.put(prompts, rollout, step=state.step)
    state.stream.observe(prompts, found.scores.rewards.reshape(-1, group))
    forced = np.sum(sources == Source.FORCED, axis=1)
    return Round(
        prompts, outcome, found.tokens, found.lens, prefix_lens, forced, *before,
        found.scores, found.turns,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Group:
    """Responses to a prompt. places: (part, row) of each; a part is one of several rollouts."""

    prompt_id: str
    places: tuple[tuple[int, int], ...]
    rewards: tuple[float, ...]

    def joined(self, other: "_Group") -> "_Group":
        return dataclasses.replace(
            self, places=self.places + other.places, rewards=self.rewards + other.rewards
        )

    def without(self, count: int) -> "_Group":
        """The group but its first `count` responses."""
        return dataclasses.replace(self, places=self.places[count:], rewards=self.rewards[count:])


class Desk:
    """The rounds of a step that waits for a full batch.

    parts: what rows are read from: what waited, what was screened before, and each round. complete:
    groups to learn from, oldest first. flat: of equal rewards. screened: begun groups.
    """

    def __init__(self, run: Trainer, state: TrainerState):
        self.run, self.state = run, state
        self.rounds: list[Round] = []
        self.parts = [state.waiting.rollout]
        self.complete = _kept_groups(state.waiting, 0, run.trained_group)
        self.flat: list[_Group] = []
        self.screened: list[_Group] = []
        if state.screened is not None:
            self.parts.append(state.screened.rollout)
            self.screened = _kept_groups(state.screened, 1, run.plan.group_size)
        self.old_parts = len(self.parts)  # of earlier steps
        self.counts = {"screened": 0, "kept": 0}
        # A prompt has one response of each number in a step: none is rolled out twice.
        self.busy = {group.prompt_id for group in self.complete + self.screened}

    def fill(self, *clocks) -> None:
        """Rounds until there are enough groups, or no more are allowed or possible."""
        size = self.run.config.rollout.prompts_per_step
        while not self.rounds or (
            len(self.complete) < size
            and len(self.rounds) < self.run.config.algorithm.max_gen_batches
            and self._free() >= self._fresh_prompts()
            # Groups that turn out flat leave the batch short however many are begun: no more than
            # a round of them may wait when another is begun, so that two rounds' rows hold all.
            and len(self.screened) <= self.run.rows // self.run.plan.group_size
        ):
            self._round(*clocks)

    def _free(self) -> int:
        return len(self.run.prompts.lens) - len(self.busy)

    def _continuing(self) -> list[_Group]:
        """Begun groups that the next round finishes: as many as the batch still needs."""
        needed = self.run.config.rollout.prompts_per_step - len(self.complete)
        return self.screened[: max(needed, 0)]

    def _fresh_prompts(self) -> int:
        """Prompts that the next round begins."""
        group, part = self.run.config.rollout.group_size, self.run.plan.group_size
        return self.run.rows // part - len(self._continuing()) * (group // part - 1)

    def _round(self, *clocks) -> None:
        stream, part = self.state.stream, self.run.plan.group_size
        firsts = range(part, self.run.config.rollout.group_size, part)
        going = self._continuing()
        fresh = stream.take(self._fresh_prompts(), busy=tuple(self.busy))
        self.busy |= {example.prompt_id for example in fresh.examples}
        prompts = fresh
        if going:
            rest = stream.find([group.prompt_id for group in going])
            for first in firsts:
                prompts = concatenate(prompts, part_of(rest, first))
        found = play_round(self.run, self.state, prompts, None, *clocks)
        self.rounds.append(found)
        self.parts.append(found.outcome.rollout)
        groups = _groups(found, len(self.parts) - 1, part)
        begun, more = groups[: len(fresh.examples)], groups[len(fresh.examples) :]
        self.screened = self.screened[len(going) :]
        for number, group in enumerate(going):
            for piece in more[number :: len(going)]:
                group = group.joined(piece)
            self._finished(group)
        for group in begun:
            if len(group.places) == self.run.config.rollout.group_size:
                self._finished(group)
            else:
                self._judge(group)

    def _finished(self, group: _Group) -> None:
        group = group.without(len(group.places) - self.run.trained_group)
        differ = min(group.rewards) < max(group.rewards)
        learns = differ or not self.run.config.algorithm.dynamic_sampling
        (self.complete if learns else self.flat).append(group)

    def _judge(self, group: _Group) -> None:
        """Whether a screened prompt is worth the rest of its group."""
        settings, rate = self.run.config.curriculum, float(np.mean(group.rewards))
        kept = settings.low < rate < settings.high
        self.counts["screened"] += 1
        self.counts["kept"] += kept
        if kept:
            self.screened.append(group)

    def batch(self) -> tuple[tuple[Prompts, Rollout, np.ndarray], dict[str, float]]:
        """(prompts, rollout, rewards) of the first Q groups; the others wait in the state."""
        run, size = self.run, self.run.config.rollout.prompts_per_step
        flat = self.flat[: max(size - len(self.complete), 0)]
        chosen, over = (self.complete + flat)[:size], self.complete[size:]
        missing = size - len(chosen)
        filler = _Group(self.rounds[0].prompts.examples[0].prompt_id, (), ())
        chosen += [dataclasses.replace(filler, prompt_id=base_id(filler.prompt_id))] * missing
        rollout = self._assemble(chosen, size * run.trained_group, run.trained_group)
        rewards = np.zeros((size, run.trained_group), np.float32)
        for row, group in zip(rewards, chosen, strict=True):
            row[: len(group.rewards)] = group.rewards
        values = {
            "rollout/gen_batches": len(self.rounds),
            "rollout/groups_waiting": len(over),
            "rollout/groups_filled": len(flat) + missing,
            "rollout/stale_fraction": self._stale_fraction(chosen, rollout),
        }
        self.state.waiting = self._kept(over, self.state.waiting, run.trained_group)
        if self.state.screened is not None:
            values["curriculum/waiting"] = len(self.screened)
            values["curriculum/screened"] = self.counts["screened"]
            if self.counts["screened"]:
                values["curriculum/kept"] = self.counts["kept"] / self.counts["screened"]
            self.state.screened = self._kept(
                self.screened, self.state.screened, run.plan.group_size
            )
        prompts = self.state.stream.find([group.prompt_id for group in chosen])
        return (prompts, rollout, rewards.reshape(-1)), values

    def _stale_fraction(self, groups: list[_Group], rollout: Rollout) -> float:
        """Share of the tokens that earlier steps sampled."""
        lens = np.asarray(jax.device_get(rollout.lens)).reshape(len(groups), -1)
        stale = sum(
            int(length)
            for group, row in zip(groups, lens, strict=True)
            for (part, _), length in zip(group.places, row)
            if part < self.old_parts
        )
        return stale / max(int(lens.sum()), 1)

    def _kept(self, groups: list[_Group], before: Waiting, size: int) -> Waiting:
        rollout = self._assemble(groups, len(before.rollout.lens), size)
        names = tuple(group.prompt_id for group in groups)
        return Waiting(rollout, names, tuple(group.rewards for group in groups))

    def _assemble(self, groups: list[_Group], rows: int, size: int) -> Rollout:
        """Rows of the groups, one after another; nothing in those of a group without responses."""
        places = [(-1, 0)] * rows
        for number, group in enumerate(groups):
            first = number * size
            places[first : first + len(group.places)] = group.places
        return assemble(self.parts, np.asarray(places, np.int32))


def _kept_groups(kept: Waiting, part: int, size: int) -> list[_Group]:
    return [
        _Group(name, tuple((part, q * size + i) for i in range(size)), rewards)
        for q, (name, rewards) in enumerate(zip(kept.prompt_ids, kept.rewards, strict=True))
    ]


def _groups(found: Round, part: int, size: int) -> list[_Group]:
    """Of a round, in order; parts of groups by the name of the whole."""
    rewards = found.scores.rewards.reshape(-1, size).tolist()
    return [
        _Group(
            base_id(example.prompt_id),
            tuple((part, q * size + i) for i in range(size)),
            tuple(rewards[q]),
        )
        for q, example in enumerate(found.prompts.examples)
    ]


def _drafts(run: Trainer, state: TrainerState, prompts: Prompts) -> Drafts | None:
    """Earlier responses to `prompts`, or what was begun for them ahead."""
    settings, drafts = run.config.rollout, None
    if "previous" in settings.draft:
        drafts = state.store.get(
            prompts, run.plan.group_size, age=settings.draft_age, step=state.step
        )
    return drafts if state.ahead is None else state.ahead.drafts_for(prompts, drafts)


def _corpus(
    run: Trainer, state: TrainerState, prompts: Prompts, ahead: Prompts | None
) -> Callable[[], SuffixIndex] | None:
    """What makes the corpus of tree drafts, None where there are none; also begins to fetch what
    the next step will need of the store. The responses that it is made of are read at once and kept
    until the rollout is over."""
    batches = [prompts] if ahead is None else [prompts, ahead]
    found = []
    if "tree" in run.config.rollout.draft:
        found = [_sources(run, state, batch) for batch in batches]
        if state.ahead is not None:  # the newest generation: a sibling may go on where one stopped
            begun = [state.ahead.sources(batch) for batch in batches]
            found = [
                tuple(jnp.concatenate(x, axis=1) for x in zip(*both)) for both in zip(begun, found)
            ]
    if state.carried is None and state.waiting is None and state.stream.foresees:
        state.store.prefetch(state.stream.peek())
    if not found:
        return None
    tokens, lens = (jnp.concatenate(x) for x in zip(*found))
    settings = run.config.rollout
    form = settings.tree.decay, settings.group_size
    return functools.partial(make_corpus, run.plan, tokens, lens, *form)


def _sources(run: Trainer, state: TrainerState, prompts: Prompts) -> tuple[jax.Array, jax.Array]:
    """All stored responses of the prompts, newest generation first; of groups in parts, of all."""
    part = run.plan.group_size
    firsts = range(0, run.config.rollout.group_size, part)
    if len(firsts) == 1:
        return state.store.sources(prompts, step=state.step)
    whole = state.stream.find([base_id(example.prompt_id) for example in prompts.examples])
    parts = [state.store.sources(part_of(whole, first), step=state.step) for first in firsts]

    def joined(arrays) -> jax.Array:
        """[Q, E * n, ...] of every part → [Q, E * G, ...]."""
        cut = [x.reshape(x.shape[0], -1, part, *x.shape[2:]) for x in arrays]
        whole = jnp.concatenate(cut, axis=2)
        return whole.reshape(whole.shape[0], -1, *whole.shape[3:])

    return tuple(joined(arrays) for arrays in zip(*parts))
