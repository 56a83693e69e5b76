"""Queues of the batch's shards: by hand, and in rollouts, where nothing of it shows."""

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal
from scheduler_cases import DRAFT_FIELDS, PROMPTS, B, R, go, spec_of

from specrl_jax.rollout.engine.queues import Queues
from specrl_jax.rollout.engine.requests import Requests


def test_who_waits_by_hand(make_mesh):
    """4 groups of 2 rows on 2 shards; the last group of each is of the next step."""
    none = np.zeros(8, np.int32)
    held, done = none.copy(), none > 0
    held[[0, 1]] = 3, 1
    done[1] = True
    with jax.set_mesh(make_mesh(2, 1, 1)):
        prompts, steps = ref.select(PROMPTS, range(4)), np.zeros(4, int)
        queues = Queues(Requests(prompts, steps, 4, held, done, draft_lens=none))
        assert [list(queue) for queue in queues.resumed] == [[[0]], []]
        assert [list(queue) for queue in queues.waiting] == [[], [[4, 5]]]
        assert [list(queue) for queue in queues.next_step] == [[[2, 3]], [[6, 7]]]
        assert queues.waiting_rows().tolist() == [1, 2]
        index = queues.pop(queues.waiting, np.array([0, 2]), 8)
        assert index.tolist() == [-1, -1, -1, -1, 4, 5, -1, -1]
        assert queues.is_waiting()
        assert queues.pop(queues.resumed, np.array([1, 0]), 2).tolist() == [0, -1]
        assert not queues.is_waiting()


@pytest.fixture(scope="module")
def plain(make_mesh):
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return ref.host(go(spec_of())[0])


@pytest.mark.parametrize("drafts", [False, True])
def test_a_rollout_on_four_shards(make_mesh, plain, drafts):
    """A group on each at a time; lengths of 1 to 8, so that shards end at different times."""
    lens = np.minimum(plain.lens, np.arange(B) % 5)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        old = as_drafts(plain, lens) if drafts else None
        rollout, _ = go(spec_of(max_rows=16), drafts=old)
        check_equal(rollout, plain, but=DRAFT_FIELDS)
        if drafts:
            np.testing.assert_array_equal(rollout.prefix_lens, lens)


def test_shards_take_up_rows_on_their_own(make_mesh, plain):
    """One shard has the long responses: the others go on with what waits for them."""
    max_lens = np.where(np.arange(B) < B // 4, R, 1).astype(np.int32)
    with jax.set_mesh(make_mesh(2, 2, 1)):
        rollout, stats = go(spec_of(max_rows=16), max_lens=max_lens)
    np.testing.assert_array_equal(rollout.lens, max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[:, 0], plain.tokens[:, 0])
    assert stats.decode_steps <= 2 * R + 2  # the shard's two groups, one after the other
