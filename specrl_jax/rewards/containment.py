"""What a reward worker gives up before it runs what a policy has written.

Linux, with what the kernel gives without root: user, process, network and mount namespaces
(namespaces(7)), Landlock (landlock(7)) and seccomp filters (seccomp(2)). Each may be missing; what
is there must take effect, else the answer is not run. `Cell.gaps` says what nothing covers. Also
ends processes, whatever session they are in.
"""

import contextlib
import ctypes
import glob
import os
import platform
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import NamedTuple

LINUX = sys.platform == "linux"
MAX_PROCESSES = 64  # processes and threads that one answer may have at a time
MAX_OPEN_FILES = 256
RESERVE = 64 << 20  # bytes beyond the memory limit, to report that it was reached

_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
         "VIRTUAL_ENV", "CONDA_PREFIX", "HF_HOME", "HF_HUB_CACHE", "NLTK_DATA")  # fmt: skip
_SESSION_S = 10.0  # seconds in which killed processes must have ended


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell where programs and caches are: no tokens, no proxy settings."""
    return {k: v for k, v in variables.items() if k in _KEPT or k.startswith(("LC_", "XDG_"))}


# System calls -------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
_SET_PDEATHSIG, _GET_SECCOMP, _SET_SECCOMP, _SET_SUBREAPER, _NO_NEW_PRIVS = 1, 21, 22, 36, 38
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_NOSUID, _NODEV, _NOEXEC, _REC_PRIVATE = 2, 4, 8, 1 << 14 | 1 << 18  # of mount(2)
_DETACH = 2  # of umount2(2)


def _call(name: str, *arguments) -> int:
    """A function of the C library; OSError where it fails."""
    converted = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = getattr(_libc, name)(*converted)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(number: int, *arguments) -> int:
    return _call("syscall", number, *arguments)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that has forked it ends."""
    if LINUX:
        _call("prctl", _SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants whose own parent ends."""
    if LINUX:
        _call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)


# Processes ----------------------------------------------------------------------------------------


def end_children(group: int) -> int:
    """Kill all that this process has started; the exit code of its child `group`.

    Raises TimeoutError where processes are left after seconds.
    """
    code, end = 0, time.monotonic() + _SESSION_S
    while time.monotonic() < end:
        _kill_children(group)
        try:
            while True:
                pid, status = os.waitpid(-1, 0 if group else os.WNOHANG)
                if pid == group:
                    code, group = os.waitstatus_to_exitcode(status), 0
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
        targets = {*_children(), group} - {0}
        if group:
            with contextlib.suppress(OSError):  # it may be too young to lead its group
                os.killpg(group, signal.SIGKILL)
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Numbers of this process's children, as far as the system tells."""
    children = []
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            children += map(int, file.read().split())
    return children


def count_tasks() -> int:
    """Threads of this user: the kernel counts them against a limit of processes."""
    count = 0
    if not LINUX:
        return count
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


# Namespaces ---------------------------------------------------------------------------------------


def enter_namespaces() -> bool:
    """Move this process's children into namespaces of their own; whether the system allows it.

    Call it in a process with one thread. The next child has number 1: all in there end with it.
    """
    if not LINUX:
        return False
    trial = os.fork()  # half of it done would leave a process without a user
    if trial == 0:
        with contextlib.suppress(BaseException):
            _unshare()
            os._exit(0)
        os._exit(1)
    if os.waitpid(trial, 0)[1]:
        return False
    _unshare()
    return True


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(kind: str, path: str, flags: int, options: str = "") -> None:
    _call("mount", kind.encode(), path.encode(), kind.encode(), flags, options.encode())


def _read_only() -> bool:
    """In a mount namespace of this process: all file systems read-only; whether that is so."""
    try:
        _call("unshare", _NEW_NS)
        _mount("none", "/", _REC_PRIVATE)
        with contextlib.suppress(OSError):
            _mount("proc", "/proc", _NOSUID | _NODEV | _NOEXEC)
            _write("/proc/sys/kernel/pid_max", "512")  # of this namespace, from Linux 6.14
        # struct mount_attr: set MOUNT_ATTR_RDONLY below "/" (AT_RECURSIVE).
        _syscall(_MOUNT_SETATTR, -1, b"/", 0x8000, struct.pack("4Q", 1, 0, 0, 0), 32)
        return True
    except OSError:
        return False


# Landlock -----------------------------------------------------------------------------------------

_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE = _WRITE_FILE | sum(1 << right for right in range(4, 13))  # remove and make, of all kinds


def _landlock_abi() -> int:
    """The version of Landlock that the kernel offers; 0: none."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, 0, 1) if LINUX else 0
    except OSError:
        return 0


def _landlock(abi: int, scratch: str) -> None:
    """Allow changes of files in `scratch` alone, and no TCP or signals to outside (newer ABIs)."""
    files = _CHANGE | (abi >= 2) << 13 | (abi >= 3) << 14  # rename between folders, truncate
    rules = struct.pack("3Q", files, 0b11 * (abi >= 4), 0b11 * (abi >= 6))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _syscall(_LANDLOCK_CREATE, rules, size, 0)
    for path, allowed in ((scratch, files), (os.devnull, files & (_WRITE_FILE | _TRUNCATE))):
        fd = os.open(path, os.O_PATH)
        _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
    _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


# Seccomp ------------------------------------------------------------------------------------------


class _Calls(NamedTuple):
    """Numbers of system calls on a kind of machine."""

    machine: int  # as a filter sees it
    always: tuple[int, ...]  # socket, ptrace, process_vm_readv, process_vm_writev, io_uring_setup
    tuning: tuple[int, ...]  # setpriority, sched_setparam, _setscheduler, _setaffinity, _setattr
    signals: tuple[int, ...]  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_
    prlimit: int  # refused for other processes


_CALLS = {
    "x86_64": _Calls(0xC000003E, (41, 101, 310, 311, 425), (141, 142, 144, 203, 314),
                     (62, 200, 234, 129, 297, 424), 302),
    "aarch64": _Calls(0xC00000B7, (198, 117, 270, 271, 425), (140, 118, 119, 122, 274),
                      (129, 130, 131, 138, 240, 424), 261),
}  # fmt: skip
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: EPERM
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def _has_seccomp() -> bool:
    with contextlib.suppress(OSError):
        return platform.machine() in _CALLS and _call("prctl", _GET_SECCOMP, 0, 0, 0, 0) == 0
    return False


def _seccomp(tuning: bool, signals: bool) -> None:
    """Refuse calls of `_CALLS`: those of these names too."""
    calls = _CALLS[platform.machine()]
    refused = calls.always + calls.tuning * tuning + calls.signals * signals
    last = len(refused) + 4  # the last instruction, from the first that can jump there
    program = [
        (_LOAD, 0, 0, _MACHINE),
        (_IF_EQUAL, 1, 0, calls.machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, last, 0, 1 << 30),  # another table of calls, on x86_64
        *((_IF_EQUAL, last - 1 - i, 0, call) for i, call in enumerate(refused)),
        (_IF_EQUAL, 0, 2, calls.prlimit),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_EQUAL, 0, 1, 0),  # 0: this process
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HP", len(program), ctypes.addressof(buffer))
    _call("prctl", _SET_SECCOMP, 2, header, 0, 0)


# A worker's cell ----------------------------------------------------------------------------------


class Cell:
    """Where a worker runs answers: an empty scratch directory, and limits.

    Make it in the worker, after its imports: from then on all else may be read-only for it.
    scratch: an empty directory of the worker's own.
    memory: bytes that an answer may allocate.
    namespaces: what `enter_namespaces` gave; None: nothing but the limits.
    tasks: of the user, as the worker started.
    """

    def __init__(self, scratch: str, memory: int, namespaces: bool | None, tasks: int):
        self._scratch, self._memory, self._tasks = scratch, memory, tasks
        self._contained = LINUX and namespaces is not None
        self._namespaces = bool(namespaces)
        self._read_only = self._namespaces and _read_only()
        self._abi = _landlock_abi() if self._contained else 0
        self._seccomp = self._contained and _has_seccomp()
        if self._read_only:
            self._mount_scratch()
        if namespaces is not None:
            os.environ |= dict.fromkeys(("HOME", "TMPDIR"), scratch)
            tempfile.tempdir = scratch

    def gaps(self) -> list[str]:
        """What code in an answer can do, as nothing here keeps it from it."""
        covered = {
            "change files": self._read_only or self._abi,
            "open sockets": self._namespaces or self._seccomp,
            "signal other processes": self._namespaces or self._abi >= 6 or self._seccomp,
        }
        return [what for what, by in covered.items() if not by]

    def confine(self) -> None:
        """Confine this process, for good: it is to run one answer."""
        os.chdir(self._scratch)
        self._set_limits()
        if not self._contained:
            return
        _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # no capabilities
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        if self._abi:
            _landlock(self._abi, self._scratch)
        if self._seccomp:
            outside = not self._namespaces
            _seccomp(tuning=outside, signals=outside and self._abi < 6)

    def limit_memory(self, for_good: bool) -> None:
        """Let this process allocate as much as an answer may; for_good: it cannot be lifted."""
        memory = _virtual_bytes() + self._memory
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        _limit(resource.RLIMIT_AS, memory, memory + RESERVE if for_good else most)

    def clear(self) -> None:
        """Empty the scratch directory. Raises OSError where that fails."""
        left = os.listdir(self._scratch)
        if left and self._read_only:
            _call("umount2", self._scratch.encode(), _DETACH)
            self._mount_scratch()
            return
        for name in left:
            path = os.path.join(self._scratch, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def _mount_scratch(self) -> None:
        options = f"size={self._memory},nr_inodes=10000,mode=700"
        _mount("tmpfs", self._scratch, _NOSUID | _NODEV, options)

    def _set_limits(self) -> None:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, self._memory)
        _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        if LINUX:
            _limit(resource.RLIMIT_NPROC, self._tasks + MAX_PROCESSES)


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit of this process; no higher than it is."""
    most = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        hard = min(hard, most) if hard != resource.RLIM_INFINITY else most
        soft = min(soft, most)
    with contextlib.suppress(ValueError, OSError):  # not every system enforces each
        resource.setrlimit(kind, (soft, hard))


def lift_memory_limit() -> None:
    """Let this process allocate all that `limit_memory` has left it."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _virtual_bytes() -> int:
    """Address space in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
