"""Several runs side by side: figures by hand on written records, and the command end to end."""

import json

import pytest
from small_runs import ONE_DEVICE, launch

from specrl_jax.telemetry import compare
from specrl_jax.telemetry.records import FIELDS


def write_run(folder, responses, rewards=(0.25, 0.5)):
    """A work directory of one step an epoch whose rollouts are `responses`, by step."""
    lines = [{"step": 0, "reward/eval": 0.125}]
    (folder / "rollouts").mkdir(parents=True)
    for step, (rows, reward) in enumerate(zip(responses, rewards, strict=True), start=1):
        record = {"step": step, "epoch": step, "reward/mean": reward, "reward/eval": reward}
        record |= {"data/passes": step, "time/update": 0.25, "time/compile": 0.5}
        record |= {f"time/{name}": float(step) for name in ("rollout", "prefill", "step")}
        record |= {f"time/{name}": 10.0 * step for name in ("verify", "decode")}
        for name in ("tokens_generated", "tokens_reused", "tokens_drafted", "row_steps"):
            record[f"rollout/{name}"] = 100 * step
        lines.append(record)
        blank = dict.fromkeys(FIELDS)
        text = "".join(
            json.dumps(blank | {"prompt_id": "a", "sample": i, "token_ids": row}) + "\n"
            for i, row in enumerate(rows)
        )
        (folder / "rollouts" / f"step_{step}.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_figures_are_of_the_steps_that_have_drafts(tmp_path):
    figures = compare.figures(write_run(tmp_path / "a", [[[1]], [[1]]]))
    assert figures["held-out reward, first"] == 0.125
    assert figures["held-out reward, last"] == figures["training reward, last epoch"] == 0.5
    assert figures["tokens generated"] == 200
    assert (figures["rollout, s"], figures["  decode, s"]) == (2.0, 20.0)
    assert (figures["all steps, s"], figures["  compiling, s"]) == (3.0, 1.0)
    assert figures["curves"]["held-out reward"] == {"0": 0.125, "1": 0.25, "2": 0.5}
    assert figures["curves"]["step"] == {"1": 1.0, "2": 2.0}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([[[1, 2], [3]], [[4], [5, 6]]], (None, 6)),
        ([[[1, 2], [3]], [[4], [5, 7]]], (2, 5)),
        ([[[1, 2], [3]], [[4], [5]]], (2, 5)),  # shorter: its end is another token
        ([[[9, 2], [3]], [[4], [5, 6]]], (1, 0)),
        ([[[1, 2], [3], [9]], [[4]]], (None, 4)),  # groups of another size: what both have
    ],
)
def test_where_tokens_part(tmp_path, others, expected):
    one = write_run(tmp_path / "one", [[[1, 2], [3]], [[4], [5, 6]]])
    assert compare.first_difference(one, write_run(tmp_path / "other", others)) == expected


def test_the_table(tmp_path):
    cases = compare.varied("c.py", "rollout.draft", ["none", "tree"])
    runs = compare.training_runs(cases, [0, 1], tmp_path, [])
    for run in runs:
        last = 0.5 + 0.25 * run.seed
        rows = [[[1]], [[2 if (run.case, run.seed) == ("tree", 1) else 1]]]
        write_run(run.workdir, rows, rewards=(0.25, last))
    by_case = compare.compare(runs)
    assert by_case["tree"]["1"]["same tokens until step"] == 2
    lines = {line[:30].strip(): line[30:].split() for line in
             compare.table("rollout.draft", by_case).splitlines()}  # fmt: skip
    assert lines["rollout.draft"] == ["none", "tree"]
    assert lines["held-out reward, last"] == ["0.625", "±", "0.177"] * 2
    assert lines["tokens generated"] == ["200", "±", "0"] * 2
    assert lines["same tokens until step"] == ["end,", "end", "end,", "2"]
    assert "curves" not in lines


def test_seconds_by_epoch_and_the_plot(tmp_path):
    curves = {"rollout": {"1": 1.0, "2": 0.5}, "update": {"1": 3.0, "2": 2.5},
              "step": {"1": 4.0, "2": 3.0}, "held-out reward": {"0": 0.1, "8": 0.5}}  # fmt: skip
    fast = curves | {"step": {"1": 2.0, "2": 0.5}}
    faster = curves | {"step": {"1": 2.0, "2": 1.5}, "held-out reward": {}}
    by_case = {"plain": {"0": {"curves": curves}},
               "ours": {"0": {"curves": fast}, "1": {"curves": faster}}}  # fmt: skip
    lines = compare.epoch_table(by_case).splitlines()
    assert lines[0].split() == ["seconds", "by", "epoch", "plain", "ours"]
    assert len(lines) == 7
    assert lines[3].split() == ["epoch", "1,", "step", "4.000", "(1.00x)", "2.000", "(2.00x)"]
    assert lines[6].split() == ["epoch", "2,", "step", "3.000", "(1.00x)", "1.000", "(3.00x)"]
    compare.write_plot(by_case, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_cases_of_several_fields_and_files(tmp_path):
    cases = [
        compare.parse_case(text, "a.py:micro")
        for text in ("plain: rollout.draft=none", "PPO block: b.py rollout.accept=block x.y=2")
    ]
    first, second, *_ = compare.training_runs(cases, [3, 4], tmp_path, ["--config.log.report=0"])
    assert first.flags == ("--config=a.py:micro", "--config.log.report=0",
                           "--config.rollout.draft=none", "--config.seed=3")  # fmt: skip
    assert second.flags[2:4] == ("--config.rollout.accept=block", "--config.x.y=2")
    assert second.flags[0] == "--config=b.py"
    assert second.workdir == tmp_path / "PPO_block,seed=3"
    for text in ("no colon", ": a=1", "two files: a.py b.py"):
        with pytest.raises(ValueError, match=f"^--case must be .* got '{text}'$"):
            compare.parse_case(text, "a.py")
    assert compare.parse_case("a: b.py", "").config == "b.py"
    with pytest.raises(ValueError, match="names no configuration file and there is no --config"):
        compare.parse_case("a: x=1", "")


def test_what_it_took_to_reach_a_reward(tmp_path):
    """Held out 0.125, 0.25 and 0.5 at steps 0, 1 and 2, which generate 100 and 200 tokens."""
    run = write_run(tmp_path / "a", [[[1]], [[1]]])
    assert compare.figures(run, 0.5)["tokens generated to 0.5"] == 300
    assert compare.figures(run, 0.25)["rollouts to 0.25, s"] == 1.0
    assert compare.figures(run, 0.125)["tokens generated to 0.125"] == 0
    assert compare.figures(run, 0.75)["tokens generated to 0.75"] is None


def test_a_figure_that_only_some_runs_have():
    by_case = {"no": {"0": {"row steps": 5}, "1": {"row steps": None}},
               "yes": {"0": {"held-out reward": 0.5, "row steps": 6}}}  # fmt: skip
    lines = [line.split() for line in compare.table("evaluate", by_case).splitlines()]
    assert lines == [["evaluate", "no", "yes"], ["row", "steps", "1", "of", "2", "runs", "6"],
                     ["held-out", "reward", "-", "0.500"]]  # fmt: skip


def compare_runs(*arguments):
    return launch("launch/compare.py", *arguments, **ONE_DEVICE)


def test_plain_and_tree_drafts_through_the_command(tmp_path):
    """Lossless drafts: every token of a training run is the same."""
    arguments = (
        "--config=tests/small_runs.py", "--vary=rollout.draft=none,tree",
        f"--workdir={tmp_path}", "--config.log.rollouts=1.0", "--config.rollout.adaptive=False",
    )  # fmt: skip
    first = compare_runs(*arguments)
    assert first.returncode == 0, first.stderr
    by_case = json.loads((tmp_path / "compare.json").read_text())
    assert by_case["tree"]["0"]["same tokens until step"] is None
    assert by_case["tree"]["0"]["tokens compared"] > 100
    assert by_case["tree"]["0"]["tokens drafted"] > by_case["none"]["0"]["tokens drafted"] == 0
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")}
    again = compare_runs(*arguments)  # finished runs are read, not run
    assert again.stdout == first.stdout
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("metrics.jsonl")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary=rollout.draft"], "--vary must be FIELD=VALUE,VALUE,..., got 'rollout.draft'"),
        (["--vary=a.b=1,1"], "--vary must not name anything twice, got ['1', '1']"),
        (["--vary=a.b=1", "--seeds=x"], "--seeds must be whole numbers as in 0,1, got 'x'"),
        (["--vary=a.b=1", "--seed=3"], "unknown arguments: --seed=3, did you mean --seeds?"),
        (["--vary=seed=1,2"], "--vary must not be seed; give --seeds instead"),
        (
            ["--vary=a.b=1", "--config.seed=3"],
            "--config.seed must not be given; give --seeds instead",
        ),
        ([], "give either --vary or --case"),
        (["--config=", "--vary=a.b=1"], "--vary needs --config=FILE[:PRESET]"),
        (
            ["--case=a b: c.d=1", "--case=a_b: c.d=2"],
            "--case must not name anything twice, got ['a_b', 'a_b']",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    done = compare_runs("--config=tests/small_runs.py", *arguments)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_a_run_that_fails_is_named_with_its_own_message(tmp_path):
    done = compare_runs(
        "--config=tests/small_runs.py", f"--workdir={tmp_path}", "--case=a: rollout.drfat=none"
    )
    said = "rollout.drfat is not a field of the config, did you mean draft?"
    output = tmp_path / "a,seed=0" / "output.txt"
    assert done.returncode != 0
    assert done.stderr == f"error: a,seed=0 ended with 2: {said}; see {output}\n"
