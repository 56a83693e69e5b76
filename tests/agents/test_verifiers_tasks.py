"""Environments of verifiers: turns, tools and state, the package's own rewards, faults."""

import json

import pytest
from ml_collections import ConfigDict
from small_runs import line_of, preset

from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.environment_protocol import Step
from specrl_jax.agents.environments import load_environment
from specrl_jax.data import readers
from specrl_jax.data.item_process import SOURCES
from specrl_jax.data.prompts import load_examples

pytest.importorskip("verifiers", reason="needs pip install -e '.[agents]'")

# Responses of an episode whose secret is 2, what is said to each, and the reward at its end. Half
# of it is for the right number, half is 1 over the number of guesses.
GUESSES = [
    (["2"], [""], 1.0),
    (["0", "3", "2"], [">", "<", ""], 0.5 + 0.5 / 3),
    (["0", "no"], [">", ""], 0.5 / 3),  # the task's stop: the third guess is not asked for
]
# What a policy may not do, and the failure.
LIMITS = {"timeout": 60, "memory_mib": 512, "workers": 1}
FAULTS = [
    ("x", "RuntimeError: invalid literal for int() with base 10: 'x'"),  # of the environment
    ("again", "ValueError: an episode must be one conversation, another one starts"),
]


def problem(**data):
    return "", "task", {"options": {}, "task": data}


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def test_turns_stops_rewards_and_faults():
    """Episodes run in parallel, each in its own process."""
    turns = [responses for responses, _, _ in GUESSES] + [[fault] for fault, _ in FAULTS]
    said = [[] for _ in turns]
    last = {}
    with EnvironmentPool("verifiers:guessing_taskset", **LIMITS) as pool:
        episodes = pool.start([problem(prompt="0?", secret=2)] * len(turns))
        for turn in range(3):
            live = [i for i, responses in enumerate(turns) if turn < len(responses)]
            pool.submit([episodes[i] for i in live], [turns[i][turn] for i in live])
            answers = pool.collect([episodes[i] for i in live])
            last |= {i: answers[index] for index, i in enumerate(live)}
            for i in live:
                said[i].append(last[i].observation)
        pool.end(episodes)
    for i, (_, expected, reward) in enumerate(GUESSES):
        assert (said[i], last[i].failure) == (expected, "")
        assert (last[i].done, last[i].reward) == (True, pytest.approx(reward))
    for i, (_, failure) in enumerate(FAULTS, len(GUESSES)):
        assert (last[i].failure, last[i].reward) == (failure, 0)


def play(name, responses, **data):
    """Return the steps of an episode in this process."""
    episode = load_environment(name)()
    episode.reset(*problem(**data))
    return [episode.step(response) for response in responses]


def test_tools_and_their_state():
    """The policy reads that a call failed, and the episode continues."""
    add = call("add", amount=1)
    responses = [f"I add. {add}{add}", call("bell_ring"), "Done."]
    assert play("verifiers:ledger_taskset", responses, prompt="2!", answer=2) == [
        Step("total 1\ntotal 2", role="tool"),
        Step("ding", role="tool"),
        Step(reward=1.0, done=True),
    ]
    responses = [call("add", amount=9), call("nothing"), call("add", amount="x"), "<tool_call>"]
    high, unknown, wrong, end = play("verifiers:ledger_taskset", responses, prompt="2!", answer=2)
    assert high == Step("Error executing tool add: at most 2", role="tool")
    assert unknown == Step("error: unknown tool 'nothing'", role="tool")
    assert "Input should be a valid integer" in wrong.observation
    assert end == Step(reward=0.0, done=True)


FORM = '{"name": .., "arguments": {..}}'
ADD = '{"name": "add", "arguments": {"amount": 1}}'
# What stands between the tags of a turn's calls, and what is answered to each.
CALLS = [
    ([f"```json\n{ADD}\n```", f"~~~\n{ADD}\n~~~"], ["total 1", "total 2"]),
    ([f"    {ADD}", f"[{ADD}, {ADD}]"], ["total 3", "total 4", "total 5"]),
    (['{"name": "add", "arguments": "{\\"amount\\": 1}"}'], ["total 6"]),
    ([ADD, '{"name": "add"', ADD], ["total 7", "error: a call must be JSON, ", "total 8"]),
    (["null"], [f"error: a call must be a JSON object, {FORM}, got null"]),
    (["42", ADD], [f"error: a call must be a JSON object, {FORM}, got 42", "total 9"]),
    (["[]"], [f"error: a call must be a JSON object, {FORM}, got []"]),
    (["{}"], [f'error: a call must have the "name" of a tool, {FORM}, got {{}}']),
    ([""], [f"error: a call must be {FORM}, got nothing"]),
    (["add(1)"], [f"error: a call must be JSON, {FORM}: "]),
    (['{"name": "add", "arguments": [1]}'], [f'error: "arguments" must be a JSON object, {FORM}']),
    (['{"name": "bell_ring"}', ADD], ["ding", "total 10"]),
    (['{"name": "unreadable"}'], ["error: unknown tool 'unreadable'"]),
    (['{"name": "<tool_call>"}'], ["error: unknown tool '<tool_call>'"]),
]


def test_all_calls_of_a_turn_are_answered_in_order():
    responses = ["".join(f"<tool_call>{text}</tool_call>" for text in texts) for texts, _ in CALLS]
    end = "By `<tool_call>` and <tool_call>, it is 10."
    *steps, last = play("verifiers:ledger_taskset", [*responses, end], prompt="10!", answer=10)
    for (texts, answers), step in zip(CALLS, steps, strict=True):
        lines = step.observation.split("\n")
        assert len(lines) == len(answers), texts
        assert all(line.startswith(answer) for line, answer in zip(lines, answers)), (texts, lines)
        assert (step.role, step.done) == ("tool", False)
    assert last == Step(reward=1.0, done=True)


def test_a_taskset_says_how_its_calls_end():
    assert load_environment("verifiers:ledger_taskset").call_end == "</tool_call>"
    assert load_environment("verifiers:guessing_taskset").call_end == ""
    # Without tools a call is text.
    with pytest.raises(RuntimeError, match=r"invalid literal for int.*<tool_call>"):
        play("verifiers:guessing_taskset", [call("add", amount=1)], prompt="0?", secret=2)


def test_problems_of_a_taskset(monkeypatch):
    """Read here: the process that they are made in has to import the package first."""
    monkeypatch.setattr(readers, "read_items", lambda source, *request: SOURCES[source](*request))
    config = preset("tiny")
    config.environment.name = "verifiers:guessing_taskset"
    config.data.source = "verifiers"
    config.data.name = "guessing_taskset"
    config.data.prompts = 3
    config.data.eval_prompts = 2
    config.data.options = ConfigDict({"numbers": 5, "system": "Guess."})
    data = load_examples(config)
    messages = ({"role": "system", "content": "Guess."}, {"role": "user", "content": "0?"})
    assert [example.prompt for example in data.train + data.eval] == [messages] * 5
    secrets = [example.metadata["task"]["secret"] for example in data.train + data.eval]
    assert secrets == [0, 1, 2, 3, 4]
    assert len({example.prompt_id for example in data.train + data.eval}) == 5


def test_a_taskset_that_is_none_is_refused():
    rule = "a taskset of verifiers must be a module that exports one, got"
    line = line_of(load_environment, "verifiers:no_such_module")
    assert line.startswith(f"{rule} 'no_such_module': ModuleNotFoundError: ")
    line = line_of(load_environment, "verifiers:user_environments")
    assert "defines no `__all__`" in line
    line = line_of(load_environment, "verifiers:two_seats_taskset")
    assert line == f"{rule} 'two_seats_taskset': one policy plays one agent, not assistant, user"
