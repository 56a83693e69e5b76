"""Scene `lengths`: long-tailed responses, decoded naively, on the ladder, and with drafts.

Lengths are lognormal, the longest eight times the median, and forced: a response ends exactly
there, so that every case decodes the same. Drafts are the plain rollout's own tokens under the same
keys; a share of them is replaced by other tokens at random. A previous response is one such copy of
the row's own; the tree reads G copies of each prompt's responses, made apart.

Among the cases with drafts of each rate the ladder runs twice: they are held against the geometric
mean of the two, and how far these are apart says what noise alone makes of a ratio of two runs.

Until sure, a case leaves when it is told from the goal, so that passes go to those that are close
to it: 99.9 % sure, as this is asked after every pass.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specrl_jax.benchmarks import timing as benchmark
from specrl_jax.benchmarks.policies import GROUP, Size, policy
from specrl_jax.benchmarks.timing import Case, Goal, Inputs, Run
from specrl_jax.models.transformer import param_count
from specrl_jax.rollout.adaptive import measure_steps as timing
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.adaptive.step_costs import StepCosts
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

LONGEST = 8  # times the median
TREE = SuffixDraftConfig(depth=16, factor=8.0, offset=0.0, min_prob=0.1)  # as configs/grpo.py
VERIFY_CHUNK = 128
LENGTHS_SEED, CORRUPTION_SEED = 1, 2
LEAST_RATIO = 0.98  # of the ladder's seconds over those with drafts: the goal
TOLD = 0.999  # sure
FEWEST = math.ceil(math.log2(2 / (1 - TOLD)))  # passes: all on one side


def long_tailed(rows: int, longest: int, median: float, seed: int = LENGTHS_SEED) -> np.ndarray:
    """int32 [rows] response lengths: quantiles of a lognormal law, in random order.

    Row i has the quantile (i + 1/2) / rows, and the law's spread is such that the last is
    `longest`: four rows of median 4 and longest 32 have the lengths 1, 2, 7, 32.
    """
    normal = statistics.NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / rows) for i in range(rows)])
    spread = np.log(longest / median) / scores[-1]
    lens = np.maximum(np.round(median * np.exp(spread * scores)), 1).astype(np.int32)
    return np.random.default_rng(seed).permutation(lens)


def corrupt(
    tokens: np.ndarray, rate: float, vocab: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens with each replaced by another one with probability `rate`, bool: which were)."""
    replaced = rng.random(tokens.shape) < rate
    others = (tokens + rng.integers(1, vocab, tokens.shape)) % vocab
    return np.where(replaced, others, tokens).astype(np.int32), replaced


def make_plan(model, size: Size, *, accept: str = "match", tree: bool = False) -> RolloutSpec:
    """All rows in flight; the end-of-sequence lies outside the vocabulary."""
    setup = ProgramSpec(
        model=model,
        sampling=SamplingConfig(),
        accept=accept,
        eos_ids=(model.vocab_size,),
        pad_id=0,
        response_slots=size.response_len,
        logits_chunk=size.logits_chunk,
        tree=TREE if tree else None,
    )
    return RolloutSpec(
        setup,
        size.prompt_len,
        GROUP,
        size.row_rungs,
        size.windows,
        max_width=size.max_width if tree else 1,
        verify_width=VERIFY_CHUNK,
    )


def check_until_sure(size: Size) -> None:
    """Raises ValueError in one line."""
    if size.repeats < FEWEST:
        rule = f"--until-sure needs --repeats >= {FEWEST}: fewer passes tell nothing"
        raise ValueError(f"{rule}; got {size.repeats}")


def measure(
    name: str,
    size: Size,
    *,
    tables: Path,
    log: Callable[[str], None],
    profile: str = "",
    until_sure: bool = False,
) -> dict[str, Any]:
    """The scene's record. tables: folder of measured step costs. profile: folder for a trace."""
    kind, model, weights, prompts = policy(name, size)
    caps = long_tailed(size.rows, size.response_len, size.response_len / LONGEST)
    inputs = Inputs(weights, prompts, jax.random.key(0), 1, caps)
    plans = {
        "match": make_plan(model, size),
        "ratio": make_plan(model, size, accept="ratio"),
        "tree": make_plan(model, size, tree=True),
    }
    costs = {}
    for plan_name, plan in plans.items():
        start = time.perf_counter()
        costs[plan_name] = timing.cost_table(
            plan, weights, size.rows, sources=GROUP, directory=tables
        )
        known = f"cost of {len(costs[plan_name].to_json())} programs of {plan_name} known"
        log(f"{known} in {time.perf_counter() - start:.0f} s")
    blocks = _blocks(inputs, size, plans, costs)
    # The ideal of the ladder is one of the moment, as the machine is not always equally fast.
    steps = timing.PlainSteps(plans["match"], weights, size.rows)
    every = [block for _, block in blocks]
    leave = functools.partial(_told, blocks) if until_sure else lambda block, runs: ()
    times = benchmark.time_blocks(inputs, every, size.repeats, log, steps.time, leave)
    if profile:
        with jax.profiler.trace(profile):
            benchmark.run_case(inputs, blocks[1][1][-1])
    by_rate = [_Timed.of(*block, runs) for block, runs in zip(blocks[1:], times[1:])]
    cells = _cells(blocks[0][1][0], times[0][0], by_rate, size.rows, steps.table())
    setting = {
        "weights": kind,
        "policy": f"{param_count(model) / 1e6:.2f}M parameters, {model.dtype}",
        "shape": dataclasses.asdict(model),
        "rollout": {
            f.name: getattr(size, f.name) for f in dataclasses.fields(size) if f.name != "model"
        },
        "lens": {
            "mean": float(caps.mean()),
            "median": float(np.median(caps)),
            "max": int(caps.max()),
        },
        "group": GROUP,
        "until_sure": until_sure,
    }
    return {
        "setting": setting,
        "cells": cells,
        "as_ladder": _as_ladder(cells[2:], by_rate),
        "over_itself": [benchmark.ratios(*timed.ladder) for timed in by_rate],
    }


def _blocks(
    inputs: Inputs, size: Size, plans: dict[str, RolloutSpec], costs: dict[str, StepCosts]
) -> list[tuple[float | None, list[Case]]]:
    """The naive loop alone, then for every rate the ladder and all kinds of drafts."""
    alone = dataclasses.replace(plans["match"], row_rungs=1, windows=1)
    naive = Case("naive", alone, costs["match"])
    ladder = Case("ladder", plans["match"], costs["match"])
    plain = benchmark.run_case(inputs, ladder)
    if not np.array_equal(plain.lens, inputs.caps):
        raise RuntimeError("responses did not end at the forced lengths")
    rng = np.random.default_rng(CORRUPTION_SEED)
    blocks: list[tuple[float | None, list[Case]]] = [(None, [naive])]
    for rate in size.rates:
        drafts, stored = make_drafts(plain, rate, plans["match"], rng)

        def case(label: str, plan: str, **drafted) -> Case:
            return Case(label, plans[plan], costs[plan], cost=Speculation(costs[plan]), **drafted)

        block = [
            ladder,
            case("previous, match", "match", drafts=drafts),
            case("previous, ratio", "ratio", drafts=drafts),
            ladder,
            case("tree", "tree", stored=stored),
            case("previous+tree", "tree", drafts=drafts, stored=stored),
        ]
        blocks.append((rate, block))
    return blocks


def make_drafts(
    plain: Run, rate: float, plan: RolloutSpec, rng: np.random.Generator
) -> tuple[Drafts, tuple[jax.Array, jax.Array]]:
    """A corrupted copy of every response as its draft, and others for the tree to read.

    A replaced token says that its law was certain of it (log-prob 0), so that the ratio rule keeps
    it with the chance that the policy gives it, one in thousands.
    """
    vocab, group = plan.program.model.vocab_size, plan.group_size
    tokens, replaced = corrupt(plain.tokens, rate, vocab, rng)
    logprobs = np.where(replaced, 0.0, plain.sampling_logprobs).astype(np.float32)
    flat = ("batch", None)
    drafts = Drafts(
        tokens=put(tokens, *flat),
        lens=put(plain.lens, "batch"),
        sampling_logprobs=put(logprobs, *flat),
        origin_logprobs=put(logprobs, *flat),
        origin_steps=put(np.zeros_like(tokens), *flat),
    )
    copies, _ = corrupt(plain.tokens, rate, vocab, rng)
    shape = (len(copies) // group, group)
    stored = put(copies.reshape(*shape, -1), None, None, None)
    return drafts, (stored, put(plain.lens.reshape(shape), None, None))


# Figures -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Timed:
    """The runs of one rate, pass by pass: the ladder's two, and those of every case with drafts."""

    lost: float
    case: Case
    ladder: list[list[Run]]
    drafted: list[tuple[Case, list[Run]]]

    @classmethod
    def of(cls, lost: float, block: list[Case], runs: list[list[Run]]) -> "_Timed":
        both = list(zip(block, runs))
        plain = [of_case for case, of_case in both if case is block[0]]
        return cls(lost, block[0], plain, [pair for pair in both if pair[0] is not block[0]])

    @property
    def ladder_seconds(self) -> np.ndarray:
        """float [passes], the geometric mean of its two runs: of equals, none is faster."""
        return np.sqrt(np.prod([benchmark.total_seconds(runs) for runs in self.ladder], axis=0))

    def over(self, runs: list[Run]) -> list[float]:
        """The ladder's seconds over those of `runs`, pass by pass, as far as these go."""
        return (self.ladder_seconds[: len(runs)] / benchmark.total_seconds(runs)).tolist()


def _told(
    blocks: list[tuple[float | None, list[Case]]], number: int, runs: list[list[Run]]
) -> list[int]:
    """The cases of a block that are told from the goal by these runs; the ladder when all with
    drafts are; the naive loop, which has no goal of this kind, as soon as any could be."""
    lost, block = blocks[number]
    if min(map(len, runs)) < FEWEST:
        return []
    if lost is None:
        return list(range(len(block)))
    timed, plain, told = _Timed.of(lost, block, runs), [], []
    for i, case in enumerate(block):
        low, high = benchmark.median_interval(timed.over(runs[i]), TOLD)
        if case is block[0]:
            plain.append(i)
        elif not low <= LEAST_RATIO <= high:
            told.append(i)
    return told + plain if len(told) + len(plain) == len(block) else told


def _cells(
    naive: Case, naive_runs: list[Run], by_rate: list[_Timed], rows: int, steps: StepCosts
) -> list[dict[str, Any]]:
    """A record of every case; the ladder's figures come from all rates together, held against
    `steps`, seconds of plain steps. as_ladder: whether a case with drafts took the ladder's own
    steps and no other pass."""
    ladder = [runs for timed in by_rate for runs in timed.ladder]
    plain = dataclasses.replace(by_rate[0].case, table=steps)
    every = [run for runs in ladder for run in runs]
    cells = [
        benchmark.describe(naive, naive_runs, naive.plan.buckets(rows)) | {"lost": None},
        benchmark.describe(plain, every, plain.plan.buckets(rows)) | {"lost": None},
    ]
    first = len(naive_runs)  # other cases may have gone on
    per_pass = np.median([benchmark.total_seconds(runs[:first]) for runs in ladder], axis=0)
    over = benchmark.total_seconds(naive_runs) / per_pass
    cells[1]["over_naive"] = benchmark.bounded(over.tolist())
    for timed in by_rate:
        for case, runs in timed.drafted:
            cell = benchmark.describe(case, runs, case.plan.buckets(rows))
            cell["lost"] = timed.lost
            cell["over_naive"] = benchmark.ratios(naive_runs, runs[:first])
            cell["over_ladder"] = benchmark.bounded(timed.over(runs))
            kinds = ("steps_by_width", "steps_by_rows", "verified_tokens")
            cell["as_ladder"] = all(cell[kind] == cells[1][kind] for kind in kinds)
            cells.append(cell)
    return cells


def _as_ladder(cells: list[dict], by_rate: list[_Timed]) -> dict[str, Any] | None:
    """Total seconds of the ladder over those of all cells that took its steps, together: they are
    one case but for the host's work and the drafts, and each alone is lost in the noise of passes.

    cells: those with drafts, in order. A pass over a rate's cases counts once, with the mean of its
    cells that ran in it. None where there are no such cells.
    """
    same, found = iter([cell["as_ladder"] for cell in cells]), []
    for timed in by_rate:
        alike = [benchmark.total_seconds(runs) for _, runs in timed.drafted if next(same)]
        if alike:
            for number, plain in zip(range(max(map(len, alike))), timed.ladder_seconds):
                ran = [seconds[number] for seconds in alike if number < len(seconds)]
                found.append(plain / statistics.mean(ran))
    count = sum(cell["as_ladder"] for cell in cells)
    return {"cells": count, "over_ladder": benchmark.bounded(found)} if found else None


def goals(name: str, record: dict[str, Any], backend: str) -> list[Goal]:
    """What the scene's figures are held against."""
    ladder = record["cells"][1]
    found = [Goal("ladder, share of its ideal", ladder["ideal_share"], 0.8)]
    rows = record["setting"]["rollout"]["rows"]
    if (name, rows, backend) == ("27m", 32, "cpu"):
        found.append(Goal("ladder over naive", ladder["over_naive"]["median"], 2.2))
    drafted = [cell for cell in record["cells"] if cell["lost"] is not None]
    runs = min(cell["runs"] for cell in drafted)  # an interrupt leaves fewer than were asked for

    def speculation(which: str, ratio: dict[str, float], *notes: str) -> Goal:
        sure = f"{'95 % sure of' if runs > 5 else 'of'} {_sure(ratio)}"
        note = "; ".join([f"{notes[0]}, {sure}", *notes[1:]])
        return Goal(f"speculation over ladder, {which}", ratio["median"], LEAST_RATIO, note=note)

    worst = min(drafted, key=lambda cell: cell["over_ladder"]["median"])
    below = sum(cell["over_ladder"]["median"] < LEAST_RATIO for cell in drafted)
    itself = [ratio["median"] for ratio in record["over_itself"]]
    notes = (
        f"{worst['name']}, {worst['lost']:.0%} lost",
        f"{below} of {len(drafted)} below",
        f"the ladder over itself {min(itself):.3f} to {max(itself):.3f}",
    )
    found.append(speculation("worst", worst["over_ladder"], *notes))
    if same := record["as_ladder"]:  # beside it: what those that differ by noise alone say together
        note = f"{same['cells']} of {len(drafted)}"
        found.append(speculation("cells of its steps together", same["over_ladder"], note))
    if backend != "cpu":
        trees = [cell for cell in drafted if cell["name"] == "tree"]
        best = min(trees, key=lambda cell: cell["lost"])
        note = f"{best['lost']:.0%} lost"
        found.append(Goal("tree over ladder", best["over_ladder"]["median"], 2.5, note=note))
    return found


# Text ----------------------------------------------------------------------------------------

_COLUMNS = (
    ("", 16, lambda c: c["name"]),
    ("lost", 6, lambda c: f"{c['lost']:.0%}"),
    ("runs", 6, lambda c: f"{c['runs']}"),
    ("seconds", 9, lambda c: f"{c['seconds']['total']['median']:.3f}"),
    ("tokens/s", 10, lambda c: f"{c['tokens_per_second']:.0f}"),
    ("naive", 7, lambda c: f"{c['over_naive']['median']:.2f}x"),
    ("ladder", 8, lambda c: f"{c['over_ladder']['median']:.2f}x"),
    ("95 % sure", 11, lambda c: _sure(c["over_ladder"])),
    ("tok/rs", 8, lambda c: f"{c['tokens_per_row_step']:.2f}"),
    ("prefill", 9, lambda c: f"{c['seconds']['prefill']['median']:.3f}"),
    ("verify", 8, lambda c: f"{c['seconds']['verify']['median']:.3f}"),
    ("decode", 8, lambda c: f"{c['seconds']['decode']['median']:.3f}"),
    ("predicted", 11, lambda c: f"{c['predicted_over_actual']:.2f}"),
    ("ideal", 7, lambda c: f"{c['ideal_share']:.2f}"),
    ("verified", 10, lambda c: f"{c['verified_tokens']}"),
    ("  steps by width", 0, lambda c: "  " + _sizes(c["steps_by_width"])),
)


def _sure(ratio: dict[str, float]) -> str:
    return "{low:.2f}-{high:.2f}".format(**ratio)


def _sizes(steps: dict[str, int]) -> str:
    return " ".join(f"{size}:{count}" for size, count in steps.items()) or "none"


def table(record: dict[str, Any]) -> str:
    """The scene as text, a line a case."""
    setting, lens = record["setting"], record["setting"]["lens"]
    rollout = setting["rollout"]
    lines = [
        f"lengths: {setting['policy']}, {setting['weights']} weights; {rollout['rows']} rows, "
        f"lengths {lens['median']:.0f} in the median, {lens['mean']:.0f} in the mean, "
        f"{lens['max']} at most; medians of the runs",
        "naive, ladder: median speed-up over them; 95 % sure: bounds of the latter's median (of",
        "fewer than 6 passes: least and most); tok/rs: decoded tokens per row step computed;",
        "predicted, ideal: by measured step costs (of the ladder's, measured in every pass), over",
        "actual decode seconds",
        "",
        _line(lambda heading, _: heading),
    ]
    rows = [_line(lambda _, text, c=c: _cell(text, c)) for c in record["cells"]]
    return "\n".join([*lines, *rows])


def _line(cell: Callable) -> str:
    texts = (f"{cell(h, t):<{n}}" if not i else f"{cell(h, t):>{n}}"
             for i, (h, n, t) in enumerate(_COLUMNS))  # fmt: skip
    return "".join(texts).rstrip()


def _cell(text: Callable, case: dict[str, Any]) -> str:
    try:
        return text(case)
    except (KeyError, TypeError):  # a figure that this case does not have
        return "-"
