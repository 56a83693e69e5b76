"""Record of the code that ran, WORKDIR/code.jsonl."""

import json
import shutil
import subprocess

import pytest

from specrl_jax.telemetry import code_state
from specrl_jax.telemetry.code_state import git_state, read_code, record_code


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_and_whether_it_was_changed(tmp_path):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a")
        subprocess.run(["git", *who, *words], check=True, cwd=tmp_path)

    assert git_state(tmp_path) == {}
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert not clean["dirty"]
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == clean | {"dirty": True}


def test_a_line_for_each_start_unlike_the_last(tmp_path, monkeypatch):
    states = [{"commit": "a" * 40, "dirty": False}] * 2 + [{"commit": "b" * 40, "dirty": True}, {}]
    monkeypatch.setattr(code_state, "git_state", lambda: states.pop(0))
    for _ in range(4):
        record_code(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "code.jsonl").read_text().splitlines()]
    assert [line.get("commit", "-")[0] for line in lines] == ["a", "b", "-"]
    assert lines[0]["devices"] == "8 × cpu"
    texts = read_code(tmp_path)
    assert f", commit {'a' * 10}, jax " in texts[0]
    assert f", commit {'b' * 10} with changes, jax " in texts[1]
    assert ", no git repository, jax " in texts[2]


def test_a_file_that_is_damaged_or_not_there(tmp_path):
    assert read_code(tmp_path) == []
    (tmp_path / "code.jsonl").write_text('{"version": "1"}\n{"ver')
    assert len(read_code(tmp_path)) == 1  # a process is writing the second line
    (tmp_path / "code.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"code.jsonl: line 1 \(remove it\) must be JSON"):
        read_code(tmp_path)
