"""Which draft tokens are kept, and what the next token is drawn from.

All functions are of one position, or of rows of positions side by side: given the law at a
position, a token is the draft's or a fresh one, however wide the program that computed the law.
The first token that is not kept ends the *verified prefix*.

`ratio` and `random_cut` are SPEC-RL (arXiv 2509.23232) and its ablation. `ratio_residual` and
`block` (arXiv 2403.10444) emit exactly the current law π, if the draft came from π_old. They need
more of π_old than the draft's own probabilities: its k likeliest tokens are kept one by one, the
rest as one outcome, the *tail*. A draft ends with its first tail token: if that is accepted, a new
token is drawn from the tail of π, and nothing behind it can be used.

    stored law at one position, k = 2     7: 0.5   3: 0.3   tail: 0.2
    draft token 3 is the outcome 3        accepted by π(3) / 0.3
    draft token 9 is the outcome tail     accepted by (1 - π(7) - π(3)) / 0.2, then drawn from
                                          π without 7 and 3

Differs from the paper (SPEC-RL): the uniforms are fresh at every step (keyed by it). The published
code seeds them once, so that a token accepted in one epoch meets the same number in the next. As
published, `ratio` draws the token behind the prefix from π, not from the residual, so even at
lenience 1 the emitted law is b = min(π_old, ℓ π) + d π with d = 1 - Σ min(π_old, ℓ π), not π.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import COMPUTE, reshard, spec

_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a rule asks of the rollout.

    needs_law: drafts carry the k likeliest tokens of their law, and the token behind the prefix is
    drawn from `residual_scores`. whole_draft: nothing is decided before the draft is scored to its
    end. lenience: log_lenience has a meaning. importance_weight: of accepted tokens, as in
    `off_policy.importance_weights`; None where the rule emits exactly π.
    """

    needs_law: bool = False
    whole_draft: bool = False
    lenience: bool = False
    importance_weight: Callable[[Array, Array, Array], Array] | None = None


def ratio_weight(log_ratio: Array, log_lenience: Array, rejected_mass: Array) -> Array:
    """(1 − d)·max(r, 1/ℓ)"""
    return (1 - rejected_mass) * jnp.exp(jnp.maximum(log_ratio, -log_lenience))


def random_weight(log_ratio: Array, log_lenience: Array, rejected_mass: Array) -> Array:
    """r"""
    return jnp.exp(log_ratio)


RULES = {
    "ratio": Rule(lenience=True, importance_weight=ratio_weight),
    "random": Rule(importance_weight=random_weight),
    "ratio_residual": Rule(needs_law=True),
    "block": Rule(needs_law=True, whole_draft=True),
    "match": Rule(),  # the drawn token against the draft's: nothing of it is here
}


def least_logprobs(uniforms_BW: Array, draft_logprobs_BW: Array, log_lenience: Array) -> Array:
    """Log π(y) from which on `ratio` keeps a token, float32 [B, W] nats: all of

        u <= min(1, ℓ π(y) / π_old(y))    (arXiv 2509.23232, eq. 5)

    that is known before the policy runs. draft_logprobs: of the draft tokens under the law they
    were sampled or last kept by. log_lenience: scalar; inf keeps everything, -inf nothing.
    """
    least = jnp.log(uniforms_BW) + draft_logprobs_BW - log_lenience
    # What the policy never draws is kept by full reuse alone.
    least = jnp.maximum(least, jnp.where(jnp.isposinf(log_lenience), -jnp.inf, _LOWEST))
    return jnp.where(jnp.isneginf(log_lenience), jnp.inf, least)


def random_cut(uniforms_B: Array, lens_B: Array) -> Array:
    """Rejection position uniform over the draft (SPEC-RL's ablation "random reuse"), int32 [B]."""
    cut = jnp.floor(uniforms_B * lens_B).astype(jnp.int32)
    return jnp.minimum(cut, jnp.maximum(lens_B - 1, 0))


def leading(accept_BW: Array, lens_B: Array) -> Array:
    """Number of leading True within each row's first `lens` entries, int32 [B]."""
    width = accept_BW.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(accept_BW & (steps < lens_B[:, None]), width, steps), axis=1)


def in_top(tokens: Array, top_ids: Array) -> Array:
    """Whether tokens [...] are among top_ids [..., k], bool [...]; False: outcome "tail"."""
    return jnp.any(tokens[..., None] == top_ids, axis=-1)


def ratio_residual(
    uniforms_BW: Array,
    logprobs_BW: Array,
    draft_logprobs_BW: Array,
    now_top_BWk: Array,
    old_top_BWk: Array,
    in_top_BW: Array,
) -> tuple[Array, Array]:
    """Speculative sampling's rule, u <= min(1, π(z) / π_old(z)) for the coarse outcome z.

    now_top, old_top: float32 [B, W, k] log-probs under π and π_old of the stored ids. Returns
    (accept, tail), bool [B, W]: the draft token is kept; its tail outcome is accepted. At the first
    position without `accept`, the token is drawn from `residual_scores(..., tail, log_scale=0)`.
    Source: arXiv 2211.17192, algorithm 1; exact.
    """
    log_ratio = _coarse_ratio(logprobs_BW, draft_logprobs_BW, now_top_BWk, old_top_BWk, in_top_BW)
    accept = jnp.log(uniforms_BW) <= log_ratio
    return accept & in_top_BW, accept & ~in_top_BW


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """What block verification decides, arrays [B].

    kept: int32, draft tokens to keep. log_scale: float32, log P of the kept prefix, for
    `residual_scores`; inf where the whole draft is kept. tail: bool, the draft's last outcome was
    the tail and is accepted (not counted in `kept`).
    """

    kept: Array
    log_scale: Array
    tail: Array


def block(
    uniforms_BW: Array,
    logprobs_BW: Array,
    draft_logprobs_BW: Array,
    now_top_BWk: Array,
    old_top_BWk: Array,
    in_top_BW: Array,
    lens_B: Array,
) -> Block:
    """Block verification of whole drafts (arXiv 2403.10444, algorithm 2).

        P_0 = 1,  P_i = min(1, P_{i-1} π(z_i) / π_old(z_i))
        s_i = Σ_x (P_i π(x) - π_old(x))_+ at position i + 1
        h_i = s_i / (s_i + 1 - P_i),  h_T = P_T

    The prefix that is kept is the longest of length i with u_i <= h_i, else 0; the token behind it
    is drawn ∝ (P_i π - π_old)_+, or from π where the whole draft is kept.

    uniforms: float32 [B, W], that of token i for the prefix that ends with it; the rest as in
    `ratio_residual`. lens: int32 [B], lengths of the drafts, at most W.
    """
    columns = jnp.arange(uniforms_BW.shape[1], dtype=jnp.int32)[None, :]
    log_p = _joint_ratio(
        _coarse_ratio(logprobs_BW, draft_logprobs_BW, now_top_BWk, old_top_BWk, in_top_BW)
    )
    # The token that ends the draft is an outcome still.
    outcomes = jnp.minimum(leading(in_top_BW, lens_B) + 1, lens_B)

    # A prefix that may go on is judged by the law of the position behind it, one column later.
    log_p_before = jnp.pad(log_p[:, :-1], ((0, 0), (1, 0)))
    uniforms_before = jnp.pad(uniforms_BW[:, :-1], ((0, 0), (1, 0)))
    keep = uniforms_before <= _keep_prob(log_p_before, now_top_BWk, old_top_BWk)
    cut = jnp.max(jnp.where(keep & (columns < outcomes[:, None]), columns, 0), axis=1)

    last = columns == outcomes[:, None] - 1
    whole = jnp.any(last & (jnp.log(uniforms_BW) <= log_p), axis=1) | (lens_B <= 0)
    tail = jnp.any(last & ~in_top_BW, axis=1) & whole
    return Block(
        kept=jnp.where(whole, outcomes - tail, cut),
        log_scale=jnp.where(whole, jnp.inf, _at(log_p_before, cut)),
        tail=tail,
    )


def residual_scores(
    scores: Array, top_ids: Array, top_logprobs: Array, tail: Array, log_scale: Array
) -> Array:
    """Log-weights [..., V] of the token behind the prefix, ∝ (P π - π_old)_+, unnormalised.

    scores: [..., V] of π, tempered and truncated. top_ids, top_logprobs: [..., k] of π_old at this
    position. tail: bool [...], the draft's tail outcome was accepted: π without top_ids instead.
    log_scale: [...] log P: 0 after `ratio_residual`; inf gives π itself. Where no token has any
    weight, π itself as well.
    """
    now = logprobs_at(scores, top_ids)
    # Over P, so that P = inf leaves π: log(π - π_old / P) = log π + log(1 - π_old / (P π)).
    excess = _with_tail(top_logprobs) - log_scale[..., None] - _with_tail(now)
    factor = jnp.where(excess < 0, jnp.log1p(-jnp.exp(jnp.minimum(excess, 0.0))), -jnp.inf)
    factor = jnp.where(jnp.isposinf(log_scale)[..., None], 0.0, factor)  # also where π is 0
    in_tail = jnp.where(tail, 0.0, factor[..., -1])
    at_ids = jnp.where(tail[..., None], -jnp.inf, factor[..., :-1])
    weights = _add_at(scores, top_ids, at_ids, elsewhere=in_tail)
    empty = jnp.max(weights, axis=-1, keepdims=True) == -jnp.inf
    return jnp.where(empty, scores, weights)


def logprobs_at(scores: Array, ids: Array, log_z: Array | None = None) -> Array:
    """log softmax(scores [..., V]) at ids [..., k], float32 nats; -inf where an id is -1.

    log_z: [..., 1], log Σ exp(scores), where it is known.
    """
    inner = (None,) * (scores.ndim - 2)

    @functools.partial(jax.shard_map, out_specs=spec("batch", *inner, "vocab", None))
    def pick(scores: Array, ids: Array) -> Array:
        local, here = _local(scores, ids)
        values = jnp.take_along_axis(scores, local, axis=-1, mode="clip")
        return jnp.where(here, values, 0.0)[..., None, :]

    pieces = pick(reshard(scores, "batch", *inner, "vocab"), reshard(ids, "batch", *inner, None))
    # Not `psum`, which stays in a CPU's program of one piece, as a collective operation.
    values = jnp.sum(pieces, axis=-2)
    if log_z is None:
        log_z = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.where(ids >= 0, values - log_z, -jnp.inf)


def likeliest_tokens(scores: Array, k: int, log_z: Array | None = None) -> tuple[Array, Array]:
    """The k likeliest tokens of softmax(scores [..., V]), likeliest first.

    Returns ids int32 and log-probs float32 nats, [..., k]; -1 and -inf where V < k. On a split
    vocabulary every piece finds its own k first, so that scores are never gathered. log_z: as in
    `logprobs_at`.
    """
    inner = (None,) * (scores.ndim - 2)

    @functools.partial(jax.shard_map, out_specs=spec("batch", *inner, "vocab"))
    def of_piece(scores: Array) -> tuple[Array, Array]:
        size = scores.shape[-1]
        values, ids = jax.lax.top_k(scores, min(k, size))
        return values, ids + size * jax.lax.axis_index(COMPUTE["vocab"])

    found = of_piece(reshard(scores, "batch", *inner, "vocab"))
    values, ids = (reshard(x, "batch", *inner, None) for x in found)
    values, order = jax.lax.top_k(values, min(k, values.shape[-1]))
    ids = jnp.take_along_axis(ids, order, axis=-1)
    if log_z is None:
        log_z = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    logprobs = values - log_z
    pad = ((0, 0),) * (scores.ndim - 1) + ((0, k - ids.shape[-1]),)
    return jnp.pad(ids, pad, constant_values=-1), jnp.pad(logprobs, pad, constant_values=-jnp.inf)


def _add_at(scores: Array, ids: Array, values: Array, elsewhere: Array) -> Array:
    """scores [..., V] + values [..., k] at ids, + elsewhere [...] at all other tokens."""
    inner = (None,) * (scores.ndim - 2)

    @functools.partial(jax.shard_map, out_specs=spec("batch", *inner, "vocab"))
    def add(scores: Array, ids: Array, values: Array, elsewhere: Array) -> Array:
        local, here = _local(scores, ids)
        change = jnp.broadcast_to(elsewhere[..., None], scores.shape)
        local = jnp.where(here, local, scores.shape[-1])  # dropped
        return scores + jnp.put_along_axis(
            change, local, values, axis=-1, mode="drop", inplace=False
        )

    return add(
        reshard(scores, "batch", *inner, "vocab"),
        reshard(ids, "batch", *inner, None),
        reshard(values, "batch", *inner, None),
        reshard(elsewhere, "batch", *inner),
    )


def _local(scores: Array, ids: Array) -> tuple[Array, Array]:
    """Places of ids in this device's piece of the vocabulary, and whether they are in it."""
    size = scores.shape[-1]
    local = ids - size * jax.lax.axis_index(COMPUTE["vocab"])
    return local, (ids >= 0) & (local >= 0) & (local < size)


def _with_tail(top_logprobs: Array) -> Array:
    """[..., k] → [..., k + 1]: the log-mass of all other tokens behind."""
    rest = 1.0 - jnp.sum(jnp.exp(top_logprobs), axis=-1, keepdims=True)
    return jnp.concatenate([top_logprobs, jnp.log(jnp.maximum(rest, 0.0))], axis=-1)


def _coarse_ratio(logprobs, draft_logprobs, now_top, old_top, in_top) -> Array:
    """log π(z) / π_old(z) of the draft's coarse outcomes [B, W]; -inf where π_old(z) is 0."""
    now = jnp.where(in_top, logprobs, _with_tail(now_top)[..., -1])
    old = jnp.where(in_top, draft_logprobs, _with_tail(old_top)[..., -1])
    return jnp.where(old > -jnp.inf, now - old, -jnp.inf)


def _joint_ratio(log_ratio: Array) -> Array:
    """log P_i = min(0, log P_{i-1} + log_ratio_i) over [B, W], from log P_0 = 0.

    Token by token: cheap beside a pass of the model, and a difference of cumulative sums would lose
    digits on long drafts.
    """

    def step(log_p: Array, change: Array) -> tuple[Array, Array]:
        log_p = jnp.minimum(log_p + change, 0.0)
        return log_p, log_p

    _, log_p = jax.lax.scan(step, jnp.zeros_like(log_ratio[:, 0]), log_ratio.T, unroll=8)
    return log_p.T


def _keep_prob(log_p: Array, now_top: Array, old_top: Array) -> Array:
    """h of prefixes with joint ratio P [B, W], from the laws of the positions behind them."""
    gain = jnp.exp(log_p[..., None] + _with_tail(now_top)) - jnp.exp(_with_tail(old_top))
    gain = jnp.sum(jnp.maximum(gain, 0.0), axis=-1)
    whole = gain - jnp.expm1(log_p)
    # 0 / 0: P = 1 and equal laws. The next token is then kept for certain, and so is the prefix.
    return jnp.where(whole > 0, gain / whole, 1.0)


def _at(values_BW: Array, columns_B: Array) -> Array:
    """values at one column of each row."""
    here = jnp.arange(values_BW.shape[1])[None, :] == columns_B[:, None]
    return jnp.sum(jnp.where(here, values_BW, 0.0), axis=1)
