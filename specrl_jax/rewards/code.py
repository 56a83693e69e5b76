"""The reward `code`: Python tests of the code in a response.

Takes a response and the tests of its problem; gives 1 where all tests pass, else 0. The response's
code runs in a process of its own (`code_process`), the tests in the scorer's. Plain data alone pass
between the two, so code can neither leave the tests early, nor change what checks it, nor give an
object that equals everything. It cannot read the tests either: they are in no memory that it can
reach. The rights and limits of both processes are those of the reward worker. No JAX.
"""

import ast
import builtins
import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

from specrl_jax.rewards import code_process, containment, linux

MAX_MESSAGE = 2**24  # bytes of one message between the two processes
_PLACE = re.compile(r"^\{response\}[ \t\r]*(?:\n|\Z)", re.MULTILINE)  # of the response's code
_FENCE = re.compile(
    r"^((?:[^\n]*[ \t])?)```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d+[.)])?[ \t]*")  # before the fence of an item of a list
# Modules that tests may use without an import, by mistake: the response could define them.
_MODULES = sys.stdlib_module_names | {"np", "numpy", "pd", "pandas", "pytest"}


def score_code(response: str, answer: str, task: str, metadata: dict) -> float:
    """1 if the code in the response passes the Python tests in `answer`.

    The code is what the last ``` fence with code holds, else the whole response. The tests are run
    from top to bottom, then their functions test*() are called. Where the answer has a line
    `{response}`, what stands before it is run ahead of the response's code, whose last function or
    class the response may replace; the tests follow the line.
    """
    sys.set_int_max_str_digits(0)
    *before, tests = _PLACE.split(answer, maxsplit=1)
    head = "".join(before)
    whole = _completed(head)
    last = _last_definition(whole)
    parsed = ast.parse(tests, "the tests")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(whole, "the code before", "exec"), names)
    own = {*vars(builtins), *names} - {last}
    functions = _functions_to_call(parsed, own)
    program = compile(parsed, "the tests", "exec")
    code = code_of(response)
    is_rest = code.lstrip("\r\n")[:1] in (" ", "\t")  # of the last function of the head
    with _Solution((head if is_rest else whole) + code) as solution:
        try:
            names |= {name: x for name, x in solution.names().items() if name not in own}
            exec(program, names)
            for name in functions:
                if names[name]() not in (None, True):  # False, or a generator that has not begun
                    raise UnsuitedTestsError(f"the tests' {name} returns a value: it must assert")
        except UnsuitedTestsError:
            raise
        except ImportError as error:
            if error.name:  # of the tests' own: an error of the response has only its arguments
                raise
            return 0.0
        except BaseException:  # SystemExit too
            return 0.0
        if not solution.calls:
            raise UnsuitedTestsError("the tests in the answer call nothing of the response")
    return 1.0


def code_of(response: str) -> str:
    """The code in a response: in its last ``` fence that defines something, else the whole."""
    codes = []
    for before, code in _FENCE.findall(response):
        blanks = len(before) if _ITEM.fullmatch(before) else 0
        codes.append(re.sub(rf"^[ \t]{{0,{blanks}}}", "", code, flags=re.MULTILINE))
    codes.sort(key=_rank)  # stable: the last of the best
    return codes[-1] if codes else response


class UnsuitedTestsError(BaseException):  # which tests that expect an Exception do not catch
    """The tests cannot tell right from wrong code."""


class _BrokenError(BaseException):
    """The response's process has ended, wants to, or sends nonsense."""


def _rank(code: str) -> int:
    """2 of code with a function, a class or the end of one, 1 of other statements, else 0."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = ast.parse(textwrap.dedent(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    definitions = (*_DEFINITIONS, ast.Lambda, ast.Return, ast.Yield, ast.Raise)
    if any(isinstance(x, definitions) for x in ast.walk(parsed)):
        return 2
    return int(any(not isinstance(x, ast.Expr) for x in parsed.body))


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _completed(head: str) -> str:
    """The code before a response; with an empty body where its last function has none."""
    return f"{head.rstrip()} pass\n" if head.rstrip().endswith(":") else head


def _last_definition(code: str) -> str:
    """The name of the last function or class that code defines; "" without one."""
    definitions = [x for x in ast.parse(code).body if isinstance(x, _DEFINITIONS)]
    return definitions[-1].name if definitions else ""


def _functions_to_call(tests: ast.Module, own: set[str]) -> list[str]:
    """The names of the functions test*(); UnsuitedTestsError where tests would not run."""
    named = [x for x in ast.walk(tests) if isinstance(x, ast.Name)]
    used = {x.id for x in named if isinstance(x.ctx, ast.Load)}
    functions = []
    for x in tests.body:
        name = getattr(x, "name", "")
        if isinstance(x, ast.ClassDef):
            bases = map(ast.unparse, x.bases)
            if any(base.endswith("TestCase") for base in bases) or (
                name.startswith("Test") and name not in used
            ):
                raise UnsuitedTestsError(f"the tests in the answer are in a class, {name}")
        elif isinstance(x, _DEFINITIONS) and name.startswith("test"):
            needs = len(x.args.posonlyargs + x.args.args) > len(x.args.defaults)
            needs = needs or None in x.args.kw_defaults
            if isinstance(x, ast.FunctionDef) and not needs:
                functions.append(name)
            elif name not in used:
                kind = "needs arguments" if needs else "is async"
                raise UnsuitedTestsError(f"the tests in the answer never call {name}, which {kind}")
    made = own | {x.id for x in named if isinstance(x.ctx, ast.Store)}
    made |= {x.arg for x in ast.walk(tests) if isinstance(x, ast.arg)}
    imports = [x for x in ast.walk(tests) if isinstance(x, ast.alias)]
    made |= {(x.asname or x.name).split(".")[0] for x in imports}
    attributes = [x for x in ast.walk(tests) if isinstance(x, ast.Attribute)]
    of = {x.value.id for x in attributes if isinstance(x.value, ast.Name)}
    for name in sorted(of & _MODULES - made):
        raise UnsuitedTestsError(f"the tests in the answer do not import {name}")
    return functions


# The process of the response ----------------------------------------------------------------------


class _Solution(contextlib.AbstractContextManager):
    """The process with a response's code, as the tests see it."""

    def __init__(self, code: str):
        self.calls = 0  # of what the response has defined
        self._objects: dict[int, _Object] = {}
        self._errors: dict[int, type] = {}
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._pid = _start(requests, replies)
        os.close(requests)
        os.close(replies)
        self._received = open(self._replies, "rb")  # noqa: SIM115 - as long as the process
        if self._received.readline() != code_process.STARTED:
            raise ChildProcessError("the process of the response did not start")
        self._send([containment.free_memory(), sys.path, code])

    def __exit__(self, *_) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        self._received.close()

    def names(self) -> dict[str, Any]:
        """Return what the code has defined, by name; raise what it has raised."""
        return self._receive({})[0]

    def call(self, function: str | int, *args, **options) -> Any:
        """Call a name of `CALLS`, or the response's object with this number."""
        self.calls += isinstance(function, int)
        given: code_process.Given = {}
        self._send([function, code_process.pack((args, options), self._other, given)])
        result, now = self._receive(given)
        for (_, old), new in zip(list(given.values()), now):  # what the code has changed in place
            if isinstance(old, list | bytearray):
                old[:] = new
            else:
                old.clear()
                old.update(new)
        return result

    def _send(self, message: list) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except OSError as error:
            raise _BrokenError from error

    def _receive(self, given: code_process.Given) -> list:
        """The values of the next reply. Raises what the code has raised."""
        values = [value for _, value in given.values()]
        try:
            error, *reply = json.loads(self._received.readline(MAX_MESSAGE))
            reply = [code_process.unpack(x, self._find, values) for x in reply]
            if error is None:
                return reply
            args, text = reply
            kind = self._error(*error)
            raised = kind(*args)
            if str(raised) != text:  # the response's class has a __str__ of its own
                raised = kind(text)
        except Exception as broken:  # also RecursionError, of a thousand brackets
            raise _BrokenError from broken
        raise raised

    def _find(self, kind: str, *parts) -> Any:
        """The stand-in for an object of the response, or for a class of its errors."""
        if kind == "object":
            return self._objects.setdefault(*parts, _Object(self, *parts))
        if kind != "error":
            raise ValueError(kind)
        name, number, base = parts
        if number not in self._errors:
            self._errors[number] = type(name, (self._error(*base),), {})
        return self._errors[number]

    def _error(self, kind: str, *parts) -> type[Exception]:
        """The class of an error: a built-in one, by its name alone, or that of `_find`.

        No built-in one is ever a value: the name of an error in the response, which a test expects,
        could else stand for AssertionError.
        """
        error = self._find(kind, *parts) if len(parts) > 1 else getattr(builtins, *parts)
        if not issubclass(error, Exception):
            raise ValueError("the code ends its process")
        return error

    def _other(self, value: Any, given: code_process.Given) -> Any:
        if type(value) is _Object:
            return ["object", object.__getattribute__(value, "_number")]
        flat = code_process.plain(value)
        if flat is not value:
            return code_process.pack(flat, self._other, given)
        raise UnsuitedTestsError(
            f"the tests in the answer give the response a {type(value).__name__}; they can give it "
            "numbers, text, dates, lists, tuples, sets and dicts"
        )


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


class _Object:
    """Stand-in, in the tests, for an object of the response that is no plain data."""

    def __init__(self, solution: _Solution, number: int):
        object.__setattr__(self, "_solution", solution)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **options) -> Any:
        return self._solution.call(self._number, *args, **options)

    def __eq__(self, other: object) -> bool:
        if type(_flat(self)) is _Object and type(_flat(other)) is _Object:
            return self._solution.call("equal", self, other) is True
        return _of_plain("__eq__")(self, other)

    def __contains__(self, item: object) -> bool:
        if self._solution.call("defines", self, "__iter__"):
            return any(x == item for x in self)
        return _of_plain("__contains__")(self, item)

    @property
    def __class__(self) -> type:
        return type(_flat(self))

    def __instancecheck__(self, instance: object) -> bool:
        return self._solution.call("isinstance", instance, self)


def _forwarded(name: str) -> Callable:
    return lambda self, *args: self._solution.call(name, self, *args)


def _flat(value: Any) -> Any:
    """The plain data that an object of the response extends; else the value."""
    return value._solution.call("plain", value) if type(value) is _Object else value


def _of_plain(name: str) -> Callable:
    """The operator of the plain data that an object extends; of another object it is refused."""

    def operate(self, *args) -> Any:
        flat = _flat(self)
        if type(flat) is not _Object and hasattr(flat, name):
            return getattr(flat, name)(*map(_flat, args))
        if self._solution.call("defines", self, name):
            raise UnsuitedTestsError(
                f"the tests in the answer use {name} of an object of the response, which they "
                "cannot rely on"
            )
        if name in _OF_ONE:
            raise TypeError(f"the object has no {name}")
        return NotImplemented

    return operate


_OF_ONE = ("__abs__", "__neg__", "__int__", "__float__", "__index__", "__round__", "__enter__",
           "__exit__", "__contains__")  # fmt: skip
_SIGNS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul"]
_OF_TWO = ["__lt__", "__le__", "__gt__", "__ge__"]
_OF_TWO += [f"__{name}__" for sign in _SIGNS for name in (sign, f"r{sign}")]
for _name in code_process.CALLS:
    if _name.startswith("__"):
        setattr(_Object, _name, _forwarded(_name))
for _name in (*_OF_ONE, *_OF_TWO):
    setattr(_Object, _name, _of_plain(_name))
