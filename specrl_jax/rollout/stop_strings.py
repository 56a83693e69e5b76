"""Texts that end a turn, as `</answer>`, across the borders of tokens.

An automaton reads the texts of tokens. Its state is the longest end of what was read that begins
one of the strings, so it depends on a few tokens alone: whoever reads these from the start knows
the state, and a row carries none. With the string "<a>":

    tokens   "x<"   "a"    "> y"
    state    "<"    "<a"   accepting: the turn ends with this token
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.sharding import axes, reshard

NOTHING = -1  # in the place of a token: what was read before it does not count
_NO_TEXT = "\0"  # of a token that adds none: no string goes on over it


@dataclasses.dataclass(frozen=True, eq=False)
class StopStrings:
    """Automaton of strings over a vocabulary. Hashed by identity: a constant of the programs."""

    strings: tuple[str, ...]
    kinds: np.ndarray  # int32 [V], the column of `moves` of each token
    moves: np.ndarray  # int32 [S, K], next state by state and kind; the last state accepts

    @classmethod
    def of(cls, strings: Sequence[str], texts: Sequence[str]) -> "StopStrings":
        """Return the automaton; texts: of V tokens, what each adds to a text."""
        begins = {string[:size] for string in strings for size in range(len(string))}
        states = sorted(begins, key=len)  # "" first: the start
        number = {state: i for i, state in enumerate(states)}
        accepting = len(states)
        letters = set("".join(strings))

        def move(state: str, text: str) -> int:
            read = state + text
            if any(string in read for string in strings):
                return accepting
            return number[next(state for state in reversed(states) if read.endswith(state))]

        def column(text: str) -> tuple[int, ...]:
            if letters.isdisjoint(text):
                return (0,) * accepting + (accepting,)
            return (*(move(state, text) for state in states), accepting)

        columns = {(0,) * accepting + (accepting,): 0}  # the first is of NOTHING
        kinds = [columns.setdefault(column(x or _NO_TEXT), len(columns)) for x in texts]
        return cls(tuple(strings), np.array(kinds, np.int32), np.array([*columns], np.int32).T)

    @property
    def window(self) -> int:
        """Number of tokens before a token in which a string that ends in the token may begin."""
        return max(map(len, self.strings)) - 1

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


def _look_up(table: np.ndarray, index_BT: Array) -> Array:
    values = reshard(table, None)
    return values.at[index_BT].get(out_sharding=axes("batch", None))


def turn_ends(eos_ids: Sequence[int], stop: StopStrings | None, tokens: Any, xp: Any = jnp) -> Any:
    """Mark the tokens that end a turn, bool [B, T]; arguments: see `StopStrings.ends`.

    eos_ids: the tokens that end it alone. Without strings the window is 0.
    """
    new = tokens if stop is None else tokens[:, stop.window :]
    ends = functools.reduce(xp.logical_or, [new == eos for eos in eos_ids])
    return ends if stop is None else ends | stop.ends(tokens, xp)


def make_stop_strings(config: Any, tokenizer: Any) -> StopStrings | None:
    """Return the automaton of `rollout.stop`; None where it is empty.

    Raises ValueError in one line where the tokenizer cannot write one of the strings.
    """
    strings = config.rollout.stop.split()
    if not strings:
        return None
    stop = StopStrings.of(strings, tokenizer.token_texts())
    for string in strings:
        ids = tokenizer.encode(string)
        padded = np.array([[NOTHING] * stop.window + ids], np.int32)
        if not stop.ends(padded, np)[0, -1]:
            raise ValueError(
                f"rollout.stop must hold texts that tokens write, {string!r} is none: the "
                f"tokenizer reads it as {tokenizer.decode(ids)!r}; choose another text"
            )
    return stop


def cut_at_stop(text: str, strings: Sequence[str], keep: bool) -> str:
    """Cut a text at the first string that ends in it; keep: after the string, else before it."""
    places = [(at + len(s), at) for s in strings if (at := text.find(s)) >= 0]
    if not places:
        return text
    end, start = min(places)
    return text[: end if keep else start]
