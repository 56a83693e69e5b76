"""Responses and their rewards: one rollout, or several with an environment in between.

With an environment a response is a whole episode in one row: the policy's turns, each up to its end
of sequence, and between them what the environment answered. The environment's tokens are *forced*:
never sampled, verified or trained on. Noise is keyed by a token's position in the row, so drafts
change no token: a row's earlier episode drafts a turn as long as all tokens before it are the same.

Rows need not be in the same turn. Once no more than a share of them still generates, or waits for
its environment (`allow_unfinished`), all others go on. Replayable environments are always waited
for, so that no clock decides which rows are computed together.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax import hosts
from specrl_jax.data.prompts import select
from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.inputs import reason
from specrl_jax.models.transformer import Params
from specrl_jax.rewards.environment_pool import EnvironmentPool
from specrl_jax.rewards.sums import RewardSum
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.rewards.worker_process import Result
from specrl_jax.rewards.workers import RewardPool, Rewards
from specrl_jax.rollout.carry_over import CarryOver
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.forks import generate_forked
from specrl_jax.rollout.generate import NoiseKey, RolloutResult, RolloutSpec, generate
from specrl_jax.rollout.stop_strings import cut_at_stop
from specrl_jax.rollout.turns import EpisodeRollout
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.types import Drafts, Prompts, Rollout

MAX_TAG = 32  # tokens at the end of a prompt, in which a tag and blanks after it find room


class Turns(NamedTuple):
    """Turns of B episodes, of at most K turns each."""

    rewards: np.ndarray  # float32 [B, K], their sum is the episode's; 0 after the last turn
    ends: np.ndarray  # int32 [B, K], response tokens up to a turn's end; 0 for none
    roles: np.ndarray  # str [B, K], of what the environment answered; "" where nothing follows

    @property
    def counts(self) -> np.ndarray:
        """int [B], turns of each episode."""
        return np.count_nonzero(self.ends, axis=1)


@dataclasses.dataclass(frozen=True)
class Responses:
    """B = Q·G finished responses to Q prompts, G in a row for each, with their rewards."""

    prompts: Prompts  # [Q]; rows beyond theirs are padding
    result: RolloutResult
    tokens: np.ndarray  # int32 [B, R]
    lens: np.ndarray  # int32 [B]
    scores: Rewards
    turns: Turns | None = None  # of episodes
    # The rows' last responses before these, int32 [B, R], and their lengths.
    previous: tuple[np.ndarray, np.ndarray] | None = None
    on_kept_noise: np.ndarray | None = None  # bool [B], rows on noise that an earlier rollout had

    @property
    def rollout(self) -> Rollout:
        return self.result.rollout

    def after(self, previous: Drafts, on_kept_noise: np.ndarray) -> "Responses":
        """Return these with what went before.

        previous: the last responses of all rows that the rollout was given. on_kept_noise: bool
        [Q, G], rows on noise that an earlier rollout had.
        """
        tokens, lens = hosts.fetch((previous.tokens, previous.lens))
        rows = self.result.rows
        kept = on_kept_noise.reshape(-1)
        return dataclasses.replace(self, previous=(tokens[rows], lens[rows]), on_kept_noise=kept)

    @property
    def group_size(self) -> int:
        return self.result.group_size

    @property
    def num_rows(self) -> int:
        """Rows of the prompts, without padding."""
        return len(self.prompts.lens) * self.group_size

    @property
    def group_rewards(self) -> np.ndarray:
        """float32 [Q, G]"""
        return self.scores.rewards[: self.num_rows].reshape(-1, self.group_size)


def mean_by_function(rollouts: Sequence[Responses]) -> dict[str, float]:
    """Mean reward of each function of a sum, before its weight; without padding."""
    means = {}
    for name in rollouts[0].scores.by_function:
        rewards = [x.scores.by_function[name][: x.num_rows] for x in rollouts]
        means[name] = float(np.concatenate(rewards).mean(dtype=np.float64))
    return means


@dataclasses.dataclass(frozen=True)
class ResponseScorer:
    """Scorer that rolls prompts out and scores the responses: one turn each, or episodes."""

    pool: RewardPool | RewardSum | EnvironmentPool
    tokenizer: Tokenizer
    keep_special_tokens: bool = False  # in texts, but for the end of a response
    thought_tags: ThoughtTags = dataclasses.field(default_factory=ThoughtTags)
    stop: tuple[str, ...] = ()  # texts that end a turn
    keep_stop: bool = True  # texts hold the one that ended them
    max_turns: int = 0  # of an episode with the environment of the pool; 0: there is none
    # Share of the episodes that run, or wait, which the others do not wait for, [0, 1).
    allow_unfinished: float = 0.0

    def respond(
        self,
        spec: RolloutSpec,
        weights: Params,
        prompts: Prompts,
        noise: NoiseKey,
        *,
        carry_over: CarryOver = CarryOver(),
        speculation: Speculation | None = None,
        clock: Stopwatch | None = None,
    ) -> Responses:
        """Roll `prompts` out and score the responses; arguments as of `rollout.generate`.

        clock: gets the seconds of the rollouts and of the rewards, as time/rollout and time/reward,
          and of these the seconds that environments were waited for, as time/environment.
        """
        clock = clock or Stopwatch()
        options = {"carry_over": carry_over, "speculation": speculation}
        if self.max_turns:
            with clock.timed("time/rollout"):
                episodes = EpisodeRollout(spec, weights, prompts, noise, **options)
            return _Episodes(self, prompts, episodes, clock).play()
        roll_out = generate_forked if spec.forks else generate
        with clock.timed("time/rollout"):
            result = roll_out(spec, weights, prompts, noise, **options)
            tokens, lens = hosts.fetch((result.rollout.tokens, result.rollout.lens))
        with clock.timed("time/reward"):
            prompts = select(prompts, result.groups)
            texts = [self.text(row[:n]) for row, n in zip(tokens, lens)]
            parts = self.answer_parts(prompts, texts)
            problems = _problems(prompts, range(len(lens)), len(lens))
            scores = self.score(texts, *problems, parts)
        return Responses(prompts, result, tokens, lens, scores)

    def text(self, ids: np.ndarray) -> str:
        """Decode what rewards see of a response, int [n]."""
        ids = ids.tolist()
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, self.keep_special_tokens)
        return cut_at_stop(text, self.stop, self.keep_stop)

    def answer_parts(self, prompts: Prompts, texts: Sequence[str]) -> list[str | None]:
        """Return the answer part of each response, texts [B], to Q prompts; None without one."""
        group = len(texts) // len(prompts.lens)
        begun = [self._begins_thought(prompts, q) for q in range(len(prompts.lens))]
        return [self.thought_tags.answer_part(x, begun[i // group]) for i, x in enumerate(texts)]

    def _begins_thought(self, prompts: Prompts, q: int) -> bool:
        """Return whether a prompt leaves a thought open: at its end, or in what is continued."""
        prompt = prompts.examples[q].prompt
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            return self.thought_tags.is_open(prompt[-1]["content"])
        tokens = prompts.tokens[q, : prompts.lens[q]][-MAX_TAG:].tolist()
        return self.thought_tags.has_begun(self.tokenizer.decode(tokens, keep_special=True))

    def score(self, texts: Sequence, *problems: list) -> Rewards:
        """Return the pool's scores; every process scores a part and gets those of the others.

        An error of a pool in one process is raised in all.
        """
        part = hosts.own_part(len(texts))
        own = functools.partial(self.pool.score, texts[part], *(x[part] for x in problems))
        return Rewards.joined(_gather(own))


def _gather(function: Callable[[], Any]) -> list[Any]:
    """Return what a function returns in every process; what it raises in one is raised in all."""
    own: Any
    try:
        own = function()
    except Exception as error:
        own = error
    parts = hosts.gather(own)
    for x in parts:
        if isinstance(x, Exception):
            raise x
    return parts


def _problems(prompts: Prompts, rows: Sequence[int], total: int) -> tuple[list, list, list]:
    """Return answers, tasks and metadata of these rows, of `total` in all."""
    group = total // len(prompts.examples)
    examples = [prompts.examples[row // group] for row in rows]
    return (
        [example.answer for example in examples],
        [example.task for example in examples],
        [example.metadata for example in examples],
    )


class _Episodes:
    """Episodes in progress, one a row; arrays are [B].

    A row is in the middle of a turn, or waits for its environment, or is over. Each process runs
    the environments of a part of the rows.
    """

    def __init__(
        self, scorer: ResponseScorer, prompts: Prompts, rollout: EpisodeRollout, clock: Stopwatch
    ):
        rows = len(prompts.lens) * rollout.spec.group_size
        self.spec = rollout.spec
        self.prompts = prompts
        self.scorer = scorer
        self.rollout = rollout
        self.clock = clock
        shape = (rows, scorer.max_turns)
        self.turns = Turns(
            np.zeros(shape, np.float32), np.zeros(shape, np.int32), np.zeros(shape, "U4")
        )
        self.totals = np.zeros(rows, np.float32)  # rewards of all turns
        self.reasons = [""] * rows
        self.over = np.zeros(rows, bool)
        self.waits = np.zeros(rows, bool)  # for the environment
        self.turn_starts = np.zeros(rows, np.int32)  # where the turn's tokens begin
        self.own = hosts.own_part(rows)  # rows whose environments this process runs
        problems = zip(*_problems(prompts, range(rows)[self.own], rows))
        self.episodes = scorer.pool.begin(list(problems))

    def play(self) -> Responses:
        """Play the episodes to their ends."""
        while not self.over.all():
            with self.clock.timed("time/rollout"):
                tokens, lens, ended = self.rollout.run(self.scorer.allow_unfinished)
            with self.clock.timed("time/reward"):
                answers = self._answer(tokens, lens, ended)
            with self.clock.timed("time/rollout"):
                self.rollout.go_on(answers, self.over)
        self.scorer.pool.end(self.episodes)
        scores = Rewards.make_whole(self.totals, self.reasons)
        result = self.rollout.result()
        tokens, lens = hosts.fetch((result.rollout.tokens, result.rollout.lens))
        return Responses(self.prompts, result, tokens, lens, scores, self.turns)

    def _answer(
        self, tokens: np.ndarray, lens: np.ndarray, ended: np.ndarray
    ) -> dict[int, list[int]]:
        """Have the environment answer the turns that have ended; token ids of rows that go on."""
        rows = np.flatnonzero(ended & ~(self.over | self.waits)).tolist()
        answers = self._step(rows, tokens, lens)
        while np.all(self.over | self.waits) and not np.all(self.over):
            answers |= self._step([], tokens, lens)
        for row, ids in answers.items():
            self.turn_starts[row] = lens[row] + len(ids)
        return answers

    def _step(self, rows: list[int], tokens: np.ndarray, lens: np.ndarray) -> dict[int, list[int]]:
        """Hand over the turns of these rows and wait for all but the last answers.

        Returns their token ids by row, where rows go on.
        """
        self.waits[rows] = True
        self.turns.ends[rows, self.turns.counts[rows]] = lens[rows]
        own = [row for row in rows if row in range(len(lens))[self.own]]
        texts = [self.scorer.text(tokens[row, self.turn_starts[row] : lens[row]]) for row in own]
        with self.clock.timed("time/environment"):
            parts = _gather(functools.partial(self._step_own, own, texts))
        answers = {}
        for row, answer in sorted(itertools.chain(*(part.items() for part in parts))):
            ids = self._take(row, answer, tokens, lens)
            self.waits[row] = False
            self.over[row] = ids is None
            if ids is not None:
                answers[row] = ids
        return answers

    def _step_own(self, rows: list[int], texts: list[str]) -> dict[int, Result]:
        """Do so for rows of this process; return its environments' answers by row."""
        pool = self.scorer.pool
        first = self.own.start
        over = np.flatnonzero(self.over[self.own]).tolist()
        pool.end([self.episodes[i] for i in over])
        pool.submit([self.episodes[row - first] for row in rows], texts)
        in_progress = len(self.episodes) - len(over)
        unfinished = in_progress - np.sum(self.waits[self.own])
        most_waiting = 0
        if not pool.replayable:
            most_waiting = int(self.scorer.allow_unfinished * in_progress) - unfinished
        answers = pool.collect(self.episodes, max(most_waiting, 0))
        return {first + i: answer for i, answer in answers.items()}

    def _take(
        self, row: int, answer: Result, tokens: np.ndarray, lens: np.ndarray
    ) -> list[int] | None:
        """Note the reward of a turn; return the tokens to go on with, None after the last."""
        self._note(row, answer.reward, answer.failure)
        is_last = self.turns.counts[row] >= self.scorer.max_turns
        ended = self.spec.ended(tokens[[row]], lens[[row]])[0]
        if answer.done or is_last or not ended:
            return None
        has_end = tokens[row, lens[row] - 1] in self.spec.eos_ids
        try:
            ids = self.scorer.tokenizer.encode_turn(answer.observation, has_end, answer.role)
        except ValueError as error:  # a character that the policy has no token for
            self._note(row, 0.0, reason(error))
            return None
        if lens[row] + len(ids) >= self.spec.response_slots:
            return None
        self.turns.roles[row, self.turns.counts[row] - 1] = answer.role
        return ids

    def _note(self, row: int, total: float, reason: str) -> None:
        """Note the reward of all turns of a row, and why it has none; the last turn makes it up."""
        rewards = self.turns.rewards[row]
        last = self.turns.counts[row] - 1
        rewards[last] = total - np.sum(rewards[:last])
        self.totals[row] = total
        self.reasons[row] = reason
