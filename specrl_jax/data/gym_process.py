"""Rows of reasoning_gym's tasks, made in a process of their own.

Some tasks go through sets of texts, whose order depends on the process's hash seed, or draw from
Python's global generator. Here both are fixed, so that a seed gives the same rows in every process.
"""

import contextlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from typing import Any

from specrl_jax.inputs import json_value, reason

# A task draws item i with its own seed + i, so these must lie further apart than a data set is
# long. Multiples of the golden section keep their distance however many of them there are.
_SEEDS = 2**31  # numpy's generators, which some tasks use, take no more than twice as many
_STEP = 1_327_217_885  # _SEEDS times the golden section


def task_seed(seed: int) -> int:
    """Return the seed that a task gets under the run's seed; 0 stays 0.

    Any two of 4,096 seeds in a row are more than 370,000 items apart.
    """
    return seed * _STEP % _SEEDS


def read_items(name: str, options: dict[str, Any], seed: int, start: int, stop: int) -> list[dict]:
    """Return items `start` to `stop` of a task, as JSON has them. Raises ValueError if it fails.

    seed: of the run; items of one seed are not those of another.
    """
    paths = [path for path in sys.path if isinstance(path, str)]
    code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=pickle.dumps((name, options, seed, start, stop)),
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "no message")
        raise ValueError(f"its process ended with code {done.returncode}: {last[:200]}")
    error, items = json.loads(done.stdout)
    if error:
        raise ValueError(error)
    return items


def require_reasoning_gym(what: str) -> None:
    """Raise ValueError in one line where reasoning_gym, which `what` needs, is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f"{what} needs reasoning-gym: pip install -e '.[tasks]' in the clone")


def main() -> None:
    """Read the request from stdin and write (error or "", items) to stdout."""
    error = ""
    items = "[]"
    with contextlib.redirect_stdout(sys.stderr):  # tasks print
        try:
            items = json.dumps(_items(*pickle.load(sys.stdin.buffer)), default=json_value)
        except (Exception, SystemExit) as raised:
            error = reason(raised)
    sys.stdout.write(f"[{json.dumps(error)}, {items}]")


def _items(name: str, options: dict[str, Any], seed: int, start: int, stop: int) -> list[dict]:
    import reasoning_gym

    task = reasoning_gym.create_dataset(name, seed=task_seed(seed), size=stop, **options)
    items = []
    for index in range(start, stop):
        random.seed(f"{seed}/{index}")
        items.append(task[index])
    return items
