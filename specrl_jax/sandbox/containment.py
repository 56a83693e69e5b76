"""Privileges that a reward worker drops before it runs what a policy has written.

Namespaces, Landlock and seccomp filters (`linux`) may each be unavailable; those available must
take effect, otherwise the answer is not run. `Cell.gaps` lists what nothing covers. Also ends
processes, whatever session they are in.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping

from specrl_jax.sandbox import linux
from specrl_jax.sandbox.code_process import address_space
from specrl_jax.sandbox.readable import find_readable, find_without_listing

MAX_PROCESSES = 64  # processes and threads that one answer may have at a time
MAX_OPEN_FILES = 256
MAX_LATER_TASKS = 1024  # threads of the user that may start after the workers
RESERVE = 64 << 20  # bytes beyond the memory limit, to report that it was reached

_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
         "VIRTUAL_ENV", "CONDA_PREFIX", "HF_HOME", "HF_HUB_CACHE", "NLTK_DATA")  # fmt: skip
_SESSION_S = 10.0  # seconds within which killed processes must have ended


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return only variables of programs and caches: no tokens, no proxy settings."""
    return {k: v for k, v in variables.items() if k in _KEPT or k.startswith(("LC_", "XDG_"))}


# Processes ----------------------------------------------------------------------------------------


def end_group(group: int) -> int:
    """Kill a child that leads a group, and its group; return the child's exit code."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):  # it may be too young to lead its group
        os.kill(group, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(group, 0)[1])


def end_children(group: int) -> int:
    """Kill everything that this process started; return the exit code of its child `group`.

    Raises TimeoutError if processes remain after some seconds.
    """
    code = 0
    end = time.monotonic() + _SESSION_S
    while time.monotonic() < end:
        _kill_children(group)
        try:
            while True:
                pid, status = os.waitpid(-1, 0 if group else os.WNOHANG)
                if pid == group:
                    code = os.waitstatus_to_exitcode(status)
                    group = 0
                if not pid:
                    break
        except ChildProcessError:
            return code
        time.sleep(0.001)
    raise TimeoutError("processes that an answer has started do not end")


def _kill_children(group: int) -> None:
    if os.getpid() == 1:  # of a process namespace: -1 is all in it but this process
        targets = [-1]
    else:
        targets = {*map(int, linux.children()), group} - {0}
        if group:
            with contextlib.suppress(OSError):  # it may be too young to lead its group
                os.killpg(group, signal.SIGKILL)
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def count_tasks() -> int:
    """Count threads of this user: the kernel counts them against a limit of processes."""
    count = 0
    if not linux.LINUX:
        return count
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


# Folders ------------------------------------------------------------------------------------------


def remove_folder(path: str) -> None:
    """Remove a folder and its content, whatever permissions an answer of this user has set.

    Raises OSError, or RecursionError for a deep one.
    """
    try:
        shutil.rmtree(path)
        return
    except PermissionError:  # root never gets it, so it changes no rights here
        os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(path)


# A worker's cell ----------------------------------------------------------------------------------


class Cell:
    """Place where a worker runs answers: an empty scratch directory, and limits.

    Make it in the worker, after its imports: from then on everything else may be read-only.
    scratch: an empty directory of the worker's own.
    memory: bytes that an answer may allocate.
    namespaces: result of `enter_namespaces`; None: answers are trusted, only memory is limited.
    tasks: of the user, when the worker started; in a namespace they cannot be counted.
    user: `linux.own_user()`, before the namespaces.
    readable: further paths that an answer may read, from `parse_readable`.
    """

    def __init__(
        self,
        scratch: str,
        memory: int,
        namespaces: bool | None,
        tasks: int,
        user: int,
        readable: str = "",
    ):
        self._scratch = scratch
        self._memory = memory
        self._tasks = tasks
        self.trusts = namespaces is None
        self._contained = linux.LINUX and not self.trusts
        self._namespaces = bool(namespaces)
        self._read_only = self._namespaces and linux.read_only_view()
        self._abi = linux.landlock_abi() if self._contained else 0
        self._readable = find_readable(readable) if self._contained else ()
        self._seccomp = self._contained and linux.has_seccomp()
        self._is_limited = self.trusts or not linux.is_unlimited() or linux.has_few_pids()
        self._user = 0
        self._as_owner = False
        if user and not self._is_limited:
            self._choose_user(user)
        if not self.trusts:
            self._open_scratch()
        if self._contained:
            linux.hide_memory()  # it contains the problems; its forks for answers may not be

    def gaps(self, apart: bool = False) -> list[str]:
        """List what nothing here prevents code in an answer from doing; [] if trusted.

        apart: the code should run in a separate program, which cannot be started as the owner.
        """
        if self.trusts:
            return []
        covered = {
            "read files": self._abi,
            "change files": self._read_only or self._abi,
            "open sockets": self._namespaces or self._seccomp,
            "signal other processes": self._namespaces or self._abi >= 6 or self._seccomp,
            "start any number of processes": self._is_limited,
            "search its memory for the tests": not (apart and self._as_owner),
        }
        return [what for what, by in covered.items() if not by]

    def enter_folder(self, name: str) -> None:
        """Continue in a new folder of the scratch directory, which other processes also use.

        Call it in a copy of the cell, in a forked process.
        """
        if self.trusts:
            return
        self._set_rights()  # another episode may have locked it
        self._scratch = os.path.join(self._scratch, name)
        os.mkdir(self._scratch)
        self._open_scratch()

    def leave_folder(self) -> None:
        """Remove the folder of `enter_folder`. Raises OSError if that fails."""
        if self.trusts:
            return
        if self._read_only:
            linux.unmount(self._scratch)
        remove_folder(self._scratch)

    def confine(self, beside: int = 0) -> None:
        """Confine this process permanently, to run one answer.

        beside: processes of other answers that the kernel counts together with this one's.
        """
        if self.trusts:
            return
        os.chdir(self._scratch)
        self._set_limits(beside)
        if not self._contained:
            return
        if self._user:
            linux.give_up_root(self._user, self._as_owner)
            linux.die_with_parent()  # changing the user resets it
        else:
            linux.drop_capabilities()
        if self._abi:
            find_without_listing()
            linux.restrict_files(self._abi, self._scratch, self._readable)
        if self._seccomp:
            outside = not self._namespaces
            linux.restrict_calls(tuning=outside, signals=outside and self._abi < 6)

    def limit_memory(self, for_good: bool) -> None:
        """Limit this process's memory to an answer's; for_good: the limit cannot be lifted."""
        memory = _used_memory() + self._memory
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        _limit(resource.RLIMIT_AS, memory, memory + RESERVE if for_good else most)

    def clear(self) -> None:
        """Empty the scratch directory, for the next answer. Raises OSError if that fails."""
        self._set_rights()
        left = os.listdir(self._scratch)
        if left and self._read_only:
            linux.unmount(self._scratch)
            self._open_scratch()
            return
        for name in left:
            path = os.path.join(self._scratch, name)
            if os.path.isdir(path) and not os.path.islink(path):
                remove_folder(path)
            else:
                os.unlink(path)

    def _choose_user(self, user: int) -> None:
        """Run answers as this user, with access to root's files if it cannot import otherwise."""
        paths = [path for path in (sys.executable, *sys.path) if os.path.exists(path)]
        trial = linux.fork()
        if trial == 0:
            with contextlib.suppress(BaseException):
                linux.give_up_root(user, as_owner=False)
                may_read = all(os.access(path, os.R_OK) for path in paths)
                os._exit(may_read and os.access(os.path.dirname(self._scratch), os.X_OK))
            os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
        if code in (0, 1):
            self._user = user
            self._as_owner = code == 0
            self._is_limited = True

    def _open_scratch(self) -> None:
        """Make the scratch directory an answer's, and the place for its temporary files."""
        if self._read_only:
            linux.mount_memory(self._scratch, self._memory)
        self._set_rights()
        os.environ |= dict.fromkeys(("HOME", "TMPDIR"), self._scratch)
        tempfile.tempdir = self._scratch

    def _set_rights(self) -> None:
        """Let an answer use the scratch directory; the previous one may have locked it.

        Raises OSError if it is a link, which root must not follow.
        """
        if os.path.islink(self._scratch):
            raise OSError(f"{self._scratch} is a link, which an answer has made")
        if self._user:
            owner = 0 if self._as_owner else self._user
            os.chown(self._scratch, owner, self._user, follow_symlinks=False)
        os.chmod(self._scratch, 0o770 if self._user else 0o700)

    def _set_limits(self, beside: int) -> None:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, self._memory)
        _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        if linux.LINUX:
            others = 0 if self._user else self._tasks
            if not self._user and not self._namespaces and self._is_limited:
                # Counted again if possible, as a run starts threads after its workers.
                others = min(count_tasks(), others + MAX_LATER_TASKS)
            _limit(resource.RLIMIT_NPROC, others + beside + MAX_PROCESSES)


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit of this process; no higher than it is."""
    most = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        hard = min(hard, most) if hard != resource.RLIM_INFINITY else most
        soft = min(soft, most)
    with contextlib.suppress(ValueError, OSError):  # not every system enforces each one
        resource.setrlimit(kind, (soft, hard))


def lift_memory_limit() -> None:
    """Lift the limit of `limit_memory`, as far as allowed."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def free_memory() -> int:
    """Return the bytes that this process may still allocate; -1: any number."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _used_memory()
    return most - used if used and most != resource.RLIM_INFINITY else -1


def _used_memory() -> int:
    """Return the address space in use; 0 if the system does not limit it."""
    return address_space() if linux.LINUX else 0
