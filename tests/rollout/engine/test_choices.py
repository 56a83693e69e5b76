"""The scheduler's choices by cost: widths and verifications. None of them changes a token."""

from itertools import product

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import ONE_BUCKET, as_drafts, check_equal, history_of, host
from scheduler_cases import DRAFT_FIELDS, B, P, R, go, spec_of

from specrl_jax.rollout.adaptive.speculation import AcceptanceCounts, Speculation, StepPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts
from specrl_jax.rollout.drafts.sources import SuffixDrafts
from specrl_jax.rollout.engine import buckets as bucket_sizes
from specrl_jax.types import Source


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
    acceptance = AcceptanceCounts(reached=[10.0] * 3, accepted=[9.0] * 3)
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


@pytest.mark.parametrize("pays", [False, True])
def test_wide_steps_are_taken_where_they_pay(mesh, base, monkeypatch, pays):
    """The draft source's state is made for the first step that reads it."""
    made, init = [], SuffixDrafts.init
    monkeypatch.setattr(SuffixDrafts, "init", lambda *args: made.append(args) or init(*args))
    wide = (1.01, 1.02) if pays else (10.0, 20.0)
    rollout, stats, speculation = choosing(base, table(wide), with_drafts=False)
    check_equal(rollout, base[0], but=("sources",))
    assert {width for *_, width, _ in stats.decode_runs} == {4 if pays else 1}
    assert len(made) == pays
    assert stats.drafted_tokens == np.sum(np.asarray(rollout.sources) == Source.DRAFTED)
    assert (stats.drafted_tokens > 0) == pays
    np.testing.assert_allclose(stats.predicted_seconds, wide[1] * stats.decode_steps if pays
                               else stats.decode_steps)  # fmt: skip
    assert stats.metrics()["time/decode_predicted"] == stats.predicted_seconds
    if pays:
        assert stats.decode_steps <= R / 2  # the plain responses are known
        # Rows that are done do not count.
        assert 0 < speculation.acceptance.reached[0] < stats.row_steps


RULES = [("match", 1), ("match", 4), ("ratio", 1), ("ratio", 4)]


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
    """A split batch and vocabulary; after the last draft the batch goes on without."""
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


@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_drafts_left_to_decoding_tell_whether_to_verify_the_next(mesh, base, accept):
    """No pass is run to learn it, and what is learned turns the choice when it should."""
    _, endless, _ = base
    spec = spec_of(1, accept=accept, row_buckets=3)
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
    after what was kept. Rows without a draft come last, beside nobody who verifies."""
    seen = []

    class Spy(Whims):
        def choose_verification(self, passes):
            seen.extend(passes)
            return passes[-1]

    spec = spec_of(row_buckets=1, max_rows=8)
    drafts = as_drafts(base[1], np.where(np.arange(B) < 8, 0, R))
    rollout, _ = go(spec, max_lens=None, drafts=drafts, speculation=Spy(0))
    check_equal(rollout, base[1], but=DRAFT_FIELDS)
    assert [plan.held for plan in seen] == [0, 2, 4, 6] * 3
    assert [plan.draft_lens for plan in seen] == [(R - plan.held,) * 8 for plan in seen]
    assert {plan.others_held for plan in seen} == {0}
    assert [plan.others for plan in seen] == [24] * 4 + [16] * 4 + [8] * 4


def test_block_verification_is_never_skipped_nor_measured(mesh, base):
    at_once, _, _ = choosing(base, None, "block", width=1)
    paid, stats, speculation = choosing(base, table(verify=1e6), "block", width=1)
    check_equal(paid, at_once)
    assert stats.verify_work > 0
    assert speculation.acceptance.previous_verified == stats.predicted_verify_seconds == 0


class Whims:
    """In the place of a cost model, one that chooses at random."""

    def __init__(self, seed):
        self.rng, self.verdicts = np.random.default_rng(seed), set()
        self.accepted = self.verified = 0  # all that was recorded

    def _record(self, accepted, verified):
        assert 0 <= accepted <= verified
        self.accepted, self.verified = self.accepted + accepted, self.verified + verified

    def plan_steps(self, size, slots, widths):
        width = int(self.rng.choice(widths))
        return StepPlan(size, slots, width, int(self.rng.integers(0, 4)))

    def record_steps(self, plan, steps, histogram=(), accepted=0, verified=0):
        self._record(accepted, verified)
        return 0.0

    def choose_verification(self, passes):
        verdict = bool(self.rng.random() < 0.6)
        self.verdicts.add(verdict)
        return passes[self.rng.integers(len(passes))] if verdict else None

    def record_verification(self, done, accepted=0, verified=0):
        self._record(accepted, verified)
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
    "ratio": ("ratio", {"max_rows": 16, **ONE_BUCKET}),
    "short caches": ("match", {"max_rows": 16, "row_buckets": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("accept", "changes"), WHIMS.values(), ids=WHIMS)
def test_no_choice_changes_a_token(mesh, base, monkeypatch, accept, changes):
    monkeypatch.setattr(bucket_sizes, "NARROW", 1)  # passes of one token and of two
    _, endless, old = base
    expected, _ = go(spec_of(accept=accept, **ONE_BUCKET), drafts=ref.put_rows(old))
    spec = spec_of(4, accept=accept, **changes)
    widths, verdicts, programs = set(), set(), set()
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
        programs |= stats.programs
        assert stats.metrics()["rollout/programs"] == len(stats.programs)
    assert programs <= every_program(spec.buckets(B), spec.group_size)
    assert widths == {1, 2, 4}
    assert len(verdicts) > 1
