"""Responses to a share of the prompts, as text: `WORKDIR/rollouts/KIND_N.jsonl`.

Takes a step's prompts and finished responses on the host. Writes one response per line, with the
responses to a prompt together. A line is a JSON object with the fields of `FIELDS`, in ASCII. A
file appears complete or not at all. With a share of 0 there is no folder. eval_N contains responses
to held-out prompts, by the policy after step N; step_N those of a training step, by the policy
before it.

A prompt is recorded if its prompt_id, a hash read as a number in [0, 1), is below the share. So a
prompt is recorded in every epoch, runs on the same problems record the same prompts, and a larger
share adds prompts. A batch with fewer than eight such prompts records the eight with the smallest
ids, or all that it has.
"""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specrl_jax.inputs import disk_error, json_object
from specrl_jax.types import Prompts, Rollout, Source

FOLDER = "rollouts"


def _is_number(value: Any) -> bool:
    """Return True if `value` can be a log-prob or a reward: null represents nan and inf."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _are_turns(value: Any) -> bool:
    """Return True if `value` is a list of the fields in `_TURN`."""
    return type(value) is list and all(
        type(turn) is dict
        and turn.keys() == _TURN.keys()
        and all(holds(turn[name]) for name, (_, holds) in _TURN.items())
        for turn in value
    )


# Rules for a field's value: in words, and as a test.
_TEXT = ("text", lambda x: type(x) is str)
_WHOLE = ("a whole number", lambda x: type(x) is int)
_SWITCH = ("true or false", lambda x: type(x) is bool)
_NUMBER = ("a number or null", _is_number)
_BY_NAME = ("numbers by name", lambda x: type(x) is dict and all(map(_is_number, x.values())))
_NUMBERS = ("a list of numbers", lambda x: type(x) is list and all(map(_is_number, x)))
_WHOLES = (
    "a list of whole numbers",
    lambda x: type(x) is list and all(type(y) is int for y in x),
)
_TURN = {"end": _WHOLE, "reward": _NUMBER, "role": _TEXT}
_TURNS = ("a list of turns, each with end, reward and role", _are_turns)
# Field of a line → its rule and its meaning. "Per token": a list or string with one item per token
# of the response, end of sequence included. For example, "4 5" and its end, when a rule accepted
# "4 5":
#     "token_ids":[6,2,1],"token_ends":[1,3,3],"sources":"rrs","origin_steps":[3,3,7],"prefix_len":2
FIELDS = {
    "step": (_WHOLE, "the step of the rollout; as in the file's name"),
    "epoch": (_WHOLE, "the pass over the prompts; 0 before the first step"),
    "prompt_id": (_TEXT, "16 hexadecimal digits, the same in every run on the same problem"),
    "sample": (_WHOLE, "number of the response among the prompt's G, starting from 0"),
    "prompt": (_TEXT, "the policy's input, decoded, with chat template, without special tokens"),
    "answer": (_TEXT, "the problem's reference answer"),
    "text": (_TEXT, "the response, decoded, without special tokens; before reward.extract"),
    "token_ids": (_WHOLES, "per token: its id"),
    "token_ends": (_WHOLES, "per token: characters of the text up to its end"),
    "sources": (
        _TEXT,
        "per token: sampled, drafted, reused, environment, copied (types.Source), as s d r e c",
    ),
    "policy_logprobs": (
        _NUMBERS,
        "per token: nats, with temperature, untruncated; 4 decimals",
    ),
    "reward": (_NUMBER, "6 decimals; null, like a log-prob, if it is not finite"),
    "by_function": (_BY_NAME, "unweighted reward by each function of a sum; otherwise {}"),
    "failed": (_SWITCH, "true if scoring hit a limit or raised; the reward is then 0"),
    "origin_steps": (_WHOLES, "per token: the step that first sampled it"),
    "prefix_len": (_WHOLE, "leading tokens that come from the earlier response"),
    "ended": (_SWITCH, "true if the last token ends the sequence; false if the response was cut"),
    # end: tokens of the response up to the turn's end. The rewards add up to the episode's. role:
    # of the reply to the turn, "user" or "tool"; "" if nothing follows.
    "turns": (_TURNS, "the policy's turns of an episode; [] for a single response"),
}
_LETTERS = {int(source): source.name[0].lower() for source in Source}

_NAME = re.compile(r"(?:step|eval)_(0|[1-9][0-9]*)\.jsonl")
_LINE_START = re.compile(rb'{"step":\d+,"epoch":\d+,"prompt_id":"([^"\\]*)"')
_FEWEST = 8  # prompts to record per batch
_LOGPROB_DECIMALS = 4
_REWARD_DECIMALS = 6
# Characters may span up to this many tokens; anything longer is not valid text.
_MAX_CHARACTER_TOKENS = 8


# Which prompts ------------------------------------------------------------------------------


def select_prompts(prompt_ids: Sequence[str], share: float) -> list[int]:
    """Return indices of the prompts to record in a batch, smallest prompt_id first; see the module.

    At least `_FEWEST` prompts, or all, if the share, in [0, 1], is above 0. The order of the batch
    is irrelevant. Parts of one prompt have the same id and are recorded together.
    """
    fewest = sorted(set(prompt_ids))[:_FEWEST] if share > 0 else []
    ranked = sorted((prompt_id, q) for q, prompt_id in enumerate(prompt_ids))
    return [
        q
        for prompt_id, q in ranked
        if prompt_id in fewest or int(prompt_id, 16) < share * 16 ** len(prompt_id)
    ]


# Reading ------------------------------------------------------------------------------------


def rollouts_path(workdir: str | os.PathLike, step: int, kind: str = "step") -> Path:
    """Return the file of a step, whether or not it exists; kind: "step" or "eval"."""
    return Path(workdir) / FOLDER / f"{kind}_{int(step)}.jsonl"


def recorded_steps(workdir: str | os.PathLike, kind: str = "step") -> list[int]:
    """Return the steps that have a file, ascending."""
    names = (path.name for path in (Path(workdir) / FOLDER).glob(f"{kind}_*.jsonl"))
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_rollouts(
    workdir: str | os.PathLike, step: int, kind: str = "step"
) -> list[dict[str, Any]]:
    """Return the recorded responses of a step, dicts with the keys of `FIELDS`; [] without a file.

    Raises a one-line ValueError that names file and line if the file is damaged.
    """
    path = rollouts_path(workdir, step, kind)
    return [_decode(path, n, line) for n, line in enumerate(_lines(path), start=1)]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _decode(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}: line {number} (restore the file or remove the line)"
    record = json_object(line, where, FIELDS)
    if isinstance(record["sources"], str):
        record["sources"] = record["sources"].replace("f", "e")  # from an older version
    for name, ((rule, holds), _) in FIELDS.items():
        if not holds(record[name]):
            raise ValueError(f"{where} must have {rule} as {name!r}, got {record[name]!r:.40}")
    return record


def read_some_rollouts(
    workdir: str | os.PathLike, limit: int
) -> tuple[dict[str, list[dict[str, Any]]], int, int]:
    """Return the recorded responses to as many prompts as fit in `limit` bytes of the files.

    The prompts are spread evenly, sorted by their id, which is a hash; at least one is read.
    Returns the responses of both kinds, {"step": [...], "eval": [...]}, by step, and the number of
    prompts read and in all. Raises ValueError as `read_rollouts` does.
    """
    sizes: dict[tuple[str, bytes], int] = {}
    files = [(kind, s) for kind in ("step", "eval") for s in recorded_steps(workdir, kind)]
    for kind, step in files:
        for line in _lines(rollouts_path(workdir, step, kind)):
            prompt = kind, _prompt_id(line)
            sizes[prompt] = sizes.get(prompt, 0) + len(line)
    every = max(1, -(-sum(sizes.values()) // limit))
    chosen = set(sorted(sizes)[::every])
    rollouts: dict[str, list[dict[str, Any]]] = {"step": [], "eval": []}
    for kind, step in files:
        path = rollouts_path(workdir, step, kind)
        for number, line in enumerate(_lines(path), start=1):
            prompt_id = _prompt_id(line)
            if not prompt_id or (kind, prompt_id) in chosen:
                rollouts[kind].append(_decode(path, number, line))
    return rollouts, len(chosen), len(sizes)


def _prompt_id(line: bytes) -> bytes:
    """Return the prompt_id of an undecoded line; b"" if damaged, which `_decode` reports."""
    match = _LINE_START.match(line)
    return match[1] if match else b""


# Writing ------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """B = Q·G responses in NumPy arrays, the G of a prompt contiguous."""

    rollout: Rollout  # its tokens with policy_logprobs, sources and origin_steps
    rewards: np.ndarray  # float32 [B]
    failed: np.ndarray  # bool [B]
    by_function: Mapping[str, np.ndarray]  # float32 [B] for each function of a sum
    ended: np.ndarray  # bool [B], responses that finished
    # Rewards, ends and roles [B, K] of episodes, as in `responses.Turns`.
    turns: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


class RolloutRecords:
    """Writes the responses to a share of the prompts, one file per step.

    share: of the prompts, in [0, 1]. Only one process of a run writes.
    decode: token ids → text, without special tokens.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        share: float,
        *,
        decode: Callable[[list[int]], str],
    ):
        self.active = share > 0  # False: nothing to write
        self._workdir = Path(workdir)
        self._share = share
        self._decode = decode
        self._pieces: dict[int, str] = {}  # token id → its text when decoded alone

    def restore(self, step: int) -> None:
        """Remove the files of steps after `step`, and unfinished files.

        Call it before the first `write`, even if the share is 0: with the restored checkpoint's
        step, or -1 in a new run.
        """
        for path in (self._workdir / FOLDER).glob("*.jsonl*"):
            unfinished = path.suffix == ".tmp"
            match = _NAME.fullmatch(path.stem if unfinished else path.name)
            if match and (unfinished or int(match[1]) > step):
                path.unlink(missing_ok=True)

    def write(
        self,
        step: int,
        epoch: int,
        prompts: Prompts,
        responses: Recorded,
        kind: str = "step",
    ) -> None:
        """Write or replace a step's file; on return it is on disk.

        kind: "step" or "eval".

        Raises OSError if the file cannot be written.
        """
        group_size = len(responses.rollout.lens) // len(prompts.examples)
        lines = []
        for q in select_prompts([example.prompt_id for example in prompts.examples], self._share):
            example = prompts.examples[q]
            group = {
                "step": int(step),
                "epoch": int(epoch),
                "prompt_id": example.prompt_id,
                "prompt": self._decode(prompts.tokens[q, : prompts.lens[q]].tolist()),
                "answer": example.answer,
            }
            for sample in range(group_size):
                row = q * group_size + sample
                number = {"sample": example.first_sample + sample}
                response = self._response(responses.rollout, row)
                lines.append(_encode(group | number | response | _scores(responses, row)))
        _write_atomically(rollouts_path(self._workdir, step, kind), b"".join(lines))

    def _response(self, rollout: Rollout, row: int) -> dict[str, Any]:
        response = slice(0, int(rollout.lens[row]))
        tokens = rollout.tokens
        token_ids = tokens.ids[row, response].tolist()
        text = self._decode(token_ids)
        return {
            "text": text,
            "token_ids": token_ids,
            "token_ends": self.token_ends(token_ids, text),
            "sources": "".join(map(_LETTERS.__getitem__, tokens.sources[row, response].tolist())),
            "policy_logprobs": _finite(tokens.policy_logprobs[row, response], _LOGPROB_DECIMALS),
            "origin_steps": tokens.origin_steps[row, response].tolist(),
            "prefix_len": int(rollout.prefix_lens[row]),
        }

    def token_ends(self, token_ids: list[int], text: str) -> list[int]:
        """Return the number of characters of `text` up to the end of each token.

        The tokens of one character are decoded together: all but the last end before it. A token is
        decoded after the last whole one, as tokenizers treat the start of a text differently.
        """
        pieces = [self._piece(token_id) for token_id in token_ids]
        if "".join(pieces) == text:
            return list(itertools.accumulate(map(len, pieces)))
        ends = []
        end = 0
        context = 0
        start = 0
        for i in range(1, len(token_ids) + 1):
            before = self._decode(token_ids[context:start])
            now = self._decode(token_ids[context:i])
            whole = len(now) > len(before) and not now.endswith("\ufffd")
            if whole or i - start == _MAX_CHARACTER_TOKENS:
                end = min(end + max(len(now) - len(before), 0), len(text))
                context = start
                start = i
            ends.append(end)
        return ends[:-1] + [len(text)] * bool(ends)

    def _piece(self, token_id: int) -> str:
        if token_id not in self._pieces:
            self._pieces[token_id] = self._decode([token_id])
        return self._pieces[token_id]


def _scores(responses: Recorded, row: int) -> dict[str, Any]:
    by_function = responses.by_function
    scores = {
        "reward": _rounded(responses.rewards[row]),
        "by_function": {name: _rounded(x[row]) for name, x in by_function.items()},
        "failed": bool(responses.failed[row]),
        "ended": bool(responses.ended[row]),
        "turns": [],
    }
    if responses.turns is not None:
        rewards, ends, roles = responses.turns
        scores["turns"] = [
            {"end": int(ends[row, k]), "reward": _rounded(rewards[row, k]), "role": roles[row, k]}
            for k in range(np.count_nonzero(ends[row]))
        ]
    return scores


def _rounded(reward: np.float32) -> float | None:
    return _finite(reward[None], _REWARD_DECIMALS)[0]


def _finite(values: np.ndarray, decimals: int) -> list[float | None]:
    """Round numbers; None for nan and inf, which JSON lacks."""
    rounded = np.round(values.astype(np.float64), decimals) + 0.0  # + 0.0: never "-0.0"
    return [x if math.isfinite(x) else None for x in rounded.tolist()]


def _encode(record: dict[str, Any]) -> bytes:
    ordered = {name: record[name] for name in FIELDS}
    return json.dumps(ordered, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _write_atomically(path: Path, content: bytes) -> None:
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
        raise disk_error(path, error) from error
