"""`extend` brings rows up to date: whatever a row has and its cache has not.

A row that begins has a prompt; it may hold tokens (a resumed row, an earlier turn); it may have a
draft. The host packs these of many rows, every distinct prefix once (`prefixes.py`). One program
computes the sequences chunk by chunk, writes keys and values into free places of the running batch,
decides which tokens of the drafts are accepted, and samples the token after them. There is no other
way to fill a cache, or to verify a draft.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3, nothing held
    tokens          a b c | x y z          draft x y z
    states of         c   x y z            give distributions at positions 0, 1, 2, 3
    x accepted, y not, w sampled           lens = 2, last = w: the next step feeds w at slot 4

A row without a draft is one whose draft has no tokens. Shapes follow from the configuration alone:
how many chunks hold tokens, how many rows begin, and how long the longest draft is, are counts of
loops. A rejected token needs no cleaning up: it is not counted, and its slot is written over later.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.draft_head import DraftHead
from specrl_jax.models.kv_cache import KVCache, take_nodes, write_rows
from specrl_jax.models.logprobs import token_logprobs
from specrl_jax.models.row_slices import read_slots, take_slots, write_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.acceptance import (
    Residual,
    Verification,
    count_leading,
    in_top,
    residual_scores,
)
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StopCondition, is_eos, progress
from specrl_jax.rollout.engine.prefixes import Prefixes
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.rows import PADDING, Rows, gather, put_rows
from specrl_jax.rollout.sampling import (
    likeliest_tokens,
    logprobs_at,
    sample,
    temper,
    truncate,
    uniforms,
)
from specrl_jax.sharding import axes, on_shards, reshard, take_own_rows
from specrl_jax.types import Drafts, Source


class RowBlock(NamedTuple):
    """Rows of every shard that are decided together, int32."""

    rows: Array  # [b], -1: none
    places: Array  # [b], outside the batch: none
    draft_ends: Array  # [b]
    nodes: Array  # [b, S]


@functools.partial(
    jax.jit, static_argnames=("program", "buckets"), donate_argnames=("cache", "rows")
)
def extend(
    program: ProgramSpec,
    buckets: Buckets,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    all_rows: Rows,
    drafts: Drafts | None,
    log_lenience: Array,
    prefixes: Prefixes,
    stop: StopCondition,
) -> tuple[KVCache, Rows, Array, Array]:
    """The running batch with the rows of `prefixes` in their places.

    all_rows: [B], of which some begin, with what they hold. drafts: [B], for the acceptance rule to
    verify; a draft begins with what its row holds. None: the run has none. log_lenience: nats.

    Returns the cache, the rows, int32 [2] tokens of drafts that were verified and those that were
    accepted, and what `decode.progress` returns.
    """
    model = Transformer(program.model, weights | {"layers": weights["stacked"]})
    layers = program.model.num_layers
    split = dict.fromkeys(("first_row", "rows", "draft_ends"), ("batch", None))
    packed = ("tokens", "depths", "ends", "parents")
    split |= dict.fromkeys(packed, (None, "batch", None))
    split |= {"count": (), "blocks": (None,), "nodes": ("batch", None, None)}
    prefixes = Prefixes(**{n: reshard(x, *split[n]) for n, x in prefixes._asdict().items()})

    free = on_shards(lambda done: jnp.argsort(~done, stable=True), rows.done, like=rows.lens)

    def of_chunk(chunk: Array, state: tuple) -> tuple:
        tokens, depths, ends, parents = (getattr(prefixes, name)[chunk] for name in packed)
        hidden, stacked = model(tokens, positions_BT=depths, ends_BT=ends, gives_cache=True)
        of_head = []
        if program.draft_head is not None:
            head = DraftHead(program.model, weights["draft_head"])
            places = {"positions_BT": depths, "ends_BT": ends}
            of_head = [head(take_slots(hidden, parents), model.lookup(tokens), **places)[1]]

        def of_block(number: Array, state: tuple) -> tuple:
            cache, rows, counts = state
            block = _take_block(prefixes, free, chunk, number, buckets.block_rows)
            fresh = [tuple(x[i] for x in stacked) for i in range(layers)]
            cache = write_rows(cache, fresh + of_head, block.nodes, block.places)
            begun, new = _begin(
                program, buckets.draft_columns, model, hidden, all_rows, drafts, log_lenience, block
            )
            return cache, put_rows(rows, begun, block.places), counts + new

        return jax.lax.fori_loop(0, prefixes.blocks[chunk], of_block, state)

    state = (cache, rows, jnp.zeros(2, jnp.int32))
    cache, rows, counts = jax.lax.fori_loop(0, prefixes.count, of_chunk, state)
    return cache, rows, counts, progress(rows, stop)


def _take_block(
    prefixes: Prefixes, free: Array, chunk: Array, number: Array, size: int
) -> RowBlock:
    """Take the rows of block `number` of a chunk, `size` of each shard. free: int32 [b], places of
    the running batch, the free ones first."""

    def local(
        chunk: Array, number: Array, free: Array, first_row: Array, *arrays: Array
    ) -> RowBlock:
        start = first_row[0, chunk] + number * size
        index = start + jnp.arange(size)
        real = index < first_row[0, chunk + 1]
        rows, draft_ends, nodes = (jax.lax.dynamic_slice_in_dim(x[0], start, size) for x in arrays)
        places = free.at[jnp.minimum(index, free.shape[0] - 1)].get(mode="promise_in_bounds")
        return RowBlock(
            jnp.where(real, rows, -1), jnp.where(real, places, PADDING), draft_ends, nodes
        )

    layouts = RowBlock(*(axes("batch"),) * 3, axes("batch", None))
    take = jax.shard_map(local, out_specs=layouts, check_vma=False)
    arrays = (prefixes.rows, prefixes.draft_ends, prefixes.nodes)
    return take(chunk, number, free, prefixes.first_row, *arrays)


def _begin(
    program: ProgramSpec,
    columns: int,
    model: Transformer,
    hidden: Array,
    all_rows: Rows,
    drafts: Drafts | None,
    log_lenience: Array,
    block: RowBlock,
) -> tuple[Rows, Array]:
    """The block's rows after the accepted tokens of their drafts and one that is sampled, and int32
    [2], as `extend` counts. hidden: [m, T, D], of the chunk's sequences."""
    rows = gather(all_rows, block.rows)
    held = rows.lens
    depths = rows.prompt_lens + held - 1  # of the state that decides on the next token
    slots = block.nodes.shape[1]
    nodes = jnp.pad(block.nodes, ((0, 0), (0, columns)), constant_values=-1)

    def states_at(offset: Array, count: int) -> Array:
        """States [b, count, D] from `offset` tokens after the first that decides on."""
        read = read_slots(nodes, jnp.minimum(depths + offset, slots), count)
        return take_nodes(hidden, read)

    def logits_at(offset: Array, count: int) -> Array:
        """Logits [b, count, V] in these states."""
        return model.logits(states_at(offset, count))

    if drafts is None:
        accepted = jnp.zeros_like(held)
        draft_len = accepted
        residual = None
        scores = {}
        tokens = jnp.zeros((len(held), 1), jnp.int32, out_sharding=axes("batch", None))
    else:
        own = on_shards(take_own_rows, drafts, jnp.maximum(block.rows, 0), like=drafts)
        width = -(-program.response_slots // columns) * columns
        own = _aligned(own, held, width)
        draft_len = jnp.where(rows.done, 0, jnp.maximum(block.draft_ends - held, 0))
        tokens = own.tokens
        verify = functools.partial(_verify, program, columns, rows, own, draft_len, log_lenience)
        accepted, residual, scores = verify(logits_at)
    state = states_at(accepted, 1)
    end = _sample_at_end(program, rows, model.logits(state)[:, 0], accepted, residual)
    if program.draft_head is not None:
        rows = dataclasses.replace(rows, last_state=state[:, 0])
    return _write(program, rows, tokens, draft_len, accepted, scores, end)


def _aligned(drafts: Drafts, held: Array, width: int) -> Drafts:
    """The drafts [b, `width`] from the first token on that a row does not hold; zeros after it."""

    def align(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = jnp.pad(x, ((0, 0), (0, width), *((0, 0),) * (x.ndim - 2)))
        return read_slots(x, held, width)

    names = ("tokens", "sampling_logprobs", "top_ids", "top_logprobs")
    return dataclasses.replace(drafts, **{name: align(getattr(drafts, name)) for name in names})


def _verify(
    program: ProgramSpec,
    columns: int,
    rows: Rows,
    drafts: Drafts,
    draft_len: Array,
    log_lenience: Array,
    logits_at,
) -> tuple[Array, Residual | None, dict]:
    """Decide on drafts, some columns at a time, until every row has rejected a token or is at its
    draft's end. Returns the accepted tokens int32 [b], the residual, and scores [b, W] of the draft
    tokens that were looked at."""
    rule = program.accept
    width = drafts.tokens.shape[1]

    def part(x: Array, first: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, first, columns, axis=1)

    def goes_on(accepted: Array, first: Array) -> Array:
        return (accepted == first) & (first < draft_len)

    def score(first: Array) -> tuple[Array, dict]:
        """Scores of the next columns, and how many of their tokens are accepted."""
        tokens = part(drafts.tokens, first)
        positions = rows.lens[:, None] + first + jnp.arange(columns, dtype=jnp.int32)[None, :]
        positions = reshard(positions, "batch", None)
        top_ids = part(drafts.top_ids, first) if rule.needs_distribution else None
        scores = _score(program, rows, logits_at(first, columns), tokens, positions, top_ids)
        left = jnp.clip(draft_len - first, 0, columns)
        if rule.samples_anew:
            return count_leading(scores.pop("sampled") == tokens, left), scores
        if rule.needs_distribution:  # it decides at the draft's end
            return left, scores
        noise = uniforms(rows.accept_seeds, positions)
        old = part(drafts.sampling_logprobs, first)
        threshold = rule.accept_threshold(noise, old, log_lenience)
        step = Verification(left, scores["sampling_logprobs"], threshold)
        return rule.accept(step)[0], scores

    def step(state: tuple) -> tuple:
        first, accepted, all_scores = state
        more, scores = score(first)
        accepted = jnp.where(goes_on(accepted, first), first + more, accepted)
        all_scores = jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=1),
            all_scores,
            scores,
        )
        return first + columns, accepted, all_scores

    def zeros(x: jax.ShapeDtypeStruct) -> Array:
        shape = (x.shape[0], width, *x.shape[2:])
        return jnp.zeros(shape, x.dtype, out_sharding=axes("batch", *(None,) * (len(shape) - 1)))

    shapes = jax.eval_shape(score, jnp.int32(0))[1]
    state = (jnp.int32(0), jnp.zeros_like(draft_len), jax.tree.map(zeros, shapes))
    _, accepted, scores = jax.lax.while_loop(lambda x: jnp.any(goes_on(x[1], x[0])), step, state)
    if not rule.needs_distribution:
        return accepted, None, scores
    positions = reshard(rows.lens[:, None] + jnp.arange(width)[None, :], "batch", None)
    whole = Verification(
        draft_len,
        scores["sampling_logprobs"],
        uniforms=uniforms(rows.accept_seeds, positions),
        old_logprobs=drafts.sampling_logprobs,
        top_logprobs=scores.pop("old_top"),
        old_top_logprobs=drafts.top_logprobs,
        in_top=in_top(drafts.tokens, drafts.top_ids),
    )
    accepted, residual = rule.accept(whole)
    here = jnp.minimum(accepted, width - 1)
    at_end = (read_slots(x, here, 1)[:, 0] for x in (drafts.top_ids, drafts.top_logprobs))
    return accepted, (residual, *at_end), scores


def _score(
    program: ProgramSpec,
    rows: Rows,
    logits: Array,
    tokens: Array,
    positions: Array,
    top_ids: Array | None,
) -> dict[str, Array]:
    """Score the draft tokens [b, t] at distributions [b, t, V]: log-probs before and after
    truncation, and what is stored of the distributions. Where every token is sampled anew, also
    those that were; the log-probs are then theirs."""
    config = program.sampling
    logits = temper(logits, config)
    cut = truncate(logits, config)
    log_z = None
    scores = {}
    if program.accept.samples_anew:
        tokens, sampling, log_z = sample(cut, rows.seeds, positions, config)
        log_z = log_z[..., None]
        scores["sampled"] = tokens
    else:
        sampling = logprobs_at(cut, tokens[..., None])[..., 0]
    policy = logprobs_at(logits, tokens[..., None])[..., 0] if config.truncates else sampling
    scores |= {"policy_logprobs": policy, "sampling_logprobs": sampling}
    if top_ids is not None:
        scores["old_top"] = logprobs_at(cut, top_ids, log_z)
    if program.stored_logprobs:
        likeliest = likeliest_tokens(cut, program.stored_logprobs, log_z)
        scores |= dict(zip(("top_ids", "top_logprobs"), likeliest))
    return scores


def _sample_at_end(
    program: ProgramSpec, rows: Rows, logits: Array, accepted: Array, residual: tuple | None
) -> dict[str, Array]:
    """Sample the token [b] at the position after the accepted ones, from the residual where there
    is one, else from π; returns it and what is kept of it."""
    config = program.sampling
    logits = temper(logits, config)
    cut = truncate(logits, config)
    positions = rows.lens + accepted
    if residual is None:
        token, sampling, _ = sample(cut, rows.seeds, positions, config)
    else:
        residual, top_ids, top_logprobs = residual
        weights = residual_scores(cut, top_ids, top_logprobs, residual)
        token, _, _ = sample(weights, rows.seeds, positions, config)
        sampling = token_logprobs(cut, token)
    policy = token_logprobs(logits, token) if config.truncates else sampling
    end = {"tokens": token, "policy_logprobs": policy, "sampling_logprobs": sampling}
    if program.stored_logprobs:
        likeliest = likeliest_tokens(cut, program.stored_logprobs)
        end |= dict(zip(("top_ids", "top_logprobs"), likeliest))
    return end


def _write(
    program: ProgramSpec,
    rows: Rows,
    tokens: Array,
    draft_len: Array,
    accepted: Array,
    scores: dict[str, Array],
    end: dict[str, Array],
) -> tuple[Rows, Array]:
    """The rows with accepted tokens and the sampled one after what they held, and `extend`'s
    counts. tokens, scores: [b, W], of the drafts. end: [b], of the sampled token."""
    width = tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_end = steps == accepted[:, None]
    new = {}
    for name, sampled in end.items():
        draft = {"tokens": tokens, **scores}.get(name)
        if draft is None:
            draft = jnp.zeros_like(sampled)[:, None]
        here = jnp.expand_dims(is_end, tuple(range(2, draft.ndim)))
        new[name] = jnp.where(here, sampled[:, None], draft)
    count = jnp.minimum(jnp.minimum(accepted + 1, width), rows.max_lens - rows.lens)
    ends = is_eos(new["tokens"], program) & (steps < count[:, None])
    count = jnp.minimum(count, count_leading(~ends, count) + 1)
    lens = rows.lens + count
    reused = jnp.minimum(accepted, count)
    kinds = jnp.where(steps < reused[:, None], Source.REUSED, Source.SAMPLED)
    new["sources"] = kinds.astype(jnp.int8)

    def write(name: str) -> Array:
        old = getattr(rows, name)
        columns = old.shape[1]
        wide = jnp.pad(old, ((0, 0), (0, width), *((0, 0),) * (old.ndim - 2)))
        return write_slots(wide, new[name], rows.lens)[:, :columns]

    changes = {name: write(name) for name in new}
    last = read_slots(new["tokens"], jnp.maximum(count - 1, 0), 1)[:, 0]
    rejected = (accepted < draft_len) & (count > accepted)
    real = ~rows.done
    counts = jnp.stack([jnp.where(real, reused + rejected, 0), jnp.where(real, reused, 0)])
    rows = dataclasses.replace(
        rows,
        lens=lens,
        last=last,
        prefix_lens=rows.prefix_lens + reused,
        done=rows.done | jnp.any(ends, axis=1) | (lens == rows.max_lens),
        **changes,
    )
    return rows, jnp.sum(counts, axis=1, dtype=jnp.int32)
