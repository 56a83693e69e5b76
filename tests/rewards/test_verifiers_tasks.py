"""Environments of verifiers: turns, tools and state, the package's own rewards, faults."""

import json

import pytest
from small_runs import line_of
from test_prompts import config

from specrl_jax.data.prompts import load_examples
from specrl_jax.rewards.environment_pool import EnvironmentPool
from specrl_jax.rewards.environments import load_environment

pytest.importorskip("verifiers", reason="needs pip install -e '.[agents]'")

# Responses of an episode whose secret is 2, what is said to each, and the reward at its end. Half
# of it is for the right number, half is 1 over the number of guesses.
GUESSES = [
    (["2"], [""], 1.0),
    (["0", "3", "2"], [">", "<", ""], 0.5 + 0.5 / 3),
    (["0", "no"], [">", ""], 0.5 / 3),  # the task's stop: the third guess is not asked for
]
# What a policy may not do, and the failure.
FAULTS = [
    ("x", "RuntimeError: invalid literal for int() with base 10: 'x'"),  # of the environment
    ("again", "ValueError: an episode must be one conversation, another one begins"),
]


def problem(**data):
    return "", "task", {"options": {}, "task": data}


def play(pool, episodes, turns):
    """Submit the turns of each episode; return what was said to each, and its last answer."""
    said = [[] for _ in episodes]
    last = [None] * len(episodes)
    for turn in range(max(map(len, turns))):
        live = [i for i, responses in enumerate(turns) if turn < len(responses)]
        pool.submit([episodes[i] for i in live], [turns[i][turn] for i in live])
        answers = pool.collect([episodes[i] for i in live])
        for index, i in enumerate(live):
            last[i] = answers[index]
            said[i].append(last[i].observation)
    pool.end(episodes)
    return said, last


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def test_turns_stops_rewards_and_faults():
    with EnvironmentPool(
        "verifiers:guessing_taskset", timeout=60, memory_mib=512, workers=1
    ) as pool:
        turns = [responses for responses, _, _ in GUESSES] + [[fault] for fault, _ in FAULTS]
        episodes = pool.begin([problem(prompt="0?", secret=2)] * len(turns))
        said, last = play(pool, episodes, turns)
    for i, (_, expected, reward) in enumerate(GUESSES):
        assert (said[i], last[i].failure) == (expected, "")
        assert (last[i].done, last[i].reward) == (True, pytest.approx(reward))
    for answer, (_, failure) in zip(last[len(GUESSES) :], FAULTS, strict=True):
        assert (answer.failure, answer.reward) == (failure, 0)


def test_tools_and_their_state():
    add = call("add", amount=1)
    turns = [
        [f"I add. {add}{add}", call("bell_ring"), "Done."],
        [
            call("add", amount=9),
            call("nothing"),
            call("add", amount="x"),
            "<tool_call>{</tool_call>",
        ],
    ]
    with EnvironmentPool("verifiers:ledger_taskset", timeout=60, memory_mib=512, workers=1) as pool:
        said, last = play(pool, pool.begin([problem(prompt="2!", answer=2)] * 2), turns)
    assert said[0] == ["total 1\ntotal 2", "ding", ""]
    assert said[1][:2] == [
        "Error executing tool add: at most 2",
        "error: unknown tool 'nothing'",
    ]
    assert "Input should be a valid integer" in said[1][2]
    assert [(answer.done, answer.reward, answer.failure) for answer in last] == [
        (True, 1.0, ""),
        (True, 0.0, ""),
    ]


def test_problems_of_a_taskset():
    options = {"numbers": 5, "system": "Guess."}
    settings = {"prompts": 3, "eval_prompts": 2, "answer_pattern": "", "options": options}
    made = config("verifiers", name="guessing_taskset", **settings)
    made.environment.name = "verifiers:guessing_taskset"
    data = load_examples(made)
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
