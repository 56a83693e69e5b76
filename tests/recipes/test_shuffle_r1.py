"""Pairs by hand, and draws counted against exact probabilities."""

import jax
import numpy as np
import pytest
from small_runs import records, small_config
from watched_updates import SOME_SIGNAL, assert_goes_on

from specrl_jax import train as loop
from specrl_jax.recipes.shuffle_r1 import draw_pairs

# Of each group: the outer pair, best first.
ADVANTAGES = np.array([-1, 1.5, -0.5, 0, 0.25, 0, 0, -0.25, 0, 0, 0, 0, 3, -1, -1, -1], np.float32)
OUTER = [(1, 0), (4, 7), (8, 11), (12, 15)]
OUTER_WEIGHTS = [2.5, 0.5, 0.0, 4.0]


def _draw(advantages=ADVANTAGES, group_size: int = 4, seed: int = 0) -> list[tuple]:
    rows = draw_pairs(advantages, group_size, np.random.default_rng([0, seed]))
    assert rows.shape == advantages.shape
    return [tuple(pair) for pair in rows.reshape(-1, 2).tolist()]


def test_pairs_are_drawn_by_their_advantages():
    """Within four standard errors; a pair without advantages is never drawn."""
    times = 4_000
    first = [_draw(seed=seed)[0] for seed in range(times)]
    chances = dict(zip(OUTER, np.array(OUTER_WEIGHTS) / sum(OUTER_WEIGHTS), strict=True))
    assert set(first) <= chances.keys()
    for pair, chance in chances.items():
        error = np.sqrt(chance * (1 - chance) / times)
        assert abs(first.count(pair) / times - chance) <= 4 * error, pair


def test_the_draws_of_a_step_are_independent():
    """Both draws of a step are (12, 15) as often as 4/7 · 4/7 says."""
    pairs = [_draw(seed=seed)[:2] for seed in range(4_000)]
    both = pairs.count([(12, 15), (12, 15)]) / len(pairs)
    assert abs(both - (4 / 7) ** 2) <= 4 * np.sqrt(both * (1 - both) / len(pairs))


def test_groups_of_eight_keep_the_two_outer_pairs():
    """Best first these rows are 6 1 3 0 4 7 5 2: equal ones stay in their order."""
    advantages = np.array([0.5, 1, -2, 1, 0, -1, 2, -0.5], np.float32)
    drawn = [pair for seed in range(30) for pair in _draw(advantages, 8, seed)]
    assert set(drawn) == {(6, 2), (1, 5)}


def test_without_any_advantage_all_kept_pairs_are_alike():
    drawn = [pair for seed in range(100) for pair in _draw(0 * ADVANTAGES, 4, seed)]
    share = [drawn.count((first, first + 3)) / len(drawn) for first in (0, 4, 8, 12)]
    assert sum(share) == pytest.approx(1)
    np.testing.assert_allclose(share, 0.25, atol=4 * np.sqrt(0.25 * 0.75 / len(drawn)))


RUN = SOME_SIGNAL | {
    "train.steps": 2, "updates.skip_no_signal": False, "updates.select": "outer_pairs",
}  # fmt: skip


def test_updates_take_pairs_of_a_group_by_their_advantages(mesh, tmp_path, watched):
    loop.train(small_config(RUN), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    for step in (0, 1):
        updates = watched[2 * step : 2 * step + 2]
        pairs = np.concatenate([update.row_ids for update in updates]).reshape(-1, 2)
        assert len(pairs) == 16
        advantages = updates[0].advantages[:, 0]
        groups = np.sort(advantages.reshape(4, 8), axis=1)
        for best, worst in pairs:
            assert best // 8 == worst // 8
            of_group = groups[best // 8]
            # The two best and the two worst of eight stay.
            assert advantages[best] >= of_group[6]
            assert advantages[worst] <= of_group[1]
            assert of_group[0] < of_group[7]  # a group without signal is never drawn
        share = len(np.unique(pairs)) / 32
        assert steps[step]["update/selected_fraction"] == share <= 1 / 2
        for update in updates:
            assert update.scalars["tokens"] == update.mask[update.row_ids].sum()
    assert_goes_on(RUN, tmp_path / "run", tmp_path / "parts")


@pytest.mark.slow
def test_eight_devices_take_the_same_rows(make_mesh, tmp_path, watched):
    for shape in [(1, 1, 1), (2, 2, 2)]:
        with jax.set_mesh(make_mesh(*shape)):
            loop.train(small_config(RUN | {"train.steps": 1}), tmp_path / str(shape[0]))
    for one, eight in zip(watched[:2], watched[2:], strict=True):
        np.testing.assert_array_equal(one.row_ids, eight.row_ids)
        np.testing.assert_array_equal(one.mask, eight.mask)
        want = eight.scalars
        assert one.scalars["loss"] == pytest.approx(want["loss"], rel=1e-4, abs=1e-6)
        assert one.scalars["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
