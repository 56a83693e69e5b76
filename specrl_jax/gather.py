"""What a step trains on: prompts → drafts → rollout → rewards, until there is a batch.

A *round* is one rollout and its rewards. Most steps are one round. Two ways to choose what is
trained on take as many as it needs:

*Dynamic sampling* (DAPO, arXiv 2503.14476, section 3.2) goes on until the batch is full of groups
whose rewards differ. Groups of equal rewards, which no update would learn from, only become drafts.

*Screening* (SPEED, arXiv 2506.09016): a round samples a part of a group for new prompts, and the
rest of the group for prompts whose first part was neither all wrong nor all right; both in one
rollout of always the same size: what the second parts take, screening does not get, so that the
prompts that wait for theirs never outgrow two rounds.

In both, groups that are over wait for the next step, first in first out, with the log-probs of the
policy that sampled them, so that the update's ratio is their importance weight. Nothing is dropped.
A batch that `algorithm.max_rounds` rounds could not fill is trained on as it
is: with groups of equal rewards, or without responses, in the empty places.
"""

import dataclasses
import time
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.curriculum import base_id, part_of
from specrl_jax.data import concatenate, select
from specrl_jax.episodes import respond
from specrl_jax.measure import reward_metrics, rollout_metrics
from specrl_jax.reward_pool import Scores
from specrl_jax.rollout import reuse
from specrl_jax.rollout.carry import Waiting, assemble
from specrl_jax.rollout.drafting import Corpus
from specrl_jax.rollout.engine import Stats
from specrl_jax.rollout.generate import Outcome, make_corpus
from specrl_jax.run import Run, State, policy_copy
from specrl_jax.types import Drafts, Prompts, Rollout, Source


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A batch of Q groups, G rows each, and the rounds that it took.

    rewards: float32 [Q * G]. log_lenience: nats, of the step's acceptance; rejected_mass: what its
    drafts show, see `reuse.estimate_rejected_mass`.
    """

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray
    metrics: dict[str, float]
    rounds: list["_Round"]
    log_lenience: float
    rejected_mass: float

    def importance_weights(self, rule: str) -> jax.Array:
        """float32 [Q * G, R]; rule: `rollout.accept`."""
        inputs = (np.float32(self.log_lenience), np.float32(self.rejected_mass))
        return reuse.importance_weights(self.rollout, *inputs, rule)

    def told(self) -> tuple[Prompts, Rollout, np.ndarray, np.ndarray]:
        """What records tell of the step's own rollouts, on the host."""
        left_out = ("sampling_logprobs", "origin_logprobs", "draft_logprobs")
        left_out += ("top_ids", "top_logprobs")
        parts = [
            jax.device_get(dataclasses.replace(x.outcome.rollout, **dict.fromkeys(left_out)))
            for x in self.rounds
        ]
        prompts, *others = (x.prompts for x in self.rounds)
        for more in others:
            prompts = concatenate(prompts, more)
        rollout = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        return prompts, rollout, *_joined(self.rounds, "scores.rewards", "scores.failed")


@dataclasses.dataclass(frozen=True)
class _Round:
    """One rollout: whole groups, with tokens, lens and prefix_lens on the host too.

    forced: int [B], tokens that were not the policy's. previous_tokens, previous_lens: the rows'
    last responses. turns: int [B].
    """

    prompts: Prompts
    outcome: Outcome
    tokens: np.ndarray
    lens: np.ndarray
    prefix_lens: np.ndarray
    forced: np.ndarray
    previous_tokens: np.ndarray
    previous_lens: np.ndarray
    scores: Scores
    turns: np.ndarray


def gather(run: Run, state: State) -> Gathered:
    """The batch of the step that begins (`state.step` counts it); changes `state`."""
    clocks = Clock("rollout"), Clock("reward")
    if state.waiting is None:
        rounds = [_round(run, state, *state.next_prompts(run), *clocks)]
        batch = (rounds[0].prompts, rounds[0].outcome.rollout, rounds[0].scores.rewards)
        values = rounds[0].outcome.metrics() | _left_over(state, rounds[0])
    else:
        desk = _Desk(run, state)
        desk.fill(*clocks)
        rounds = desk.rounds
        batch, values = desk.batch()
        values |= Stats.total([x.outcome.stats for x in rounds]).metrics()
    values |= _metrics(run, rounds)
    for clock in clocks:
        values |= clock.lap
    log_lenience, told, rejected_mass = state.log_lenience, {}, 0.0
    if "previous" in run.config.rollout.draft and run.config.rollout.accept != "match":
        inputs = _joined(rounds, "prefix_lens", "outcome.offered")
        rejected_mass = reuse.estimate_rejected_mass(*inputs)
        told = reuse.measure(batch[1], log_lenience, rejected_mass)
        told["reuse/log_lenience"] = log_lenience
        _adapt_lenience(run, state, told)
    return Gathered(*batch, values | told, rounds, log_lenience, rejected_mass)


def _adapt_lenience(run: Run, state: State, told: dict[str, float]) -> None:
    """The next step's lenience, where it is controlled and the step kept something."""
    settings = run.config.rollout
    found = told.get(reuse.MEASURES[settings.lenience_measure])
    if settings.lenience_auto and found is not None:
        state.log_lenience = reuse.next_log_lenience(
            state.log_lenience,
            found,
            target=settings.lenience_target,
            gain=settings.lenience_gain,
            low=settings.lenience_min,
            high=settings.lenience_max,
        )


def _round(
    run: Run, state: State, prompts: Prompts, ahead: Prompts | None, *clocks: "Clock"
) -> _Round:
    """Rolls `prompts` out, scores the responses and stores them as drafts. clocks: of both."""
    settings, group = run.config.rollout, run.plan.group_size
    with clocks[0]:
        previous = state.store.get(prompts, group, step=state.step)
        weights = policy_copy(run.model, state.train.params)
    found = respond(
        run.plan,
        weights,
        prompts,
        pool=run.pool,
        tokenizer=run.tokenizer,
        max_turns=run.max_turns,
        clocks=clocks,
        key=run.key,
        step=state.step,
        drafts=_drafts(run, state, prompts),
        corpus=lambda: _corpus(run, state, prompts, ahead),
        log_lenience=state.log_lenience,
        cost=state.cost,
        ahead=ahead,
        carried=state.carried,
        wanted=settings.prompts_per_step if settings.partial else 0,
    )
    outcome = found.outcome
    rollout, prompts = outcome.rollout, select(prompts, outcome.groups)
    prefix_lens, sources = jax.device_get((rollout.prefix_lens, rollout.sources))
    before = [x[outcome.rows] for x in jax.device_get((previous.tokens, previous.lens))]
    state.store.put(prompts, rollout, step=state.step)
    state.stream.observe(prompts, found.scores.rewards.reshape(-1, group))
    forced = np.sum(sources == Source.FORCED, axis=1)
    return _Round(
        prompts, outcome, found.tokens, found.lens, prefix_lens, forced, *before,
        found.scores, found.turns,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Group:
    """Responses to a prompt. places: (part, row) of each, where a part is one of several rollouts.

    stale: from an earlier step.
    """

    prompt_id: str
    places: tuple[tuple[int, int], ...]
    rewards: tuple[float, ...]
    stale: bool = False

    def joined(self, other: "_Group") -> "_Group":
        return dataclasses.replace(
            self, places=self.places + other.places, rewards=self.rewards + other.rewards
        )

    def without(self, count: int) -> "_Group":
        """The group but its first `count` responses."""
        return dataclasses.replace(self, places=self.places[count:], rewards=self.rewards[count:])


class _Desk:
    """The rounds of a step that waits for a full batch.

    parts: what rows are read from: what waited, what was screened before, and each round. complete:
    groups to learn from, oldest first. flat: of equal rewards. screened: begun groups.
    """

    def __init__(self, run: Run, state: State):
        self.run, self.state, self.rounds = run, state, []
        self.parts = [state.waiting.rollout]
        self.complete = _kept_groups(state.waiting, 0, run.trained_group)
        self.flat: list[_Group] = []
        self.screened: list[_Group] = []
        if state.screened is not None:
            self.parts.append(state.screened.rollout)
            self.screened = _kept_groups(state.screened, 1, run.plan.group_size)
        self.counts = {"screened": 0, "kept": 0}
        # A prompt has one response of each number in a step: none is rolled out twice.
        self.busy = {group.prompt_id for group in self.complete + self.screened}

    def fill(self, *clocks: "Clock") -> None:
        """Rounds until there are enough groups, or no more are allowed or possible."""
        size = self.run.config.rollout.prompts_per_step
        while not self.rounds or (
            len(self.complete) < size
            and len(self.rounds) < self.run.config.algorithm.max_rounds
            and self._free() >= self._fresh_prompts()
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

    def _round(self, *clocks: "Clock") -> None:
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
        found = _round(self.run, self.state, prompts, None, *clocks)
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
        settings = self.run.config
        group = group.without(len(group.places) - self.run.trained_group)
        differ = min(group.rewards) < max(group.rewards)
        (self.complete if differ or not settings.algorithm.dynamic_sampling else self.flat).append(
            group
        )

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
            "rollout/rounds": len(self.rounds),
            "rollout/groups_waiting": len(over),
            "rollout/groups_filled": len(flat) + missing,
            "rollout/stale_fraction": _stale_fraction(rollout, [x.stale for x in chosen]),
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
        _Group(name, tuple((part, q * size + i) for i in range(size)), rewards, stale=True)
        for q, (name, rewards) in enumerate(zip(kept.prompt_ids, kept.rewards, strict=True))
    ]


def _groups(found: _Round, part: int, size: int) -> list[_Group]:
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


def _stale_fraction(rollout: Rollout, stale: list[bool]) -> float:
    """Share of the tokens that are of stale groups."""
    lens = np.asarray(jax.device_get(rollout.lens)).reshape(len(stale), -1)
    return int(lens[np.asarray(stale)].sum()) / max(int(lens.sum()), 1)


def _joined(rounds: list[_Round], *names: str) -> tuple[np.ndarray, ...]:
    """Arrays of all rounds, by attribute path."""
    return tuple(np.concatenate([attrgetter(name)(x) for x in rounds]) for name in names)


def _metrics(run: Run, rounds: list[_Round]) -> dict[str, float]:
    """Of all that was rolled out, whether it is trained on or not."""
    values = rollout_metrics(
        *_joined(rounds, "tokens", "lens", "prefix_lens"),
        run.plan.setup.eos_ids,
        offered=_joined(rounds, "outcome.offered")[0],
        previous=_joined(rounds, "previous_tokens", "previous_lens"),
        forced=_joined(rounds, "forced")[0],
    )
    if run.max_turns:
        values["rollout/turns_mean"] = float(np.mean(_joined(rounds, "turns")[0]))
    rewards = _joined(rounds, "scores.rewards", "scores.failed")
    return values | reward_metrics(*rewards, run.plan.group_size)


def _drafts(run: Run, state: State, prompts: Prompts) -> Drafts | None:
    """Earlier responses to `prompts`, or what was begun for them ahead."""
    settings, drafts = run.config.rollout, None
    if "previous" in settings.draft:
        drafts = state.store.get(
            prompts, run.plan.group_size, age=settings.draft_age, step=state.step
        )
    return drafts if state.ahead is None else state.ahead.over(drafts, prompts)


def _corpus(run: Run, state: State, prompts: Prompts, ahead: Prompts | None) -> Corpus | None:
    """What tree drafts read; also begins to fetch what the next step will need of the store."""
    batches = [prompts] if ahead is None else [prompts, ahead]
    found = []
    if "tree" in run.config.rollout.draft:
        found = [_sources(run, state, batch) for batch in batches]
    if state.carried is None and state.waiting is None and state.stream.foresees:
        state.store.prefetch(state.stream.peek())
    if not found:
        return None
    tokens, lens = (jnp.concatenate(x) for x in zip(*found))
    settings = run.config.rollout
    return make_corpus(run.plan, tokens, lens, settings.tree.decay, settings.group_size)


def _sources(run: Run, state: State, prompts: Prompts) -> tuple[jax.Array, jax.Array]:
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


def _left_over(state: State, found: _Round) -> dict[str, float]:
    """Takes what the rollout leaves to the next one into `state`; returns what came of the last."""
    values, outcome = {}, found.outcome
    if state.ahead is not None:
        begun = jax.device_get(state.ahead.drafts.lens) if state.ahead.prompt_ids else np.zeros(1)
        if begun.any():
            kept = int(found.prefix_lens[begun > 0].sum())
            values["rollout/ahead_kept"] = kept / int(begun.sum())
        state.ahead = outcome.ahead or dataclasses.replace(state.ahead, prompt_ids=())
    state.carried = outcome.carried
    return values


class Clock:
    """Seconds spent in its `with` blocks, as the metric time/NAME in `lap`."""

    def __init__(self, name: str):
        self.name, self.seconds = f"time/{name}", 0.0

    def __enter__(self) -> "Clock":
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds += time.perf_counter() - self.start

    @property
    def lap(self) -> dict[str, float]:
        return {self.name: self.seconds}
