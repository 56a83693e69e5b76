"""Divergence: reported before it is saved, with its field; another run resumes from before it."""

import dataclasses
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import assert_same_run, files, one_line, records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms.update_spec import Critic, Training
from specrl_jax.training import learn, update_metrics

EVERY_STEP = {"checkpoint.every": 1}


def _steps(workdir) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def good(tmp_path_factory, make_mesh) -> pathlib.Path:
    """A run of four steps with a checkpoint at each; the last two are kept."""
    workdir = tmp_path_factory.mktemp("divergence") / "good"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(EVERY_STEP), workdir)
    return workdir


def _assert_ends(error, run, message: str) -> None:
    way_on = f"; resume from a checkpoint (0) in a new --workdir with --resume_from={run}@STEP"
    assert one_line(error) == message + way_on
    assert _steps(run) == ["0"]


# The first update leaves weights of 1e30, which are finite, as are its loss and gradients.
def test_a_run_that_diverged_goes_on_at_another_rate(good, mesh, tmp_path):
    """From its step 0 at the rate of the good run: as that run did."""
    wild = tmp_path / "wild"
    with pytest.raises(FloatingPointError) as error:
        loop.train(small_config(EVERY_STEP | {"updates.learning_rate": 1e30}), wild)
    message = "step 1: policy: weight_norm is inf; lower updates.learning_rate, now 1e+30"
    _assert_ends(error, wild, message)
    before = files(wild)
    loop.train(small_config(EVERY_STEP), tmp_path / "run", f"{wild}@0")
    assert_same_run(tmp_path / "run", good, 4)
    assert files(wild) == before


def test_a_critic_that_diverged_is_not_saved(mesh, tmp_path):
    changes = EVERY_STEP | {"critic.learning_rate": 1e30}
    with pytest.raises(FloatingPointError) as error:
        loop.train(small_config(changes, "ppo"), tmp_path / "run")
    message = "step 1: critic: weight_norm is inf; lower critic.learning_rate, now 1e+30"
    _assert_ends(error, tmp_path / "run", message)


@pytest.mark.slow
def test_a_run_from_a_later_checkpoint_goes_on_as_that_run_did(mesh, tmp_path, capsys):
    """With another field, which changes no program."""
    good, run = tmp_path / "good", tmp_path / "run"
    origin = f"{good}@3"
    loop.train(small_config(EVERY_STEP | {"updates.skip_nonfinite": 2}), good)
    config = small_config(EVERY_STEP | {"updates.skip_nonfinite": 3})
    loop.train(config, run, origin)
    assert records(run) == records(good)[-1:]
    assert _steps(run) == ["3", "4"]
    capsys.readouterr()
    loop.train(config, run, origin)  # the same command again
    assert "finished at step 4 of 4, nothing to do" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"resume_from was \".*@3\", now absent"):
        loop.train(config, run)


def test_what_a_run_cannot_begin_with_is_refused_in_one_line(good, mesh, tmp_path):
    cases = [
        ("run", {}, "--resume_from must be RUN@STEP, a work directory and the step .*'run'$"),
        ("run@x", {}, "--resume_from must be RUN@STEP"),
        (f"{tmp_path}@1", {}, "--resume_from must name a work directory, .* has no config.json"),
        (f"{good}@1", {}, "no checkpoint of step 1, there are: 3, 4"),
        (f"{good}@4", {}, r"train.steps or train.epochs must give more than the 4 steps of"),
        (f"{good}@3", {"model.embed_dim": 32, "updates.passes": 2},
         r"embed_dim was 16, now 32; only these may differ with --resume_from: model.attention, "),
    ]  # fmt: skip
    for i, (origin, changes, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message) as error:
            loop.train(small_config(EVERY_STEP | changes), tmp_path / f"{i}", origin)
        assert "passes" not in one_line(error)
        assert not (tmp_path / f"{i}" / "config.json").exists()
    damaged = shutil.copytree(good, tmp_path / "damaged")
    (damaged / "checkpoints" / "3" / "host" / "metadata").write_text("{}")
    before = files(damaged)
    with pytest.raises(ValueError, match=r"checkpoints/3 is damaged: "):
        loop.train(small_config(EVERY_STEP), tmp_path / "of damaged", f"{damaged}@3")
    assert files(damaged) == before


def _bits(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _poison(monkeypatch, poisoned: set[int]) -> list[bool]:
    """The advantages of these updates are NaN. Whether each update left the state as it was."""
    real, unchanged = learn.update, []

    def update(update_spec, state, batch, packed, *rest, **options):
        if len(unchanged) in poisoned:
            batch = dataclasses.replace(batch, advantages=batch.advantages * jnp.nan)
        before = _bits(state)
        state, sums = real(update_spec, state, batch, packed, *rest, **options)
        unchanged.append(_bits(state) == before)
        return state, sums

    monkeypatch.setattr(learn, "update", update)
    return unchanged


ALL_ROWS = {"updates.skip_no_signal": False}  # two updates a step, each with a gradient


def test_a_step_that_is_not_finite_is_skipped_and_counted(mesh, tmp_path, monkeypatch):
    unchanged = _poison(monkeypatch, {1, 4, 5})
    changes = ALL_ROWS | {"updates.skip_nonfinite": 3}
    loop.train(small_config(changes), tmp_path / "run")
    assert unchanged == [i in {1, 4, 5} for i in range(8)]
    lines = records(tmp_path / "run")[1:]
    assert [line["update/skipped"] for line in lines] == [1, 0, 2, 0]
    assert ["policy/loss" in line for line in lines] == [True, True, False, True]
    assert all(np.isfinite(value) for line in lines for value in line.values())


def test_too_many_in_a_row_end_the_run(mesh, tmp_path, monkeypatch):
    _poison(monkeypatch, {2, 3})
    changes = ALL_ROWS | EVERY_STEP | {"updates.skip_nonfinite": 2}
    row = "loss is nan, 2 updates in a row; lower updates"
    with pytest.raises(FloatingPointError, match=rf"^step 2: policy: {row}"):
        loop.train(small_config(changes), tmp_path / "run")
    assert _steps(tmp_path / "run") == ["0", "1"]


def _with_critic() -> types.SimpleNamespace:
    trained = {"policy": Training(None), "critic": Critic(None, "head", coef=1.0, clip=0.0)}
    return types.SimpleNamespace(trained=trained)


def _sums(**changes: float) -> dict[str, np.ndarray]:
    names = ("loss", "grad_norm", "weight_norm", "moments")
    sums = {prefix + name: 1.0 for prefix in ("", "critic_") for name in names} | changes
    return {name: np.float32(x) for name, x in sums.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_norm": np.inf}, "policy: grad_norm is inf; lower updates.learning_rate, now 0.02"),
        ({"moments": np.nan}, "policy: moments is nan; lower updates.learning_rate"),
        ({"critic_loss": np.nan}, "critic: loss is nan; lower critic.learning_rate, now 0.001"),
        ({"critic_moments": np.inf}, "critic: moments is inf; lower critic.learning_rate"),
    ],
)
def test_the_message_names_the_stage_and_its_field(changes, message):
    trainer = types.SimpleNamespace(config=small_config(), update_spec=_with_critic())
    state = types.SimpleNamespace(step=7, skipped_in_row=0)
    with pytest.raises(FloatingPointError, match=f"^step 7: {message}"):
        update_metrics.drop_skipped_updates(trainer, state, [_sums(), _sums(**changes)])


def test_weights_that_are_not_finite_are_not_skipped():
    config = small_config({"updates.skip_nonfinite": 9})
    trainer = types.SimpleNamespace(config=config, update_spec=_with_critic())
    state = types.SimpleNamespace(step=7, skipped_in_row=8)
    good, bad = _sums(), _sums(loss=np.nan)
    made = update_metrics.drop_skipped_updates(trainer, state, [good, bad, good, bad])
    assert made == [good, good]
    assert state.skipped_in_row == 1
    with pytest.raises(FloatingPointError, match="weight_norm is inf"):
        update_metrics.drop_skipped_updates(trainer, state, [_sums(weight_norm=np.inf)])
