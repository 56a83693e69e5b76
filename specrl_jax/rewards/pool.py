"""Scores batches of responses in worker processes.

Takes a scorer by name, and texts; returns `Rewards`. `sandbox.workers` calls the scorer: an answer
that exceeds a limit fails with reward 0, without affecting the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from specrl_jax.rewards import loading
from specrl_jax.rewards.scorers import find_scorer, reads_answer_part
from specrl_jax.sandbox.readable import parse_readable
from specrl_jax.sandbox.worker_process import Result, Settings
from specrl_jax.sandbox.workers import CallPool, num_workers


@dataclass(frozen=True)
class Rewards:
    """Rewards of B responses, in the given order."""

    # float32 [B], 0 if failed; for an episode what its earlier turns had earned
    rewards: np.ndarray
    failed: np.ndarray  # bool [B]: out of time or memory; the scorer raised, died or gave no number
    reasons: tuple[str, ...]  # B texts, "" unless failed
    # The rewards of each function of a sum, float32 [B], before weights and threshold.
    by_function: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def make_whole(cls, scores: np.ndarray, reasons: Sequence[str], **more) -> "Rewards":
        """Make the rewards of whole responses from their scores, some of which may have failed."""
        failed = np.array([bool(reason) for reason in reasons], np.bool_)
        rewards = np.where(failed, 0, scores).astype(np.float32)
        return cls(rewards, failed, tuple(reasons), **more)

    @classmethod
    def joined(cls, parts: Sequence["Rewards"]) -> "Rewards":
        return cls(
            rewards=np.concatenate([x.rewards for x in parts]),
            failed=np.concatenate([x.failed for x in parts]),
            reasons=tuple(chain(*(x.reasons for x in parts))),
            by_function={
                name: np.concatenate([x.by_function[name] for x in parts])
                for name in parts[0].by_function
            },
        )


def apply_threshold(scores: np.ndarray, threshold: float) -> np.ndarray:
    """Return rewards from scores, float32 [B]: with a threshold > 0, 1 from there on, else 0."""
    return (scores >= np.float32(threshold)).astype(np.float32) if threshold > 0 else scores


class RewardPool(CallPool):
    """Scores batches, one at a time; an answer that exceeds a limit fails alone.

    name: of `SCORERS`, or module:function.
    timeout: CPU seconds per answer, see `time_limit`.
    memory_mib: MiB that each process of an answer may allocate (Linux only).
    workers: number of processes; 0: one per core, at most 16.
    threshold: > 0: the reward is 1 if the score reaches it, else 0.
    extract: a regular expression; group 1 of its last match in the answer part is the answer (no
      match: reward 0).
    format: the regular expression of the scorer `format`; "": `scorers.FORMAT`.
    readable: paths that code in answers may read besides Python and libraries, separated by ":".
    """

    def __init__(
        self,
        name: str,
        *,
        timeout: float,
        memory_mib: int,
        workers: int,
        threshold: float = 0.0,
        extract: str = "",
        format: str = "",
        readable: str = "",
    ):
        loaded = loading.load(name, extract, format)  # a mistake is raised here
        self._score_here = loaded.call
        self._reads_part = reads_answer_part(name, extract)
        self._threshold = float(threshold)
        # A user's pattern needs a process, as it may backtrack forever.
        here = not (find_scorer(name).needs_process or extract)
        limits = (float(timeout), int(memory_mib))
        paths = parse_readable(readable)
        prepare = f"{loading.__name__}:prepare"
        settings = Settings(prepare, (name, extract, format), *limits, loaded.contained, paths)
        executes = name if loaded.alone is None else ", ".join(sorted(loaded.alone))
        count = 0 if here else num_workers(workers)
        super().__init__(settings, count, executes, "reward.name")

    def score(
        self,
        responses: Sequence[str],
        answers: Sequence[str],
        tasks: Sequence[str],
        metadatas: Sequence[dict],
        parts: Sequence[str | None] | None = None,
        ended: Sequence[bool] | None = None,
    ) -> Rewards:
        """Score B responses.

        parts: the responses' answer parts, for scorers that read only those; None: a response
          without an answer. By default the whole responses.
        ended: whether each response finished, for functions that use it. By default all did.
        Raises RuntimeError if the pool is closed, ChildProcessError if no worker starts.
        """
        texts = parts if self._reads_part and parts is not None else responses
        ended = [True] * len(responses) if ended is None else ended
        items = list(zip(texts, answers, tasks, metadatas, ended, strict=True))
        if self._workers:
            results = self.call(items)
        else:
            self._check_open()
            results = [Result(self._score_here(*item)) for item in items]
        scores = np.array([0.0 if x.failure else x.value for x in results], np.float32)
        rewards = apply_threshold(scores, self._threshold)
        return Rewards.make_whole(rewards, [result.failure for result in results])
