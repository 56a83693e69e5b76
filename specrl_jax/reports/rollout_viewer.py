"""Data of the report's viewer: the recorded responses of a run.

Takes `WORKDIR/rollouts` (`records`). Returns JSON-able dicts: the responses to a prompt, a column
per step that has them, with the text, source, log-prob and age of every token.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specrl_jax.algorithms.advantages import group_relative, has_critic
from specrl_jax.algorithms.evidence import AdvantageConfig
from specrl_jax.reports.runs import RecordedRun
from specrl_jax.telemetry.records import read_some_rollouts
from specrl_jax.telemetry.rollout_metrics import rouge1

Response = dict[str, Any]  # a line of a record


def viewer(run: RecordedRun, limit: int) -> dict[str, Any]:
    """Return the viewer's data of a run; limit: bytes of the records to read."""
    rollouts, shown, total = read_some_rollouts(run.workdir, limit)
    prompts = [
        _prompt(kind, responses, run.config)
        for kind, lines in rollouts.items()
        for responses in _grouped(lines, "prompt_id")
    ]
    name = run.workdir.resolve().name
    return {"name": name, "prompts": prompts, "shown": shown, "total": total}


def _grouped(lines: Iterable[Response], field: str) -> list[list[Response]]:
    by_value: dict[Any, list[Response]] = {}
    for line in lines:
        by_value.setdefault(line[field], []).append(line)
    return list(by_value.values())


def _prompt(kind: str, responses: Sequence[Response], config: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt. reward: mean of the last column. change: 1 − ROUGE-1 F1 of the last two."""
    columns = _grouped(responses, "step")
    rewards = [r["reward"] for r in columns[-1] if r["reward"] is not None]
    return {
        "kind": kind,
        "id": responses[0]["prompt_id"],
        "prompt": responses[0]["prompt"],
        "answer": responses[0]["answer"],
        "reward": statistics.fmean(rewards) if rewards else None,
        "change": _change(*columns[-2:]) if len(columns) > 1 else 0.0,
        "columns": [
            {
                "step": column[0]["step"],
                "epoch": column[0]["epoch"],
                "rows": [
                    _row(line, advantage)
                    for line, advantage in zip(column, _advantages(kind, column, config))
                ],
            }
            for column in columns
        ],
    }


def _row(line: Response, advantage: float | None) -> dict[str, Any]:
    """Return a response; single letters name per-token values."""
    ends = line["token_ends"]
    return {
        "sample": line["sample"],
        "reward": line["reward"],
        "functions": line["by_function"],
        "advantage": advantage,
        "failed": line["failed"],
        "ended": line["ended"],
        "prefix": line["prefix_len"],
        # "" for an end of sequence, and for all but a character's last token.
        "t": [line["text"][start:end] for start, end in zip([0, *ends], ends)],
        "s": line["sources"],
        "l": [None if x is None else round(x, 3) for x in line["policy_logprobs"]],
        "a": [line["step"] - step for step in line["origin_steps"]],
        "parts": _parts(line),
    }


def _parts(line: Response) -> list[tuple[int, str, float | None]]:
    """Return the parts of an episode, in order; [] for a single response.

    A part is (its first token, who speaks, the turn's reward): the policy as "assistant", the
    environment in its role and without a reward.
    """
    parts = []
    begin = 0
    for turn in line["turns"]:
        parts.append((begin, "assistant", turn["reward"]))
        if turn["role"]:
            parts.append((turn["end"], turn["role"], None))
        rest = line["sources"][turn["end"] :]
        begin = len(line["sources"]) - len(rest.lstrip("e"))  # environment tokens
    return parts


def _advantages(
    kind: str, column: Sequence[Response], config: dict[str, Any]
) -> list[float | None]:
    """Return advantages by `group_relative`; None if the run computed others, or has none."""
    rewards = [line["reward"] for line in column]
    size = config.get("rollout.group_size")
    by_group = config.get("algorithm.advantage") in ("auto", "group")
    others = has_critic(config.get("critic.kind", "none")) or config.get("reward.overlong_tokens")
    if kind != "step" or not by_group or others or len(column) != size or None in rewards:
        return [None] * len(column)
    normalize_std = bool(config.get("algorithm.normalize_std"))
    leave_one_out = bool(config.get("algorithm.leave_one_out"))
    settings = AdvantageConfig(size, normalize_std, leave_one_out, gamma=1.0, gae_lambda=1.0)
    return group_relative(np.array(rewards, float), settings).round(3).tolist()


def _change(before: Sequence[Response], now: Sequence[Response]) -> float:
    """Return the mean 1 − ROUGE-1 F1 of responses with the same number; 0 if there are none."""
    old = {line["sample"]: line["token_ids"] for line in before}
    overlaps = [rouge1(r["token_ids"], old[r["sample"]]) for r in now if r["sample"] in old]
    return 1 - statistics.fmean(overlaps) if overlaps else 0.0
