"""Thoughts and the answer after them: the part of a response that named rewards read.

Takes `reward.thought_tags`, pairs of an opening and a closing tag; returns the answer part of a
response. A policy may try out answers in its thoughts, so none of them is its answer.
"""

import dataclasses
import re

_BLANKS = re.compile(r"\s*\n|\s+")  # whole lines, so that code keeps its indentation; else blanks


@dataclasses.dataclass(frozen=True)
class ThoughtTags:
    """Tags that enclose thoughts."""

    pairs: tuple[tuple[str, str], ...] = ()  # (opening, closing); (): the response has no thoughts

    @classmethod
    def parse(cls, text: str, extract: str = "") -> "ThoughtTags":
        """Read `reward.thought_tags`; a one-line ValueError if it does not consist of pairs.

        extract: `reward.extract`, which must not search for a tag: it never sees one.
        """
        words = text.split()
        pairs = tuple(zip(words[::2], words[1::2]))
        if len(words) % 2 or any(opening == closing for opening, closing in pairs):
            raise ValueError(
                "reward.thought_tags must be pairs of an opening and a closing tag, like "
                f'"<think> </think>", got {text!r}'
            )
        if asked := [word for word in words if word in extract.replace("\\", "")]:
            raise ValueError(
                f"reward.extract must not contain {asked[0]}, a tag of reward.thought_tags, as it "
                f'reads what follows the thought, got {extract!r}; or set reward.thought_tags=""'
            )
        return cls(pairs)

    def answer_part(self, response: str, has_begun: bool = False) -> str | None:
        """Return what follows the last closing tag; all of a response without thoughts.

        None, no answer: a thought is not closed. has_begun: the prompt has opened one.
        """
        end = max((response.rfind(x) + len(x) for _, x in self.pairs if x in response), default=0)
        answer = response[end:]
        if (has_begun and not end) or any(opening in answer for opening, _ in self.pairs):
            return None
        if not end:
            return response
        blanks = _BLANKS.match(answer)
        return answer[blanks.end() if blanks else 0 :].rstrip()

    def has_begun(self, prompt: str) -> bool:
        """Return whether a prompt ends with an opening tag, ignoring blanks."""
        return prompt.rstrip().endswith(tuple(opening for opening, _ in self.pairs))

    def is_open(self, text: str) -> bool:
        """Return whether the text opens a thought and does not close it."""
        return self.answer_part(text) is None
