"""Files of a run besides its checkpoints: metrics, responses and failures."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specrl_jax import hosts
from specrl_jax.inputs import printable, reward_terms
from specrl_jax.process.runtime import compile_metrics
from specrl_jax.responses import Responses
from specrl_jax.rewards.failures import FailureLog
from specrl_jax.telemetry.metrics import MetricsLog, NoLog, Stopwatch
from specrl_jax.telemetry.records import Recorded, RolloutRecords
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.types import Prompts, Source

# Per-token columns of a response that records include, besides the ids.
_RECORDED = "policy_logprobs", "sources", "origin_steps"
_MAX_SHOWN = 240  # characters per text on the console
_MAX_TURNS = 12  # turns and replies per episode on the console


class RunLog(contextlib.AbstractContextManager):
    """Log of a run; a context manager that closes it.

    Every process has one and calls the same methods; only the primary process writes.
    """

    def __init__(self, run: Run, workdir: Path | None = None):
        """Open the log in `workdir`; None: it writes nothing.

        Raises a one-line ValueError for a damaged `metrics.jsonl`.
        """
        self.clock = Stopwatch()  # of the parts of a step
        self._step = 0
        self._epoch = 0
        self._values: dict[str, Any] = {}  # of the next record
        self.writes = workdir is not None and hosts.is_primary()
        self.workdir = folder = workdir or Path()
        settings = run.config.log
        self._metrics = NoLog()
        if self.writes:
            self._metrics = MetricsLog(
                folder,
                total_steps=run.total_steps,
                tracker=settings.tracker,
                config=run.config.to_dict(),
                functions=list(reward_terms(run.config.reward.name)),
            )
        self.show = self._metrics.show  # shows a line to the user
        self._failures = FailureLog(folder if self.writes else None, self.show)
        self._text = run.responder.text
        self._print_every = settings.print_every
        self._decode = run.responder.tokenizer.decode
        share = settings.rollouts if workdir is not None else 0.0
        self._records = RolloutRecords(folder, share, decode=self._decode)

    def restore(self, step: int, ahead: int = 0) -> None:
        """Remove records after `step`; at step 0 all of them, as step 0 is written again.

        ahead: number of later steps that are already rolled out, with their responses recorded.
        """
        if self.writes:
            self._metrics.restore(step or -1)
            self._records.restore(step + ahead or -1)

    def start(self, step: int, epoch: int) -> None:
        """Start the record of a step; everything that follows is written to this step and epoch."""
        self._step = step
        self._epoch = epoch

    def add(self, values: Mapping[str, Any]) -> None:
        """Add scalars to the step's record, by name."""
        self._values |= values

    @property
    def values(self) -> dict[str, Any]:
        """Return everything added and timed since the last record."""
        return self._values | self.clock.so_far()

    def write(self) -> dict[str, Any]:
        """Write and return everything added, timed and compiled since the last record.

        On return the record is on disk. Raises ValueError as `MetricsLog.write` does.
        """
        values = self._values | self.clock.take() | compile_metrics()
        self._values = {}
        self._metrics.write(self._step, self._epoch, values)
        return values

    def record(self, collected: Collected, rollouts: Sequence[Responses]) -> None:
        """Write a share of the rollouts' responses and all failures; show some responses.

        They are recorded under the step that trains on the batch, which may come later.

        Raises ValueError as `FailureLog.record` does, in every process.
        """
        step = collected.step
        self._write_responses(step, collected.epoch, rollouts, kind="step")
        every = self._print_every
        if every and (step % every == 0 or step == 1):
            self._show(step, rollouts[0])
            self._metrics.send_rollouts(step)
        reasons = [reason for x in rollouts for reason in x.rewards.reasons]
        tasks = [e.task for x in rollouts for e in x.prompts.examples for _ in range(x.group_size)]
        tokens = [row[:n] for x in rollouts for row, n in zip(x.tokens, x.lens)]
        self._failures.record(step, reasons, tasks, lambda row: self._text(tokens[row]))

    def record_evaluation(self, answered: Sequence[Responses]) -> None:
        """Write a share of the responses to held-out prompts."""
        self._write_responses(self._step, self._epoch, answered, kind="eval")

    def _write_responses(
        self, step: int, epoch: int, rollouts: Sequence[Responses], *, kind: str
    ) -> None:
        if not self._records.active:
            return
        parts = []
        for x in rollouts:
            tokens = x.rollout.tokens.only(*_RECORDED)
            rollout = dataclasses.replace(x.rollout, tokens=tokens)
            rewards = x.rewards
            on_host = hosts.fetch((rollout, rewards.rewards, rewards.failed, rewards.by_function))
            recorded = Recorded(*on_host, x.ended, x.turns)
            parts.append(jax.tree.map(lambda rows, n=x.num_rows: rows[:n], recorded))
        if self.writes:
            prompts = Prompts.concatenate(*(x.prompts for x in rollouts))
            joined = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
            self._records.write(step, epoch, prompts, joined, kind=kind)

    def _show(self, step: int, responses: Responses) -> None:
        """Show the best and the worst response of the group whose rewards differ most."""
        prompts = responses.prompts
        group = int(np.argmax(np.ptp(responses.group_rewards, axis=1)))
        prompt = self._decode(prompts.tokens[group, : prompts.lens[group]].tolist())
        self.show(f"step {step}, a prompt: {_shown(prompt)}")
        rewards = responses.group_rewards[group]
        sources = hosts.fetch(responses.rollout.tokens.sources) if responses.turns else None
        for sample in dict.fromkeys((int(np.argmax(rewards)), int(np.argmin(rewards)))):
            row = group * responses.group_size + sample
            parts = [f"{name} {x[row]:.3g}" for name, x in responses.rewards.by_function.items()]
            reward = f"{rewards[sample]:.3g}" + f" ({', '.join(parts)})" * bool(parts)
            if responses.turns is None:
                text = self._text(responses.tokens[row, : responses.lens[row]])
                self.show(f"  reward {reward}: {_shown(text)}")
                continue
            turns = int(responses.turns.counts[row])
            self.show(f"  reward {reward}, {turns} turn{'s' * (turns != 1)}:")
            for role, text in _without_middle(self._parts(responses, sources[row], row)):
                self.show(f"    {role}: {_shown(text)}")

    def _parts(self, responses: Responses, sources: np.ndarray, row: int) -> list[tuple[str, str]]:
        """Return (role, text) of everything said in an episode, in order.

        sources: int8 [R], of the row's tokens.
        """
        turns = responses.turns
        tokens = responses.tokens[row, : responses.lens[row]]
        own = np.flatnonzero(sources[: len(tokens)] != Source.ENVIRONMENT)
        parts = []
        start = 0
        for end, role in zip(turns.ends[row, : turns.counts[row]], turns.roles[row]):
            parts.append(("assistant", self._text(tokens[start:end])))
            # The policy's next token follows the environment's.
            start = int(next(iter(own[own >= end]), len(tokens)))
            if role:
                parts.append((str(role), self._decode(tokens[end:start].tolist())))
        return parts

    def __exit__(self, *error: object) -> None:
        self._metrics.__exit__(*error)


def _without_middle(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the start and the end of a long episode."""
    half = _MAX_TURNS // 2
    if len(parts) <= _MAX_TURNS:
        return parts
    return [*parts[:half], ("[...]", f"{len(parts) - 2 * half} more"), *parts[-half:]]


def _shown(text: str) -> str:
    """Return the text as one printable line, with the middle of a long text cut out."""
    line = printable(text)
    half = _MAX_SHOWN // 2
    return line if len(line) <= _MAX_SHOWN else f"{line[:half]} [...] {line[-half:]}"
