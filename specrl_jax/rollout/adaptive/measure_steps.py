"""Seconds of a rollout's programs on the device at hand, for the cost model.

The programs at the ends of what the engine may choose among are run a few steps on made-up rows.
What they compute does not matter: no shape depends on it. Tables are kept on disk, by everything
that a step's cost depends on.
"""

import dataclasses
import hashlib
import os
import pathlib
import time

import jax
import numpy as np

from specrl_jax.models.kv_cache import cache_bytes, init_cache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.adaptive.step_costs import (
    Calls,
    Point,
    StepCosts,
    load_or_measure,
    tabulate,
)
from specrl_jax.rollout.drafts import suffix_match as drafting
from specrl_jax.rollout.engine import decode
from specrl_jax.rollout.engine import decode_state as rows
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

STEPS = 8  # of a decode loop, beyond the first


def cost_table(
    plan: RolloutSpec,
    weights: Params,
    total_rows: int,
    *,
    sources: int,
    directory: str | os.PathLike,
) -> StepCosts:
    """Measure the programs of a rollout of `total_rows` rows, or read what was measured before.

    sources: stored responses of a prompt that tree drafts read. directory: where tables are kept.
    """
    ladder = plan.buckets(total_rows)
    setup = plan.program_for(ladder)
    key = machine() | {
        "setup": repr(setup),
        "ladder": repr(ladder),
        "sources": sources,
        "statistic": "lower quartile",
        "code": code(),
        "cache_bytes": plan.cache_bytes,
    }
    clock = _Clock(setup, ladder, weights, sources)
    found = points(setup, ladder, plan.cache_bytes)
    return load_or_measure(directory, key, found, clock)


def code() -> str:
    """A digest of the sources that a rollout's programs are made of: another version of them may
    take other seconds for the same shapes."""
    package = pathlib.Path(__file__).parents[2]
    sources = sorted([*package.glob("models/*.py"), *package.glob("rollout/**/*.py")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def machine() -> dict:
    """What seconds depend on beside a rollout's programs, in values that JSON keeps."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform} {device.device_kind}",
        "mesh": list(jax.sharding.get_mesh().shape.values()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "jax": jax.__version__,
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
    }


def points(setup: ProgramSpec, ladder: Buckets, bound: float = 0.0) -> list[Point]:
    """What is measured: every decode program at its shallowest and deepest window, and the
    narrowest and widest verification at the fewest and most rows, of drafts as long as a pass and,
    where they can be longer, as long as a response. bound: of the KV caches' bytes, 0 for any; what
    it leaves no room for never runs."""
    per_slot = cache_bytes(setup.model, 1, 1)

    def fits(point: Point) -> bool:
        if not bound or point.rows <= ladder.admissions[-1]:
            return True
        return point.rows * point.slots * per_slot <= bound

    windows = [ladder.slots(r) for r in (ladder.responses[0], ladder.responses[-1])]
    found = {
        Point(size, slots, width, width > 1)
        for size in ladder.rows
        for slots in windows
        for width in ladder.widths
    }
    if not acceptance.RULES[setup.accept].whole_draft:
        for size in (ladder.admissions[0], ladder.admissions[-1]):
            for width in (ladder.verify[0], ladder.verify[-1]):
                for longest in {width, ladder.responses[-1]}:
                    found.add(Point(size, ladder.verify_slots(width, longest), width, False))
    return sorted(filter(fits, found))


class PlainSteps:
    """Seconds of the plain steps of a rollout of `total_rows` rows, a round at a time between other
    work, so that the machine is as fast in the mean for both."""

    def __init__(self, plan: RolloutSpec, weights: Params, total_rows: int):
        ladder = plan.buckets(total_rows)
        self._clock = _Clock(plan.program_for(ladder), ladder, weights, sources=0)
        self._points = [
            Point(rows, slots, 1, False)
            for rows in ladder.rows
            for slots in sorted({ladder.slots(n) for n in ladder.responses})
        ]
        self._rounds: list[list[Calls]] = []
        self._round()  # compiles

    def _round(self) -> list[Calls]:
        return [self._clock(*point) for point in self._points]

    def time(self) -> None:
        """One more round."""
        self._rounds.append(self._round())

    def table(self) -> StepCosts:
        """Medians of the rounds."""
        return tabulate(self._points, self._rounds, quantile=0.5)


@dataclasses.dataclass
class _Clock:
    """time_calls of `cost_table.measure`."""

    setup: ProgramSpec
    ladder: Buckets
    weights: Params
    sources: int

    def __call__(self, size: int, slots: int, width: int, matching: bool) -> Calls:
        counts = (1,) if not matching and width > 1 else (1, 1 + STEPS)
        return [(n, self._seconds(size, slots, width, n, matching)) for n in counts]

    def _seconds(self, size: int, slots: int, width: int, steps: int, matching: bool) -> float:
        """Wall-clock seconds of one call of so many steps."""
        setup, wide = self.setup, width > 1 and not matching
        board = self._rows(size)
        if wide:
            board = rows.with_drafts(board, self._drafts(size), setup.accept)
        corpus = self._corpus(size) if matching else None
        # Rows that come to their end go on as rows that are done, at the same cost.
        limits = StopCondition(*(np.int32(x) for x in (-1, setup.response_slots, steps, size)))
        cache = init_cache(setup.model, size, slots)
        jax.block_until_ready((board, corpus, cache))
        start = time.perf_counter()
        jax.block_until_ready(
            decode.decode_steps(
                setup,
                self.weights,
                cache,
                board,
                corpus,
                limits,
                width=width,
                wide=wide and setup.accept != "match",
            )[-1]
        )
        return time.perf_counter() - start

    def _rows(self, size: int) -> rows.DecodeState:
        ones = put(np.ones(size, np.int32), "batch")
        seeds = np.random.default_rng(size).integers(0, 2**32, (2, size, 2), np.uint32)
        caps = put(np.full(size, self.setup.response_slots, np.int32), "batch")
        return rows.start_rows(
            *(put(x, "batch", None) for x in seeds),
            ones * min(self.ladder.prompt_slots, 1),
            caps,
            ones,
            columns=self.setup.columns,
            pad_id=self.setup.pad_id,
            stored=self.setup.stored_logprobs,
        )

    def _drafts(self, size: int) -> Drafts:
        shape, k = (size, self.setup.response_slots), self.setup.stored_logprobs
        tokens = np.random.default_rng(0).integers(0, self.setup.model.vocab_size, shape)
        flat, zeros = ("batch", None), np.zeros(shape, np.float32)
        top = np.zeros((*shape, k), np.float32)
        return Drafts(
            tokens=put(tokens.astype(np.int32), *flat),
            lens=put(np.full(size, shape[1], np.int32), "batch"),
            sampling_logprobs=put(zeros, *flat),
            origin_logprobs=put(zeros, *flat),
            origin_steps=put(zeros.astype(np.int32), *flat),
            top_ids=put(top.astype(np.int32), *flat, None) if k else None,
            top_logprobs=put(top, *flat, None) if k else None,
        )

    def _corpus(self, size: int) -> drafting.SuffixIndex:
        setup = self.setup
        prompts = -(-size // setup.group_size)
        shape = (prompts, self.sources, setup.response_slots)
        tokens = np.random.default_rng(1).integers(0, setup.model.vocab_size, shape)
        return drafting.build(
            put(tokens.astype(np.int32), None, None, None),
            put(np.full(shape[:2], shape[2], np.int32), None, None),
            put(np.ones(self.sources, np.float32), None),
            live=setup.group_size,
            depth=setup.tree.depth,
        )
