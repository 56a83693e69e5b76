"""Tasks of packages: splits, one hash seed for all processes, tasks without an answer."""

import itertools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from small_runs import ROOT, line_of
from test_prompts import config

from specrl_jax import inputs
from specrl_jax.data import item_process
from specrl_jax.data.prompts import load_examples
from specrl_jax.rewards.pool import RewardPool

NEEDS_GYM = "needs pip install -e '.[tasks]'"


def gym(name="number_sorting", seed=0, reward="exact", **changes):
    settings = {"name": name, "answer_pattern": "", "prompts": 40, "eval_prompts": 10}
    made = config("reasoning_gym", seed, **{**settings, **changes})
    made.reward.name = reward
    return made


def test_without_reasoning_gym_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    line = line_of(load_examples, gym())
    assert line == (
        "data.source=reasoning_gym needs reasoning-gym: pip install -e '.[tasks]' in the clone"
    )


def test_splits_by_index():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason=NEEDS_GYM)
    options = {"min_numbers": 1, "max_numbers": 1, "min_value": 0, "max_value": 9}
    data = load_examples(gym(seed=3, options=options))
    seed = item_process.task_seed(3)
    task = reasoning_gym.create_dataset("number_sorting", seed=seed, size=50, **options)
    questions = [task[i]["question"] for i in range(50)]
    assert [e.prompt for e in data.eval] == list(dict.fromkeys(questions[40:]))
    assert [e.prompt for e in data.train] == [
        q for q in dict.fromkeys(questions[:40]) if q not in questions[40:]
    ]
    assert data.duplicates == 50 - len(data.train) - len(data.eval)
    # metadata is the entry that the task's own scorer takes.
    example = data.train[0]
    assert task.score_answer(example.answer, json.loads(json.dumps(example.metadata))) == 1.0


def test_runs_of_nearby_seeds_share_no_problem():
    pytest.importorskip("reasoning_gym", reason=NEEDS_GYM)

    def questions(task, seed):
        return {item["question"] for item in item_process._gym_items(task, {}, seed, 0, 40)}

    # The second task has a generator that takes no seed beyond 32 bits.
    for task, largest in (("number_sorting", 2), ("pool_matrix", 2**31 - 1)):
        first, second, third = (questions(task, seed) for seed in (0, 1, largest))
        assert not (first & second) | (second & third) | (third & first)


def test_seeds_of_tasks_are_far_apart():
    """All that differ by less than 4,096: the distance depends on the difference alone."""
    whole = 2**31
    distances = [item_process.task_seed(seed) for seed in range(1, 4096)]
    assert min(min(x, whole - x) for x in distances) > 370_000
    assert item_process.task_seed(0) == 0
    assert item_process.task_seed(whole - 1) == whole - item_process.task_seed(1)


def test_unknown_task_or_option():
    pytest.importorskip("reasoning_gym", reason=NEEDS_GYM)
    line = line_of(load_examples, gym("nothing"))
    assert line == "data.name 'nothing' with data.options: Dataset 'nothing' not registered"
    line = line_of(load_examples, gym(options={"digits": 3}))
    assert re.match(r"data\.name .* with data\.options: TypeError: .*unexpected keyword", line)


def test_every_process_has_the_same_rows():
    """One task goes through a set, the other draws from the global generator."""
    pytest.importorskip("reasoning_gym", reason=NEEDS_GYM)
    tasks = ("ransom_note", "list_functions")
    code = (
        "import json; from specrl_jax.data.item_process import read_items; "
        f"print(json.dumps([read_items('reasoning_gym', x, {{}}, 1, 2, 9) for x in {tasks!r}]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    of_another = [items[3:] for items in json.loads(done.stdout)]
    assert [
        item_process.read_items("reasoning_gym", task, {}, 1, 5, 9) for task in tasks
    ] == of_another


def colouring(puzzle) -> str:
    """A right answer of graph_color, by trying all."""
    vertices, colours = puzzle["vertices"], puzzle["color_options"]
    for chosen in itertools.product(colours, repeat=len(vertices)):
        by_vertex = dict(zip(vertices, chosen))
        if all(by_vertex[a] != by_vertex[b] for a, b in puzzle["edges"]):
            return json.dumps({str(vertex): colour for vertex, colour in by_vertex.items()})
    raise AssertionError("no colouring")


def undo(moves: str) -> str:
    """The moves of a cube, backwards."""
    inverse = (move[:-1] if move.endswith("'") else f"{move}'" for move in reversed(moves.split()))
    return " ".join(inverse)


def test_tasks_without_a_stored_answer_are_scored_by_their_own_scorer():
    pytest.importorskip("reasoning_gym", reason=NEEDS_GYM)
    options = {"min_num_vertices": 5, "max_num_vertices": 6}
    settings = gym(
        "graph_color", reward="reasoning_gym", prompts=3, eval_prompts=1, options=options
    )
    coloured = load_examples(settings).train
    cube = load_examples(
        gym("rubiks_cube", reward="reasoning_gym", prompts=2, eval_prompts=1)
    ).train
    right = [colouring(e.metadata["metadata"]["puzzle"]) for e in coloured]
    right += [undo(e.metadata["metadata"]["scramble_moves"]) for e in cube]
    examples = coloured + cube
    assert {e.answer for e in examples} == {""}
    with RewardPool("reasoning_gym", timeout=30.0, memory_mib=1024, workers=1) as pool:
        np.testing.assert_array_equal(score(pool, right, examples), 1)
        assert max(score(pool, ["no answer"] * len(examples), examples)) < 0.1


def score(pool, texts, examples):
    answers, tasks = [e.answer for e in examples], [e.task for e in examples]
    return pool.score(texts, answers, tasks, [e.metadata for e in examples]).rewards


def test_a_task_without_a_stored_answer_needs_its_own_scorer_alone():
    pytest.importorskip("reasoning_gym", reason=NEEDS_GYM)
    settings = gym("boxnet", reward="reasoning_gym", prompts=2, eval_prompts=1)
    data = load_examples(settings)
    assert {example.answer for example in data.train + data.eval} == {""}
    settings.reward.name = "reasoning_gym+exact"
    line = line_of(load_examples, settings)
    rule = "data.answer_field answer must have an answer for every prompt, got None"
    assert line == f"{rule} (boxnet row 0)"
