"""Conversion of a command line, as typed by a user, to arguments for flags.

Expands ~, names saved configurations, writes 1e4 as 10000, and explains unknown flags.
"""

import difflib
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation

from specrl_jax import registry
from specrl_jax.command_line import saved_run
from specrl_jax.config.kinds import is_integer
from specrl_jax.inputs import user_path
from specrl_jax.settings import schema

_LARGEST = Decimal(10) ** 18
_MAX_HINTS = 3
_PATHS = ("--workdir", "--config")
_SAVED = f"{saved_run.__file__}:"  # a configuration file whose presets are paths


def prepare(argv: Sequence[str], resumes: bool = False) -> list[str]:
    """Return the arguments in the form --NAME=VALUE, fully expanded.

    resumes: --workdir=RUN without --config means the run in RUN. Raises a one-line ValueError.
    """
    named = _with_resumed(_joined(argv)) if resumes else _joined(argv)
    registry.load(_value(named, "--config.recipes"))  # they may define fields used below
    return [_prepared(argument) for argument in named]


def as_typed(path: str) -> str:
    """Return a configuration file as the user named it."""
    return path.removeprefix(_SAVED)


def unknown(flag: str, known: Iterable[str]) -> str:
    """Return the error line for a flag that does not exist, with likely alternatives."""
    name = flag.lstrip("-").partition("=")[0]
    close = difflib.get_close_matches(name, [*known], n=1, cutoff=0.75)
    meant = [f"--{x}" for x in close] or [f"--config.{x}" for x in _fields_like(name)]
    hint = f", did you mean {' or '.join(meant)}?" if meant else "; --help has all flags and fields"
    return f"unknown flag --{name}{hint}"


def misspelt(argv: Sequence[str], flag: str, known: Iterable[str]) -> str:
    """Return the first unknown argument that resembles this one; "" if there is none."""
    names = {x: x.lstrip("-").partition("=")[0] for x in argv if x.startswith("-")}
    strange = [x for x, name in names.items() if name not in known]
    return next((x for x in strange if difflib.get_close_matches(names[x], [flag])), "")


def _joined(argv: Sequence[str]) -> list[str]:
    """Join `--workdir RUN` and `--config FILE` into one argument each; `-config` is --config."""
    joined: list[str] = []
    for argument in argv:
        text = str(argument)
        if text.startswith(("-config", "-workdir")):
            text = f"-{text}"
        if joined and joined[-1] in _PATHS and not text.startswith("-"):
            joined[-1] += f"={text}"
        else:
            joined.append(text)
    return joined


def _value(argv: Sequence[str], flag: str) -> str:
    values = [x.removeprefix(f"{flag}=") for x in argv if x.startswith(f"{flag}=")]
    return values[-1] if values else ""


def _with_resumed(argv: list[str]) -> list[str]:
    """Add the configuration and the origin of the run if only --workdir names it."""
    workdir = _value(argv, "--workdir")
    if not workdir or any(x.partition("=")[0] == "--config" for x in argv):
        return argv
    file = user_path(workdir, "--workdir") / "config.json"
    if not file.is_file():
        return argv
    added = [f"--config={file}"]
    origin = saved_run.origin(file)
    if origin and not _value(argv, "--resume_from"):
        added.append(f"--resume_from={origin}")
    return [*argv[:1], *added, *argv[1:]]


def _prepared(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if name in _PATHS and value.startswith("~"):
        value = str(user_path(value, name))
    if name == "--config" and value.endswith(".json"):
        value = f"{_SAVED}{value}"
    field = name.removeprefix("--config.")
    row = schema().fields.get(field)
    if equals and field != name and row and is_integer(row.kind):
        value = _integer(field, value)
    return f"{name}{equals}{value}"


def _integer(field: str, text: str) -> str:
    """Return an integer as digits: 1e4 is 10000."""
    try:
        number = Decimal(text.strip())
        if abs(number) <= _LARGEST and number == number.to_integral_value():
            return str(int(number))
    except InvalidOperation:
        pass
    raise ValueError(f"{field} must be an integer, got {text!r}")


def _fields_like(name: str) -> list[str]:
    """Return the fields that an abbreviation or a name without its section may mean."""
    text = name.replace("-", "_")
    fields = schema().fields
    last = {field: field.rpartition(".")[2] for field in fields}

    def initials(words: str) -> str:
        return "".join(word[:1] for word in words.split("_"))

    found = [field for field in fields if text in (field, last[field])]
    found = found or [x for x in fields if len(text) > 1 and initials(last[x]) == text]
    if not found:
        close = difflib.get_close_matches(text, set(last.values()), n=1, cutoff=0.75)
        found = [field for field in fields if last[field] in close]
    found.sort(key=lambda field: not field.startswith("updates."))
    of_policy = [field for field in found if field.startswith("updates.")]
    return (of_policy or found)[:_MAX_HINTS]
