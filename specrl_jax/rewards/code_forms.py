"""Forms of code and of tests, for the reward `code`.

Takes texts: a response, and an answer with its problem's row. Returns the code, and cases or Python
tests. Supports the formats of public data sets: inputs and outputs of programs and functions (APPS,
TACO, LiveCodeBench), lists of asserts (MBPP), and Python tests that contain a placeholder for the
response (HumanEval) or import `solution` (KodCode). Nothing is executed.
"""

import ast
import builtins
import contextlib
import json
import re
import sys
import textwrap
import warnings
from typing import Any, NamedTuple

_FORMS = (
    'tests must be Python, a list of asserts, {"inputs", "outputs"} or [{"input", "output", '
    '"testtype"}], see docs/data.md'
)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PLACE = re.compile(r"^\{response\}[ \t\r]*(?:\n|\Z)", re.MULTILINE)  # of the response's code
_FENCE = re.compile(
    r"^((?:[^\n]*[ \t])?)```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
_ITEM = re.compile(r"[ \t]*(?:[-*+]|\d+[.)])?[ \t]*")  # before the fence of a list item
# Modules that tests may use without an import: otherwise the response could define them.
_MODULES = {name: name for name in (*sys.stdlib_module_names, "numpy", "pandas", "pytest")}
_MODULES |= {"np": "numpy", "pd": "pandas"}


class Case(NamedTuple):
    """One run of a program, or one call of a function."""

    function: str  # "": the code is a program
    given: Any  # text of standard input; a list of arguments
    expected: list  # any of these: text of standard output; data


class PythonTests(NamedTuple):
    """Python that asserts what the response's functions return."""

    head: str  # code before the response's; complete, unless the response continues it
    unfinished: str  # the same, without the body of a last function that has none
    last: str  # the head's function or class, or the built-in, that it may replace; ""
    modules: dict[str, str]  # modules used without an import, by the name used
    program: ast.Module
    functions: list[str]  # test*(), to call after the program
    used: set[str]  # names that the tests read
    stored: set[str]  # names that the tests define or assign


def read_tests(answer: str, row: dict) -> list[Case] | PythonTests:
    """Return the tests in an answer. Raises ValueError or SyntaxError if its form is unknown.

    row: of the problem; its columns test_imports and test_setup_code precede Python tests, and it
      may name the function of functional cases.
    """
    try:
        data = json.loads(answer)
    except ValueError:
        return _read_python(answer, row)
    if isinstance(data, dict) and isinstance(data.get("inputs"), list):
        cases = _read_columns(data)
    elif isinstance(data, list) and data and all(isinstance(x, str) for x in data):
        return _read_python("\n".join(data), row)
    elif isinstance(data, list) and data and all(isinstance(x, dict) for x in data):
        cases = [_read_case(case, row) for case in data]
    else:
        raise ValueError(f"{answer[:40]!r}: {_FORMS}")
    if all(not case.function and not case.expected[0].strip() for case in cases):
        raise ValueError("every output is blank")
    return cases


# Cases --------------------------------------------------------------------------------------------


def _read_columns(data: dict) -> list[Case]:
    """Read {"inputs", "outputs"}, with "fn_name" if a function is called."""
    inputs = data["inputs"]
    outputs = data.get("outputs")
    if not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError('"inputs" and "outputs" must be lists of the same length, not empty')
    name = data.get("fn_name") or ""
    # APPS writes the result 5 as [5].
    wrapped = all(isinstance(x, list) and len(x) == 1 for x in outputs)
    return [_case(name, *pair, wrapped) for pair in zip(inputs, outputs)]


def _read_case(case: dict, row: dict) -> Case:
    """Read {"input", "output", "testtype"}."""
    kind = case.get("testtype") or "stdin"
    if not {"input", "output"} <= case.keys() or kind not in ("stdin", "functional"):
        raise ValueError(f"{str(case)[:40]!r}: {_FORMS}")
    name = _function_name(case, row) if kind == "functional" else ""
    return _case(name, case["input"], case["output"], wrapped=False)


def _function_name(case: dict, row: dict) -> str:
    """Return the name from the test or its row, either in a column or in its metadata."""
    for place in (case, case.get("metadata"), row, row.get("metadata")):
        if isinstance(place, str):
            with contextlib.suppress(ValueError):
                place = json.loads(place)
        if isinstance(place, dict) and (name := place.get("fn_name") or place.get("func_name")):
            return name
    raise ValueError("a functional test must have the name of its function, fn_name")


def _case(name: str, given: Any, expected: Any, wrapped: bool) -> Case:
    """Return a case; wrapped: an expected list of one value also means the value."""
    if not isinstance(name, str):
        raise ValueError(f"fn_name must be text, got {name!r}")
    if not name:
        return Case("", _text(given), [_text(expected)])
    if isinstance(given, str):  # LiveCodeBench: one line of JSON per argument
        given = [json.loads(line) for line in given.split("\n") if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(given, list):
        raise ValueError(f"the input of a function must be a list of arguments, got {given!r}")
    return Case(name, given, [expected, *expected] if wrapped else [expected])


def _text(value: Any) -> str:
    """Return text that may be given as a list of lines."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError(f"inputs and outputs must be text or lists of lines, got {value!r}")
    return "\n".join(map(str, lines))


# Python -------------------------------------------------------------------------------------------


def _read_python(text: str, row: dict) -> PythonTests:
    imports = row.get("test_imports") or []
    imports = [imports] if isinstance(imports, str) else imports
    text = "\n".join([*imports, row.get("test_setup_code") or "", text]).lstrip("\n")
    *before, tests = _PLACE.split(text, maxsplit=1)
    unfinished = "".join(before)
    lacks_body = unfinished.rstrip().endswith(":")
    head = f"{unfinished.rstrip()} pass\n" if lacks_body else unfinished
    parsed_head = _parse(head, "the code before")
    program = _parse(tests, "the tests")
    program.body = [x for x in program.body if not _is_from_solution(x)]
    if not any(isinstance(x, ast.Call) for x in ast.walk(program)):
        raise ValueError(f"{text[:40]!r} calls nothing: {_FORMS}")
    names = [x for x in ast.walk(program) if isinstance(x, ast.Name)]
    used = {x.id for x in names if isinstance(x.ctx, ast.Load)}
    defined = [x.name for x in parsed_head.body if isinstance(x, _DEFINITIONS)]
    if not defined and len(used) == 1:  # the response's, even if it is a built-in name
        defined = sorted(used & vars(builtins).keys())
    stored = _stored_names(program)
    return PythonTests(
        head=head,
        unfinished=unfinished,
        last=defined[-1] if defined else "",
        modules=_missing_imports(program, stored | _stored_names(parsed_head)),
        program=program,
        functions=_functions_to_call(program, used),
        used=used,
        stored=stored,
    )


def _is_from_solution(line: ast.stmt) -> bool:
    is_import = isinstance(line, ast.ImportFrom) and line.module == "solution"
    return is_import and not any(alias.asname for alias in line.names)


def _stored_names(code: ast.Module) -> set[str]:
    """Return the names that code assigns, defines or imports."""
    stored = set()
    for x in ast.walk(code):
        if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load):
            stored.add(x.id)
        elif isinstance(x, ast.arg):
            stored.add(x.arg)
        elif isinstance(x, _DEFINITIONS):
            stored.add(x.name)
        elif isinstance(x, ast.alias):
            stored.add((x.asname or x.name).split(".")[0])
    return stored


def _missing_imports(tests: ast.Module, stored: set[str]) -> dict[str, str]:
    """Return the modules that tests use without an import."""
    attributes = [x for x in ast.walk(tests) if isinstance(x, ast.Attribute)]
    of = {x.value.id for x in attributes if isinstance(x.value, ast.Name)}
    names = set() if "*" in stored else of & _MODULES.keys() - stored
    return {name: _MODULES[name] for name in sorted(names)}


def _functions_to_call(tests: ast.Module, used: set[str]) -> list[str]:
    """Return the names of the functions test*(). Raises ValueError if tests would not run."""
    functions = []
    for x in tests.body:
        name = getattr(x, "name", "")
        if isinstance(x, ast.ClassDef):
            is_unittest = any(ast.unparse(base).endswith("TestCase") for base in x.bases)
            if is_unittest or (name.startswith("Test") and name not in used):
                raise ValueError(f"tests are in a class, {name}")
        elif isinstance(x, _DEFINITIONS) and name.startswith("test"):
            needs = len(x.args.posonlyargs + x.args.args) > len(x.args.defaults)
            needs = needs or None in x.args.kw_defaults
            if isinstance(x, ast.FunctionDef) and not needs:
                functions.append(name)
            elif name not in used:
                kind = "needs arguments" if needs else "is async"
                raise ValueError(f"tests never call {name}, which {kind}")
    return functions


# The response -------------------------------------------------------------------------------------


def code_of(response: str, is_program: bool = False) -> str:
    """Return the code of a response: its last ``` fence that defines something, else all of it.

    is_program: the last fence that reads its input.
    """
    codes = []
    for before, code in _FENCE.findall(response):
        blanks = len(before) if _ITEM.fullmatch(before) else 0
        codes.append(re.sub(rf"^[ \t]{{0,{blanks}}}", "", code, flags=re.MULTILINE))
    codes.sort(key=_rank_program if is_program else _rank)  # stable: the last of the best
    return codes[-1] if codes else response


def _rank(code: str) -> int:
    """2 for code with a function, a class or the end of one, 1 for other statements, else 0."""
    parsed = _parse_any(code)
    definitions = (*_DEFINITIONS, ast.Lambda, ast.Return, ast.Yield, ast.Raise)
    if any(isinstance(x, definitions) for x in ast.walk(parsed)):
        return 2
    return int(any(not isinstance(x, ast.Expr) for x in parsed.body))


def _rank_program(code: str) -> int:
    """2 for a program that reads its input, 1 for code that calls something, else 0."""
    parsed = _parse_any(code)
    if re.search(r"\b(input|stdin|open)\b", code) and parsed.body:
        return 2
    return int(any(isinstance(x, ast.Call) for x in ast.walk(parsed)))


def _parse_any(code: str) -> ast.Module:
    """Return the parsed code; an empty module if it is not Python."""
    try:
        return _parse(textwrap.dedent(code), "the response")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _parse(code: str, name: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code, name)


def lines_of(output: str) -> list[str]:
    """Return the lines of an output as compared: without surrounding blanks."""
    return [line.strip() for line in output.strip().split("\n")]
