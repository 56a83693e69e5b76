"""Problems from packages, made in a separate process.

Some packages iterate over sets of texts, whose order depends on the process's hash seed, or use
Python's global random generator. Here both are fixed, so a seed gives the same items in every
process.
"""

import contextlib
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from specrl_jax.inputs import json_value, reason

# A task draws item i with its own seed + i, so seeds must be further apart than a data set is long.
# Multiples of the golden section stay apart however many there are.
_SEEDS = 2**31  # numpy's generators, which some tasks use, accept at most twice as many
_STEP = 1_327_217_885  # _SEEDS times the golden section


def task_seed(seed: int) -> int:
    """Return the seed that a task gets under the run's seed; 0 stays 0.

    Any two of 4,096 consecutive seeds are more than 370,000 items apart.
    """
    return seed * _STEP % _SEEDS


def read_items(
    source: str, name: str, options: dict[str, Any], seed: int, start: int, stop: int
) -> list[dict]:
    """Return items `start` to `stop`, JSON-able. Raises ValueError if it fails.

    source: of `SOURCES`. name: of a task, a game or a taskset of the package.
    seed: of the run; different seeds give different items, unless the package has a fixed order.
    """
    paths = [path for path in sys.path if isinstance(path, str)]
    code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=pickle.dumps((source, name, options, seed, start, stop)),
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


def main() -> None:
    """Read the request from stdin and write (error or "", items) to stdout."""
    error = ""
    items = "[]"
    with contextlib.redirect_stdout(sys.stderr):  # packages print
        try:
            source, *request = pickle.load(sys.stdin.buffer)
            items = json.dumps(SOURCES[source](*request), default=json_value)
        except (Exception, SystemExit) as raised:
            error = reason(raised)
    sys.stdout.write(f"[{json.dumps(error)}, {items}]")


def _gym_items(name: str, options: dict[str, Any], seed: int, start: int, stop: int) -> list[dict]:
    import reasoning_gym

    task = reasoning_gym.create_dataset(name, seed=task_seed(seed), size=stop, **options)
    items = []
    for index in range(start, stop):
        random.seed(f"{seed}/{index}")
        items.append(task[index])
    return items


def _games(name: str, options: dict[str, Any], seed: int, start: int, stop: int) -> list[dict]:
    """Return games, each with a seed that is its answer."""
    from specrl_jax.agents.textarena_games import load_game

    game = load_game(name)()
    items = []
    for index in range(start, stop):
        first = task_seed(seed) + index
        prompt = game.begin(first, options)
        items.append({"prompt": prompt, "answer": str(first), "options": options})
    return items


def _tasks(name: str, options: dict[str, Any], seed: int, start: int, stop: int) -> list[dict]:
    """Return tasks in the order of their taskset, whatever the seed."""
    from specrl_jax.agents.verifiers_tasks import read_tasks

    return list(itertools.islice(read_tasks(name, options), start, stop))


SOURCES: dict[str, Callable[..., list[dict]]] = {
    "reasoning_gym": _gym_items,
    "textarena": _games,
    "verifiers": _tasks,
}
