"""The reward `code`: tests of the code in a response.

Takes a response and the tests of its problem (`code_forms`); gives 1 where all pass, else 0. The
response's code runs in a process of its own (`code_process`), the tests in the scorer's. Plain data
alone pass between the two, so code can neither leave the tests early, nor change what checks it,
nor give an object that equals everything. It cannot read the tests either: they are in no memory
that it can reach. The rights and limits of both processes are those of the reward worker. No JAX.
"""

import builtins
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from specrl_jax.rewards import code_process, containment, linux
from specrl_jax.rewards.code_forms import Case, PythonTests, code_of, lines_of, read_tests

MAX_MESSAGE = 2**24  # bytes of one message between the two processes
MAY = (
    "tests may call its functions, and methods of a class Solution, with numbers, text, lists, "
    "tuples, sets, dicts, dates, and catch built-in errors"
)
# Names that judges define ahead of a response whose function is called.
_IMPORTS = (
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re\n"
    "import string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\n"
    "from heapq import *\nfrom itertools import *\nfrom math import *\nfrom typing import *\n"
)


def score_code(response: str, answer: str, task: str, metadata: dict) -> float:
    """1 if the code in the response passes the tests in `answer`.

    The code is what the last ``` fence with code holds, else the whole response. Cases are tried
    one after another, up to the first that fails. Python tests are run from top to bottom, then
    their functions test*() are called. Where they have a line `{response}`, what stands before it
    is run ahead of the response's code, whose last function or class the response may replace.
    """
    sys.set_int_max_str_digits(0)
    tests = read_tests(answer, metadata)
    if isinstance(tests, PythonTests):
        return float(_passes_python(code_of(response), tests))
    return float(_passes_cases(response, tests))


def _passes_cases(response: str, cases: list[Case]) -> bool:
    is_program = not any(case.function for case in cases)
    code = code_of(response, is_program)
    with _Solution() as solution:
        try:
            if not is_program:
                solution.ask("load", _IMPORTS, code)
            return all(_passes(solution, code, case) for case in cases)
        except (Exception, UnsuitedTestsError, _BrokenError):
            return False


def _passes(solution: "_Solution", code: str, case: Case) -> bool:
    if not case.function:
        status, output = solution.ask("run", code, case.given)
        return status == 0 and lines_of(output) in map(lines_of, case.expected)
    try:
        function = solution.get(f"Solution().{case.function}")
    except AttributeError:
        function = solution.get(case.function)
    return json.loads(json.dumps(function(*case.given))) in case.expected  # tuples are lists


def _passes_python(code: str, tests: PythonTests) -> bool:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tests.head, "the code before", "exec"), names)
    own = {*vars(builtins), *names} - {tests.last}
    program = compile(tests.program, "the tests", "exec")
    is_rest = code.lstrip("\r\n")[:1] in (" ", "\t")  # of the last function of the head
    with _Solution() as solution:
        try:
            solution.ask("load", (tests.unfinished if is_rest else tests.head) + code)
            for name in sorted(tests.used - own):
                names |= solution.named(name, may_be_object=name in tests.stored)
            exec(program, names)
            for name in tests.functions:
                if names[name]() not in (None, True):  # False, or a generator that has not begun
                    raise UnsuitedTestsError(f"the tests' {name} returns a value: it must assert")
            if solution.fault:
                raise solution.fault
            if not solution.calls:
                raise UnsuitedTestsError("the tests in the answer call nothing of the response")
        except UnsuitedTestsError:
            raise
        except ImportError as error:
            if error.name:  # of the tests' own: an error of the response has only its arguments
                raise
            return False
        except BaseException:  # SystemExit too
            return False
    return True


class UnsuitedTestsError(BaseException):  # which tests that expect an Exception do not catch
    """The tests cannot tell right from wrong code."""


class _BrokenError(BaseException):
    """The response's process has ended, wants to, or sends nonsense."""


# The process of the response ----------------------------------------------------------------------


class _Solution(contextlib.AbstractContextManager):
    """The process with a response's code, as the tests see it."""

    def __init__(self):
        self.calls = 0  # of what the response has defined
        self.fault: BaseException | None = None  # the last one, should the tests have caught it
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._pid = _start(requests, replies)
        os.close(requests)
        os.close(replies)
        self._received = open(self._replies, "rb")  # noqa: SIM115 - as long as the process
        if self._received.readline() != code_process.STARTED:
            raise ChildProcessError("the process of the response did not start")
        self._send(containment.free_memory(), sys.path)

    def __exit__(self, *_) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        self._received.close()

    def named(self, name: str, may_be_object: bool) -> dict[str, Any]:
        """Return what a name stands for, by the name; {} where the response does not define it.

        may_be_object: {} of an object, too, which else raises UnsuitedTestsError.
        """
        try:
            return {name: self.get(name)}
        except AttributeError:
            return {}
        except UnsuitedTestsError:
            if not may_be_object:
                raise
            self.fault = None
            return {}

    def get(self, path: str) -> Any:
        """Return what a path names in the response's module. Raises AttributeError without it."""
        packed = self.ask("get", path)
        with self._distrust():
            return code_process.unpack(*packed, []) if packed else Function(self, path)

    def call(self, path: str, args: tuple, options: dict) -> Any:
        """Call a function of the response, and change the arguments that it has changed."""
        self.calls += 1
        given: code_process.Given = {}
        try:
            packed = code_process.pack((args, options), given)
        except code_process.NotPlainError as error:
            raise self._noted(_unsuited(f"give the response a {error}")) from error
        old_values = [value for _, value in given.values()]
        reply = self.ask("call", path, packed)
        with self._distrust():
            values = [*old_values]
            result, now = [code_process.unpack(x, values) for x in reply]
            for old, new in zip(old_values, now):
                if isinstance(old, list | bytearray):
                    old[:] = new
                else:
                    old.clear()
                    old.update(new)
        return result

    def ask(self, *request) -> list:
        """Return the parts of the reply to a request; raise what the code has raised."""
        self._send(*request)
        with self._distrust():
            kind, *parts = json.loads(self._received.readline(MAX_MESSAGE))
            if kind == "value":
                return parts
            if kind == "raised":
                error = _error(*parts)
            else:
                error = self._noted(_unsuited(f"hold an object of the response, a {parts[0]}"))
        raise error

    def _send(self, *message) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._distrust():
            while line:
                line = line[os.write(self._requests, line) :]

    @contextlib.contextmanager
    def _distrust(self) -> Iterator[None]:
        """Turn an exception into _BrokenError: of a pipe, or of a reply, which may be anything."""
        try:
            yield
        except Exception as error:  # also RecursionError, of a thousand brackets
            raise self._noted(_BrokenError()) from error

    def _noted(self, fault: BaseException) -> BaseException:
        self.fault = fault
        return fault


class Function:
    """A function or a class of the response, as the tests see it."""

    def __init__(self, solution: _Solution, path: str):
        self._solution = solution
        self._path = path

    def __call__(self, *args, **options) -> Any:
        if self._path == "Solution" and not args and not options:
            return Function(self._solution, "Solution()")
        return self._solution.call(self._path, args, options)

    def __getattr__(self, name: str) -> Any:
        return self._solution.get(f"{self._path}.{name}")


def _error(kind: str, packed: Any, text: str) -> Exception:
    """Return the error of a built-in class; of one that the response extends, too."""
    made = getattr(builtins, kind)
    if not issubclass(made, Exception):
        raise ValueError("the code ends its process")
    error = made(*code_process.unpack(packed, []))
    return error if str(error) == text else made(text)


def _unsuited(what: str) -> UnsuitedTestsError:
    return UnsuitedTestsError(f"the tests in the answer {what}; {MAY}")


def _start(requests: int, replies: int) -> int:
    """Start the process of the response, with these ends of pipes; its number."""
    if not linux.acts_as_owner():
        command = [sys.executable, "-P", "-S", code_process.__file__]
        ends = [(os.POSIX_SPAWN_DUP2, requests, 0), (os.POSIX_SPAWN_DUP2, replies, 1)]
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=ends)
    pid = os.fork()  # a new program could not read Python's own files
    if pid == 0:
        try:
            os.dup2(requests, 0)
            os.dup2(replies, 1)
            code_process.serve()
        finally:
            os._exit(1)
    return pid
