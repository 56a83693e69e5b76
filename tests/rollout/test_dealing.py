"""Groups are dealt to shards of the batch, and stay there: nothing of it shows in a rollout."""

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal
from scheduler_cases import DRAFT_FIELDS, B, R, bytes_for, go, spec_of

from specrl_jax.rollout.dealing import deal


def test_the_longest_are_dealt_first():
    """9 + 1 and 5 + 4; the groups of a part in their order."""
    assert deal(np.array([1, 4, 5, 9]), 4, 2).tolist() == [0, 3, 1, 2]


def test_every_part_has_as_many_groups_to_train_on_before_its_others():
    work = np.random.default_rng(0).integers(1, 100, 24)
    parts = deal(work, 16, 4).reshape(4, 6)
    assert sorted(parts.reshape(-1).tolist()) == list(range(24))
    assert (parts[:, :4] < 16).all()
    assert (parts[:, 4:] >= 16).all()
    shares = work[parts].sum(axis=1)
    assert np.ptp(shares) < 0.2 * shares.mean()


@pytest.fixture(scope="module")
def plain(make_mesh):
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return ref.host(go(spec_of())[0])


# 8 groups of 4 rows; lengths of 1 to 8, so that shards end at different times.
QUEUES = {
    "a group on each shard": {"max_rows": 16, "cache_lengths": 2},
    "few bytes": {"cache_lengths": 2, "row_buckets": 3, "cache_bytes": bytes_for(16)},
}
FIRST, *OTHERS = QUEUES
CASES = [pytest.param(FIRST, has) for has in (False, True)]
CASES += [pytest.param(n, has, marks=pytest.mark.slow) for n in OTHERS for has in (False, True)]


@pytest.mark.parametrize(("queue", "drafts"), CASES)
def test_a_rollout_on_four_shards(make_mesh, plain, queue, drafts):
    lens = np.minimum(plain.lens, np.arange(B) % 5)  # where there are drafts, groups move
    with jax.set_mesh(make_mesh(2, 2, 2)):
        old = as_drafts(plain, lens) if drafts else None
        rollout, stats = go(spec_of(**QUEUES[queue]), drafts=old)
        check_equal(rollout, plain, but=DRAFT_FIELDS)
        assert stats.metrics()["rollout/imbalance_row_steps"] > 0
        if drafts:
            np.testing.assert_array_equal(rollout.prefix_lens, lens)


def test_shards_take_up_rows_on_their_own(make_mesh, plain):
    """One shard has the long responses: the others go on with what waits for them."""
    max_lens = np.where(np.arange(B) < B // 4, R, 1).astype(np.int32)
    with jax.set_mesh(make_mesh(2, 2, 1)):
        rollout, stats = go(spec_of(max_rows=16, cache_lengths=1), max_lens=max_lens)
    np.testing.assert_array_equal(rollout.lens, max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[:, 0], plain.tokens[:, 0])
    assert stats.decode_steps <= 2 * R + 2  # the shard's two groups, one after the other
