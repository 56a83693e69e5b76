"""The responses of a share of the prompts, kept as text to be read: `WORKDIR/rollouts/`.

Takes a step's prompts and finished responses on the host; gives `rollouts/step_N.jsonl`, one
response a line, the responses to a prompt together. A file appears whole or not at all. There is
no file of step 0 (nothing is rolled out for training), and no folder where the share is 0.

Which prompts: those whose hash, a number in [0, 1) that depends on the prompt_id alone, is below
the share. So a prompt is followed over all epochs, runs on the same problems follow the same ones,
and a larger share follows those of a smaller and more. A step that has none of them records the
prompt of its batch with the smallest hash, so that no step goes without a file.

Every line is a JSON object with these fields, in this order. "Per token" is a list or string of
one item for each of the response's L tokens, its end-of-sequence token included.

    step            the step whose rollout it is, >= 1; as in the file's name
    epoch           the pass over the prompts that the step belongs to, >= 1
    prompt_id       16 hexadecimal digits, the same in every run on the same problem
    sample          which of the prompt's G responses, 0 to G - 1
    prompt          what the policy was given, decoded from its tokens: chat template included,
                    special tokens left out
    answer          the problem's reference answer
    text            the response as it was scored: decoded, special tokens left out
    token_ids       per token: its id
    sources         per token, a string of letters: r reused (kept from an earlier response),
                    d drafted (drawn, and equal to a tree draft's token), s sampled, f forced (an
                    environment's answer)
    policy_logprobs per token: nats under the policy of this rollout, with temperature, without
                    top-k/top-p; rounded to 4 decimals; null where it is not finite
    reward          rounded to 6 decimals; null where it is not finite
    failed          true where scoring hit a limit or raised; the reward is 0 then
    origin_steps    per token: the step at which it was first sampled (`step` itself if it is new)
    prefix_len      tokens from the first on that the earlier response gave
    ended           true if the last token ends the sequence; false: cut at the longest length

So in a response of three tokens, "4 5" and the end ■, of which the first two were kept:

    "token_ids":[6,2,1],"sources":"rrs","origin_steps":[3,3,7],"prefix_len":2,"ended":true

Lines are plain ASCII: other characters are \\u escapes, so that programs that also break lines at
U+2028 or U+0085 find the same lines.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.types import Prompts, Rollout, Source

FOLDER = "rollouts"
FIELDS = (
    "step", "epoch", "prompt_id", "sample", "prompt", "answer", "text", "token_ids", "sources",
    "policy_logprobs", "reward", "failed", "origin_steps", "prefix_len", "ended",
)  # fmt: skip
LETTERS = {
    int(Source.SAMPLED): "s",
    int(Source.DRAFTED): "d",
    int(Source.REUSED): "r",
    int(Source.FORCED): "f",
}

_NAME = re.compile(r"step_(0|[1-9][0-9]*)\.jsonl")
_LOGPROB_DECIMALS, _REWARD_DECIMALS = 4, 6


# Which prompts ------------------------------------------------------------------------------


def _hash(prompt_id: str) -> float:
    """A number in [0, 1), by blake2b, so alike on every machine.

    The id, itself a hash, is hashed again: it also keys the noise and may have picked the problems.
    """
    digest = hashlib.blake2b(prompt_id.encode(), digest_size=6, person=b"rollouts").digest()
    return int.from_bytes(digest, "big") / 2**48  # 48 bits are exact in a float


def followed(prompt_ids: Sequence[str], share: float) -> list[int]:
    """Indices of the prompts of a batch to record, smallest hash first; see the module.

    Args:
        prompt_ids: The batch's Q ids, in any order.
        share: In [0, 1]; 0: none.

    Returns:
        At least one index where share > 0 and Q > 0.
    """
    ranked = sorted((_hash(prompt_id), prompt_id, q) for q, prompt_id in enumerate(prompt_ids))
    chosen = [q for value, _, q in ranked if value < share]
    return chosen or ([ranked[0][2]] if share > 0 and ranked else [])


# Reading ------------------------------------------------------------------------------------


def rollouts_path(workdir: str | os.PathLike, step: int) -> Path:
    """The file of a step, whether it is there or not."""
    return Path(workdir) / FOLDER / f"step_{int(step)}.jsonl"


def recorded_steps(workdir: str | os.PathLike) -> list[int]:
    """The steps that have a file, ascending."""
    names = (path.name for path in (Path(workdir) / FOLDER).glob("step_*.jsonl"))
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_rollouts(workdir: str | os.PathLike, step: int) -> list[dict[str, Any]]:
    """The recorded responses of a step, a dict of the module's fields each. No file: [].

    Raises:
        ValueError: A damaged file; the message, one line, names the file and its line.
    """
    path = rollouts_path(workdir, step)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    if len(lines) > 1 and not lines[-1]:
        lines.pop()  # after the last newline; an empty file keeps its one empty, damaged line
    return [_decode(path, number, line) for number, line in enumerate(lines, start=1)]


def _decode(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not a record")
    except ValueError:
        raise _damaged(path, number, "a JSON object") from None
    for name in FIELDS:
        if name not in record:
            raise _damaged(path, number, f"an object with the field {name!r}")
    return record


def _damaged(path: Path, number: int, rule: str) -> ValueError:
    return ValueError(f"{path}: line {number} must be {rule}; restore the file or remove it")


# Writing ------------------------------------------------------------------------------------


class RolloutRecords:
    """Writes the responses of a share of the prompts, a file a step.

    Args:
        workdir: Holds `rollouts/`, which is made at the first write.
        share: Of the prompts, in [0, 1]; 0: none.
        decode: Token ids → text, without special tokens.
        eos_ids: The tokens that end a response.
        enabled: False where another process writes; then nothing is written or removed.

    Attributes:
        active: Whether `write` writes; if not, its arguments need not be fetched.

    Raises:
        ValueError: A share outside of [0, 1].
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        share: float,
        *,
        decode: Callable[[list[int]], str],
        eos_ids: Sequence[int],
        enabled: bool = True,
    ):
        if not 0 <= share <= 1:
            raise ValueError(f"log.rollouts must be in [0, 1], got {share}")
        self.active = enabled and share > 0
        self._workdir, self._share, self._enabled = Path(workdir), share, enabled
        self._decode, self._eos_ids = decode, frozenset(int(i) for i in eos_ids)

    def restore(self, step: int | None) -> int:
        """Removes the files of steps after `step` (None: none), and what a kill left unfinished.

        Call it with the restored checkpoint's step before going on, -1 in a new run, also where the
        share is 0 by now: those steps will be taken again. Returns the number of steps removed.
        """
        if not self._enabled:
            return 0
        later = [s for s in recorded_steps(self._workdir) if step is not None and s > step]
        for path in (self._workdir / FOLDER).glob("step_*.jsonl.tmp"):
            path.unlink(missing_ok=True)
        for gone in reversed(later):  # newest first: a kill in between leaves no gap
            rollouts_path(self._workdir, gone).unlink(missing_ok=True)
        return len(later)

    def write(
        self,
        step: int,
        epoch: int,
        prompts: Prompts,
        rollout: Rollout,
        rewards: np.ndarray,
        failed: np.ndarray,
    ) -> None:
        """Writes a step's file, over one that is there; on return it has reached the disk.

        Args:
            step, epoch: As in `metrics.jsonl`.
            prompts: The Q prompts.
            rollout: B = Q·G responses in NumPy arrays, G in a row for each prompt. Read are tokens,
                lens, prefix_lens, policy_logprobs, origin_steps and sources; the rest may be None.
            rewards: float32 [B]. failed: bool [B].

        Raises:
            ValueError: Arrays that do not have B = Q·G rows.
            OSError: The file cannot be written.
        """
        if not self.active:
            return
        group_size = _group_size(prompts, rollout, rewards, failed)
        lines = []
        # A group that is rolled out in parts: "ID+4" are the responses to ID from number 4 on.
        names = [example.prompt_id.partition("+") for example in prompts.examples]
        for q in followed([name for name, _, _ in names], self._share):
            example, first = prompts.examples[q], int(names[q][2] or 0)
            shared = {
                "step": int(step),
                "epoch": int(epoch),
                "prompt_id": names[q][0],
                "prompt": self._decode(prompts.tokens[q, : prompts.lens[q]].tolist()),
                "answer": example.answer,
            }
            for sample in range(group_size):
                row = q * group_size + sample
                own = {
                    "sample": first + sample,
                    "reward": _finite(rewards[row : row + 1], _REWARD_DECIMALS)[0],
                    "failed": bool(failed[row]),
                }
                lines.append(_encode(shared | own | self._response(rollout, row)))
        _write_whole(rollouts_path(self._workdir, step), b"".join(lines))

    def _response(self, rollout: Rollout, row: int) -> dict[str, Any]:
        kept = slice(0, int(rollout.lens[row]))
        token_ids = rollout.tokens[row, kept].tolist()
        return {
            "text": self._decode(token_ids),
            "token_ids": token_ids,
            "sources": "".join(map(LETTERS.__getitem__, rollout.sources[row, kept].tolist())),
            "policy_logprobs": _finite(rollout.policy_logprobs[row, kept], _LOGPROB_DECIMALS),
            "origin_steps": rollout.origin_steps[row, kept].tolist(),
            "prefix_len": int(rollout.prefix_lens[row]),
            "ended": bool(token_ids) and token_ids[-1] in self._eos_ids,
        }


def _group_size(prompts: Prompts, rollout: Rollout, rewards: np.ndarray, failed: np.ndarray) -> int:
    Q, B = len(prompts.examples), len(rollout.lens)
    if Q == 0 or B % Q:
        raise ValueError(f"rollout must hold G responses to each of {Q} prompts, got {B} rows")
    for name, array in (("rewards", rewards), ("failed", failed)):
        if np.shape(array) != (B,):
            raise ValueError(f"{name} must have shape ({B},), got {np.shape(array)}")
    return B // Q


def _finite(values: np.ndarray, decimals: int) -> list[float | None]:
    """Rounded; None for nan and inf, which JSON has not."""
    rounded = np.round(values.astype(np.float64), decimals) + 0.0  # + 0.0: never "-0.0"
    return [x if math.isfinite(x) else None for x in rounded.tolist()]


def _encode(record: dict[str, Any]) -> bytes:
    ordered = {name: record[name] for name in FIELDS}
    return json.dumps(ordered, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(f"{path}: {error.strerror}; free space and run again") from error
