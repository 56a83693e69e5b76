"""Paths that code in answers may read: Python, its packages, and the system's libraries.

Takes what the worker has imported and `reward.readable`; returns the paths for Landlock or for a
view of files. In a folder of source code (the current directory, an entry of PYTHONPATH, a package
under development) code may read only the modules: data, runs and keys are often next to them.
"""

import contextlib
import glob
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec

_LIBRARIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "include", "share")
_ROOTS = ("/", "/usr", "/usr/local")  # whose folders in `_LIBRARIES` are the system's
_SYSTEM = (
    "/nix/store", "/gnu/store", "/sys/devices/system/cpu", "/proc/cpuinfo", "/proc/meminfo",
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/timezone", "/etc/mime.types",
    "/etc/ssl/openssl.cnf", "/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ca-certificates/extracted",
    "/etc/pki/tls/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted", "/etc/crypto-policies",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_OF_PYTHON = (*_LIBRARIES, "ssl", "pyvenv.cfg")  # in Python's own folder
_INSTALLED = ("site-packages", "dist-packages")
_SUFFIXES = (*importlib.machinery.all_suffixes(), ".pyi", "py.typed")


def parse_readable(text: str) -> str:
    """Return `reward.readable` with absolute paths. Raises a one-line ValueError."""
    paths = [os.path.abspath(os.path.expanduser(path)) for path in text.split(":") if path.strip()]
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(
                'reward.readable must be existing paths, separated by ":", got '
                f"{text!r}: there is no {path}"
            )
    return ":".join(paths)


def find_readable(own: str) -> tuple[str, ...]:
    """Return the paths of this process's Python, of the system's libraries and of `own`.

    Call it after the imports, in the user's home and current directory. own: from `parse_readable`.
    """
    folders = list(_source_folders())
    hidden = {os.path.realpath(path) for path in (*folders, os.getcwd(), os.path.expanduser("~"))}
    paths = [os.path.join(root, name) for root in _ROOTS for name in _LIBRARIES]
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    paths += [os.path.join(prefix, name) for prefix in prefixes for name in _OF_PYTHON]
    paths += [path for path in sys.path if path not in folders]
    paths += [*_SYSTEM, *DEVICES, *_folders_of_libraries()]
    found = [part for path in paths if os.path.exists(path) for part in _without(path, hidden)]
    found += [os.path.realpath(sys.executable)]
    for folder in folders:
        found += _modules(folder, is_package=os.path.exists(os.path.join(folder, "__init__.py")))
    return tuple(dict.fromkeys([*found, *filter(None, own.split(":"))]))


def find_without_listing() -> None:
    """Let Python find modules in source folders that this process may not list."""
    folders = {os.path.abspath(folder) for folder in _source_folders()}

    def hook(path: str) -> _Finder:
        own = os.path.abspath(path)
        if any(_is_within(own, folder) for folder in folders) and not _is_installed(own):
            return _Finder(own)
        raise ImportError

    sys.path_hooks.insert(0, hook)
    for path in list(sys.path_importer_cache):
        with contextlib.suppress(ImportError):
            sys.path_importer_cache[path] = hook(path)


class _Finder:
    """Finds modules of a folder by name."""

    def __init__(self, folder: str):
        self._folder = folder

    def find_spec(self, name: str, target: object = None) -> ModuleSpec | None:
        base = os.path.join(self._folder, name.rpartition(".")[2])
        for suffix in importlib.machinery.all_suffixes():
            for path, parts in ((f"{base}/__init__{suffix}", [base]), (f"{base}{suffix}", None)):
                if os.path.isfile(path):
                    locate = importlib.util.spec_from_file_location
                    return locate(name, path, submodule_search_locations=parts)
        if not os.path.isdir(base):
            return None
        spec = ModuleSpec(name, None, is_package=True)  # part of a package without __init__
        spec.submodule_search_locations = [base]
        return spec


def _source_folders() -> Iterator[str]:
    """Yield the folders that modules come from, except those of installed packages."""
    paths = [path or os.getcwd() for path in (*sys.path, *sys.path_importer_cache)]
    for name, module in list(sys.modules.items()):
        if "." not in name:
            with contextlib.suppress(Exception):  # a module may be any object
                paths += module.__path__
    for path in dict.fromkeys(map(str, paths)):
        if os.path.isdir(path) and not _is_installed(path):
            yield path


def _is_installed(path: str) -> bool:
    """Return whether a folder, or one around it, contains files written by an installer."""
    real = os.path.realpath(path)
    libraries = [os.path.join(x, "lib") for x in (sys.base_prefix, sys.base_exec_prefix)]
    if any(_is_within(real, os.path.realpath(x)) for x in libraries):
        return True
    if any(part in _INSTALLED for part in real.split(os.sep)):
        return True
    is_own = real == os.path.realpath(os.getcwd())
    return not is_own and bool(glob.glob(os.path.join(glob.escape(real), "*.dist-info")))


def _folders_of_libraries() -> list[str]:
    """Return the folders configured for the dynamic linker, and those of packages' data."""
    folders = []
    for path in glob.glob("/etc/ld.so.conf.d/*.conf"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            folders += [line.strip() for line in file if line.startswith("/")]
    for name in ("LD_LIBRARY_PATH", "NLTK_DATA"):
        folders += filter(os.path.isabs, os.environ.get(name, "").split(":"))
    return folders


def _without(path: str, hidden: Iterable[str]) -> Iterator[str]:
    """Yield the parts of a path that contain none of the hidden folders."""
    real = os.path.realpath(path)
    if real in hidden or real == "/":
        return
    if not any(_is_within(other, real) for other in hidden):
        yield path
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            yield from _without(os.path.join(path, name), hidden)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _modules(folder: str, is_package: bool) -> list[str]:
    """Return the modules in a folder and its packages; for a folder of only modules, itself.

    is_package: its subfolders are part of it, even without __init__.
    """
    found: list[str] = []
    is_pure = is_package
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                begins = os.path.exists(os.path.join(entry.path, "__init__.py"))
                if not (is_package or begins or entry.name == "__pycache__"):
                    continue
                parts = _modules(entry.path, is_package=True)
            else:
                parts = [entry.path] if entry.name.endswith(_SUFFIXES) else []
            found += parts
            is_pure = is_pure and parts == [entry.path]
    return [folder] if is_pure and found else found
