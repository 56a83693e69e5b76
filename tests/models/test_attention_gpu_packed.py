"""Kernels for packed tokens on GPUs, in interpret mode, against the reference and brute force."""

import functools
import json
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from small_runs import launch

from specrl_jax.models import attention, attention_gpu, attention_gpu_packed
from specrl_jax.models.attention_gpu_packed import Blocks, Mask, Tiling
from specrl_jax.packing import PACKINGS, Sequences, pack
from specrl_jax.sharding import put

SLOTS = 88  # no multiple of a block
# Small blocks, other ones for each kernel: a sequence has several of each.
SMALL = Tiling(Blocks(32, 16, 4), Blocks(16, 32, 4), Blocks(16, 16, 4))
WINDOWS = [None, 1, 9]
by_kernel = functools.partial(attention.attend_packed, kernels=("packed",))


class Case(NamedTuple):
    """Shape and options of a call."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    dtype: str = "float32"
    window: int | None = None
    softcap: float = 0.0


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(attention_gpu, "_INTERPRET", True)
    monkeypatch.setattr(attention, "kernel_module", lambda platform: attention_gpu)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention_gpu_packed, "_TILINGS", {2: {16: SMALL}, 4: {16: SMALL}})


def _random_tries(seed: int, sequences: int = 4, slots: int = SLOTS) -> Sequences:
    """Return sequences of which the last is empty: rows of 1 to 40 tokens that share prefixes."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(1, 41, 12)
    lens[:3] = 1
    tokens = np.zeros((len(lens), 40), np.int32)
    for row, length in zip(tokens, lens):
        # Long shared beginnings: rows differ from one of three others after some tokens.
        shared = rng.integers(0, length + 1)
        row[:shared] = rng.integers(0, 3)
        row[shared:length] = rng.integers(3, 9, length - shared)
    packed, _ = pack(tokens, lens, slots, PACKINGS["trie"])
    assert len(packed.ends) < sequences
    return packed.padded(sequences)


def _dense(tries: Sequences, window: int | None) -> np.ndarray:
    """Return bool [B, T, T]: who sees whom."""
    slot = np.arange(tries.ends.shape[1])
    i = slot[None, :, None]
    j = slot[None, None, :]
    seen = (j <= i) & (i < tries.ends[:, None, :])
    if window is None:
        return seen
    return seen & (tries.depths[:, :, None] - tries.depths[:, None, :] < window)


def _mask(tries: Sequences, window: int | None) -> Mask:
    mask = Mask(jnp.asarray(tries.ends), None, None)
    if window is None:
        return mask
    depths = jnp.asarray(tries.depths)
    return mask._replace(first=depths - window + 1, positions=depths)


# --- Lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (32, 16), (16, 32)])
def test_lists_hold_every_block_that_a_query_sees(mesh, queries, keys, window):
    """They contain no others without a window, or in a sequence of one row."""
    blocks = Blocks(queries, keys, warps=4)
    cut = (4, 96 // queries, queries, 96 // keys, keys)
    for seed in range(20):
        tries = _random_tries(seed, slots=96)
        needed = _dense(tries, window).reshape(cut).any(axis=(2, 4))
        listed = np.asarray(attention_gpu_packed.visible(_mask(tries, window), blocks))
        assert not (needed & ~listed).any()
        every = _dense(tries, None).reshape(cut).any(axis=(2, 4))
        assert not (listed & ~every).any()
        if window is None:
            np.testing.assert_array_equal(listed, needed)
    slots = np.tile(np.arange(96, dtype=np.int32), (4, 1))
    row = Sequences(slots, depths=slots, ends=np.full_like(slots, 96), parents=slots)
    listed = attention_gpu_packed.visible(_mask(row, window), blocks)
    needed = _dense(row, window).reshape(cut).any(axis=(2, 4))
    np.testing.assert_array_equal(listed, needed)


def test_a_list_has_the_visible_blocks_first_and_in_order(mesh):
    visible = np.random.default_rng(0).random((2, 5, 7)) < 0.4
    visible[0, 0] = False
    index, count = attention_gpu_packed.list_blocks(jnp.asarray(visible))
    for got, size, row in zip(
        np.reshape(index, (-1, 7)), np.ravel(count), visible.reshape(-1, 7), strict=True
    ):
        np.testing.assert_array_equal(got[:size], np.flatnonzero(row))


# --- Outputs and gradients ------------------------------------------------------------------------


def _heads(rng: np.random.Generator, case: Case, shape: tuple[int, int]) -> list[jax.Array]:
    """Return random queries, keys and values of `shape` [B, T]."""
    counts = (case.heads, case.kv_heads, case.kv_heads)
    scales = (case.size**-0.5, 1.0, 1.0)
    return [
        put(rng.normal(size=(*shape, n, case.size)).astype(np.float32) * scale,
            "batch", None, "heads", None).astype(case.dtype)
        for n, scale in zip(counts, scales)
    ]  # fmt: skip


def _run(attend, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return gradients of queries, keys and values, and the output."""

    def loss(q, k, v, *rest):
        out = attend(q, k, v, *rest)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)


def check_packed(
    case: Case, shape: tuple[int, int], masks: list[tuple[np.ndarray, ...]], error: float = 1e-5
) -> None:
    """Compare kernel and reference on each (ends, positions); programs are compiled once.

    bfloat16: the reference computes in float32 what the kernel rounds.
    """
    options = {"window": case.window, "softcap": case.softcap}
    kernel = jax.jit(functools.partial(_run, functools.partial(by_kernel, **options)))

    @jax.jit
    def reference(q, k, v, *mask):
        q, k, v = (x.astype("float32") for x in (q, k, v))
        return _run(functools.partial(attention.attend_packed, **options), q, k, v, *mask)

    error = error if case.dtype == "float32" else 2**-6
    for seed, mask in enumerate(masks):
        arrays = _heads(np.random.default_rng(seed), case, shape)
        arrays += [put(x, "batch", None) for x in mask]
        got = jax.tree.leaves(kernel(*arrays))
        want = jax.tree.leaves(reference(*arrays))
        for x, y in zip(got, want, strict=True):
            assert x.dtype == case.dtype
            atol = error * max(float(jnp.max(jnp.abs(y))), 1)
            np.testing.assert_allclose(x.astype("float32"), y, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(heads=3, kv_heads=1, window=9),
        Case(heads=2, kv_heads=2, softcap=1.5),
        Case(window=1, softcap=0.7),
        Case(dtype="bfloat16"),
        Case(dtype="bfloat16", window=9, softcap=1.5),
    ],
    ids=str,
)
def test_random_tries(mesh, small_blocks, case):
    tries = [_random_tries(seed) for seed in range(8)]
    check_packed(case, (4, SLOTS), [(x.ends, x.depths) for x in tries])


@pytest.mark.parametrize(
    "case",
    [Case(2, 1, 64, "bfloat16"), Case(2, 1, 128, "bfloat16", 30, 2.0), Case(1, 1, 256)],
    ids=str,
)
def test_blocks_as_they_are(mesh, case):
    """Two sequences of 200 slots: of one or two blocks of the largest kind, more of others."""
    tries = _random_tries(0, sequences=2, slots=200)
    check_packed(case, (2, 200), [(tries.ends, tries.depths)])


def test_a_mesh_of_several_devices(make_mesh, small_blocks):
    """Rows and heads are cut; outputs and gradients are laid out as what they belong to."""
    tries = _random_tries(0)
    case = Case(window=9, softcap=1.5)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        check_packed(case, (4, SLOTS), [(tries.ends, tries.depths)])
        q, k, v = _heads(np.random.default_rng(0), case, (4, SLOTS))
        ends = put(tries.ends, "batch", None)
        grads, out = jax.jit(functools.partial(_run, by_kernel))(q, k, v, ends)
        for x, like in zip((*grads, out), (q, k, v, q), strict=True):
            assert jax.typeof(x).sharding.spec == jax.typeof(like).sharding.spec


# --- What is skipped ------------------------------------------------------------------------------


def test_blocks_that_no_query_sees_are_not_read(mesh, small_blocks):
    """Rows of 32 slots that share nothing: what is NaN in one leaves the others as they were."""
    slots = np.arange(96)
    ends = put(((slots // 32 + 1) * 32)[None].astype(np.int32), "batch", None)
    arrays = _heads(np.random.default_rng(0), Case(), (1, 96))
    own = (slots >= 32) & (slots < 64)
    spoilt = [jnp.where(own[None, :, None, None], jnp.nan, x) for x in arrays]
    run = jax.jit(functools.partial(_run, by_kernel))
    for got, want in zip(jax.tree.leaves(run(*spoilt, ends)), jax.tree.leaves(run(*arrays, ends))):
        np.testing.assert_array_equal(np.asarray(got)[:, ~own], np.asarray(want)[:, ~own])
        assert np.isnan(np.asarray(got)[:, own]).all()


def test_blocks_before_the_window_are_not_read(mesh, small_blocks):
    """A query of the last block sees 20 slots back: into the two blocks of 32 before its own."""
    arrays = _heads(np.random.default_rng(0), Case(), (1, 96))
    before = np.arange(96) < 32
    spoilt = [jnp.where(before[None, :, None, None], jnp.nan, x) for x in arrays]
    slots = put(np.arange(96, dtype=np.int32)[None], "batch", None)
    attend = jax.jit(functools.partial(by_kernel, positions_BT=slots, window=20))
    outputs = [np.asarray(attend(*x))[:, 64:] for x in (spoilt, arrays)]
    np.testing.assert_array_equal(*outputs)


def _sizes(jaxpr: Jaxpr | ClosedJaxpr) -> list[int]:
    """Return the number of elements of every array of a program, without its kernels."""
    sizes = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        sizes += [getattr(x.aval, "size", 0) for x in eqn.outvars]
        if eqn.primitive.name == "pallas_call":
            continue
        for value in eqn.params.values():
            parts = value if isinstance(value, tuple | list) else (value,)
            sizes += [n for x in parts if isinstance(x, Jaxpr | ClosedJaxpr) for n in _sizes(x)]
    return sizes


def test_no_array_of_all_pairs_of_tokens(mesh):
    tokens = 4_096
    shapes = [jax.ShapeDtypeStruct((1, tokens, n, 16), "bfloat16") for n in (4, 2, 2)]
    ints = jax.ShapeDtypeStruct((1, tokens), "int32")
    run = functools.partial(_run, functools.partial(by_kernel, window=512))
    sizes = _sizes(jax.make_jaxpr(run)(*shapes, ints, ints))
    assert tokens * 4 * 16 <= max(sizes) < tokens**2 / 16


def _packed_groups(tokens: int, prompt_lens: tuple[int, int], median: int, most: int) -> Sequences:
    """Return 64 groups of 8 responses, packed in sequences of `tokens` slots as an update does.

    prompt_lens: The shortest and the longest.
    median, most: Of the responses' lengths, which are log-normal with σ = 0.8.
    """
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(*prompt_lens, size=64, endpoint=True), 8)
    responses = np.exp(rng.normal(np.log(median), 0.8, size=len(prompts)))
    lens = prompts + np.clip(responses, 1, most).astype(int)
    width = prompt_lens[1] + most
    rows = rng.integers(0, 50_000, (len(prompts), width)).astype(np.int32)
    shared = np.arange(width) < prompts[:, None]
    rows = np.where(shared, np.repeat(rows[::8], 8, axis=0), rows)
    return pack(rows, lens, tokens, PACKINGS["trie"])[0]


@pytest.mark.parametrize(
    ("tokens", "prompt_lens", "median", "most", "window", "percent"),
    [
        (10_240, (100, 400), 1_000, 4_096, None, (13, 12, 12, 20)),
        (10_240, (100, 400), 1_000, 4_096, 512, (7, 5, 5)),
        (2_560, (64, 256), 250, 1_024, None, (20, 17, 17, 47)),
    ],
)
def test_blocks_that_are_computed(mesh, tokens, prompt_lens, median, most, window, percent):
    """In percent of T x T, of heads of 128 in bfloat16: those of docs/scaling.md.

    For output, gradient of queries, and gradients of keys and values; without a window also in
    TPUs' blocks.
    """
    tries = _packed_groups(tokens, prompt_lens, median, most)
    kinds = *attention_gpu_packed.tiling(tokens, 128, "bfloat16"), Blocks(512, 512, warps=0)
    shares = [float(attention_gpu_packed.visible(_mask(tries, window), x).mean()) for x in kinds]
    assert tuple(round(100 * share) for share in shares)[: len(percent)] == percent


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CUDA_PLUGIN_DIR"), reason="see docs/scaling.md")
def test_what_the_kernels_take_of_the_smallest_gpu():
    done = launch("tests/packed_kernels.py", "l4:1", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 18  # three sizes of heads, two types, three kernels
    for row in rows:
        assert row["registers"] <= 255
        assert row["spilt"] <= 16
        assert row["shared"] <= 101_376
