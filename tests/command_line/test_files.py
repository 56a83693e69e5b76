"""A configuration file's presets and fields, and what a task of one's own does not inherit."""

import small_runs
from ml_collections import ConfigDict

from specrl_jax.command_line import files
from specrl_jax.config import flatten
from specrl_jax.settings import schema

SCHEMA = schema()

GRPO = small_runs.ROOT / "configs" / "grpo.py"


def test_every_field_has_a_comment():
    names = [name for name, _ in flatten(small_runs.preset("tiny"))]
    comments = SCHEMA.comments()
    assert comments.keys() == set(names)
    assert all(comments.values())
    assert [name for name in comments if not name.startswith("data.options.")] == list(
        SCHEMA.fields
    )
    assert comments["seed"] == "of weights, data order, warm-up and all sampling"
    assert comments["rollout.tree.depth"] == "a row's last tokens to look up"
    assert comments["rollout.lenience"].startswith("ℓ >= 0 of ratio: 0 no reuse")
    assert comments["data.options.min_numbers"] == "shortest list to sort"


def test_presets_have_a_line():
    assert files.get_config(str(GRPO)).to_dict() == small_runs.preset("tiny").to_dict()
    presets = files.presets(GRPO)
    names = ["tiny", "micro", "custom", "smollm2", "gemma3_270m", "gsm8k", "qwen3_1p7b"]
    names += ["qwen3_30b_a3b"]
    assert list(presets) == names
    assert all(line.endswith(".") for line in presets.values())
    assert files.presets(small_runs.ROOT / "configs" / "multiturn.py") == {}


def own_task(preset: str, **changes) -> tuple[ConfigDict, dict]:
    """The configuration that these fields of a preset start, and the values that were reset."""
    config = small_runs.preset(preset)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(changes)
    reset = files.start_own_task(config, small_runs.preset(preset), changes.keys())
    return config, reset


MINE = {"data__source": "jsonl", "data__path": "mine.jsonl", "reward__name": "mine:score"}


def test_a_file_of_ones_own_inherits_nothing_of_the_presets_task():
    config, reset = own_task("smollm2", **MINE)
    assert config.reward.extract == config.data.instruction == config.data.name == ""
    assert config.data.prompts == 0  # all rows, not 14
    assert not config.data.options
    options = dict.fromkeys(("min_terms", "max_terms"), 2)
    options |= dict.fromkeys(("min_digits", "max_digits"), 1)
    assert reset == {
        "data.instruction": "{prompt}\nExplain your steps, then give the final answer.",
        "reward.extract": r"(-?\d+)",
        "data.name": "chain_sum",
        "data.prompts": 14,
        **{f"data.options.{name}": value for name, value in options.items()},
    }


def test_what_was_given_stays():
    config, reset = own_task("smollm2", **MINE, reward__extract="=(.*)", data__prompts=20)
    assert (config.reward.extract, config.data.prompts) == ("=(.*)", 20)
    assert not {"reward.extract", "data.prompts"} & set(reset)


def test_another_task_of_the_generator_keeps_its_number_of_prompts():
    config, _ = own_task("tiny", data__name="chain_sum", data__options__min_numbers=2)
    assert config.data.prompts == 1024  # it has no end
    assert config.data.options.to_dict() == {"min_numbers": 2}  # given


def test_a_reward_of_ones_own_gets_the_whole_response():
    config, reset = own_task("smollm2", reward__name="mine:score")
    assert reset == {"reward.extract": r"(-?\d+)"}
    assert config.data.instruction
    config.reward.format = ".*"
    preset = small_runs.preset("smollm2")
    assert files.start_own_task(config, preset, {"reward.name"}) == {"reward.format": ".*"}


def test_the_presets_own_task_stays_as_it_is():
    assert own_task("gsm8k", data__path="folder")[1] == {}  # of its train.jsonl and test.jsonl
    assert own_task("smollm2", reward__timeout=1.0)[1] == {}
    assert own_task("custom", **{k: v for k, v in MINE.items() if k != "data__source"})[1] == {}
