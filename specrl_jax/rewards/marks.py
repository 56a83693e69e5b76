r"""Marks of a final answer in the text of a response: `<answer>`, `\boxed{}` and `####`.

The whole text is searched, in time linear in its length.
"""

import re

MAX_JOINT = 100  # characters between two boxes of one answer
MAX_WITH_UNIT = 100  # characters of a number and its unit

# Names that math-verify knows are not words, nor is what joins the parts of an answer.
WORD = re.compile(
    r"(?<![\\{A-Za-z])(?:(?!(?:and|or|percent|sin|cos|tan|cot|sec|csc|log|exp|max|min|gcd|lcm|mod)\b)"
    r"[A-Za-z]{3,}|(?:is|of|so|he|it|we|in|to|at|by|on|as|be)\b|an?(?=\s[A-Za-z]{2}))(?![A-Za-z(])"
)
_JOINT = re.compile(r"[\s$]*(?:[,;]?\s*(?:\\text\s*\{\s*)?(?:and|or)\b\s*\}?|[,;])[\s$]*")
_HASHED = re.compile(r"(?<!#)####(?!#)[^\S\n]*\n?[^\S\n]*([^\n#]*)")
_ANSWER_START = re.compile(  # "#### Step 2" is a heading
    r"[\s*_$£€¥<(\[{+\-−±~≈]*(?:Rs\.?\s*)?(?:\.?\d|\\(?!text)|√|π|[A-Za-z]\s*=|[A-J]\W*$)"
)
_HEADING = re.compile(r"\W{0,3}(?:\d[.):]|\d\.\d\.?)\s+\W{0,3}[A-Z][a-z]")  # "#### **1. Add them**"
_CLAUSE = re.compile(
    rf"[.,;:!?]\s+(?={WORD.pattern})|[.!?]\s+(?=[A-Z])|\s\((?=[^()]*[A-Za-z]{{2}})|"
    r"\b(?:because|since)\b"
)
_UNIT = (
    r"(?:[kcm]?m|in|ft|yd|mi|[mk]?g|lbs?|oz|m?[lL]|s|h|hrs?|min|day|week|month|year|hour|gal"
    r"|[AaPp]\.?[Mm]\.?|[kM]?W|V|J|N|Hz|°\s*[CFK]?|[¢€£%])(?:\^?\{?[23]\}?|[²³])?"
)
_BLANK = r"(?:\\?[,;]|\\ |\s|\\(?:text|mathrm)\s*\{)*"
_WITH_UNIT = re.compile(
    rf"(?:Rs\.?\s*)?([-+−]?\s*\$?[\d,]*\.?\d+){_BLANK}(?:/?\s*{_UNIT}(?:\s*/\s*{_UNIT})*)?[\s.}}]*"
)


def marked_answer(text: str) -> str | None:
    """Return the last `<answer>..</answer>`, else the last box or `#### ..`; None if none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    tagged = text[start + len("<answer>") : end].strip() if start >= 0 else None
    inner = text if tagged is None else tagged
    _, last = max(_last_boxed(inner), _last_hashed(inner))
    return tagged if last is None else last


def without_unit(answer: str) -> str:
    """Return the number from an answer that is a number and a unit, like 5 from "5 km/h"."""
    # The pattern's time is quadratic in digits and blanks.
    match = _WITH_UNIT.fullmatch(answer) if len(answer) <= MAX_WITH_UNIT else None
    return match[1] if match else answer


def _last_hashed(text: str) -> tuple[int, str | None]:
    """Return (position, content) of the last `#### ..` that is not a heading; (-1, None) if none.

    The content ends with the line, or at the start of another clause.
    """
    for match in reversed(list(_HASHED.finditer(text))):
        # On the last line a number and a sentence are an answer: "#### 5. He keeps 3."
        is_heading = _HEADING.match(match[1]) and text[match.end() :].strip()
        if _ANSWER_START.match(match[1]) and not is_heading:
            content = _CLAUSE.split(match[1])[0].strip()
            return match.start(), content.lstrip("*_` <").rstrip("*_` >.,;:")
    return -1, None


def _last_boxed(text: str) -> tuple[int, str | None]:
    r"""Return (position, content) of the last `\boxed{..}`; (-1, None) if none.

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
