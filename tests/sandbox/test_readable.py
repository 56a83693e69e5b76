"""What code in answers may read, and what it may not."""

import json
import os
import subprocess
import sys

import bare_worker
import filter_worker
import pytest
import weak_environment_worker
import weak_worker
from worker_pools import score

from specrl_jax.agents import environment_process
from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.rewards.pool import RewardPool
from specrl_jax.sandbox import linux, readable, worker_process, workers

LIMITS = {"timeout": 20, "memory_mib": 1024, "workers": 1}
needs_landlock = pytest.mark.skipif(not linux.landlock_abi(), reason="needs Landlock")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make a home with a project in it, and run there."""
    project = tmp_path / "project"
    for folder in (tmp_path / ".ssh", project / "runs", project / "task"):
        folder.mkdir(parents=True)
    for path in (tmp_path / ".ssh/key", project / "problems.jsonl", project / "runs/rows.jsonl",
                 project / "task/problems.jsonl"):  # fmt: skip
        path.write_text("gold")
    (project / "link").symlink_to(project / "problems.jsonl")
    (project / "task/__init__.py").write_text("")
    (project / "task/later.py").write_text("x = 2")
    (project / "sibling.py").write_text("x = 3")
    (project / "own_reward.py").write_text(
        "def score(response, **_):\n    names = {'value': 0}\n    exec(response, names)\n"
        "    return names['value']\n"
    )
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.chdir(project)
    yield tmp_path
    for name in ("own_reward", "sibling", "task"):
        sys.modules.pop(name, None)


def secrets(home):
    """Return code that reads what is the user's."""
    project = home / "project"
    opens = [
        home / ".ssh/key", project / "problems.jsonl", project / "runs/rows.jsonl",
        project / "task/problems.jsonl", project / "link", "/etc/passwd",
        f"/usr/lib/../..{project}/problems.jsonl", f"/proc/self/root{project}/problems.jsonl",
        f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cmdline", "/proc/1/cmdline",
        "/proc/self/environ",
    ]  # fmt: skip
    lists = [home, home / ".ssh", project, project / "runs", "/tmp", "/dev/shm", "/proc", "/"]
    other = repr(str(project / "problems.jsonl"))
    return [
        *(f"open({str(path)!r}).read()" for path in opens),
        *(f"import os; os.listdir({str(path)!r})" for path in lists),
        f"import os; os.symlink({other}, 'x'); open('x').read()",
        f"import os; os.link({other}, 'x'); open('x').read()",
        f"import os; os.rename({other}, 'x'); open('x').read()",
        f"import os; open(f'/proc/self/fd/{{os.open({other}, os.O_PATH)}}').read()",
        f"import subprocess as s; s.run(['cat', {other}], check=True)",
    ]


@needs_landlock
@pytest.mark.parametrize("worker", [worker_process, weak_worker])
def test_an_answer_reads_nothing_of_the_user(home, monkeypatch, worker):
    """With namespaces and without; as another user where this is root."""
    monkeypatch.setattr(workers, "worker_process", worker)
    texts = secrets(home)
    with RewardPool("own_reward:score", **LIMITS) as pool:
        scores = score(pool, texts)
    left = [text for text, failed in zip(texts, scores.failed, strict=True) if not failed]
    assert left == []


@needs_landlock
@pytest.mark.parametrize("worker", [worker_process, weak_worker])
def test_an_answer_reads_what_it_needs(home, monkeypatch, worker):
    monkeypatch.setattr(workers, "worker_process", worker)
    texts = [
        "import sibling; value = sibling.x",
        "import task.later; value = task.later.x",
        "import sympy; value = sympy.isprime(7)",
        "import reasoning_gym as r; value = len(r.create_dataset('spell_backward', size=1))",
        "import zoneinfo; value = len(zoneinfo.available_timezones()) > 9",
        "import ssl; ssl.create_default_context(); value = 1",
        "import subprocess as s; value = float(s.check_output(['cat'], input=b'5'))",
        "import os; value = len(os.urandom(9)) + len(open('/dev/zero', 'rb').read(1))",
        "open('own', 'w').write('7'); value = float(open('own').read())",
        "import os; os.mkdir('a'); os.rename('a', 'b'); value = len(os.listdir())",
        "import tempfile; f = tempfile.TemporaryFile(); f.write(b'8'); value = f.tell()",
    ]
    with RewardPool("own_reward:score", **LIMITS) as pool:
        scores = score(pool, texts)
    assert scores.reasons == ("",) * len(texts)
    assert scores.rewards.tolist() == [3, 2, 1, 1, 1, 1, 5, 10, 7, 1, 1]


@needs_landlock
def test_reward_readable_names_more(home):
    text = "value = len(open(PATH).read())"
    texts = [f"PATH = {str(home / name)!r}; {text}" for name in (".ssh/key", "project/link")]
    with RewardPool("own_reward:score", **LIMITS, readable="~/.ssh:runs") as pool:
        texts.append(f"value = len(open({os.getcwd()!r} + '/runs/rows.jsonl').read())")
        scores = score(pool, texts)
    assert scores.failed.tolist() == [False, True, False]
    assert "reward.readable" in scores.reasons[1]


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"reward.readable must be existing paths.*there is no"):
        readable.parse_readable(f"{tmp_path}:{tmp_path}/none")
    assert readable.parse_readable("") == ""


@needs_landlock
@pytest.mark.parametrize("worker", [environment_process, weak_environment_worker])
def test_the_tool_reads_nothing_of_the_user(home, monkeypatch, worker):
    """Also in its separate program, which reads packages."""
    from specrl_jax.agents import environment_pool

    monkeypatch.setattr(environment_pool, "environment_process", worker)
    codes = [*secrets(home), "import numpy; print('gold', numpy.arange(3).sum())"]
    with EnvironmentPool("python", **LIMITS) as pool:
        (episode,) = pool.start([("1", "", {})])
        said = []
        for code in codes:
            pool.submit([episode], [f"<tool_call>{code}</tool_call>"])
            said.append(pool.collect([episode])[0].observation)
        pool.end([episode])
    assert said[-1] == "gold 3\n"
    left = [code for code, text in zip(codes[:-1], said, strict=False) if "Error" not in text]
    assert left == []


@needs_landlock
def test_a_program_may_open_its_standard_input():
    tests = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    program = "print(sum(map(int, open('/dev/stdin').read().split())))"
    with RewardPool("code", **LIMITS) as pool:
        assert score(pool, [program], [tests]).rewards == 1


@pytest.mark.parametrize("worker", [filter_worker, bare_worker])
def test_the_warning_says_that_files_can_be_read(monkeypatch, caplog, worker):
    monkeypatch.setattr(workers, "worker_process", worker)
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        score(pool, ["value = 1"])
    (record,) = caplog.records
    assert "it can read files" in record.getMessage()


FIND = """
import json, os, sys
from specrl_jax.sandbox.readable import find_readable
os.environ["HOME"], sys.prefix = sys.argv[1:3]
print(json.dumps(find_readable("")))
"""


def test_python_below_the_home_is_readable_and_the_home_is_not(tmp_path):
    """Prefix by prefix: one that is the home itself only allows its libraries."""
    for prefix in (tmp_path, tmp_path / ".pyenv/versions/3.11"):
        (prefix / "lib/python3.11/site-packages").mkdir(parents=True)
        command = [sys.executable, "-c", FIND, str(tmp_path), str(prefix)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        paths = json.loads(done.stdout)
        assert str(prefix / "lib") in paths
        assert not {str(tmp_path), str(prefix), "/", "/usr", "/etc", "/tmp"} & {*paths}
