"""Groups that fork: who starts with what, against the engine itself and exact probabilities."""

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest
import rollout_reference as ref
from advantage_cases import config, estimate
from rollout_reference import check_equal, host, make_prompts, make_spec
from small_runs import assert_same_run, records, small_config

from specrl_jax import train as loop
from specrl_jax.models.transformer import rollout_weights
from specrl_jax.recipes.treepo import Forks, TreeConfig, plan_forks, prefix_relative
from specrl_jax.rollout.engine import runner
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.training.build import build
from specrl_jax.training.evaluate import evaluate
from specrl_jax.types import Source

Q, G, R, SEGMENT = 8, 6, 12, 3
PROMPTS = make_prompts([[q + 5, *range(q + 5, 5, -2)] for q in range(Q)], 6)
PLAIN = {"slots": R, "group": G, "eos": (1, 2), "accept": "match"}
FORKS = Forks(SEGMENT, roots=2, branches=2)


def grow(spec, weights, step=1, prompts=PROMPTS, forks=FORKS, **inputs):
    noise = NoiseKey(jax.random.key(ref.KEY), step)
    requests = Requests(prompts, noise, **inputs)
    return forks(spec, weights, requests, clock=Stopwatch())


def copied_lens(rollout) -> np.ndarray:
    """Tokens [B] that rows start with; they lie at the beginning."""
    copied = rollout.tokens.sources == Source.COPIED
    assert not np.any(np.diff(copied.astype(int), axis=1) > 0)
    return copied.sum(axis=1)


@pytest.fixture(scope="module")
def grown(make_mesh):
    """(result, rollout on the host, weights); and the spy's packings."""
    packed = []

    def spy(buckets, texts, *rest):
        result = pack(buckets, texts, *rest)
        packed.append((texts.tokens, texts.lens, result))
        return result

    with jax.set_mesh(make_mesh(1, 1, 1)), pytest.MonkeyPatch.context() as patch:
        pack = runner.pack_texts
        patch.setattr(runner, "pack_texts", spy)
        _, weights = ref.policy()
        result = grow(make_spec(**PLAIN), weights)
    return result, host(result.rollout), weights, packed


def test_every_row_is_what_the_engine_makes_of_its_beginning(mesh, grown):
    """Begun with the tokens that it copied, by its own noise, in one piece."""
    _, rollout, weights, _ = grown
    lens = copied_lens(rollout).astype(np.int32)
    copied = np.arange(R)[None, :] < lens[:, None]
    sources = np.where(copied, Source.COPIED, Source.SAMPLED).astype(np.int8)
    held = ref.with_tokens(rollout, sources=sources)
    held = dataclasses.replace(held, lens=lens, prefix_lens=lens * 0)
    spec = make_spec(**PLAIN)
    whole = ref.rollout(spec, weights, PROMPTS, step=1, held=ref.put_rows(held))
    check_equal(rollout, host(whole.rollout))


def test_every_group_has_all_its_leaves_and_forks_begin_like_another(grown):
    _, rollout, _, _ = grown
    last = np.take_along_axis(rollout.tokens.ids, rollout.lens[:, None] - 1, axis=1)[:, 0]
    assert np.all((rollout.lens == R) | np.isin(last, (1, 2)))
    lens = copied_lens(rollout)
    assert np.all(lens % SEGMENT == 0)
    assert set(lens) >= {0, SEGMENT, 2 * SEGMENT}
    fields = ("ids", "policy_logprobs", "sampling_logprobs", "origin_logprobs", "origin_steps")
    tokens = rollout.tokens
    for row, own in enumerate(lens):
        first = row // G * G
        others = [x for x in range(first, first + G) if x != row and rollout.lens[x] >= own]
        assert row - first >= 2 or own == 0
        assert any(
            all(
                np.array_equal(getattr(tokens, f)[row, :own], getattr(tokens, f)[x, :own])
                for f in fields
            )
            for x in others
        )
    decoded = int(rollout.lens.sum() - lens.sum())
    assert 0.5 * rollout.lens.sum() < decoded < 0.9 * rollout.lens.sum()


def test_rows_that_forked_are_extended_as_one_trie(grown):
    """Each distinct prefix of a group's rows is one token of the program, if a sequence fits them.

    The prompts start with other tokens, so groups share none.
    """
    groups, shared = 0, 0
    for tokens, lens, texts in grown[3]:
        rows = [tuple(row[:n].tolist()) for row, n in zip(tokens, lens, strict=True)]
        count = len(rows)
        chunk = np.searchsorted(texts.first_row[0], np.arange(count), side="right")
        by_row = dict(
            zip(texts.shard_row_ids[0, :count].tolist(), zip(chunk, texts.nodes[0, :count]))
        )
        for first in {row[0] for row in rows}:
            own = [row for row in rows if row[0] == first]
            distinct = {row[:n] for row in own for n in range(1, len(row) + 1)}
            mine = range((first - 5) * G, (first - 4) * G)
            nodes = [by_row[row] for row in mine if row in by_row]
            computed = {(c, x) for c, path in nodes for x in path[path >= 0].tolist()}
            if len(distinct) <= texts.sequences.tokens.shape[2]:
                assert len(computed) == len(distinct)
                shared += sum(map(len, own)) - len(distinct)
                groups += 1
    assert groups > 2 * Q
    assert shared > 20 * Q


CHOICES = {
    "previous": {},
    "trees, few rows": {"tree": ref.TREE, "max_width": 4, "max_rows": 12, "row_buckets": 3},
}


@pytest.mark.parametrize(
    ("choice", "step"),
    [
        ("previous", 1),
        ("trees, few rows", 2),
        pytest.param("previous", 2, marks=pytest.mark.slow),
        pytest.param("trees, few rows", 1, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(mesh, grown, choice, step):
    """Responses on the same noise are kept whole, except for the tokens that others decoded."""
    _, expected, weights, _ = grown
    spec = make_spec(**PLAIN | CHOICES[choice])
    source = expected if step == 1 else host(grow(make_spec(**PLAIN), weights, 2).rollout)
    result = grow(spec, weights, drafts=ref.as_drafts(source))
    rollout = host(result.rollout)
    check_equal(rollout, expected, but=("sources", "prefix_lens"))
    np.testing.assert_array_equal(copied_lens(rollout), copied_lens(expected))
    np.testing.assert_array_equal(
        np.sum(rollout.tokens.sources == Source.REUSED, axis=1), rollout.prefix_lens
    )
    if step == 1:
        np.testing.assert_array_equal(rollout.prefix_lens, rollout.lens - copied_lens(rollout))
        np.testing.assert_array_equal(result.draft_lens, rollout.prefix_lens)
    else:
        assert 0 < rollout.prefix_lens.sum() < result.draft_lens.sum()


def test_on_several_devices(make_mesh, grown):
    expected = grown[1]
    with jax.set_mesh(make_mesh(2, 2, 2)):
        _, weights = ref.policy()
        rollout = host(grow(make_spec(**PLAIN), weights).rollout)
    check_equal(rollout, expected)


def test_who_forks_by_hand():
    waiting = np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0] * 6], bool)
    ended = np.array([[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6], bool)
    expected = [[0, 1, 0, 1, 4, 5], [0, 1, 2, 0, 2, 5], [0, 0, 0, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(plan_forks(waiting, ended, 2), expected)
    expected = [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 2, 0], [0, 0, 0, 0, 4, 5], [0, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(plan_forks(waiting, ended, 3), expected)


# --- the law --------------------------------------------------------------------------------------

END, SLOTS, LEAVES = 0, 3, 3


def group_law(next_probs, held):
    """{responses of a group: probability} if rows have the tokens `held`; None: the row waits.

    Segments of one token, two branches.
    """
    begun = [row for row in held if row is not None]
    slots = [SLOTS if len(begun) == len(held) else min(len(row) + 1, SLOTS) for row in begun]
    laws = [ref.responses(next_probs, n, (END,), row) for n, row in zip(slots, begun)]
    total = collections.Counter()
    for rows in itertools.product(*(law.items() for law in laws)):
        p = np.prod([p for _, p in rows])
        now = [row for row, _ in rows]
        going = [row for row in now if len(row) < SLOTS and row[-1] != END]
        if len(now) == len(held):
            total[tuple(now)] += p
            continue
        waits = len(held) - len(now)
        choices = [[row] for row in going][:waits]
        if not going:
            choices = [[row[:n] for n in range(len(row))] for row in now * 2][:waits]
        for forks in itertools.product(*choices):
            rest = [None] * (waits - len(forks))
            share = p / np.prod([len(choice) for choice in choices])
            for responses, q in group_law(next_probs, (*now, *forks, *rest)).items():
                total[responses] += share * q
    return total


def test_groups_have_their_exact_law(mesh):
    """Forks and fallbacks, by enumeration of every group of three leaves; the root's is π's."""
    table = np.array([[0.3, 0.5, 0.2], [0.35, 0.25, 0.4], [0.5, 0.2, 0.3]])
    model, _, weights = ref.table_policy(table)
    spec = make_spec(
        model, slots=SLOTS, prompt_slots=1, group=LEAVES, eos=(END,), accept="match",
        row_buckets=1,
    )  # fmt: skip
    forks = Forks(1, roots=1, branches=2)
    prompts = make_prompts([[1]] * 128, 1)
    seen = collections.Counter()
    for step in range(60):
        rollout = host(grow(spec, weights, step, prompts, forks).rollout)
        rows = [tuple(row[:n].tolist()) for row, n in zip(rollout.tokens.ids, rollout.lens)]
        seen.update(zip(rows[::3], rows[1::3], rows[2::3]))
    next_probs = ref.by_last(table, 1)
    law = group_law(next_probs, ((), None, None))
    assert sum(law.values()) == pytest.approx(1)
    assert seen.keys() <= law.keys()
    joint = np.array([seen[group] for group in law])
    assert ref.p_value(joint, np.array(list(law.values()))) > 1e-3
    of_policy = ref.responses(next_probs, SLOTS, (END,))
    for leaf in range(LEAVES):
        counts, probs = collections.Counter(), collections.Counter()
        for group, p in law.items():
            counts[group[leaf]] += seen[group]
            probs[group[leaf]] += p
        assert probs.keys() == of_policy.keys()
        expected = np.array([probs[x] for x in of_policy])
        assert ref.p_value(np.array([counts[x] for x in of_policy]), expected) > 1e-3
        is_the_policys = np.allclose(expected, list(of_policy.values()))
        assert is_the_policys == (leaf == 0)


# --- runs -----------------------------------------------------------------------------------------

RUN = {
    "treepo.segment": 2, "rollout.accept": "match", "rollout.noise_epochs": 2,
    "rollout.draft": "previous",
    "rollout.row_buckets": 1, "algorithm.advantage": "tree", "checkpoint.every": 2,
    "reward.name": "small_runs:score_first_letter",
}  # fmt: skip


@pytest.fixture(scope="module")
def drafted(tmp_path_factory, make_mesh):
    """Work directory of a run of four steps whose drafts are verified in the last two."""
    workdir = tmp_path_factory.mktemp("forks") / "drafted"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(RUN), workdir)
    return workdir


def test_nothing_is_compiled_after_the_first_step(drafted):
    first, *later = records(drafted, times=True)[1:]
    assert first["compile/built"] + first["compile/read"] > 0
    assert [r["compile/built"] + r["compile/read"] for r in later] == [0, 0, 0]
    assert all(r["rollout/tokens_copied"] > 0 for r in later)
    assert all(r["update/grad_norm"] > 0 for r in (first, *later))


def test_a_run_in_two_parts_is_the_run(mesh, drafted, tmp_path):
    for steps in (2, 4):
        loop.train(small_config(RUN | {"train.steps": steps}), tmp_path)
    assert_same_run(tmp_path, drafted, 4)


@pytest.mark.slow
def test_a_run_without_drafts_has_the_same_rewards(mesh, drafted, tmp_path):
    loop.train(small_config(RUN | {"rollout.draft": "none"}), tmp_path)
    with_drafts, without = records(drafted)[1:], records(tmp_path)[1:]
    for name in ("reward/mean", "rollout/tokens_copied", "rollout/response_len_mean"):
        assert [r[name] for r in with_drafts] == [r[name] for r in without]
    assert with_drafts[-1]["rollout/tokens_reused"] > 0


def test_held_out_responses_do_not_fork(mesh, monkeypatch):
    """They are independent, however many there are to a prompt."""
    run, params = build(small_config(RUN | {"evaluate.samples": 4, "evaluate.every": 2}))
    weights = rollout_weights(run.model, params)
    noise = NoiseKey(run.key, 1)
    monkeypatch.setattr(Forks, "__call__", None)
    with run.responder.pool:
        answered = evaluate(run.eval_spec, weights, run.held_out, noise, run.responder)
    assert isinstance(run.roll_out, Forks)
    assert all(responses.group_size == 4 for responses in answered)
    sources = np.concatenate([np.asarray(x.rollout.tokens.sources) for x in answered])
    assert not np.any(sources == Source.COPIED)


# Six responses: the first four start with 5 5, of which three go on with 6 6; the second ends
# there, the first and third go on. The last two have a beginning of their own.
TREE = [[5, 5, 6, 6, 7], [5, 5, 6, 6, 0], [5, 5, 6, 6, 8], [5, 5, 7, 1, 0], [6, 5, 6, 6, 7],
          [5, 1, 0, 0, 0]]  # fmt: skip
TREE_LENS = [5, 4, 5, 4, 5, 2]


def test_advantages_over_shared_prefixes_by_hand(make_mesh):
    """Also on a mesh that splits a group."""
    # d = 0: mean 1/2, d = 1: of four 3/4, d = 2: of the first and the third 1/2.
    expected = [
        (0.5 + 0.25 + 0.5) / 3, (0.5 + 0.25) / 2, (-0.5 - 0.75 - 0.5) / 3,
        (0.5 + 0.25) / 2, -0.5, -0.5,
    ]  # fmt: skip
    mask = np.arange(5) < np.array(TREE_LENS)[:, None]
    settings = config(group_size=6, kind=TreeConfig, segment=2)
    for shape in ((1, 1, 1), (2, 1, 1)):
        with jax.set_mesh(make_mesh(*shape)):
            got = estimate(
                "tree", [1, 1, 0, 1, 0, 0], None, mask, settings, np.array(TREE), TREE_LENS
            )
        expected_rows = np.where(mask, np.array(expected)[:, None], 0)
        np.testing.assert_allclose(got.advantages, expected_rows, atol=1e-6)


def test_advantages_over_shared_prefixes_by_loops():
    """Random trees, and every option, in plain Python; a group of equal rewards gets exactly 0."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2, (16, 7)).astype(np.int32)
    lens = rng.integers(1, 8, 16).astype(np.int32)
    rewards = rng.random(16).astype(np.float32)
    rewards[8:] = 0.1
    relative = jax.jit(prefix_relative, static_argnames="config")
    for scale, leave_one_out in itertools.product((False, True), repeat=2):
        settings = config(8, scale, leave_one_out, kind=TreeConfig, segment=2)
        got = relative(rewards, tokens, lens, config=settings)
        expected = np.zeros(16)
        for row in range(16):
            sums = 0.0
            for depth in (0, 2, 4, 6):
                same = [
                    other
                    for other in range(row // 8 * 8, row // 8 * 8 + 8)
                    if (depth == 0 or min(lens[other], lens[row]) > depth)
                    and tokens[other, :depth].tolist() == tokens[row, :depth].tolist()
                ]
                if len(same) > 1:
                    mean = np.mean([rewards[x] for x in same if x != row or not leave_one_out])
                    expected[row] += rewards[row] - mean
                    sums += 1
            expected[row] /= sums
        if scale:
            expected /= expected.std(ddof=1) + 1e-6
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(got[8:], 0)
