"""What a step emits: from left to right a candidate if it is accepted, else a token that is drawn.

The hidden states of a step's W tokens give W laws. A candidate is accepted where it is the token
that the keyed noise draws from its law (match), or where the configured rule keeps it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.logprobs import map_tokens, token_logprobs
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.engine.decode_state import DecodeState, column_at, cut_columns
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.sampling import sample, sample_scored, temper, truncate, uniforms
from specrl_jax.sharding import reshard, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Of a step: tokens [b, W] with their log-probs, of which the first `accepted` [b] are
    candidates and the next, if any, is drawn."""

    accepted: Array
    tokens: Array
    policy: Array
    sampling: Array
    top: tuple[Array, Array] | None


def accept_or_sample(
    setup, model, hidden, rows: DecodeState, candidates, offered, judged, wide: bool
) -> StepOutput:
    """Accept candidates from the left, and draw the token behind them.

    hidden: [b, W, D], W states from a row's last token on. candidates: int32 [b, W], of which the
    first `offered` int32 [b] are meant. judged: bool [b], rows whose candidates are of a pending
    draft. wide: draw at one position only, as in `decode.decode_steps`.
    """
    width = candidates.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    positions = reshard(rows.lens[:, None] + steps, "batch", None)
    by_rule = rows.draft is not None and setup.accept != "match"
    inputs = {"candidates": candidates, "positions": positions}
    if by_rule and acceptance.RULES[setup.accept].needs_law:
        inputs["top_ids"] = cut_columns(rows.draft.top_ids, rows.lens, width)
    laws = functools.partial(_laws, setup, rows.seeds, draws=not wide, judges=by_rule)
    at = map_tokens(laws, model, hidden, inputs, setup.logits_chunk)
    accept = jnp.zeros(candidates.shape, bool, out_sharding=spec("batch", None))
    if not wide:
        accept = at["drawn"][0] == candidates
    left = None
    if by_rule:
        accepted, left = _judge(setup, rows, at, inputs, offered)
        accept = jnp.where(judged[:, None], accepted, accept)
    count = acceptance.leading(accept, offered)
    drawn = at.get("drawn")
    if drawn is None or left is not None:
        left = None if left is None else (judged, *left(count))
        ended = _draw_at_end(setup, model, hidden, rows, count, left)
        here = steps == count[:, None]
        if drawn is None:
            drawn = (candidates, *at["candidate"])
        else:
            here &= judged[:, None]
        drawn = tuple(jnp.where(here, new[:, None], old) for old, new in zip(drawn, ended))
    if "candidate" in at:  # else an accepted candidate is the token that was drawn
        kept = steps < count[:, None]
        drawn = tuple(
            jnp.where(kept, old, new) for old, new in zip((candidates, *at["candidate"]), drawn)
        )
    return StepOutput(count, *drawn, at.get("top"))


def _laws(setup: ProgramSpec, seeds, logits, inputs, *, draws: bool, judges: bool) -> dict:
    """What a step needs of the laws at [b, t] positions: tokens drawn from them and candidates,
    each with log-probs under the policy and under the sampling law."""
    logits = temper(logits, setup.sampling)
    cut = truncate(logits, setup.sampling)

    def scored(scores: Array, tokens: Array, log_z: Array | None = None) -> Array:
        # Looked up: on a CPU a mask over the vocabulary would cost as much as log-sum-exp does.
        return acceptance.logprobs_at(scores, tokens[..., None], log_z)[..., 0]

    found, log_z = {}, None
    if draws:
        tokens, sampling, log_z = sample_scored(cut, seeds, inputs["positions"], setup.sampling)
        log_z = log_z[..., None]
        policy = scored(logits, tokens) if setup.sampling.truncates else sampling
        found["drawn"] = (tokens, policy, sampling)
    if judges:
        sampling = scored(cut, inputs["candidates"], log_z)
        policy = scored(logits, inputs["candidates"]) if setup.sampling.truncates else sampling
        found["candidate"] = (policy, sampling)
    if "top_ids" in inputs:
        found["now_top"] = acceptance.logprobs_at(cut, inputs["top_ids"], log_z)
    if setup.stored_logprobs:
        found["top"] = acceptance.likeliest_tokens(cut, setup.stored_logprobs, log_z)
    return found


def _judge(setup: ProgramSpec, rows: DecodeState, at: dict, inputs: dict, offered: Array):
    """The configured rule's accepted candidates, bool [b, W], and for rules with a residual a
    function of their number [b] that gives (tail, log_scale) [b] for the token behind them."""
    pending, width = rows.draft, inputs["candidates"].shape[1]
    if "now_top" not in at:
        return at["candidate"][1] >= cut_columns(pending.least, rows.lens, width), None
    noise = uniforms(rows.accept_seeds, inputs["positions"])
    old = cut_columns(pending.logprobs, rows.lens, width)
    old_top = cut_columns(pending.top_logprobs, rows.lens, width)
    inside = acceptance.in_top(inputs["candidates"], inputs["top_ids"])
    laws = (noise, at["candidate"][1], old, at["now_top"], old_top, inside)
    if setup.accept == "block":
        block = acceptance.block(*laws, offered)
        columns = jnp.arange(width, dtype=jnp.int32)[None, :]
        return columns < block.kept[:, None], lambda count: (block.tail, block.log_scale)
    accepted, tail = acceptance.ratio_residual(*laws)

    def left(count: Array) -> tuple[Array, Array]:
        rejected = count < offered
        tail_here = column_at(tail, jnp.minimum(count, width - 1)) & rejected
        return tail_here, jnp.where(rejected, 0.0, jnp.inf)

    return accepted, left


def _draw_at_end(setup, model, hidden, rows: DecodeState, count: Array, left):
    """Token [b] and its log-probs at the position behind the accepted candidates.

    left: None, or (rows [b] whose token is drawn from what their rule leaves of the law, tail,
    log_scale).
    """
    width = hidden.shape[1]
    end = jnp.minimum(count, width - 1)
    here = jnp.arange(width)[None, :, None] == end[:, None, None]
    logits = model.logits(jnp.sum(jnp.where(here, hidden, 0), axis=1))
    logits = temper(logits, setup.sampling)
    cut = truncate(logits, setup.sampling)
    positions = rows.lens + end
    if left is None:
        token, sampling, _ = sample_scored(cut, rows.seeds, positions, setup.sampling)
    else:
        judged, tail, log_scale = left
        top_ids = column_at(rows.draft.top_ids, positions)
        top_logprobs = column_at(rows.draft.top_logprobs, positions)
        rest = acceptance.residual_scores(cut, top_ids, top_logprobs, tail, log_scale)
        law = jnp.where(judged[:, None], rest, cut)
        token = sample(law, rows.seeds, positions, setup.sampling)
        sampling = token_logprobs(cut, token)
    return token, token_logprobs(logits, token) if setup.sampling.truncates else sampling, sampling
