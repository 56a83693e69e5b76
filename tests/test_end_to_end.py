"""The whole job as a user meets it: finished, changed, interrupted and killed runs, every mesh."""

import dataclasses
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
from small_runs import (
    assert_same_run,
    files,
    launch,
    records,
    run_until_killed,
    small_config,
)

from specrl_jax import runtime
from specrl_jax import state as states
from specrl_jax import train as loop
from specrl_jax.algorithms.learner import TrainState, make_optimizer
from specrl_jax.algorithms.scoring import logprobs, pack_rows
from specrl_jax.algorithms.update import make_batch, update
from specrl_jax.build import build, policy_copy
from specrl_jax.checkpoint import Checkpointer
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.transformer import place_params
from specrl_jax.rollout.adaptive import measure_steps as timing
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts
from specrl_jax.rollout.engine.runner import ModelRunner
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.generate import Noise, generate
from specrl_jax.sharding import put
from specrl_jax.telemetry.metrics import MetricsLog

MESHES = [(8, 1, 1), (1, 4, 2), (2, 2, 2)]
# Warmed up, evaluated, with a reference that only the checkpoint holds; a checkpoint every 3 steps.
LONG = {
    "warmup.steps": 3, "evaluate.every": 3, "checkpoint.every": 3, "train.epochs": 4,
    "checkpoint.keep_last": 3, "algorithm.kl_coef": 0.1,
}  # fmt: skip


# The same with both kinds of drafts.
TREES = LONG | {"rollout.draft": "previous+tree"}


def known_costs(trainer) -> Speculation:
    """In the place of measured seconds: two tokens a step cost least, whatever is accepted."""
    seconds = {(1, False): 1.0, (6, False): 1.0, (2, True): 0.8, (4, True): 1.0, (8, True): 1.3}
    return Speculation(StepCosts({Point(32, 9, *program): s for program, s in seconds.items()}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_mesh):
    """The work directory of LONG, run without interruption: 8 steps, checkpoints 3, 6, 8."""
    workdir = tmp_path_factory.mktemp("end_to_end") / "finished"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(LONG), workdir)
    return workdir


def _train_until(workdir, owner, method, step) -> None:
    small_runs.interrupt(owner, method, step)
    loop.train(small_config(LONG), workdir)


def _train_into_a_rollout(workdir) -> None:
    """Dies in the midst of the seventh rollout, that of step 5: behind those of steps 1 to 4 and
    the evaluations at 0 and 3."""
    begin, run_model, begun = Scheduler.run, ModelRunner.run, []

    def run(self):
        begun.append(self)
        return begin(self)

    def decode_and_die(self, *args, verify=False, **options):
        counts = run_model(self, *args, verify=verify, **options)
        if len(begun) == 7 and not verify:
            os.kill(os.getpid(), signal.SIGKILL)
        return counts

    states.new_speculation, Scheduler.run, ModelRunner.run = known_costs, run, decode_and_die
    loop.train(small_config(TREES), workdir)


@pytest.mark.slow
def test_killed_twice_and_resumed_is_the_same_run(finished, tmp_path, mesh, capsys):
    """kill -9 while the first checkpoint is being written, and a step after another one."""
    workdir = tmp_path / "run"
    run_until_killed(_train_until, workdir, Checkpointer, "save", 0)
    assert [r["step"] for r in records(workdir)] == [0]
    run_until_killed(_train_until, workdir, MetricsLog, "write", 7)
    assert [r["step"] for r in records(workdir)] == [0, 1, 2, 3, 4, 5, 6, 7]
    loop.train(small_config(LONG), workdir)
    # The checkpoint of step 6 may have been under way still.
    assert re.search(r"resumed at step [36] of 8", capsys.readouterr().out)
    assert_same_run(workdir, finished, 8)


@pytest.mark.slow
def test_killed_in_the_midst_of_a_rollout_with_tree_drafts(tmp_path, mesh, monkeypatch):
    """Widths are chosen by what drafts have brought so far, and so are those of the resumed run."""
    monkeypatch.setattr(states, "new_speculation", known_costs)
    loop.train(small_config(TREES), tmp_path / "finished")
    workdir = tmp_path / "run"
    run_until_killed(_train_into_a_rollout, workdir)
    assert [r["step"] for r in records(workdir)] == [0, 1, 2, 3, 4]
    loop.train(small_config(TREES), workdir)
    assert_same_run(workdir, tmp_path / "finished", 8)
    assert sum(r.get("rollout/tokens_drafted", 0) for r in records(workdir)) > 0
    assert sum(r.get("rollout/tokens_reused", 0) for r in records(workdir)) > 0
    assert max(r["rollout/width_max"] for r in records(workdir)[1:]) == 2
    predicted = ("time/decode_predicted", "time/verify_predicted")
    one, two = (records(w, times=True) for w in (workdir, tmp_path / "finished"))
    for name in predicted:
        assert [r.get(name) for r in one] == [r.get(name) for r in two]


@pytest.mark.parametrize("moved", [False, True], ids=["same", "another"])
def test_on_another_machine_costs_are_measured_again(finished, mesh, monkeypatch, capsys, moved):
    """What drafts have brought stays."""
    trainer, params = build(small_config(LONG))
    if moved:
        monkeypatch.setattr(timing, "machine", lambda: {"device": "another"})
    with trainer.scorer.pool, Checkpointer(finished / "checkpoints") as checkpoints:
        state = states.resume(trainer, params, checkpoints, 8)
        _, saved_state = checkpoints.restore(8, state.like())
    assert ("now on {'device': 'another'}" in capsys.readouterr().out) == moved
    resumed, before = state.speculation.host(), saved_state["speculation"]
    assert resumed["acceptance"] == before["acceptance"]
    assert resumed["acceptance"]["previous_verified"] > 0
    assert before["costs"]
    assert resumed["costs"] == ([] if moved else before["costs"])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_leaves_and_the_run_goes_on(
    finished, tmp_path, mesh, capsys, monkeypatch, number
):
    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", MetricsLog.write)  # put back after interrupt
        small_runs.interrupt(MetricsLog, "write", 4, number)
        loop.train(small_config(LONG), workdir)
    out = capsys.readouterr().out
    assert f"{number.name}, saved at step 4 of 8; run the same command to go on" in out
    assert records(workdir) == records(finished)[:5]
    jax.clear_caches()  # as in a new process
    runtime.compile_metrics()  # from here on
    loop.train(small_config(LONG), workdir)
    assert "resumed at step 4 of 8" in capsys.readouterr().out
    steps = records(workdir, times=True)[5:]
    assert sum(r["compile/built"] for r in steps) == 0
    assert sum(r["compile/read"] for r in steps) > 0
    assert_same_run(workdir, finished, 8)


def test_a_finished_run_says_so_and_changes_nothing(finished, mesh, capsys):
    """Also where the config says otherwise how and where it runs."""
    before = files(finished)
    changes = {"log.tracker": "wandb", "checkpoint.every": 1, "mesh.data": 1}
    loop.train(small_config(LONG | changes), finished)
    assert "finished at step 8 of 8, nothing to do" in capsys.readouterr().out
    assert files(finished) == before


def test_a_finished_run_can_be_made_longer_and_evaluated_more(finished, tmp_path, mesh, capsys):
    workdir = shutil.copytree(finished, tmp_path / "run")
    changes = {"train.epochs": 5, "evaluate.samples": 3, "evaluate.every": 1}
    loop.train(small_config(LONG | changes), workdir)
    assert "resumed at step 8 of 10" in capsys.readouterr().out
    lines = records(workdir)
    assert lines[:9] == records(finished)
    assert [r["step"] for r in lines[9:]] == [9, 10]
    assert all(r["rollout/reuse_fraction"] > 0 and "reward/eval" in r for r in lines[9:])
    loop.train(small_config(LONG), workdir)  # shorter again: the run is past its end
    assert "finished at step 10 of 8, nothing to do" in capsys.readouterr().out


def test_a_changed_config_is_refused_with_the_fields_named(finished, mesh):
    before = files(finished)
    changes = {"rollout.lenience": 2.0, "seed": 3}
    with pytest.raises(ValueError, match=r"lenience was 1\.0, now 2\.0; seed was 0, now 3; give"):
        loop.train(small_config(LONG | changes), finished)
    assert files(finished) == before


def test_checkpoints_kept_are_the_last_and_the_best(finished):
    steps = {int(path.name) for path in (finished / "checkpoints").iterdir()}
    rewards = {r["step"]: r["reward/eval"] for r in records(finished) if "reward/eval" in r}
    assert set(rewards) == {0, 3, 6, 8}
    best = max(rewards, key=lambda step: (rewards[step], step))
    assert steps == {3, 6, 8, best}


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(finished, tmp_path, mesh, capsys):
    """The last one of a finished run has one flipped bit: the run goes on from step 6."""
    workdir = shutil.copytree(finished, tmp_path / "run")
    data = workdir / "checkpoints" / "8" / "arrays" / "d"
    path = max(data.iterdir(), key=lambda x: x.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    loop.train(small_config(LONG), workdir)
    lines = [x for x in capsys.readouterr().out.splitlines() if "damaged" in x]
    assert len(lines) == 1
    assert re.search(r"checkpoints/8 is damaged: .*; going back to step 6; it is kept", lines[0])
    assert_same_run(workdir, finished, 8)
    assert "damaged-8" in {path.name for path in (workdir / "checkpoints").iterdir()}


def test_metrics_without_a_checkpoint_are_not_written_over(finished, tmp_path, mesh):
    workdir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    before = (workdir / "metrics.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has metrics up to step 8 but no checkpoint; put"):
            loop.train(small_config(LONG), workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_report_and_a_summary_at_the_end(tmp_path, mesh, capsys):
    loop.train(small_config({"log.report": True, "evaluate.every": 2}), tmp_path / "run")
    out = capsys.readouterr().out
    assert "held-out reward: first " in out
    assert f"report: {tmp_path / 'run' / 'report.html'}\n" in out
    assert 'id="data"' in (tmp_path / "run" / "report.html").read_text()


# --- meshes ---------------------------------------------------------------------------------------

# The preset micro with its own policy and rollout; only the warm-up and the data are cut short.
MICRO = {"warmup.steps": 40, "warmup.examples": 256, "log.tracker": "none", "reward.workers": 1,
         "evaluate.every": 0}  # fmt: skip


def _micro():
    config = small_runs.preset("micro")
    config.update_from_flattened_dict(MICRO)
    return config


def _distance(one, two) -> float:
    """‖one − two‖ / ‖two‖ over all leaves."""
    square = lambda tree: sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))  # noqa: E731
    gap = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), one, two)
    return float(np.sqrt(square(gap) / square(jax.tree.map(np.asarray, two))))


@dataclasses.dataclass
class _FirstStep:
    """The first step of the preset micro from given weights, as NumPy arrays."""

    params: dict
    rollout: object
    batch: object
    old_logprobs: np.ndarray
    gradient: dict
    changed: dict


def _placed(tree):
    return jax.tree.map(lambda x: put(x, "batch", *(None,) * (np.ndim(x) - 1)), tree)


def _first_step(one: "_FirstStep | None" = None) -> _FirstStep:
    """On the mesh in use; with `one`, from its weights and teacher-forced with its tokens."""
    trainer, params = build(_micro())
    with trainer.scorer.pool:
        state = states.init_state(trainer, params) if one is None else None
    host = one.params if one else jax.device_get(state.train.params)
    params = place_params(trainer.model, host)
    settings = trainer.config.rollout
    rows, slots = settings.prompts_per_step * settings.group_size, settings.response_len
    prompts = PromptStream(trainer.prompts, settings.prompts_per_step, 0).next()
    weights = policy_copy(trainer.model, params)
    rollout = generate(trainer.rollout_spec, weights, prompts, Noise(trainer.key, 1)).rollout
    # Advantages need not be real ones here, only the same on every mesh.
    advantages = np.tile(np.linspace(-1, 1, rows, dtype=np.float32)[:, None], (1, slots))
    batch = make_batch(prompts, rollout, slots)
    batch = dataclasses.replace(batch, advantages=put(advantages, "batch", None))
    forced = _placed(one.batch) if one else batch
    old = logprobs(trainer.learner, params, pack_rows(trainer.learner, forced, np.arange(rows)))
    adamw = make_optimizer(trainer.config.updates, optax.constant_schedule(3e-4))
    learner = dataclasses.replace(trainer.learner, optimizer=_telling(adamw))
    train = TrainState.create(jax.tree.map(jnp.copy, params), learner.optimizer)
    train, _ = update(learner, train, forced, pack_rows(learner, forced, np.arange(rows // 2)))
    gradient, changed = jax.device_get((train.opt_state[0], train.params))
    return _FirstStep(
        params=host,
        rollout=jax.device_get(rollout),
        batch=jax.device_get(forced),
        old_logprobs=np.asarray(old),
        gradient=gradient,
        changed=changed,
    )


def _telling(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, whose state also holds the last gradient, before clipping."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), optimizer.init(params)

    def step(grads, state, params=None):
        updates, inner = optimizer.update(grads, state[1], params)
        return updates, (grads, inner)

    return optax.GradientTransformation(init, step)


@pytest.fixture(scope="module")
def one_device(make_mesh):
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return _first_step()


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=pytest.mark.slow if shape != (2, 2, 2) else ()) for shape in MESHES],
    ids=str,
)
def test_the_first_step_is_that_of_one_device(one_device, make_mesh, shape):
    with jax.set_mesh(make_mesh(*shape)):
        step = _first_step(one_device)
    slots = one_device.rollout.tokens.shape[1]
    inside = np.arange(slots) < one_device.rollout.lens[:, None]
    # Where two candidates tie within rounding, a row's tokens are others from there on.
    same = np.all(step.rollout.tokens == one_device.rollout.tokens, axis=1)
    assert np.mean(same) > 0.99
    one, two = (np.where(same[:, None], s.rollout.policy_logprobs, 0) for s in (step, one_device))
    assert _distance(one, two) <= 1e-5
    one, two = (np.where(inside, s.old_logprobs, 0) for s in (step, one_device))
    assert _distance(one, two) <= 1e-5
    assert _distance(step.gradient, one_device.gradient) <= 1e-5
    # AdamW's first step is lr · g / (|g| + ε), close to lr · sign(g), and where g is rounding noise
    # its sign is too: the change differs by up to 2e-4. What it leads to is compared, and above the
    # gradient, which is the change that plain gradient descent would make.
    assert _distance(step.changed, one_device.changed) <= 1e-5


def test_a_whole_run_through_the_command_line(tmp_path):
    """On 2 x 2 x 2, with the mesh given by flags."""
    arguments = ["--config=tests/small_runs.py", "--config.rollout.prompts_per_step=8"]
    arguments += [f"--config.mesh.{name}=2" for name in ("fsdp", "tensor")]
    arguments += ["--config.updates.skip_no_signal=False"]  # every step has a log-prob gap
    flags = os.environ["XLA_FLAGS"] + " --xla_backend_optimization_level=0"  # as in these tests
    done = launch("launch/train.py", *arguments, f"--workdir={tmp_path / 'run'}", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    assert f"workdir: {tmp_path / 'run'}\n" in done.stdout
    assert "mesh {'data': 2, 'fsdp': 2, 'tensor': 2}" in done.stdout
    assert "training reward: first " in done.stdout
    lines = records(tmp_path / "run")
    assert [r["step"] for r in lines] == [0, 1, 2]
    assert 0 < lines[2]["rollout/reuse_fraction"] < 1
    assert lines[1]["policy/rollout_train_logprob_gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_the_micro_preset_on_eight_devices(shape, tmp_path):
    """The preset as a user starts it, at its full size: it ends, and its drafts are mostly kept."""
    sizes = zip(("data", "fsdp", "tensor"), shape)
    flags = [f"--workdir={tmp_path}", "--config.log.tracker=none"]
    flags += [f"--config.mesh.{name}={size}" for name, size in sizes]
    done = launch("launch/train.py", "--config=configs/grpo.py:micro", *flags)
    assert done.returncode == 0, done.stderr
    steps = records(tmp_path)
    assert [r["step"] for r in steps] == list(range(19))
    assert all(r["rollout/draft_accept_rate"] > 0.5 for r in steps if r["epoch"] >= 2)
