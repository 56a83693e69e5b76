"""What the console shows of episodes, and the line before the compiler's minutes."""

import itertools
import re
import types

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from small_runs import small_config

from specrl_jax import train as loop
from specrl_jax.agents.episodes import Turns
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.training import run_log

GUESS = {
    "environment.name": "guess", "environment.max_turns": 3, "reward.extract": "",
    "data.source": "guess", "data.name": "guess", "data.prompts": 12, "data.options": ConfigDict(),
    "data.prompt_len": 4, "tokenizer.alphabet": "0123456789-?<>", "rollout.response_len": 10,
    "rollout.accept": "match", "train.steps": 1,
}  # fmt: skip


def parts(tokens: str, sources: str, ends: list[int], roles: list[str]) -> list[tuple[str, str]]:
    """What is shown of an episode whose tokens are letters; e: environment. ";" ends a turn."""
    log = types.SimpleNamespace(
        _decode=lambda ids: "".join(map(chr, ids)),
        _text=lambda ids: re.match("[^;]*;?", "".join(map(chr, ids)))[0],
    )
    turns = Turns(np.zeros((1, 4)), np.array([ends + [0] * (4 - len(ends))]), np.array([roles]))
    rows = np.array([[*map(ord, tokens), 0, 0]])
    responses = types.SimpleNamespace(tokens=rows, lens=np.array([len(tokens)]), turns=turns)
    forced = np.array([3 if letter == "e" else 0 for letter in sources] + [3, 0])
    return run_log.RunLog._parts(log, responses, forced, 0)


@pytest.mark.parametrize(
    ("tokens", "sources", "ends", "roles", "shown"),
    [
        ("a;b;", "ssss", [4], [""], ["assistant: a;"]),  # a turn is read to its first stop
        ("a;?b;??cd", "ssesseess", [2, 5, 9], ["tool", "user", "", ""],
         ["assistant: a;", "tool: ?", "assistant: b;", "user: ??", "assistant: cd"]),
        ("a;b", "sss", [2, 3], ["user", "", "", ""],  # an answer without a token
         ["assistant: a;", "user: ", "assistant: b"]),
        ("a;?", "sse", [2], ["tool", "", "", ""], ["assistant: a;", "tool: ?"]),
        ("", "", [], ["", "", "", ""], []),
    ],
)  # fmt: skip
def test_an_episode_is_shown_turn_by_turn(tokens, sources, ends, roles, shown):
    assert [": ".join(part) for part in parts(tokens, sources, ends, roles)] == shown


def test_the_middle_of_a_long_episode_is_left_out():
    said = [("assistant", str(i)) for i in range(40)]
    shown = run_log._without_middle(said)
    assert [text for _, text in shown] == [*"012345", "28 more", *map(str, range(34, 40))]
    assert run_log._without_middle(said[:12]) == said[:12]


def test_a_run_shows_episodes_and_says_that_it_compiles(tmp_path, make_mesh, capsys):
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(GUESS), tmp_path, hooks=StandardHooks())
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("compiling "))
    assert re.match(r"programs: (\d+), (\d+) of the model, compiled in", lines[first + 1])
    assert lines[first].split()[1] == lines[first + 1].split()[1].strip(",")
    begin = next(i for i, line in enumerate(lines) if line.startswith("step 1, a prompt: "))
    shown = [*itertools.takewhile(lambda line: line.startswith("  "), lines[begin + 1 :])]
    count = 0
    for line in shown:
        if match := re.fullmatch(r"  reward \S+, (\d) turns?:", line):
            assert count == 0
            count = int(match[1])
        elif re.match(r"    assistant: ", line):
            count -= 1
        else:
            assert line.startswith("    user: ")
    assert shown
    assert count == 0
    assert any(line.split()[-3:-1] == ["update", "step"] for line in lines)
