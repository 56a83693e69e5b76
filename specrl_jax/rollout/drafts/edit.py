"""Edits of drafts: without log-probs, without some rows, or up to the end of a turn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.stop_strings import NOTHING, StopStrings, turn_ends
from specrl_jax.sharding import reshard
from specrl_jax.types import Drafts, Rollout


def as_drafts(responses: Rollout | Drafts) -> Drafts:
    """Return responses as drafts for the match rule, which reads only ids and lengths."""
    return Drafts(responses.tokens.only(), responses.lens)


@jax.jit
def without_drafts(drafts: Drafts, marked: Array) -> Drafts:
    """Return drafts [B], of length 0 in `marked` rows, bool [B], on host or device."""
    return dataclasses.replace(drafts, lens=jnp.where(reshard(marked, "batch"), 0, drafts.lens))


@functools.partial(jax.jit, static_argnames=("eos_ids", "stop"))
def turn_drafts(
    drafts: Drafts,
    holds: Rollout | Rows | None,
    done: Array | None,
    eos_ids: tuple[int, ...],
    stop: StopStrings | None = None,
) -> Drafts:
    """Return drafts [B], each cut at the end of its row's next turn.

    A draft is valid only if it starts with all tokens that its row has; else its length is 0. Its
    length includes these tokens.

    holds: tokens of the rows; None: they have none. done: bool [B], rows that get no draft; only
    used with `holds`.
    """
    slots = drafts.tokens.ids.shape[1]
    positions = jnp.arange(slots)[None, :]
    begin = jnp.zeros_like(drafts.lens) if holds is None else holds.lens
    same = drafts.lens > begin
    if holds is not None:
        differ = (drafts.tokens.ids != holds.tokens.ids[:, :slots]) & (positions < begin[:, None])
        same &= ~jnp.any(differ, axis=1) & ~done
    own = jnp.where(positions < begin[:, None], NOTHING, drafts.tokens.ids)
    before = ((0, 0), (stop.window if stop else 0, 0))
    ends = turn_ends(eos_ids, stop, jnp.pad(own, before, constant_values=NOTHING))
    ends &= (positions >= begin[:, None]) & (positions < drafts.lens[:, None])
    first = jnp.argmax(ends, axis=1).astype(jnp.int32) + 1
    lens = jnp.where(jnp.any(ends, axis=1), first, drafts.lens)
    return dataclasses.replace(drafts, lens=jnp.where(same, lens, 0))
