"""Stop strings that end a turn, such as `</answer>`, even across token boundaries.

An automaton reads the bytes of tokens. Its state is the longest suffix of the input that is a
prefix of one of the strings. Its last state accepts: the turn ends with this token. What follows is
another turn, which is read from the start. With the string "<a>":

    tokens   "x<"   "a"    "> y"       "<"
    state    "<"    "<a"   accepting   "<"

A string has a bounded number of bytes, so a few tokens determine the state, and rows carry none.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.sharding import axes, reshard

NOTHING = -1  # in place of a token: anything read before it is ignored
_LIST = re.compile(r"\s*\[\s*[\"']")
_ESCAPES = re.compile(r"(\\[nrt])+")
_SURROGATE = re.compile("[\ud800-\udfff]")  # never occurs in a file's text


@dataclasses.dataclass(frozen=True, eq=False)
class StopStrings:
    """Automaton of strings over a vocabulary. Hashed by identity: a constant of the programs."""

    strings: tuple[str, ...]
    kinds: np.ndarray  # int32 [V], the column of `moves` of each token
    moves: np.ndarray  # int32 [S, K], next state by state and kind; the last state accepts

    @classmethod
    def of(cls, strings: Sequence[str], texts: Sequence[str]) -> "StopStrings":
        """Return the automaton; texts: of V tokens, from `Tokenizer.token_texts`.

        No string spans a token without a text.
        """
        steps = _byte_steps([string.encode() for string in strings])
        accepting = len(steps) - 1
        tokens = [text.encode("utf-8", "surrogateescape") for text in texts]
        sizes = np.array([len(token) for token in tokens])
        starts = np.cumsum(sizes) - sizes
        letters = np.frombuffer(b"".join(tokens), np.uint8)
        columns = np.tile(np.arange(accepting, dtype=np.int32), (len(tokens) + 1, 1))
        for i in range(sizes.max(initial=0)):
            longer = np.flatnonzero(sizes > i)
            read = letters[starts[longer] + i]
            columns[longer + 1] = steps[columns[longer + 1], read[:, None]]
        columns[1:][sizes == 0] = 0
        columns[0] = 0  # of NOTHING, the smallest: the first kind
        columns, kinds = np.unique(columns, axis=0, return_inverse=True)
        moves = np.concatenate([columns.T, columns.T[:1]])
        return cls(tuple(strings), kinds[1:].astype(np.int32), moves)

    @property
    def window(self) -> int:
        """Number of preceding tokens in which a string that ends at a token may start."""
        return max(len(string.encode()) for string in self.strings) - 1

    def ends(self, tokens: Any, xp: Any = jnp) -> Any:
        """Mark the tokens that complete a string, bool [B, T].

        tokens: int32 [B, window + T], or NOTHING; xp: jax.numpy, or numpy on the host.
        """
        count = tokens.shape[1] - self.window
        look_up = _look_up if xp is jnp else np.take
        kinds = xp.where(tokens < 0, 0, look_up(self.kinds, xp.maximum(tokens, 0)))
        moves = self.moves.reshape(-1)
        state = xp.zeros_like(kinds[:, :count])
        for first in range(self.window + 1):
            kind = kinds[:, first : first + count]
            state = look_up(moves, state * self.moves.shape[1] + kind)
        return state == len(self.moves) - 1

    def count_to_end(self, ids: Sequence[int]) -> int:
        """Return the number of a turn's tokens up to the first that completes a string, or 0."""
        before = [NOTHING] * self.window
        ends = self.ends(np.array([[*before, *ids]], np.int32), np)[0]
        return int(np.argmax(ends)) + 1 if ends.any() else 0

    def cut(
        self,
        ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        keep: bool,
        needed: str = "",
    ) -> str:
        """Decode a turn up to the first string that its tokens complete; all of it if none.

        ids: of the turn. decode: token ids → text. keep: include the string, else end before it.
        needed: a text that is kept in any case if the string completes it.
        """
        count = self.count_to_end(ids)
        if not count:
            return decode(ids)
        text = decode(ids[:count])
        # The string ends within what the last token adds.
        pairs = zip(text, decode(ids[: count - 1]))
        before = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        begins = ((text.find(s, max(before + 1 - len(s), 0)), len(s)) for s in self.strings)
        places = [(begin + size, begin) for begin, size in begins if begin >= 0]
        if not places:  # the decoder hides the string, as a special token
            return text
        end, begin = min(places)
        if needed and text[:end].rstrip().endswith(needed):
            keep = True
        return text[: end if keep else begin]


def _byte_steps(strings: Sequence[bytes]) -> np.ndarray:
    """Return the next state by state and byte, int32 [S, 256]; the last state accepts permanently.

    The other states are the prefixes of the strings, the empty one first.
    """
    begins = sorted({string[:size] for string in strings for size in range(len(string))}, key=len)
    number = {begin: i for i, begin in enumerate(begins)}
    accepting = len(begins)
    steps = np.zeros((accepting + 1, 256), np.int32)
    steps[accepting] = accepting
    for state, begin in enumerate(begins):
        for byte in {*b"".join(strings)}:
            read = begin + bytes([byte])
            if read.endswith(tuple(strings)):
                steps[state, byte] = accepting
            else:
                ends = (read[i:] for i in range(len(read) + 1))
                steps[state, byte] = next(number[end] for end in ends if end in number)
    return steps


def _look_up(table: np.ndarray, index_BT: Array) -> Array:
    values = reshard(table, None)
    return values.at[index_BT].get(out_sharding=axes("batch", None))


def turn_ends(eos_ids: Sequence[int], stop: StopStrings | None, tokens: Any, xp: Any = jnp) -> Any:
    """Mark the tokens that end a turn, bool [B, T]; arguments: see `StopStrings.ends`.

    eos_ids: tokens that end a turn on their own. Without strings the window is 0.
    """
    new = tokens if stop is None else tokens[:, stop.window :]
    ends = functools.reduce(xp.logical_or, [new == eos for eos in eos_ids])
    return ends if stop is None else ends | stop.ends(tokens, xp)


# The field `rollout.stop` ------------------------------------------------------------------------


def parse_stop(value: str) -> tuple[str, ...]:
    """Return the strings that `rollout.stop` lists: texts separated by blanks, or a JSON list.

    Raises a one-line ValueError if the value is neither. Only blanks, a newline and its escape
    count as texts in a JSON list alone: elsewhere they would be lost silently.
    """
    if _LIST.match(value):
        strings = _read_list(value)
        clear = bool(strings)
    else:
        strings = value.split()
        others = {*filter(str.isspace, value)} - {" "}
        clear = not others and bool(strings) == bool(value)
        clear = clear and not any(map(_ESCAPES.fullmatch, strings))
    if not clear or _SURROGATE.search("".join(strings)):
        raise ValueError(
            f"rollout.stop must be texts separated by blanks, or a JSON list, got {value!r}"
        )
    return tuple(strings)


def write_stop(strings: Sequence[str]) -> str:
    """Return the value of `rollout.stop` that lists these strings."""
    return json.dumps([*strings], ensure_ascii=False) if strings else ""


def is_stop(value: str) -> bool:
    """Return whether `parse_stop` understands a value."""
    try:
        parse_stop(value)
    except ValueError:
        return False
    return True


def _read_list(value: str) -> list[str]:
    """Read a JSON list of non-empty texts; [] if the value is not one."""
    try:
        strings = json.loads(value)
    except ValueError:
        return []
    return strings if all(isinstance(x, str) and x for x in strings) else []


def make_stop_strings(config: Any, tokenizer: Any) -> StopStrings | None:
    """Return the automaton of `rollout.stop`; None if it is empty.

    Raises a one-line ValueError if the tokenizer cannot produce one of the strings.
    """
    strings = parse_stop(config.rollout.stop)
    return _make(strings, tokenizer) if strings else None


@functools.lru_cache(maxsize=8)
def _make(strings: tuple[str, ...], tokenizer: Any) -> StopStrings:
    texts = tokenizer.token_texts()
    for string in strings:
        if missing := _unwritten(string, texts):
            raise ValueError(
                f"rollout.stop must hold texts that the tokenizer can produce, got {string!r}: no "
                f"tokens produce {missing!r}; choose another text"
            )
    return StopStrings.of(strings, texts)


def _unwritten(string: str, texts: Sequence[str]) -> str:
    """Return what is left of a string after its longest prefix that tokens spell; "" if none."""
    moves = StopStrings.of([string], texts).moves
    reached = np.zeros(1, int)
    while len(more := np.unique(np.append(reached, moves[reached]))) > len(reached):
        reached = more
    begin = string.encode()[: reached[-1]]  # states are numbered by their lengths
    return string[len(begin.decode(errors="ignore")) :]
