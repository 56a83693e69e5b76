"""What a step trains on: prompts → drafts → rollout → rewards, until there is a batch.

A *round* is one rollout and its rewards. Most steps are one round; with dynamic sampling (DAPO,
arXiv 2503.14476, section 3.2) a step goes on until it has a batch of groups whose rewards differ.
Groups that are over wait for the next step, with the log-probs of the policy that sampled them, so
that the update's ratio is their importance weight. Groups of equal rewards, which no update would
learn from, only become drafts.
"""

import dataclasses
import math
import time
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.data import concatenate, select
from specrl_jax.evaluate import score
from specrl_jax.measure import reward_metrics, rollout_metrics
from specrl_jax.reward_pool import Scores
from specrl_jax.rollout.carry import Waiting, assemble
from specrl_jax.rollout.drafting import Corpus
from specrl_jax.rollout.engine import Stats
from specrl_jax.rollout.generate import Outcome, make_corpus, roll
from specrl_jax.run import Run, State, policy_copy
from specrl_jax.types import Drafts, Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A batch of Q groups, G rows each, and the rounds that it took. rewards: float32 [Q * G]."""

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray
    metrics: dict[str, float]
    rounds: list["_Round"]

    def told(self) -> tuple[Prompts, Rollout, np.ndarray, np.ndarray]:
        """What records tell of the step's own rollouts, on the host."""
        left_out = ("sampling_logprobs", "origin_logprobs", "top_ids", "top_logprobs")
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

    previous_tokens, previous_lens: the rows' last responses.
    """

    prompts: Prompts
    outcome: Outcome
    tokens: np.ndarray
    lens: np.ndarray
    prefix_lens: np.ndarray
    previous_tokens: np.ndarray
    previous_lens: np.ndarray
    scores: Scores


def gather(run: Run, state: State) -> Gathered:
    """The batch of the step that begins (`state.step` counts it); changes `state`."""
    clocks = Clock("rollout"), Clock("reward")
    if state.waiting is None:
        rounds = [_round(run, state, *state.next_prompts(run), *clocks)]
        batch = (rounds[0].prompts, rounds[0].outcome.rollout, rounds[0].scores.rewards)
        values = rounds[0].outcome.metrics() | _left_over(state, rounds[0])
    else:
        rounds = _until_full(run, state, *clocks)
        batch, values = _batch(run, state, rounds)
        values |= Stats.total([x.outcome.stats for x in rounds]).metrics()
    values |= _metrics(run, rounds)
    for clock in clocks:
        values |= clock.lap
    return Gathered(*batch, values, rounds)


def _round(
    run: Run,
    state: State,
    prompts: Prompts,
    ahead: Prompts | None,
    rollout_clock: "Clock",
    reward_clock: "Clock",
) -> _Round:
    """Rolls `prompts` out, scores the responses and stores them as drafts."""
    settings = run.config.rollout
    with rollout_clock:
        previous = state.store.get(prompts, settings.group_size, step=state.step)
        outcome = roll(
            run.plan,
            policy_copy(run.model, state.train.params),
            prompts,
            key=run.key,
            step=state.step,
            drafts=_drafts(run, state, prompts),
            corpus=_corpus(run, state, prompts, ahead),
            log_lenience=math.log(settings.lenience) if settings.lenience else -math.inf,
            cost=state.cost,
            ahead=ahead,
            carried=state.carried,
            wanted=settings.prompts_per_step if settings.partial else 0,
        )
        rollout, prompts = outcome.rollout, select(prompts, outcome.groups)
        known = jax.device_get((rollout.tokens, rollout.lens, rollout.prefix_lens))
    with reward_clock:
        scores = score(run.pool, run.tokenizer, prompts, *known[:2])
    before = [x[outcome.rows] for x in jax.device_get((previous.tokens, previous.lens))]
    state.store.put(prompts, rollout, step=state.step)
    return _Round(prompts, outcome, *known, *before, scores)


def _until_full(run: Run, state: State, *clocks: "Clock") -> list[_Round]:
    """Rounds until there are enough groups to learn from, or no more are allowed or possible."""
    settings = run.config
    size, waiting = settings.rollout.prompts_per_step, state.waiting.prompt_ids
    most = (len(run.prompts.lens) - len(waiting)) // size
    rounds, busy, enough = [], list(waiting), len(waiting)
    while not rounds or (enough < size and len(rounds) < min(most, settings.algorithm.max_rounds)):
        prompts = state.stream.take(size, busy=busy)
        rounds.append(_round(run, state, prompts, None, *clocks))
        busy += [example.prompt_id for example in prompts.examples]
        enough += int(np.sum(_differ(rounds[-1].scores.rewards, settings.rollout.group_size)))
    return rounds


def _batch(run: Run, state: State, rounds: list[_Round]):
    """(prompts, rollout, rewards) of the first Q groups to learn from; the others wait."""
    settings, waiting = run.config.rollout, state.waiting
    size, group = settings.prompts_per_step, settings.group_size
    names = [waiting.prompt_ids, *([e.prompt_id for e in x.prompts.examples] for x in rounds)]
    rewards = [np.asarray(waiting.rewards, np.float32), *(x.scores.rewards for x in rounds)]
    rewards = [x.reshape(-1, group) for x in rewards]
    # (part, group) of all that are at hand: those waiting, then round by round.
    places = [(0, g) for g in range(len(waiting.prompt_ids))]
    flat = []
    for part, found in enumerate(rewards[1:], start=1):
        differ = _differ(found, group)
        places += [(part, g) for g in np.flatnonzero(differ).tolist()]
        flat += [(part, g) for g in np.flatnonzero(~differ).tolist()]
    filled = max(size - len(places), 0)
    chosen, over = (places + flat[:filled])[:size], places[size:]
    parts = [waiting.rollout, *(x.outcome.rollout for x in rounds)]

    def of(places: list[tuple[int, int]]):
        return [names[p][g] for p, g in places], [rewards[p][g] for p, g in places]

    ids, scores = of(chosen)
    rollout = assemble(parts, chosen, size * group, group)
    state.waiting = Waiting(
        assemble(parts, over, size * group, group),
        tuple(of(over)[0]),
        tuple(tuple(x.tolist()) for x in of(over)[1]),
    )
    lens = np.asarray(jax.device_get(rollout.lens)).reshape(size, group)
    stale = [part == 0 for part, _ in chosen]
    return (state.stream.find(ids), rollout, np.concatenate(scores)), {
        "rollout/rounds": len(rounds),
        "rollout/groups_waiting": len(over),
        "rollout/groups_filled": filled,
        "rollout/stale_fraction": int(lens[stale].sum()) / max(int(lens.sum()), 1),
    }


def _differ(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """bool [Q]: groups whose rewards are not all the same."""
    groups = rewards.reshape(-1, group_size)
    return (groups != groups[:, :1]).any(axis=1)


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
    )
    rewards = _joined(rounds, "scores.rewards", "scores.failed")
    return values | reward_metrics(*rewards, run.config.rollout.group_size)


def _drafts(run: Run, state: State, prompts: Prompts) -> Drafts | None:
    """Earlier responses to `prompts`, or what was begun for them ahead."""
    settings, drafts = run.config.rollout, None
    if "previous" in settings.draft:
        drafts = state.store.get(
            prompts, settings.group_size, age=settings.draft_age, step=state.step
        )
    return drafts if state.ahead is None else state.ahead.over(drafts, prompts)


def _corpus(run: Run, state: State, prompts: Prompts, ahead: Prompts | None) -> Corpus | None:
    """What tree drafts read; also begins to fetch what the next step will need of the store."""
    batches = [prompts] if ahead is None else [prompts, ahead]
    found = []
    if "tree" in run.config.rollout.draft:
        found = [state.store.sources(batch, step=state.step) for batch in batches]
    if state.carried is None and state.waiting is None:  # else nobody knows yet who comes next
        state.store.prefetch(state.stream.peek())
    if not found:
        return None
    tokens, lens = (jnp.concatenate(x) for x in zip(*found))
    return make_corpus(run.plan, tokens, lens, run.config.rollout.tree.decay)


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
