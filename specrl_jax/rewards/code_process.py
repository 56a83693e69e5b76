"""Program of the process that runs the code of a response, for the reward `code`.

`code` starts this file in an interpreter of its own, whose memory never held the tests. It reads
the code, sends what the code defines, and then the result of every call that it is asked for. It
imports nothing of this package: a start takes as long as its imports. No JAX.
"""

import importlib
import json
import operator
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

STARTED = b"\n"  # the first line that the process sends
NAME = "solution"  # of the module that the code is

# Plain data between the two processes ------------------------------------------------------------

_MUTABLE = (list, dict, set, bytearray)
_LISTS: tuple[type, ...] = (list, tuple, set, frozenset, bytes, bytearray)
_TEXTS = {"fractions": ["Fraction"], "decimal": ["Decimal"], "datetime": ["date", "datetime"]}

Given = dict[int, tuple[int, Any]]  # id → number and value of each list, dict or set of a call


def pack(value: Any, other: Callable[[Any, Given], Any], given: Given) -> Any:
    """Plain data as JSON. A list, dict or set that `given` holds is its number; others join it.

    other: gives the JSON of what is no plain data.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if id(value) in given:
        return ["given", given[id(value)][0]]
    if kind is complex:
        packed = ["complex", value.real, value.imag]
    elif kind is range:
        packed = ["range", value.start, value.stop, value.step]
    elif kind is dict:
        packed = ["dict", *([pack(x, other, given) for x in pair] for pair in value.items())]
    elif kind in _LISTS:
        packed = [kind.__name__, *(pack(x, other, given) for x in value)]
    elif kind.__name__ in _TEXTS.get(kind.__module__, ()):
        packed = [kind.__module__, kind.__name__, str(value)]
    else:
        packed = other(value, given)
    if kind in _MUTABLE:
        given[id(value)] = (len(given), value)
    return packed


def unpack(packed: Any, find: Callable, given: list) -> Any:
    """The inverse of `pack`; adds each list, dict and set to `given`, in the order of `pack`.

    find: gives the value of what `other` has packed, of its parts.
    """
    if not isinstance(packed, list):
        return packed
    kind, *items = packed
    if kind == "given":
        return given[items[0]]
    if kind in ("complex", "range"):
        return {"complex": complex, "range": range}[kind](*items)
    if kind in _TEXTS and items[0] in _TEXTS[kind]:
        made = getattr(importlib.import_module(kind), items[0])
        return getattr(made, "fromisoformat", made)(items[1])
    if kind == "dict":
        value = dict([unpack(x, find, given) for x in pair] for pair in items)
    elif kind in {x.__name__ for x in _LISTS}:
        contents = [unpack(x, find, given) for x in items]
        value = {x.__name__: x for x in _LISTS}[kind](contents)
    else:
        return find(*packed)
    if isinstance(value, _MUTABLE):
        given.append(value)
    return value


def plain(value: Any) -> Any:
    """The plain data in an array, or in a value of a class that extends such data; else value."""
    if hasattr(type(value), "tolist"):  # of NumPy
        return value.tolist()
    if isinstance(value, str):
        return "".join(str.__iter__(value))
    if isinstance(value, dict):
        return dict(dict.items(value))
    kinds = (int, float, complex, *_LISTS)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


def _defines(value: Any, name: str) -> bool:
    """Return whether the class of a value has such a method of its own."""
    return getattr(type(value), name, None) is not getattr(object, name, None)


# What the tests may do with an object of the response that is no plain data. Neither arithmetic nor
# order nor membership: its answer could be whatever a test hopes for.
CALLS: dict[str, Callable] = {
    "__getattr__": getattr, "__setattr__": setattr, "__bool__": bool, "__len__": len,
    "__iter__": iter, "__next__": next, "__getitem__": operator.getitem,
    "__setitem__": operator.setitem, "__delitem__": operator.delitem, "__str__": str,
    "__repr__": repr, "__hash__": hash, "equal": operator.eq, "isinstance": isinstance,
    "plain": plain, "defines": _defines,
}  # fmt: skip


# The process --------------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Serve the requests of standard input, and write the replies to standard output."""
    try:
        requests = os.dup(0)
        replies = os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        low, high = sorted((requests, replies))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
        sys.set_int_max_str_digits(0)
        with open(requests, "rb") as lines, open(replies, "wb", buffering=0) as file:
            file.write(STARTED)
            _Server(file).serve(lines)
    finally:
        os._exit(0)


class _Server:
    """Runs the code of a response, and what is asked of it."""

    def __init__(self, replies):
        self._replies = replies
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self, requests) -> None:
        """Run the code of the first request, and then every call."""
        memory, sys.path[:], code = json.loads(requests.readline())
        _limit_memory(memory)
        self._reply(self._run, code)
        for line in requests:
            self._reply(self._call, line)

    def _reply(self, do: Callable, text: Any) -> None:
        given: Given = {}
        try:
            reply = [None, *do(text, given)]
        except BaseException as error:
            args = pack(error.args, self._other, given)
            reply = [self._class(type(error)), args, str(error)]
        line = json.dumps(reply).encode() + b"\n"
        while line:
            line = line[self._replies.write(line) :]

    def _run(self, code: str, given: Given) -> list:
        """Return what the code has defined, by name."""
        module = sys.modules[NAME] = types.ModuleType(NAME)
        exec(compile(code, "the response", "exec"), vars(module))
        names = {k: x for k, x in vars(module).items() if not k.startswith("__")}
        return [pack(names, self._other, given)]

    def _call(self, line: bytes, given: Given) -> list:
        """Return the result of a call, and what lists, dicts and sets of its arguments are now."""
        function, packed = json.loads(line)
        values: list[Any] = []
        args, options = unpack(packed, lambda _, number: self._objects[number], values)
        given |= {id(value): (i, value) for i, value in enumerate(values)}
        call = CALLS[function] if isinstance(function, str) else self._objects[function]
        result = pack(call(*args, **options), self._other, given)
        return [result, ["tuple", *(pack(type(x)(x), self._other, given) for x in values)]]

    def _other(self, value: Any, given: Given) -> Any:
        """Pack an object of the response: by its number, or flat if its class is a library's."""
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == NAME:
            return self._class(value)
        flat = plain(value)
        if flat is value or type(value).__module__ == NAME:
            return ["object", self._number(value)]
        return pack(flat, self._other, given)

    def _class(self, error: type) -> Any:
        """The class of an error: its name, with that of what it extends."""
        if error.__module__ == "builtins":
            return ["error", error.__name__]
        return ["error", error.__name__, self._number(error), self._class(error.__base__)]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which keeps the id
        return self._numbers[id(value)]


def _limit_memory(room: int) -> None:
    """Let this process allocate `room` bytes; -1: any number."""
    if room >= 0:
        with open("/proc/self/statm", "rb") as file:
            most = room + int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    serve()
