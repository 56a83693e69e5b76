"""Calls of the Linux kernel with which a process drops privileges, without root.

User, process, network and mount namespaces (namespaces(7)), Landlock (landlock(7)) and seccomp
filters (seccomp(2)). Every function raises OSError if the system refuses it, unless documented
otherwise. The standard library has none of them.
"""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import stat
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

LINUX = sys.platform == "linux"

# System calls -------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None
_SET_PDEATHSIG, _SET_DUMPABLE, _KEEP_CAPS, _GET_SECCOMP, _SET_SECCOMP = 1, 4, 8, 21, 22
_SET_SUBREAPER, _NO_NEW_PRIVS = 36, 38
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_NOSUID, _NODEV, _NOEXEC, _REC_PRIVATE = 2, 4, 8, 1 << 14 | 1 << 18  # of mount(2)
_DETACH = 2  # of umount2(2)


def call(name: str, *arguments) -> int:
    """Call a function of the C library; raise OSError if it fails."""
    converted = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = getattr(_libc, name)(*converted)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(number: int, *arguments) -> int:
    return call("syscall", number, *arguments)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    if LINUX:
        call("prctl", _SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends."""
    if LINUX:
        call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)


# Processes ----------------------------------------------------------------------------------------

FORK_S = 10.0  # seconds to wait while the machine has no room for a process


def fork() -> int:
    """Call os.fork(); BlockingIOError if the machine has no room for a process for seconds."""
    end = time.monotonic() + FORK_S
    while True:
        try:
            return os.fork()
        except OSError as error:
            if not is_short(error):
                raise
            if time.monotonic() > end:
                raise BlockingIOError(*error.args) from error
        time.sleep(0.1)


def is_short(error: OSError) -> bool:
    """Return True if the machine has no room for a process, which may be temporary."""
    return error.errno in (errno.EAGAIN, errno.ENOMEM)


def hide_memory() -> None:
    """Prevent unprivileged processes from reading this one's memory, or its children's."""
    call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def children(pid: str = "self") -> list[str]:
    """Return the pids of a process's children from /proc, as far as available."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            path = f"/proc/{pid}/task/{task}/children"
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
                found += file.read().split()
    return found


def cpu_seconds(pid: int = 0) -> float:
    """Return CPU time of a process and its descendants, alive or waited for; 0 if unavailable.

    pid: 0: all descendants of this process, but not itself.
    """
    ticks = 0
    processes = [str(pid)] if pid else children()
    while processes:
        process = processes.pop()
        with contextlib.suppress(OSError):  # it has ended: it counts where it is waited for
            with open(f"/proc/{process}/stat", "rb") as file:
                # utime, stime, cutime, cstime of proc_pid_stat(5), after the name in brackets.
                ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
            processes += children(process)
    return ticks * _TICK


# Users --------------------------------------------------------------------------------------------

_SET_USER = 1 << 7  # CAP_SETUID
_RIGHTS = _SET_USER | 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6  # CAP_CHOWN, _DAC_OVERRIDE, _KILL, _SETGID


def _other_users() -> range:
    """Return user ids besides root that root has here; none if this process is not root."""
    if not LINUX or os.geteuid() != 0:
        return range(0)
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        first, _, count = map(int, file.readlines()[-1].split())
    return range(max(first, 1), first + count)


def is_unlimited() -> bool:
    """Return True if the kernel does not limit this user's processes: root outside a namespace."""
    return bool(_other_users())


def own_user() -> int:
    """Return a user id for child processes; 0 if this is not root, or lacks root's privileges.

    No two live processes have the same one.
    """
    users = _other_users()
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/self/status", encoding="utf-8") as file,
    ):
        rights = int(next(line for line in file if line.startswith("CapEff")).split()[1], 16)
        if users and rights & _RIGHTS == _RIGHTS:
            return users[-1 - os.getpid() % (len(users) // 2)]
    return 0


def give_up_root(user: int, as_owner: bool) -> None:
    """Switch this process to an unprivileged user, permanently.

    as_owner: it keeps its owner's access to root's files. Programs that it executes do not.
    """
    call("prctl", _KEEP_CAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if as_owner:
        _set_capabilities(_SET_USER)
        _libc.setfsuid(0)
        if _libc.setfsuid(-1) != 0:  # it returns the previous one, whether or not it changes it
            raise PermissionError("setfsuid: the user of files cannot be root")
    drop_capabilities()


def acts_as_owner() -> bool:
    """Return whether this process may read root's files that its programs may not."""
    return LINUX and _libc.setfsuid(-1) % 2**32 != os.geteuid()  # ctypes reads a signed int


# Namespaces ---------------------------------------------------------------------------------------


MAX_PID = 4096


def has_few_pids() -> bool:
    """Return True if this process's namespace holds at most `MAX_PID` processes."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", encoding="utf-8") as file:
        return int(file.read()) <= MAX_PID
    return False


def enter_namespaces() -> bool:
    """Move this process's children into new namespaces; return whether the system allows it.

    Call it in a process with one thread. The next child has pid 1: all in there end with it.
    """
    if not LINUX:
        return False
    trial = fork()  # half of it done would leave a process without a user
    if trial == 0:
        try:
            unshare()
        except BlockingIOError:
            os._exit(2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
    if code == 2:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if code:
        return False
    unshare()
    return True


def unshare() -> None:
    """Move this process and its children into new namespaces.

    Raises OSError if the system does not allow it; this process must then end.
    """
    moved, done = os.pipe()
    helper = fork()  # root keeps its access to others' files only if mapped from outside
    if helper == 0:
        os.close(done)
        try:
            if os.read(moved, 1):
                _map_users(os.getppid())
                os._exit(0)
        finally:
            os._exit(1)
    os.close(moved)
    try:
        call("unshare", _NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC)
        os.write(done, b"1")
    finally:
        os.close(done)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise PermissionError("no user can be mapped into a namespace")


def _map_users(pid: int) -> None:
    """Give a process's user namespace this one's users if this is root; otherwise one user."""
    if os.geteuid() != 0:
        _write(f"/proc/{pid}/setgroups", "deny")
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        lines = [[own, own, 1]]
        if os.geteuid() == 0:
            with open(f"/proc/self/{kind}_map", encoding="utf-8") as file:
                lines = [line.split() for line in file]
        _write(f"/proc/{pid}/{kind}_map", "".join(f"{x} {x} {n}\n" for x, _, n in lines))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def own_pids() -> bool:
    """Give this process's children their own pid namespace; return whether that succeeded.

    The first child has pid 1: all in there end with it.
    """
    with contextlib.suppress(OSError):
        call("unshare", _NEW_PID)
        return True
    return False


def mount(kind: str, path: str, flags: int, options: str = "") -> None:
    call("mount", kind.encode(), path.encode(), kind.encode(), flags, options.encode())


def read_only_view() -> bool:
    """Make all file systems read-only in a new mount namespace; return whether that succeeded."""
    try:
        call("unshare", _NEW_NS)
        mount("none", "/", _REC_PRIVATE)
        with contextlib.suppress(OSError):
            mount("proc", "/proc", _NOSUID | _NODEV | _NOEXEC)
            _write("/proc/sys/kernel/pid_max", str(MAX_PID))  # of this namespace, from Linux 6.14
        # struct mount_attr: set MOUNT_ATTR_RDONLY below "/" (AT_RECURSIVE).
        _syscall(_MOUNT_SETATTR, -1, b"/", 0x8000, struct.pack("4Q", 1, 0, 0, 0), 32)
        return True
    except OSError:
        return False


# Landlock -----------------------------------------------------------------------------------------

_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_READ_FOLDER = 1 << 3
_READ = 1 << 0 | 1 << 2 | _READ_FOLDER  # execute and read files, list folders
_CHANGE = _WRITE_FILE | sum(1 << right for right in range(4, 13))  # remove and make, of all kinds


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel offers; 0: none."""
    try:
        return _syscall(_LANDLOCK_CREATE, None, 0, 1) if LINUX else 0
    except OSError:
        return 0


def restrict_files(abi: int, scratch: str, readable: Sequence[str]) -> None:
    """Allow changing files only in `scratch`, and reading only there and in `readable`.

    Newer ABIs also block TCP and signals to outside.
    """
    files = (
        _READ | _CHANGE | (abi >= 2) << 13 | (abi >= 3) << 14
    )  # rename between folders, truncate
    rules = struct.pack("3Q", files, 0b11 * (abi >= 4), 0b11 * (abi >= 6))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _syscall(_LANDLOCK_CREATE, rules, size, 0)
    for path in readable:
        with contextlib.suppress(OSError):  # what cannot be opened cannot be read
            _allow(ruleset, path, _READ)
    _allow(ruleset, os.devnull, files & (_READ | _WRITE_FILE | _TRUNCATE))
    _allow(ruleset, scratch, files)
    _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= ~_READ_FOLDER
        _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


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


def has_seccomp() -> bool:
    with contextlib.suppress(OSError):
        return platform.machine() in _CALLS and call("prctl", _GET_SECCOMP, 0, 0, 0, 0) == 0
    return False


def restrict_calls(tuning: bool, signals: bool) -> None:
    """Refuse the calls of `_CALLS`, including the groups enabled here."""
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
    call("prctl", _SET_SECCOMP, 2, header, 0, 0)


def drop_capabilities() -> None:
    """Drop all capabilities, and whatever a program could gain."""
    _set_capabilities(0)
    call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)


def _set_capabilities(rights: int) -> None:
    """Set the capabilities of this process; rights: bits of the lower half of all."""
    call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", rights, rights, *[0] * 4))


def mount_memory(path: str, size: int) -> None:
    """Mount an empty file system in memory, of at most `size` bytes."""
    mount("tmpfs", path, _NOSUID | _NODEV, f"size={size},nr_inodes=10000,mode=700")


def unmount(path: str) -> None:
    call("umount2", path.encode(), _DETACH)
