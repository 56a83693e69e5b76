"""The pool: no answer can cost more than its own reward."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from small_runs import line_of, one_line
from worker_pools import alive, descendants, read, score, wait_for

from specrl_jax.rewards.pool import RewardPool
from specrl_jax.sandbox import workers as pool_module
from specrl_jax.sandbox.worker_process import Settings

LIMITS = {"timeout": 30.0, "memory_mib": 256, "workers": 2}


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Folder with the workers' scratch directories."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_a_function_that_is_no_scorer_is_called_by_its_name():
    """The worker knows nothing about rewards, and returns the values that the function checks."""
    settings = Settings("repeats:prepare", ("ab",), 30.0, 256, contained=True)
    with pool_module.CallPool(settings, 2, executes="", field="") as pool:
        results = pool.call([(0,), (2,), (-1,), ("x",), (3,)])
    assert [x.value for x in results] == [["", []], ["abab", []], None, None, ["ababab", []]]
    no_report = "the scorer's process sent no valid report"
    assert [x.failure for x in results] == ["", "", no_report, "ValueError: no count", ""]


HOSTILE = {
    "hang": "no result within 8 s",
    "hang in C": "no result within 8 s",
    "allocate": "out of memory",
    "allocate slowly": "out of memory",
    "raise": "KeyError: 'no such thing'",
    "exit": "the scorer's process died (exit code 3)",
    "sys.exit": "SystemExit:",
    "text": "ValueError: could not convert",
    "nan": "ValueError: the score must be within ±1e+15, got nan",
    "inf": "ValueError: the score must be within ±1e+15, got inf",
}


def test_a_hostile_answer_costs_only_its_own_reward():
    responses = []
    for i, text in enumerate(HOSTILE):
        responses += ["x" * (i + 1), text, "y" * (20 + i)]
    with RewardPool("user_scorers:odd", **LIMITS | {"timeout": 8.0}) as pool:
        scores = score(pool, responses)
        again = score(pool, ["fork", "bb", "ccc"])
    want = [0.0 if text in HOSTILE else len(text) for text in responses]
    np.testing.assert_array_equal(scores.rewards, np.array(want, np.float32))
    assert scores.rewards.dtype == np.float32
    np.testing.assert_array_equal(scores.failed, [text in HOSTILE for text in responses])
    for text, reason in zip(responses, scores.reasons):
        assert reason.startswith(HOSTILE.get(text, "")), (text, reason)
        assert bool(reason) == (text in HOSTILE)
    np.testing.assert_array_equal(again.rewards, [4, 2, 3])
    assert not again.failed.any()


def test_what_an_answer_says_is_one_printable_line(capfd):
    """An answer may raise, forge a report or print: no line of the console is its own."""
    fake = "a\nerror: step 7: diverged \x1b[2J\u2028\u202eb"
    forged = json.dumps([None, fake])
    write = (
        f"import os\nfor fd in range(3, 30):\n try: os.write(fd, {forged!r}.encode() + b'\\n')\n"
    )
    texts = [f"raise ValueError({fake!r})", write + " except OSError: pass\nos._exit(0)"]
    with RewardPool("user_scorers:execute", **LIMITS | {"workers": 1}) as pool:
        scores = score(pool, [f"print({fake!r})", *texts])
    line = "a error: step 7: diverged [2J b"
    assert scores.reasons == ("", f"ValueError: {line}", line)
    assert f"printed by a reward: {line}\n" in capfd.readouterr().err.splitlines(keepends=True)


def test_what_answers_print_does_not_flood_the_log(capfd):
    with RewardPool("user_scorers:execute", **LIMITS | {"workers": 1}) as pool:
        score(pool, [f"print({i})" for i in range(20)] + [""])
    lines = capfd.readouterr().err.splitlines()
    more = "further output is left out from here on; call it by hand to read all"
    expected = [f"printed by a reward: {text}" for text in (0, 1, 2, 3, 4, more)]
    assert [line for line in lines if line.startswith("printed by")] == expected


def test_a_reward_has_utf8_in_every_locale(monkeypatch, capfd):
    for name, value in {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    text = "import locale\nprint('😀', locale.getpreferredencoding(False))"
    with RewardPool("user_scorers:execute", **LIMITS | {"workers": 1}) as pool:
        assert score(pool, [text, ""]).reasons == ("", "")  # it prints before the next answer
    assert "printed by a reward: 😀 utf-8\n" in capfd.readouterr().err.lower()


def test_what_a_contained_reward_lacks_is_told_where_it_fails():
    texts = [
        "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
        "try: open('data.json')\nexcept OSError: raise KeyError('data')",
        "raise KeyError('data')",
    ]
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, texts)
    hints = ["see contained = False in docs/extending.md" in x for x in scores.reasons]
    assert hints == [True, True, False]


def test_the_timeout_is_per_answer_and_not_per_batch():
    with RewardPool("user_scorers:slow", timeout=5, memory_mib=256, workers=1) as pool:
        scores = score(pool, ["a"] * 105)  # 105 · 0.05 s: more than the limit of one
    assert not scores.failed.any()


def test_order_and_fields_are_kept():
    n = 200
    responses = [str(i % 3) for i in range(n)]
    tasks = ["t" * (i % 5) for i in range(n)]
    with RewardPool("user_scorers:sees", **LIMITS) as pool:
        scores = score(pool, responses, ["1"] * n, tasks, [{"x": 10 * i} for i in range(n)])
    want = [10 * i + i % 5 + (i % 3 == 1) for i in range(n)]
    np.testing.assert_array_equal(scores.rewards, np.array(want, np.float32))


def test_workers_do_not_import_jax_and_the_pool_works_from_a_thread():
    with RewardPool("user_scorers:has_jax", **LIMITS) as pool:
        # The thread that starts the workers ends before they are used.
        thread = threading.Thread(target=pool.warm_up)
        thread.start()
        thread.join()
        got = score(pool, ["a", "b"])
    np.testing.assert_array_equal(got.rewards, [0, 0])
    assert not got.failed.any()


def test_close_ends_the_workers(scratch):
    before = descendants(os.getpid())
    pool = RewardPool("user_scorers:slow", **LIMITS)
    score(pool, ["a"] * 8)
    workers = set()

    def seen() -> bool:
        """A guard and its template, and another guard: a list of children may miss some."""
        workers.update(descendants(os.getpid()) - before)
        return len(workers) >= 3

    wait_for(seen)
    assert list(scratch.iterdir())
    pool.close()
    pool.close()
    assert not any(map(alive, workers))
    assert not list(scratch.iterdir())
    with pytest.raises(RuntimeError, match="closed"):
        score(pool, ["a"])


def test_workers_vanish_with_a_killed_parent_and_main_is_not_imported(tmp_path, scratch):
    """Even while an answer is inside a C call that holds the interpreter lock."""
    main = """
        import sys
        print("main", flush=True)  # twice, if a worker imported it
        from specrl_jax.rewards.pool import RewardPool
        limits = {"timeout": 600, "memory_mib": 4096, "workers": 2}
        with RewardPool("user_scorers:hang", **limits) as pool:
            pool.score(["a", "b"], [""] * 2, [""] * 2, [{}] * 2)
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(main))
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "main.py"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with parent:
        wait_for(lambda: len(descendants(parent.pid)) == 6, seconds=300)
        pids = descendants(parent.pid)
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == "main\n"
    wait_for(lambda: not any(map(alive, pids)))
    wait_for(lambda: not list(scratch.iterdir()))


@pytest.fixture
def heard():
    """Ctrl-C is heard even where these tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_the_pool_usable(heard):
    with RewardPool("user_scorers:odd", timeout=30, memory_mib=256, workers=1) as pool:
        score(pool, ["a"])
        # To the process, as a terminal does: a signal to the timer's thread would not end a wait.
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012, the signal must not come before it
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
            score(pool, ["aaa", "hang", "b"])
        assert time.monotonic() - start < 20  # the hang has 30
        np.testing.assert_array_equal(score(pool, ["cc"]).rewards, [2])


def test_an_answer_leaves_nothing_to_the_next():
    with RewardPool("user_scorers:leak", timeout=10, memory_mib=64, workers=1) as pool:
        scores = score(pool, ["a"] * 5)
    np.testing.assert_array_equal(scores.rewards, [1] * 5)
    assert not scores.failed.any()


def test_exact_extract_and_threshold():
    with RewardPool("exact", **LIMITS) as pool:
        np.testing.assert_array_equal(score(pool, ["7", " 7 ", "8"], ["7"] * 3).rewards, [1, 1, 0])
        nothing = score(pool, [])
    assert nothing.rewards.shape == nothing.failed.shape == (0,)
    assert (nothing.rewards.dtype, nothing.failed.dtype) == (np.float32, np.bool_)
    responses = ["= 1 = 7", "= 7 = 1", "seven", "= 7" + " " * 100_000, "(a" * 50 + "b"]
    with RewardPool(
        "exact", extract=r"=\s*(\d+)|(?:(?:a|\(a)+)+$", **LIMITS | {"timeout": 5.0}
    ) as pool:
        got = score(pool, responses, ["7"] * 5)
    # The last match counts; no match is a wrong answer, not a failure; nor is the end of a long
    # response that no longer holds it. The last one sends the pattern into backtracking.
    np.testing.assert_array_equal(got.rewards, [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(got.failed, [False, False, False, False, True])
    with RewardPool("user_scorers:odd", threshold=3, **LIMITS) as pool:
        got = score(pool, ["aa", "aaa", "aaaa", "raise"])
    np.testing.assert_array_equal(got.rewards, [0, 1, 1, 0])
    np.testing.assert_array_equal(got.failed, [False, False, False, True])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "exactly"},
            "one of exact, math, code, reasoning_gym, format or module:function.*'exactly'",
        ),
        ({"name": "no_such_module:f"}, "module:function.*'no_such_module:f': ModuleNotFoundError"),
        ({"name": "user_scorers:none"}, "module:function.*'user_scorers:none': AttributeError"),
        ({"name": "leaving_module:f"}, "module:function.*'leaving_module:f': SystemExit: 3"),
        *(
            (
                {"name": f"user_scorers:{name}"},
                rf"\(response, answer, task, metadata\).*{name}': it takes \({takes}.*; call it "
                r"from def score\(response, answer, \*\*_\), as f.*\[0\] if it takes lists$",
            )
            for name, takes in (
                ("of_another_project", "data_source"),
                ("positions", "a, b, c, d"),
            )
        ),
        ({"name": "user_scorers:os"}, "TypeError"),
        ({"extract": "("}, "reward.extract must be a regular expression"),
        ({"extract": "[0-9]+"}, "reward.extract must have a group"),
    ],
)
def test_mistakes_are_found_at_construction_in_one_line(arguments, message):
    assert re.search(message, line_of(RewardPool, **{"name": "exact", **LIMITS, **arguments}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("assert name in os.environ", r"could not start: ValueError.*AssertionError"),
        (
            "name in os.environ or os._exit(7)",
            r"could not start, 3 times: the process died \(exit code 7\)",
        ),
    ],
)
def test_a_scorer_that_cannot_start_in_a_worker_is_an_error(tmp_path, monkeypatch, line, message):
    (tmp_path / "fickle.py").write_text(
        f"import os\nname = 'PYTEST_CURRENT_TEST'\n{line}\n"
        "def f(response, answer, task, metadata): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fickle", raising=False)
    with (
        RewardPool("fickle:f", **LIMITS) as pool,
        pytest.raises(ChildProcessError, match=message) as error,
    ):
        score(pool, ["a"])
    one_line(error)


def test_a_machine_without_room_for_a_process_is_waited_for(monkeypatch, caplog):
    start, tries = subprocess.Popen, []

    def short(*args, **kwargs):
        tries.append(args)
        if len(tries) <= 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", short)
    with RewardPool("user_scorers:odd", **LIMITS | {"workers": 1}) as pool:
        pool.warm_up()
        np.testing.assert_array_equal(score(pool, ["a", "bb"]).rewards, [1, 2])
        (record,) = caplog.records
        assert record.getMessage() == (
            "no reward worker can start now (Cannot allocate memory): waiting up to 300 s for the "
            "machine"
        )
        pool._workers[0].kill()
        tries.clear()
        monkeypatch.setattr(pool_module, "ROOM_S", 0.5)
        with pytest.raises(ChildProcessError, match=r"^no reward worker could start for 0\.5 s "):
            score(pool, ["a"])


def test_a_worker_that_ends_is_replaced_and_its_chunk_put_back():
    """Whatever moment its template is killed in; reports that are missing or another's too."""
    responses = ["a" * (i % 7) for i in range(120)]
    with RewardPool("user_scorers:odd", **LIMITS) as pool:
        score(pool, ["a"])
        stop = threading.Event()
        # All of them may fall into starts, and a worker gives up after MAX_STARTS of these.
        times = pool_module.MAX_STARTS - 1
        killer = threading.Thread(target=kill_templates, args=(pool, stop, times))
        killer.start()
        scores = score(pool, responses)
        stop.set()
        killer.join()
        score(pool, responses)  # workers that were killed last start anew
        worker = pool._workers[0]
        worker.conn.send((0, [("surplus", "", "", {})]))  # its report comes before the expected
        worker.conn.poll(10)
        again = score(pool, responses[:40])
    np.testing.assert_array_equal(scores.rewards, [i % 7 for i in range(120)])
    np.testing.assert_array_equal(again.rewards, [i % 7 for i in range(40)])
    assert not scores.failed.any()
    assert not again.failed.any()


def kill_templates(pool, stop, times):
    for _ in range(times):
        if stop.wait(0.2):
            return
        for process in [worker._process for worker in pool._workers]:
            guard = process and process.pid
            for pid in (read(f"/proc/{guard}/task/{guard}/children") or "").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def test_a_scorer_may_ask_for_what_workers_give_up(monkeypatch):
    """All but the malloc of the process that trains."""
    monkeypatch.setenv("SPECRL_TEST_TOKEN", "secret")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    with RewardPool("user_scorers:trusting", **LIMITS) as pool:
        scores = score(pool, ["SPECRL_TEST_TOKEN", "GLIBC_TUNABLES"])
    assert scores.reasons == ("", "")
    np.testing.assert_array_equal(scores.rewards, [1, 0])


def test_math_through_the_pool():
    # The last one passes the cheap filter: the limits have to stop it.
    responses = ["so it is 1/2", r"\boxed{(9^9)^{9^9}}"]
    with RewardPool("math", timeout=6, memory_mib=256, workers=2) as pool:
        got = score(pool, responses, ["0.5", "7"])
        bad = score(pool, ["3"], [""])
    np.testing.assert_array_equal(got.rewards, [1, 0])
    assert not got.failed[0]
    assert bad.reasons[0].startswith("ValueError: reward.name = math cannot read the reference")


def test_reasoning_gym_survives_what_its_scorers_evaluate():
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[tasks]'")
    items = {task: reasoning_gym.create_dataset(task, size=1, seed=1)[0]
             for task in ("chain_sum", "puzzle24", "countdown", "spiral_matrix")}  # fmt: skip
    rows = []  # task, response, item
    for task, item in list(items.items())[:3]:
        rows += [(task, item["answer"], item), (task, f"it is {item['answer']}", item)]
        rows.append((task, "9**9**9", item))
    rows.append(("no_such_task", "1", items["countdown"]))
    calls = ("fork()", "fork() and _os.fork()", "_exit(0)", "kill(_os.getppid(), 9)", "setsid()")
    attacks = [f"__import__('os').{call}".replace("_os", "__import__('os')") for call in calls]
    mixed = [(task, text, items[task]) for task in ("countdown", "spiral_matrix")
             for attack in attacks for text in (attack, items[task]["answer"])]  # fmt: skip

    def scored(pool, rows):
        tasks, responses, chosen = zip(*rows)
        # As `load_examples` gives them: the metadata of a problem is its whole item.
        return score(pool, responses, [item["answer"] for item in chosen], tasks, chosen)

    with RewardPool("reasoning_gym", **LIMITS | {"timeout": 8.0}) as pool:
        got = scored(pool, rows)
        among_attacks = scored(pool, mixed)
    np.testing.assert_array_equal(among_attacks.rewards[1::2], 1)
    assert among_attacks.rewards[::2].max() < 1
    right, partial, hostile = got.rewards[:-1].reshape(3, 3).T
    np.testing.assert_array_equal(right, 1)
    assert 0 < partial[0] < 1  # credit for a sum within a sentence
    np.testing.assert_array_equal(hostile, 0)
    assert got.failed.tolist() == [False] * 3 + [False, False, True] * 2 + [True]
