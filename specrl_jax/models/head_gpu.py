"""Output head as a Pallas kernel for GPUs: logits are reduced where they are computed.

A program computes the logits of some positions at all tokens of one column of the folded vocabulary
[C, N], in registers, and writes four numbers per position. No logit reaches memory.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from specrl_jax.models import gpu
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.gpu import triton
from specrl_jax.models.head import Columns
from specrl_jax.sharding import COMPUTE, axes, shards

_LEAST = 16  # least rows and columns of a tensor-core product
_MOST_PIECE = 128  # rows of the vocabulary per product
_MOST_PIECES = 3  # products whose results are in registers together
_MOST_POSITIONS = 128  # per program with one such product; half as many with three
_PART_BYTES = 64  # of a state that a product reads at a time
_LOWEST = float(jnp.finfo(jnp.float32).min)
_INTERPRET = False  # for tests


def refusal(model: ModelConfig, rows: int) -> str:
    """Return why the kernel cannot take columns of `rows` tokens on each device, or ""."""
    if reason := gpu.refusal():
        return reason
    if model.dtype != "bfloat16":
        return f"the kernel needs bfloat16, the model computes in {model.dtype}"
    piece = _piece(rows)
    if piece < _LEAST or rows // piece > _MOST_PIECES:
        return f"a column must have 16, 32, .. 128 or 48, 96, .. 384 tokens on a device, not {rows}"
    if model.embed_dim % _LEAST:
        return f"states must have a multiple of {_LEAST} numbers, these have {model.embed_dim}"
    return ""


def _piece(rows: int) -> int:
    """Return the largest power of 2 that divides `rows`, at most `_MOST_PIECE`."""
    return min(rows & -rows, _MOST_PIECE)


def reduce_columns(
    hidden_BTD: Array,
    head_VD: Array,
    rows: int,
    values: tuple[Array, ...],
    finish: Callable[[Array, Array], Array],
    weigh: Callable[..., Array],
) -> Columns:
    """Return the values of each column of the logits of states [B, T, D].

    head_VD: From `transformer.compute_head`. rows: C.
    values: Arrays [B, T] that `weigh` needs per position.
    finish: Maps products float32 [m, c] and their tokens int32 [1, c] to the logits.
    weigh: Maps logits minus the column's highest [m, c], tokens [1, c] and each value [m, 1] to
        weights [m, c]; the largest chooses the column's token.
    """
    own_rows = rows // shards("vocab")
    local = functools.partial(_reduce_on_shard, own_rows, finish, weigh)
    layout = axes("batch", None, "vocab", None)
    run = jax.shard_map(local, out_specs=Columns(*(layout,) * 4), check_vma=False)
    return run(hidden_BTD, head_VD, *values)


def _reduce_on_shard(
    rows: int, finish: Callable, weigh: Callable, hidden_BTD: Array, head_VD: Array, *values: Array
) -> Columns:
    """Reduce the columns of the logits at a shard's positions. rows: the shard's share of C."""
    batch, width, size = hidden_BTD.shape
    columns = head_VD.shape[0] // rows
    piece = _piece(rows)
    positions = batch * width
    most = _MOST_POSITIONS if piece == rows else _MOST_POSITIONS // 2
    block = min(max(pl.next_power_of_2(positions), _LEAST), most)
    blocks = pl.cdiv(positions, block)
    extra = blocks * block - positions
    hidden_MD = jnp.pad(hidden_BTD.reshape(positions, size), ((0, extra), (0, 0)))
    values = [jnp.pad(x.reshape(positions), (0, extra)) for x in values]
    first = rows * jax.lax.axis_index(COMPUTE["vocab"])
    part = min(size & -size, _PART_BYTES // hidden_BTD.dtype.itemsize)
    per_position = pl.BlockSpec((block,), lambda m, n: (m,))
    out = pl.BlockSpec((None, block), lambda m, n: (n, m))
    kernel = functools.partial(_reduce_column, finish, weigh, piece, part)
    dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    results = pl.pallas_call(
        kernel,
        # Programs that run at the same time share a column, so it is read once.
        grid=(blocks, columns),
        in_specs=[
            pl.BlockSpec((None,), lambda m, n: (0,)),
            pl.BlockSpec((block, size), lambda m, n: (m, 0)),
            pl.BlockSpec((rows, None, size), lambda m, n: (0, n, 0)),
            *(per_position for _ in values),
        ],
        out_specs=[out] * len(dtypes),
        out_shape=[jax.ShapeDtypeStruct((columns, blocks * block), x) for x in dtypes],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=_INTERPRET,
        name="reduce_columns",
    )(first[None], hidden_MD, head_VD.reshape(rows, columns, size), *values)
    as_rows = [x[:, :positions].T.reshape(batch, width, 1, columns) for x in results]
    return Columns(*as_rows)


def _reduce_column(
    finish: Callable, weigh: Callable, piece: int, part: int, first_ref, hidden_ref, head_ref, *refs
) -> None:
    """Reduce the logits of a block of positions at the tokens of a column."""
    *value_refs, top_ref, mass_ref, ids_ref, logits_ref = refs
    rows, size = head_ref.shape
    starts = range(0, rows, piece)
    block = hidden_ref.shape[0]

    def add_part(number: Array, products: tuple) -> tuple:
        slots = pl.ds(number * part, part)
        states = hidden_ref[:, slots]
        return tuple(
            product + triton.dot(states, head_ref[pl.ds(start, piece), slots].T)
            for start, product in zip(starts, products, strict=True)
        )

    nothing = tuple(jnp.zeros((block, piece), jnp.float32) for _ in starts)
    products = jax.lax.fori_loop(0, size // part, add_part, nothing)
    columns = pl.num_programs(1)
    ids = [
        ((first_ref[...] + start + jnp.arange(piece)) * columns + pl.program_id(1))[None, :]
        for start in starts
    ]
    logits = [finish(product, own) for product, own in zip(products, ids, strict=True)]
    top = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x in logits])
    # A column of tokens that are all unused has a highest logit of -inf.
    finite_top = jnp.maximum(top, _LOWEST)[:, None]
    values = [ref[...][:, None] for ref in value_refs]
    mass = jnp.zeros(block, jnp.float32)
    best = jnp.full(block, -jnp.inf)
    best_id = jnp.full(block, -1)
    best_logit = jnp.full(block, -jnp.inf)
    for own_logits, own_ids in zip(logits, ids, strict=True):
        inside = own_logits - finite_top
        mass += jnp.sum(jnp.exp(inside), axis=1)
        weights = weigh(inside, own_ids, *values)
        highest = jnp.max(weights, axis=1)
        # If weights are equal the first token wins.
        token = jnp.min(
            jnp.where(weights == highest[:, None], own_ids, jnp.iinfo(jnp.int32).max), axis=1
        )
        logit = jnp.sum(jnp.where(own_ids == token[:, None], own_logits, 0.0), axis=1)
        better = highest > best
        best = jnp.where(better, highest, best)
        best_id = jnp.where(better, token, best_id)
        best_logit = jnp.where(better, logit, best_logit)
    top_ref[...] = top
    mass_ref[...] = mass
    ids_ref[...] = best_id
    logits_ref[...] = best_logit
