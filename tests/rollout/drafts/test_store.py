"""The draft store against a plain dictionary of lists."""

import copy
import itertools
import json

import jax
import numpy as np
import pytest
from rollout_reference import fields_of

from specrl_jax import abstract
from specrl_jax.process.checkpoint import Checkpointer
from specrl_jax.rollout.drafts.store import DraftStore, StoreShape
from specrl_jax.sharding import put
from specrl_jax.types import Example, Prompts, Rollout, Tokens

R = 5
MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2)]
FIELDS = (
    "ids", "lens", "sampling_logprobs", "origin_logprobs", "origin_steps",
    "top_ids", "top_logprobs",
)  # fmt: skip


def make_prompts(names) -> Prompts:
    examples = tuple(Example(name, "", "", "", {}) for name in names)
    count = len(examples)
    ids = np.arange(2 * count, dtype=np.uint32).reshape(count, 2)
    return Prompts(np.zeros((count, 3), np.int32), np.ones(count, np.int32), ids, examples)


def make_rollout(rng, rows: int, k: int = 0, slots: int = R) -> Rollout:
    """Responses of lengths 1..slots whose every field is different, zeros of both signs too."""
    floats = rng.normal(size=(4, rows, slots)).astype(np.float32)
    floats[:, :, 0] = rng.choice([-0.0, 0.0, -np.inf], size=(4, rows))
    top_ids = rng.integers(0, 99, (rows, slots, k), dtype=np.int32)
    top_logprobs = rng.normal(size=(rows, slots, k)).astype(np.float32)
    ints = rng.integers(0, 99, (2, rows, slots), dtype=np.int32)
    lens = put(rng.integers(1, slots + 1, rows, dtype=np.int32), "batch")
    tokens = Tokens(
        ids=put(ints[0], "batch", None),
        policy_logprobs=put(floats[0], "batch", None),
        sampling_logprobs=put(floats[1], "batch", None),
        origin_logprobs=put(floats[2], "batch", None),
        origin_steps=put(ints[1], "batch", None),
        sources=put(np.zeros((rows, slots), np.int8), "batch", None),
        top_ids=put(top_ids, "batch", None, None) if k else None,
        top_logprobs=put(top_logprobs, "batch", None, None) if k else None,
    )
    return Rollout(tokens, lens, prefix_lens=put(np.zeros(rows, np.int32), "batch"))


class Shelf:
    """The same store as a dictionary: prompt → sample → (step, response), newest first."""

    def __init__(self, prompts, samples, generations=1, history=1, max_age=0):
        self.capacity, self.samples, self.max_age = prompts, samples, max_age
        self.history = max(history, generations)
        self.rows = {}  # in the order in which they were stored

    def put(self, names, rollout, step):
        before = {name: self.rows.pop(name, {}) for name in names}
        while len(self.rows) + len(names) > self.capacity:
            del self.rows[next(iter(self.rows))]
        host = {f: np.asarray(x) for f, x in fields_of(rollout).items() if f in FIELDS}
        for i, name in enumerate(names):
            for g in range(self.samples):
                response = {f: x[i * self.samples + g] for f, x in host.items()}
                before[name].setdefault(g, []).insert(0, (step, response))
            self.rows[name] = before[name]

    def get(self, name, sample, age, step):
        """The response, or None."""
        rows = self.rows.get(name, {}).get(sample, [])
        if age > min(len(rows), self.history):
            return None
        stored, response = rows[age - 1]
        return None if self.max_age and step - stored > self.max_age else response


def check_drafts(drafts, shelf, names, age, step) -> int:
    """Compare every field of every row; returns the number of rows that have a draft."""
    drafts = {f: np.asarray(x) for f, x in fields_of(drafts).items()}
    assert drafts["lens"].shape == (len(names) * shelf.samples,)
    count = 0
    for row, (name, g) in enumerate(itertools.product(names, range(shelf.samples))):
        expected = shelf.get(name, g, age, step)
        count += expected is not None
        for field, array in drafts.items():
            value = 0 if expected is None else expected[field]
            np.testing.assert_array_equal(array[row], value, field)
    return count


def check_history(history, shelf, names, step) -> int:
    """Compare all responses of the prompts; returns how many there are."""
    tokens, lens = history
    for array in history:
        assert array.sharding.is_fully_replicated
    shape = (len(names), shelf.history, shelf.samples)
    assert tokens.shape == (*shape, R)
    assert lens.shape == shape
    tokens, lens = np.asarray(tokens), np.asarray(lens)
    ages = range(1, shelf.history + 1)
    for row, name in enumerate(names):
        for age, g in itertools.product(ages, range(shelf.samples)):
            expected = shelf.get(name, g, age, step) or {"ids": 0, "lens": 0}
            np.testing.assert_array_equal(tokens[row, age - 1, g], expected["ids"])
            assert lens[row, age - 1, g] == expected["lens"]
    return np.count_nonzero(lens)


def check(store, shelf, names, age=1, step=1) -> int:
    drafts = store.get(make_prompts(names), age, step=step)
    return check_drafts(drafts, shelf, names, age, step)


def store_both(store, shelf, names, rng, step):
    rollout = make_rollout(rng, len(names) * shelf.samples)
    store.put(make_prompts(names), rollout, step=step)
    shelf.put(names, rollout, step)


def test_trees_read_no_more_than_their_history(mesh):
    """Where more generations are kept, for drafts of an earlier age."""
    rng, store = np.random.default_rng(5), DraftStore(StoreShape(4, 2, R, 3, history=1))
    older, newest = Shelf(4, 2, 3), Shelf(4, 2)
    for step in (1, 2, 3):
        rollout = make_rollout(rng, 8)
        store.put(make_prompts("abcd"), rollout, step=step)
        for shelf in (older, newest):
            shelf.put("abcd", rollout, step)
    assert check(store, older, "abcd", age=3, step=4) == 8
    assert check_history(store.history(make_prompts("abcd"), step=4), newest, "abcd", 4) == 8


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize(("generations", "history", "k", "max_age"), [(2, 2, 0, 0), (1, 3, 2, 5)])
def test_random_operations_like_a_dictionary(make_mesh, shape, generations, history, k, max_age):
    """Twelve prompts, ten kept, batches of eight: prompts return, are evicted and expire."""
    with jax.set_mesh(make_mesh(*shape)):
        rng = np.random.default_rng(k)
        shelf = Shelf(10, 2, generations, history, max_age)
        store = DraftStore(StoreShape(10, 2, R, generations, history, k), max_age=max_age)
        step = count = read = 0
        batch = rng.permutation(list("abcdefghijkl"))[:8]
        for _ in range(16):
            step += int(rng.integers(1, 4))
            prompts, age = make_prompts(batch), int(rng.integers(1, generations + 1))
            drafts = store.get(prompts, age, step=step)
            count += check_drafts(drafts, shelf, batch, age, step)
            read += check_history(store.history(prompts, step=step), shelf, batch, step)
            if rng.integers(4):
                rollout = make_rollout(rng, 8 * 2, k)
                store.put(prompts, rollout, step=step)
                shelf.put(batch, rollout, step)
            batch = rng.permutation(list("abcdefghijkl"))[:8]
        assert count > 60
        assert read > 60
        # float32 and int32 beside each other: tokens are there once for both depths.
        row = 4 * (history * (R + 2) + generations * R * (3 + 2 * k))
        assert store.nbytes == 64 * 2 * row


def test_the_arrays_are_split_over_the_prompts(make_mesh):
    """On every mesh a multiple of 64 prompts."""
    with jax.set_mesh(make_mesh(2, 2, 2)):
        shape = StoreShape(65, 2, R, history=2, k=4)
        arrays = DraftStore(shape).arrays()
        shapes = abstract.result(shape.empty)
        assert arrays.tokens.ids.shape == (2, 128, 2, R)
        assert arrays.tokens.top_ids.shape == (1, 128, 2, R, 4)
        for array, like in zip(*map(jax.tree.leaves, (arrays, shapes)), strict=True):
            split = jax.P(None, ("data", "fsdp"), *(None,) * (array.ndim - 2))
            assert array.sharding.spec == split
            assert array.sharding == like.sharding
            assert (array.shape, array.dtype) == (like.shape, like.dtype)


def test_a_prompt_that_comes_twice_is_refused(mesh):
    store, rng = DraftStore(StoreShape(2, 2, R)), np.random.default_rng(4)
    with pytest.raises(ValueError, match="twice"):
        store.put(make_prompts("aba"), make_rollout(rng, 3), step=1)
    assert store.host()["slots"] == []


def test_a_checkpoint_is_restored_on_another_mesh(tmp_path, make_mesh):
    rng, shelf = np.random.default_rng(5), Shelf(10, 2, generations=1, history=2, max_age=9)
    owner = {"tokenizer": "t", "model": "m"}

    def new():
        return DraftStore(StoreShape(10, 2, R, 1, 2), max_age=9, owner=owner)

    with Checkpointer(tmp_path) as checkpoints:
        with jax.set_mesh(make_mesh(2, 2, 2)):
            store = new()
            store_both(store, shelf, "abcdefgh", rng, step=1)
            store_both(store, shelf, "ghabijcd", rng, step=2)
            checkpoints.save(2, {"store": store.arrays()}, {"store": store.host()})
            saved = copy.deepcopy(shelf)
            store_both(store, shelf, "abcdefgh", rng, step=3)  # the save is still under way
        with jax.set_mesh(make_mesh(8, 1, 1)):
            other = new()
            arrays, host = checkpoints.restore(2, {"store": other.arrays()})
            other.restore(json.loads(json.dumps(host["store"])), arrays["store"])
            assert check(other, saved, "efghijab", step=10) == 16
            history = other.history(make_prompts("abcdefgh"), step=10)
            assert check_history(history, saved, "abcdefgh", 10) == 28
            for step, names in enumerate(("klabcdef", "abcdefgh"), start=3):
                store_both(other, saved, names, rng, step)
            assert list(dict(other.host()["slots"])) == list(saved.rows)
            assert check(other, saved, "efghijkl", step=5) == 12


def test_a_store_of_another_owner_or_shape_is_refused(mesh):
    def new(prompts=3, k=0, generations=1, tokenizer="t1", model="m1"):
        owner = {"tokenizer": tokenizer, "model": model}
        return DraftStore(StoreShape(prompts, 2, R, generations, k=k), owner=owner)

    saved = new()
    state = json.loads(json.dumps(saved.host()))
    for other, message in (
        (new(tokenizer="t2"), r"tokenizer\.source must be .*t1, got t2; set it back"),
        (new(model="m2"), r"model\.source must be .*m1, got m2; set it back"),
        (new(prompts=4), r"saved with prompts = 3; this run has prompts = 4; resume with"),
        (new(k=2, generations=2), r"with generations = 1, .*k = 0; .* generations = 2, .*k = 2;"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            other.restore(state, saved.arrays())
        assert "\n" not in str(error.value)
        assert other.host()["slots"] == []
