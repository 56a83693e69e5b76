"""Prompts by the posterior of their pass rate."""

import collections

import numpy as np
from prompt_streams import encoded_set, ids_of, stream_of


def test_a_posterior_by_hand():
    """The docstring's row, then a second visit: 0.5 (4, 2) + 0.5 + (1, 1)."""
    stream = stream_of("mopps", encoded_set(3), size=1)
    prompts = stream.find([stream.next().examples[0].prompt_id])
    name = prompts.examples[0].prompt_id
    stream.observe(prompts, np.array([[1.0, 1.0, 0.0, 1.0]]))
    assert stream.host()["posterior"] == {name: [4.0, 2.0]}
    stream.observe(prompts, np.array([[0.5, 0.5]]))
    assert stream.host()["posterior"] == {name: [3.5, 2.5]}
    stream.observe(prompts, np.array([[7.0, -3.0]]))  # held within [0, 1]
    assert stream.host()["posterior"] == {name: [3.25, 2.75]}


def test_prompts_near_the_target_are_taken_more_often():
    """Rates 0, 1/2, 1 are well known: of 30 prompts nearly all that are chosen have 1/2."""
    encoded = encoded_set(30)
    stream = stream_of("mopps", encoded, 5, 0, candidates=6.0, decay=1.0)
    rates = np.arange(30) % 3 / 2
    stream.observe(encoded, np.repeat(rates[:, None], 400, axis=1))
    rate = dict(zip(ids_of(encoded), rates, strict=True))
    taken = [rate[name] for _ in range(40) for name in ids_of(stream.next())]
    assert np.mean(np.array(taken) == 0.5) == 1.0
    # Without evidence every prompt has the same chance, whatever the target.
    fresh = stream_of("mopps", encoded, 5, 0, candidates=6.0, target=0.9, decay=1.0)
    count = collections.Counter(name for _ in range(300) for name in ids_of(fresh.next()))
    assert len(count) == 30
    assert min(count.values()) > 25  # 50 each, within 4 standard deviations
    assert max(count.values()) < 77


def test_candidates_are_drawn_from_all():
    """With one candidate a place the choice is plain chance, whatever is known."""
    encoded = encoded_set(10)
    stream = stream_of("mopps", encoded, 5, 0, candidates=1.0, decay=1.0)
    stream.observe(encoded, np.ones((10, 50)))
    assert {name for _ in range(20) for name in ids_of(stream.next())} == set(ids_of(encoded))


def test_rates_in_a_range():
    """Rates 0, 1/4, 1/2, 3/4, 1 are known well, and those in [0.4, 0.8] are taken; then the nearest
    to them."""
    encoded = encoded_set(30)
    settings = {"select": "threshold", "low": 0.4, "high": 0.8, "candidates": 30.0, "decay": 1.0}
    stream = stream_of("mopps", encoded, 12, 0, **settings)
    rates = np.arange(30) % 5 / 4
    groups = np.arange(400)[None, :] < 400 * rates[:, None]
    stream.observe(encoded, groups.astype(float))
    rate = dict(zip(ids_of(encoded), rates, strict=True))
    for _ in range(10):
        assert {rate[name] for name in ids_of(stream.next())} == {0.5, 0.75}  # six of each
    taken = [rate[name] for name in ids_of(stream.take(18))]
    assert collections.Counter(taken) == {0.5: 6, 0.75: 6, 0.25: 6}
