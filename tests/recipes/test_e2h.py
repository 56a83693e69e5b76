"""Prompts by level of difficulty."""

import collections
import dataclasses

import numpy as np
import pytest
from prompt_streams import encoded_set, ids_of, prompts_of, stream_of
from small_runs import preset

from specrl_jax.recipes.e2h import SCHEDULES

SHARES = {
    # K = 3: floor 1/6, rising 1/6 2/6 3/6.
    ("classic", 0.0): (1, 0, 0),
    ("classic", 0.5): (0, 1, 0),
    ("classic", 0.99): (0, 0, 1),
    ("balanced", 0.3): (1 / 3, 1 / 3, 1 / 3),
    ("cosine", 0.0): (3 / 6, 2 / 6, 1 / 6),
    ("cosine", 1 / 3): (2.5 / 6, 2 / 6, 1.5 / 6),  # 3/4 of the easy shares, 1/4 of the hard ones
    ("cosine", 1.0): (1 / 6, 2 / 6, 3 / 6),
    # μ = 0, and sqrt(1/4) · 2 = 1; σ = 1/2, so that a level away weighs e^-2, and two e^-8.
    ("gaussian", 0.0): (1 / 6 + 1 / 2 * 1 / (1 + np.exp(-2) + np.exp(-8)), None, None),
    ("gaussian", 0.25): (None, 1 / 6 + 1 / 2 * 1 / (1 + 2 * np.exp(-2)), None),
}


@pytest.mark.parametrize(("schedule", "progress"), SHARES)
def test_shares_of_levels_by_hand(schedule, progress):
    settings = preset("tiny").curriculum
    shares = SCHEDULES[schedule](progress, 3, settings)
    assert shares.sum() == pytest.approx(1)
    for share, expected in zip(shares, SHARES[schedule, progress], strict=True):
        assert expected is None or share == pytest.approx(expected)
    if schedule in ("cosine", "gaussian"):
        assert shares.min() >= 1 / 6 - 1e-12
    if schedule == "gaussian":
        settings.floor = False
        bare = SCHEDULES[schedule](progress, 3, settings)
        assert shares == pytest.approx(1 / 6 + bare / 2)


@pytest.mark.parametrize("schedule", ["classic", "balanced", "cosine", "gaussian"])
def test_levels_are_drawn_by_their_shares(schedule):
    """First prompts of many streams, at three fifths of a run; a share's error is binomial."""
    encoded = encoded_set(40)  # answers "0" to "39": 10 of one digit, 30 of two
    draws = 2_000
    count = collections.Counter()
    for seed in range(draws):
        stream = stream_of("easy_to_hard", encoded, 1, seed, schedule=schedule, levels=0)
        stream.start_step(7)
        count[len(stream.next().examples[0].answer)] += 1
    shares = SCHEDULES[schedule](0.6, 2, preset("tiny").curriculum)
    for length, share in zip((1, 2), shares, strict=True):
        error = 4 * np.sqrt(draws * share * (1 - share)) + 1e-9
        assert count[length] == pytest.approx(draws * share, abs=error)


def test_levels_of_equal_size():
    """Of 40 prompts in four levels the first ten are the easiest; ties are cut by prompt_id."""
    encoded = encoded_set(40)
    ids = ids_of(encoded)
    order = sorted(ids, key=lambda name: (len(encoded.examples[ids.index(name)].answer), name))
    settings = {"schedule": "classic", "levels": 4}
    for step in (1, 4, 6, 9):  # at 0, 0.3, 0.5 and 0.8 of the run
        stream = stream_of("easy_to_hard", encoded, 10, step, **settings)
        stream.start_step(step)
        level = int((step - 1) / 10 * 4)
        assert set(ids_of(stream.next())) == set(order[10 * level : 10 * level + 10])


def test_an_empty_level_is_not_drawn():
    """All of the level that the schedule wants are busy or taken: others are."""
    encoded = encoded_set(12)  # 10 of one digit, 2 of two
    stream = stream_of("easy_to_hard", encoded, 3, 0, schedule="classic", levels=0)
    easy = [e.prompt_id for e in encoded.examples if len(e.answer) == 1]
    taken = stream.take(4, busy=easy[:8])
    assert sorted(len(e.answer) for e in taken.examples) == [1, 1, 2, 2]


def test_difficulty_from_the_metadata():
    encoded = encoded_set(6)
    examples = tuple(
        dataclasses.replace(e, metadata={"difficulty": {"numbers": -i}})
        for i, e in enumerate(encoded.examples)
    )
    encoded = dataclasses.replace(encoded, examples=examples)
    settings = {"difficulty": "difficulty.numbers", "schedule": "classic", "levels": 0}
    stream = stream_of("easy_to_hard", encoded, 1, 0, 6, **settings)
    taken = []
    for step in range(1, 7):
        stream.start_step(step)
        taken += prompts_of(stream.next())
    assert taken == ["5>", "4>", "3>", "2>", "1>", "0>"]
    for field in ("difficulty", "difficulty.other", "no.where"):
        with pytest.raises(ValueError, match=r"^curriculum\.difficulty must be prompt_len, answer"):
            stream_of("easy_to_hard", encoded, 1, difficulty=field)
