"""The whole job as a user meets it: finished, changed, stopped and damaged runs, every mesh."""

import os
import shutil
import signal

import jax
import numpy as np
import pytest
import small_runs
from small_runs import assert_same_run, files, launch, records, saved, small_config

from specrl_jax import train as loop
from specrl_jax.process import checkpoint, runtime
from specrl_jax.process.checkpoint import Checkpointer
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.training import build as building
from specrl_jax.training.build import build

# Warmed up, evaluated, with a reference that only the checkpoint holds; a checkpoint every 3 steps.
LONG = {
    "sft.steps": 3, "evaluate.every": 3, "checkpoint.every": 3, "train.epochs": 4,
    "checkpoint.keep_last": 3, "algorithm.kl_coef": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_mesh):
    """The work directory of LONG, run without interruption: 8 steps, checkpoints 3, 6, 8."""
    workdir = tmp_path_factory.mktemp("end_to_end") / "finished"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    return workdir


def test_a_kl_penalty_may_end_and_begin_with_another_run(finished, mesh, tmp_path, capsys):
    """It is measured from the policy before step 1, warmed up again where that was left out."""
    (without, weights), (again, others) = (
        build(small_config(LONG | {"algorithm.kl_coef": coef})) for coef in (0.0, 0.1)
    )
    with Checkpointer(finished / "checkpoints", read_only=True) as checkpoints:
        ended = building.resume(without, weights, checkpoints, 3)
    assert ended.reference is None
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, ended.arrays(), ended.host())
        begun = building.resume(again, others, checkpoints, 3)
    assert "no reference for the KL penalty: it is recreated" in capsys.readouterr().out
    arrays = {"train": begun.policy_state.modules, "reference": begun.reference.arrays()}
    for name, x in checkpoint._by_name(arrays).items():
        np.testing.assert_array_equal(x, saved(finished, 3)[name], strict=True)


@pytest.mark.slow
def test_a_signal_saves_and_leaves_and_the_run_goes_on(
    finished, tmp_path, mesh, capsys, monkeypatch
):
    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", MetricsLog.write)  # put back after interrupt
        small_runs.interrupt(MetricsLog, "write", 4, signal.SIGTERM)
        loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    out = capsys.readouterr().out
    assert "SIGTERM, saved at step 4 of 8; run the same command to resume" in out
    assert records(workdir) == records(finished)[:5]
    jax.clear_caches()  # as in a new process
    runtime.compile_metrics()  # from here on
    loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    assert "resumed at step 4 of 8" in capsys.readouterr().out
    steps = records(workdir, times=True)[5:]
    assert sum(r["compile/built"] for r in steps) == 0
    assert sum(r["compile/read"] for r in steps) > 0
    assert_same_run(workdir, finished, 8)


def test_a_finished_run_is_left_as_it_is(finished, mesh, capsys):
    """Even if the config changes how and where it runs; other changes are rejected."""
    before = files(finished)
    changes = {"log.tracker": "wandb", "checkpoint.every": 1, "mesh.data": 1}
    loop.train(small_config(LONG | changes), finished, hooks=StandardHooks())
    assert "finished at step 8 of 8, nothing to do" in capsys.readouterr().out
    changes = {"rollout.lenience": 2.0, "seed": 3}
    with pytest.raises(ValueError, match=r"lenience was 1\.0, now 2\.0; seed was 0, now 3; give"):
        loop.train(small_config(LONG | changes), finished, hooks=StandardHooks())
    assert files(finished) == before


def test_a_finished_run_can_be_made_longer_and_evaluated_more(finished, tmp_path, mesh, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    changes = {"train.epochs": 5, "evaluate.samples": 3, "evaluate.every": 1}
    loop.train(small_config(LONG | changes), workdir, hooks=StandardHooks())
    assert "resumed at step 8 of 10" in capsys.readouterr().out
    lines = records(workdir)
    assert lines[:9] == records(finished)
    assert [r["step"] for r in lines[9:]] == [9, 10]
    assert all(r["rollout/reuse_fraction"] > 0 and "reward/eval" in r for r in lines[9:])
    # Shorter again: the run is past its end.
    loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    assert "finished at step 10 of 8, nothing to do" in capsys.readouterr().out


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(finished, tmp_path, mesh):
    """The last one of a finished run has one flipped bit. Without it the run resumes from 6."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    data = workdir / "checkpoints" / "8" / "arrays" / "d"
    path = max(data.iterdir(), key=lambda x: x.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoints/8 is damaged: .*; delete .* to step 6$"):
        loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    shutil.rmtree(workdir / "checkpoints" / "8")
    loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    assert_same_run(workdir, finished, 8)


def test_metrics_without_a_checkpoint_are_not_written_over(finished, tmp_path, mesh):
    workdir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    before = (workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"has metrics up to step 8 but no checkpoint; put"):
        loop.train(small_config(LONG), workdir, hooks=StandardHooks())
    assert (workdir / "metrics.jsonl").read_bytes() == before


# --- meshes ---------------------------------------------------------------------------------------

MESHES = [(8, 1, 1), (1, 4, 2), (2, 2, 2)]
# A step of one update on all of its responses.
ONE_STEP = {
    "train.steps": 1, "rollout.prompts_per_step": 8, "model.num_layers": 2,
    "updates.mini_batch_size": 64, "updates.skip_no_signal": False,
    "updates.learning_rate": 3e-4, "algorithm.solution_coef": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, make_mesh):
    """The work directory of ONE_STEP on one device."""
    workdir = tmp_path_factory.mktemp("one_device")
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(ONE_STEP), workdir, hooks=StandardHooks())
    return workdir


# With the padding of each shard, as the shares of `prefill`.
PADDED = ("rollout/tokens_prefilled", "update/computed_fraction")


def _distance(arrays: dict, expected: dict, part: str) -> float:
    """‖a − b‖ / ‖b‖ over all arrays with `part` in their names."""
    names = [name for name in expected if part in name]
    a, b = (np.concatenate([np.ravel(x[n]) for n in names]) for x in (arrays, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=pytest.mark.slow if shape != (2, 2, 2) else ()) for shape in MESHES],
    ids=str,
)
def test_the_first_step_is_that_of_one_device(one_device, tmp_path, make_mesh, shape):
    """The same tokens, and log-probs, gradient and weights up to rounding."""
    with jax.set_mesh(make_mesh(*shape)):
        loop.train(small_config(ONE_STEP), tmp_path, hooks=StandardHooks())
    of_mesh, of_device = ({**records(x)[1]} for x in (tmp_path, one_device))
    for record in (of_mesh, of_device):
        for name in [name for name in record if name in PADDED or "/prefill_" in name]:
            del record[name]
    assert of_mesh == pytest.approx(of_device, rel=1e-4, abs=1e-5)
    arrays, expected = saved(tmp_path, 1), saved(one_device, 1)
    np.testing.assert_array_equal(arrays["store.tokens.ids"], expected["store.tokens.ids"])
    # AdamW's first moment is the gradient. Its first change of a weight is nearly lr · sign(g),
    # and where g is noise, so is its sign: weights are compared, not their change.
    for part in ("store.tokens.sampling_logprobs", ".mu.", "train.policy.params."):
        assert _distance(arrays, expected, part) <= 1e-5


def test_a_whole_run_through_the_command_line(tmp_path):
    """On 2 x 2 x 2, with the mesh given by flags."""
    arguments = ["--config=tests/small_runs.py", "--config.rollout.prompts_per_step=8"]
    arguments += [f"--config.mesh.{name}=2" for name in ("fsdp", "tensor")]
    arguments += ["--config.updates.skip_no_signal=False"]  # every step has a log-prob gap
    arguments += ["--config.log.report=True"]
    flags = f"{os.environ['XLA_FLAGS']} {small_runs.FAST_COMPILATION}"  # as in these tests
    done = launch("launch/train.py", *arguments, f"--workdir={tmp_path / 'run'}", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    assert f"workdir: {tmp_path / 'run'}\n" in done.stdout
    assert "mesh {'data': 2, 'fsdp': 2, 'tensor': 2}" in done.stdout
    assert "training reward: first " in done.stdout
    assert f"report: {tmp_path / 'run' / 'report.html'}\n" in done.stdout
    assert 'id="data"' in (tmp_path / "run" / "report.html").read_text()
    lines = records(tmp_path / "run")
    assert [r["step"] for r in lines] == [0, 1, 2]
    assert 0 < lines[2]["rollout/reuse_fraction"] < 1
    assert lines[1]["policy/rollout_train_logprob_gap"] < 1e-5
