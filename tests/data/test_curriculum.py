"""Which prompts come next: the stream covers and resumes, choices are those of their papers."""

import collections
import dataclasses
import json

import numpy as np
import pytest
from prompt_streams import encoded_set, ids_of, prompts_of, stream_of
from small_runs import preset

from specrl_jax.data.curriculum import PromptStream, count_steps, part_of


def test_an_epoch_is_its_own_order_of_all_prompts():
    stream = PromptStream(encoded_set(12), 3, seed=5)
    for epoch in range(4):
        assert (stream.epoch_index, stream.batch_index) == (epoch, 0)
        assert stream.waiting == []
        order = np.random.default_rng([5, epoch]).permutation(12)
        assert [p for _ in range(4) for p in prompts_of(stream.next())] == [f"{i}>" for i in order]


def test_a_batch_takes_the_rest_of_an_epoch_and_begins_the_next():
    """5 prompts, 3 a step: what a step has of both epochs comes first in the next step."""
    stream = PromptStream(encoded_set(5), 3, seed=7)
    orders = [np.random.default_rng([7, epoch]).permutation(5).tolist() for epoch in range(2)]
    assert orders == [[2, 0, 4, 1, 3], [3, 0, 2, 1, 4]]
    batches = [prompts_of(stream.next()) for _ in range(3)]
    assert batches == [["2>", "0>", "4>"], ["1>", "3>", "0>"], ["3>", "2>", "1>"]]


@pytest.mark.parametrize(
    ("total", "size"), [(100, 51), (100, 49), (100, 99), (11, 3), (7, 4), (3, 2), (5, 5), (4, 1)]
)
@pytest.mark.parametrize("seed", [0, 7])
def test_each_prompt_comes_once_before_any_comes_twice(total, size, seed):
    stream = PromptStream(encoded_set(total), size, seed)
    count = collections.Counter(dict.fromkeys(ids_of(stream.find(stream._ids)), 0))
    for step in range(1, 4 * total // size + 2):
        names = ids_of(stream.next())
        assert len(set(names)) == size
        before = min(count.values())
        for name in names:
            count[name] += 1
        assert stream.given == count.total() == step * size
        # A step may end a pass and start the next, in whose prompts none is left behind.
        assert max(count.values()) - before <= 2
        assert max(count.values()) - min(count.values()) <= 1
    if size < total:
        assert max(count.values()) >= 4


@pytest.mark.parametrize(
    ("epochs", "prompts", "size", "steps"),
    [
        (4, 1000, 512, 8),
        (1, 1000, 512, 2),
        (1, 1100, 512, 2),
        (3, 12, 4, 9),
        (1, 5, 2, 3),
        (1, 3, 3, 1),
    ],
)
def test_steps_come_nearest_to_the_epochs(epochs, prompts, size, steps):
    config = preset("tiny")
    config.train.update(epochs=epochs, steps=0)
    config.rollout.prompts_per_step = size
    assert count_steps(config, prompts) == steps
    config.train.steps = 17
    assert count_steps(config, prompts) == 17


@pytest.mark.parametrize("name", ["uniform", "mopps", "easy_to_hard"])
def test_resume_goes_on_exactly(name):
    """At every step, also where prompts that were busy wait."""

    def steps(stream, busy, count):
        for _ in range(count):
            yield json.dumps(stream.host()), stream.given, busy, prompts_of(stream.peek())
            batch = stream.take(3, busy=busy)
            rewards = [[len(e.prompt) % 2, 1.0] for e in batch.examples]
            stream.observe(batch, np.array(rewards))
            busy = ids_of(batch)[:2]

    expected = list(steps(stream_of(name, encoded_set(11)), [], 15))
    for start in range(8):
        state, _, busy, _ = expected[start]
        resumed = stream_of(name, encoded_set(11)).restore(json.loads(state))
        assert list(steps(resumed, busy, 7)) == expected[start : start + 7]
    if name == "uniform":
        assert any(json.loads(state)["waiting"] for state, *_ in expected)


def test_peek_equals_next_and_changes_nothing():
    stream = PromptStream(encoded_set(11), 3, seed=5)
    for _ in range(7):  # over two ends of an epoch
        seen = prompts_of(stream.peek())
        place = stream.host()
        assert prompts_of(stream.peek()) == seen
        assert stream.host() == place
        assert prompts_of(stream.next()) == seen


def test_prompts_one_by_one_come_in_the_same_order():
    stream = PromptStream(encoded_set(11), 3, seed=5)
    batches = PromptStream(encoded_set(11), 3, seed=5)
    expected = [p for _ in range(3) for p in prompts_of(batches.next())]
    assert prompts_of(stream.take(4)) + prompts_of(stream.take(0)) == expected[:4]
    assert prompts_of(stream.take(5)) == expected[4:]


def test_prompts_in_flight_wait_and_are_the_first_of_the_next():
    """Each is given out as often as it is drawn, never while it is in flight."""
    encoded = encoded_set(8)
    stream = PromptStream(encoded, 4, seed=5)
    flying = []
    count = collections.Counter()
    rng = np.random.default_rng(0)
    for step in range(60):
        taken = stream.take(4 if step else 6, busy=flying)
        ids = ids_of(taken)
        assert not set(ids) & set(flying)
        flying = [*flying, *ids]
        assert len(set(flying)) == len(flying) == 6
        for _ in range(4):  # some are done, in any order
            done = flying.pop(rng.integers(len(flying)))
            count[done] += 1
        count_drawn = 4 * (2 * stream.epoch_index + stream.batch_index)
        waiting = len(stream.host()["waiting"])
        assert count.total() + len(flying) + waiting == count_drawn
        # What waits was passed over, or is the rest of a batch.
        assert waiting <= 3 * 4
    assert set(count) == set(ids_of(encoded))
    assert max(count.values()) - min(count.values()) <= 3


def test_prompts_are_found_by_id():
    encoded = encoded_set(5)
    ids = [encoded.examples[i].prompt_id for i in (4, 0)]
    stream = PromptStream(encoded, 2, seed=0)
    assert prompts_of(stream.find(ids)) == ["4>", "0>"]
    assert stream.find([]).tokens.shape == (0, 6)


@pytest.mark.parametrize(
    ("total", "size", "seed", "name"),
    [(12, 3, 5, "prompts"), (11, 2, 5, "prompts_per_step"), (11, 3, 6, "seed")],
)
def test_resume_refuses_another_order(total, size, seed, name):
    state = PromptStream(encoded_set(11), 3, seed=5).host()
    with pytest.raises(ValueError, match=rf"^data must be as in the checkpoint: {name} was"):
        PromptStream(encoded_set(total), size, seed).restore(state)
    state = stream_of("mopps", encoded_set(11)).host()
    with pytest.raises(ValueError, match=rf"^data must be as in the checkpoint: {name} was"):
        stream_of("mopps", encoded_set(total), size, seed).restore(state)


def test_resume_refuses_prompts_that_were_encoded_otherwise():
    """For example an edited chat template: ids belong to the rows, and stay."""
    encoded = encoded_set(11)
    edited = dataclasses.replace(encoded, tokens=encoded.tokens + 1)
    state = PromptStream(encoded, 3, seed=5).host()
    rule = r"^data must be as in the checkpoint: prompts' tokens was '\w{16}', is '\w{16}'; set "
    with pytest.raises(ValueError, match=rule):
        PromptStream(edited, 3, seed=5).restore(state)


@pytest.mark.parametrize("size", [0, 12])
def test_stream_needs_enough_prompts(size):
    with pytest.raises(ValueError, match=rf"must be in \[1, 11\], .* got {size}$"):
        PromptStream(encoded_set(11), size, seed=0)


# --- prompts chosen anew --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uniform", "mopps", "easy_to_hard"])
def test_a_batch_has_no_prompt_twice_and_none_that_is_busy(name):
    stream = stream_of(name, encoded_set(12))
    busy = []
    for _ in range(8):
        batch = stream.take(4, busy=busy)
        names = ids_of(batch)
        assert len(set(names)) == 4
        assert not set(names) & set(busy)
        busy = names
    assert stream.given == 32
    assert len(stream.next().examples) == 3
    with pytest.raises(ValueError, match=">= 13, the prompts in progress at a time, got 12"):
        stream.take(9, busy=busy)


# --- parts of a group -----------------------------------------------------------------------------


def test_parts_of_a_group_have_names_and_noise_of_their_own():
    stream = stream_of("speed", encoded_set(5))
    whole = stream.next()
    assert part_of(whole, 0) is whole
    parts = [part_of(whole, first) for first in (0, 2, 4)]
    names = [e.key for part in parts for e in part.examples]
    assert len(set(names)) == len(names) == 9
    assert names[3] == names[0] + "+2"
    examples = [e for part in parts for e in part.examples]
    assert [e.prompt_id for e in examples] == names[:3] * 3
    assert [e.first_sample for e in examples] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    ids = np.concatenate([part.ids for part in parts])
    assert len(np.unique(ids, axis=0)) == 9
    for part in parts:
        np.testing.assert_array_equal(part.tokens, whole.tokens)
