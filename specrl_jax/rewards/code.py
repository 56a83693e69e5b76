"""The reward `code`: Python tests of the code in a response.

Takes a response and the tests of its problem; gives 1 where all tests pass, else 0. The response's
code runs in a process of its own, the tests in the scorer's. Plain data alone pass between the two,
so code can neither leave the tests early, nor change what checks it, nor give an object that equals
everything. The rights and limits of both are those of the reward worker. No JAX.
"""

import ast
import builtins
import contextlib
import inspect
import json
import operator
import os
import re
import signal
from collections.abc import Callable
from typing import Any, NoReturn

MAX_MESSAGE = 2**24  # bytes of one message between the two processes
_PLACE = re.compile(r"^\{response\}[ \t\r]*\n", re.MULTILINE)  # where the response's code goes
_FENCE = re.compile(r"(?<!\S)```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def score_code(response: str, answer: str, task: str, metadata: dict) -> float:
    """1 if the code in the response passes the Python tests in `answer`.

    The code is what the last ``` fence holds, else the whole response. The tests are run from top
    to bottom, then their functions test*() are called. Where the answer has a line `{response}`,
    what stands before it is run ahead of the response's code, whose last function the response may
    replace; the tests follow the line.
    """
    *before, tests = _PLACE.split(answer, maxsplit=1)
    head = "".join(before)
    last = _last_function(head)
    program = compile(tests, "the tests", "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(head, "the code before", "exec"), names)
    own = {*vars(builtins), *names} - {last}
    with _Solution(head + code_of(response)) as solution:
        try:
            names |= {name: x for name, x in solution.names().items() if name not in own}
            exec(program, names)
            for name, value in list(names.items()):
                if name.startswith("test") and inspect.isfunction(value) and not _needs(value):
                    value()
        except UnsuitedTestsError:
            raise
        except BaseException:  # SystemExit too
            return 0.0
        if not solution.calls:
            raise UnsuitedTestsError("the tests in the answer call nothing of the response")
    return 1.0


def code_of(response: str) -> str:
    """The code in a response: in its last ``` fence, else the whole."""
    return (_FENCE.findall(response) or [response])[-1]


class UnsuitedTestsError(BaseException):  # which tests that expect an Exception do not catch
    """The tests cannot tell right from wrong code."""


class _BrokenError(BaseException):
    """The response's process has ended, wants to, or sends nonsense."""


def _last_function(code: str) -> str:
    """The name of the last function that code defines; "" without one."""
    functions = [x for x in ast.parse(code).body if isinstance(x, ast.FunctionDef)]
    return functions[-1].name if functions else ""


def _needs(function: Callable) -> bool:
    """Return whether a function cannot be called without arguments."""
    parameters = inspect.signature(function).parameters.values()
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(x.default is x.empty and x.kind not in rest for x in parameters)


# Between the two processes ------------------------------------------------------------------------

# What the tests may do with an object of the response that is no plain data. Neither arithmetic nor
# order nor membership: its answer could be whatever a test hopes for.
_CALLS: dict[str, Callable] = {
    "__getattr__": getattr, "__setattr__": setattr, "__bool__": bool, "__len__": len,
    "__iter__": iter, "__next__": next, "__getitem__": operator.getitem,
    "__setitem__": operator.setitem, "__str__": str, "__repr__": repr, "equal": operator.eq,
    "isinstance": isinstance,
}  # fmt: skip
_LISTS: tuple[type, ...] = (list, tuple, set, frozenset, bytes, bytearray)


def _pack(value: Any, number: Callable[[Any], int]) -> Any:
    """Plain data as JSON; number: of another object."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        return ["dict", *([_pack(k, number), _pack(x, number)] for k, x in value.items())]
    for kind in _LISTS:
        if isinstance(value, kind):
            return [kind.__name__, *(_pack(x, number) for x in value)]
    if hasattr(type(value), "tolist"):  # of NumPy
        return _pack(value.tolist(), number)
    return ["object", number(value)]


def _unpack(value: Any, find: Callable[[int], Any]) -> Any:
    """The inverse of `_pack`; find: the object with a number."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "object":
        return find(*items)
    if kind == "complex":
        return complex(*items)
    if kind == "dict":
        return {_unpack(k, find): _unpack(x, find) for k, x in items}
    return {x.__name__: x for x in _LISTS}[kind](_unpack(x, find) for x in items)


def _send(fd: int, message: list) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(fd, line) :]


class _Solution(contextlib.AbstractContextManager):
    """The process with a response's code, as the tests see it."""

    def __init__(self, code: str):
        self.calls = 0  # of what the response has defined
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _serve(code, requests, replies)
        os.close(requests)
        os.close(replies)
        self._received = open(self._replies, "rb")  # noqa: SIM115 - as long as the process

    def __exit__(self, *_) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        self._received.close()

    def names(self) -> dict[str, Any]:
        """What the code has defined, by name. Raises what the code has raised."""
        return self._receive()[0]

    def call(self, function: str | int, *args, **options) -> Any:
        """Call a name of `_CALLS`, or the response's object with this number."""
        self.calls += isinstance(function, int)
        packed = [_pack(x, self._number) for x in (args, options)]
        try:
            _send(self._requests, [function, *packed])
        except OSError as error:
            raise _BrokenError from error
        result, now = self._receive()
        for old, new in zip(args, now):  # what the code has changed in place
            if isinstance(old, list):
                old[:] = new
            elif isinstance(old, dict | set):
                old.clear()
                old.update(new)
        return result

    def _receive(self) -> list:
        """The values of the next reply. Raises what the code has raised."""
        try:
            kind, text, *values = json.loads(self._received.readline(MAX_MESSAGE))
            values = [_unpack(x, lambda number: _Object(self, number)) for x in values]
            error = getattr(builtins, kind or "object", None)
        except Exception as broken:  # also RecursionError, of a thousand brackets
            raise _BrokenError from broken
        if not kind:
            return values
        is_error = isinstance(error, type) and issubclass(error, Exception)
        raise (error if is_error else _BrokenError)(text)

    def _number(self, value: Any) -> int:
        if isinstance(value, _Object):
            return object.__getattribute__(value, "_number")
        raise UnsuitedTestsError(
            f"the tests in the answer give the response a {type(value).__name__}, it takes plain "
            "data: numbers, text, lists, tuples, sets, dicts"
        )


class _Object:
    """Stand-in, in the tests, for an object of the response that is no plain data."""

    def __init__(self, solution: _Solution, number: int):
        object.__setattr__(self, "_solution", solution)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **options) -> Any:
        return self._solution.call(self._number, *args, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._solution.call("equal", self, other) is True

    def __hash__(self) -> int:
        return self._number

    def __instancecheck__(self, instance: object) -> bool:
        return self._solution.call("isinstance", instance, self)


def _forwarded(name: str) -> Callable:
    return lambda self, *args: self._solution.call(name, self, *args)


for _name in _CALLS:
    if _name.startswith("__"):
        setattr(_Object, _name, _forwarded(_name))


# The process of the response ----------------------------------------------------------------------


def _builtin_kind(error: BaseException) -> str:
    """The name of an error's class; of another than a built-in one, of what it extends."""
    return next(x.__name__ for x in type(error).__mro__ if x.__module__ == "builtins")


def _serve(code: str, requests: int, replies: int) -> NoReturn:
    """Run code, send what it defines, and then the result of every call that is asked for."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def number(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)  # which keeps the id
        return numbers[id(value)]

    try:
        low, high = sorted((requests, replies))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        try:
            names: dict[str, Any] = {"__name__": "solution"}
            exec(compile(code, "the response", "exec"), names)
            defined = {k: x for k, x in names.items() if not k.startswith("__")}
            _send(replies, ["", "", _pack(defined, number)])
        except BaseException as error:
            _send(replies, [_builtin_kind(error), str(error)])
        with open(requests, "rb") as received:
            for line in received:
                try:
                    function, *packed = json.loads(line)
                    args, options = (_unpack(x, objects.__getitem__) for x in packed)
                    call = _CALLS[function] if isinstance(function, str) else objects[function]
                    result = call(*args, **options)
                    changed = [x if isinstance(x, list | dict | set) else None for x in args]
                    _send(replies, ["", "", _pack(result, number), _pack(changed, number)])
                except BaseException as error:
                    _send(replies, [_builtin_kind(error), str(error)])
    finally:
        os._exit(0)
