"""Measures seconds of a rollout's programs on the device at hand, one program when it is asked for.

A program runs a few steps on made-up rows, which fill half the cache: kernels read what is filled.
Else its seconds do not depend on what it computes. Seconds are kept on disk, so that the next run
of the same programs on the same device reads them, as does a run that is resumed.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import sys
import time
import uuid
from typing import Any

import jax
import numpy as np

from specrl_jax import hosts
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.adaptive.step_costs import Point
from specrl_jax.rollout.carry_over import empty_rollout
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine import decode
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.decode_state import DecodeState, with_drafts
from specrl_jax.rollout.engine.draft_tries import DraftTries, sequence_slots
from specrl_jax.rollout.engine.rows import Noise, start_all_rows
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.sharding import eval_shape, put, put_as
from specrl_jax.types import Drafts, Prompts

_log = logging.getLogger(__name__)

STEPS = 8  # of the longer of two calls, beyond those of the shorter
ROUNDS = (3, 5)  # fewest and most rounds of calls, more than the fewest within SECONDS
SECONDS = 0.1  # a call that takes longer is made no more than twice
QUANTILE = 0.25  # a machine is now and then slower than itself, but never faster


def machine() -> dict:
    """Describe the primary's machine, on which seconds depend, in values that JSON keeps."""
    device = jax.devices()[0]
    processes = jax.process_count()
    own = {
        "device": f"{device.platform} {device.device_kind}",
        "mesh": list(jax.sharding.get_mesh().shape.values()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "jax": jax.__version__,
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
    }
    return hosts.broadcast(own | ({"processes": processes} if processes > 1 else {}))


@functools.cache
def code_digest(*modules: str) -> str:
    """Hash the sources of the programs and of these modules: other code may take other seconds."""
    package = pathlib.Path(__file__).parents[2]
    files = (getattr(sys.modules[module], "__file__", None) for module in modules)
    sources = {*package.glob("models/*.py"), *package.glob("rollout/**/*.py")}
    sources = sorted(sources | {pathlib.Path(file) for file in files if file})
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class StepTimer:
    """Seconds of a step of the programs of `program`."""

    program: ProgramSpec
    prompts: int  # of a rollout, for which the draft source has a state
    sources: int  # stored responses of each that it reads
    directory: pathlib.Path  # of the files that keep seconds

    def __call__(self, weights: Params, point: Point) -> float:
        """Seconds of one step: read from disk, or measured and kept there.

        A damaged file is measured again; one that cannot be written is warned of.
        """
        label = {"program": repr(self.program), "prompts": self.prompts, "sources": self.sources}
        own = (type(self.program.draft_source).__module__, type(self.program.accept).__module__)
        label |= {"code": code_digest(*own), **machine()}
        digest = hashlib.sha256(json.dumps(label, sort_keys=True).encode()).hexdigest()[:16]
        path = self.directory / f"step_costs_{digest}.json"
        kept = hosts.on_primary(lambda: _read(path).get(point))
        if kept is not None:
            return kept
        seconds = self.measure(weights, point)
        if hosts.is_primary():
            rows = [[*key, value] for key, value in (_read(path) | {point: seconds}).items()]
            _write_whole(path, json.dumps({"label": label, "seconds": rows}))
        return seconds

    def measure(self, weights: Params, point: Point) -> float:
        """Seconds of one step, without what a call of several steps takes itself."""
        first = self._seconds(weights, point, 1)
        if first > SECONDS:  # it is slow, or was compiled
            again = self._seconds(weights, point, 1)
            if again > SECONDS:
                return min(first, again)
        counts = (1,) if point.verifies else (1, 1 + STEPS)
        rounds = []
        spent = 0.0
        while len(rounds) < ROUNDS[0] or (len(rounds) < ROUNDS[1] and spent < SECONDS):
            rounds.append([self._seconds(weights, point, n) for n in counts])
            spent += sum(rounds[-1])
        calls = np.quantile(rounds, QUANTILE, axis=0).tolist()
        # On a noisy machine the longer call may come out shorter: then its mean is the estimate.
        step = (calls[-1] - calls[0]) / STEPS
        return step if step > 0 else calls[-1] / counts[-1]

    def _seconds(self, weights: Params, point: Point, steps: int) -> float:
        """Wall-clock seconds of one call, by the primary's clock."""
        program = self.program
        rows = self._rows(point)
        draft_state = self._draft_state() if point.drafting else None
        # Rows that end within these steps are computed on as rows that are done.
        limits = StopCondition.of(-1, program.response_slots, steps, point.rows)
        if point.sequences:
            call = functools.partial(decode.verify_trie, program, weights, _tries(point), rows)
        else:
            cache = init_cache(program.model, point.rows, point.slots)
            call = functools.partial(
                decode.decode_steps,
                program,
                weights,
                jax.block_until_ready(cache),
                rows,
                draft_state,
                verify=point.verifies,
            )
        jax.block_until_ready((rows, draft_state))
        start = time.perf_counter()
        jax.block_until_ready(call(limits, width=point.width)[-1])
        return hosts.broadcast(time.perf_counter() - start)

    def _rows(self, point: Point) -> DecodeState:
        """Rows whose prompt fills half the cache that their steps leave, in tries one token, with a
        draft of all slots. Shapes are traced alone: compiling what makes the rows of a rollout
        would take longer than the steps."""
        program = self.program
        size = point.rows
        drafted = point.verifies
        full = np.full(size, program.response_slots)
        most = 1 if drafted else 1 + STEPS
        prompt = 1 if point.sequences else max((point.slots - most * point.width) // 2, 1)

        def start() -> DecodeState:
            own = dataclasses.replace(program, group_size=1)
            noise = Noise(jax.random.key(0), 0)
            rows = start_all_rows(own, _prompts(size), noise, np.zeros(size, int))
            drafts = Drafts.of(empty_rollout(size, full[0], program.stored_logprobs))
            return with_drafts(rows, drafts, program.accept) if drafted else rows

        def place(array: np.ndarray) -> jax.Array:
            return put(array.astype(np.int32), "batch")

        rows = jax.tree.map(
            lambda x: put_as(np.zeros(x.shape, x.dtype), x.sharding.spec), eval_shape(start)
        )
        if drafted:
            rows = dataclasses.replace(
                rows, draft=dataclasses.replace(rows.draft, lens=place(full))
            )
        numbers = {"index": np.arange(size), "prompt_lens": np.full(size, prompt), "max_lens": full}
        return dataclasses.replace(rows, **{name: place(x) for name, x in numbers.items()})

    def _draft_state(self) -> Any:
        """Return the draft source's state for made-up prompts and stored responses."""
        source = self.program.draft_source
        group = self.program.group_size
        shape = (self.prompts, self.sources)
        slots = self.program.response_slots
        tokens = put(np.zeros((*shape, slots), np.int32), None, None, None)
        lens = put(np.full(shape, slots, np.int32), None, None)
        history = DraftHistory.from_store(tokens, lens, group)
        return source.init(_prompts(self.prompts), history, group)


def _tries(point: Point) -> DraftTries:
    """Made-up rows, two in a sequence."""
    slots = point.slots
    depths = np.tile(np.arange(slots), (point.sequences, sequence_slots(slots) // slots))
    ends = np.tile(np.arange(slots, depths.shape[1] + 1, slots).repeat(slots), (point.sequences, 1))
    nodes = np.arange(point.rows * slots).reshape(point.rows, slots) % depths.size
    return DraftTries(*(x.astype(np.int32) for x in (depths * 0, depths, ends, nodes)))


def _prompts(count: int) -> Prompts:
    """Made-up prompts of one token."""
    ones = np.ones(count, np.int32)
    ids = np.arange(2 * count, dtype=np.uint32)
    return Prompts(ones[:, None], ones, ids.reshape(count, 2), ())


def _read(path: pathlib.Path) -> dict[Point, float]:
    """Seconds that are kept in a file; none where it cannot be read."""
    try:
        rows = json.loads(path.read_text())["seconds"]
        return {Point(*key): float(seconds) for *key, seconds in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("cannot read %s (%s); measuring again", path, error)
        return {}


def _write_whole(path: pathlib.Path, text: str) -> None:
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        _log.warning("cannot keep step costs in %s: %s", path, error)
