"""Episodes: one rollout of B rows, with an environment between a row's turns.

With an environment a response is a whole episode in one row: the policy's turns, each up to its end
of sequence, with the environment's replies in between. Environment tokens are never sampled,
verified or trained on. Noise is keyed by a token's position in the row, so drafts change no token:
a row's earlier episode drafts a turn as long as all tokens before it are the same.

A turn cut by the length limit is not passed on: its environment does not see it. An episode that
was ended by such a cut or by `max_turns` is scored so far, if the environment can do that.

Rows need not be in the same turn. Once no more than a share of them still generates or waits for
its environment (`allow_unfinished`), all others continue. Replayable environments are always waited
for, so timing never decides which rows are computed together.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from specrl_jax import hosts
from specrl_jax.agents.environment_protocol import StepResult
from specrl_jax.agents.turns import EpisodeRollout
from specrl_jax.inputs import reason
from specrl_jax.responses import Turns, problems_of
from specrl_jax.rewards.pool import Rewards
from specrl_jax.rewards.reading import Reading
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.types import Prompts


@dataclasses.dataclass(frozen=True)
class PlayedResult(RolloutResult):
    """B finished episodes."""

    rewards: Rewards
    ended: np.ndarray  # bool [B], rows that the length limit did not cut
    turns: Turns


class Episodes:
    """Episodes in progress, one per row; arrays are [B].

    A row is in the middle of a turn, waits for its environment, or is over. Each process runs the
    environments of a part of the rows.
    """

    def __init__(self, responder: Any, prompts: Prompts, rollout: EpisodeRollout, clock: Stopwatch):
        rows = len(prompts.lens) * rollout.spec.group_size
        self.spec = rollout.spec
        self.responder = responder  # `responder.EpisodeResponder`
        self.rollout = rollout
        self.clock = clock
        shape = (rows, responder.max_turns)
        self.turns = Turns(
            np.zeros(shape, np.float32), np.zeros(shape, np.int32), np.zeros(shape, "U4")
        )
        self.totals = np.zeros(rows, np.float32)  # rewards of all turns
        self.reasons = [""] * rows
        self.over = np.zeros(rows, bool)
        self.waits = np.zeros(rows, bool)  # for the environment
        self.cut = np.zeros(rows, bool)  # by the length limit, in a turn or before a reply
        self.to_score: list[int] = []  # rows that a limit has ended, to be scored in `_step`
        self.turn_starts = np.zeros(rows, np.int32)  # where the turn's tokens start
        # Turns inside a thought that the prompt or the previous reply opened.
        self.in_thought = np.repeat(responder.begins_thoughts(prompts), rollout.spec.group_size)
        self.own = hosts.own_part(rows)  # rows whose environments this process runs
        problems = zip(*problems_of(prompts, range(rows)[self.own], rows))
        self.handles = responder.pool.start(list(problems))  # of the own rows' episodes

    def play(self) -> PlayedResult:
        """Play the episodes to their end."""
        while not self.over.all():
            with self.clock.timed("time/rollout"):
                tokens, lens, ended = self.rollout.run(self.responder.allow_unfinished)
            with self.clock.timed("time/reward"):
                answers = self._answer(tokens, lens, ended)
            with self.clock.timed("time/rollout"):
                self.rollout.resume(answers, self.over)
        self.responder.pool.end(self.handles)
        failed = np.array([bool(reason) for reason in self.reasons], np.bool_)
        rewards = Rewards(self.totals, failed, tuple(self.reasons))
        rollout = vars(self.rollout.result())
        return PlayedResult(**rollout, rewards=rewards, ended=~self.cut, turns=self.turns)

    def _answer(
        self, tokens: np.ndarray, lens: np.ndarray, ended: np.ndarray
    ) -> dict[int, list[int]]:
        """Get the environment's replies to the turns that have ended.

        Returns the token ids of the replies by row, for rows that continue.
        """
        rows = np.flatnonzero(ended & ~(self.over | self.waits)).tolist()
        answers = self._step(rows, tokens, lens)
        while np.all(self.over | self.waits) and not np.all(self.over):
            answers |= self._step([], tokens, lens)
        for row, ids in answers.items():
            self.turn_starts[row] = lens[row] + len(ids)
            self.in_thought[row] = self.responder.opens_thought(ids)
        return answers

    def _step(self, rows: list[int], tokens: np.ndarray, lens: np.ndarray) -> dict[int, list[int]]:
        """Pass on the turns of these rows, and wait for replies, subject to `allow_unfinished`.

        Returns the token ids of the replies by row, for rows that continue.
        """
        turns = self._finish_turns(rows, tokens, lens)
        requests = turns | dict.fromkeys(self.to_score)
        self.to_score = []
        with self.clock.timed("time/environment"):
            parts = hosts.gather_results(functools.partial(self._step_own, requests))
        answers = {}
        for row, answer in sorted(itertools.chain(*(part.items() for part in parts))):
            self._watch(row, answer)
            ids = self._take(row, answer, tokens, lens)
            if ids is not None:
                answers[row] = ids
        return answers

    def _finish_turns(
        self, rows: list[int], tokens: np.ndarray, lens: np.ndarray
    ) -> dict[int, Reading]:
        """Record the ends of these rows' turns; return those not cut by length, by row."""
        self.turns.ends[rows, self.turns.counts[rows]] = lens[rows]
        ended = self.spec.ended(tokens[rows], lens[rows], self.turn_starts[rows])
        turns = {}
        for row, has_ended in zip(rows, ended):
            ids = tokens[row, self.turn_starts[row] : lens[row]]
            turn = self.responder.read(ids, has_ended, self.in_thought[row])
            self._watch(row, turn)
            if has_ended:
                turns[row] = turn
                self.waits[row] = True
            else:
                self.cut[row] = True
                self._cut_short(row)
        return turns

    def _cut_short(self, row: int) -> None:
        """Mark an episode that a limit ends for scoring, if its environment can score it."""
        self.waits[row] = self.responder.pool.scores
        self.over[row] = not self.waits[row]
        if self.waits[row]:
            self.to_score.append(row)

    def _step_own(self, requests: dict[int, Reading | None]) -> dict[int, StepResult]:
        """Submit the requests to this process's environments; return the replies that are ready.

        requests: turns by row; None: there are no more, and the episode is scored. Replies are by
        row, too.
        """
        pool = self.responder.pool
        first = self.own.start
        over = np.flatnonzero(self.over[self.own]).tolist()
        pool.end([self.handles[i] for i in over])
        own = [row for row in sorted(requests) if row in range(len(self.over))[self.own]]
        turns = [requests[row] for row in own]
        said = [None if turn is None else turn.seen(pool.reads_whole) for turn in turns]
        pool.submit([self.handles[row - first] for row in own], said)
        in_progress = len(self.handles) - len(over)
        unfinished = in_progress - np.sum(self.waits[self.own])
        most_waiting = 0
        if not pool.replayable:
            most_waiting = int(self.responder.allow_unfinished * in_progress) - unfinished
        answers = pool.collect(self.handles, max(most_waiting, 0))
        return {first + i: answer for i, answer in answers.items()}

    def _take(
        self, row: int, answer: StepResult, tokens: np.ndarray, lens: np.ndarray
    ) -> list[int] | None:
        """Record the reward of a turn; return the tokens to continue with, None after the last."""
        self.waits[row] = False
        self._note(row, answer)
        if answer.done or answer.failure:
            self.over[row] = True
            return None
        if self.turns.counts[row] >= self.responder.max_turns:
            self._cut_short(row)
            return None
        has_end = tokens[row, lens[row] - 1] in self.spec.eos_ids
        try:
            ids = self.responder.tokenizer.encode_turn(answer.observation, has_end, answer.role)
        except ValueError as error:  # a character that the policy has no token for
            self.reasons[row] = reason(error)
            self.over[row] = True
            return None
        if lens[row] + len(ids) >= self.spec.response_slots:
            self.cut[row] = True
            self._cut_short(row)
            return None
        self.turns.roles[row, self.turns.counts[row] - 1] = answer.role
        return ids

    def _note(self, row: int, answer: StepResult) -> None:
        """Record the total reward of a row's turns so far; a failure leaves it unchanged.

        The last turn gets the total minus the rewards of the turns before.
        """
        self.reasons[row] = answer.failure
        if answer.failure:
            return
        rewards = self.turns.rewards[row]
        last = self.turns.counts[row] - 1
        rewards[last] = answer.reward - np.sum(rewards[:last])
        self.totals[row] = answer.reward

    def _watch(self, row: int, said: Reading | StepResult) -> None:
        if self.responder.watch is not None:
            self.responder.watch(row, said)
