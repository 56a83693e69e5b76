"""Program of the process that runs a response's code, for `code` and the tool `python`.

`code` starts this file in a separate interpreter, whose memory never contained the tests. It reads
requests, one line of JSON each, and replies to each with a line. It imports nothing from this
package: a start takes as long as its imports. No JAX.
"""

import atexit
import bisect
import builtins
import functools
import importlib
import json
import mmap
import os
import resource
import sys
import types
from typing import Any, NoReturn

NAME = "solution"  # of the module made from the code
MAX_OUTPUT = 2**23  # bytes of a program's output that are read
_MOST_SPACE = 2**38  # bytes of address space that an unlimited process may have in use

# Plain data between the two processes ------------------------------------------------------------

_MUTABLE = (list, dict, set, bytearray)
_LISTS: tuple[type, ...] = (list, tuple, set, frozenset, bytes, bytearray)
_TEXTS = {"fractions": ["Fraction"], "decimal": ["Decimal"], "datetime": ["date", "datetime"]}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_MAX_ITEMS = 2**16  # of an iterator, which may have no end

Given = dict[int, tuple[int, Any]]  # id → number and value of each list, dict or set of a call


class NotPlainError(Exception):
    """A value is an object; the text is the name of its class."""


def pack(value: Any, given: Given) -> Any:
    """Return plain data as JSON: a list, dict or set in `given` as its number; others are added."""
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
        packed = ["dict", *([pack(x, given) for x in pair] for pair in value.items())]
    elif kind in _LISTS:
        packed = [kind.__name__, *(pack(x, given) for x in value)]
    elif kind.__name__ in _TEXTS.get(kind.__module__, ()):
        packed = [kind.__module__, kind.__name__, str(value)]
    elif kind.__module__ == NAME:  # tests may use what the class adds
        raise NotPlainError(kind.__name__)
    elif hasattr(kind, "__next__") or kind in _VIEWS:
        items = [x for x, _ in zip(value, range(_MAX_ITEMS))]
        packed = ["iterator", *(pack(x, given) for x in items)]
    else:
        packed = pack(_flat(value), given)
    if kind in _MUTABLE:
        given[id(value)] = (len(given), value)
    return packed


def unpack(packed: Any, given: list) -> Any:
    """Undo `pack`; add each list, dict and set to `given`, in the order of `pack`."""
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
        value = dict([unpack(x, given) for x in pair] for pair in items)
    else:
        make = {x.__name__: x for x in _LISTS} | {"iterator": iter}
        value = make[kind]([unpack(x, given) for x in items])
    if isinstance(value, _MUTABLE):
        given.append(value)
    return value


def _flat(value: Any) -> Any:
    """Return the plain data in an array, or in a value whose library class extends plain data."""
    if hasattr(type(value), "tolist"):  # NumPy's
        return value.tolist()
    for base in (str, int, float, complex, dict, *_LISTS):
        if isinstance(value, base):
            return base(value)
    raise NotPlainError(type(value).__name__)


# The process --------------------------------------------------------------------------------------


def serve() -> NoReturn:
    """Serve the requests of standard input, and write the replies to standard output."""
    try:
        requests = os.dup2(0, 3)
        replies = os.dup2(1, 4)
        os.closerange(5, os.sysconf("SC_OPEN_MAX"))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        sys.set_int_max_str_digits(0)
        with open(requests, "rb") as lines, open(replies, "wb", buffering=0) as file:
            for line in lines:
                reply = json.dumps(_reply(*json.loads(line))).encode() + b"\n"
                while reply:
                    reply = reply[file.write(reply) :]
    finally:
        os._exit(0)


def _reply(request: str, *args) -> list:
    try:
        return ["value", *REQUESTS[request](*args)]
    except NotPlainError as error:
        return ["object", str(error)]
    except BaseException as error:
        try:
            args = pack(error.args, {})
        except NotPlainError:
            args = ["tuple", str(error)]
        names = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
        return ["raised", names[0], args, str(error)]


def _begin(memory: int, path: list[str]) -> list:
    """Let this process allocate this many bytes (-1: unlimited) and import from `path`."""
    sys.path[:] = path
    if memory >= 0:
        most = memory + address_space()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return []


def address_space() -> int:
    """Return the bytes of address space in use, which a confined process cannot read in /proc.

    It is what a limit leaves no room for.
    """
    old = resource.getrlimit(resource.RLIMIT_AS)
    limit = old[0]
    try:
        if limit == resource.RLIM_INFINITY:
            limit = _MOST_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (limit, old[1]))
        free = bisect.bisect(
            range(limit // mmap.PAGESIZE), 0, lo=1, key=lambda pages: not _has_room(pages)
        )
        return limit - (free - 1) * mmap.PAGESIZE
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def _has_room(pages: int) -> bool:
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mmap.mmap(-1, pages * mmap.PAGESIZE, flags=kind, prot=0).close()
        return True
    except OSError:
        return False


def _load(code: str, imports: str) -> list:
    """Run the code as a module. Names defined by `imports` are built in unless they are taken."""
    names: dict[str, Any] = {}
    exec(imports, names)
    vars(builtins).update(names | vars(builtins))
    module = sys.modules[NAME] = types.ModuleType(NAME)
    exec(compile(code, "the response", "exec"), vars(module))
    return []


def _find(path: str) -> Any:
    """Return what a path names in the module: "add", "Shape.area"."""
    return functools.reduce(getattr, path.split("."), sys.modules[NAME])


def _get(path: str) -> list:
    """Return data, packed; nothing for callables."""
    value = _find(path)
    if isinstance(value, type) and issubclass(value, BaseException):
        raise NotPlainError(f"class of errors, {value.__name__}")
    return [] if callable(value) else [pack(value, {})]


def _call(path: str, packed: Any) -> list:
    """Return the result of a call, and the current lists, dicts and sets of its arguments.

    For the class Solution return the path of the new instance, which the module keeps.
    """
    values: list[Any] = []
    args, options = unpack(packed, values)
    given: Given = {id(value): (i, value) for i, value in enumerate(values)}
    function = _find(path)
    result = function(*args, **options)
    if path == "Solution" and isinstance(function, type):
        module = sys.modules[NAME]
        name = f"Solution {len(vars(module))}"
        setattr(module, name, result)
        return [name]
    return [pack(result, given), ["tuple", *(pack(type(x)(x), given) for x in values)]]


# Programs -----------------------------------------------------------------------------------------


def _run(code: str, text: str) -> list:
    """Return exit status and output of a program that reads `text`, in a process forked from this.

    No run sees what another has defined.
    """
    import tempfile

    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(text.encode())
        given.seek(0)
        pid = os.fork()
        if pid == 0:
            os.dup2(given.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            _run_and_end(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return [status, output.read(MAX_OUTPUT).decode(errors="replace")]


def _run_and_end(code: str) -> NoReturn:
    """Run a program in this process, and end it as the interpreter would."""
    status = 1
    try:
        atexit._clear()
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8")  # noqa: SIM115
        builtins.exit = builtins.quit = sys.exit  # which -S leaves out
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            exec(compile(code, "the response", "exec"), vars(main))
            status = 0
        except SystemExit as error:
            status = int(error.code not in (None, 0))
        if threading := sys.modules.get("threading"):
            others = {*threading.enumerate()} - {threading.current_thread()}
            for thread in others:
                if not thread.daemon:
                    thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.__stdout__.flush()
    finally:
        os._exit(status)


# A console ----------------------------------------------------------------------------------------

_CONSOLE: dict[str, Any] = {"__name__": "__main__"}  # names that persist


def _console(code: str, most: int) -> list:
    """Return what code prints, then the value of its last expression, or the error's last line.

    most: characters; a longer text is cut.
    """
    import ast
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            tree = ast.parse(code, "the call")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "the call", "exec"), _CONSOLE)
            if last:
                value = eval(compile(ast.Expression(last.value), "the call", "eval"), _CONSOLE)
                if value is not None:
                    _CONSOLE["_"] = value
                    print(repr(value))
        except BaseException as error:  # SystemExit too
            lines = f"{type(error).__name__}: {error}".rstrip(": \n").splitlines()
            print(lines[-1])
    output.seek(0)
    text = output.read(most + 1)
    return [text if len(text) <= most else text[:most] + "...\n"]


REQUESTS = {
    "begin": _begin,
    "load": _load,
    "get": _get,
    "call": _call,
    "run": _run,
    "console": _console,
}

if __name__ == "__main__":
    serve()
