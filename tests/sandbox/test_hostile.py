"""A drill: hostile answers among others. docs/reliability.md names the counts."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys

import bare_worker
import filter_worker
import hostile_answers
import numpy as np
import pytest
import weak_worker
from worker_pools import descendants, score

from specrl_jax.rewards.pool import RewardPool
from specrl_jax.sandbox import containment, linux, worker_process, workers

WEAK = 100  # answers, as many others among them, where the system has no namespaces
SEED = 28
LIMITS = {"timeout": 9, "memory_mib": 256, "workers": 1}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containment needs Linux")


class Prey(contextlib.ExitStack):
    """What belongs to the user: files, a process, and servers that count who calls."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder / "prey"
        self.folder.mkdir()
        self.file, self.socket = self.folder / "file", self.folder / "socket"
        self.file.write_text("the user's")
        self.process = subprocess.Popen(["sleep", "600"])
        self.callback(self.process.wait)
        self.callback(self.process.kill)
        self.servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self.servers.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.servers[1].bind(str(self.socket))
        self.servers[1].listen()
        self.servers[2].bind(("127.0.0.1", 0))
        self.port = self.servers[0].getsockname()[1]
        self.udp_port = self.servers[2].getsockname()[1]
        for server in self.servers:
            server.setblocking(False)
            self.enter_context(server)
        self.before = self._state()

    def names(self):
        ports = {"port": self.port, "udp": self.udp_port}
        return {"file": self.file, "pid": self.process.pid, "socket": self.socket} | ports

    def _state(self):
        files = {path.name: path.is_file() and path.read_text() for path in self.folder.iterdir()}
        return files, self.folder.stat().st_mode, os.getpriority(os.PRIO_PROCESS, self.process.pid)

    def assert_unharmed(self):
        assert self.process.poll() is None
        assert self._state() == self.before
        for server, call in zip(self.servers, ("accept", "accept", "recv"), strict=True):
            with pytest.raises(BlockingIOError):
                getattr(server, call)(*([1] if call == "recv" else []))


def probe(prey):
    """Skips the test where the system contains too little for it: it would hurt the user."""
    texts = [
        f"import os; os.kill({prey.process.pid}, 0)",
        f"open({str(prey.file)!r}, 'a')",
        "import socket; socket.socket().bind(('127.0.0.1', 0))",
    ]
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, texts)
    if not scores.failed.all():
        pytest.skip(f"this system allows {texts[int(np.argmin(scores.failed))]}")


def drill(hostile, prey, seed=SEED):
    """Scores hostile answers among others; every other answer must earn its own reward."""
    probe(prey)
    rng, processes = random.Random(seed), descendants(os.getpid())
    values = [rng.randint(0, 10**6) for _ in hostile]
    rows = [(text, None) for text in hostile] + [(f"value = {x}", x) for x in values]
    rng.shuffle(rows)
    limits = {"timeout": 6.0, "memory_mib": 256, "workers": 2}
    with RewardPool("user_scorers:execute", **limits) as pool:
        scores = score(pool, [text for text, _ in rows])
        prey.assert_unharmed()
    assert descendants(os.getpid()) == processes
    innocent = np.array([value is not None for _, value in rows])
    expected = np.array([value or 0 for _, value in rows], np.float32)
    np.testing.assert_array_equal(scores.rewards[innocent], expected[innocent])
    assert not scores.failed[innocent].any()
    assert np.isfinite(scores.rewards).all()


@pytest.fixture
def prey(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Prey(tmp_path) as prey:
        yield prey
    assert [path.name for path in tmp_path.iterdir()] == ["prey"]  # no scratch directory is left


def test_an_answer_cannot_lift_its_memory_limit():
    lift = "import resource as r; hard = r.getrlimit(r.RLIMIT_AS)[1]; "
    lift += "r.setrlimit(r.RLIMIT_AS, (hard, hard)); x = bytearray(1 << 30); value = 1"
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = pool.score([lift], [""], [""], [{}])
    assert scores.reasons == ("out of memory",)


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_hostile_answers_harm_nobody(prey, count):
    """As many others are among them."""
    hangs = hostile_answers.HANGS + hostile_answers.BOMBS
    drill(hostile_answers.choose(SEED, count, hangs, **prey.names()), prey)


def test_hostile_answers_without_namespaces(prey, monkeypatch):
    """Landlock, seccomp filters and the limits of a user do it, as in a container; of root too."""
    if linux.landlock_abi() < 6:
        pytest.skip("needs Landlock of Linux 6.12")
    monkeypatch.setattr(workers, "worker_process", weak_worker)
    hangs = hostile_answers.HANGS[:2] + hostile_answers.BOMBS
    drill(hostile_answers.choose(SEED, WEAK, hangs, **prey.names()), prey)


@pytest.mark.parametrize("worker", [worker_process, weak_worker])
def test_an_answer_locks_no_folder_for_the_next(tmp_path, monkeypatch, worker):
    monkeypatch.setattr(workers, "worker_process", worker)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    texts = [
        "import os; os.chmod('.', 0); value = 1",
        "import os; os.mkdir('a'); open('a/x', 'w'); os.chmod('a', 0); value = 2",
        "import os; open('x', 'w'); value = len(os.listdir()) + 2",
    ]
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, texts)
    assert scores.reasons == ("",) * 3
    np.testing.assert_array_equal(scores.rewards, [1, 2, 3])
    assert not list(tmp_path.iterdir())


def test_a_folder_is_removed_however_deep_and_no_link_is_followed(tmp_path):
    target = tmp_path / "target"
    (target / "a").mkdir(parents=True)
    for folder in (target, target / "a"):
        folder.chmod(0o755)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        containment.remove_folder(str(tmp_path / "link"))
    assert [folder.stat().st_mode & 0o777 for folder in (target, target / "a")] == [0o755] * 2
    deep = tmp_path / "deep"
    deep.mkdir()
    with contextlib.ExitStack() as stack:
        fd = os.open(deep, os.O_RDONLY)
        for _ in range(20):  # longer than a path may be
            stack.callback(os.close, fd)
            os.mkdir("x" * 255, dir_fd=fd)
            fd = os.open("x" * 255, os.O_RDONLY, dir_fd=fd)
        stack.callback(os.close, fd)
    containment.remove_folder(str(deep))
    assert not deep.exists()


FORKS = """
import os, time
value = 0
while value < 200:
    try:
        if os.fork() == 0:
            time.sleep(9)
            os._exit(0)
    except BlockingIOError:
        break
    value += 1
"""


@pytest.mark.parametrize("worker", [weak_worker, bare_worker])
def test_an_answer_has_no_more_processes_than_its_limit(monkeypatch, worker):
    """Root too, which the kernel does not limit by itself."""
    monkeypatch.setattr(workers, "worker_process", worker)
    texts = [
        FORKS,
        "import subprocess as s; value = float(s.check_output('echo 5 > x; cat x', shell=True))",
        "import os; value = os.getuid() != 0 or os.getgid() != 0",
    ]
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, texts)
    assert scores.reasons == ("",) * 3
    assert 20 < scores.rewards[0] < 2 * containment.MAX_PROCESSES  # others of the user may end
    np.testing.assert_array_equal(scores.rewards[1:], [5, 1])


MANY = """
import os, tempfile, threading
from specrl_jax.sandbox import containment, linux
if user := linux.own_user():
    os.setresuid(user, user, user)
with tempfile.TemporaryDirectory() as scratch:
    cell = containment.Cell(scratch, 1 << 30, False, containment.count_tasks(), 0)
    stop = threading.Event()
    for _ in range(2 * containment.MAX_PROCESSES):
        threading.Thread(target=stop.wait).start()
    answer = os.fork()
    if answer == 0:
        cell.confine()
        os._exit(os.fork() and 5)
    print(os.waitstatus_to_exitcode(os.waitpid(answer, 0)[1]))
    stop.set()
"""


def test_threads_that_the_user_starts_later_take_no_process_from_an_answer():
    """As a run does after its workers. Root would not be limited."""
    command = [sys.executable, "-c", MANY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "5\n", done.stderr


BECOME = """
import json, os, subprocess, sys, tempfile
from specrl_jax.sandbox import containment, linux
as_owner = sys.argv[1] == "True"
with tempfile.TemporaryDirectory() as scratch, tempfile.NamedTemporaryFile() as secret:
    cell = containment.Cell(scratch, 1 << 30, False, 0, linux.own_user(), secret.name)
    cell._as_owner = as_owner
    cell._open_scratch()
    if os.fork() == 0:
        cell.confine()
        echo = subprocess.run("echo 5 > x; cat x", shell=True, capture_output=True)
        may_be_root = True
        try:
            os.setuid(0)
        except PermissionError:
            may_be_root = False
        users = len({*os.getresuid(), *os.getresgid()})
        try:
            open(secret.name).close()
            reads = True
        except PermissionError:
            reads = False
        told = "search its memory for the tests" in cell.gaps(apart=True)
        owner = [reads, linux.acts_as_owner(), told]
        print(json.dumps([users, owner, may_be_root, echo.stdout.decode()]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("as_owner", [True, False])
def test_root_gives_itself_up(as_owner):
    """It reads its files only where what it imports could not be read otherwise."""
    command = [sys.executable, "-c", BECOME, str(as_owner)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [1, [as_owner] * 3, False, "5\n"]


def test_seccomp_filters_alone_keep_other_processes_and_the_network(prey, monkeypatch):
    if not linux.has_seccomp():
        pytest.skip("needs x86-64 or ARM64")
    monkeypatch.setattr(workers, "worker_process", filter_worker)
    pid, port = prey.process.pid, prey.port
    refused = [
        f"import os; os.kill({pid}, 9)",
        f"import signal; signal.pidfd_send_signal(__import__('os').pidfd_open({pid}), 9)",
        f"import resource as r; r.prlimit({pid}, r.RLIMIT_CPU, (0, 0))",
        f"import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        f"import os; os.sched_setaffinity({pid}, [0])",
        f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        f"import socket; socket.socket(socket.AF_UNIX).connect({str(prey.socket)!r})",
    ]
    allowed = [
        "import subprocess; value = float(subprocess.check_output(['echo', '5']))",
        "import resource; value = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 9",
        "import socket; a, b = socket.socketpair(); value = a.send(b'x')",
    ]
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, refused + allowed)
    assert scores.failed.tolist() == [True] * len(refused) + [False] * len(allowed)
    assert all("Operation not permitted" in x for x in scores.reasons[: len(refused)])
    np.testing.assert_array_equal(scores.rewards[len(refused) :], [5, 1, 1])
    prey.assert_unharmed()


def test_one_warning_where_the_system_offers_nothing(monkeypatch, caplog):
    monkeypatch.setattr(workers, "worker_process", bare_worker)
    limits = {"timeout": 30.0, "memory_mib": 256, "workers": 2}
    with RewardPool("user_scorers:odd", **limits) as pool:
        assert score(pool, ["aa"] * 20).rewards.sum() == 40
    with RewardPool("math", **limits) as pool:  # it executes no text
        assert score(pool, ["1"], ["1"]).rewards == 1
    (record,) = caplog.records
    text = record.getMessage()
    assert "change files, open sockets, signal other processes" in text
    assert text.endswith("run by user_scorers:odd")
    assert "\n" not in text


def test_the_environment_of_answers_holds_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://user:secret@host")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    where = "os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR'] != " + repr(os.getcwd())
    texts = [
        "import os; value = 'secret' in str(os.environ)",
        "import os; value = any(b'secret' in open(f'/proc/{pid}/environ', 'rb').read()"
        " for pid in os.listdir('/proc') if pid.isdecimal() and os.access(f'/proc/{pid}/mem', 4))",
        "import os; value = os.environ['LC_ALL'] == 'C.UTF-8'",
        f"import os; value = {where} and not os.listdir()",
    ]
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, texts)
    assert scores.reasons[0] == ""
    np.testing.assert_array_equal(scores.rewards, [0, 0, 1, 1])
