"""The scheduler: queue, bounds, preemption and choices by cost. None of them changes a token."""

import dataclasses
import gc
from itertools import product

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal, history_of, host, make_spec, run

from specrl_jax.models.kv_cache import cache_bytes
from specrl_jax.rollout.adaptive.speculation import Acceptance, Speculation, StepPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts
from specrl_jax.rollout.drafts.sources import SuffixDrafts
from specrl_jax.rollout.engine import buckets as bucket_sizes
from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.runner import ModelRunner
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import put
from specrl_jax.types import Source

B, P, R = 32, 6, 8
NEVER = (99,)  # an end of sequence outside the vocabulary: only max_lens end a response
SAMPLING = SamplingConfig(0.7, top_k=5, top_p=0.9)
ONE_BUCKET = {"row_buckets": 1, "cache_lengths": 1}
PROMPTS = ref.random_prompts()
MAX_LENS = np.random.default_rng(1).integers(1, R + 1, B).astype(np.int32)
DRAFT_FIELDS = ("prefix_lens", "sources")  # what drafts change under the match rule


def spec_of(width=1, **kwargs):
    """The match rule unless said; tree drafts where steps may be wider than 1."""
    tree = ref.TREE if width > 1 else None
    kwargs = {"sampling": SAMPLING, "accept": "match", "max_width": width, "tree": tree} | kwargs
    return make_spec(ref.ONE_LAYER, eos=NEVER, stored_logprobs=3, **kwargs)


def go(spec, max_lens=MAX_LENS, prompts=PROMPTS, **kwargs):
    weights = ref.policy(0.0, ref.ONE_LAYER)[1]
    return run(spec, weights, prompts, 1, max_lens=max_lens, **kwargs)


@pytest.fixture(scope="module")
def base(make_mesh):
    """The plain rollout up to max_lens and beyond, and a complete one of an earlier policy."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        spec = spec_of(**ONE_BUCKET)
        plain, _ = go(spec)
        endless, _ = go(spec, max_lens=None)
        old, _ = run(spec, ref.policy(0.1, ref.ONE_LAYER)[1], PROMPTS)
        yield host(plain), host(endless), host(as_drafts(old))


# The queue


BYTES = cache_bytes(ref.ONE_LAYER, 1, 1)


def bytes_for(count, width=1) -> float:
    """A bound that holds so many rows at the longest cache, while they are moved."""
    return 2.5 * count * (P + R + width - 1) * BYTES


FEW_BYTES = {
    "cache_lengths": 2,
    "row_buckets": 3,
    "cache_bytes": bytes_for(13),
}  # 16 rows, 8 at the end
QUEUES = {
    "all at once": ONE_BUCKET,
    "a queue": {"max_rows": 8, "cache_lengths": 2},
    "a group at a time": {"max_rows": 4, **ONE_BUCKET},
    "few bytes": FEW_BYTES,
    "tree drafts": {"width": 4, **ONE_BUCKET},
}


@pytest.mark.parametrize("changes", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("with_drafts", [False, True], ids=["plain", "drafts"])
def test_every_response_ends_at_its_longest_length(mesh, base, changes, with_drafts):
    """With drafts that are right and longer than max_lens, too."""
    _, endless, _ = base
    assert set(endless.lens) == {R}
    rollout, _ = go(spec_of(**changes), drafts=as_drafts(endless) if with_drafts else None)
    np.testing.assert_array_equal(np.asarray(rollout.lens), MAX_LENS)
    inside = np.arange(R)[None, :] < MAX_LENS[:, None]
    for name in ("tokens", "policy_logprobs", "sampling_logprobs", "origin_logprobs"):
        values = np.where(inside, getattr(endless, name), 0)
        np.testing.assert_allclose(np.asarray(getattr(rollout, name)), values, atol=1e-5)
    np.testing.assert_array_equal(
        np.asarray(rollout.prefix_lens), MAX_LENS if with_drafts else 0 * MAX_LENS
    )
    reused = np.asarray(rollout.sources) == Source.REUSED
    np.testing.assert_array_equal(reused, inside & with_drafts)


def test_a_queue_and_the_order_of_its_prompts(mesh, base):
    order = np.random.default_rng(2).permutation(8)
    places = (order[:, None] * 4 + np.arange(4)[None, :]).ravel()
    spec, moved = spec_of(max_rows=8, cache_lengths=2), ref.select(PROMPTS, order)
    rollout, stats = go(spec, max_lens=MAX_LENS[places], prompts=moved)
    check_equal(rollout, base[0], places)
    assert {size for size, *_ in stats.decode_runs} == {8, 4}


def test_a_batch_that_fills_no_bucket(mesh, base):
    """Five groups of four rows on a bucket of 32, at once and in parts: padding are not seen."""
    five = ref.select(PROMPTS, range(5))
    for changes in (ONE_BUCKET, {"max_rows": 8, "cache_lengths": 2}):
        rollout, _ = go(spec_of(**changes), max_lens=MAX_LENS[:20], prompts=five)
        check_equal(rollout, base[0], slice(0, 20))


def test_a_queue_refills_before_its_last_row_is_done(mesh, base):
    """One long row in every group: parts would take four times eight steps of eight rows."""
    _, endless, _ = base
    max_lens = np.tile([R, 1, 1, 1], 8).astype(np.int32)
    rollout, stats = go(spec_of(max_rows=8, cache_lengths=1), max_lens=max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.lens), max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[::4], endless.tokens[::4])
    assert stats.row_steps < 0.85 * 4 * (8 * 1 + 4 * 7)  # on the same buckets, without refilling


def test_a_verification_never_splits_to_a_larger_bucket(mesh, base, monkeypatch):
    """A group that begins alone may have fewer rows than the bucket for what is left of it."""
    passes, splits, run_model, split = [], [], ModelRunner.run, ModelRunner.split

    def seen_run(self, batch, stop, width, *, verify=False):
        if verify:
            passes.append((batch.size, batch.verifying))
        return run_model(self, batch, stop, width, verify=verify)

    def seen_split(self, batch, size):
        splits.append((batch.size, size))
        return split(self, batch, size)

    monkeypatch.setattr(ModelRunner, "run", seen_run)
    monkeypatch.setattr(ModelRunner, "split", seen_split)
    # Buckets of 10, 8 and 5 rows; 8 or 4 begin together.
    spec = spec_of(max_rows=10, row_buckets=2, cache_lengths=1, verify_width=2)
    lens = np.where(np.arange(B) % 4 == 3, 1, R)
    rollout, _ = go(spec, max_lens=None, drafts=as_drafts(base[1], lens))
    check_equal(rollout, base[1], but=DRAFT_FIELDS)
    assert (4, 3) in passes
    assert all(smaller < size for size, smaller in splits)


# A bound of the caches' bytes


@pytest.fixture
def live_bytes(monkeypatch):
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
        caches = (x for x in jax.live_arrays() if x.ndim == 4 and x.shape[1] == 2)
        # Keys [B, 2, 4, S], values [B, 2, S, 4]; [D, 2, 4, 4] are weights.
        return sum(x.nbytes for x in caches if 4 in x.shape[2:] and x.shape[2:] != (4, 4))

    for module, names in (
        (decode, ("prefill", "broadcast_prefill", "re_prefill", "decode_steps")),
        (decode_state, ("resize", "insert")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return most


# (rows at the longest cache, tokens a step may check, longest draft)
BOUNDS = [(13, 1, 0), (13, 1, 3), (13, 1, R), (8, 1, 0), (13, 4, 3)]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_rows_give_up_their_cache_and_come_back(mesh, base, live_bytes, bound):
    """More rows fit in the short cache than in the long one: some are preempted, none is lost."""
    count, width, longest = bound
    plain, _, old = base
    drafts = as_drafts(old, np.minimum(old.lens, longest)) if longest else None
    spec = spec_of(width, **{**FEW_BYTES, "cache_bytes": bytes_for(count, width)})
    rollout, stats = go(spec, drafts=drafts)
    check_equal(rollout, plain, but=DRAFT_FIELDS)
    assert 0 < stats.cache_bytes == live_bytes[0] <= spec.cache_bytes
    if longest < R:  # long drafts need the longest cache at once
        assert stats.preempted > 0
    assert stats.metrics()["rollout/preempted"] == stats.preempted
    assert stats.metrics()["rollout/cache_gib"] == stats.cache_bytes / 2**30


def long_spec(**changes):
    """16 rows of 32 tokens without an end, prompts of 2."""
    per_slot = cache_bytes(ref.ONE_LAYER, 1, 1)
    count, slots = changes.pop("fits")
    options = {"slots": 32, "prompt_slots": 2, "group": 2, "accept": "match", "eos": (16,)}
    bound = 2.5 * count * slots * per_slot
    return ref.make_spec(ref.ONE_LAYER, cache_bytes=bound, **options | changes)


def test_resumed_rows_get_the_cache_after_the_one_they_filled(mesh, live_bytes):
    """At 18 slots 8 rows fit, at 34 four: those that come back must not be begun as eight."""
    spec = long_spec(fits=(8, 18), row_buckets=4, cache_lengths=2)
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    rollout, stats = ref.run(spec, weights, prompts)
    assert 0 < stats.cache_bytes == live_bytes[0] <= spec.cache_bytes
    free = dataclasses.replace(spec, cache_bytes=0.0)
    check_equal(rollout, ref.run(free, weights, prompts)[0])
    assert stats.preempted == 12  # 8 of the first cache length, and 4 more that fill it


@pytest.mark.parametrize("slots", [2, 48])
def test_a_verification_that_splits_stays_within_the_bound(mesh, live_bytes, slots):
    """Drafts of two passes, right in 3 of 8 rows: these go on alone only if there is room. Without
    a bound they do, and the cache of their prompts must be gone by then."""
    prompts, (_, weights) = ref.random_prompts(8, slots), ref.policy(model=ref.ONE_LAYER)
    options = {"row_buckets": 4, "cache_lengths": 1, "max_rows": 8, "verify_width": 16}
    spec = long_spec(fits=(8, slots + 32), prompt_slots=slots, **options)
    free = dataclasses.replace(spec, cache_bytes=0.0)
    right = ref.run(free, weights, prompts)[0]
    tokens = np.asarray(right.tokens).copy()
    tokens[np.arange(16) % 8 >= 3, 4] ^= 1
    drafts = as_drafts(dataclasses.replace(right, tokens=put(tokens, "batch", None)))
    for each_spec in (spec, free):
        live_bytes[0] = 0
        rollout, stats = ref.run(each_spec, weights, prompts, drafts=drafts)
        check_equal(rollout, right, but=DRAFT_FIELDS)
        assert 0 < stats.cache_bytes == live_bytes[0] <= (each_spec.cache_bytes or np.inf)
        assert stats.verify_work > 0
    decode_runs = [program for program in stats.programs if program[0] == "decode_steps"]
    assert len({size for _, size, *_, wide, _ in decode_runs if wide}) > 1  # parted


@pytest.mark.parametrize(
    "fits", [pytest.param((16, 34), marks=pytest.mark.slow), (4, 34)], ids=["all", "few"]
)
def test_block_verifies_whole_drafts_within_the_bound(mesh, live_bytes, fits):
    """Short drafts, whose pass is wider than the cache that they need; one of them longer."""
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    spec = long_spec(fits=fits, row_buckets=3, cache_lengths=4, accept="block", stored_logprobs=3)
    free = dataclasses.replace(spec, cache_bytes=0.0, cache_lengths=1)
    old = ref.run(free, ref.policy(0.1, ref.ONE_LAYER)[1], prompts)[0]
    lens = np.full(16, 5)
    drafts = [as_drafts(old, np.where(np.arange(16) == 15, n, lens)) for n in (5, 20)]
    expected = [ref.run(free, weights, prompts, 1, drafts=d)[0] for d in drafts]
    live_bytes[0] = 0
    results = [ref.run(spec, weights, prompts, 1, drafts=d) for d in drafts]
    assert max(stats.cache_bytes for _, stats in results) == live_bytes[0] <= spec.cache_bytes
    for (rollout, _), right in zip(results, expected):
        check_equal(rollout, right)
        accepted = np.asarray(rollout.prefix_lens)
        assert 0 < accepted.sum() < 16 * 5  # some accepted, some not
    first, second = (np.asarray(rollout.tokens)[:15] for rollout, _ in results)
    np.testing.assert_array_equal(first, second)  # nothing of the row whose draft is longer


@pytest.mark.parametrize("accept", ["ratio", "ratio_residual"])
def test_preemption_in_the_midst_of_a_verification(mesh, base, accept):
    """Drafts that are left to decode steps wait with their rows."""
    with_drafts = ref.put_rows(base[2])
    expected, _ = go(spec_of(accept=accept, **ONE_BUCKET), drafts=with_drafts)
    speculation = hopeful(table(verify=1e6))
    rollout, stats = go(
        spec_of(accept=accept, **FEW_BYTES), drafts=with_drafts, speculation=speculation
    )
    check_equal(rollout, expected)
    assert np.asarray(expected.prefix_lens).max() > 4  # the first cache length
    assert stats.preempted > 0
    assert stats.verify_work == 0
    assert all(steps for *_, steps in stats.decode_runs)


def test_no_bound_is_no_preemption(mesh, base, live_bytes):
    rollout, stats = go(spec_of(cache_lengths=2, row_buckets=3))
    check_equal(rollout, base[0])
    assert stats.preempted == 0
    assert stats.cache_bytes == live_bytes[0] > 0


def test_a_bound_too_small_for_anything_is_one_line(mesh):
    spec = spec_of(cache_lengths=1, row_buckets=5, cache_bytes=1.0)
    with pytest.raises(
        ValueError, match=r"^rollout.max_cache_gib must be 0 or >= .* got 9.31e-10;"
    ):
        go(spec)


# Choices by cost


def table(wide=(10.0, 20.0), verify=1.0) -> StepCosts:
    """Seconds of steps of width 1: one; of 2 and 4: `wide`; of a verification: `verify`."""
    return StepCosts(
        {
            Point(B, P + R, 1, False): 1.0,
            Point(B, P + R, 8, False): verify,
            Point(B, P + R, 2, True): wide[0],
            Point(B, P + R, 4, True): wide[1],
        }
    )


def hopeful(costs: StepCosts) -> Speculation:
    """One that expects suffix drafts to be right, and has just probed."""
    acceptance = Acceptance(reached=[10.0] * 3, accepted=[9.0] * 3)
    return Speculation(costs, acceptance, steps_since_probe=0)


def choosing(base, table, accept="match", width=4, with_drafts=True):
    """(rollout, stats, cost model) on one bucket, with tree drafts of the plain responses."""
    _, endless, old = base
    spec = spec_of(width, accept=accept, **ONE_BUCKET)
    speculation = hopeful(table) if table else None
    rollout, stats = go(
        spec,
        drafts=ref.put_rows(old) if with_drafts else None,
        history=history_of(spec, endless.tokens, endless.lens) if width > 1 else None,
        speculation=speculation,
        log_lenience=0.5,
    )
    return rollout, stats, speculation


def test_widths_that_never_pay_are_left_alone(mesh, base):
    rollout, stats, _ = choosing(base, table(), with_drafts=False)
    check_equal(rollout, base[0])
    assert {width for *_, width, _ in stats.decode_runs} == {1}
    assert stats.drafted_tokens == 0
    assert stats.predicted_seconds == stats.decode_steps
    assert stats.metrics()["time/decode_predicted"] == stats.decode_steps


def test_an_index_is_made_for_the_first_step_that_reads_it(mesh, base):
    _, endless, _ = base
    made = []

    class Counted(SuffixDrafts):
        def init(self, *args):
            made.append(args)
            return super().init(*args)

    spec = spec_of(4, tree=Counted(ref.TREE.config), **ONE_BUCKET)
    history = history_of(spec, endless.tokens, endless.lens)
    rollout, _ = go(spec, history=history, speculation=hopeful(table()))
    check_equal(rollout, base[0])
    assert not made
    rollout, stats = go(spec, history=history, speculation=hopeful(table(wide=(1.01, 1.02))))
    check_equal(rollout, base[0], but=("sources",))
    assert len(made) == 1
    assert stats.drafted_tokens > 0


def test_cheap_wide_steps_are_taken(mesh, base):
    rollout, stats, speculation = choosing(base, table(wide=(1.01, 1.02)), with_drafts=False)
    check_equal(rollout, base[0], but=("sources",))
    assert {width for *_, width, _ in stats.decode_runs} == {4}
    assert stats.decode_steps <= R / 2  # the plain responses are known
    assert stats.drafted_tokens == np.sum(np.asarray(rollout.sources) == Source.DRAFTED)
    np.testing.assert_allclose(stats.predicted_seconds, 1.02 * stats.decode_steps)
    assert (
        0 < speculation.acceptance.reached[0] < stats.row_steps
    )  # rows that are done do not count


RULES = [("match", 1), ("match", 4), ("ratio", 1), ("ratio", 4), ("ratio_residual", 4)]


@pytest.mark.parametrize(("accept", "width"), RULES)
def test_a_verification_that_does_not_pay_is_left_to_decode_steps(mesh, base, accept, width):
    """One pass, or a token or four of the draft a step: the same rollout."""
    wide = (10.0, 20.0) if width == 1 else (1.01, 1.02)
    at_once, stats, _ = choosing(base, None, accept)
    assert stats.verify_work > 0
    skipped, stats, _ = choosing(base, table(wide, verify=1e6), accept)
    check_equal(skipped, at_once, but=("sources",))
    reused = np.arange(R)[None, :] < np.asarray(at_once.prefix_lens)[:, None]
    np.testing.assert_array_equal(np.asarray(skipped.sources) == Source.REUSED, reused)
    assert reused.any()
    assert (stats.verify_work, stats.verified_tokens) == (0, 0)
    assert {width for *_, width, _ in stats.decode_runs} == {width}
    ran, stats, _ = choosing(base, table(wide, verify=0.01), accept)
    check_equal(ran, at_once, but=("sources",))
    assert stats.verify_work > 0


def test_steps_verify_alike_on_a_mesh(make_mesh, base):
    """A split batch and vocabulary; behind the last draft the batch goes on without."""
    spec, rollouts = spec_of(accept="ratio", **ONE_BUCKET), []
    for shape in ((1, 1, 1), (2, 2, 2)):
        with jax.set_mesh(make_mesh(*shape)):
            drafts, speculation = ref.put_rows(base[2]), hopeful(table(verify=1e6))
            rollout, stats = go(spec, drafts=drafts, speculation=speculation, log_lenience=-1.5)
            rollouts.append(host(rollout))
        assert stats.verify_work == 0
        assert {key[-1] for key in stats.programs if key[0] == "decode_steps"} == {True, False}
    check_equal(*rollouts)
    assert rollouts[0].prefix_lens.max() > 1


@pytest.mark.parametrize("right", [False, True])
def test_drafts_without_a_pass_cost_no_step_under_match(mesh, base, right):
    """The programs and runs are a plain rollout's, whatever the drafts hold. The prefixes come
    from a comparison."""
    plain, endless, old = base
    drafts = endless if right else old
    steps = {Point(rows, P + R, 1, False): rows / B for rows in (8, 16, B)}
    speculation = Speculation(StepCosts(steps | {Point(B, P + R, 8, False): 1e6}))
    spec = spec_of(row_buckets=3, cache_lengths=1)
    _, expected = go(spec, speculation=Speculation(speculation.costs))
    got, stats = go(spec, speculation=speculation, drafts=as_drafts(drafts))
    check_equal(got, plain, but=DRAFT_FIELDS)
    assert (stats.decode_runs, stats.programs) == (expected.decode_runs, expected.programs)
    same = (plain.tokens == drafts.tokens) & (
        np.arange(R) < np.minimum(plain.lens, drafts.lens)[:, None]
    )
    run = np.cumprod(same, axis=1, dtype=bool)
    np.testing.assert_array_equal(got.prefix_lens, run.sum(axis=1))
    inside = np.arange(R) < plain.lens[:, None]
    np.testing.assert_array_equal((np.asarray(got.sources) == Source.REUSED)[inside], run[inside])
    verified = run.sum() + np.sum(run.sum(axis=1) < np.minimum(plain.lens, drafts.lens))
    assert (speculation.acceptance.previous_accepted, speculation.acceptance.previous_verified) == (
        run.sum(),
        verified,
    )
    assert right == (run.sum() == plain.lens.sum())


@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_drafts_left_to_decoding_tell_whether_to_verify_the_next(mesh, base, accept):
    """No pass is run to learn it, and what is learned turns the choice when it should."""
    _, endless, _ = base
    spec = spec_of(1, accept=accept, row_buckets=3, cache_lengths=1)
    steps = {Point(rows, P + R, 1, False): rows / B for rows in (8, 16, B)}
    speculation = Speculation(StepCosts(steps | {Point(B, P + R, 8, False): 2.0}))
    speculation.acceptance.observe_previous(0, 200)
    passes = []
    for _ in range(6):
        rollout, stats = go(spec, drafts=as_drafts(endless), speculation=speculation, max_lens=None)
        check_equal(rollout, endless, but=DRAFT_FIELDS)
        assert np.asarray(rollout.prefix_lens).sum() == B * R
        passes.append(stats.verify_work)
    assert passes[:2] == [0, 0]  # drafts of so bad a name are not worth a pass
    assert passes[-1] == B * R
    assert speculation.acceptance.rate() > 0.8


def test_what_a_pass_is_asked_for(mesh, base):
    """Drafts of 8 tokens, all right, in caches for 4 and 8 tokens, 2 tokens a pass: each begins
    behind what was kept. Rows without a draft come last, beside nobody who verifies."""
    seen = []

    class Spy(Whims):
        def choose_verification(self, passes):
            seen.extend(passes)
            return passes[-1]

    spec = spec_of(row_buckets=1, cache_lengths=2, verify_width=2, max_rows=8)
    drafts = as_drafts(base[1], np.where(np.arange(B) < 8, 0, R))
    rollout, _ = go(spec, max_lens=None, drafts=drafts, speculation=Spy(0))
    check_equal(rollout, base[1], but=DRAFT_FIELDS)
    assert [plan.held for plan in seen] == [0, 2, 4, 6] * 3
    assert [plan.draft_lens for plan in seen] == [(R - plan.held,) * 8 for plan in seen]
    assert {plan.others_held for plan in seen} == {0}
    assert {plan.capacity for plan in seen} == {8}
    assert [plan.others for plan in seen] == [24] * 4 + [16] * 4 + [8] * 4


def test_block_verification_is_never_skipped(mesh, base):
    at_once, _, _ = choosing(base, None, "block", width=1)
    paid, stats, _ = choosing(base, table(verify=1e6), "block", width=1)
    check_equal(paid, at_once)
    assert stats.verify_work > 0


class Whims:
    """In the place of a cost model, one that chooses at random."""

    def __init__(self, seed):
        self.rng, self.verdicts = np.random.default_rng(seed), set()
        self.accepted = self.verified = 0  # all that was recorded
        self.wide = bool(seed % 2)

    def widens(self, buckets, widths):
        return self.wide

    def record_drafts(self, accepted, verified):
        assert 0 <= accepted <= verified
        self.accepted, self.verified = self.accepted + accepted, self.verified + verified

    def plan_steps(self, size, slots, widths):
        width = int(self.rng.choice(widths))
        return StepPlan(size, slots, width, int(self.rng.integers(0, 4)))

    def record_steps(self, plan, steps, histogram=(), accepted=0, verified=0):
        self.record_drafts(accepted, verified)
        return 0.0

    def choose_verification(self, passes):
        verdict = bool(self.rng.random() < 0.6)
        self.verdicts.add(verdict)
        return passes[self.rng.integers(len(passes))] if verdict else None

    def record_verification(self, done, accepted=0, verified=0):
        self.record_drafts(accepted, verified)
        return 0.0


def every_program(buckets, group) -> set[tuple]:
    """Of the policy: all that there can be, whatever lengths, drafts and costs come."""
    lengths = {buckets.slots(length) for length in buckets.responses}
    passes = {buckets.prompt_slots + n + w for n in (0, *buckets.responses) for w in buckets.verify}
    flags = (False, True)
    steps = product(buckets.rows, lengths, buckets.widths, flags, [False], flags)
    wide = product(buckets.rows, lengths | passes, buckets.verify, [False], [True], flags)
    re_prefills = product(buckets.admissions, lengths | passes, buckets.responses)
    prefills = product([n // group for n in buckets.admissions], [buckets.prompt_slots])
    named = {"decode_steps": [*steps, *wide], "re_prefill": re_prefills, "prefill": prefills}
    return {(name, *shape) for name, shapes in named.items() for shape in shapes}


WHIMS = {
    "residual": ("ratio_residual", {"max_rows": 16, **ONE_BUCKET}),
    "few bytes": (
        "match",
        {"max_rows": 16, "row_buckets": 1, "cache_lengths": 2, "cache_bytes": bytes_for(16, 4)},
    ),
}


@pytest.mark.parametrize(("accept", "changes"), WHIMS.values(), ids=WHIMS)
def test_no_choice_changes_a_token(mesh, base, monkeypatch, accept, changes):
    monkeypatch.setattr(bucket_sizes, "NARROW", 1)  # passes of one token and of two
    _, endless, old = base
    expected, _ = go(spec_of(accept=accept, **ONE_BUCKET), drafts=ref.put_rows(old))
    spec = spec_of(4, accept=accept, verify_width=2, **changes)
    widths, verdicts, preempted, programs = set(), set(), 0, set()
    for seed in range(4):
        whims = Whims(seed)
        history = history_of(spec, endless.tokens, endless.lens)
        rollout, stats = go(spec, drafts=ref.put_rows(old), history=history, speculation=whims)
        check_equal(rollout, expected, but=("sources",))
        sources = np.asarray(rollout.sources)
        reused = np.arange(R)[None, :] < np.asarray(rollout.prefix_lens)[:, None]
        np.testing.assert_array_equal(sources == Source.REUSED, reused)
        assert stats.drafted_tokens == np.sum(sources == Source.DRAFTED)
        prefixes, ends = np.asarray(rollout.prefix_lens), np.minimum(old.lens, rollout.lens)
        assert whims.accepted == prefixes.sum()
        assert whims.verified == np.minimum(prefixes + 1, ends).sum()
        widths |= {width for *_, width, _ in stats.decode_runs}
        verdicts |= whims.verdicts
        preempted += stats.preempted
        programs |= stats.programs
        assert stats.metrics()["rollout/programs"] == len(stats.programs)
    assert programs <= every_program(spec.buckets(B), spec.group_size)
    assert widths == {1, 2, 4}
    assert len(verdicts) > 1
    assert (preempted > 0) == ("cache_bytes" in changes)
