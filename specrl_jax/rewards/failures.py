"""Reports of answers that could not be scored: a warning, a file, and the end of a run.

Takes each step's reasons and texts. A reward that always fails looks like a policy that is always
wrong, so the console reports why right away, and a run with only failures stops. No JAX.
"""

import collections
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from specrl_jax.inputs import disk_error

FILE_NAME = "reward_failures.jsonl"
MAX_BYTES = 4 << 20  # of the file, over the whole run
MAX_TEXT = 2_000  # characters of a response in the file: its end
MAX_FAILED_STEPS = 3  # consecutive steps in which all rewards failed


class FailureLog:
    """Warns of failures and keeps them in `WORKDIR/reward_failures.jsonl`.

    workdir: None in a process that does not write because another one does.
    warn: shows a line to the user.
    """

    def __init__(self, workdir: Path | None, warn: Callable[[str], None]):
        self._path = None if workdir is None else workdir / FILE_NAME
        self._warn = warn
        self._warned = 0.0  # share of failures at the last warning
        self._failed_steps = 0

    def record(
        self, step: int, reasons: Sequence[str], tasks: Sequence[str], text_of: Callable[[int], str]
    ) -> None:
        """Record a step's answers.

        reasons: of each answer, "" unless it failed.
        tasks: of each answer.
        text_of: returns the text of an answer by its index.

        Raises a one-line ValueError after `MAX_FAILED_STEPS` steps with only failures.
        """
        failed = [i for i, reason in enumerate(reasons) if reason]
        if not failed:
            self._failed_steps = 0
            return
        line = f"step {step}: {len(failed)} of {len(reasons)} answers could not be scored"
        line += f", {commonest([reasons[i] for i in failed])}"
        self._write(
            {"step": step, "task": tasks[i], "reason": reasons[i], "text": text_of(i)[-MAX_TEXT:]}
            for i in failed
        )
        share = len(failed) / len(reasons)
        self._failed_steps = self._failed_steps + 1 if share == 1 else 0
        if self._failed_steps == MAX_FAILED_STEPS:
            raise ValueError(
                f"{line}; all rewards of {MAX_FAILED_STEPS} steps failed: see "
                f"{self._path or FILE_NAME}, fix reward.name or the data"
            )
        if share >= 2 * self._warned or share == 1 > self._warned:
            self._warned = share
            self._warn(f"warning: {line}; see {self._path or FILE_NAME}")

    def _write(self, records) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "ab") as file:
                for record in records:
                    line = json.dumps(record).encode() + b"\n"
                    if file.tell() + len(line) > MAX_BYTES:
                        return
                    file.write(line)
        except OSError as error:
            raise disk_error(self._path, error) from error


def commonest(reasons: Sequence[str]) -> str:
    """Return the most common kind of reason, its count and an example; KeyErrors are one kind."""
    kinds = collections.defaultdict(list)
    for reason in reasons:
        kinds[re.split(r"[:(]", reason, maxsplit=1)[0]].append(reason)
    kind = max(kinds.values(), key=len)
    return f"{len(kind)} of them: {collections.Counter(kind).most_common(1)[0][0]}"
