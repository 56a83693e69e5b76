"""Plain against speculative rollouts in one process: what reuse saves, and what it could save.

The same weights roll out the same prompts under the same keys, once without drafts and once with
the responses of an older policy as drafts, at several leniences. Cases are interleaved and
repeated after a pass that compiles; every figure is a median, every ratio is taken in one run.

The *ideal* of a case is what its reuse would cost if each generated token cost what a token of
the plain rollout costs: prefill + verify + generated x (plain decode seconds / plain tokens).
What a case takes beyond that is accounted for, second by second, in its `gap`.
"""

import dataclasses
import functools
import math
import os
import platform
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import train
from specrl_jax.data import PromptStream
from specrl_jax.measure import rollout_metrics
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Params, param_count, rollout_weights
from specrl_jax.rollout import decode
from specrl_jax.rollout.generate import Plan, Stats, generate
from specrl_jax.run import Run, begin, build
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Prompts, Rollout

_LONGEST_DRIFT = 16  # steps; the default is an epoch, as in training, where that is shorter
_TIMED_STEPS = 64  # decode steps at most in one measurement of a rung
_PHASES = ("total", "prefill", "verify", "decode")

Rung = tuple[int, int]  # rows, slots


@dataclasses.dataclass(frozen=True)
class Case:
    """A rollout to time; without drafts where `lenience` is None."""

    name: str
    lenience: float | None


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all cases share: the newer policy's weights, prompts, the older policy's responses."""

    plan: Plan
    weights: Params
    prompts: Prompts
    drafts: Drafts
    key: jax.Array
    step: int


@dataclasses.dataclass
class Timed:
    """One case's repeats: seconds by phase, and what was the same in all of them."""

    rollout: Rollout
    stats: Stats
    seconds: dict[str, list[float]]

    def median(self, phase: str) -> float:
        return float(np.median(self.seconds[phase]))


def benchmark(
    config, *, repeats: int = 5, lenience: float | None = None, drift: int | None = None
) -> dict[str, Any]:
    """Measure the rollout of `config` on the mesh in use; a JSON-able record.

    lenience: instead of the config's, beside 1 and inf. drift: GRPO steps between the policy that
    wrote the drafts and the one that is timed. Raises ValueError in one line.
    """
    load = os.getloadavg()[0]
    run, params = build(config)
    if drift is None:
        epoch = len(run.prompts.lens) // config.rollout.prompts_per_step
        drift = min(epoch, _LONGEST_DRIFT)
    scene, setting = _scene(run, params, drift)
    wanted = config.rollout.lenience if lenience is None else lenience
    cases = [Case("plain", None)] + [Case(f"ℓ={x:.4g}", x) for x in sorted({1.0, wanted, math.inf})]
    timed, costs = _time_all(scene, cases, repeats)
    plain = timed[0]
    return {
        "benchmark": "rollout",
        "machine": _machine() | {"load_before": load, "load_after": os.getloadavg()[0]},
        "config": jax.tree.map(_jsonable, config.to_dict()),
        "setting": setting | {"repeats": repeats},
        "decoded_token_seconds": plain.median("decode") / _tokens(plain.rollout),
        "rungs": [{"rows": r, "slots": s} | cost for (r, s), cost in costs.items()],
        "cases": [_record(scene, *both, plain, costs) for both in zip(cases, timed)],
    }


def _scene(run: Run, params: Params, drift: int) -> tuple[Scene, dict[str, Any]]:
    """Warm the policy up, write drafts with it, train it for `drift` steps more."""
    settings = run.config.rollout
    convert = functools.partial(jax.jit(rollout_weights, static_argnums=0), run.model)
    start = time.perf_counter()
    state = begin(run, params)
    jax.block_until_ready(state.train)
    warmed_up = time.perf_counter()
    older = convert(state.train.params)
    with run.pool:
        for _ in range(drift):
            train.step(run, state)
    weights = jax.block_until_ready(convert(state.train.params))
    drifted = time.perf_counter()
    prompts = PromptStream(run.prompts, settings.prompts_per_step, run.config.seed).next()
    written, _ = generate(run.plan, older, prompts, key=run.key, step=1)
    drafts = Drafts(
        written.tokens,
        written.lens,
        written.sampling_logprobs,
        written.origin_logprobs,
        written.origin_steps,
    )
    setting = {
        "policy": f"{param_count(run.model) / 1e6:.2f}M parameters, {run.model.dtype}",
        "rows": len(written.lens),
        "warmup_steps": run.config.warmup.steps,
        "warmup_seconds": warmed_up - start,
        "drift_steps": drift,
        "drift_seconds": drifted - warmed_up,
        "draft_len_mean": float(np.mean(jax.device_get(written.lens))),
    }
    return Scene(run.plan, weights, prompts, drafts, run.key, drift + 2), setting


def _time_all(
    scene: Scene, cases: Sequence[Case], repeats: int
) -> tuple[list[Timed], dict[Rung, dict[str, float]]]:
    """Cases and the rungs that they visit: once to compile, then in turn, `repeats` times.

    In turn, so that other work on the machine falls on all of them alike.
    """
    timed = [Timed(*_generate(scene, case)[:2], {p: [] for p in _PHASES}) for case in cases]
    visited = {rung[:2] for case in timed for rung in case.stats.rungs}
    rungs: dict[Rung, list] = {rung: [] for rung in sorted(visited, reverse=True)}
    for rung in rungs:
        _time_rung(scene, *rung)
    for _ in range(repeats):
        for case, record in zip(cases, timed):
            _, stats, total = _generate(scene, case)
            for phase in _PHASES:
                seconds = total if phase == "total" else getattr(stats, f"{phase}_seconds")
                record.seconds[phase].append(seconds)
        for rung, calls in rungs.items():
            calls.append(_time_rung(scene, *rung))
    return timed, {rung: rung_cost(rung[0], calls) for rung, calls in rungs.items()}


def _generate(scene: Scene, case: Case) -> tuple[Rollout, Stats, float]:
    """A rollout and its wall-clock seconds, from the host's prompts to finished responses."""
    speculative = {}
    if case.lenience is not None:
        log_lenience = math.log(case.lenience) if case.lenience else -math.inf
        speculative = {"drafts": scene.drafts, "log_lenience": log_lenience}
    inputs = (scene.plan, scene.weights, scene.prompts)
    start = time.perf_counter()
    rollout, stats = generate(*inputs, key=scene.key, step=scene.step, **speculative)
    jax.block_until_ready(rollout)
    return rollout, stats, time.perf_counter() - start


def rung_cost(rows: int, calls: Sequence) -> dict[str, float]:
    """Seconds of one decode step of `rows` rows, and of calling the loop.

    calls: [repeats, 2, 2]: seconds and steps of a call for one step and of a call for many; the
    difference is the steps' own cost.
    """
    one, many = np.median(np.asarray(calls), axis=0)
    step = (many[0] - one[0]) / (many[1] - one[1]) if many[1] > one[1] else one[0]
    return {
        "step_seconds": float(step),
        "row_step_seconds": float(step) / rows,
        "call_seconds": float(one[0] - step),
    }


def _time_rung(scene: Scene, rows: int, slots: int) -> list[tuple[float, int]]:
    """A call for one step and a call for many."""
    longest = min(slots - scene.plan.prompt_slots, _TIMED_STEPS)
    return [_time_steps(scene, rows, slots, length) for length in (1, longest)]


def _time_steps(scene: Scene, rows: int, slots: int, length: int) -> tuple[float, int]:
    """Seconds and steps of a decode loop that ends at `length` tokens (or once all rows end)."""
    setup, prompts = scene.plan.setup, scene.prompts
    picked = np.resize(np.arange(len(prompts.lens)), rows)
    lens = prompts.lens[picked].astype(np.int32)
    last = prompts.tokens[picked, lens - 1]
    seeds = np.random.default_rng(rows).integers(0, 2**32, (rows, 2), np.uint32)
    start = decode.start_rows(
        setup, put(seeds, "batch", None), put(lens, "batch"), put(last, "batch")
    )
    cache = init_cache(setup.model, rows, slots)
    stop = (jnp.int32(0), jnp.int32(length))
    jax.block_until_ready((cache, start, stop))
    began = time.perf_counter()
    *_, steps = jax.device_get(decode.decode(setup, scene.weights, cache, start, *stop)[2:])
    return time.perf_counter() - began, int(steps)


def _record(
    scene: Scene, case: Case, timed: Timed, plain: Timed, costs: dict[Rung, dict]
) -> dict[str, Any]:
    """All figures of a case."""
    rollout, stats = jax.device_get(timed.rollout), timed.stats
    written = jax.device_get(scene.drafts)
    tokens, total = _tokens(rollout), timed.median("total")
    reused = int(np.sum(rollout.prefix_lens))
    values = rollout_metrics(
        rollout.tokens,
        rollout.lens,
        rollout.prefix_lens,
        scene.plan.setup.eos_ids,
        offered=None if case.lenience is None else written.lens,
        previous=(written.tokens, written.lens),
    )
    pairs = np.divide(plain.seconds["total"], timed.seconds["total"])
    verify = timed.median("verify") / stats.verified_tokens if stats.verified_tokens else None
    decoded = plain.median("decode") / _tokens(plain.rollout)
    ideal = timed.median("prefill") + timed.median("verify") + (tokens - reused) * decoded
    visits = [
        {"rows": rows, "slots": slots, "steps": steps, "tokens": emitted}
        for (rows, slots, steps), emitted in zip(stats.rungs, rung_tokens(rollout, stats))
    ]
    return {
        "name": case.name,
        "lenience": _jsonable(case.lenience),
        "seconds": {phase: _spread(timed.seconds[phase]) for phase in _PHASES},
        "tokens": {"response": tokens, "reused": reused, "generated": tokens - reused},
        "tokens_per_second": tokens / total,
        "row_steps": stats.row_steps,
        "decode_steps": stats.decode_steps,
        "verified_tokens": stats.verified_tokens,
        "verified_token_seconds": verify,
        "verified_over_decoded": verify and verify / decoded,
        "metrics": {name: float(value) for name, value in values.items()},
        "speedup": plain.median("total") / total,
        "speedup_min": float(np.min(pairs)),
        "speedup_max": float(np.max(pairs)),
        "ideal_seconds": ideal,
        "ideal_speedup": plain.median("total") / ideal,
        "share_of_ideal": ideal / total,
        "visits": visits,
        "gap": gap(timed, visits, costs, decoded),
    }


def gap(
    timed: Timed, visits: list[dict], costs: dict[Rung, dict], decoded: float
) -> dict[str, float]:
    """Seconds beyond the ideal, by cause; they sum to `total`.

    idle_rows: decode steps of rows that had finished. rung_price: what the useful row steps cost,
    each at its rung's price, beyond `decoded` seconds a token; below 0 where rungs are cheaper
    than the plain rollout was with its own idle rows. between_rungs: decoding that is no decode
    step (moving rows, calling programs, waiting). outside: the rollout's start and end.
    """
    price = [costs[v["rows"], v["slots"]]["row_step_seconds"] for v in visits]
    useful = sum(p * v["tokens"] for p, v in zip(price, visits))
    idle = sum(p * (v["rows"] * v["steps"] - v["tokens"]) for p, v in zip(price, visits))
    causes = {
        "idle_rows": idle,
        "rung_price": useful - decoded * sum(v["tokens"] for v in visits),
        "between_rungs": timed.median("decode") - useful - idle,
        "outside": timed.median("total") - sum(timed.median(p) for p in _PHASES[1:]),
    }
    return causes | {"total": sum(causes.values())}


def rung_tokens(rollout: Rollout, stats: Stats) -> list[int]:
    """Tokens that each visit of a rung emitted; `rollout` on the host.

    A row emits one token a step until it is done, so its length past the prefix tells when.
    """
    emitted, visits = [], iter(stats.rungs)
    for wanted in np.split(rollout.lens - rollout.prefix_lens, max(stats.parts, 1)):
        done = 0
        while done < np.max(wanted):
            steps = next(visits)[2]
            emitted.append(int(np.sum(np.clip(wanted - done, 0, steps))))
            done += steps
    return emitted


def _tokens(rollout: Rollout) -> int:
    return int(np.sum(jax.device_get(rollout.lens)))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
    }


def _machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "mesh": dict(jax.sharding.get_mesh().shape),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def _jsonable(value: Any) -> Any:
    """JSON has no inf and no nan."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# The table -----------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """The record as text: a column a case, then what the rungs cost."""
    machine, setting, cases = record["machine"], record["setting"], record["cases"]
    lines = [
        f"{machine['device']} x {machine['devices']}, {machine['cores']} cores, load "
        f"{machine['load_before']:.1f} before and {machine['load_after']:.1f} after; "
        f"jax {machine['jax']}",
        f"{setting['policy']}, {setting['rows']} rows; warm-up {setting['warmup_seconds']:.0f} s; "
        f"drafts from {setting['drift_steps']} GRPO steps ago; median of {setting['repeats']}",
        "",
        f"{'':36}" + "".join(f"{case['name']:>12}" for case in cases),
    ]
    lines += [
        f"{heading:36}" + "".join(f"{_cell(text, case):>12}" for case in cases)
        for heading, text in _ROWS
    ]
    return "\n".join([*lines, "", *_rung_lines(record)])


def _cell(text, case: dict[str, Any]) -> str:
    try:
        return text(case)
    except (KeyError, TypeError):  # a figure that this case does not have
        return "-"


_ROWS = (
    ("rollout, ms", lambda c: f"{1e3 * c['seconds']['total']['median']:.1f}"),
    ("  shortest", lambda c: f"{1e3 * c['seconds']['total']['min']:.1f}"),
    ("  longest", lambda c: f"{1e3 * c['seconds']['total']['max']:.1f}"),
    ("response tokens a second", lambda c: f"{c['tokens_per_second']:.0f}"),
    ("speed-up, verification included", lambda c: f"{c['speedup']:.2f}x"),
    ("  of single repeats", lambda c: f"{c['speedup_min']:.2f}-{c['speedup_max']:.2f}"),
    ("  ideal for this reuse", lambda c: f"{c['ideal_speedup']:.2f}x"),
    ("  share of the ideal", lambda c: f"{c['share_of_ideal']:.2f}"),
    ("reused of all tokens", lambda c: f"{c['metrics']['rollout/reuse_fraction']:.1%}"),
    ("accepted of draft tokens", lambda c: f"{c['metrics']['rollout/draft_accept_rate']:.1%}"),
    ("kept prefix, tokens", lambda c: f"{c['metrics']['rollout/prefix_len_mean']:.1f}"),
    ("responses reused whole", lambda c: f"{c['metrics']['rollout/full_reuse_ratio']:.1%}"),
    ("tokens generated", lambda c: f"{c['tokens']['generated']}"),
    ("row steps computed", lambda c: f"{c['row_steps']}"),
    ("verified / decoded token, cost", lambda c: f"{c['verified_over_decoded']:.3f}"),
    ("prefill, ms", lambda c: f"{1e3 * c['seconds']['prefill']['median']:.1f}"),
    ("verify, ms", lambda c: f"{1e3 * c['seconds']['verify']['median']:.1f}"),
    ("decode, ms", lambda c: f"{1e3 * c['seconds']['decode']['median']:.1f}"),
    ("beyond the ideal, ms", lambda c: f"{1e3 * c['gap']['total']:+.1f}"),
    ("  steps of finished rows", lambda c: f"{1e3 * c['gap']['idle_rows']:+.1f}"),
    ("  price of the other row steps", lambda c: f"{1e3 * c['gap']['rung_price']:+.1f}"),
    ("  between rungs", lambda c: f"{1e3 * c['gap']['between_rungs']:+.1f}"),
    ("  before and after", lambda c: f"{1e3 * c['gap']['outside']:+.1f}"),
)


def _rung_lines(record: dict[str, Any]) -> list[str]:
    cases = record["cases"]
    heading = f"{'rows':>6}{'slots':>7}{'step, ms':>10}{'us a row':>10}{'call, ms':>10}"
    lines = [heading + "".join(f"{case['name']:>16}" for case in cases) + "   (steps, rows in use)"]
    for rung in record["rungs"]:
        line = f"{rung['rows']:6}{rung['slots']:7}{1e3 * rung['step_seconds']:10.3f}"
        line += f"{1e6 * rung['row_step_seconds']:10.2f}{1e3 * rung['call_seconds']:10.3f}"
        for case in cases:
            visits = [v for v in case["visits"] if all(v[k] == rung[k] for k in ("rows", "slots"))]
            steps, tokens = (sum(v[k] for v in visits) for k in ("steps", "tokens"))
            used = f"{steps} ({tokens / steps / rung['rows']:.0%})" if steps else "-"
            line += f"{used:>16}"
        lines.append(line)
    return lines
