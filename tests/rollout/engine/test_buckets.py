"""The buckets of program shapes: by hand, and properties over many sizes."""

import itertools

import jax
import pytest
import rollout_reference as ref

from specrl_jax.models import kv_cache
from specrl_jax.models.transformer import used_param_count
from specrl_jax.rollout.engine import buckets as bucket_sizes
from specrl_jax.rollout.engine.buckets import Buckets

MODEL = ref.ONE_LAYER


def test_worked_example():
    """That of the module's docstring."""
    buckets = Buckets(MODEL, 64, 8, 32, 4, shards=2, max_width=4)
    assert buckets.sizes == (64, 32, 16, 8)
    assert buckets.cache_slots == 8 + 32 + 3
    assert buckets.widths == (1, 2, 4)
    assert (buckets.sequence_slots, buckets.chunk_sequences) == (2 * (8 + 32), 3)
    assert buckets.chunks == 11  # 32 rows on each shard, at worst three to a chunk
    assert (buckets.verify_width, buckets.window_slots) == (32, 0)
    assert buckets.text_shapes == ((80, 3, 11),)
    assert buckets.block_rows == 12
    assert buckets.refill == 8
    assert [buckets.size_below(n) for n in (64, 32, 16, 8)] == [32, 16, 8, 0]
    counts = [(32, 1), (16, 16), (17, 0), (9, 4), (4, 4), (0, 0)]
    assert [buckets.size_for_shards(n) for n in counts] == [64, 32, 64, 32, 8, 8]


def test_a_larger_policy_has_windows(monkeypatch):
    monkeypatch.setattr(bucket_sizes, "WINDOW_PARAMS", used_param_count(MODEL))
    buckets = Buckets(MODEL, 64, 8, 32, 4, shards=2, max_width=4)
    assert buckets.text_shapes == ((3 * 2 * (8 + 32), 1, 11),)
    assert (buckets.verify_width, buckets.window_slots) == (16, 64)
    monkeypatch.setattr(bucket_sizes, "WINDOW_PARAMS", used_param_count(MODEL) + 1)
    assert Buckets(MODEL, 64, 8, 32, 4, shards=2, max_width=4).window_slots == 0


def test_short_texts_have_a_shape_where_chunks_are_long(monkeypatch):
    """Shapes of the paper's lengths, on an accelerator."""
    monkeypatch.setattr(bucket_sizes, "platform", lambda: "gpu")
    buckets = Buckets(MODEL, 512, 1_024, 4_096, 4, shards=8)
    assert buckets.text_shapes == ((10_240, 1, 64), (512, 1, 64))


@pytest.mark.parametrize(
    ("shape", "max_rows", "rows"),
    [((1, 1, 1), 0, 64), ((1, 1, 1), 80, 64), ((1, 1, 1), 11, 11), ((2, 2, 2), 47, 44)],
)
def test_at_most_max_rows_run_as_many_on_every_shard(make_mesh, shape, max_rows, rows):
    with jax.set_mesh(make_mesh(*shape)):
        assert ref.make_spec(max_rows=max_rows).buckets(64).sizes[0] == rows


def test_fewer_slots_than_shards_are_refused(make_mesh):
    with (
        jax.set_mesh(make_mesh(2, 2, 1)),
        pytest.raises(ValueError, match=r"max_rows must be 0 or >= mesh.data x mesh.fsdp = 4"),
    ):
        ref.make_spec(max_rows=3).buckets(64)


@pytest.mark.parametrize(
    ("widest", "widths"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (4, (1, 2, 4)), (6, (1, 3, 6)), (8, (1, 4, 8))],
)
def test_widths_of_a_decode_step(widest, widths):
    buckets = Buckets(MODEL, 8, 4, 16, 1, max_width=widest)
    assert buckets.widths == widths
    assert buckets.cache_slots == 4 + 16 + widest - 1


@pytest.mark.parametrize(("platform", "multiple"), [("gpu", 16), ("tpu", 128)])
def test_slots_are_what_kernels_take(monkeypatch, platform, multiple):
    monkeypatch.setattr(kv_cache, "platform", lambda: platform)
    buckets = Buckets(MODEL, 64, 24, 128, 1, max_width=4)
    assert buckets.cache_slots % multiple == buckets.sequence_slots % multiple == 0
    assert 0 <= buckets.cache_slots - (24 + 128 + 3) < multiple
    assert 0 <= buckets.sequence_slots - 2 * (24 + 128) < multiple


def test_blocks_fit_their_bytes(monkeypatch):
    """Logits of a large vocabulary, or a row's keys and values, and a row at least."""
    buckets = [Buckets(model, 64, 8, 8, 1) for model in
               (MODEL.replace(vocab_size=1 << 16), MODEL.replace(num_layers=64))]  # fmt: skip
    logits = 8 * (1 << 16) * 4
    cache = 2 * 16 * 64 * 2 * 4 * 4
    monkeypatch.setitem(bucket_sizes.BLOCK_BYTES, "cpu", 3 * logits)
    assert buckets[0].block_rows == 3
    monkeypatch.setitem(bucket_sizes.BLOCK_BYTES, "cpu", 5 * cache)
    assert buckets[1].block_rows == 5
    monkeypatch.setitem(bucket_sizes.BLOCK_BYTES, "cpu", 1)
    assert Buckets(MODEL, 64, 8, 8, 1).block_rows == 1


SIZES = itertools.product((4, 12, 32, 64), (1, 5, 32, 200), (1, 2, 4, 7), (1, 2, 4))


def test_properties_over_many_sizes():
    for rows, slots, row_buckets, shards in SIZES:
        buckets = Buckets(MODEL, rows, 8, slots, row_buckets, shards)
        sizes = buckets.sizes
        assert sizes[0] == rows
        assert list(sizes) == sorted(set(sizes), reverse=True)
        assert len(sizes) <= row_buckets
        assert all(size % shards == 0 for size in sizes)
        for large, small in itertools.pairwise(sizes):
            assert large / 2 <= small < large / 2 + shards
        # A bucket holds what it is asked for, and no smaller one does.
        own = rows // shards
        for most in range(own + 1):
            bucket = buckets.size_for_shards([most] + [0] * (shards - 1))
            assert bucket == min(r for r in sizes if r // shards >= most)
            assert buckets.size_below(bucket) < max(most * shards, 1)
        assert 1 <= buckets.refill <= own
        # The chunks hold two rows' slots for every row of a shard; a block is at most a shard.
        pairs = buckets.chunk_sequences * buckets.sequence_slots // (2 * (8 + slots))
        assert buckets.chunks * pairs >= own
        assert (buckets.chunks - 1) * pairs < own
        assert 1 <= buckets.block_rows <= own
        assert 1 <= buckets.verify_width <= slots
