r"""Marks of a final answer in the text of a response: `<answer>`, `\boxed{}` and `####`.

All of a text is searched, in time linear in its length.
"""

import re

MAX_JOINT = 100  # characters between two boxes of one answer

# What math-verify knows by name is no word, nor is what joins the parts of an answer.
WORD = re.compile(
    r"(?<![\\{A-Za-z])(?:(?!(?:and|or|percent|sin|cos|tan|cot|sec|csc|log|exp|max|min|gcd|lcm|mod)\b)"
    r"[A-Za-z]{3,}|(?:is|of|so|he|it|we|in|to|at|by|on|as|be)\b|an?(?=\s[A-Za-z]{2}))(?![A-Za-z(])"
)
_JOINT = re.compile(r"[\s$]*(?:[,;]?\s*(?:\\text\s*\{\s*)?(?:and|or)\b\s*\}?|[,;])[\s$]*")
_HASHED = re.compile(r"(?<!#)####(?!#)[^\S\n]*\n?[^\S\n]*([^\n#]*)")
_ANSWER_START = re.compile(  # "#### Step 2" and "#### 1. Add them" are headings
    r"(?!\d[.):]\s+\W{0,3}[A-Z])[\s*_$£€¥<(\[{+\-−±~≈]*"
    r"(?:\.?\d|\\(?!text)|√|π|[A-Za-z]\s*=|[A-J]\W*$)"
)
_CLAUSE = re.compile(rf"[.,;:!?]\s+(?={WORD.pattern})|\b(?:because|since)\b")


def marked_answer(text: str) -> str | None:
    """Return the last `<answer>..</answer>`, else the last box or `#### ..`; None without one."""
    tagged = _last_tagged(text)
    inner = text if tagged is None else tagged
    _, last = max(_last_boxed(inner), _last_hashed(inner))
    return tagged if last is None else last


def _last_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def _last_hashed(text: str) -> tuple[int, str | None]:
    """Return (place, content) of the last `#### ..` that is no heading; (-1, None) without one.

    The content ends with the line, or where another clause begins.
    """
    for match in reversed(list(_HASHED.finditer(text))):
        if _ANSWER_START.match(match[1]):
            content = _CLAUSE.split(match[1])[0].strip()
            return match.start(), content.lstrip("*_` <").rstrip("*_` >.,;:")
    return -1, None


def _last_boxed(text: str) -> tuple[int, str | None]:
    r"""Return (place, content) of the last `\boxed{..}`; (-1, None) without one.

    Boxes joined to it by "and", "or" or comma belong to it.
    """
    boxes = []
    start = len(text)
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        end = match.end()
        depth = 1
        while depth and end < start:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth or (boxes and not _is_joint(text[end:start])):
            break
        boxes.insert(0, text[match.end() : end - 1].strip())
        start = match.start()
    return (start, ", ".join(boxes)) if boxes else (-1, None)


def _is_joint(text: str) -> bool:
    # The pattern's time is quadratic in blanks.
    return len(text) <= MAX_JOINT and _JOINT.fullmatch(text) is not None
