"""Record of the code and devices of a run: WORKDIR/code.jsonl.

It has a line for each start that differs from the previous one.
"""

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from specrl_jax import __version__
from specrl_jax.inputs import json_object

FILE_NAME = "code.jsonl"


def git_state(folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """Return the commit of a folder's repository, and whether files differ from it ("dirty").

    folder: this code's by default. {} without a repository or git.
    """
    options = {
        "cwd": folder,
        "capture_output": True,
        "encoding": "utf-8",
        "errors": "replace",
        "check": True,
        "timeout": 10,
    }
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options)
        changes = subprocess.run(["git", "status", "--porcelain"], **options)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.stdout.strip(), "dirty": bool(changes.stdout.strip())}


def record_code(workdir: Path) -> None:
    """Append the versions, the commit and the devices of this process."""
    import jax

    devices = jax.devices()
    versions = {"version": __version__, "python": platform.python_version(), "jax": jax.__version__}
    on = {"devices": f"{len(devices)} × {devices[0].device_kind}"}
    line = json.dumps(versions | git_state() | on)
    if _lines(workdir)[-1:] != [line]:
        with (workdir / FILE_NAME).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_code(workdir: Path) -> list[str]:
    """Return as text what ran in a work directory; [] if unknown.

    Raises a one-line ValueError for a damaged file.
    """
    texts = []
    for number, line in enumerate(_lines(workdir), start=1):
        code = json_object(line.encode(), f"{workdir / FILE_NAME}: line {number} (remove it)")
        commit = f"commit {code['commit'][:10]}" if "commit" in code else "no git repository"
        changed = " with changes" if code.get("dirty") else ""
        versions = f"specrl_jax {code.get('version')}, {commit}{changed}, jax {code.get('jax')}"
        texts.append(f"{versions} on {code.get('devices')}")
    return texts


def _lines(workdir: Path) -> list[str]:
    """Return the complete lines: a process may be writing the last."""
    path = workdir / FILE_NAME
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    return text.rpartition("\n")[0].splitlines()
