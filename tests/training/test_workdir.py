"""A work directory that cannot be written, or is of another run, is refused before anything."""

import math
import pathlib

import pytest
from small_runs import one_line, small_config

from specrl_jax.training.workdir import check_paths, check_run_config, save_run_config


def test_a_folder_that_is_new_stays_absent(tmp_path):
    check_paths(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"run is a broken link; mend or remove it$"):
        check_paths(tmp_path / "run")


def test_a_folder_that_takes_no_files_is_refused():
    rule = r"^--workdir must be a writable folder, /proc is not \(.*\); give another$"
    with pytest.raises(ValueError, match=rule):
        check_paths(pathlib.Path("/proc/run"))


def test_run_config_of_the_same_run_and_a_damaged_one(tmp_path):
    workdir = tmp_path / "new" / "run"
    assert not check_run_config(workdir, small_config())
    save_run_config(workdir, small_config())
    assert check_run_config(workdir, small_config())
    assert [p.name for p in workdir.iterdir()] == ["config.json"]
    (workdir / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not a saved config; give another --workdir"):
        check_run_config(workdir, small_config())


def test_a_changed_run_config_is_refused_with_every_field(tmp_path):
    save_run_config(tmp_path, small_config({"rollout.lenience": math.inf}))
    changed = small_config({"seed": 1, "log.tracker": "wandb", "train.steps": 20})
    with pytest.raises(ValueError, match="--workdir") as error:
        check_run_config(tmp_path, changed, ignore=("log", "train.step"))
    text = one_line(error)
    assert "seed was 0, now 1" in text
    assert "rollout.lenience was Infinity, now 1.0" in text
    assert "train.steps was 0, now 20" in text  # "train.step" is another field, not a prefix
    assert "tracker" not in text
    assert "epochs" not in text


def test_a_run_with_other_fields_is_refused(tmp_path):
    older = small_config().to_dict()
    del older["critic"]
    save_run_config(tmp_path, older)
    message = r"from another version of specrl_jax: critic.clip was added later, critic.coef was"
    with pytest.raises(ValueError, match=f"{message}[^\n]*; continue with that version, or start"):
        check_run_config(tmp_path, small_config())
    save_run_config(tmp_path, small_config({"updates.skip_nonfinite": 3}))
    assert check_run_config(tmp_path, small_config(), ignore=("updates",))
    newer = small_config().to_dict()
    newer["updates"]["gone"] = 1
    save_run_config(tmp_path, newer)
    with pytest.raises(ValueError, match=r"version of specrl_jax: updates.gone no longer exists"):
        check_run_config(tmp_path, small_config())
