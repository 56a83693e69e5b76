"""The scheduler: queue, bounds, eviction and choices by cost. None of them changes a token."""

import gc

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal, corpus_of, host, make_plan, run

from specrl_jax.models.kv_cache import cache_bytes
from specrl_jax.rollout import decode, rows
from specrl_jax.rollout.cost import CostModel, CostTable, Point, Verdict, Visit
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.types import Source

B, P, R, V = 32, 6, 8, ref.MODEL.vocab_size
NEVER = (99,)  # an end of sequence outside the vocabulary: only caps end a response
LAW = SamplingLaw(0.7, top_k=5, top_p=0.9)
ONE_RUNG = {"row_rungs": 1, "windows": 1}
PROMPTS = ref.random_prompts()
BUT = ("sources",)


def plan_of(width=1, **kwargs):
    """The match rule unless said; tree drafts where steps may be wider than 1."""
    kwargs = {"law": LAW, "accept": "match", "max_width": width} | kwargs
    return make_plan(ref.ONE_LAYER, tree=ref.TREE if width > 1 else None, **kwargs)


def weights_of(nudge=0.0):
    return ref.policy(nudge, ref.ONE_LAYER)[1]


@pytest.fixture(scope="module")
def endless(make_mesh):
    """The plain rollout of a policy that never ends a response."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        rollout, _ = run(plan_of(eos=NEVER, **ONE_RUNG), weights_of(), PROMPTS, 1)
        assert set(np.asarray(rollout.lens)) == {R}
        yield host(rollout)


@pytest.fixture(scope="module")
def ending(make_mesh):
    """(the plain rollout, drafts of an earlier policy) where responses end by themselves."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        plan = plan_of(stored=3, **ONE_RUNG)
        old, _ = run(plan, weights_of(0.1), PROMPTS)
        rollout, _ = run(plan, weights_of(), PROMPTS, 1)
        yield host(rollout), host(as_drafts(old))


def capped(rollout, caps):
    """The same rollout where responses end at `caps` [B]."""
    inside = np.arange(R)[None, :] < caps[:, None]
    fields = {
        name: np.where(inside, getattr(rollout, name), 0)
        for name in ("tokens", "policy_logprobs", "sampling_logprobs", "origin_logprobs")
    }
    return inside, fields | {"lens": caps}


# The queue


QUEUES = {
    "all at once": ONE_RUNG,
    "a queue": {"max_rows": 8, "windows": 2, "row_rungs": 2},
    "a group at a time": {"max_rows": 4, "windows": 1, "row_rungs": 1},
    "few bytes": {"cache_bytes": 2 * 10 * 14 * 64, "windows": 3, "row_rungs": 3},
    "tree drafts": {"width": 4, **ONE_RUNG},
}


@pytest.mark.parametrize("changes", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("offered", [False, True], ids=["plain", "drafts"])
def test_every_response_ends_at_its_cap(mesh, endless, changes, offered):
    """With drafts that are right and longer than the caps, too."""
    caps = np.random.default_rng(1).integers(1, R + 1, B).astype(np.int32)
    drafts = as_drafts(endless) if offered else None
    rollout, _ = run(
        plan_of(eos=NEVER, **changes), weights_of(), PROMPTS, 1, drafts=drafts, caps=caps
    )
    inside, expected = capped(endless, caps)
    for name, values in expected.items():
        got = np.asarray(getattr(rollout, name))
        np.testing.assert_allclose(got, values, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(np.asarray(rollout.prefix_lens), caps if offered else 0 * caps)
    reused = np.asarray(rollout.sources) == Source.REUSED
    np.testing.assert_array_equal(reused, inside & offered)


def test_a_queue_and_the_order_of_its_prompts(mesh, ending):
    plain, _ = ending
    order = np.random.default_rng(2).permutation(8)
    places = (order[:, None] * 4 + np.arange(4)[None, :]).ravel()
    plan, moved = plan_of(max_rows=8, windows=1), ref.select(PROMPTS, order)
    rollout, stats = run(plan, weights_of(), moved, 1)
    check_equal(rollout, plain, places)
    assert {size for size, *_ in stats.visits} == {8, 4}


def test_a_batch_that_fills_no_rung(mesh, ending):
    """Five groups of four rows in rungs of 16, 8 and 4: fillers beside them are not seen."""
    plain, _ = ending
    rollout, stats = run(
        plan_of(max_rows=16, row_rungs=3, windows=1),
        weights_of(),
        ref.select(PROMPTS, range(5)),
        1,
    )
    check_equal(rollout, plain, slice(0, 20))
    assert max(size for size, *_ in stats.visits) == 16


def test_a_queue_refills_before_its_last_row_is_done(mesh, endless):
    """One long row in every group: parts would take four times eight steps of eight rows."""
    caps = np.tile([R, 1, 1, 1], 8).astype(np.int32)
    plan = plan_of(eos=NEVER, max_rows=8, row_rungs=2, windows=1)
    rollout, stats = run(plan, weights_of(), PROMPTS, 1, caps=caps)
    np.testing.assert_array_equal(np.asarray(rollout.lens), caps)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[::4], endless.tokens[::4])
    assert stats.row_steps < 0.85 * 4 * (8 * 1 + 4 * 7)  # on the same rungs, without refilling


# A bound of the caches' bytes


BYTES = cache_bytes(ref.ONE_LAYER, 1, 1)


@pytest.fixture
def held_bytes(monkeypatch):
    """The most bytes that caches really held at once, as [n]: read off the live arrays."""
    most = [0]

    def watched(function):
        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            if live() > most[0]:
                gc.collect()  # a program's compilation leaves cycles that hold its arguments
                most[0] = max(most[0], live())
            return out

        return call

    def live() -> int:
        caches = (x for x in jax.live_arrays() if x.ndim == 4 and x.shape[2:] == (2, 4))
        return sum(x.nbytes for x in caches if x.shape[0] > 1)

    for module, names in ((decode, ("prefill", "replay", "visit")), (rows, ("move", "join"))):
        for name in names:
            monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return most


def bytes_for(count, width=1) -> float:
    """A bound that holds so many rows at the deepest window, while they are moved."""
    return 2.5 * count * (P + R + width - 1) * BYTES


# (rows at the deepest window, tokens a step may check, longest draft)
BOUNDS = [(13, 1, 0), (13, 1, 3), (5, 1, 0), (6, 1, R), (13, 4, 3)]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_rows_give_up_their_cache_and_come_back(mesh, ending, held_bytes, bound):
    """At shallow windows more rows fit than at the deepest: some must go, and none is lost."""
    count, width, longest = bound
    plain, drafts = ending
    drafts = as_drafts(drafts, np.minimum(drafts.lens, longest))
    plan = plan_of(width, windows=3, row_rungs=4, cache_bytes=bytes_for(count, width))
    rollout, stats = run(plan, weights_of(), PROMPTS, 1, drafts=drafts if longest else None)
    check_equal(rollout, plain, but=("sources", "prefix_lens", "top_ids", "top_logprobs"))
    assert 0 < stats.cache_bytes == held_bytes[0] <= plan.cache_bytes
    if longest < R:  # long drafts need the deepest window at once
        assert stats.evicted > 0
    assert stats.metrics()["rollout/evicted"] == stats.evicted
    assert stats.metrics()["rollout/cache_gib"] == stats.cache_bytes / 2**30


@pytest.mark.parametrize("accept", ["ratio", "ratio_residual"])
def test_eviction_in_the_midst_of_a_verification(mesh, ending, accept):
    """Drafts that are left to decode steps wait on the board with their rows."""
    _, drafts = ending
    offered = as_drafts(drafts, np.minimum(drafts.lens, 3))
    plan = plan_of(accept=accept, stored=3, **ONE_RUNG)
    whole, _ = run(plan, weights_of(), PROMPTS, 1, drafts=offered)
    plan = plan_of(
        accept=accept, stored=3, windows=3, row_rungs=3, cache_bytes=bytes_for(13)
    )  # the first window ends at two tokens
    cost = CostModel(table(verify=1e6))
    rollout, stats = run(plan, weights_of(), PROMPTS, 1, drafts=offered, cost=cost)
    check_equal(rollout, whole)
    assert np.asarray(whole.prefix_lens).max() == 3
    assert stats.evicted > 0
    assert stats.verified_tokens == 0


def test_no_bound_is_no_eviction(mesh, ending, held_bytes):
    plain, _ = ending
    rollout, stats = run(plan_of(), weights_of(), PROMPTS, 1)
    check_equal(rollout, plain)
    assert stats.evicted == 0
    assert stats.cache_bytes == held_bytes[0] > 0


def test_a_bound_too_small_for_anything_is_one_line(mesh):
    plan = plan_of(windows=1, row_rungs=5, cache_bytes=1.0)
    with pytest.raises(ValueError, match=r"^rollout.max_cache_gib must be 0 or >= .*9.31e-10;"):
        run(plan, weights_of(), PROMPTS, 1)


# Choices by cost


def table(wide=(10.0, 20.0), verify=1.0) -> CostTable:
    """Seconds of steps of width 1: one; of 2 and 4: `wide`; of a verification: `verify`."""
    return CostTable(
        {
            Point(B, P + R, 1, False): 1.0,
            Point(B, P + R, 8, False): verify,
            Point(B, P + R, 2, True): wide[0],
            Point(B, P + R, 4, True): wide[1],
        }
    )


def choosing(ending, table, accept="match", width=4, offered=True, **kwargs):
    """(rollout, stats, cost model) on one rung, with tree drafts of the plain responses."""
    plain, drafts = ending
    plan = plan_of(width, accept=accept, stored=3, **ONE_RUNG)
    cost = CostModel(table) if table else None
    rollout, stats = run(
        plan,
        weights_of(),
        PROMPTS,
        1,
        drafts=ref.put_rows(drafts) if offered else None,
        corpus=corpus_of(plan, plain.tokens, plain.lens) if width > 1 else None,
        cost=cost,
        **kwargs,
    )
    return rollout, stats, cost


def test_widths_that_never_pay_are_left_alone(mesh, ending):
    rollout, stats, _ = choosing(ending, table(), offered=False)
    check_equal(rollout, ending[0], but=(*BUT, "top_ids", "top_logprobs"))
    assert {width for *_, width, _ in stats.visits} == {1}
    assert stats.drafted_tokens == 0
    assert stats.predicted_seconds == stats.decode_steps
    assert stats.metrics()["time/decode_predicted"] == stats.decode_steps


def test_cheap_wide_steps_are_taken(mesh, ending):
    rollout, stats, cost = choosing(ending, table(wide=(1.01, 1.02)), offered=False)
    check_equal(rollout, ending[0], but=(*BUT, "top_ids", "top_logprobs"))
    assert {width for *_, width, _ in stats.visits} == {4}
    assert stats.decode_steps < R / 2  # the plain responses are known
    assert stats.drafted_tokens == np.sum(np.asarray(rollout.sources) == Source.DRAFTED)
    np.testing.assert_allclose(stats.predicted_seconds, 1.02 * stats.decode_steps)
    row_steps = np.sum(cost.acceptance.offered[0])
    assert 0 < row_steps <= stats.row_steps  # rows that are done do not count


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("accept", ["match", "ratio", "ratio_residual", "random"])
def test_a_verification_that_does_not_pay_is_left_to_decode_steps(mesh, ending, accept, wide):
    """One pass, or a token or four of the draft a step: the same responses, prefixes and laws."""
    widths = (1.01, 1.02) if wide else (10.0, 20.0)
    at_once, stats, _ = choosing(ending, None, accept, log_lenience=0.5)
    assert stats.verified_tokens > 0
    skipped, stats, cost = choosing(ending, table(widths, verify=1e6), accept, log_lenience=0.5)
    check_equal(skipped, at_once, but=BUT)
    reused = np.arange(R)[None, :] < np.asarray(at_once.prefix_lens)[:, None]
    np.testing.assert_array_equal(np.asarray(skipped.sources) == Source.REUSED, reused)
    assert reused.any()
    assert (stats.verified_tokens, stats.judged_tokens) == (0, 0)
    assert {width for *_, width, _ in stats.visits} == {4 if wide else 1}
    assert cost.verify_reserve > 0
    ran, stats, _ = choosing(ending, table(widths, verify=0.01), accept, log_lenience=0.5)
    check_equal(ran, at_once, but=BUT)
    assert stats.verified_tokens > 0


def test_block_verification_is_never_skipped(mesh, ending):
    at_once, _, _ = choosing(ending, None, "block", width=1)
    paid, stats, _ = choosing(ending, table(verify=1e6), "block", width=1)
    check_equal(paid, at_once)
    assert stats.verified_tokens > 0


class Whims:
    """In the place of a cost model, one that chooses at random."""

    def __init__(self, seed):
        self.rng, self.verdicts = np.random.default_rng(seed), set()

    def plan_visit(self, size, slots, widths):
        width = int(self.rng.choice(widths))
        return Visit(size, slots, width, width, int(self.rng.integers(0, 4)))

    def record_visit(self, visit, steps, histogram=()):
        return 0.0

    def worth(self, candidate):
        return self.rng.random()

    def worth_verifying(self, candidate):
        verdict = list(Verdict)[self.rng.integers(3)]
        self.verdicts.add(verdict)
        return verdict

    def keep_verifying(self, candidate):
        return bool(self.rng.random() < 0.5)

    def record_pass(self, done, kept=0, judged=0, verdict=Verdict.RUN):
        return 0.0


WHIMS = {
    "match": ("match", {"max_rows": 16, **ONE_RUNG}),
    "residual": ("ratio_residual", {"max_rows": 16, **ONE_RUNG}),
    "few bytes": ("match", {"windows": 2, "row_rungs": 2, "cache_bytes": 2 * 20 * 17 * BYTES}),
}


@pytest.mark.parametrize(("accept", "changes"), WHIMS.values(), ids=WHIMS)
def test_no_choice_changes_a_token(mesh, ending, accept, changes):
    plain, drafts = ending
    narrow = plan_of(accept=accept, stored=3, **ONE_RUNG)
    expected, _ = run(narrow, weights_of(), PROMPTS, 1, drafts=ref.put_rows(drafts))
    plan = plan_of(4, accept=accept, stored=3, verify_chunk=4, **changes)
    widths, verdicts = set(), set()
    for seed in range(4):
        whims = Whims(seed)
        rollout, stats = run(
            plan,
            weights_of(),
            PROMPTS,
            1,
            drafts=ref.put_rows(drafts),
            corpus=corpus_of(plan, plain.tokens, plain.lens),
            cost=whims,
        )
        check_equal(rollout, expected, but=BUT)
        sources = np.asarray(rollout.sources)
        reused = np.arange(R)[None, :] < np.asarray(rollout.prefix_lens)[:, None]
        np.testing.assert_array_equal(sources == Source.REUSED, reused)
        assert stats.drafted_tokens == np.sum(sources == Source.DRAFTED)
        widths |= {width for *_, width, _ in stats.visits}
        verdicts |= whims.verdicts
    assert widths == {1, 2, 4}
    assert len(verdicts) > 1
