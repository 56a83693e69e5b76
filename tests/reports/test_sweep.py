"""Sweeps: cases and flags by hand, runs of a stand-in program, and the command end to end."""

import csv
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time

import pytest
from small_runs import ONE_DEVICE, ROOT, launch, line_of

from specrl_jax.config import hyper
from specrl_jax.reports import sweep

pytestmark = pytest.mark.filterwarnings(
    "ignore:the load_module.. method is deprecated:DeprecationWarning"  # ml_collections calls it
)
CONFIG = "tests/small_runs.py"


@pytest.fixture
def main(monkeypatch):
    """Calls launch/sweep.py in this process; its ValueErrors are the command's one line."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers

    def call(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["sweep.py", *flags])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path("launch/sweep.py")["main"]()
        return ended.value.code

    return call


# Stands in for launch/train.py. Fails once where the lenience is 2; waits where it is 4.
TRAIN = """
import json, os, pathlib, signal, sys, time
flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
lenience = float(flags.get("config.rollout.lenience", 1))
with open(workdir / "started", "a") as file:
    file.write(json.dumps([flags, os.environ["WANDB_RUN_GROUP"], os.environ["WANDB_TAGS"]]) + "\\n")
starts = len((workdir / "started").read_text().splitlines())
if lenience == 2 and starts == 1:
    sys.exit("some warning\\nerror: no such data")
if lenience == 4 and starts == 1:
    def stop(*_):
        print("w: SIGTERM, saved at step 1 of 2; run the same command to resume\\nreport: r")
        sys.exit()
    signal.signal(signal.SIGTERM, stop)
    (workdir / "waits").touch()
    time.sleep(60)
steps = [{"step": 0, "epoch": 0, "reward/eval": 0.25}] + [
    {"step": i, "epoch": i, "reward/mean": 0.5, "reward/eval": 0.5, "rollout/row_steps": 10,
     "rollout/tokens_generated": 100, "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5}
    for i in (1, 2)]
(workdir / "metrics.jsonl").write_text("".join(json.dumps(x) + "\\n" for x in steps))
config = {"seed": int(flags["config.seed"]), "rollout": {"lenience": lenience}}
(workdir / "config.json").write_text(json.dumps(config))
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "_TRAIN", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # its logging would close pytest's streams


def _starts(folder) -> dict[str, list]:
    """By work directory, what each start of its run was given."""
    files = sorted(folder.glob("*/started"))
    return {f.parent.name: [json.loads(x) for x in f.read_text().splitlines()] for f in files}


# Cases ---------------------------------------------------------------------------------------


def test_hyper_builds_sweeps():
    ab, cd = hyper.sweep("a", [1, 2]), hyper.sweep("b.c", ["x", "y"])
    assert hyper.product([ab, cd])[1:3] == [{"a": 1, "b.c": "y"}, {"a": 2, "b.c": "x"}]
    assert hyper.product([]) == [{}]
    assert hyper.product([ab], name="config") == [{"config.a": 1}, {"config.a": 2}]
    assert hyper.zipit([ab, cd]) == [{"a": 1, "b.c": "x"}, {"a": 2, "b.c": "y"}]
    assert hyper.zipit([ab, hyper.fixed("d", 3, 2)])[1] == {"a": 2, "d": 3}
    assert hyper.chainit([ab, hyper.fixed("d", 3)]) == [{"a": 1}, {"a": 2}, {"d": 3}]
    with pytest.raises(ValueError, match=r"hyper.zipit must get sweeps of one length.*\[2, 1\]"):
        hyper.zipit([ab, hyper.fixed("d", 3)])


def test_names_and_flags_of_a_grid(monkeypatch, tmp_path):
    """Work directories are named as in earlier comparisons, so that these resume."""
    monkeypatch.chdir(ROOT)
    plain = sweep.parse_case("PPO tree: rollout.draft=previous+tree rollout.lenience=e^0", CONFIG)
    cases = sweep.grid(
        [sweep.Case("", CONFIG), plain],
        hyper.product([sweep.parse_sweep("rollout.lenience=1,e^-0.5,inf"),
                       hyper.sweep("updates.learning_rate", [1e-3])]),
    )  # fmt: skip
    runs = sweep.training_runs(cases, [3, 4], tmp_path, ["--config.rollout.accept=ratio"])
    assert len(runs) == 12
    assert runs[1].command[2:-1] == (
        f"--config={CONFIG}", "--config.rollout.accept=ratio",
        "--config.rollout.lenience=0.6065306597126334", "--config.updates.learning_rate=0.001",
        "--config.seed=3",
    )  # fmt: skip
    name = "rollout.lenience=e^-0.5,updates.learning_rate=0.001"
    assert (runs[1].case, runs[1].workdir) == (name, tmp_path / f"{name},seed=3")
    assert runs[5].command[4:6] == (
        "--config.rollout.draft=previous+tree",
        "--config.rollout.lenience=1.0",
    )
    assert runs[3].workdir.name.startswith("PPO_tree,rollout.lenience=1,")
    assert json.loads(runs[2].config)["rollout"]["lenience"] == float("inf")


def test_a_shared_flag_is_left_out_where_it_does_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    cases = sweep.grid([sweep.Case("", CONFIG)], sweep.parse_sweep("rollout.draft=none,previous"))
    shared = ["--config.rollout.accept=block", "--config.updates.passes=2"]
    plain, drafted = sweep.training_runs(cases, [0], tmp_path, shared)
    assert plain.command[2:5] == (f"--config={CONFIG}", shared[1], "--config.rollout.draft=none")
    assert drafted.command[3:5] == tuple(shared)


def test_a_task_of_ones_own_is_read_as_launch_train_reads_it(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    own = ["--config.data.source=hf", f"--config.data.path={tmp_path}/mine.jsonl"]
    flags = [*own, "--config.data.options.of_mine=3"]
    (run,) = sweep.training_runs([sweep.Case("", CONFIG)], [0], tmp_path, flags)
    data = json.loads(run.config)["data"]
    assert (data["options"], data["name"], data["render"]) == ({"of_mine": 3}, "", "")


def test_a_configuration_brings_its_sweep(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    overrides = sweep.config_sweep("configs/lenience_sweep.py:micro")
    cases = sweep.grid([sweep.Case("", "configs/lenience_sweep.py:micro")], overrides)
    assert [case.name for case in cases] == [
        "rollout.draft=none",
        *(f"rollout.lenience={x}" for x in ("1", "e^0.2", "e^0.5", "e^0.8", "e^1", "e^2", "inf")),
        "rollout.accept=random",
        "rollout.draft_age=2",
    ]
    assert len(sweep.training_runs(cases, [0], tmp_path, [])) == 10  # all of them are valid
    file = tmp_path / "mine.py"
    head = f"import runpy\nget_config = runpy.run_path({CONFIG!r})['get_config']\n"
    file.write_text(head + "def get_hyper():\n  return [{'config.rollout.draft': 'tree'}]\n")
    assert sweep.config_sweep(str(file)) == [{"rollout.draft": "tree"}]
    file.write_text(head + "def get_hyper(h):\n  return {'rollout.draft': 'tree'}\n")
    with pytest.raises(ValueError, match=r"^get_hyper of .* must return a list of dicts"):
        sweep.config_sweep(str(file))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--case=no colon"], "--case must be 'NAME: [CONFIG] FIELD=VALUE ...', got 'no colon'"),
        (["--case=: a=1"], "--case must be 'NAME: [CONFIG] FIELD=VALUE ...', got ': a=1'"),
        (["--case=a: b.py c.py"], "--case must be 'NAME: [CONFIG] FIELD=VALUE ...', got 'a: b.py"),
        (["--sweep=rollout.draft"], "--sweep must be FIELD=VALUE,VALUE,..., got 'rollout.draft'"),
        (["--sweep=a.b=1", "--sweep=a.b=2"], "--sweep must not name a field twice, got a.b, a.b"),
        (["--sweep=a.b=1", "--seeds=x"], "--seeds must be N >= 1 or a list like 0,1, got 'x'"),
        (["--sweep=a.b=1", "--seeds=0"], "--seeds must be N >= 1 or a list like 0,1, got '0'"),
        (["--sweep=a.b=1", "--seed=3"], "unknown arguments: --seed=3, did you mean --seeds?"),
        (["--sweep=seed=1,2"], "seed must not be swept; give --seeds instead"),
        (["--config.seed=3"], "--config.seed must not be given; give --seeds instead"),
        ([], f"give --sweep or --case, or define get_hyper(hyper) in {CONFIG}"),
        (["--config=", "--sweep=a.b=1"], "--config=FILE[:PRESET] must be given, or --case with"),
        (["--config=", "--case=a: b=1"], "--case names no configuration file and there is no --c"),
        (["--sweep=rollout.drfat=none"], "rollout.drfat is not a field of the config, did you me"),
        (["--sweep=rollout.lenience=1,-1"], "rollout.lenience must be >= 0, got -1.0"),
        (["--sweep=rollout.draft=none,non"], "rollout.draft must be one of none, previous, tree,"),
        (["--case=a b: seed=1", "--case=a_b: seed=2"], "two runs would be in "),
        (["--sweep=rollout.lenience=1,1"], "two runs would be in "),
        (
            ["--config.rollout.accept=match", "--sweep=rollout.lenience=1,e^0.5"],
            "rollout.lenience has no effect with rollout.accept = match; add "
            "--config.rollout.accept=ratio; case rollout.lenience=e^0.5",
        ),
        (
            ["--config.curriculum.target=0.4", "--sweep=rollout.draft=none,tree"],
            "curriculum.target has no effect with curriculum.name = uniform; add "
            "--config.curriculum.name=mopps",
        ),
        (["--sweep=rollout.lenience=1", "--baseline=2"], "--baseline must be one of rollout.leni"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(main, tmp_path, flags, message):
    line = line_of(main, f"--config={CONFIG}", f"--workdir={tmp_path / 'w'}", *flags)
    assert line.startswith(message)
    assert not (tmp_path / "w").exists()


# Runs ----------------------------------------------------------------------------------------


def test_a_failed_run_is_listed_and_the_same_command_goes_on(main, program, tmp_path, capsys):
    folder = tmp_path / "w"
    sweep_of_two = "--sweep=rollout.lenience=1,2"
    flags = (f"--config={CONFIG}", sweep_of_two, "--seeds=2", f"--workdir={folder}")
    assert main(*flags) == 1
    said = capsys.readouterr()
    output = folder / "rollout.lenience=2,seed=0" / "output.txt"
    reason = f"rollout.lenience=2,seed=0: ended with 1: no such data; see {output}"
    assert f"failed: {reason}" in said.err.splitlines()
    assert "4/4" in said.err
    assert "\n| rollout.lenience=1 |      2 |" in said.out
    assert "\n| rollout.lenience=2 | 0 of 2 |" in said.out
    assert "| seed 0 failed: no such data; seed 1 failed: no such data |" in said.out
    with (folder / "sweep.csv").open() as file:
        rows = [*csv.DictReader(file)]
    cells = [(row["rollout.lenience"], row["seed"], row["state"]) for row in rows]
    assert cells[:2] == [("1.0", "0", "done"), ("2.0", "0", "failed: no such data")]
    assert [row["seed"] for row in rows] == ["0", "0", "1", "1"]
    given, group, tags = _starts(folder)["rollout.lenience=2,seed=1"][0]
    assert (group, tags) == ("w", "rollout.lenience=2,seed=1")
    assert given["config.seed"] == "1"
    assert main(*flags) == 0  # only those that failed start again
    starts = {name: len(times) for name, times in _starts(folder).items()}
    assert starts == {f"rollout.lenience={x},seed={i}": x for x in (1, 2) for i in (0, 1)}
    out = capsys.readouterr().out
    assert out.count("0.500 ± 0.000") == 2
    assert (folder / "report.html").stat().st_size > 1e6
    assert main(*flags, "--config.evaluate.every=1") == 0  # another configuration starts anew
    assert {len(times) for times in _starts(folder).values()} == {2, 3}


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("", "done"),
        ("ended with 2: step 12: policy: loss is nan, 2 updates in a row; lower updates.learning_r"
         "ate, now 1.0; resume from a checkpoint (0, 8) in a new --workdir; see output.txt",
         "diverged at step 12: policy: loss is nan, 2 updates in a row"),
        ("ended with 2: warm-up: loss is inf by step 4; lower sft.learning_rate; see o",
         "diverged at warm-up: loss is inf by step 4"),
        ("ended with -9: it printed nothing; see output.txt", "failed: it printed nothing"),
        ("ended with 2: step size is information; see o", "failed: step size is information"),
        ("SIGTERM, saved at step 1 of 2", "stopped by SIGTERM, saved at step 1 of 2"),
        ("job 3: not run; see err", "failed: job 3: not run"),
    ],
)  # fmt: skip
def test_what_became_of_a_run(reason, state):
    assert sweep._state(reason) == state


def test_settings_of_every_case(monkeypatch, tmp_path):
    """Of a field that a case does not set too, and the files where these differ."""
    monkeypatch.chdir(ROOT)
    cases = [
        sweep.parse_case("a: rollout.draft=none", CONFIG),
        sweep.parse_case("b: configs/grpo.py:tiny rollout.lenience=e^0 rollout.accept=ratio", ""),
    ]
    a, b = sweep.training_runs(cases, [4], tmp_path, [])
    assert a.settings["config"] == CONFIG
    assert (a.settings["rollout.draft"], a.seed) == ("none", 4)
    assert b.settings["config"] == "configs/grpo.py:tiny"
    assert (b.settings["rollout.lenience"], b.settings["rollout.accept"]) == (1.0, "ratio")
    assert set(a.settings) == set(b.settings)


def test_a_sweep_that_is_stopped_stops_its_run(program, tmp_path):
    """SIGTERM reaches the run, which reports that it saved; the run does not count as finished."""
    (run,) = sweep.training_runs([sweep.Case("a", CONFIG, ("rollout.lenience=4",))], [0],
                                 tmp_path / "w", [])  # fmt: skip
    training = sweep.Training(run)

    def stop():
        while not (training._process and (run.workdir / "waits").exists()):
            time.sleep(0.01)
        training.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    assert training() == "SIGTERM, saved at step 1 of 2"
    thread.join()
    assert not run.finished
    assert training() == ""
    assert run.finished


def test_a_run_shows_its_newest_line_under_its_heading(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "_TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(sweep, "_SHOWS_EVERY", 0.02)
    say = sweep._say

    def say_and_note(line):
        say(line)
        if "2/2" in line:
            (tmp_path / "seen").touch()

    monkeypatch.setattr(sweep, "_say", say_and_note)
    (tmp_path / "train.py").write_text(
        "import pathlib, time\n"
        "print('a\\n step epoch  reward     left\\n  1/2     1   0.250     0:09\\n', end='')\n"
        "print('  2/2     1   0.500     0:00\\nsummary\\n  3/', end='', flush=True)\n"
        f"seen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "for _ in range(30_000):\n"
        "    if seen.exists(): break\n"
        "    time.sleep(0.01)\n"
    )
    (run,) = sweep.training_runs([sweep.Case("a", CONFIG)], [0], tmp_path / "w", [])
    assert sweep.Training(run)() == ""
    assert capsys.readouterr().err.splitlines() == [
        f"a,seed=0: running, with its output in {run.workdir / 'output.txt'}",
        " step epoch  reward     left",
        "  2/2     1   0.500     0:00",
    ]


def test_a_run_of_a_killed_sweep_comes_to_its_end_first(program, tmp_path):
    (run,) = sweep.training_runs([sweep.Case("a", CONFIG)], [0], tmp_path / "w", [])
    run.workdir.mkdir(parents=True)
    hold = (
        "import fcntl, pathlib, sys, time; lock = open(sys.argv[1], 'w'); "
        "fcntl.flock(lock, fcntl.LOCK_EX); print(flush=True); time.sleep(0.5); "
        "pathlib.Path(sys.argv[2]).touch()"
    )
    command = [sys.executable, "-c", hold, str(run.workdir / "lock"), str(tmp_path / "over")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert sweep.Training(run)() == ""
        assert (tmp_path / "over").exists()


def test_runs_through_submitit(main, program, tmp_path, capsys):
    pytest.importorskip("submitit")
    flags = (f"--config={CONFIG}", "--sweep=rollout.lenience=1,2", f"--workdir={tmp_path / 'w'}")
    options = ("--cluster=local", "--cluster.timeout_min=5")
    assert main(*flags, *options) == 1
    assert "rollout.lenience=2,seed=0: ended with 1: no such data" in capsys.readouterr().err
    assert main(*flags, *options) == 0
    for option in ("timeout_mni=5", "timeout_min=soon", "slurm_partitoin=a"):
        name = option.partition("=")[0].removeprefix("slurm_")
        with pytest.raises(ValueError, match=f"^--cluster: .*{name}"):
            main(*flags, "--cluster=local", f"--cluster.{option}")


@pytest.mark.slow
def test_a_job_at_its_time_limit_saves_and_is_queued_again(program, tmp_path):
    pytest.importorskip("submitit")
    case = sweep.Case("a", CONFIG, ("rollout.lenience=4",))
    (run,) = sweep.training_runs([case], [0], tmp_path / "w", [])
    waits = sweep.submitter("local", {}, tmp_path / "w")(run)
    while not (run.workdir / "waits").exists():
        time.sleep(0.01)
    controller = waits.args[0].job_id
    children = pathlib.Path(f"/proc/{controller}/task/{controller}/children").read_text()
    os.kill(int(children), signal.SIGUSR2)  # what comes before the limit
    assert waits() == ""
    assert "SIGTERM, saved at step 1 of 2" in (run.workdir / "output.txt").read_text()
    assert len(_starts(tmp_path / "w")["a,seed=0"]) == 2


@pytest.mark.slow
def test_plain_and_tree_drafts_through_the_command(tmp_path):
    """Lossless drafts: every token of a training run is the same."""
    arguments = (
        f"--config={CONFIG}", "--case=plain: rollout.draft=none", "--case=tree: rollout.draft=tree",
        f"--workdir={tmp_path}", "--config.log.rollouts=1.0", "--config.rollout.adaptive=False",
    )  # fmt: skip
    first = launch("launch/sweep.py", *arguments, **ONE_DEVICE)
    assert first.returncode == 0, first.stderr
    assert "tree: plain's tokens until the end (" in first.stdout
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*")}
    again = launch("launch/sweep.py", *arguments, **ONE_DEVICE)  # finished runs are read, not run
    assert again.stdout == first.stdout
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*")} == before
