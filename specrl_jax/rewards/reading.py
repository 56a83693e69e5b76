"""Reading of a response, or of a turn of an episode: what rewards and environments see of it.

`responses.Responder.read` makes a `Reading`. Functions and environments that read the
answer alone get `answer`, all others `text`; `reward.extract` looks in either. No JAX.
"""

import collections
import re
from typing import NamedTuple

MAX_SEARCH = 32_768  # characters: `extract` reads only the end of a longer text


class Reading(NamedTuple):
    """A response, or a turn of an episode."""

    text: str  # all of it, without the token that ends it, cut at the string that stopped it
    answer: str | None  # what follows its thoughts; None: a thought is not closed
    ended: bool = True  # by a token or a stop string; False: the length cut it

    def seen(self, reads_whole: bool) -> str:
        """Return what an environment gets; reads_whole: thoughts, too."""
        return self.text if reads_whole else self.answer or ""


def extract(pattern: re.Pattern | None, text: str | None) -> str | None:
    """Return group 1 of the pattern's last match, without blanks at both ends; None without one.

    pattern: of `reward.extract`; None: the text is the answer. It may backtrack for ever.
    """
    if pattern is None or text is None:
        return text
    last = collections.deque(pattern.finditer(text[-MAX_SEARCH:]), maxlen=1)
    found = last[0][1] if last else None
    return None if found is None else found.strip()
