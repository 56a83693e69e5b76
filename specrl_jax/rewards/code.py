"""Reward `code`: tests of the code in a response.

Takes a response and its problem's tests (`code_forms`); returns 1 if all pass, else 0. The
response's code runs in its own process (`code_process`), the tests in the scorer's. Only plain data
passes between the two, so code can neither leave the tests early, nor change what checks it, nor
return an object that equals everything. It cannot read the tests either: they are in no memory that
it can reach. Both processes have the rights and limits of the reward worker. No JAX.
"""

import builtins
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from specrl_jax.rewards.code_forms import Case, PythonTests, code_of, lines_of, read_tests
from specrl_jax.sandbox import code_process, containment, linux

MAX_MESSAGE = 2**24  # bytes of one message between the two processes
_TESTS = "the tests in the answer"
_MAY = (
    "tests may call its functions, and methods of a class Solution, with numbers, text, lists, "
    "tuples, sets, dicts, dates, and catch built-in errors"
)
# What judges predefine for code whose function is called, and such code expects.
_IMPORTS = (
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re\n"
    "import string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\n"
    "from heapq import *\nfrom itertools import *\nfrom math import *\nfrom typing import *\n"
)


def score_code(response: str, answer: str, task: str, metadata: dict) -> float:
    """Return 1 if the code in the response passes the tests in `answer`, else 0.

    The code is the content of the last ``` fence with code, else the whole response. Cases are
    tried one by one, up to the first that fails. Python tests run from top to bottom, then their
    functions test*() are called. If they have a line `{response}`, what precedes it runs before the
    response's code, which may replace its last function or class.
    """
    sys.set_int_max_str_digits(0)
    tests = read_tests(answer, metadata)
    if isinstance(tests, PythonTests):
        return float(_passes_python(code_of(response), tests))
    return float(_passes_cases(response, tests))


def _passes_cases(response: str, cases: list[Case]) -> bool:
    is_program = not any(case.function for case in cases)
    code = code_of(response, is_program)
    with CodeProcess() as solution:
        try:
            if not is_program:
                solution.ask("load", code, _IMPORTS)
            return all(_passes(solution, code, case) for case in cases)
        except (UnsuitedTestsError, _BrokenError):
            return False
        except Exception:
            if is_program:  # of the system: an error in a program is its exit status
                raise
            return False


def _passes(solution: "CodeProcess", code: str, case: Case) -> bool:
    if not case.function:
        status, output = solution.ask("run", code, case.given)
        return status == 0 and lines_of(output) in map(lines_of, case.expected)
    try:
        function = getattr(solution.call("Solution", (), {}), case.function)
    except AttributeError:
        function = solution.get(case.function)
    return json.loads(json.dumps(function(*case.given))) in case.expected  # tuples are lists


def _passes_python(code: str, tests: PythonTests) -> bool:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(tests.head, "the code before", "exec"), names)
    names |= {name: importlib.import_module(x) for name, x in tests.modules.items()}
    own = {*vars(builtins), *names} - {tests.last}
    program = compile(tests.program, "the tests", "exec")
    is_rest = code.lstrip("\r\n")[:1] in (" ", "\t")  # of the last function of the head
    with CodeProcess() as solution:
        try:
            solution.ask("load", (tests.unfinished if is_rest else tests.head) + code, "")
            for name in sorted(tests.used - own):
                ignored: list[type] = [AttributeError]
                if name in tests.stored:  # replaces an object of the response
                    ignored.append(UnsuitedTestsError)
                with contextlib.suppress(*ignored):
                    names[name] = solution.get(name)
            solution.fault = None
            exec(program, names)
            for name in tests.functions:
                if names[name]() not in (None, True):  # False, or a generator that has not started
                    raise UnsuitedTestsError(f"the tests' {name} returns a value: it must assert")
            if solution.fault:
                raise solution.fault
            if not solution.calls:
                raise UnsuitedTestsError(f"{_TESTS} call nothing from the response")
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
    """Tests that cannot tell right from wrong code."""


class _BrokenError(BaseException):
    """Error: the response's process has ended, wants to end, or sends nonsense."""


class CodeProcess(contextlib.AbstractContextManager):
    """Process with a response's code, as seen by tests and tools."""

    def __init__(self):
        self.calls = 0  # of what the response has defined
        self.fault: BaseException | None = None  # tests may have caught it
        requests, self._requests = os.pipe()
        replies_fd, replies = os.pipe()
        self._pid = _start(requests, replies)
        os.close(requests)
        os.close(replies)
        self._replies = open(replies_fd, "rb")  # noqa: SIM115 - for the process's lifetime
        self.ask("begin", containment.free_memory(), sys.path)

    def __exit__(self, *_) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        self._replies.close()

    def get(self, path: str) -> Any:
        """Return what a path names in the response's module. Raises AttributeError if missing."""
        values = self.ask("get", path)
        return values[0] if values else Function(self, path)

    def call(self, path: str, args: tuple, options: dict) -> Any:
        """Call a function of the response, and apply its changes to the arguments."""
        self.calls += 1
        given: code_process.Given = {}
        try:
            packed = code_process.pack((args, options), given)
        except code_process.NotPlainError as error:
            self.fault = UnsuitedTestsError(f"{_TESTS} give the response a {error}; {_MAY}")
            raise self.fault from error
        old_values = [value for _, value in given.values()]
        result, *new_values = self.ask("call", path, packed, given=old_values)
        if not new_values:
            return Function(self, result)
        for old, new in zip(old_values, *new_values):
            if isinstance(old, list | bytearray):
                old[:] = new
            else:
                old.clear()
                old.update(new)
        return result

    def ask(self, *request, given: Sequence = ()) -> list:
        """Return the values of the reply to a request; raise what the code has raised.

        given: lists, dicts and sets that the request contains.
        """
        try:
            line = json.dumps(request).encode() + b"\n"
            while line:
                line = line[os.write(self._requests, line) :]
            kind, *parts = json.loads(self._replies.readline(MAX_MESSAGE))
            values = [*given]
            parts = [code_process.unpack(part, values) for part in parts]
            if kind == "value":
                return parts
            error = {"raised": _error, "object": _unsuited}[kind](*parts)
        except Exception:  # also RecursionError, of a thousand brackets
            error = _BrokenError("the process of the response has ended")
        if not isinstance(error, Exception):
            self.fault = error
        raise error


class Function:
    """A function or a class of the response as the tests see it, or its object Solution()."""

    def __init__(self, solution: CodeProcess, path: str):
        self._solution = solution
        self._path = path

    def __call__(self, *args, **options) -> Any:
        return self._solution.call(self._path, args, options)

    def __getattr__(self, name: str) -> Any:
        return self._solution.get(f"{self._path}.{name}")


def _error(kind: str, args: tuple, text: str) -> Exception:
    """Return the error of a built-in class, even one that the response extends."""
    made = getattr(builtins, kind)
    if not issubclass(made, Exception):
        raise ValueError("the code ends its process")
    if issubclass(made, StopIteration):  # which would end a loop of the tests
        made = RuntimeError
    error = made(*args)
    return error if str(error) == text else made(text)


def _unsuited(kind: str) -> UnsuitedTestsError:
    return UnsuitedTestsError(f"{_TESTS} store an object of the response, a {kind}; {_MAY}")


def _start(requests: int, replies: int) -> int:
    """Start the process of the response with these ends of pipes; return its pid."""
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
