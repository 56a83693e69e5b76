"""Rows that go on in their slots: how they are packed, and which programs that takes. What they
compute is tested in tests/agents/test_turns.py."""

import jax
import numpy as np
import pytest
import rollout_reference as ref
import small_runs
from hlo import Module

from specrl_jax.abstract import device_bytes
from specrl_jax.compile.from_config import abstract_run
from specrl_jax.compile.programs import rollout_programs
from specrl_jax.rollout.engine.append import (
    append_inputs,
    pack_appended,
    put_block,
    put_inputs,
    take_block,
    take_inputs,
)
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.rows import PADDING

TURNS = {
    "environment.name": "small_runs:QuickSums", "environment.max_turns": 3,
    "rollout.response_len": 12, "rollout.draft": "previous", "rollout.max_rows": 32,
    "rollout.prompts_per_step": 8,
}  # fmt: skip


def shapes_of(row_buckets: int):
    changes = TURNS | {"rollout.row_buckets": row_buckets}
    return abstract_run(small_runs.small_config(changes)).training


def test_rows_are_packed_into_blocks_by_hand(monkeypatch):
    """Two shards of 10 rows, blocks of 2. Rows 3, 5 and 8 go on in one, row 14 in the other."""
    monkeypatch.setattr(Buckets, "block_rows", 2)
    buckets = Buckets(ref.ONE_LAYER, 8, 3, 9, 1, shards=2, turns=True)
    blocks = pack_appended(
        buckets,
        10,
        row_ids=np.array([3, 5, 8, 14]),
        shard_slots=np.array([2, 0, 1, 3]),
        starts=np.array([4, 4, 1, 2]),
        lens=np.array([5, 6, 7, 6], np.int32),
        draft_ends=np.array([0, 9, 0, 7]),
    )
    # They append 1, 5, 6 and 5 tokens.
    assert [[x.tolist() for x in block] for block in blocks] == [
        [[8, 5, 4, -1], [1, 0, 3, PADDING], [1, 4, 2, 0], [0, 9, 7, 0]],
        [[3, -1, -1, -1], [2, PADDING, PADDING, PADDING], [4, 0, 0, 0], [0, 0, 0, 0]],
    ]
    assert {x.dtype for block in blocks for x in block} == {np.dtype(np.int32)}


@pytest.mark.parametrize("pieces", [1, 4])
def test_whatever_the_row_buckets_one_program_runs_the_model(make_mesh, pieces):
    with jax.set_mesh(make_mesh(pieces, 1, 1)):
        inputs = []
        for row_buckets in (1, 3, 4):
            shapes = shapes_of(row_buckets)
            listed = list(rollout_programs(shapes))
            assert len(shapes.buckets.sizes) == row_buckets
            assert [x.name for x in listed if x.name.startswith("append") and x.runs_model] == [
                "append"
            ]
            names = [x.name for x in listed if x.name.startswith(("take rows", "put rows"))]
            assert len(names) == 2 * row_buckets
            inputs.append(append_inputs(shapes)[3:])  # spec, buckets and weights come first
    assert inputs[0] == inputs[1] == inputs[2]


def test_a_batch_is_changed_in_place_and_on_its_shards(make_mesh):
    """No bytes of the batch are in memory twice, and none are sent."""
    mesh = make_mesh(4, 2, 1)
    with jax.set_mesh(mesh):
        shapes = shapes_of(1)
        inputs = put_inputs(shapes, 512)
        batch = device_bytes(inputs[:2])
        written = put_block.trace(*inputs).lower().compile()
        taken = take_block.trace(*take_inputs(shapes, 512)).lower().compile()
    memory = written.memory_analysis()
    assert memory.alias_size_in_bytes == batch
    assert memory.temp_size_in_bytes < batch / 10
    for compiled, most in ((taken, 0), (written, 1_000)):  # counts of unfinished rows
        collectives = Module(compiled.as_text(), dict(mesh.shape)).collectives()
        assert sum(size for _, size in collectives.values()) <= most


def filled(shapes, first: int):
    """Arrays of these shapes whose rows hold `first`, `first` + 1 and so on."""

    def fill(x):
        rows = np.arange(first, first + x.shape[0]).reshape(-1, *(1,) * (len(x.shape) - 1))
        return jax.device_put(np.broadcast_to(rows, x.shape).astype(x.dtype), x.sharding)

    return jax.tree.map(fill, shapes)


def test_a_block_takes_its_slots_and_puts_them_back(make_mesh):
    """Slots 1 and 0 of one shard and 2 of the other, of 3 each; the block's last row is empty."""
    with jax.set_mesh(make_mesh(2, 1, 1)):
        shapes = shapes_of(1)
        slots = np.array([1, 0, 2, PADDING], np.int32)
        taken = jax.device_get(take_block(filled(shapes.batch(6)[0], 10), slots))
        assert {tuple(x[:, 0, 0, 0].tolist()) for x in jax.tree.leaves(taken)} == {(11, 10, 15, 15)}
        batch = put_block(*filled(shapes.batch(6), 10), *filled(shapes.batch(4), 30), slots)
        cache, rows, unfinished = jax.device_get(batch)
        expected = (31, 30, 12, 13, 14, 32)
        assert {tuple(x[:, -1, -1, -1].tolist()) for x in jax.tree.leaves(cache)} == {expected}
        assert tuple(rows.row_ids.tolist()) == tuple(rows.tokens.ids[:, -1].tolist()) == expected
        assert unfinished.shape == (2, 2)
