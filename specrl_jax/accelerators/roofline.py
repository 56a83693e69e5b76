"""Seconds that a chip needs at least: arithmetic, memory or links, whichever takes longest.

Links: of the bytes n of a collective over k devices each sends n (k - 1) / k, of a sum twice that.
Nothing overlaps with the host, and nothing else is lost: a lower bound, not a forecast.
"""

import math
from collections.abc import Mapping

from specrl_jax.accelerators.abstract_run import AbstractRun
from specrl_jax.accelerators.chips import Chip
from specrl_jax.accelerators.compiled import Cost
from specrl_jax.packing import PACKINGS
from specrl_jax.sharding import shards


def roofline(chip: Chip, mesh: Mapping[str, int], flops: float, cost: Cost) -> dict[str, float]:
    """Seconds of one device, by what takes them.

    flops: over all devices of the mesh, {axis: size}. cost: of one.
    """
    sent = 0.0
    for (kind, axes), (_, size) in cost.collectives.items():
        pieces = math.prod(mesh[axis] for axis in axes.split(" x ") if axis in mesh)
        sent += size * (1 - 1 / pieces) * (2 if kind == "all-reduce" else 1)
    compute = flops / math.prod(mesh.values()) / chip.flops
    return {"compute": compute, "memory": cost.moved / chip.bandwidth, "links": sent / chip.link}


def step_uses(run: AbstractRun, tokens: float, reuse: float) -> dict[str, tuple[float, float]]:
    """Count a step's calls of each program, and passes of its open loop over all calls.

    tokens: of a response in the mean. reuse: the share of them that is accepted from drafts; 0:
    nothing is verified. Rows in flight are always full. The update computes every row; sequences
    have no empty slots, prompts are the longest, and responses share nothing with each other.
    """
    updates = run.config.updates
    rows = run.rows
    buckets = run.buckets
    starts = math.ceil(rows / run.first)
    inserted = max(rows - run.running, 0)
    inserts = math.ceil(inserted / run.refill)
    moves = sum(size < run.running for size in buckets.rows)
    passes = math.ceil(tokens * reuse / buckets.verify[-1])
    longest = run.program.response_slots
    width = buckets.verify[-1]
    in_tries = bool(reuse) and longest <= width
    prefills = 0 if in_tries else starts
    calls = (rows // updates.mini_batch_size) * updates.passes
    micro_batches = _micro_batches(run, tokens)
    every = micro_batches * rows // updates.mini_batch_size
    return {
        "policy_copy": (1, 0),
        "pick_drafts": (1, 0),
        "pick_sources": (1, 0),
        "prefill": (prefills, 0),
        "broadcast_prefill": (prefills, 0),
        "verify_tries": (starts if in_tries else 0, 0),
        "verify_rows": (0, 0 if in_tries else starts * passes),
        "decode": (1, rows * tokens * (1 - reuse) / run.running),
        "fewer_rows": (moves, 0),
        "longer_cache": (len(buckets.responses) - 1, 0),
        "insert": (inserts, inserted / shards("batch")),
        "write_back": (inserts + moves + 1, 0),
        "store_drafts": (1, 0),
        "logprobs": (1, every),
        "critic_values": (1, every),
        "update": (calls, calls * micro_batches),
    }


def _micro_batches(run: AbstractRun, tokens: float) -> int:
    """Count the micro-batches that a mini-batch fills with responses of so many tokens."""
    sequences = run.mini_batch.sequences.tokens
    packing = PACKINGS[run.learner.packing]
    rows = run.config.updates.mini_batch_size
    prompt = run.config.data.prompt_len
    if not packing.fill:
        return sequences.shape[0]
    prompts = rows / run.spec.group_size if packing.share else rows
    slots = prompts * prompt + rows * tokens
    return min(math.ceil(slots / math.prod(sequences.shape[1:])), sequences.shape[0])
