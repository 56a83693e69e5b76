"""Turns of a policy that thinks, is cut and fails, in own environments, packages and the tool."""

import sys

import numpy as np
import pytest
from ml_collections import ConfigDict
from scripted_policy import TAGS, TOKENIZER, play
from small_runs import line_of, small_config

from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.responses import Responder
from specrl_jax.rewards.reading import Reading
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.training.build import make_responder

LIMITS = {"timeout": 60.0, "memory_mib": 1024, "workers": 1}
PROBLEM = ("", "task", {})


def own(name, script, problems=None, pool_settings=None, **settings):
    """Play episodes of one of the own environments."""
    settings.setdefault("slots", 100)
    name = f"own_environments:{name}"
    with EnvironmentPool(name, **LIMITS, **pool_settings or {}) as pool:
        return play(pool, problems or [PROBLEM] * len(script), script, **settings)


# --- thoughts -------------------------------------------------------------------------------------

# A turn, and what an environment gets of it.
TURNS = [
    ("5", "5"),
    ("<think>7 or 8?</think>\n5", "5"),
    ("[THINK]7[/THINK]5", "5"),
    ("<think>7", ""),
    ("7 <think>5", ""),
    ("<think>7</think>", ""),
    ("<think>1</think>2<think>3</think>4", "4"),
    (" 5 ", " 5 "),
]


def test_an_environment_gets_what_follows_the_thoughts():
    script = [[turn, "done"] for turn, _ in TURNS]
    played = own("Adds", script)
    whole = own("Whole", script)
    for i, (turn, seen) in enumerate(TURNS):
        assert f"got {seen!r}" in played.texts[i]
        assert f"got {turn!r}" in whole.texts[i]
        assert turn in played.texts[i]  # the row keeps the thought
    np.testing.assert_array_equal(played.rewards, [5, 5, 5, 0, 0, 0, 4, 0])
    np.testing.assert_array_equal(whole.rewards, [5, 0, 0, 0, 0, 0, 0, 0])
    without = own("Adds", [["<think>7</think>5", "done"]], thought_tags=type(TAGS)())
    assert "got '<think>7</think>5'" in without.texts[0]


def test_what_precedes_a_turn_may_open_its_thought():
    script = [["7", "done"], ["7</think>5", "done"]]
    played = own("Adds", script, prompt="?<think>\n")
    assert [f"got {x!r}" in text for x, text in zip(("", "5"), played.texts)] == [True, True]
    np.testing.assert_array_equal(played.rewards, [0, 5])
    later = own("Opens", [["5", "7", "7</think>6", "</think>done"]])
    np.testing.assert_array_equal(later.turns[0, :4], [5, 0, 6, 0])
    assert "got ''" in later.texts[0]


def test_a_stop_string_in_an_open_thought_ends_a_turn_without_an_answer():
    for keep, seen in ((True, "5;"), (False, "5")):
        played = own(
            "Adds", [["<think>5;", "<think>x</think>5;", "done"]], stop=(";",), keep_stop=keep
        )
        assert "got ''" in played.texts[0]
        assert f"got {seen!r}" in played.texts[0]


def test_extract_looks_in_the_answer_for_environments_too():
    settings = {"pool_settings": {"extract": r"<m>(.*?)</m>"}}
    script = [
        ["<think><m>7</m></think> so <m> 5 </m>", "no move", "<m>1</m><m>2</m>", "<m>done</m>"]
    ]
    played = own("Adds", script, **settings)
    np.testing.assert_array_equal(played.turns[0, :4], [5, 0, 2, 0])
    line = line_of(EnvironmentPool, "own_environments:Whole", **LIMITS, extract="(x)")
    assert line.startswith('reward.extract must be "" where environment.name is own_env')


# --- cuts -----------------------------------------------------------------------------------------


def test_a_turn_that_the_length_cut_is_not_stepped_and_counts_as_cut():
    """Rows: cut in the first turn, in the second, an answer that does not fit, one that ends."""
    script = [["7" * 200], ["3", "9" * 200], ["4", "x" * 76, "done"], ["5", "done"]]
    played = own("Adds", script)
    np.testing.assert_array_equal(played.cut, [True, True, True, False])
    np.testing.assert_array_equal(played.rewards, [0, 3, 4, 5])
    assert [len(turns) for turns in played.left] == [0, 0, 1, 0]
    assert not any(played.reasons)
    assert played.texts[0] == "7" * 100


@pytest.mark.parametrize("name", ["Scores", "Replayed"])
def test_an_episode_that_a_bound_ends_is_scored(name):
    """Rows: cut at first, cut later, no room for a reply, the last turn of two, finished."""
    script = [["7" * 200], ["3", "9" * 200], ["x" * 76, "done"], ["5", "6"], ["5", "done"]]
    played = own(name, script, max_turns=2)
    np.testing.assert_allclose(played.rewards, [0.5, 3.8, 0.5, 12.6, 5], rtol=1e-6)
    np.testing.assert_array_equal(played.cut, [True, True, True, False, False])
    expected = [[0.5, 0], [3, 0.8], [0.5, 0], [5, 7.6], [5, 0]]
    np.testing.assert_allclose(played.turns, expected, rtol=1e-6)
    np.testing.assert_allclose(played.turns.sum(axis=1), played.rewards, rtol=1e-6)


def test_rows_that_are_not_waited_for_are_scored_too():
    script = [["7" * 200], ["3", "done"], ["5", "6"]]
    played = own("Scores", script, max_turns=2, allow_unfinished=0.6)
    np.testing.assert_allclose(played.rewards, [0.5, 3, 12.6], rtol=1e-6)


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_turn_costs_nothing_that_was_paid():
    played = own("Adds", [["3", "raise"], ["raise"], ["3", "4", "done"], ["3", "done"]], slots=80)
    np.testing.assert_array_equal(played.turns[:, :3], [[3, 0, 0], [0] * 3, [3, 4, 0], [3, 0, 0]])
    np.testing.assert_array_equal(played.rewards, [3, 0, 7, 3])
    assert [bool(reason) for reason in played.reasons] == [True, True, False, False]
    broken = own("BreaksAtScore", [["3", "9" * 200]], slots=60)
    np.testing.assert_array_equal(broken.rewards, [3])
    assert broken.reasons == ("RuntimeError: no score",)


def test_a_threshold_holds_for_what_was_paid():
    settings = {"pool_settings": {"threshold": 3.0}}
    played = own("Adds", [["3", "raise"], ["2", "raise"]], **settings)
    np.testing.assert_array_equal(played.rewards, [1, 0])


# --- packages and the tool ------------------------------------------------------------------------


def package(name, problems, script, **settings):
    if ":" in name:
        pytest.importorskip(name.partition(":")[0], reason="needs pip install -e '.[agents]'")
    with EnvironmentPool(name, **LIMITS) as pool:
        return play(pool, problems, script, **{"slots": 3000, "max_turns": 3} | settings)


def test_a_thinking_policy_moves_once_in_a_game():
    problem = ("0", "task", {"options": {"num_disks": 2}})
    moves = ["[A B]", "[A C]", "[B C]"]
    thinking = [f"<think>{move} or [C A]?</think>\n{move}" for move in moves]
    script = [thinking, [*thinking[:2], "<think>[B C]"], ["[A B]", "<think>[A C]" + "x" * 3000]]
    played = package("textarena:TowerOfHanoi-v0", [problem] * 3, script)
    assert "You moved disk 1 from A to B." in played.texts[0]
    assert "You moved disk 1 from C to A." not in played.texts[0]
    # The second is scored after three turns, one of which is no move; the third is cut.
    np.testing.assert_allclose(played.rewards, [1, 0.5, 0])
    np.testing.assert_array_equal(played.cut, [False, False, True])


def test_a_thinking_policy_guesses_once_in_a_taskset(monkeypatch):
    monkeypatch.syspath_prepend("tests/rewards")
    assert "tests/rewards" in sys.path
    problem = ("", "task", {"options": {}, "task": {"prompt": "0?", "secret": 2}})
    script = [["<think>2?</think>1", "<think>no, 2</think>2"], ["1", "3" * 3000], ["9" * 3000]]
    played = package("verifiers:guessing_taskset", [problem] * 3, script)
    np.testing.assert_allclose(played.rewards, [0.75, 0.25, 0])
    assert not any(played.reasons)


def test_a_thinking_policy_calls_and_answers_after_its_thoughts():
    call = "<tool_call>print(6 * 7)</tool_call>"
    script = [
        [r"<think>It is \boxed{42}. Let me check"],
        [r"<think>\boxed{42}</think> It is \boxed{41}."],
        [f"<think>I may say {call}", "42"],
        [f"<think>I may say <tool_call>.</think>{call}", "<think>41?</think>42"],
        ["<tool_call>print(" + "1" * 3000],
        [f"{call}", "4" * 3000],
    ]
    problems = [("42", "task", {})] * len(script)
    played = package("python", problems, script, slots=400, stop=("</tool_call>",))
    np.testing.assert_array_equal(played.rewards, [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(played.cut, [False] * 4 + [True] * 2)
    assert "42\n" not in played.texts[2]
    assert "42\n" in played.texts[3]


def test_a_tool_sees_the_end_of_a_call_that_rewards_do_not():
    """Rows: a call that a stop string ends, a mention, an answer at another stop string."""
    call = "<tool_call>6 * 7</tool_call>"
    script = [[f"so {call}", "42"], ["42 by <tool_call>"], [call, "42</answer>"], ["42</answer>"]]
    problems = [("42", "task", {})] * len(script)
    stop = ("</tool_call>", "</answer>")
    settings = {"slots": 400, "stop": stop, "call_end": "</tool_call>"}
    for keep in (True, False):
        played = package("python", problems, script, keep_stop=keep, **settings)
        assert played.rewards.tolist() == [1] * 4
        np.testing.assert_array_equal(played.turns[:, 1] > 0, [True, False, True, False])
        assert ["42\n" in text for text in played.texts] == [True, False, True, False]


def test_extract_reads_answers_and_no_calls():
    """For the environment `python` and for a user's own that declares how its calls end."""
    script = [["<tool_call>6 * 7</tool_call>", "It is <m>42</m>, not 41."], ["42"]]
    problems = [("42", "task", {})] * len(script)
    with EnvironmentPool("python", **LIMITS, extract="<m>(.*?)</m>") as pool:
        assert pool.call_end == "</tool_call>"
        played = play(pool, problems, script, slots=400, stop=("</tool_call>",))
    np.testing.assert_array_equal(played.rewards, [1, 0])
    script = [["<m>3</m>", "4;", "<m>done</m>"]]
    played = own("Calls", script, pool_settings={"extract": "<m>(.*?)</m>"})
    assert ["got '3'" in played.texts[0], "got '4;'" in played.texts[0]] == [True, True]


# --- one response ---------------------------------------------------------------------------------


def test_a_reading():
    stop = StopStrings.of((";",), TOKENIZER.token_texts())
    reader = Responder(None, TOKENIZER, thought_tags=TAGS, stop=stop)

    def read(text, *more):
        return reader.read(np.array(TOKENIZER.encode(text), np.int32), *more)

    assert read("<think>3;</think>4") == Reading("<think>3;", None, True)
    assert read("<think>3</think>4;5") == Reading("<think>3</think>4;5"[:-1], "4;", True)
    assert read("<think>3", False) == Reading("<think>3", None, False)
    assert read("3", True, True) == Reading("3", None, True)
    assert read("3</think> 4", False, True) == Reading("3</think> 4", "4", False)
    assert reader.read(np.array([], np.int32)) == Reading("", "", True)
    assert reader.read(np.array([*TOKENIZER.encode("4"), 1])) == Reading("4", "4", True)
    assert [Reading("a", x).seen(False) for x in ("b", None, "")] == ["b", "", ""]
    assert Reading("a", None).seen(True) == "a"


def test_the_start_says_what_a_user_would_not_expect(capsys):
    config = small_config({"reward.extract": ""})
    lines = {}
    for name in ("AtTheEnd", "Adds", "Scores"):
        config.environment.name = f"own_environments:{name}"
        config.data.options = ConfigDict()
        make_responder(config, TOKENIZER).pool.close()
        lines[name] = capsys.readouterr().out
    assert lines["Adds"] == lines["Scores"] == ""
    for stop in ("", "</answer>", "</b>;", ";"):
        config.environment.name = "own_environments:Calls"
        config.rollout.stop = stop
        responder = make_responder(config, TOKENIZER)
        assert responder.call_end == ";"
        responder.pool.close()
        lines[stop] = capsys.readouterr().out
    assert lines["</b>;"] == lines[";"] == ""
    line = (
        "environment: own_environments:Calls has tools, but no text of rollout.stop ends a turn "
        "at ;: a turn continues after a call; set --config.rollout.stop=';'\n"
    )
    assert [lines[stop] for stop in ("", "</answer>")] == [line, line]
    assert lines["AtTheEnd"] == (
        "environment: own_environments:AtTheEnd pays at the end of an episode and cannot "
        "score it earlier: one that environment.max_turns or rollout.response_len ends has "
        "no reward\n"
    )
