"""States of packed texts, computed window by window as they are needed: on CPUs alone.

There compute is the bottleneck, and slots that decide nothing are skipped (`Buckets.window_slots`
> 0). Accelerators compute whole chunks; for them skip this file, `TextPaths` and `copied`.

A chunk has one sequence per shard. Its slots are computed in windows of a fixed width: first the
required slots, then, while a window has room, slots that may be needed next. A draft is computed
piece by piece, up to the piece in which its row rejects. What two chunks share, mainly prompts, is
copied from one to the next.

    slot     0 1 2 3 4 5 6 7 8        two drafts of the prompt a b c
    token    a b c d e f g h i
    row 0    a b c d e f              requires a b c d, so that the first window of 6 slots holds
    row 1    a b c       g h i        a b c d g, and with e one slot that may be next
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import Layer
from specrl_jax.models.row_slices import gather_tokens, put_tokens
from specrl_jax.models.transformer import Transformer
from specrl_jax.packing import Sequences
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, on_shards

_LAST = np.iinfo(np.int32).max  # rank of a slot that is not needed


class TextStates(NamedTuple):
    """Results for the slots of m sequences; unknown slots contain any finite value."""

    hidden: Array  # [m, T, D], after the final norm
    layers: tuple[Layer, ...]  # of each policy layer, keys and values [m, T, K, H]
    known: Array  # bool [m, T]
    windows: Array  # int32 [], windows computed in this chunk
    routing: Array | None = None  # [m, T, L, k], as in `Tokens.routing`; None: not kept


@functools.partial(jax.jit, static_argnames="buckets")
def blank_states(spec: RolloutSpec, buckets: Buckets) -> TextStates:
    """Return the states of a chunk without known slots."""
    model = spec.model
    shape = (buckets.shards, buckets.sequence_slots)
    pair = (*shape, model.num_kv_heads, model.head_dim)

    def zeros(dtype, shape: tuple[int, ...], *dims: str | None) -> Array:
        return jnp.zeros(shape, dtype, out_sharding=axes("batch", None, *dims))

    def layer() -> Layer:
        return tuple(zeros(model.dtype, pair, "kv_heads", None) for _ in range(2))

    return TextStates(
        hidden=zeros(model.dtype, (*shape, model.embed_dim), None),
        layers=tuple(layer() for _ in range(model.num_layers)),
        known=zeros(jnp.bool_, shape),
        windows=jnp.int32(0),
        routing=jax.tree.map(
            lambda x: zeros(x.dtype, (*shape, *x.shape), *(None,) * len(x.shape)), spec.routing
        ),
    )


def copy_to_next_chunk(states: TextStates, copied: Array) -> TextStates:
    """Return the states of the next chunk.

    copied: int32 [m, T], slot of the previous chunk with the same result; -1: none.
    """

    def copy(states: TextStates) -> TextStates:
        take = functools.partial(gather_tokens, slots_BT=jnp.maximum(copied, 0))
        taken = jax.tree.map(take, (states.hidden, states.layers, states.routing))
        hidden, layers, routing = taken
        return states._replace(hidden=hidden, layers=layers, routing=routing)

    same = jnp.all((copied < 0) | (copied == jnp.arange(copied.shape[1])[None, :]))
    known = gather_tokens(states.known, jnp.maximum(copied, 0)) & (copied >= 0)
    states = jax.lax.cond(same, lambda states: states, copy, states)
    return states._replace(known=known, windows=jnp.int32(0))


def compute_slots(
    model: Transformer,
    sequences: Sequences,
    width: int,
    states: TextStates,
    nodes: Array,
    required: Array,
) -> TextStates:
    """Return the states with all required slots known.

    model: with unstacked layers. sequences: of the chunk, one per shard. width: slots of a window.
    nodes: int32 [b, S], slots of rows' tokens that may be computed, -1: none. required: bool
    [b, S], those that must be.
    """
    slots = states.known.shape[1]

    def compute_window(state: tuple) -> tuple:
        states, ranks = state
        chosen = on_shards(functools.partial(_lowest, width), ranks, like=ranks)
        here = jnp.minimum(chosen, slots - 1)
        hidden, layers = model(
            gather_tokens(sequences.tokens, here),
            cache=states.layers,
            positions_BT=sequences.depths,
            ends_BT=sequences.ends,
            slots_BT=chosen,
            gives_routing=states.routing is not None,
        )
        routing = None
        if states.routing is not None:
            layers, routing = layers
            routing = put_tokens(states.routing, routing, chosen)
        states = TextStates(
            hidden=put_tokens(states.hidden, hidden, chosen),
            layers=layers,
            known=put_tokens(states.known, jnp.ones_like(chosen, jnp.bool_), chosen),
            windows=states.windows + 1,
            routing=routing,
        )
        return states, put_tokens(ranks, jnp.full_like(chosen, _LAST), chosen)

    ranks = on_shards(_rank, states.known, nodes, required, like=states.known)
    state = (states, ranks)
    return jax.lax.while_loop(lambda state: jnp.any(state[1] == 0), compute_window, state)[0]


def _rank(known: Array, nodes: Array, required: Array) -> Array:
    """Return int32 [1, T]: 0 for required slots, others that may be computed by their depth.

    So a slot never comes before the slots that it attends to.
    """
    slots = known.shape[1]
    order = jnp.where(required, 0, 1 + jnp.arange(nodes.shape[1], dtype=jnp.int32)[None, :])
    places = jnp.where(nodes >= 0, nodes, slots)
    ranks = jnp.full(slots, _LAST).at[places].min(order, mode="drop")
    return jnp.where(known[0], _LAST, ranks)[None]


def _lowest(width: int, ranks: Array) -> Array:
    """Return the slots of the lowest ranks, int32 [1, width]; T in place of unneeded ones."""
    slots = jnp.argsort(ranks, axis=1, stable=True)[:, :width].astype(jnp.int32)
    asked = jnp.take_along_axis(ranks, slots, axis=1) < _LAST
    return jnp.where(asked, slots, ranks.shape[1])
