"""Games of TextArena: the same game from a seed, its own reward, faults."""

import random

import pytest
from ml_collections import ConfigDict
from small_runs import ROOT, line_of, preset

from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.environment_protocol import take_step
from specrl_jax.agents.environments import load_environment
from specrl_jax.data.item_process import task_seed
from specrl_jax.data.prompts import load_examples

pytest.importorskip("textarena", reason="needs pip install -e '.[agents]'")

# All that run without network on every Python that the project takes; docs/agents.md names them.
GAMES = (
    "2048", "Blackjack", "Crosswords", "FifteenPuzzle", "FrozenLake", "GuessTheNumber",
    "LightsOut", "LogicPuzzle", "Mastermind", "Minesweeper", "PegJump", "RushHour", "Secretary",
    "Set", "Sokoban", "Sudoku", "TowerOfHanoi",
)  # fmt: skip
MOVES = ("[1]", "[up]", "[0 1]", "[A C]", "[hit]", "[red]", "[continue]", "move")
# What two wrong moves pay at once, in those games where it is not 0.
STANDING_STILL = {
    "2048": (1 / 2048, 2 / 2048), "PegJump": (1 / 14,), "RushHour": (0, 0.25, 0.5),
    "Secretary": (-1,),
}  # fmt: skip
HANOI = ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")


def play(name, seed, moves, **options):
    """Return the first prompt and the steps of a game."""
    game = load_environment(f"textarena:{name}")()
    first = game.begin(seed, options)
    steps = []
    for move in moves:
        steps.append(take_step(game, move))
        if steps[-1].done:
            break
    return first, steps


@pytest.mark.parametrize("name", GAMES)
def test_a_seed_is_a_game(name):
    assert name in (ROOT / "docs" / "agents.md").read_text()
    moves = random.Random(0).choices(MOVES, k=30)
    first, steps = play(f"{name}-v0", 3, moves)
    assert (first, steps) == play(f"{name}-v0", 3, moves)
    assert len(first) > 100
    assert all(-1 <= step.reward <= 1 for step in steps)
    assert all(step.observation for step in steps if not step.done)
    assert not any(moves[i] == step.observation for i, step in enumerate(steps))


@pytest.mark.parametrize("name", GAMES)
def test_two_wrong_moves_in_a_row_pay_the_progress_so_far(name):
    for seed in range(1 if name == "Sokoban" else 4):
        _, (first, second) = play(f"{name}-v0", seed, ["no move", "no move", "no move"])
        assert (first.reward, first.done, second.done) == (0, False, True)
        amounts = STANDING_STILL.get(name, (0,))
        assert any(second.reward == pytest.approx(amount) for amount in amounts), second


def test_two_wrong_moves_do_not_take_back_what_was_reached():
    _, steps = play("TowerOfHanoi-v0", 0, ["[A C]", "[A B]", "[C B]", "[A C]", "no", "no"])
    assert [step.reward for step in steps] == [0] * 5 + [pytest.approx(1 / 3)]
    _, steps = play("PegJump-v0", 0, ["[12 5]", "no", "no"])
    assert steps[-1].reward == pytest.approx(2 / 14)


def find(seed):
    """Return the moves that find a number by halves, and the last step."""
    game = load_environment("textarena:GuessTheNumber-v0")()
    game.reset(str(seed), "task", {})
    low, high = 1, 20
    moves = []
    while True:
        middle = (low + high) // 2
        moves.append(f"I say [{middle}].")
        step = game.step(moves[-1])
        if step.done:
            return middle, step
        if step.observation == "The target number is higher.":
            low = middle + 1
        else:
            assert step.observation == "The target number is lower."
            high = middle - 1


def test_the_reward_is_the_games_own():
    """1 for the number; else 1 less the last distance over 19. One wrong move is forgiven."""
    secrets = []
    for seed in range(4):
        secret, step = find(seed)
        assert (step.reward, step.done) == (1, True)
        guess = secret % 20 + 1
        _, steps = play("GuessTheNumber-v0", seed, [f"[{guess}]", "none", "[99]"])
        assert [step.done for step in steps] == [False, False, True]
        assert steps[1].observation.startswith("You attempted an invalid move. Reason: Invalid")
        assert steps[2].reward == pytest.approx(1 - abs(guess - secret) / 19)
        secrets.append(secret)
    assert len(set(secrets)) > 1


def test_a_problem_says_the_games_options():
    first, steps = play("TowerOfHanoi-v0", 0, HANOI)
    assert "A: [3, 2, 1]\nB: []\nC: []" in first
    assert steps[0].observation.startswith("You moved disk 1 from A to C.\nCurrent Board:")
    assert [step.reward for step in steps] == [0] * 6 + [1]
    assert "A: [2, 1]\n" in play("TowerOfHanoi-v0", 0, [], num_disks=2)[0]


def test_a_game_that_raises_costs_its_episode():
    """In processes without network, each of which starts the game named by the problem."""
    wrong = ("0", "task", {"options": {"num_disks": "many"}})
    problems = [("0", "task", {}), wrong, ("seed", "task", {})]
    with EnvironmentPool(
        "textarena:TowerOfHanoi-v0", timeout=20, memory_mib=256, workers=1
    ) as pool:
        assert pool.replayable
        episodes = pool.start(problems)
        live = episodes
        for move in HANOI:
            pool.submit(live, [move] * len(live))
            answers = pool.collect(live)
            if len(live) == 3:
                assert answers[1].failure.startswith("TypeError: ")
                assert answers[2].failure.startswith("ValueError: invalid literal for int()")
                assert [answers[i].reward for i in (1, 2)] == [0, 0]
            live = episodes[:1]
        assert answers[0][:2] == (1, True)
        assert answers[0].failure == ""
        pool.end(episodes)


def test_problems_of_a_game():
    config = preset("tiny")
    config.environment.name = "textarena:TowerOfHanoi-v0"
    config.data.source = "textarena"
    config.data.name = "TowerOfHanoi-v0"
    config.data.prompts = 3
    config.data.eval_prompts = 2
    config.data.options = ConfigDict({"num_disks": 2})
    config.seed = 1
    data = load_examples(config)
    first, _ = play("TowerOfHanoi-v0", 0, [], num_disks=2)
    examples = data.train + data.eval
    assert [example.prompt for example in examples] == [first] * 5
    assert [int(example.answer) - task_seed(1) for example in examples] == [0, 1, 2, 3, 4]
    assert len({example.prompt_id for example in examples}) == 5
    assert examples[0].metadata["options"] == {"num_disks": 2}


def test_a_game_that_cannot_be_played_is_refused():
    rule = "a game of TextArena must be for one player and run here, got"
    line = line_of(load_environment, "textarena:TowerOfHanoi")
    assert line == f"{rule} 'TowerOfHanoi': there is " + ", ".join(
        f"TowerOfHanoi-v0{level}" for level in ("", "-train", "-raw")
    )
    assert (
        line_of(load_environment, "textarena:Nothing") == f"{rule} 'Nothing': there is no such game"
    )
    for name in ("Bandit-v0", "Bandit-v0-hard", "Bandit-v0-raw", "Bandit-v0-hard-train"):
        line = line_of(load_environment, f"textarena:{name}")
        reason = "TextArena pays its best button 0, and its worst one the most"
        assert line == f"{rule} {name!r}: {reason}"
