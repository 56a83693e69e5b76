"""Responses and their rewards: one rollout, or several with an environment in between.

With an environment a response is a whole episode in one row: the policy's turns, each up to its end
of sequence, and between them what the environment answered. Those tokens are *forced*: never
drawn, judged or trained on. Every rollout goes on from what rows hold; rows whose episode is over
hold it to the end. Since noise is keyed by a token's position in the row, drafts change nothing
here either: a row's earlier episode drafts a turn as long as all before it, forced tokens included,
is the same.

Rows need not be in the same turn. Once few are left that generate (`behind`), the others are
answered, and the next rollout goes on with all: some in the middle of a turn, others one ahead.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from specrl_jax.data.prompts import select
from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.models.transformer import Params
from specrl_jax.rewards.workers import RewardPool, Scores
from specrl_jax.rollout.carry_over import CarryOver, PartialRows, append_forced, turn_drafts
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.generate import DraftInputs, Noise, RolloutResult, RolloutSpec, generate
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Prompts


class Responses(NamedTuple):
    """B finished responses with tokens [B, R] and lens [B] on the host too; turns: int [B]."""

    outcome: RolloutResult
    tokens: np.ndarray
    lens: np.ndarray
    scores: Scores
    turns: np.ndarray


def respond(
    plan: RolloutSpec,
    weights: Params,
    prompts: Prompts,
    noise: Noise,
    *,
    pool: RewardPool,
    tokenizer: Tokenizer,
    max_turns: int = 0,
    behind: float = 0.0,
    drafts: DraftInputs = DraftInputs(),
    clocks: tuple = (contextlib.nullcontext(), contextlib.nullcontext()),
    **options,
) -> Responses:
    """Responses to `prompts` and what they earned.

    max_turns: of an episode with the pool's environment; 0: there is none. behind: share of the
    episodes in progress that may still generate as the others are answered, in [0, 1). clocks:
    entered around rollouts, and around rewards. options: as of `generate`; suffixes are a function,
    since every rollout of an episode needs its own.
    """
    if max_turns:
        return _Episodes(plan, prompts, pool, tokenizer, max_turns, behind, clocks).play(
            lambda turn, carry_over: generate(
                plan,
                weights,
                prompts,
                noise,
                drafts=dataclasses.replace(drafts, previous=turn),
                carry_over=carry_over,
                **options,
            ),
            drafts.previous,
        )
    with clocks[0]:
        outcome = generate(plan, weights, prompts, noise, drafts=drafts, **options)
        tokens, lens = jax.device_get((outcome.rollout.tokens, outcome.rollout.lens))
    with clocks[1]:
        scores = score(pool, tokenizer, select(prompts, outcome.groups), tokens, lens)
    return Responses(outcome, tokens, lens, scores, np.ones_like(lens))


def score(
    pool: RewardPool, tokenizer: Tokenizer, prompts: Prompts, tokens: np.ndarray, lens: np.ndarray
) -> Scores:
    """Rewards of responses [Q * G, R] to Q prompts, G in a row for each."""
    texts = [tokenizer.decode(row[:n].tolist()) for row, n in zip(tokens, lens)]
    return pool.score(texts, *_problems(prompts, range(len(lens)), len(lens)))


def _problems(prompts: Prompts, rows, total: int) -> tuple[list, list, list]:
    """answers, tasks and metadata of these rows, of `total` in all."""
    group = total // len(prompts.examples)
    examples = [prompts.examples[row // group] for row in rows]
    return (
        [example.answer for example in examples],
        [example.task for example in examples],
        [example.metadata for example in examples],
    )


class _Episodes:
    """Episodes in progress, one a row."""

    def __init__(
        self,
        plan: RolloutSpec,
        prompts: Prompts,
        pool: RewardPool,
        tokenizer: Tokenizer,
        max_turns: int,
        behind: float,
        clocks: tuple,
    ):
        self.plan, self.prompts, self.pool, self.tokenizer = plan, prompts, pool, tokenizer
        self.max_turns, self.behind, self.clocks = max_turns, behind, clocks
        rows = len(prompts.lens) * plan.group_size
        self.texts: list[list[str]] = [[] for _ in range(rows)]
        self.rewards, self.reasons = np.zeros(rows, np.float32), [""] * rows
        self.over = np.zeros(rows, bool)
        self.begins = np.zeros(rows, np.int32)  # where the turn's tokens begin

    def play(self, roll_on: Callable[..., RolloutResult], drafts: Drafts | None) -> Responses:
        """roll_on(drafts, carry_over): one rollout of all rows."""
        held, parts, ends = None, [], self.plan.program.eos_ids
        turn = None if drafts is None else turn_drafts(drafts, None, ends)
        offered = np.zeros_like(self.begins)
        while True:
            with self.clocks[0]:
                behind = int(self.behind * np.sum(~self.over))
                outcome = roll_on(turn, CarryOver(partial_rows=held, allow_unfinished=behind))
                parts.append(outcome.stats)
                rollout = outcome.rollout
                tokens, lens = jax.device_get((rollout.tokens, rollout.lens))
                ended = ~self.over if outcome.finished is None else outcome.finished & ~self.over
            with self.clocks[1]:
                answers = self._step(tokens, lens, ended)
            if self.over.all():
                break
            held = PartialRows(rollout, put(self.over, "batch"), put(outcome.draft_lens, "batch"))
            forced, counts = self._padded(answers)
            held = append_forced(held, put(forced, "batch", None), put(counts, "batch"))
            self.begins = np.where(ended, lens + counts, self.begins)
            if drafts is not None:
                turn = turn_drafts(drafts, held, ends, put(self.begins, "batch"))
                # What a row that is behind has left of its draft is offered again.
                left = np.maximum(outcome.draft_lens - offered - (lens - outcome.resumed_lens), 0)
                goes_on = ~ended & (np.asarray(jax.device_get(turn.lens)) > lens)
                offered = outcome.draft_lens - np.where(goes_on, left, 0)
                held = dataclasses.replace(held, draft_lens=put(offered, "batch"))
        nothing = tuple("" for _ in self.reasons)
        failed = np.array([bool(reason) for reason in self.reasons])
        scores = Scores(self.rewards, failed, tuple(self.reasons), self.over, nothing)
        outcome = dataclasses.replace(outcome, stats=Stats.total(parts))
        return Responses(outcome, tokens, lens, scores, np.array([len(x) for x in self.texts]))

    def _step(
        self, tokens: np.ndarray, lens: np.ndarray, ended: np.ndarray
    ) -> dict[int, list[int]]:
        """The environment's step of every row whose turn has `ended`; what it answers, by row."""
        rows = np.flatnonzero(ended).tolist()
        for row in rows:
            turn = tokens[row, self.begins[row] : lens[row]].tolist()
            self.texts[row].append(self.tokenizer.decode(turn))
        texts = [tuple(self.texts[row]) for row in rows]
        found = self.pool.score(texts, *_problems(self.prompts, rows, len(lens)))
        answers = {}
        for i, row in enumerate(rows):
            self.rewards[row], self.reasons[row] = found.rewards[i], found.reasons[i]
            last = len(self.texts[row]) >= self.max_turns
            cut_off = tokens[row, lens[row] - 1] not in self.plan.program.eos_ids
            if found.done[i] or last or cut_off:
                self.over[row] = True
                continue
            try:
                ids = self.tokenizer.encode_turn(found.observations[i])
            except ValueError as error:  # a character that the policy has no token for
                self.rewards[row], self.reasons[row] = 0.0, str(error)
                self.over[row] = True
                continue
            if lens[row] + len(ids) < self.plan.program.response_slots:
                answers[row] = ids
            else:
                self.over[row] = True
        return answers

    def _padded(self, answers: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """int32 [B, O] and counts [B]; O is a power of 2, so that few programs are compiled."""
        longest = max(map(len, answers.values()), default=1)
        width = min(1 << max(longest - 1, 0).bit_length(), self.plan.program.response_slots)
        forced = np.zeros((len(self.texts), width), np.int32)
        counts = np.zeros(len(self.texts), np.int32)
        for row, ids in answers.items():
            forced[row, : len(ids)], counts[row] = ids, len(ids)
        return forced, counts
