"""`prefill` against a loop over whole texts, which has no cache, no chunks and no slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from acceptance_reference import block_by_hand, residual_by_hand

from specrl_jax import sharding
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.engine import buckets as bucket_sizes
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.prefill import prefill
from specrl_jax.rollout.engine.text_states import blank_states
from specrl_jax.rollout.engine.texts import TextPaths, Texts, pack_texts
from specrl_jax.rollout.rows import PADDING
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import put, shards
from specrl_jax.types import Drafts, Source

B, P, R, G = 32, 6, 8, 4
BATCH_SLOTS = 24
K = 12  # likeliest tokens that are stored
STEP = 1
LOG_LENIENCE = 0.3
PROMPTS = ref.random_prompts()
PLAIN = ref.sampling.SamplingConfig()
TRUNCATED = ref.sampling.SamplingConfig(0.8, top_k=6, top_p=0.95)


@pytest.fixture
def small(monkeypatch):
    """Sequences and draft tokens come a few at a time. Buckets of equal fields are one program."""
    prefill.clear_cache()
    blank_states.clear_cache()
    monkeypatch.setitem(sharding.CHUNK_TOKENS, "cpu", 2 * (P + R))  # a sequence
    monkeypatch.setitem(bucket_sizes.BLOCK_BYTES, "cpu", 2_000)  # two rows
    monkeypatch.setitem(bucket_sizes.WINDOW_SLOTS, "cpu", 5)
    monkeypatch.setattr(bucket_sizes, "VERIFY_WIDTH", 3)
    monkeypatch.setattr(bucket_sizes, "WINDOW_VERIFY_WIDTH", 3)
    yield
    prefill.clear_cache()
    blank_states.clear_cache()


@pytest.fixture
def windows(monkeypatch):
    """Chunks are computed in windows, as for large policies."""
    prefill.clear_cache()
    blank_states.clear_cache()
    monkeypatch.setattr(bucket_sizes, "WINDOW_PARAMS", 0)
    yield
    prefill.clear_cache()
    blank_states.clear_cache()


# Packing ------------------------------------------------------------------------------------------


def test_texts_by_hand(small):
    """Sequences of 28 slots, one in a chunk; two shards, of which the second has one row."""
    buckets = Buckets(ref.ONE_LAYER, 6, P, R, 1, shards=2)
    assert (buckets.sequence_slots, buckets.chunk_sequences, buckets.chunks) == (28, 1, 3)
    assert buckets.block_rows == 2
    tokens = np.zeros((4, P + R), np.int32)
    tokens[:, :5] = [[5, 6, 1, 2, 3], [5, 6, 1, 9, 0], [5, 6, 0, 0, 0], [7, 7, 0, 0, 0]]
    lens = np.array([5, 4, 2, 2], np.int32)
    rows = [np.array([2, 0, 1]), np.array([2])]
    ends = np.array([3, 2, 0, 0], np.int32)
    got = pack_texts(buckets, Texts(tokens, lens, np.full(4, 2), rows, ends))
    assert got.sequences.tokens.shape == (3, 2, 28)
    assert got.sequences.tokens[0, 0].tolist() == [5, 6, 1, 2, 3, 9] + [0] * 22  # every prefix once
    assert got.sequences.depths[0, 0, :6].tolist() == [0, 1, 2, 3, 4, 3]
    assert got.sequences.ends[0, 0].tolist() == [6, 6, 6, 5, 5, 6, *range(7, 29)]
    assert got.sequences.tokens[0, 1].tolist() == [7, 7] + [0] * 26
    assert not got.sequences.tokens[1:].any()
    assert (int(got.count), got.blocks.tolist()) == (1, [2, 0, 0])
    assert got.first_row.tolist() == [[0, 3, 3, 3], [0, 1, 1, 1]]
    assert got.shard_row_ids[:, :3].tolist() == [[2, 0, 1], [2, 0, 0]]
    assert got.draft_ends[:, :3].tolist() == [[3, 2, 0], [0, 0, 0]]
    nodes = np.full((2, 5, P + R), -1)
    nodes[0, 0, :5] = [0, 1, 2, 3, 4]
    nodes[0, 1, :4] = [0, 1, 2, 5]
    nodes[0, 2, :2] = nodes[1, 0, :2] = [0, 1]
    np.testing.assert_array_equal(got.nodes, nodes)
    none = np.zeros((0, P + R), np.int32)
    empty = pack_texts(buckets, Texts(none, none[:, 0], none[:, 0], [none[:, 0]] * 2, none[:, 0]))
    shapes = jax.tree.map(np.shape, got)
    assert shapes == jax.tree.map(np.shape, empty)  # whatever the rows
    assert empty.count == 0


# The truth ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """All rows on the host, and the slots of the running batch."""

    spec: object
    buckets: Buckets
    rows: object  # [B], with what they hold
    drafts: Drafts  # [B]
    draft_ends: np.ndarray  # [B]
    begins: list[np.ndarray]  # of each shard, rows that start, as indices among all rows
    running: np.ndarray  # [BATCH_SLOTS], row that decodes in each slot, -1: it is free

    @property
    def texts(self) -> np.ndarray:
        """Each row's prompt and draft, or what it holds, [B, P + R]."""
        texts = np.pad(np.repeat(PROMPTS.tokens, G, axis=0), ((0, 0), (0, R)))
        columns = self.rows.prompt_lens[:, None] + np.arange(R)
        np.put_along_axis(texts, columns, np.asarray(self.drafts.tokens.ids), axis=1)
        return texts

    @property
    def lens(self) -> np.ndarray:
        return self.rows.prompt_lens + np.maximum(self.rows.lens, self.draft_ends)


EOS = (1, 2)


@pytest.fixture(scope="module")
def old_drafts(make_mesh):
    """Gives responses of an earlier policy, or of the same: host drafts with distributions."""

    @functools.cache
    def sample(nudge: float, sampling) -> Drafts:
        options = {"accept": "match", "stored_logprobs": K, **ref.ONE_BUCKET}
        spec = ref.make_spec(ref.ONE_LAYER, sampling=sampling, eos=EOS, **options)
        with jax.set_mesh(make_mesh(1, 1, 1)):
            weights = ref.policy(nudge, ref.ONE_LAYER)[1]
            return ref.host(ref.as_drafts(ref.run(spec, weights, PROMPTS, STEP)[0]))

    return sample


def drafts_for(accept: str, sampling, old_drafts) -> Drafts:
    drafts = old_drafts(0.0 if accept == "match" else 0.05, sampling)
    if ACCEPTANCE_RULES[accept].needs_distribution:
        return drafts
    return ref.with_tokens(drafts, top_ids=None, top_logprobs=None)


def make_case(accept: str, sampling, old_drafts) -> Case:
    """Half of the rows start: some hold tokens, drafts have 0 to R tokens, right and wrong ones."""
    drafts = drafts_for(accept, sampling, old_drafts)
    stored = 0 if drafts.tokens.top_ids is None else K
    options = {"accept": accept, "sampling": sampling, "eos": EOS, **ref.ONE_BUCKET}
    spec = ref.make_spec(ref.ONE_LAYER, stored_logprobs=stored, max_rows=BATCH_SLOTS, **options)
    rng = np.random.default_rng(4)
    every = np.arange(B)
    begun = np.where(every % 8 >= 4, np.minimum(rng.integers(1, 6, B), drafts.lens - 1), 0)
    begun = begun.astype(np.int32)
    wrong = np.where(every % 10 == 0, begun, R)
    if accept == "match":  # else all others would be right
        wrong = np.minimum(wrong, rng.integers(begun, R + 4))
    tokens = drafts.tokens.ids.copy()
    logprobs = drafts.tokens.sampling_logprobs.copy()
    for row in np.flatnonzero(wrong < R):
        tokens[row, wrong[row]] = (tokens[row, wrong[row]] + 5) % 16
        logprobs[row, wrong[row]] = 0
    drafts = ref.with_tokens(drafts, ids=tokens, sampling_logprobs=logprobs)
    ends = np.where(every % 6 == 4, 0, drafts.lens)
    ends = np.where(every % 10 == 8, np.minimum(ends, 2), ends).astype(np.int32)
    max_lens = np.where(every % 4 == 2, np.maximum(begun + 1, 3), R).astype(np.int32)
    noise = NoiseKey(jax.random.key(ref.KEY), STEP)
    background = every % (B // shards("batch")) >= B // shards("batch") // 2
    rows = ref.host(ref.start(spec, PROMPTS, noise, max_lens=max_lens, background=background))
    inside = np.arange(rows.tokens.ids.shape[1]) < begun[:, None]
    margin = ((0, 0), (0, rows.tokens.ids.shape[1] - R))
    rows = dataclasses.replace(
        rows,
        lens=begun,
        prefix_lens=begun // 2,
        last=np.where(begun > 0, drafts.tokens.ids[every, begun - 1], rows.last),
    )
    rows = ref.with_tokens(
        rows,
        ids=np.where(inside, np.pad(drafts.tokens.ids, margin), rows.tokens.ids),
        policy_logprobs=np.where(inside, -1.5, 0).astype(np.float32),
        sources=np.where(inside, Source.ENVIRONMENT, 0).astype(np.int8),
    )
    # Of each three slots one decodes; rows with even numbers start but for one.
    pieces = shards("batch")
    parts = np.split(every, pieces)
    begins = [part[::2] for part in parts]
    begins[-1] = begins[-1][:-1]
    running = np.full(BATCH_SLOTS, -1)
    for part, slots in zip(parts, np.split(np.arange(BATCH_SLOTS), pieces)):
        running[slots[1::3]] = part[1::2][: len(slots) // 3]
    return Case(spec, spec.buckets(B), rows, drafts, ends, begins, running)


def batch_of(case: Case):
    """The running batch's rows on the host; its free slots hold rows that are done, or none."""
    rng = np.random.default_rng(5)
    free = case.running < 0
    batch = jax.tree.map(lambda x: x[np.maximum(case.running, 0)], case.rows)
    none = rng.random(BATCH_SLOTS) < 0.5
    index = np.where(free, np.where(none, PADDING, case.begins[0][0]), case.running)
    lens = rng.integers(1, 5, BATCH_SLOTS).astype(np.int32)
    return dataclasses.replace(batch, row_ids=index.astype(np.int32), lens=lens, done=free)


@functools.partial(jax.jit, static_argnums=0)
def _written(model, weights, texts, cache):
    start = jnp.zeros(len(texts), jnp.int32, out_sharding=jax.P(("data", "fsdp")))
    return Transformer(model, weights)(texts, start, cache)[1]


def distributions(case: Case, params) -> tuple[np.ndarray, ...]:
    """π before and after truncation in log-probs [B, R + 1, V], at each position of the text."""
    config = case.spec.sampling
    scores = ref.full_logits(ref.ONE_LAYER, params, case.texts)
    at = (case.rows.prompt_lens - 1)[:, None] + np.arange(R + 1)
    scores = np.take_along_axis(scores, at[..., None], axis=1) / np.float32(config.temperature)
    cut = np.asarray(ref.truncate(scores, config))
    return ref.log_softmax(scores), ref.log_softmax(cut), cut


def draw(case: Case, scores: np.ndarray) -> np.ndarray:
    """Tokens [B, R + 1] that each position's own noise draws from `scores` [B, R + 1, V]."""
    positions = np.tile(np.arange(R + 1, dtype=np.int32), (B, 1))
    placed = put(scores.astype(np.float32), "batch", None, "vocab")
    seeds = put(case.rows.seeds, "batch", None)
    drawn = ref.sample(placed, seeds, put(positions, "batch", None), case.spec.sampling)
    return np.asarray(drawn[0])


def verify_block(case: Case, row: int, noise, tokens, new, old, sampled) -> tuple:
    """Accepted tokens of a draft, and log-weights [V] of the token after them; None: the policy.

    sampled: log-probs [n + 1, V] at the draft's positions and after it. Others: [n], of its tokens.
    """
    begun = case.rows.lens[row]
    n = len(tokens)
    ids = case.drafts.tokens.top_ids[row, begun : begun + n]
    old_top = case.drafts.tokens.top_logprobs[row, begun : begun + n]
    now_top = np.take_along_axis(sampled[:n], ids, axis=1)
    listed = (tokens[:, None] == ids).any(axis=1)
    kept, tail, scale, _ = block_by_hand(noise[:n], new[:n], old[:n], now_top, old_top, listed)
    if np.isinf(scale) and not tail:
        return kept, None
    before = np.full(16, (1 - np.exp(old_top[kept]).sum()) / (16 - K))
    before[ids[kept]] = np.exp(old_top[kept])
    weights = residual_by_hand(np.exp(sampled[kept]), before, ids[kept], tail, scale)
    with np.errstate(divide="ignore"):
        return kept, np.log(weights)


def expect(case: Case, params) -> tuple:
    """The rows after they have started, and int [2], verified and accepted tokens of drafts."""
    policy, sampled, cut = distributions(case, params)
    anew = draw(case, cut)
    positions = np.tile(np.arange(R + 1, dtype=np.int32), (B, 1))
    noise = np.asarray(ref.uniforms(case.rows.accept_seeds, positions))
    rule = case.spec.accept
    rows = jax.tree.map(np.copy, case.rows)
    weights = np.array(cut)
    accepted = np.zeros(B, int)
    for row in np.concatenate(case.begins):
        begun = rows.lens[row]
        draft = slice(begun, max(case.draft_ends[row], begun))
        tokens = case.drafts.tokens.ids[row, draft]
        new = sampled[row, begun:R][np.arange(R - begun), case.drafts.tokens.ids[row, begun:]]
        old = case.drafts.tokens.sampling_logprobs[row, begun:]
        if rule.samples_every_token:
            right = tokens == anew[row, draft]
        elif rule.cuts_draft:
            right = np.ones(len(tokens), bool)
        else:
            right = np.log(noise[row, begun:R]) <= LOG_LENIENCE + new - old
        accepted[row] = [*right[: len(tokens)], False].index(False)
        if rule.needs_distribution:
            accepted[row], residual = verify_block(
                case, row, noise[row, begun:], tokens, new, old, sampled[row, begun:]
            )
            if residual is not None:
                weights[row, begun + accepted[row]] = residual
    after = draw(case, weights)
    verified = 0
    reused = 0
    for row in np.concatenate(case.begins):
        begun = rows.lens[row]
        kept = accepted[row]
        new = [*case.drafts.tokens.ids[row, begun : begun + kept], after[row, begun + kept]]
        new = new[: rows.max_lens[row] - begun]
        ends = [token in case.spec.eos_ids for token in new]
        new = new[: [*ends, True].index(True) + 1]
        for offset, token in enumerate(new):
            at = row, begun + offset
            rows.tokens.ids[at] = rows.last[row] = token
            rows.tokens.policy_logprobs[at] = policy[*at, token]
            rows.tokens.sampling_logprobs[at] = sampled[*at, token]
            rows.tokens.sources[at] = Source.REUSED if offset < kept else Source.SAMPLED
            if rows.tokens.top_ids is not None:
                rows.tokens.top_ids[at] = np.argsort(-sampled[at])[:K]
                rows.tokens.top_logprobs[at] = sampled[at][rows.tokens.top_ids[at]]
        rows.lens[row] += len(new)
        rows.prefix_lens[row] += min(kept, len(new))
        rows.done[row] = any(ends[: len(new)]) or rows.lens[row] == rows.max_lens[row]
        reused += min(kept, len(new))
        verified += min(kept, len(new))
        verified += kept < case.draft_ends[row] - begun and len(new) > kept
    return rows, [verified, reused]


def slots_of(case: Case, texts, index: np.ndarray) -> np.ndarray:
    """int [BATCH_SLOTS]: the row that starts in each slot, -1: none. A shard's rows take its free
    slots in order: those without a row first."""
    order = np.full(BATCH_SLOTS, -1)
    pieces = len(case.begins)
    for shard, rows in enumerate(case.begins):
        free = case.running < 0
        none = index == PADDING
        slots = np.concatenate([np.flatnonzero(free & none), np.flatnonzero(free & ~none)])
        slots = slots[slots // (BATCH_SLOTS // pieces) == shard][: len(rows)]
        order[slots] = texts.shard_row_ids[shard, : len(rows)] + shard * (B // pieces)
    return order


def check_rows(rows, expected) -> None:
    """Log-probs up to rounding; all else is the same, up to the responses' ends."""
    inside = np.arange(rows.tokens.ids.shape[1]) < expected.lens[:, None]
    wanted = ref.fields_of(expected)
    for name, mine in ref.fields_of(rows).items():
        theirs = wanted[name]
        if mine.ndim > 1 and mine.shape[1] == inside.shape[1]:
            mine = mine[inside]
            theirs = theirs[inside]
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, theirs, atol=2e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(mine, theirs, name)


def check_case(case: Case, expected) -> None:
    """Check that all happens: rows that hold tokens, drafts of all fates, ends of all kinds."""
    every = np.concatenate(case.begins)
    begun = case.rows.lens[every]
    left = np.maximum(case.draft_ends[every] - begun, 0)
    kept = (expected.prefix_lens - case.rows.prefix_lens)[every]
    assert {0, R} <= set(left)
    assert case.spec.accept.cuts_draft or ((kept == 0) & (left > 0)).any()
    assert ((kept == left) & (left > 0)).any()
    assert (begun > 0).sum() > 3
    assert (left[begun > 0] > 0).any()
    assert (left[begun > 0] == 0).any()
    done = expected.done[every]
    full = (expected.lens == case.rows.max_lens)[every]
    assert (done & ~full).any()
    assert (full & (case.rows.max_lens[every] < R)).any()
    assert (~done).any()


def check_slots(case: Case, expected, got) -> None:
    """Slots that were read hold a token; computed ones come in whole windows."""
    assert 0 < got.known <= got.read <= got.filled <= got.computed
    every = np.concatenate(case.begins)
    known = (case.rows.prompt_lens + case.rows.lens)[every]
    assert got.known <= known.sum()
    assert got.read <= (known + (expected.prefix_lens - case.rows.prefix_lens)[every]).sum()
    if case.buckets.window_slots:
        assert got.computed % (case.buckets.window_slots * len(case.begins)) == 0


CASES = {
    "one chunk": ((1, 1, 1), "", PLAIN),
    "chunks": ((1, 1, 1), "small", TRUNCATED),
    "shards": ((2, 2, 2), "small", PLAIN),
    "one chunk, windows": ((1, 1, 1), "windows", TRUNCATED),
    "chunks, windows": ((1, 1, 1), "small windows", TRUNCATED),
    "shards, windows": ((2, 2, 2), "small windows", PLAIN),
}


@pytest.mark.parametrize(("shape", "fixtures", "sampling"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("accept", sorted(ACCEPTANCE_RULES))
def test_rows_begin(make_mesh, request, old_drafts, accept, shape, fixtures, sampling):
    """Rows, cache and counts; nothing else of the batch changes."""
    is_small = "small" in fixtures
    if ACCEPTANCE_RULES[accept].needs_distribution:
        sampling = PLAIN  # K likely tokens are more than are left of a distribution
    for name in fixtures.split():
        request.getfixturevalue(name)
    with jax.set_mesh(make_mesh(*shape)):
        params, weights = ref.policy(0.0, ref.ONE_LAYER)
        case = make_case(accept, sampling, old_drafts)
        expected, counts = expect(case, params)
        check_case(case, expected)
        pieces = shards("batch")
        every = np.concatenate(case.begins)
        own = [rows % (B // pieces) for rows in case.begins]
        known_lens = (case.rows.prompt_lens + case.rows.lens)[every]
        states = None
        paths = []
        if case.buckets.window_slots:
            states = blank_states(case.spec, buckets=case.buckets)
            paths = [TextPaths() for _ in own]
        begin = Texts(case.texts[every], case.lens[every], known_lens, own, case.draft_ends[every])
        texts = pack_texts(case.buckets, begin, paths)
        assert (texts.count > 1) == is_small
        assert (texts.blocks.max() > 1) == is_small
        model = ref.ONE_LAYER
        slots = case.buckets.cache_slots
        placed = put(case.texts, "batch", None)
        truth = ref.by_slot(_written(model, weights, placed, init_cache(model, B, slots)))
        before = jax.tree.map(lambda x: x + 7, init_cache(model, BATCH_SLOTS, slots))
        batch = batch_of(case)
        cache, rows, _, got, left = prefill(
            ref.with_lenience(case.spec, LOG_LENIENCE), case.buckets, weights, before,
            ref.put_rows(batch),
            ref.put_rows(case.rows), ref.put_rows(case.drafts), texts._replace(before=states),
        )  # fmt: skip
        rows = ref.host(rows)
        cache = ref.by_slot(cache)
    assert [int(got.verified), int(got.accepted)] == counts
    check_slots(case, expected, got)
    order = slots_of(case, texts, batch_of(case).row_ids)
    begun = order >= 0
    assert sorted(order[begun]) == sorted(every)
    before = ref.fields_of(batch)
    for name, values in ref.fields_of(rows).items():
        np.testing.assert_array_equal(values[~begun], before[name][~begun], name)
    check_rows(jax.tree.map(lambda x: x[begun], rows), jax.tree.map(
        lambda x: x[order[begun]], expected))  # fmt: skip
    # Where chunks are computed as they are asked for, a row has the keys of what it holds.
    written = (expected.prompt_lens + expected.lens - 1) if states else case.lens
    inside = np.arange(slots) < np.minimum(written, case.lens)[:, None]
    for mine, theirs in zip(cache, truth, strict=True):
        assert (mine[~begun] == 7).all()
        filled = inside[order[begun]]
        np.testing.assert_allclose(mine[begun][filled], theirs[order[begun]][filled], atol=1e-5)
    unfinished = np.stack([~rows.done & ~rows.background, ~rows.done]).reshape(2, pieces, -1)
    np.testing.assert_array_equal(left, unfinished.sum(axis=2).T)
