"""Tokens that a step emits: from left to right accepted draft tokens, then a sampled one.

The hidden states of a step's W tokens give W distributions. A draft token is accepted where it is
the token that the keyed noise samples from its distribution, or, if it belongs to a draft to
verify, where the acceptance rule says so.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.logprobs import map_tokens, token_logprobs
from specrl_jax.models.row_slices import read_slots
from specrl_jax.rollout.acceptance import (
    Residual,
    Verification,
    count_leading,
    in_top,
    residual_scores,
)
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.sampling import (
    likeliest_tokens,
    logprobs_at,
    sample,
    temper,
    truncate,
    uniforms,
)
from specrl_jax.sharding import reshard


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The draft tokens of a step."""

    tokens: Array  # int32 [b, W]
    draft_len: Array  # int32 [b], how many of them count
    verifying: Array  # bool [b], they are of the row's draft to verify


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """The tokens of a step: the first `accepted` are draft tokens, the next, if any, is sampled."""

    accepted: Array  # int32 [b]
    tokens: Array  # int32 [b, W]
    policy_logprobs: Array  # [b, W]
    sampling_logprobs: Array  # [b, W]
    likeliest: tuple[Array, Array] | None  # ids and log-probs [b, W, k]


def accept_or_sample(
    program: ProgramSpec, model, hidden: Array, rows: DecodeState, proposal: Proposal, verify: bool
) -> StepOutput:
    """Accept draft tokens from the left, and sample the token after them.

    hidden: [b, W, D], W states from a row's last token on. verify: of drafts to verify alone, and
    sample at one position only, as in `decode.decode_steps`.
    """
    tokens = proposal.tokens
    draft_len = proposal.draft_len
    width = tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    rule = program.accept
    by_rule = rows.draft is not None and not rule.samples_anew
    inputs = {
        "tokens": tokens,
        "positions": reshard(rows.lens[:, None] + steps, "batch", None),
    }
    if by_rule and rule.needs_distribution:
        inputs["top_ids"] = read_slots(rows.draft.top_ids, rows.lens, width)
    score = functools.partial(_score, program, rows.seeds, samples=not verify, verifies=by_rule)
    scores = map_tokens(score, model, hidden, inputs, program.logits_chunk)
    if verify:
        accepted, residual = rule.accept(_verification(program, rows, scores, inputs, draft_len))
        end = _sample_at_end(program, model, hidden, rows, accepted, residual)
        here = steps == accepted[:, None]
        emitted = (tokens, *scores["draft"])
        emitted = tuple(jnp.where(here, new[:, None], old) for old, new in zip(emitted, end))
        return StepOutput(accepted, *emitted, scores.get("likeliest"))
    emitted = scores["sampled"]
    accepted = count_leading(emitted[0] == tokens, draft_len)
    if by_rule:
        accepted_by_rule, _ = rule.accept(_verification(program, rows, scores, inputs, draft_len))
        accepted = jnp.where(proposal.verifying, accepted_by_rule, accepted)
        before = steps < accepted[:, None]
        draft = (tokens, *scores["draft"])
        emitted = tuple(jnp.where(before, old, new) for old, new in zip(draft, emitted))
    return StepOutput(accepted, *emitted, scores.get("likeliest"))


def _score(
    program: ProgramSpec,
    seeds: Array,
    logits: Array,
    inputs: dict,
    *,
    samples: bool,
    verifies: bool,
) -> dict:
    """Score the distributions at [b, t] positions: tokens sampled from them, and draft tokens, each
    with log-probs before and after truncation."""
    config = program.sampling
    logits = temper(logits, config)
    cut = truncate(logits, config)

    def logprob(logits: Array, tokens: Array, log_z: Array | None = None) -> Array:
        # Looked up: on a CPU a mask over the vocabulary would cost as much as log-sum-exp does.
        return logprobs_at(logits, tokens[..., None], log_z)[..., 0]

    scores = {}
    log_z = None
    if samples:
        tokens, sampling, log_z = sample(cut, seeds, inputs["positions"], config)
        log_z = log_z[..., None]
        policy = logprob(logits, tokens) if config.truncates else sampling
        scores["sampled"] = (tokens, policy, sampling)
    if verifies:
        sampling = logprob(cut, inputs["tokens"], log_z)
        policy = logprob(logits, inputs["tokens"]) if config.truncates else sampling
        scores["draft"] = (policy, sampling)
    if "top_ids" in inputs:
        scores["top_logprobs"] = logprobs_at(cut, inputs["top_ids"], log_z)
    if program.stored_logprobs:
        scores["likeliest"] = likeliest_tokens(cut, program.stored_logprobs, log_z)
    return scores


def _verification(
    program: ProgramSpec, rows: DecodeState, scores: dict, inputs: dict, draft_len: Array
) -> Verification:
    """Gather what the rule reads."""
    draft = rows.draft
    width = inputs["tokens"].shape[1]
    logprobs = scores["draft"][1]
    if not program.accept.needs_distribution:
        threshold = read_slots(draft.accept_threshold, rows.lens, width)
        return Verification(draft_len, logprobs, threshold)
    return Verification(
        draft_len,
        logprobs,
        uniforms=uniforms(rows.accept_seeds, inputs["positions"]),
        old_logprobs=read_slots(draft.logprobs, rows.lens, width),
        top_logprobs=scores["top_logprobs"],
        old_top_logprobs=read_slots(draft.top_logprobs, rows.lens, width),
        in_top=in_top(inputs["tokens"], inputs["top_ids"]),
    )


def _sample_at_end(
    program: ProgramSpec, model, hidden, rows: DecodeState, accepted, residual: Residual | None
) -> tuple[Array, Array, Array]:
    """Sample the token [b] at the position after the accepted ones, from the residual where there
    is one, else from π; returns it and its log-probs."""
    width = hidden.shape[1]
    config = program.sampling
    end = jnp.minimum(accepted, width - 1)
    here = jnp.arange(width)[None, :, None] == end[:, None, None]
    logits = model.logits(jnp.sum(jnp.where(here, hidden, 0), axis=1))
    logits = temper(logits, config)
    cut = truncate(logits, config)
    positions = rows.lens + end
    if residual is None:
        token, sampling, _ = sample(cut, rows.seeds, positions, config)
    else:
        top_ids = read_slots(rows.draft.top_ids, positions, 1)[:, 0]
        top_logprobs = read_slots(rows.draft.top_logprobs, positions, 1)[:, 0]
        weights = residual_scores(cut, top_ids, top_logprobs, residual)
        token, _, _ = sample(weights, rows.seeds, positions, config)
        sampling = token_logprobs(cut, token)
    return token, token_logprobs(logits, token) if config.truncates else sampling, sampling
