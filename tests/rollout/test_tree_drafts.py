"""Speculation changes no token: any draft, width, buckets and mesh against the plain rollout."""

import math

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import (
    ONE_BUCKET,
    check_equal,
    common_prefix,
    history_of,
    host,
    make_spec,
    match_spec,
    run,
)
from scheduler_cases import Planned

from specrl_jax.types import Drafts, Source, Tokens

B, R, V = 32, 8, ref.MODEL.vocab_size
HALF = 0.5


def weights_of(nudge=0.0):
    return ref.policy(nudge, ref.ONE_LAYER)[1]


@pytest.fixture(scope="module")
def base(make_mesh):
    """Prompts, the plain rollout, and one of an earlier policy."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        prompts = ref.random_prompts()
        plain, _ = run(match_spec(), weights_of(), prompts, 1)
        old, _ = run(match_spec(), weights_of(0.1), prompts, 0)
        yield prompts, host(plain), host(old)


def any_drafts(plain, old) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and lengths [B]: drafts of eight kinds, one after another."""
    rng = np.random.default_rng(7)
    garbage = rng.integers(0, V, (B, R))
    every, columns = np.arange(B), np.arange(R)[None, :]
    longer = np.where(columns < plain.lens[:, None], plain.tokens.ids, garbage)
    wrong = plain.tokens.ids.copy()
    last = np.maximum(plain.lens - 1, 0)
    wrong[every, last] = (wrong[every, last] + 1) % V
    full = np.full(B, R)
    kinds = [
        (old.tokens.ids, old.lens),
        (garbage, full),
        (plain.tokens.ids, plain.lens),
        (plain.tokens.ids, np.minimum(plain.lens, 2)),  # too short
        (longer, full),  # goes on after the response's end
        (garbage, np.zeros(B)),  # none
        (wrong, plain.lens),  # wrong at the very end
        (garbage, rng.integers(1, R, B)),
    ]
    kind = every // 4 % 2 * 4 + every % 4  # all kinds in every other group
    tokens, lens = (np.stack([drafts[i] for drafts in kinds]) for i in (0, 1))
    return tokens[kind, every].astype(np.int32), lens[kind, every].astype(np.int32)


def as_given(tokens, lens) -> Drafts:
    """Drafts that a rule may only compare: they have no log-probs."""
    nothing = np.full(tokens.shape, np.nan, np.float32)
    steps = np.full(tokens.shape, -9, np.int32)
    given = Tokens(tokens, sampling_logprobs=nothing, origin_logprobs=nothing, origin_steps=steps)
    return ref.put_rows(Drafts(given, lens))


def any_history(spec, plain, old):
    """Give every prompt an old response, its own, garbage, and nothing."""
    rng = np.random.default_rng(8)
    kind = (np.arange(B) % 4)[:, None]
    garbage = rng.integers(0, V, (B, R))
    tokens = np.select([kind == 0, kind == 1], [old.tokens.ids, plain.tokens.ids], garbage)
    lens = np.select([kind == 0, kind == 1, kind == 2], [old.lens[:, None], plain.lens[:, None], R])
    return history_of(spec, tokens, lens[:, 0])


def check_sources(rollout, stats, plain, drafts=None):
    """Kept prefixes are what the draft and the plain response have in common; the counts fit."""
    got = host(rollout)
    prefix = np.zeros(B, int)
    if drafts is not None:
        prefix = common_prefix(*drafts, plain.tokens.ids, plain.lens)
    np.testing.assert_array_equal(got.prefix_lens, prefix)
    columns = np.arange(R)[None, :]
    reused = columns < prefix[:, None]
    np.testing.assert_array_equal(got.tokens.sources == Source.REUSED, reused)
    drafted = got.tokens.sources == Source.DRAFTED
    assert not drafted[columns >= got.lens[:, None]].any()
    assert stats.drafted_tokens == drafted.sum()
    return drafted


def check_steps(rollout, stats, width):
    """Rows that start together: a step draws one token or ends in a drafted one. The first token
    was drawn as the rows started."""
    got = host(rollout)
    inside = np.arange(R)[None, :] < got.lens[:, None]
    drafted = got.tokens.sources == Source.DRAFTED
    last = drafted[np.arange(B), got.lens - 1]
    steps = np.sum(inside & ~drafted, axis=1) + last - 1
    assert stats.decode_steps == steps.max()
    assert stats.decode_runs == [(B, width, steps.max())]
    for row in drafted:  # no step has more drafted tokens than it has candidates
        runs = "".join("d" if x else " " for x in row).split()
        assert max(map(len, runs), default=0) <= width - 1


# The match rule


@pytest.mark.parametrize(
    "log_lenience", [-math.inf, pytest.param(math.inf, marks=pytest.mark.slow)]
)
def test_previous_responses_of_any_kind(mesh, base, log_lenience):
    """Whatever the lenience: a match asks for no log-probs."""
    prompts, plain, old = base
    drafts = any_drafts(plain, old)
    spec = match_spec(**ONE_BUCKET)
    given = as_given(*drafts)
    rollout, stats = run(spec, weights_of(), prompts, 1, drafts=given, log_lenience=log_lenience)
    check_equal(rollout, plain, but=("prefix_lens", "sources"))
    assert not check_sources(rollout, stats, plain, drafts).any()
    prefix, lens = np.asarray(rollout.prefix_lens), np.asarray(rollout.lens)
    for some in (prefix == 0, (prefix > 0) & (prefix < lens), prefix == lens):
        assert some.any()
    assert stats.accepted_tokens == prefix.sum() < stats.verified_tokens <= drafts[1].sum()
    assert np.all(
        np.asarray(rollout.tokens.origin_steps)[lens > 0, 0] == 1
    )  # drawn now, whatever matches


@pytest.mark.parametrize(
    ("width", "stored"),
    [
        (1, False), (4, False), (8, True),
        *(pytest.param(width, True, marks=pytest.mark.slow) for width in (2, 3)),
    ],
)  # fmt: skip
def test_tree_drafts_at_any_width(mesh, base, width, stored):
    """Without stored responses a row learns from its group and from itself."""
    prompts, plain, old = base
    spec = match_spec(width, **ONE_BUCKET)
    history = any_history(spec, plain, old) if stored else None
    rollout, stats = run(spec, weights_of(), prompts, 1, history=history)
    check_equal(rollout, plain, but=("sources",))
    drafted = check_sources(rollout, stats, plain)
    check_steps(rollout, stats, width)
    assert drafted.any() == (width > 1)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        pytest.param((1, 1, 1), ONE_BUCKET, marks=pytest.mark.slow),
        pytest.param((1, 1, 1), {"row_buckets": 3, "max_rows": 8}, marks=pytest.mark.slow),
        ((2, 2, 2), {"row_buckets": 2, "max_rows": 16}),
    ],
)
def test_previous_and_tree_drafts_on_any_buckets_and_mesh(make_mesh, base, shape, sizes):
    prompts, plain, old = base
    drafts = any_drafts(plain, old)
    with jax.set_mesh(make_mesh(*shape)):
        spec = match_spec(4, **sizes)
        history = any_history(spec, plain, old)
        rollout, stats = run(
            spec, weights_of(), prompts, 1, drafts=as_given(*drafts), history=history
        )
    check_equal(rollout, plain, but=("prefix_lens", "sources"))
    assert check_sources(rollout, stats, plain, drafts).any()


# The other rules: tree drafts go by the match rule, after the prefix, and change nothing


@pytest.mark.parametrize(
    ("accept", "stored"), [("ratio", 0), pytest.param("block", 3, marks=pytest.mark.slow)]
)
def test_rules_with_and_without_tree_drafts(mesh, base, accept, stored):
    prompts, plain, old = base
    results = []
    for width in (1, 4):
        spec = match_spec(width, accept=accept, stored_logprobs=stored, **ONE_BUCKET)
        drafts = ref.old_drafts(spec, prompts, 0.1)
        history = any_history(spec, plain, old) if width > 1 else None
        results.append(run(spec, weights_of(), prompts, 1, drafts=drafts, history=history,
                         log_lenience=HALF))  # fmt: skip
    (alone, _), (both, stats) = results
    check_equal(both, alone, but=("sources",))
    reused = np.arange(R)[None, :] < np.asarray(alone.prefix_lens)[:, None]
    sources = np.asarray(both.tokens.sources)
    np.testing.assert_array_equal(sources == Source.REUSED, reused)
    assert stats.drafted_tokens == np.sum(sources == Source.DRAFTED) > 0
    prefix, lens = np.asarray(alone.prefix_lens), np.asarray(alone.lens)
    for some in (prefix == 0, (prefix > 0) & (prefix < lens), prefix == lens):
        assert some.any()
    assert (np.asarray(both.tokens.ids) != plain.tokens.ids).any()  # reuse is not plain here
    if stored:
        inside = np.arange(R)[None, :] < lens[:, None]
        masses = np.exp(np.asarray(both.tokens.top_logprobs)[inside]).sum(axis=1)
        assert np.all(masses < 1 + 1e-5)
        assert masses.min() < 0.95  # something is left for the tail


# What drafts save, on a policy that counts: after token x comes x + 1


def counting(slots, width, cycle=16, group=2):
    model, weights = ref.counting_policy(cycle)
    spec = make_spec(model, slots=slots, group=group, accept="match", eos=(15,), tree=ref.TREE,
                     max_width=width, **ONE_BUCKET)  # fmt: skip
    return spec, weights


PATTERN = [Source.SAMPLED, Source.DRAFTED, Source.DRAFTED, Source.DRAFTED]


def test_a_known_response_takes_a_step_every_width_tokens(mesh):
    spec, weights = counting(slots=8, width=4)
    prompts = ref.make_prompts([[2], [9], [13], [1, 4]], 6)
    lens = [8, 6, 2, 8]
    known = np.array([[3, 4, 5, 6, 7, 8, 9, 10], [10, 11, 12, 13, 14, 15, 0, 0],
                      [14, 15, 0, 0, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10, 11, 12]])  # fmt: skip
    history = history_of(spec, np.repeat(known, 2, axis=0), np.repeat(lens, 2))
    rollout, stats = run(spec, weights, prompts, history=history)
    np.testing.assert_array_equal(np.asarray(rollout.tokens.ids), np.repeat(known, 2, axis=0))
    np.testing.assert_array_equal(np.asarray(rollout.lens), np.repeat(lens, 2))
    for row, n in zip(np.asarray(rollout.tokens.sources).tolist(), np.repeat(lens, 2), strict=True):
        assert row[:n] == (PATTERN * 2)[:n]
    assert stats.decode_steps == 2
    assert stats.drafted_tokens == 2 * (6 + 4 + 1 + 6)
    assert stats.row_steps == 8 * 2
    assert stats.metrics()["rollout/width_mean"] == 4.0


def test_a_row_that_repeats_itself_is_its_own_draft(mesh):
    """0 1 2 0 1 2 ... without a stored response: from the second round on steps are saved."""
    spec, weights = counting(slots=24, width=4, cycle=3)
    prompts = ref.make_prompts([[2], [2, 1]], 6)
    rollout, stats = run(spec, weights, prompts)
    tokens = np.asarray(rollout.tokens.ids)
    np.testing.assert_array_equal(tokens[0], np.arange(24) % 3)
    np.testing.assert_array_equal(tokens[2], (np.arange(24) + 2) % 3)
    assert not np.asarray(rollout.tokens.sources)[:, :3].any()
    assert 6 <= stats.decode_steps <= 12 < 24
    assert stats.drafted_tokens >= 4 * 12


def test_drafts_know_what_plain_steps_wrote(mesh):
    """They write to no index; without their tokens nothing of a row or its group matches."""
    spec, weights = counting(slots=24, width=4, cycle=3)
    prompts = ref.make_prompts([[2], [2, 1]], 6)
    six_plain = Planned(lambda widths, done: (1, 6 - done) if done < 6 else (widths[-1], 0))
    rollout, stats = run(spec, weights, prompts, speculation=six_plain)
    np.testing.assert_array_equal(np.asarray(rollout.tokens.ids)[0], np.arange(24) % 3)
    sources = np.asarray(rollout.tokens.sources)
    assert not sources[:, :7].any()
    assert sources[:, 7:10].tolist() == [[Source.DRAFTED] * 3] * 4
    # A token as rows start, six plain steps, and as few wide ones as 17 tokens take.
    assert [(width, steps) for _, width, steps in stats.decode_runs] == [(1, 6), (4, 5)]
