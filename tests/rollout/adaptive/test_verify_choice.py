"""Whether to verify on, by hand and in simulations; and the model's state."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from cost_reference import draw, make_pass, make_table

from specrl_jax.rollout.adaptive import speculation as cost
from specrl_jax.rollout.adaptive.speculation import Acceptance, Speculation, VerifyPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts

# Verification ---------------------------------------------------------------------------------


def make_verifier(pass_seconds, rate, decode_seconds=8.0, **more):
    """A pass that has to save `pass_seconds` to be worth it: VERIFY_MARGIN of what it takes. A step
    of 16 rows takes `decode_seconds`, of 64 four times so."""
    widths = {1: 1, 4: 1.5}
    table = StepCosts(
        {Point(64, 99, 4, False): pass_seconds / cost.VERIFY_MARGIN, Point(64, 99, 4, True): 1e9}
        | {Point(16, 50, w, w > 1): decode_seconds * c for w, c in widths.items()}
        | {Point(64, 50, w, w > 1): 4 * decode_seconds * c for w, c in widths.items()}
    )
    return Speculation(table, Acceptance(verified=1e12, kept=rate * 1e12, **more))


def test_rows_that_decode_by_hand():
    """Three drafts of 4 tokens and one of 2; two of a chunk may be kept, each with chance 1/2."""
    one = make_pass(draft_lens=(4, 4, 4, 2), verify_width=2)
    np.testing.assert_array_equal(one.active(), [4, 4, 3, 3])
    # The last token of three is saved by 1/2, the one before by 1/4; and so of the short one's.
    np.testing.assert_array_equal(one.active(0.5), [3.75, 3.5, 2.25, 1.5])
    np.testing.assert_array_equal(one.active(1.0), [3, 3, 0, 0])
    np.testing.assert_array_equal(make_pass(draft_lens=(1,), verify_width=2).active(0.5), [0.5])
    assert not len(make_pass(draft_lens=()).active(0.5))


@pytest.mark.parametrize(("rate", "chunk"), [(0.9, 16), (0.97, 64), (0.3, 8), (0.0, 4), (1.0, 4)])
def test_rows_that_decode_agree_with_drawn_drafts(rate, chunk):
    rng = np.random.default_rng(6)
    left = rng.integers(1, 50, 40)
    draws = 4_000
    first = rng.geometric(1 - rate, (draws, 40)) - 1 if rate < 1 else np.full((draws, 40), 99)
    kept = np.minimum(first, np.minimum(left, chunk))
    expected = [np.mean(np.sum(left - kept > t, axis=1)) for t in range(left.max())]
    found = make_pass(draft_lens=left, verify_width=chunk).active(rate)
    np.testing.assert_allclose(found, expected, atol=0.25)


def test_steps_are_shared_with_the_rows_beside():
    active = np.array([64.0, 20.0, 3.0, 0.5])
    assert make_pass().shares(active) == {(16, 50): 1.5, (64, 50): 2.0}
    # 30 others wait, and 64 rows in all have room: 0, 30 and 30, 30 are in flight beside.
    found = make_pass(others=30, capacity=64).shares(active)
    assert found == pytest.approx({(16, 50): 0.0, (64, 50): 1 + 20 / 50 + 3 / 33 + 0.5 / 31})


def test_steps_are_priced_in_the_window_that_the_longest_row_needs():
    """Windows of 3 and 8 tokens. Rows that hold nothing take 3 steps in the first; where one holds
    a token, or has kept one of its draft, 2, and beyond the last window they stay in it."""
    windows, active = ((20, 3), (25, 8)), np.array([64.0] * 5)
    assert make_pass(cache_lengths=windows).shares(active)[64, 20] == 3
    # A row beside that holds 2 tokens takes up one more; it stands still while others get ahead.
    for begun, ahead, others, shallow in ((1, 0, 0, 2), (0, 1, 0, 2), (0, 1, 2, 1), (1, 1, 2, 1)):
        one = make_pass(cache_lengths=windows, held=begun, others_held=others)
        found = one.shares(active, ahead)
        assert found == {(16, 20): 0, (16, 25): 0, (64, 20): shallow, (64, 25): 5 - shallow}
    assert make_pass(cache_lengths=windows, held=7).shares(active)[64, 25] == 5


def test_a_pass_that_saves_steps_of_a_shallow_window_is_worth_less():
    # Everything is kept: 4 steps of 64 rows, of 8 s at 20 slots and 32 s at 25.
    steps = {Point(64, 20, 1, False): 8.0, Point(64, 25, 1, False): 32.0}
    table = StepCosts(steps | {Point(64, 99, 4, False): 60.0})
    model = Speculation(table, Acceptance(verified=1e12, kept=1e12))
    one = {"draft_lens": (4,) * 64, "row_buckets": (64,)}
    assert model.choose_verification([make_pass(cache_lengths=((25, 8),), **one)])  # saves 128 s
    assert model.choose_verification([make_pass(cache_lengths=((20, 1), (25, 8)), **one)])  # 104 s
    assert not model.choose_verification(
        [make_pass(cache_lengths=((20, 3), (25, 8)), **one)]
    )  # 56 s
    assert not model.choose_verification(
        [make_pass(cache_lengths=((20, 8), (25, 9)), **one)]
    )  # 32 s


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_the_row_that_keeps_most(rows):
    """Against drawn drafts: no less than their mean, and 6 tokens more at most."""
    drawn = np.random.default_rng(5).geometric(1 - 0.9, (4_000, rows)).max(axis=1) - 1
    found = make_pass((999,) * rows, verify_width=999).ahead(0.9)
    assert drawn.mean() <= found <= drawn.mean() + 6
    assert make_pass((999,) * rows, verify_width=5).ahead(0.9) == 5
    # Of two rows that outgrow the first window, behind a token, and two that do not.
    assert make_pass((100, 99, 98, 101), verify_width=999, held=1).ahead(0.9) == 17
    assert make_pass((100, 99), verify_width=999).ahead(0.9) == 0
    assert make_pass((101, 102), verify_width=999).ahead(1 - 1e-12) == 102


def test_rows_that_get_ahead_make_a_pass_worth_less():
    """Of 64 rows with 100 tokens left nearly all keep 50, and so are in the second window."""
    steps = {Point(64, 20, 1, False): 1.0, Point(64, 25, 1, False): 3.0}
    windows, one = (
        ((20, 60), (25, 100)),
        {"draft_lens": (100,) * 64, "verify_width": 50, "row_buckets": (64,)},
    )

    def seconds(price):
        table = StepCosts(steps | {Point(64, 99, 50, False): price})
        model = Speculation(table, Acceptance(verified=1e12, kept=1e12))
        return model.choose_verification([make_pass(cache_lengths=windows, **one)])

    # Without it 60 steps of 1 s and 40 of 3 s, with it 10 of 1 s and 40 of 3 s: 50 s are saved.
    # With two of them 180 s are, 90 s each; if windows were those of short rows, by one alone 130.
    assert seconds(90 / cost.VERIFY_MARGIN * 0.99)
    assert not seconds(90 / cost.VERIFY_MARGIN * 1.01)


def test_a_pass_is_worth_what_it_lets_others_save():
    """Of 16 rows 15 have 4 draft tokens left and one has 12: alone a pass of 4 saves 4 steps of 16
    rows, 4 s for 5. Two more on a rung of one row take 1 s each and save 8 steps of 1 s."""
    steps = {Point(16, 50, 1, False): 1.0, Point(1, 50, 1, False): 1.0}
    table = StepCosts(steps | {Point(16, 99, 4, False): 5.0, Point(1, 99, 4, False): 1.0})
    model = Speculation(table, Acceptance(verified=1e12, kept=1e12))
    more = {"rows": 16, "row_buckets": (1, 16)}
    assert not model.choose_verification([make_pass((4,) * 15 + (4,), **more)])
    assert model.choose_verification([make_pass((4,) * 15 + (12,), **more)])
    one = make_pass((4,) * 15 + (12,), **more)
    assert [one.rung_at(kept, 1.0) for kept in (0, 4, 8)] == [16, 1, 1]
    many = make_pass((50,) * 100, rows=128, row_buckets=(16, 64, 128))
    assert [many.rung_at(kept, 0.9) for kept in (0, 4, 8, 40)] == [128, 128, 64, 16]


def worths(model, one):
    """What one, two, ... passes in a row save, over what they cost."""
    rate, seconds = model.acceptance.rate(), 0.0
    for begun in range(0, max(one.draft_lens), one.verify_width):
        seconds += model.table.seconds(one.rung_at(begun, rate), one.slots, one.verify_width, False)
        row = dataclasses.replace(one, verify_width=begun + one.verify_width)
        with_it = sum(
            steps * model.predicted(*rung, 1)
            for rung, steps in row.shares(row.active(rate), row.ahead(rate)).items()
        )
        without = sum(
            steps * model.predicted(*rung, 1) for rung, steps in one.shares(one.active()).items()
        )
        yield (without - with_it) / seconds


def test_no_pass_that_is_passed_over_would_save_more():
    """Against all of them, each worked out, alone and with those that follow."""
    rng, model = np.random.default_rng(14), Speculation(make_table())
    chosen = set()
    for _ in range(300):
        model.acceptance.kept, model.acceptance.verified = rng.random() ** 0.1 * 1e4, 1e4
        rows, begun = int(rng.choice([1, 16, 64, 100])), int(rng.integers(0, 40))
        more = {
            "cache_lengths": ((40, 30), (99, 90)),
            "held": begun,
            "others_held": int(rng.integers(0, 60)),
        }
        left = rng.integers(1, 90 - begun, rows)
        passes = [make_pass(left, rows, chunk, (1, 16, 100), **more) for chunk in (4, 8, 16)]
        best = model.choose_verification(passes)
        worth = [max(worths(model, one)) for one in passes]
        expected = passes[int(np.argmax(worth))] if max(worth) > cost.VERIFY_MARGIN else None
        assert best is expected
        chosen.add(best and best.verify_width)
    assert chosen >= {None, 4, 16}


def test_one_more_chunk_by_hand():
    # Half of 64 rows keep the one token that is left: a step on 64 rows becomes one of 32, on the
    # same rung. Of 32 rows 16 are left, and a step of 8 s is for one of 32 s.
    assert not make_verifier(1e-9, 0.5).choose_verification([make_pass(draft_lens=(1,) * 64)])
    assert make_verifier(23.9, 0.5).choose_verification([make_pass(draft_lens=(1,) * 32)])
    assert not make_verifier(24.1, 0.5).choose_verification([make_pass(draft_lens=(1,) * 32)])
    # Everything is kept: 4 steps of 32 s, of the 100.
    assert make_verifier(127.9, 1.0).choose_verification([make_pass()])
    assert not make_verifier(128.1, 1.0).choose_verification([make_pass()])
    # Rows that wait use what is saved: 60 tokens of 64 rows that share 64 places with others.
    busy = make_pass(others=9999, capacity=64)
    assert make_verifier(29.9, 0.5).choose_verification([busy])
    assert not make_verifier(30.1, 0.5).choose_verification([busy])
    # Nothing is left, or kept.
    assert not make_verifier(1e-9, 1.0).choose_verification([make_pass(draft_lens=())])
    assert not make_verifier(1e-3, 0.0).choose_verification([make_pass()])


def test_good_tree_drafts_make_verification_worth_less():
    # Width 4 emits 1 + .7 + .49 + .343 tokens a row in 48 s: 4 steps cost 75.8 s, not 128.
    counts = [1e9 * 0.7**k for k in range(4)]
    good = {"offered": [1e9] * 3, "at_risk": counts[:3], "accepted": counts[1:]}
    assert make_verifier(75.7, 1.0, **good).choose_verification([make_pass(step_widths=(1, 4))])
    assert not make_verifier(75.9, 1.0, **good).choose_verification([make_pass(step_widths=(1, 4))])
    assert make_verifier(75.9, 1.0, **good).choose_verification([make_pass()])
    # Not while they are but hoped for.
    assert make_verifier(127.9, 1.0).choose_verification([make_pass(step_widths=(1, 4))])


@pytest.mark.parametrize(("narrow", "chosen"), [(39.0, 2), (51.0, 4), (999.0, 4)])
def test_of_several_passes_the_one_that_saves_most_for_its_seconds(narrow, chosen):
    # Everything is kept: 4 tokens save 128 s in 100, 2 tokens 64 s.
    steps = {Point(16, 50, 1, False): 8.0, Point(64, 50, 1, False): 32.0}
    table = StepCosts(steps | {Point(64, 99, 2, False): narrow, Point(64, 99, 4, False): 100.0})
    model = Speculation(table, Acceptance(verified=1e12, kept=1e12))
    passes = [make_pass(verify_width=2), make_pass()]
    assert model.choose_verification(passes).verify_width == chosen
    assert model.choose_verification(passes[::-1]).chunk == chosen


# Milliseconds of 0.3M parameters on two cores: (rows, slots) of a step, and of a pass of 32 or 128.
STEPS = {
    (16, 152): 0.62, (16, 280): 0.82, (32, 152): 1.11, (32, 280): 2.0,
    (64, 152): 2.53, (64, 280): 4.0, (128, 152): 5.0, (128, 280): 7.58,
}  # fmt: skip
PASSES = {
    (16, 56, 32): 11.3, (16, 152, 128): 28.8, (16, 312, 32): 12.2, (16, 408, 128): 46.4,
    (128, 56, 32): 44.2, (128, 152, 128): 284, (128, 312, 32): 89, (128, 408, 128): 507,
}  # fmt: skip
RUNGS, WINDOWS, PROMPT = (16, 32, 64, 128), ((152, 128), (280, 256)), 24


def rollout_seconds(model, lens, right):
    """Of a batch whose drafts have as many tokens right: passes as the model chooses, then
    steps, each on the smallest rung and window that hold what is active."""
    rung = lambda rows: min(n for n in RUNGS if n >= rows)  # noqa: E731
    held, begun, slots, seconds = np.zeros_like(lens), 0, 0, 0.0
    verifying, price = np.full(len(lens), True), model.table.seconds
    while verifying.any():
        size, left = rung(verifying.sum()), lens[verifying] - begun
        passes = [
            VerifyPlan(tuple(left), size, slots or PROMPT + 256 + w, w, RUNGS, WINDOWS, begun)
            for w in (32, 64, 96, 128)
            if not slots or PROMPT + begun + w <= slots
        ]
        if not passes or (one := model.choose_verification(passes)) is None:
            break
        slots, end = one.slots, begun + one.verify_width
        seconds += price(size, slots, one.verify_width, False)
        # The first that is wrong is drawn anew by the pass itself.
        held = np.where(verifying, np.minimum(np.minimum(right, end) + (right < end), lens), held)
        begun, verifying = end, verifying & (right >= end) & (lens > end)
    while (active := held < lens).any():
        slots = WINDOWS[0][0] if held[active].max() < WINDOWS[0][1] else WINDOWS[1][0]
        seconds += price(rung(active.sum()), slots, 1, False)
        held = held + active
    return seconds


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999])
def test_the_choice_is_as_good_as_never_and_as_always(chance):
    """Drawn drafts of 128 rows of long-tailed lengths, where table and chance are right; always
    means to the end of the drafts, in the narrowest passes."""
    steps = {Point(rows, slots, 1, False): ms for (rows, slots), ms in STEPS.items()}
    table = StepCosts(steps | {Point(*shape, False): ms for shape, ms in PASSES.items()})
    rng = np.random.default_rng(15)
    lens = np.exp(rng.normal(3.5, 0.8, 128)).astype(int).clip(1, 256)
    drafts = [rng.geometric(1 - chance, 128) - 1 for _ in range(20)]

    def mean(choose):
        model = Speculation(table, Acceptance(verified=1e6, kept=chance * 1e6))
        model.choose_verification = choose or model.choose_verification
        return np.mean([rollout_seconds(model, lens, right) for right in drafts])

    never, always = mean(lambda passes: None), mean(lambda passes: passes[0])
    assert mean(None) <= 1.01 * min(never, always)


CHUNK = VerifyPlan(
    (24,) * 128, 128, 99, verify_width=16, row_buckets=(16, 64, 128), cache_lengths=((99, 75),)
)  # 3.6 steps


def rollouts(model, chance, number, rng):
    """Rollouts of 32 tokens that verify one chunk of 24-token drafts if that seems worth it.

    Drafts that are left to decoding are judged there. Returns what was done, and the predicted
    seconds against those without drafts.
    """
    verdicts, seconds = [], 0.0
    for _ in range(number):
        verdict = model.choose_verification([CHUNK]) is not None
        kept = np.minimum(rng.geometric(1 - chance, size=128) - 1, 16)
        judged = kept.sum() + (kept < 16).sum()
        if verdict:
            seconds += model.record_verification(CHUNK, kept.sum(), judged)
        # With all rows alike and many of them the last ends where the mean of the worst does.
        steps = 32 - kept.min() * verdict
        visit = model.plan_steps(128, 99, (1,))
        evidence = {} if verdict else {"kept": kept.sum(), "judged": judged}
        seconds += model.record_steps(visit, steps, **evidence)
        verdicts.append(verdict)
    return verdicts, seconds / (number * model.predicted(128, 99, 1, 32))


def test_responses_that_never_come_back_are_verified_once():
    model, rng = Speculation(make_table()), np.random.default_rng(7)
    verdicts, relative = rollouts(model, 0.0, 500, rng)
    assert verdicts[0]  # the prior hopes
    assert not any(verdicts[1:])
    assert relative < 1.001


def test_responses_that_come_back_are_verified_again():
    """What decoding judges tells when they do, and verification when they do no more."""
    model, rng = Speculation(make_table()), np.random.default_rng(8)
    rollouts(model, 0.0, 200, rng)
    verdicts, _ = rollouts(model, 0.9999, 100, rng)
    first = verdicts.index(True)
    assert first <= 15
    assert all(verdicts[first:])
    verdicts, _ = rollouts(model, 0.0, 100, rng)
    last = verdicts.index(False)
    assert 0 < last <= 30  # 128 judged tokens a pass, against thousands
    assert not any(verdicts[last:])


# State ----------------------------------------------------------------------------------------


def use(model, rng, rounds):
    """Rollouts of changing drafts; every choice, and what was predicted."""
    choices = []
    for i in rounds:
        chances = [[0.0], [0.9], [0.9, 0.9, 0.9, 0.1]][(i // 7) % 3]
        rows = int(rng.choice([1, 16, 64, 100]))
        left = rng.integers(1, 90, rows)
        candidate = make_pass(left, rows, 16, (1, 16, 100), step_widths=(1, 2, 4))
        verdict = model.choose_verification([candidate]) is not None
        judged = int(rng.integers(1, 500)) if verdict else 0
        kept = int(judged * chances[0])
        choices.append((verdict, model.record_verification(candidate, kept, judged)))
        visit = model.plan_steps(rows, int(rng.integers(40, 150)), (2, 4, 8))
        steps = int(rng.integers(0, 99))
        histogram = draw(rng, chances, rows * steps, visit.width) if visit.width > 1 else ()
        choices.append((visit, model.record_steps(visit, steps, histogram)))
    return choices


@pytest.mark.parametrize("stop", [0, 1, 5, 23, 60])
def test_a_resumed_model_chooses_alike(stop):
    whole, rng = Speculation(make_table()), np.random.default_rng(9)
    expected = use(whole, rng, range(90))
    assert {c.base for c, _ in expected[1::2]} == {1, 2, 4, 8}
    assert {c for c, _ in expected[::2]} == {False, True}

    first, rng = Speculation(make_table()), np.random.default_rng(9)
    choices = use(first, rng, range(stop))
    text = json.dumps(first.host())
    resumed = Speculation(make_table()).restore(json.loads(text))
    assert json.dumps(resumed.host()) == text
    assert choices + use(resumed, rng, range(stop, 90)) == expected
    assert resumed.host() == whole.host()


def test_a_state_does_not_change_behind_ones_back():
    model = Speculation(make_table())
    use(model, np.random.default_rng(10), range(20))
    state = model.host()
    text = json.dumps(state)
    other = Speculation(make_table()).restore(state)
    use(model, np.random.default_rng(11), range(20))
    use(other, np.random.default_rng(12), range(20))
    assert json.dumps(state) == text
    assert json.dumps(model.host()) != text


def test_a_state_with_unknown_or_missing_parts_is_refused():
    state = Speculation(make_table()).host()
    with pytest.raises(TypeError, match="colour"):
        Speculation(make_table()).restore({**state, "colour": 1})
    del state["table"]
    with pytest.raises(KeyError, match="table"):
        Speculation(make_table()).restore(state)


def test_planning_changes_nothing():
    model = Speculation(make_table())
    use(model, np.random.default_rng(13), range(30))
    text = json.dumps(model.host())
    plans = [model.plan_steps(rows, 64, (2, 4, 8)) for rows in (1, 64, 128) * 2]
    assert plans[:3] == plans[3:]
    model.choose_verification([make_pass()])
    assert json.dumps(model.host()) == text


def test_choosing_needs_no_jax():
    code = "import sys, specrl_jax.rollout.adaptive.speculation; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
