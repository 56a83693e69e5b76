"""Lines of JSON, as the metrics and the rollouts of a run are kept."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def decode(path: Path, number: int, line: bytes, fields: Iterable[str]) -> dict[str, Any]:
    """The object of line `number` (from 1) of a file.

    Raises ValueError in one line where it is damaged or lacks one of `fields`.
    """
    rule = "a JSON object"
    try:
        record = json.loads(line)
        if isinstance(record, dict):
            missing = [name for name in fields if name not in record]
            if not missing:
                return record
            rule = f"an object with the field {missing[0]!r}"
    except ValueError:
        pass
    raise ValueError(f"{path}: line {number} must be {rule}; restore the file or remove the line")
