"""Block verification against a plain loop, at its ends, and on long drafts."""

import numpy as np
import pytest
from acceptance_reference import accept_block, block_by_hand, count_leading, log


def random_policies(rows, width, vocab=5, k=3, seed=0, concentration=20.0):
    """Drafts from π_old and what the rules read of them; π lies near it. All on the host."""
    rng = np.random.default_rng(seed)
    old = rng.dirichlet(np.ones(vocab), (rows, width))
    tilt = rng.gamma(concentration, 1 / concentration, old.shape)
    new = old * tilt / (old * tilt).sum(axis=-1, keepdims=True)
    tokens = (rng.random((rows, width, 1)) > old.cumsum(axis=-1)).sum(axis=-1).clip(max=vocab - 1)
    ids = np.argsort(-old, axis=-1)[..., :k]
    take = lambda x, i: np.take_along_axis(x, i, axis=-1)  # noqa: E731
    listed = (tokens[..., None] == ids).any(axis=-1)
    uniforms = (1 - rng.random((rows, width))).astype(np.float32)
    picked = (log(take(x, tokens[..., None])[..., 0]) for x in (new, old))
    return uniforms, (*picked, log(take(new, ids)), log(take(old, ids)), listed)


def test_block_against_a_loop():
    uniforms, arguments = random_policies(2000, 12)
    lens = np.random.default_rng(5).integers(0, 13, 2000).astype(np.int32)
    accepted, tail, log_scale = accept_block(uniforms, arguments, lens)
    rows = [
        block_by_hand(*(x[row, :n] for x in (uniforms, *arguments))) for row, n in enumerate(lens)
    ]
    expected = [np.array(x) for x in zip(*rows, strict=True)]
    clear = expected[-1] > 1e-5  # float32 decides as float64 does, but where they tie
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(accepted[clear], expected[0][clear])
    np.testing.assert_array_equal(tail[clear], expected[1][clear])
    np.testing.assert_allclose(log_scale[clear], np.log(expected[2])[clear], atol=1e-5)
    assert accepted.dtype == np.int32
    assert set(range(12)) <= set(accepted)
    assert 0.02 < tail.mean() < 0.9
    assert (np.isinf(log_scale) & ~tail & (lens > 0)).any()
    assert (log_scale[accepted == 0] == 0).any()


def test_nothing_is_accepted_after_an_impossible_token():
    """P stays 0, whatever follows."""
    uniforms, arguments = random_policies(200, 8, k=5)
    arguments[0][:, 4] = -np.inf
    lens = np.full(200, 8, np.int32)
    tiny = np.full_like(uniforms, 1e-20)
    accepted, tail, log_scale = accept_block(tiny, arguments, lens)
    assert accepted.max() == 4
    assert np.isfinite(log_scale).all()
    assert not tail.any()
    arguments[1][:, 4] = -np.inf  # 0 / 0: impossible for both
    assert accept_block(tiny, arguments, lens)[0].max() == 4


@pytest.mark.parametrize("uniform", [1.0, 0.5, 1e-9])
def test_equal_policies_accept_everything(uniform):
    """h = 0 / 0 at every position: the whole draft is kept, up to its tail token."""
    _, (_, old, _, old_top, listed) = random_policies(300, 40, vocab=6, k=5)
    lens = np.random.default_rng(7).integers(0, 41, 300).astype(np.int32)
    uniforms = np.full(old.shape, uniform, np.float32)
    arguments = (old, old, old_top, old_top, listed)
    expected = np.asarray(count_leading(listed, lens))
    accepted, tail, log_scale = accept_block(uniforms, arguments, lens)
    np.testing.assert_array_equal(accepted, expected)
    np.testing.assert_array_equal(tail, expected < lens)
    assert np.isposinf(log_scale).all()
    assert {0, 40} <= set(expected)


def test_the_joint_ratio_after_thousands_of_tokens():
    """log P at the cut, against a loop in float64."""
    rows, width = 64, 4096
    uniforms, arguments = random_policies(rows, width, k=5, concentration=20_000.0)
    logprobs, old = arguments[0], arguments[1]
    logprobs[:, -1] = -np.inf  # no draft is accepted to its end
    lens = np.full(rows, width, np.int32)
    accepted, _, log_scale = accept_block(np.full_like(uniforms, 1e-6), arguments, lens)
    assert np.median(accepted) > 1000
    changes = logprobs.astype(np.float64) - old
    log_p, expected = np.zeros(rows), np.zeros((rows, width))
    for i in range(width - 1):
        log_p = np.minimum(0.0, log_p + changes[:, i])
        expected[:, i + 1] = log_p
    np.testing.assert_allclose(log_scale, expected[np.arange(rows), accepted], atol=1e-5)
    assert log_scale.min() < -0.1
