"""Which tokens a trust region in probability drops, by hand."""

import numpy as np
import pytest

from specrl_jax.algorithms.corrections import Policies
from specrl_jax.recipes.trust_region import find_moved, find_moved_on

# π_rollout, π, A; dropped by |π − π_rollout| > 0.2; dropped where A moves it further
CASES = [
    (0.5, 0.8, 1.0, True, True),
    (0.5, 0.8, -1.0, True, False),
    (0.5, 0.2, -1.0, True, True),
    (0.5, 0.2, 1.0, True, False),
    (0.5, 0.8, 0.0, True, False),
    (0.5, 0.6, 1.0, False, False),
    (0.5, 0.4, -1.0, False, False),
    (1e-4, 5e-4, 1.0, False, False),  # r = 5: a clip would drop it
    (0.9, 0.6, -1.0, True, True),  # r = 0.67
    (0.99, 0.80, -3.0, False, False),
    (1.0, 0.7, -0.1, True, True),
    (0.0, 0.3, 0.1, True, True),  # log 0 is -inf
    (0.0, 0.0, 1.0, False, False),
    (1.0, 1.0, -1.0, False, False),
]


def _arrays(train_is_current: bool = True):
    rollout, current, advantages, moved, moved_on = np.array(CASES, np.float32).T
    with np.errstate(divide="ignore"):
        rollout, current = np.log(rollout)[None], np.log(current)[None]
    train = current if train_is_current else rollout
    return Policies(rollout, rollout, train, current), advantages[None], moved, moved_on


@pytest.mark.parametrize("find", [find_moved, find_moved_on])
def test_hand_computed_tokens(find):
    policies, advantages, moved, moved_on = _arrays()
    got = find(policies, advantages, np.ones_like(advantages, bool), 0.2)
    expected = moved if find is find_moved else moved_on
    np.testing.assert_array_equal(got[0], expected.astype(bool))


def test_a_token_that_comes_back_is_dropped_by_distance_alone():
    """Both signs of the advantage, both directions: all that moves on has moved."""
    policies, advantages, _, _ = _arrays()
    mask = np.ones_like(advantages, bool)
    for bound in (0.05, 0.2, 0.3):
        moved = np.asarray(find_moved(policies, advantages, mask, bound))
        on = np.asarray(find_moved_on(policies, advantages, mask, bound))
        back = np.asarray(find_moved_on(policies, -advantages, mask, bound))
        assert not np.any(on & ~moved)
        np.testing.assert_array_equal(on | back, moved & (advantages != 0))


def test_recomputed_log_probs_leave_arithmetic_to_the_first():
    """π_train is the step's first weights; only the second rule sees the weights as they are."""
    policies, advantages, _, moved_on = _arrays(train_is_current=False)
    mask = np.ones_like(advantages, bool)
    assert not np.any(find_moved(policies, advantages, mask, 0.2))
    np.testing.assert_array_equal(
        find_moved_on(policies, advantages, mask, 0.2)[0], moved_on.astype(bool)
    )
