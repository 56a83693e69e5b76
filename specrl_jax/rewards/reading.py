"""Parsed response, or turn of an episode: what rewards and environments see of it.

`responses.Responder.read` makes a `Reading`. Functions and environments that read only the answer
get `answer`, all others `text`; `reward.extract` searches either. No JAX.
"""

import collections
import re
from typing import NamedTuple

MAX_SEARCH = 32_768  # characters: `extract` reads only the end of a longer text


class Reading(NamedTuple):
    """A response, or a turn of an episode."""

    text: str  # all of it, without its end token, cut at the stop string
    answer: str | None  # what follows its thoughts; None: a thought is not closed
    ended: bool = True  # by a token or a stop string; False: cut by the length limit

    def seen(self, reads_whole: bool) -> str:
        """Return what an environment gets; reads_whole: including thoughts."""
        return self.text if reads_whole else self.answer or ""


def extract(pattern: re.Pattern | None, text: str | None) -> str | None:
    """Return group 1 of the pattern's last match, without surrounding blanks; None if no match.

    pattern: of `reward.extract`; None: the text is the answer. It may backtrack forever.
    """
    if pattern is None or text is None:
        return text
    last = collections.deque(pattern.finditer(text[-MAX_SEARCH:]), maxlen=1)
    found = last[0][1] if last else None
    return None if found is None else found.strip()
