"""Tree drafts by hand, against plain loops, and in a replay of recorded responses."""

import dataclasses
import functools
import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.rollout.drafts import suffix_match
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig, append, build, propose
from specrl_jax.sharding import axes, put

CONFIG = SuffixDraftConfig(depth=4, factor=1.0, offset=1.0, min_prob=0.1)
# Neither budget nor cut binds.
OPEN = SuffixDraftConfig(depth=4, factor=9.0, offset=0.0, min_prob=0.0)
_propose = jax.jit(propose, static_argnames=("width", "config"))
_append = jax.jit(append)


def make_index(stored, slots, weights=None, live=1, depth=4):
    """From [Q][M] lists of tokens."""
    count = len(stored[0])
    tokens = np.full((len(stored), count, slots), 99, np.int32)  # what lies after is not read
    lens = np.array([[len(text) for text in texts] for texts in stored], np.int32)
    for q, texts in enumerate(stored):
        for n, text in enumerate(texts):
            tokens[q, n, : len(text)] = text
    weights = np.ones(count) if weights is None else np.asarray(weights)
    return build(
        put(tokens, None, None, None),
        put(lens.reshape(len(stored), count), None, None),
        put(weights.astype(np.float32), None),
        live=live,
        depth=depth,
    )


def rows_of(*columns):
    return tuple(put(np.asarray(column, np.int32), "batch") for column in columns)


def write(index, prompts, sources, starts, texts, counts=None):
    """Append one list of tokens a row."""
    tokens = np.full((len(texts), max(len(text) for text in texts) or 1), 77, np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text)] = text
    counts = [len(text) for text in texts] if counts is None else counts
    tokens = put(tokens, "batch", None)
    return _append(index, *rows_of(prompts, sources, starts), tokens, *rows_of(counts))


def drafts(index, prompts, sources, lens, width=4, config=OPEN) -> list[list[int]]:
    tokens, counts = _propose(index, *rows_of(prompts, sources, lens), width=width, config=config)
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    assert tokens.shape == (len(lens), width)
    unused = np.arange(width)[None, :] >= counts[:, None]
    assert (tokens[unused] == 0).all()
    return [row[:n].tolist() for row, n in zip(tokens, counts)]


def draft_of(stored, tokens, width) -> list[int]:
    """The draft of a single row with `tokens`, besides stored responses."""
    index = make_index([stored], slots=12)
    source = len(stored)
    index = write(index, [0], [source], [0], [tokens])
    return drafts(index, [0], [source], [len(tokens)], width)[0]


# --- by hand --------------------------------------------------------------------------------------


# name → stored responses, what the row holds, its draft of at most so many tokens
CASES = {
    # 2 3 is followed by 4 5, 3 alone also by 7.
    "the longest match": ([[1, 2, 3, 4, 5], [9, 3, 7, 7, 7]], [8, 2, 3], [4, 5], 4),
    # Behind 4 both go on differently; the first agrees with all but one of the last tokens.
    "aligned context outweighs": ([[1, 2, 9, 4, 5], [7, 7, 7, 4, 6]], [1, 2, 3, 4], [5], 1),
    "whatever the order": ([[7, 7, 7, 4, 6], [1, 2, 9, 4, 5]], [1, 2, 3, 4], [5], 1),
    "the nearest position": ([[1, 2, 5, 0, 0, 1, 3, 6]], [8, 1], [2, 5], 2),
    "the nearest, later": ([[1, 2, 5, 0, 0, 1, 3, 6]], [8, 9, 9, 9, 8, 1], [3, 6], 2),
    "not its own newest position": ([[5, 6]], [1, 2, 3], [], 4),
    "but its older ones": ([[5, 6]], [1, 2, 1], [2], 1),
    "a circle is followed round": ([[9]], [7, 1, 2, 1, 2], [1, 2, 1, 2], 4),
    # Behind the end of a stored response nothing is known.
    "a stored response ends": ([[7, 1, 2, 1, 2]], [8, 9, 7, 1, 2], [1, 2], 4),
    "from the begin": ([[1, 2, 3], [1, 2, 4], [5, 2, 4], []], [], [1, 2], 2),
    "nothing stored": ([[], []], [], [], 2),
}


@pytest.mark.parametrize(("stored", "tokens", "draft", "width"), CASES.values(), ids=CASES)
def test_drafts_by_hand(mesh, stored, tokens, draft, width):
    assert draft_of(stored, tokens, width) == draft


def test_a_match_counts_no_more_than_the_depth(mesh):
    config = SuffixDraftConfig(depth=2, factor=1.0, offset=0.0, min_prob=0.0)
    stored = [[1, 2, 3, 4, 5, 6, 8]]
    index = make_index([stored], 8)  # of depth 4
    index = write(index, [0], [1], [0], [[1, 2, 3]])
    assert drafts(index, [0], [1], [3], width=6, config=config) == [[4, 5]]


def test_siblings_see_fresh_tokens(mesh):
    """Nothing is stored; another prompt's rows see none of them."""
    index = make_index([[], []], 8, live=3)
    index = write(index, [0, 0, 0], [0, 1, 2], [0, 0, 0], [[4, 5], [4], [6]])
    assert drafts(index, [0, 0, 0, 1], [0, 1, 2, 0], [2, 1, 1, 0]) == [[], [5], [], []]
    index = write(index, [0, 0], [2, 0], [1, 2], [[4, 5, 8], [7]])
    assert drafts(index, [0, 0], [1, 0], [1, 3], width=2) == [[5, 7], []]


# --- recording ------------------------------------------------------------------------------------


def test_append_writes_what_is_counted_and_nothing_else(mesh):
    index = make_index([[[1, 2]], [[3]]], 5, live=2, depth=3)
    before = np.array(index.tokens)
    texts, counts = [[5, 6, 7], [8, 8, 8], [9, 9, 9], [4, 4, 4]], [2, 0, 3, 3]
    after = write(index, [0, 1, 1, 0], [1, 1, 2, 2], [0, 2, 1, 4], texts, counts)
    expected = before.copy()
    expected[0, 1, 3:5] = [5, 6]
    expected[1, 2, 4:7] = 9
    expected[0, 2, 7] = 4  # the last slot; what lies beyond is left out
    np.testing.assert_array_equal(np.asarray(after.tokens)[:, :, :-1], expected[:, :, :-1])


def test_sync_replaces_what_live_sources_hold(mesh):
    """Samples 0 and 1 of prompts 0 and 1; columns after the response slots are left out."""
    stored = [[[6, 7]], [[8]]]
    index = make_index(stored, slots=4, live=2)
    index = write(index, [0], [2], [0], [[9, 9, 9, 9]])
    tokens = np.array([[1, 2, 3, 4, 15], [5, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0] * 5], np.int32)
    lens = np.array([4, 1, 2, 0], np.int32)
    got = suffix_match.sync(index, put(tokens, "batch", None), put(lens, "batch"))
    expected = make_index(stored, slots=4, live=2)
    for row in range(4):
        text = [tokens[row, : lens[row]].tolist()]
        expected = write(expected, [row // 2], [1 + row % 2], [0], text)
    got_tokens, expected_tokens = np.asarray(got.tokens), np.asarray(expected.tokens)
    np.testing.assert_array_equal(got_tokens[..., :-1], expected_tokens[..., :-1])
    np.testing.assert_array_equal(np.asarray(got.weights), np.asarray(expected.weights))


def test_rows_without_tokens_are_never_read(mesh):
    stored = [[1, 2, 3, 4]]  # as long as there are slots
    index = make_index([stored], 4)
    index = write(index, [0] * 2, [0, 1], [4, 0], [[5], [9, 9, 9, 3]], counts=[0, 0])
    index = write(index, [0], [1], [0], [[9, 2]])
    assert drafts(index, [0], [1], [2], width=4) == [[3, 4]]
    index = write(index, [0], [1], [2], [[3, 4]])
    assert drafts(index, [0], [1], [4], width=4) == [[]]  # a full row


# --- against plain loops --------------------------------------------------------------------------


def brute_votes(texts, weights, source, width, config):
    """[(continuation, matched, vote)]: the first of each source, then the second of each."""
    tokens = texts[source]
    history = ([suffix_match.BEGIN] * config.depth + tokens)[-config.depth :][::-1]
    first, second = [], []
    for n, text in enumerate(texts):
        candidates = []
        for position in range(len(text)):
            before = ([suffix_match.BEGIN] * config.depth + text[:position])[-config.depth :][::-1]
            same = [a == b for a, b in zip(before, history)]
            matched = [*same, False].index(False)
            away = position - len(tokens)
            candidates.append(((matched, sum(same), -abs(away), away > 0), position))
        candidates = sorted((f for f in candidates if f[0][0] > 0), reverse=True)[:2]
        for rank, votes in enumerate((first, second)):
            if rank >= len(candidates):
                votes.append(([], 0, 0.0))
                continue
            (matched, aligned, *_), position = candidates[rank]
            rest = text[position:]
            if n == source:
                rest = rest * width
            votes.append((rest[:width], matched, weights[n] * suffix_match.ALIGNED**aligned))
    return first + second


def path_probabilities(votes, draft, matched):
    """Of a draft's first 1, 2, … tokens among the votes of at least this match."""
    voters = [(rest, vote) for rest, m, vote in votes if m >= matched]
    total = sum(vote for _, vote in voters)
    return [
        sum(vote for rest, vote in voters if rest[:k] == draft[:k]) / total
        for k in range(1, len(draft) + 1)
    ]


def brute_drafts(texts, weights, source, width, config):
    """Every draft of (almost) the largest score, cut."""
    votes = brute_votes(texts, weights, source, width, config)
    candidates = []
    for matched in {m for m in suffix_match.LENGTHS if m < config.depth} | {config.depth}:
        for rest, own_matched, _ in votes[: len(texts)]:
            if own_matched < matched:
                continue
            budget = int(config.factor * own_matched + config.offset + 1e-6)
            probs = path_probabilities(votes, rest[:budget], matched)
            likely = [p for p in probs if p >= config.min_prob]
            candidates.append((sum(probs), rest[: len(likely)]))
    best = max((score for score, _ in candidates), default=0.0)
    return [draft for score, draft in candidates if score > best - 1e-5] or [[]]


@pytest.mark.parametrize("config", [CONFIG, OPEN, SuffixDraftConfig(7, 0.5, 1.0, 0.35)])
@pytest.mark.parametrize("alphabet", [2, 4])
def test_drafts_are_those_of_plain_loops(mesh, alphabet, config):
    rng = np.random.default_rng(alphabet)
    prompts, stored, live, slots, width = 6, 3, 4, 20, 5

    def text(low):
        return rng.integers(0, alphabet, rng.integers(low, slots + 1)).tolist()

    old = [[text(0) for _ in range(stored)] for _ in range(prompts)]
    fresh = [[text(0) for _ in range(live)] for _ in range(prompts)]
    weights = rng.uniform(0.2, 1.0, stored)
    index = make_index(old, slots, weights, live, config.depth)
    order = rng.permutation(prompts * live)
    q, g = order // live, order % live
    texts = [fresh[a][b] for a, b in zip(q, g)]
    index = write(index, q, stored + g, np.zeros_like(q), texts)
    proposed = drafts(index, q, stored + g, [len(t) for t in texts], width, config)
    votes = [*weights, *[1.0] * live]
    for a, b, draft in zip(q, g, proposed):
        assert draft in brute_drafts(old[a] + fresh[a], votes, stored + b, width, config)
    assert sum(map(len, proposed)) > len(proposed)


def test_the_longest_match_is_found_in_long_responses(mesh):
    # More slots than are looked at one by one: the best position still is the one that is meant.
    rng = np.random.default_rng(0)
    stored = rng.permutation(2000)[:300].tolist()
    index = make_index([[stored]], 300, live=8)
    positions = rng.integers(4, 290, 8)
    lives = [[*rng.integers(2000, 3000, 50), *stored[p - 3 : p]] for p in positions]
    index = write(index, [0] * 8, range(1, 9), [0] * 8, lives)
    proposed = drafts(index, [0] * 8, range(1, 9), [53] * 8)
    assert proposed == [stored[p : p + 4] for p in positions]


# --- meshes ---------------------------------------------------------------------------------------


def test_the_same_on_every_mesh(make_mesh):
    rng = np.random.default_rng(1)
    old = [[rng.integers(0, 4, 14).tolist() for _ in range(3)] for _ in range(3)]
    q = rng.integers(0, 3, 16)
    texts = [rng.integers(0, 4, 1 + i % 9).tolist() for i in range(16)]
    by_mesh = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with jax.set_mesh(make_mesh(*sizes)):
            index = make_index(old, 14, live=16)
            index = write(index, q, 3 + np.arange(16), np.zeros(16), texts)
            lens = [len(text) for text in texts]
            by_mesh.append(drafts(index, q, 3 + np.arange(16), lens, config=CONFIG))
            assert index.tokens.sharding.is_fully_replicated
    assert by_mesh[0] == by_mesh[1]
    assert any(by_mesh[0])


# --- replay: emitted tokens per decode step -------------------------------------------------------

DECAY, WIDTH, TREE = 0.7, 8, 1.76222
SRT = SuffixDraftConfig(depth=16, factor=1.0, offset=1.0, min_prob=0.1)


@functools.partial(jax.jit, static_argnames=("config", "group"))
def _replay(index, truth_BR, lens_B, *, config: SuffixDraftConfig, group: int):
    rows = jax.sharding.reshard(jnp.arange(len(lens_B), dtype=jnp.int32), axes("batch"))
    own = rows // group, index.tokens.shape[1] - group + rows % group
    truth = jnp.pad(truth_BR, ((0, 0), (0, WIDTH + 1)), constant_values=-9)

    def step(state):
        index, row_lens, steps = state
        tokens, counts = propose(index, *own, row_lens, WIDTH, config)
        following = jax.vmap(lambda text, at: jax.lax.dynamic_slice(text, (at,), (WIDTH + 1,)))(
            truth, row_lens
        )
        same = (tokens == following[:, :WIDTH]) & (jnp.arange(WIDTH)[None, :] < counts[:, None])
        accepted = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)
        emitted = jnp.minimum(accepted + 1, lens_B - row_lens)
        index = append(index, *own, row_lens, following, emitted)
        return index, row_lens + emitted, steps + jnp.sum(row_lens < lens_B)

    state = index, jnp.zeros_like(lens_B), jnp.int32(0)
    return jax.lax.while_loop(lambda s: jnp.any(s[1] < lens_B), step, state)[2]


def replay_device(data, config: SuffixDraftConfig = SRT) -> float:
    old = [[text for epoch in reversed(epochs[:-1]) for text in epoch] for epochs in data]
    truths = [text for epochs in data for text in epochs[-1]]
    slots = max(len(text) for epochs in data for epoch in epochs for text in epoch)
    group = len(data[0][-1])
    weights = np.repeat(DECAY ** np.arange(len(data[0]) - 1), group)
    index = make_index(old, slots, weights, live=group, depth=config.depth)
    truth = np.full((len(truths), slots), -9, np.int32)
    for row, text in zip(truth, truths):
        row[: len(text)] = text
    lens = np.array([len(text) for text in truths], np.int32)
    truth, lens_B = put(truth, "batch", None), put(lens, "batch")
    steps = _replay(index, truth, lens_B, config=config, group=group)
    return lens.sum() / int(steps)


def test_replay_emits_as_many_tokens_a_step_as_the_tree(mesh):
    """Responses of SmolLM2-135M-Instruct to reasoning-gym's gsm_symbolic at T = 0.7, at most 96
    tokens long: 14 prompts x 3 epochs x 8 samples, weights as published, noise of every epoch its
    own. The first two epochs are stored, the third is decoded. A suffix tree over every substring,
    with SRT's counts, budget and cut, emits `TREE` tokens a step there.
    """
    path = pathlib.Path(__file__).parents[2] / "references" / "smollm2_rollouts.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    assert {len(epoch) for epochs in data for epoch in epochs} == {8}
    device = replay_device(data)
    assert device >= TREE
    # Siblings help alone, and history helps beside them.
    no_history = [[[[] for _ in text] for text in epochs[:-1]] + epochs[-1:] for epochs in data]
    assert 1.0 < replay_device(no_history) < device
    assert replay_device(data, dataclasses.replace(SRT, factor=8.0)) > device  # a wider budget
