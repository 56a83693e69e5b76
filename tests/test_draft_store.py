"""The draft store against a plain dictionary of lists."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.rollout.draft_store import DraftStore
from specrl_jax.sharding import put, spec
from specrl_jax.types import Drafts, Example, Prompts, Rollout

R = 5
FIELDS = [f.name for f in dataclasses.fields(Drafts)]
NO_DRAFT = None


def make_prompts(names) -> Prompts:
    examples = tuple(Example(name, "", "", "", {}) for name in names)
    count = len(examples)
    ids = np.arange(2 * count, dtype=np.uint32).reshape(count, 2)
    return Prompts(np.zeros((count, 3), np.int32), np.ones(count, np.int32), ids, examples)


def make_rollout(rng, rows: int) -> Rollout:
    """Responses of lengths 1..R whose every field is different."""
    floats = rng.normal(size=(4, rows, R)).astype(np.float32)
    return Rollout(
        tokens=put(rng.integers(0, 99, (rows, R), dtype=np.int32), "batch", None),
        lens=put(rng.integers(1, R + 1, rows, dtype=np.int32), "batch"),
        prefix_lens=put(np.zeros(rows, np.int32), "batch"),
        policy_logprobs=put(floats[0], "batch", None),
        sampling_logprobs=put(floats[1], "batch", None),
        origin_logprobs=put(floats[2], "batch", None),
        origin_steps=put(rng.integers(0, 9, (rows, R), dtype=np.int32), "batch", None),
    )


class Shelf:
    """The same store as a dictionary: (prompt, sample) → responses, newest first."""

    def __init__(self):
        self.rows = {}

    def put(self, names, rollout, samples):
        group = len(rollout.lens) // len(names)
        host = {name: np.asarray(getattr(rollout, name)) for name in FIELDS}
        for i, name in enumerate(names):
            for g in range(min(group, samples)):
                row = {field: host[field][i * group + g] for field in FIELDS}
                self.rows.setdefault((name, g), []).insert(0, row)

    def get(self, name, sample, age):
        rows = self.rows.get((name, sample), [])
        return rows[age - 1] if len(rows) >= age else NO_DRAFT

    def forget(self, name):
        self.rows = {k: v for k, v in self.rows.items() if k[0] != name}


def check(store, shelf, names, group, age=1) -> int:
    """Compare every field of every row; returns the number of rows that have a draft."""
    drafts = jax.tree.map(np.asarray, store.get(make_prompts(names), group, age))
    assert drafts.lens.shape == (len(names) * group,)
    found = 0
    for row, (name, g) in enumerate((n, g) for n in names for g in range(group)):
        expected = shelf.get(name, g, age)
        if expected is NO_DRAFT:
            assert drafts.lens[row] == 0
            continue
        found += 1
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(drafts, field)[row], expected[field], field)
    return found


def store_both(store, shelf, names, rng, group, samples):
    rollout = make_rollout(rng, len(names) * group)
    store.put(make_prompts(names), rollout)
    shelf.put(names, rollout, samples)


def test_an_empty_store_offers_nothing(mesh):
    store = DraftStore(4, 2, R)
    assert check(store, Shelf(), "abcd", 2) == 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_two_generations_like_a_dictionary(make_mesh, shape):
    with jax.set_mesh(make_mesh(*shape)):
        rng, shelf = np.random.default_rng(0), Shelf()
        store = DraftStore(20, 2, R, generations=2)
        first, second = "abcdefgh", "hgfeijkl"
        for names in (first, second, first):
            store_both(store, shelf, names, rng, 2, 2)
            assert check(store, shelf, names, 2) == 16
        assert check(store, shelf, first, 2, age=2) == 16
        assert check(store, shelf, second, 2, age=1) == 16
        assert check(store, shelf, "xyzijklm", 2, age=1) == 8  # i, j, k, l, stored once
        assert check(store, shelf, "xyzijklm", 2, age=2) == 0
        assert check(store, shelf, "mhxyzwvu", 2, age=2) == 2  # h was stored before
        capacity = -(-20 // (shape[0] * shape[1])) * shape[0] * shape[1]
        assert store.arrays.tokens.shape == (2, capacity, 2, R)
        assert store.arrays.tokens.sharding.spec == jax.P(None, *spec("batch"), None, None)
        assert store.nbytes == 2 * capacity * 2 * (4 * R + 1) * 4


def test_another_group_size(mesh):
    rng, shelf, store = np.random.default_rng(1), Shelf(), DraftStore(4, 3, R, generations=2)
    store_both(store, shelf, "ab", rng, 3, 3)
    assert check(store, shelf, "ab", 5) == 6  # samples 3 and 4 have no draft
    assert check(store, shelf, "ba", 2) == 4
    store_both(store, shelf, "bc", rng, 2, 3)  # a smaller group leaves sample 2 of b as it was
    assert check(store, shelf, "abc", 3) == 8
    assert check(store, shelf, "abc", 3, age=2) == 2
    store_both(store, shelf, "ca", rng, 5, 3)  # samples beyond the store's are not kept
    assert check(store, shelf, "abc", 5) == 9


def test_the_prompt_stored_longest_ago_gives_way(mesh):
    rng, shelf, store = np.random.default_rng(2), Shelf(), DraftStore(3, 2, R, generations=2)
    for names in ("ab", "c", "a"):
        store_both(store, shelf, names, rng, 2, 2)
    assert check(store, shelf, "abc", 2) == 6
    store.get(make_prompts("b"), 2)  # reading does not keep a prompt
    # A smaller group than b's: what is left of b must not come back under d's name.
    store_both(store, shelf, "d", rng, 1, 2)
    shelf.forget("b")
    assert check(store, shelf, "abcd", 2) == 5
    assert check(store, shelf, "abcd", 2, age=2) == 2  # a's first
    store_both(store, shelf, "e", rng, 2, 2)
    shelf.forget("c")
    assert check(store, shelf, "abcde", 2) == 5


def test_capacity_is_rounded_up_to_the_batch_shards(make_mesh):
    with jax.set_mesh(make_mesh(8, 1, 1)):
        rng, shelf, store = np.random.default_rng(3), Shelf(), DraftStore(5, 1, R)
        store_both(store, shelf, "abcdefgh", rng, 1, 1)
        assert check(store, shelf, "abcdefgh", 1) == 8
        store_both(store, shelf, "ijklmnop", rng, 1, 1)
        for name in "abcdefgh":
            shelf.forget(name)
        assert check(store, shelf, "abcdijkl", 1) == 4


def test_state_and_restore(mesh):
    rng, shelf, store = np.random.default_rng(4), Shelf(), DraftStore(3, 2, R, generations=2)
    for names in ("abc", "b"):
        store_both(store, shelf, names, rng, 2, 2)
    state = json.loads(json.dumps(store.state()))
    arrays = jax.tree.map(jnp.copy, store.arrays)
    other = DraftStore(3, 2, R, generations=2)
    other.restore(state, arrays)
    assert check(other, shelf, "cab", 2) == 6
    assert check(other, shelf, "cab", 2, age=2) == 2
    # Both go on alike: the next new prompt takes a's slot, not b's.
    rollout = make_rollout(rng, 2)
    for each in (store, other):
        each.put(make_prompts("d"), rollout)
    shelf.put("d", rollout, 2)
    shelf.forget("a")
    for each in (store, other):
        assert check(each, shelf, "abcd", 2) == 6
    assert other.state() == store.state()


def test_a_store_of_another_shape_is_refused(mesh):
    saved = DraftStore(3, 2, R)
    with pytest.raises(ValueError, match=r"\(1, 3, 2, 5\).*\(1, 4, 2, 5\)") as error:
        DraftStore(4, 2, R).restore(saved.state(), saved.arrays)
    assert "\n" not in str(error.value)
