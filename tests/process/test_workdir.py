"""A work directory that cannot be written is refused before anything is loaded."""

import pathlib

import pytest

from specrl_jax.process.workdir import check_paths


def test_a_folder_that_is_new_stays_absent(tmp_path):
    check_paths(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"run is a link to nothing; mend or remove it$"):
        check_paths(tmp_path / "run")


def test_a_folder_that_takes_no_files_is_refused():
    rule = r"^--workdir must be a folder that can be written, /proc cannot \(.*\); give another$"
    with pytest.raises(ValueError, match=rule):
        check_paths(pathlib.Path("/proc/run"))
