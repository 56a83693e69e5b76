"""Tasks of `launch/evaluate.py` by name, and a policy's results on them.

    held_out                            the run's own held-out prompts
    FILE.jsonl, FILE.parquet            prompts of a file
    reasoning_gym:NAME[:OPTION=VALUE]   problems that the run has not seen
    sort[:OPTION=VALUE]                 the same for numbers to sort

The run's own task keeps the run's prompt format and reward. Any other starts without them: what was
made for the run's task may not fit it.
"""

import ast
import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from specrl_jax.compile.fit import fit_evaluation
from specrl_jax.data.prompts import encode_prompts, eval_batches, examples_of, load_examples
from specrl_jax.data.readers import READERS, read_any
from specrl_jax.evaluation.figures import figures
from specrl_jax.evaluation.saved_policy import SavedPolicy
from specrl_jax.inputs import require_package
from specrl_jax.responses import Responses, mean_by_function
from specrl_jax.rewards.scorers import SCORERS
from specrl_jax.settings import schema
from specrl_jax.training.build import make_responder
from specrl_jax.training.evaluate import evaluate, group_rewards
from specrl_jax.types import Example

HELD_OUT = "held_out"
# Sources of data that make problems.
REASONING_GYM = "reasoning_gym"
SORT = "sort"
_GENERATED = 100  # problems from a generator, if the user sets no limit
_ONE_TURN = {  # what a new task does not inherit, besides the fields of a task
    "environment.name": "", "sft.steps": 0,
    "data.prompt_field": "question", "data.answer_field": "answer",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    config: ConfigDict  # of its prompts and rewards
    examples: list[Example]


def load_task(
    name: str, config: ConfigDict, limit: int, change: Callable[[ConfigDict], ConfigDict]
) -> Task:
    """Return the first `limit` problems of a task (0: all) for a policy with this configuration.

    change: the user's changes to the configuration. Raises a one-line ValueError.
    """
    kind, _, rest = name.partition(":")
    if name == HELD_OUT:
        if not (config.data.eval_prompts or config.data.eval_path or config.data.eval_split):
            raise ValueError("--tasks: the run has no held-out prompts; name a file or other task")
        return Task(name, config, load_examples(config).eval[: limit or None])
    seen = []
    if kind in (REASONING_GYM, SORT):
        run = config
        config = change(_generator(config, kind, rest))
        rows, seen = _unseen_rows(config, run, limit or _GENERATED)
    elif Path(name).suffix in (".jsonl", ".parquet"):
        config = change(_file(config, Path(name)))
        rows = read_any(name, "", "--tasks")
    else:
        known = f"{HELD_OUT}, FILE.jsonl, FILE.parquet, {SORT} or {REASONING_GYM}:NAME"
        raise ValueError(f"--tasks must be {known}, got {name!r}")
    schema().validate(config)
    examples = examples_of(config, rows, examples_of(config, seen))[: limit or None]
    if not examples:
        unseen = " that the run has not seen" if kind in (REASONING_GYM, SORT) else ""
        raise ValueError(f"--tasks: {name} must have at least one question{unseen}")
    return Task(name, config, examples)


def measure_task(
    policy: SavedPolicy, task: Task, samples: int, temperature: float
) -> list[dict[str, Any]]:
    """Return a row for each figure of a task: greedy, then with `samples` responses, if any."""
    config = task.config
    positions = policy.model.max_positions - policy.config.rollout.response_len
    encoded = encode_prompts(task.examples, policy.tokenizer, positions)
    if encoded.dropped:
        print(f"{task.name}: {encoded.dropped} prompts longer than {positions} tokens left out")
    encoded = dataclasses.replace(encoded, tokens=encoded.tokens[:, : encoded.lens.max()])
    weights = policy.weights()
    rows = []
    responder = make_responder(config, policy.tokenizer)
    with responder.pool:
        for count, warmth in ((1, 0.0), (samples, temperature)):
            if not count:
                continue
            size = policy.batch_size(len(encoded.lens), count)
            spec = policy.spec(encoded.tokens.shape[1], count, warmth)
            spec = fit_evaluation(spec, weights, policy.params, size * count)
            batches = eval_batches(encoded, size)
            answered = evaluate(spec, weights, batches, policy.noise(), responder)
            decoding = f"T={warmth:g}" if warmth else "greedy"
            same = {"task": task.name, "decoding": decoding, "prompts": len(encoded.lens)}
            rows += [same | row for row in _rows(answered)]
    return rows


def _rows(answered: Sequence[Responses]) -> list[dict[str, Any]]:
    """Return the figures, and the shares of responses that were cut or failed to score, if any."""
    by_name = figures(group_rewards(answered))
    rows = [row_of(name, *mean_and_half) for name, mean_and_half in by_name.items()]
    rows += [row_of(f"mean {name}", mean) for name, mean in mean_by_function(answered).items()]
    if answered[0].turns is not None:
        turns = [x.turns.counts[: x.num_rows] for x in answered]
        rows.append(row_of("turns of an episode", float(np.mean(np.concatenate(turns)))))
    cut = []
    failed = []
    for responses in answered:
        real = np.arange(responses.num_rows)
        cut.append(~responses.ended[real])
        failed.append(responses.rewards.failed[real])
    shares = {"cut at the limit": cut, "failed to score": failed}
    return rows + [
        row_of(name, float(np.mean(np.concatenate(which))))
        for name, which in shares.items()
        if np.concatenate(which).any()
    ]


def row_of(measure: str, value: float, half: float = math.nan) -> dict[str, Any]:
    """Make a row of the table; half: of the 95 % interval; nan: unknown."""
    row = {"measure": measure, "value": value}
    return row if math.isnan(half) else row | {"ci95": half}


def _generator(config: ConfigDict, source: str, text: str) -> ConfigDict:
    """Return the configuration for "NAME:OPTION=VALUE:..."; sort has no NAME."""
    name, *options = text.split(":") if source == REASONING_GYM else [source, *text.split(":")]
    options = [option for option in options if option]
    if source == REASONING_GYM:
        _check_task(name)
    if (config.data.source, config.data.name, options) == (source, name, []):
        return config
    config = _without_format(config)
    config.data.source = source
    config.data.name = name
    own = (name for name, scorer in SCORERS.items() if scorer.source == source)
    config.reward.name = next(own, "exact")
    for option in options:
        field, _, value = option.partition("=")
        try:
            config.data.options[field] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"--tasks: an option is NAME=VALUE, got {option!r}") from None
    return config


def _check_task(name: str) -> None:
    require_package("reasoning_gym", "tasks", f"--tasks={REASONING_GYM}:{name}")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ValueError(f"--tasks: reasoning_gym has no task {name!r}{hint}")


def _unseen_rows(config: ConfigDict, run: ConfigDict, count: int) -> tuple[list, list]:
    """Return `count` problems after the run's own; and the run's own, if from this task."""
    data = config.data
    reader = READERS[config.data.source]
    start = run.data.prompts + run.data.eval_prompts
    start += run.sft.examples if run.sft.steps else 0
    rows = reader.read(data, start, start + count, config.seed)
    same = all(data[field] == run.data[field] for field in ("source", "name", "options"))
    return rows, reader.read(data, 0, start, config.seed) if same else []


def _file(config: ConfigDict, path: Path) -> ConfigDict:
    """Return the configuration for a file; a run on files or data sets keeps columns and reward."""
    if READERS[config.data.source].endless:
        config = _without_format(config)
        config.reward.name = "exact" if config.reward.name == REASONING_GYM else config.reward.name
    else:
        config = config.copy_and_resolve_references()
    config.data.source = path.suffix[1:]
    config.data.path = str(path)
    config.data.name = ""
    return config


def _without_format(config: ConfigDict) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(schema().of_task() | _ONE_TURN)
    config.data.options = ConfigDict()
    return config
