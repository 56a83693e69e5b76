"""Rows that are cut at a budget of tokens."""

import types

import jax
import numpy as np
import pytest
from small_runs import records, small_config
from watched_updates import SOME_SIGNAL, assert_goes_on

from specrl_jax import train as loop
from specrl_jax.recipes.c3po import cut_to_budget


def _cut(rows: list[str], budget: int, order: list[int]) -> list[int]:
    """rows: a character a slot, x for a token of the policy, o for one of an environment."""
    mask = np.array([[c == "x" for c in row.ljust(9)] for row in rows])
    rng = types.SimpleNamespace(permutation=lambda n: np.array(order))
    return cut_to_budget(np.array([len(row) for row in rows]), mask, budget, rng).tolist()


@pytest.mark.parametrize(
    ("rows", "budget", "lens"),
    [
        (["xxx", "xx", "xxxx"], 5, [1, 0, 4]),
        (["xxx", "xx", "xxxx"], 4, [0, 0, 4]),
        (["xxx", "xx", "xxxx"], 3, [0, 0, 3]),
        (["xxx", "xx", "xxxx"], 9, [3, 2, 4]),
        (["xxx", "xx", "xxxx"], 99, [3, 2, 4]),
        # An environment's tokens cost nothing, and the last token that is kept is the policy's.
        (["xooxxox", "x", "xxoxoo"], 5, [4, 0, 6]),
        (["xooxxox", "x", "xxoxoo"], 8, [7, 1, 6]),
    ],
)
def test_rows_are_cut_at_the_budget(rows, budget, lens):
    assert _cut(rows, budget, [2, 0, 1]) == lens


def test_any_row_may_come_first():
    """Each of four rows of two tokens is taken alone, as often as the others."""
    mask = np.ones((4, 2), bool)
    lens = np.full(4, 2)
    taken = [
        np.flatnonzero(cut_to_budget(lens, mask, 2, np.random.default_rng([1, seed])))
        for seed in range(2_000)
    ]
    shares = np.bincount(np.concatenate(taken), minlength=4) / 2_000
    assert all(len(rows) == 1 for rows in taken)
    np.testing.assert_allclose(shares, 0.25, atol=4 * np.sqrt(0.25 * 0.75 / 2_000))


RUN = SOME_SIGNAL | {
    "train.steps": 2, "updates.skip_no_signal": False, "updates.token_budget": 20,
}  # fmt: skip


def test_updates_take_a_budget_of_tokens(mesh, tmp_path, watched):
    """20 of some 80 tokens of each mini-batch of 16 rows; two updates a step."""
    loop.train(small_config(RUN), tmp_path / "run")
    assert [update.scalars["tokens"] for update in watched] == [20] * 4
    steps = records(tmp_path / "run")[1:]
    for step, record in enumerate(steps):
        updates = watched[2 * step : 2 * step + 2]
        taken = updates[0].mask.any(axis=1)
        assert record["update/selected_fraction"] == taken.mean() < 1 / 2
        assert record["update/budget_filled"] == 1
        for update in updates:
            np.testing.assert_array_equal(update.nodes >= 0, update.mask[update.row_ids])
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
