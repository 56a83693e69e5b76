"""Strings that end a turn, against Python's own search in the text."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
from rollout_reference import host

from specrl_jax.rollout.stop_strings import (
    NOTHING,
    StopStrings,
    make_stop_strings,
    parse_stop,
    turn_ends,
    write_stop,
)
from specrl_jax.text.tokenizer import CharacterTokenizer

TEXT = st.text("ab<", max_size=3)
STRING = st.text("ab<", min_size=1, max_size=4)
# Of the tokens of `ref.MODEL`: one token may hold the end of a string, all of it, or nothing.
TEXTS = ["", "", "a", "b", "ba", "ab", "c", "aa", "bca", "cab", "a", "b", "ca", "c", "bb", "ac"]
STRINGS = ("cab", "bb")


def first_end(texts: list[str], strings) -> int:
    """Return the first token whose text completes a string; the number of tokens without one."""
    for count in range(1, len(texts) + 1):
        if any(string in "".join(texts[:count]) for string in strings):
            return count - 1
    return len(texts)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(STRING, min_size=1, max_size=3),
    st.lists(TEXT.filter(bool), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
def test_the_first_end_is_where_the_text_has_a_string(strings, vocab, ids):
    ids = [i % len(vocab) for i in ids]
    stop = StopStrings.of(strings, vocab)
    marks = stop.ends(np.array([[NOTHING] * stop.window + ids]), np)[0]
    assert np.argmax([*marks, True]) == first_end([vocab[i] for i in ids], strings)


def test_what_another_said_is_no_part_of_a_string():
    stop = StopStrings.of(["ab"], ["a", "b", ""])
    marks = turn_ends((2,), stop, np.array([[NOTHING, 0, NOTHING, 1, 0, 1, 2]]), np)
    np.testing.assert_array_equal(marks, [[False, False, False, False, True, True]])
    # Nor is what a turn before this one said, however it ended.
    stop = StopStrings.of(["ab", "<aba>"], ["a", "b", "ab", "x"])
    for before in ([2, NOTHING], [0, 1, NOTHING], [3, 2, NOTHING], [NOTHING, 0, NOTHING]):
        tokens = [NOTHING] * (stop.window - len(before)) + before + [1, 3, 2, 3]
        marks = stop.ends(np.array([tokens]), np)
        np.testing.assert_array_equal(marks, [[False, False, True, False]])


@pytest.fixture(scope="module")
def plain(make_mesh):
    """(weights, rollout without strings); many responses are as long as they may be."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        _, weights = ref.policy(model=ref.ONE_LAYER)
        rollout, _ = ref.run(ref.match_spec(eos=(1,), slots=6), weights, ref.random_prompts())
        return weights, host(rollout)


@pytest.mark.parametrize(
    ("width", "sizes"),
    [
        (1, (1, 1, 1)),
        (4, (2, 2, 2)),
        pytest.param(4, (1, 1, 1), marks=pytest.mark.slow),
        pytest.param(1, (2, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_response_is_the_plain_one_up_to_its_string(make_mesh, plain, width, sizes):
    """With tree drafts, with the plain responses as drafts, in few rows, on one device and more."""
    _, expected = plain
    stop = StopStrings.of(STRINGS, TEXTS)
    spec = ref.match_spec(width, eos=(1,), slots=6, stop=stop, max_rows=16, row_buckets=2)
    with jax.set_mesh(make_mesh(*sizes)):
        _, weights = ref.policy(model=ref.ONE_LAYER)
        options = {}
        if width > 1:
            options["history"] = ref.history_of(spec, expected.tokens.ids, expected.lens)
        without, _ = ref.run(spec, weights, ref.random_prompts(), **options)
        drafts = ref.plain_drafts(expected.tokens.ids, expected.lens)
        drafted, _ = ref.run(spec, weights, ref.random_prompts(), drafts=drafts, **options)
        without = host(without)
        drafted = host(drafted)
    stopped = 0
    for row, count in enumerate(expected.lens.tolist()):
        texts = [TEXTS[i] for i in expected.tokens.ids[row, :count].tolist()]
        length = min(first_end(texts, STRINGS) + 1, count)
        stopped += length < count
        for rollout in (without, drafted):
            assert rollout.lens[row] == length
            np.testing.assert_array_equal(
                rollout.tokens.ids[row, :length], expected.tokens.ids[row, :length]
            )
        assert drafted.prefix_lens[row] == length
    assert stopped > 8
    ended = spec.ended(without.tokens.ids, without.lens)
    texts = ["".join(TEXTS[i] for i in row[:n]) for row, n in zip(without.tokens.ids, without.lens)]
    last = without.tokens.ids[np.arange(len(texts)), without.lens - 1]
    assert ended.tolist() == [
        any(string in text for string in STRINGS) or end == 1 for text, end in zip(texts, last)
    ]
    assert not ended.all()


def test_a_string_goes_on_where_a_row_is_resumed(make_mesh, plain):
    """Rows have the starts of their responses, cut at any token."""
    _, expected = plain
    stop = StopStrings.of(STRINGS, TEXTS)
    spec = ref.match_spec(eos=(1,), slots=6, stop=stop)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        _, weights = ref.policy(model=ref.ONE_LAYER)
        whole = host(ref.run(spec, weights, ref.random_prompts())[0])
        lens = np.maximum(whole.lens - np.arange(len(whole.lens)) % 3 - 1, 0)
        held = ref.put_rows(dataclasses.replace(whole, lens=lens.astype(np.int32)))
        resumed, _ = ref.run(spec, weights, ref.random_prompts(), held=held)
    assert np.any(whole.lens < expected.lens)
    np.testing.assert_array_equal(resumed.lens, whole.lens)
    np.testing.assert_array_equal(resumed.tokens.ids, whole.tokens.ids)


def test_only_the_last_token_ends_a_response():
    """Inside the response, in the padding, and where there is no response at all."""
    tokens = np.array([[1, 5, 5], [5, 5, 1], [5, 5, 1], [1, 1, 1]])
    ended = ref.make_spec(eos=(1,)).ended(tokens, np.array([3, 3, 2, 0]))
    np.testing.assert_array_equal(ended, [False, True, False, False])


def cut(texts, strings, keep=True, needed=""):
    """Cut the text of a turn of a token each."""
    stop = StopStrings.of(strings, texts)
    return stop.cut(range(len(texts)), lambda ids: "".join(texts[i] for i in ids), keep, needed)


def test_what_rewards_see():
    strings = ("</a>", "/a")
    for texts in (["x</a> y"], [*"x</a> y"], ["x<", "/a> y"]):
        assert cut(texts, strings) == "x</a"  # "/a" ends first
        assert cut(texts, strings, keep=False) == "x<"
    assert cut(["x<a", "> y"], strings, keep=False) == "x<a> y"
    assert cut(["1</a>2</a>"], ("</a>",)) == "1</a>"
    assert StopStrings.of(strings, ["/a"]).cut([], "".join, True) == ""
    # A text that a string completes may be kept in any case.
    for stop in ("</a>", "a>", "</a> "):
        assert cut(["1</a> ", "2"], (stop,), keep=False, needed="</a>").rstrip() == "1</a>"
    assert cut(["1</b>2"], ("</a>", "</b>"), keep=False, needed="</a>") == "1"
    # Strings that end together: the longer one is left out.
    assert cut(["x", "ab"], ("b", "ab"), keep=False) == "x"


def test_strings_of_a_configuration():
    config = ConfigDict({"rollout": {"stop": " ab  c "}})
    tokenizer = CharacterTokenizer("abc")
    stop = make_stop_strings(config, tokenizer)
    assert stop.strings == ("ab", "c")
    assert make_stop_strings(config, tokenizer) is stop  # programs hold it: they compile once
    assert make_stop_strings(ConfigDict({"rollout": {"stop": ""}}), tokenizer) is None
    config.rollout.stop = "ab ada"
    with pytest.raises(ValueError, match="got 'ada': no tokens produce 'da'"):
        make_stop_strings(config, tokenizer)


@pytest.mark.parametrize(
    ("value", "strings"),
    [
        ("", ()),
        ("</answer>  </tool_call> ", ("</answer>", "</tool_call>")),
        (r"\boxed{ [END] []", (r"\boxed{", "[END]", "[]")),
        ("é 中", ("é", "中")),
        (r'["\n\n", "Final answer: ", " "]', ("\n\n", "Final answer: ", " ")),
        (r' [ "\u4e2d\ud83c\udf89", "a\"\\n"] ', ("中🎉", 'a"\\n')),
        ('["one"]', ("one",)),
    ],
)
def test_texts_apart_by_blanks_or_a_list(value, strings):
    assert parse_stop(value) == strings
    assert parse_stop(write_stop(strings)) == strings
