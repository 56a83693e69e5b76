"""Scenes of single programs, `floor` and `verify`.

floor: a decode step of the engine against `benchmark_floor`, on the same rows, slots and weights.
verify: a wide pass, per verified token, against a decode step, per decoded token.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.benchmarks import handwritten_loop as benchmark_floor
from specrl_jax.benchmarks.lengths import make_plan
from specrl_jax.benchmarks.policies import GROUP, Size, policy
from specrl_jax.benchmarks.timing import Goal, spread
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Params, param_shapes
from specrl_jax.rollout.engine import decode
from specrl_jax.rollout.engine import decode_state as rows
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

STEPS = 32  # of a timed decode call
WIDTH = 128  # tokens a row of a timed verification


@dataclasses.dataclass
class DecodeBatch:
    """Rows of a setup that have just been prefilled; `seconds` times one call of the engine."""

    setup: ProgramSpec
    weights: Params
    rows: int
    prompt_slots: int

    def __post_init__(self):
        slots = self.prompt_slots + self.setup.response_slots
        self.cache = init_cache(self.setup.model, self.rows, slots)
        self.seeds = np.random.default_rng(self.rows).integers(0, 2**32, (self.rows, 2), np.uint32)

    def seconds(self, steps: int, *, width: int = 1, drafts: Drafts | None = None) -> float:
        """Wall-clock seconds of a visit of so many steps, host and device."""
        seeds = put(self.seeds, "batch", None)
        caps, prompt_lens, last = (
            put(np.full(self.rows, n, np.int32), "batch")
            for n in (self.setup.response_slots, self.prompt_slots, 1)
        )
        board = rows.start_rows(
            seeds, seeds, prompt_lens, caps, last,
            columns=self.setup.columns, pad_id=self.setup.pad_id,
        )  # fmt: skip
        if drafts is not None:
            board = rows.with_drafts(board, drafts, self.setup.accept)
        limits = (0, self.setup.response_slots, steps, self.rows)
        limits = StopCondition(*(np.int32(x) for x in limits))
        jax.block_until_ready((board, limits, self.cache))
        start = time.perf_counter()
        self.cache, *rest = decode.decode_steps(
            self.setup, self.weights, self.cache, board, None, limits,
            width=width, wide=width > 1 and self.setup.accept != "match",
        )  # fmt: skip
        jax.block_until_ready((self.cache, rest))
        return time.perf_counter() - start

    def floor(self, weights: Params, sampler: str, steps: int) -> float:
        """The same of the hand-written loop; weights: of `floor_weights`."""
        size, model = (self.rows, self.setup.response_slots), self.setup.model
        state = benchmark_floor.State(
            tokens=put(np.zeros(size, np.int32), "batch", None),
            logprobs=put(np.zeros(size, np.float32), "batch", None),
            lens=put(np.zeros(self.rows, np.int32), "batch"),
            last=put(np.ones(self.rows, np.int32), "batch"),
            prompt_lens=put(np.full(self.rows, self.prompt_slots, np.int32), "batch"),
            seeds=put(self.seeds, "batch", None),
        )
        count = jnp.int32(steps)
        jax.block_until_ready((state, count, self.cache))
        start = time.perf_counter()
        self.cache, state = benchmark_floor.decode(
            model, sampler, weights, self.cache, state, count
        )
        jax.block_until_ready((self.cache, state))
        return time.perf_counter() - start


def make_rung(size: Size, model: ModelConfig, weights: Params, count: int, accept: str, slots: int):
    """`count` rows of `slots` response slots under an acceptance rule, wide enough for all."""
    plan = make_plan(model, dataclasses.replace(size, response_len=slots), accept=accept)
    setup = dataclasses.replace(plan.program, margin=max(WIDTH, slots), group_size=GROUP)
    return DecodeBatch(setup, weights, count, size.prompt_len)


def in_turn(calls: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """`repeats` results of every call, in turn, after one round that compiles."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            found[name].append(call())
    return {name: values[1:] for name, values in found.items()}


def row_counts(size: Size) -> list[int]:
    """The fewest rows that a rollout begins, and all of them."""
    return sorted({GROUP, size.rows})


# Floor ---------------------------------------------------------------------------------------


def floor(name: str, size: Size, repeats: int) -> dict[str, Any]:
    """Seconds of a decode step: the engine's, and the floor's with every sampler."""
    _, model, weights, _ = policy(name, size)
    matrices = benchmark_floor.floor_weights(model, weights)
    steps = min(STEPS, size.response_len)
    found = []
    for count in row_counts(size):
        rung = make_rung(size, model, weights, count, "match", size.response_len)
        calls = {"engine": functools.partial(rung.seconds, steps)}
        for sampler in benchmark_floor.SAMPLERS:
            calls[sampler] = functools.partial(rung.floor, matrices, sampler, steps)
        seconds = {k: [s / steps for s in v] for k, v in in_turn(calls, repeats).items()}
        medians = {sampler: np.median(seconds[sampler]) for sampler in benchmark_floor.SAMPLERS}
        drawing = {sampler: t for sampler, t in medians.items() if sampler != "argmax"}
        found.append({
            "rows": count,
            "slots": size.prompt_len + size.response_len,
            "step_seconds": {k: spread(v) for k, v in seconds.items()},
            "over_floor": spread(np.divide(seconds["race"], seconds["engine"])),
            "fastest_sampler": min(drawing, key=drawing.get),
        })  # fmt: skip
    return {"steps": steps, "repeats": repeats, "rungs": found}


def floor_goals(record: dict[str, Any]) -> list[Goal]:
    """What the scene's figures are held against."""
    return [
        Goal(f"plain decode over the floor, {r['rows']} rows", r["over_floor"]["median"], 0.95)
        for r in record["rungs"]
    ]


def floor_table(record: dict[str, Any]) -> str:
    """The scene as text, a line a row count."""
    names = list(record["rungs"][0]["step_seconds"])
    lines = [
        f"floor: ms a decode step; the engine, and a hand-written loop by sampler; race is the "
        f"engine's; median of {record['repeats']} calls of {record['steps']} steps",
        f"{'rows':>6}{'slots':>7}" + "".join(f"{n:>13}" for n in names) + "   race / engine",
    ]
    for rung in record["rungs"]:
        cells = "".join(f"{1e3 * rung['step_seconds'][n]['median']:13.3f}" for n in names)
        share = "{median:.3f} ({min:.3f}-{max:.3f})".format(**rung["over_floor"])
        lines.append(f"{rung['rows']:6}{rung['slots']:7}{cells}   {share}")
    return "\n".join(lines)


# Verification --------------------------------------------------------------------------------


def verify(name: str, size: Size, repeats: int) -> dict[str, Any]:
    """Seconds of one pass of WIDTH tokens a row and of a decode step, same rows and slots; and what
    the pass's products alone would take at the rate of one of them."""
    _, model, weights, _ = policy(name, size)
    rng, found, columns = np.random.default_rng(0), [], 2 * model.mlp_dim
    matrix = rng.normal(size=(model.embed_dim, columns)).astype(model.dtype)
    matrix = put(matrix, None, None)
    for count in row_counts(size):
        rungs = {a: make_rung(size, model, weights, count, a, WIDTH) for a in ("match", "ratio")}
        drafts = made_up_drafts(count, WIDTH, model.vocab_size)
        calls = {"decode": functools.partial(rungs["match"].seconds, STEPS)}
        for accept, rung in rungs.items():
            calls[accept] = functools.partial(rung.seconds, 1, width=WIDTH, drafts=drafts)
        tokens = count * WIDTH
        states = put(rng.normal(size=(tokens, model.embed_dim)).astype(model.dtype), "batch", None)
        calls["product"] = functools.partial(product_seconds, states, matrix)
        seconds = in_turn(calls, repeats)
        seconds["decode"] = [s / STEPS for s in seconds["decode"]]
        found.append({
            "rows": count,
            "slots": size.prompt_len + WIDTH,
            "step_seconds": spread(seconds["decode"]),
            "pass_seconds": {accept: spread(seconds[accept]) for accept in rungs},
            "verified_over_decoded": {
                accept: spread(np.divide(seconds[accept], seconds["decode"]) / WIDTH)
                for accept in rungs
            },
            "product_seconds": spread(seconds["product"]),
            "products_over_decoded": spread(
                np.divide(seconds["product"], seconds["decode"]) / WIDTH
                * forward_flops(model, count, WIDTH, size.prompt_len + WIDTH, head=True)
                / (2 * tokens * model.embed_dim * columns)
            ),
        })  # fmt: skip
    return {"width": WIDTH, "repeats": repeats, "rungs": found}


def product_seconds(rows: jax.Array, matrix: jax.Array) -> float:
    """Of one product, as large as a pass has them."""
    start = time.perf_counter()
    jax.block_until_ready(_multiply(rows, matrix))
    return time.perf_counter() - start


@jax.jit
def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def forward_flops(model: ModelConfig, count: int, width: int, slots: int, *, head: bool) -> int:
    """Operations on `width` tokens a row: weights, and attention to all slots; two a product."""
    layer = param_shapes(model)["layers"]
    weights = sum(int(np.prod(shape)) for name, shape in layer.items() if name.endswith("_proj"))
    weights += model.vocab_size * model.embed_dim * head
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * slots
    return 2 * count * width * (weights + attention)


def made_up_drafts(count: int, width: int, vocab: int) -> Drafts:
    """Random tokens [count, width]."""
    shape, flat = (count, width), ("batch", None)
    tokens = np.random.default_rng(0).integers(0, vocab, shape).astype(np.int32)
    zeros = put(np.zeros(shape, np.float32), *flat)
    return Drafts(
        tokens=put(tokens, *flat),
        lens=put(np.full(count, width, np.int32), "batch"),
        sampling_logprobs=zeros,
        origin_logprobs=zeros,
        origin_steps=put(np.zeros(shape, np.int32), *flat),
    )


def verify_goals(record: dict[str, Any], name: str, backend: str) -> list[Goal]:
    """What the scene's figures are held against."""
    if (name, backend) != ("27m", "cpu"):
        return []
    return [
        Goal(
            f"verified / decoded token, {accept}, {r['rows']} rows",
            cost["median"],
            0.3,
            most=True,
            note=f"products alone: {r['products_over_decoded']['median']:.3f}",
        )
        for r in record["rungs"]
        for accept, cost in r["verified_over_decoded"].items()
    ]


def verify_table(record: dict[str, Any]) -> str:
    """The scene as text, a line a row count and rule."""
    lines = [
        f"verify: one pass of {record['width']} tokens a row against a decode step; median of "
        f"{record['repeats']}; products alone: the pass's operations at the rate of one product",
        f"{'rows':>6}{'slots':>7}{'rule':>8}{'pass, ms':>11}{'step, ms':>11}   "
        "verified / decoded token   products alone",
    ]
    for rung in record["rungs"]:
        for accept, cost in rung["verified_over_decoded"].items():
            ms = [1e3 * s["median"] for s in (rung["pass_seconds"][accept], rung["step_seconds"])]
            share = "{median:.3f} ({min:.3f}-{max:.3f})".format(**cost)
            least = f"{rung['products_over_decoded']['median']:.3f}"
            lines.append(
                f"{rung['rows']:6}{rung['slots']:7}{accept:>8}{ms[0]:11.2f}{ms[1]:11.3f}   "
                f"{share:24}   {least}"
            )
    return "\n".join(lines)
