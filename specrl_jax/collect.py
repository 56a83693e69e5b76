"""What a step trains on: prompts → drafts → rollout → rewards, until there is a batch.

One round of `rounds.py`, or as many as it takes.
"""

import dataclasses
import time
from operator import attrgetter

import jax
import numpy as np

from specrl_jax.algorithms import off_policy as reuse
from specrl_jax.build import Trainer, TrainerState
from specrl_jax.data.prompts import concatenate
from specrl_jax.group_buffer import Desk, Round, play_round
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.telemetry.rollout_metrics import GROUP_REWARDS, reward_metrics, rollout_metrics
from specrl_jax.types import Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """A batch of Q groups, G rows each, and the rounds that it took.

    rewards: float32 [Q * G]. log_lenience: nats, of the step's acceptance; rejected_mass: what its
    drafts show, see `reuse.estimate_rejected_mass`.
    """

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray
    metrics: dict[str, float]
    rounds: list[Round]
    log_lenience: float
    rejected_mass: float

    def importance_weights(self, rule: str) -> jax.Array:
        """float32 [Q * G, R]; rule: `rollout.accept`."""
        inputs = (np.float32(self.log_lenience), np.float32(self.rejected_mass))
        weight = acceptance.RULES[rule].importance_weight
        return reuse.importance_weights(self.rollout, *inputs, weight)

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


def gather(run: Trainer, state: TrainerState) -> TrainBatch:
    """The batch of the step that begins (`state.step` counts it); changes `state`."""
    state.stream.begin(state.step)
    clocks = Clock("rollout"), Clock("reward")
    if state.waiting is None:
        rounds = [play_round(run, state, *state.next_prompts(run), *clocks)]
        batch = (rounds[0].prompts, rounds[0].outcome.rollout, rounds[0].scores.rewards)
        values = rounds[0].outcome.metrics() | _left_over(state, rounds[0])
    else:
        desk = Desk(run, state)
        desk.fill(*clocks)
        rounds = desk.rounds
        batch, values = desk.batch()
        values |= Stats.total([x.outcome.stats for x in rounds]).metrics()
    values |= _metrics(run, rounds)
    held = state.store.nbytes()
    values["rollout/draft_store_gib"] = held["device"] / 2**30
    values["rollout/draft_store_host_gib"] = held["host"] / 2**30
    if state.screened is not None:  # rounds hold parts of groups
        whole = reward_metrics(batch[2], np.zeros(len(batch[2]), bool), run.trained_group)
        values |= {name: whole[name] for name in GROUP_REWARDS}
    for clock in clocks:
        values |= clock.lap
    log_lenience, told, rejected_mass = state.log_lenience, {}, 0.0
    rule = run.plan.program.accept
    if rule != "match":
        inputs = _joined(rounds, "prefix_lens", "outcome.draft_lens")
        rejected_mass = reuse.estimate_rejected_mass(*inputs)
        told = reuse.measure(batch[1], log_lenience, rejected_mass)
        if acceptance.RULES[rule].lenience:
            told["reuse/log_lenience"] = log_lenience
            _adapt_lenience(run, state, told)
        else:
            told.pop("reuse/lenient_fraction", None)
    return TrainBatch(*batch, values | told, rounds, log_lenience, rejected_mass)


def _adapt_lenience(run: Trainer, state: TrainerState, told: dict[str, float]) -> None:
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


def _joined(rounds: list[Round], *names: str) -> tuple[np.ndarray, ...]:
    """Arrays of all rounds, by attribute path."""
    return tuple(np.concatenate([attrgetter(name)(x) for x in rounds]) for name in names)


def _metrics(run: Trainer, rounds: list[Round]) -> dict[str, float]:
    """Of all that was rolled out, whether it is trained on or not."""
    values = rollout_metrics(
        *_joined(rounds, "tokens", "lens", "prefix_lens"),
        run.plan.program.eos_ids,
        offered=_joined(rounds, "outcome.draft_lens")[0],
        previous=_joined(rounds, "previous_tokens", "previous_lens"),
        forced=_joined(rounds, "forced")[0],
    )
    if run.max_turns:
        values["rollout/turns_mean"] = float(np.mean(_joined(rounds, "turns")[0]))
    rewards = _joined(rounds, "scores.rewards", "scores.failed")
    return values | reward_metrics(*rewards, run.plan.group_size)


def _left_over(state: TrainerState, found: Round) -> dict[str, float]:
    """Takes what the rollout leaves to the next one into `state`; returns what came of the last."""
    values, outcome = {}, found.outcome
    if state.ahead is not None:
        begun = jax.device_get(state.ahead.drafts.lens) if state.ahead.prompt_ids else np.zeros(1)
        if begun.any():
            kept = int(found.prefix_lens[begun > 0].sum())
            values["rollout/run_ahead_accepted"] = kept / int(begun.sum())
        state.ahead = outcome.run_ahead or dataclasses.replace(state.ahead, prompt_ids=())
    state.carried = outcome.resumed
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
