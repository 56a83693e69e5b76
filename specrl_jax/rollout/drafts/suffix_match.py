"""Drafts from a prompt's known responses: SRT (arXiv 2601.09083, section 3) without a tree.

SRT queries a tree of all substrings: where did the row's last tokens occur before, and what
followed? Here every decode step finds the answer in the responses themselves.

    source n   a b c d e …      own   … x b c        matched tokens by end   a b c d
    source p   b c f …                               of source n             0 1 2 0

A *source* is a response to the row's prompt, including its own. For every position of every source
`_match` counts how many tokens up to it equal the row's last ones. `_best_matches` finds the best
positions, `_continuations` the tokens after them, and `_vote` the continuation with the most
expected accepted tokens.

Differs from the paper, with at least as many accepted tokens in the replay of
test_suffix_match.py. A source votes with its two best positions; if equal, the nearer is better. A
vote weighs more if more of the last tokens agree beyond the first mismatch. The draft continues the
row's own text.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import axes, reshard

BEGIN = -1  # before a response: the prompt, which matches in full in each of its sources
EMPTY = -2  # not written yet
# Chosen on recorded responses of `tiny` and SmolLM2 and on corrupted Markov chains.
ALIGNED = 1.3  # factor of a vote for each aligned token; 1.0 is SRT
POSITIONS = 2  # positions per source that vote
# Matched lengths that `_vote` tries besides `depth`; more gain nothing.
LENGTHS = (1, 2, 3, 6, 16, 32)


@dataclasses.dataclass(frozen=True)
class SuffixDraftConfig:
    """Bounds on a draft's length; hashable. Names and defaults: `config.rollout.tree`."""

    depth: int  # last tokens of a row that are looked up
    factor: float  # after m matched tokens at most ⌊factor · m + offset⌋ are drafted
    offset: float
    min_prob: float  # least path probability (share of the votes) of a draft token

    def budget(self, matched: Array, width: int) -> Array:
        """Return the maximum number of draft tokens after `matched` tokens, in [0, width]."""
        tokens = jnp.floor(self.factor * matched + self.offset + 1e-6).astype(jnp.int32)
        return jnp.where(matched > 0, jnp.clip(tokens, 0, width), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SuffixIndex:
    """Known responses to Q prompts, N sources each; the same on every device."""

    # int32 [Q, N, depth + R + 1]. The first `depth` columns are BEGIN. Column depth + j is response
    # token j, or EMPTY if it is not written yet. Padding rows write to the last column, which is
    # never read.
    tokens: Array
    weights: Array  # float32 [N], of a source's votes
    depth: int = dataclasses.field(metadata={"static": True})
    live: int = dataclasses.field(metadata={"static": True})  # last sources, which rows write

    @property
    def slots(self) -> int:
        """R, the response slots of a source."""
        return self.tokens.shape[2] - self.depth - 1


@functools.partial(jax.jit, static_argnames=("live", "depth"))
def build(
    stored_QMR: Array, lens_QM: Array, weights: Array, *, live: int, depth: int
) -> SuffixIndex:
    """Return an index of M stored responses per prompt, then `live` empty sources of weight 1.

    stored: int32 [Q, M, R]. lens: int32 [Q, M], 0 where there is none. weights: float32 [M].
    """
    stored_QMR, lens_QM = reshard(stored_QMR, None, None, None), reshard(lens_QM, None, None)
    slots = stored_QMR.shape[2]
    inside = jnp.arange(slots)[None, None, :] < lens_QM[:, :, None]
    tokens = jnp.where(inside, stored_QMR, EMPTY).astype(jnp.int32)
    tokens = jnp.pad(tokens, ((0, 0), (0, live), (0, 1)), constant_values=EMPTY)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (depth, 0)), constant_values=BEGIN)
    weights = jnp.pad(reshard(weights, None), (0, live), constant_values=1.0)
    return SuffixIndex(tokens, weights, depth, live)


@functools.partial(jax.jit, donate_argnames="index")
def sync(index: SuffixIndex, tokens_BC: Array, lens_B: Array) -> SuffixIndex:
    """Write the tokens of all rows into the index's live sources.

    Row i of B = Q * G is sample i % G of prompt i // G. Columns after the response slots are
    ignored.
    """
    prompts = index.tokens.shape[0]
    inside = jnp.arange(index.slots)[None, :] < lens_B[:, None]
    texts = jnp.where(inside, tokens_BC[:, : index.slots], EMPTY)
    texts = reshard(texts, None, None).reshape(prompts, -1, index.slots)
    first = index.tokens.shape[1] - texts.shape[1]
    tokens = index.tokens.at[:, first:, index.depth : index.depth + index.slots].set(texts)
    return dataclasses.replace(index, tokens=tokens)


def append(
    index: SuffixIndex,
    prompts_b: Array,
    sources_b: Array,
    starts_b: Array,
    tokens_bW: Array,
    counts_b: Array,
) -> SuffixIndex:
    """Write the first `counts` tokens of each row at response position `starts` of its source.

    All arguments are int32 and split over the batch. Rows of count 0 write nothing. Tokens beyond
    the response slots are dropped.
    """
    prompts, sources, starts, counts = (
        reshard(x, None) for x in (prompts_b, sources_b, starts_b, counts_b)
    )
    tokens = reshard(tokens_bW, None, None)
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    dump = index.depth + index.slots
    columns = jnp.minimum(index.depth + starts[:, None] + offsets, dump)
    columns = jnp.where(offsets < counts[:, None], columns, dump)
    written = index.tokens.at[prompts[:, None], sources[:, None], columns].set(
        tokens, mode="promise_in_bounds"
    )
    return dataclasses.replace(index, tokens=written)


def propose(
    index: SuffixIndex,
    prompts_b: Array,
    sources_b: Array,
    lens_b: Array,
    width: int,
    config: SuffixDraftConfig,
) -> tuple[Array, Array]:
    """Draft up to `width` tokens for rows with `lens` tokens, recorded in their own sources.

    prompts, sources, lens: int32 [b], split over the batch, in any order. config: its depth is at
    most the index's. Returns drafts int32 [b, width] (0 after their ends) and their lengths int32
    [b].
    """
    # Rows are independent, and every device has the whole index: no communication.
    row = axes("batch")
    whole = jax.tree.map(lambda x: jax.P(*(None,) * x.ndim), index)
    return jax.shard_map(
        functools.partial(_propose, width=width, config=config),
        in_specs=(whole, row, row, row),
        out_specs=(axes("batch", None), row),
    )(index, prompts_b, sources_b, lens_b)


def _propose(index: SuffixIndex, prompts, sources, lens, *, width: int, config: SuffixDraftConfig):
    offsets = jnp.arange(config.depth, dtype=jnp.int32)[None, :]
    columns = index.depth - 1 + lens[:, None] - offsets
    own_bD = index.tokens.at[prompts[:, None], sources[:, None], columns].get(
        mode="promise_in_bounds"
    )
    keys = _match(index.tokens.at[prompts].get(mode="promise_in_bounds"), own_bD, lens, index)
    positions, matched, aligned = _best_matches(keys, lens, index.slots, config.depth)
    tokens = _continuations(index, prompts, sources, lens, positions, width)
    weights = jnp.tile(index.weights, POSITIONS)[None, :] * ALIGNED ** aligned.astype(jnp.float32)
    return _vote(tokens, matched, weights, index.tokens.shape[1], config)


def _match(text_bNC: Array, own_bD: Array, lens_b: Array, index: SuffixIndex) -> Array:
    """Return a key for each position, int32 [b, N, R]: the better the match, the larger; -1: none.

    own: the row's last tokens, newest first. Column i is the position after response token i - 1. A
    position counts only if it has a token, so the row's own newest position does not. A key packs
    three numbers, so that one maximum finds all of them: tokens matched without a gap, tokens
    matched in all, and the distance of the column from the row's length.
    """
    depth = own_bD.shape[1]
    slots = index.slots
    run = jnp.ones((*text_bNC.shape[:2], slots), bool)
    matched = aligned = jnp.zeros(run.shape, jnp.int32)
    # Shifted comparisons in one fused loop; nothing of size [b, N, R, D] is materialized.
    for t in range(depth):
        start = index.depth - 1 - t
        equal = text_bNC[:, :, start : start + slots] == own_bD[:, t][:, None, None]
        run &= equal
        matched += run
        aligned += equal
    written = text_bNC[:, :, index.depth : index.depth + slots] >= 0
    away = jnp.arange(slots, dtype=jnp.int32)[None, :] - lens_b[:, None]
    rank = 2 * slots - 2 * jnp.abs(away) + (away > 0)
    keys = (matched * (depth + 1) + aligned) * (2 * slots + 1) + rank[:, None, :]
    return jnp.where(written & (matched > 0), keys, -1)


def _best_matches(
    keys_bNR: Array, lens_b: Array, slots: int, depth: int
) -> tuple[Array, Array, Array]:
    """Return column, matched and aligned tokens of the best positions, [b, POSITIONS * N] each.

    The best position of every source comes first. Matched is 0 if a source has no such position.
    """
    folded = _fold(keys_bNR)
    best = [jnp.max(folded, axis=2)]
    for _ in range(POSITIONS - 1):
        rest = jnp.where(folded < best[-1][:, :, None], folded, -1)
        best.append(jnp.max(rest, axis=2))
    keys = jnp.concatenate(best, axis=1)
    rank = jnp.maximum(keys, 0) % (2 * slots + 1)
    both = jnp.maximum(keys, 0) // (2 * slots + 1)
    back = 2 * slots - rank
    away = jnp.where(back % 2 == 1, (back + 1) // 2, -(back // 2))
    column = jnp.clip(lens_b[:, None] + away, 0, slots - 1)
    return column, both // (depth + 1), both % (depth + 1)


def _fold(keys_bNR: Array) -> Array:
    """Return maxima over up to 8 positions that are far apart, in one vectorised pass."""
    slots = keys_bNR.shape[2]
    folds = min(8, max(1, slots // 16))
    part = -(-slots // folds)
    padding = ((0, 0), (0, 0), (0, part * folds - slots))
    keys = jnp.pad(keys_bNR, padding, constant_values=-1)
    parts = [keys[:, :, i * part : (i + 1) * part] for i in range(folds)]
    return functools.reduce(jnp.maximum, parts)


def _continuations(
    index: SuffixIndex, prompts, sources, lens, positions_bP: Array, width: int
) -> Array:
    """Return the `width` tokens after each position, int32 [b, P, W], EMPTY after a source's end.

    The row's own text has no end: the draft itself continues it. So the draft of a row that
    repeats itself repeats too (`a b c a b c` and a match of `c` continue `a b c a b c …`).
    """
    candidates = jnp.arange(positions_bP.shape[1], dtype=jnp.int32) % index.tokens.shape[1]
    own = candidates[None, :] == sources[:, None]
    period = jnp.where(own & (lens[:, None] > positions_bP), lens[:, None] - positions_bP, width)
    offsets = jnp.arange(width, dtype=jnp.int32)[None, None] % period[:, :, None]
    columns = positions_bP[:, :, None] + index.depth + offsets
    dump = index.depth + index.slots
    tokens = index.tokens.at[
        prompts[:, None, None], candidates[None, :, None], jnp.minimum(columns, dump)
    ].get(mode="promise_in_bounds")
    return jnp.where(columns < dump, tokens, EMPTY)


def _vote(
    tokens_bPW: Array,
    matched_bP: Array,
    weights_bP: Array,
    candidates: int,
    config: SuffixDraftConfig,
) -> tuple[Array, Array]:
    """Return the draft with the most expected accepted tokens: tokens [b, W], lens [b].

    The first `candidates` of the P continuations may become the draft; all P vote. For a matched
    length m, the voters are the continuations that match at least m tokens. A candidate's path
    probability at k is the share of the votes that start with the candidate's first k tokens. In a
    tree it is the product of count(child) / count(node) along the path. A candidate's score is the
    sum of its path probabilities over k within its budget. The draft is the candidate with the best
    score over all m; among equal scores the longest m wins, then the first candidate.
    """
    rows, _, width = tokens_bPW.shape
    lengths = {m for m in LENGTHS if m < config.depth} | {config.depth}
    lengths = jnp.asarray(sorted(lengths, reverse=True))
    may_vote = matched_bP[:, None, :] >= lengths[None, :, None]
    votes = jnp.where(may_vote, weights_bP[:, None, :], 0.0)
    votes /= jnp.maximum(jnp.sum(votes, axis=2, keepdims=True), jnp.finfo(jnp.float32).tiny)
    agreed = _agreed(tokens_bPW, candidates)
    budget = config.budget(matched_bP[:, :candidates], width)
    within = jnp.minimum(agreed, budget[:, None, :]).astype(jnp.float32)
    score = jnp.einsum("bmp,bpa->bma", votes, within, precision="highest")
    score = jnp.where(may_vote[:, :, :candidates], score, 0.0).reshape(rows, -1)
    best = jnp.argmax(score, axis=1)

    def pick(array: Array, index: Array) -> Array:
        return jnp.take_along_axis(array, index[:, None, None], axis=1)[:, 0]

    best_m, best_a = best // candidates, best % candidates
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    agreed = pick(jnp.swapaxes(agreed, 1, 2), best_a)
    share = jnp.sum(
        jnp.where(agreed[:, :, None] > offsets[:, None, :], pick(votes, best_m)[:, :, None], 0.0),
        axis=1,
    )
    budget = jnp.take_along_axis(budget, best_a[:, None], axis=1)
    kept = (share > 0) & (share >= config.min_prob) & (offsets < budget)
    return jnp.where(kept, pick(tokens_bPW, best_a), 0), jnp.sum(kept, axis=1, dtype=jnp.int32)


def _agreed(tokens_bPW: Array, candidates: int) -> Array:
    """Count the tokens that voter p and candidate a share from the start, int32 [b, P, A]."""
    tokens = jnp.swapaxes(tokens_bPW, 1, 2)
    run = True
    agreed = 0
    for k in range(tokens.shape[1]):
        voter = tokens[:, k, :, None]
        candidate = tokens[:, k, None, :candidates]
        run &= (voter == candidate) & (candidate >= 0)
        agreed += run.astype(jnp.int32)
    return agreed
