"""Lets the project's code run as on Windows, in a process that has this folder in PYTHONPATH (and in those that it starts).

What differs there and can be stood in for: `sys.platform` and `os.name`, as the project's own modules and its tests see them;
modules and names that only POSIX has; locks by `msvcrt`; a process is not forked; what is open can be neither removed nor replaced;
no symbolic link without a privilege; no folder can be opened.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("generic_export", "t2n_llm", "quant", "kvcache", "tests"))
ABSENT_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
ABSENT_NAMES = {
    os: """
        chown chroot fchmod fchown fork forkpty fstatvfs getegid geteuid getgid getgroups getpgid getpgrp getpriority
        getsid getuid getxattr initgroups killpg lchown listxattr lockf major makedev memfd_create minor mkfifo mknod
        nice openpty pidfd_open pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread preadv pwrite
        pwritev readv register_at_fork removexattr sched_getaffinity sched_setaffinity sched_yield sendfile
        set_blocking setegid seteuid setgid setgroups setpgid setpriority setsid setuid setxattr splice statvfs sync
        sysconf tcgetpgrp tcsetpgrp uname wait wait3 wait4 waitid writev O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC
        O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE POSIX_FADV_DONTNEED POSIX_FADV_SEQUENTIAL
        POSIX_FADV_WILLNEED
    """,
    signal: """
        ITIMER_REAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1
        SIGUSR2 SIGWINCH alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending
        sigtimedwait sigwait
    """,
    select: "epoll kqueue poll",
    sys: "",
    ctypes: "",
    multiprocessing: "",
}
_checking = threading.local()


def _windows_views() -> dict[str, types.ModuleType]:
    """Return modules as the project's code is to see them."""
    views = {}
    for module, absent in ABSENT_NAMES.items():
        view = _View(module, frozenset(absent.split()))
        views[module.__name__] = view
    views["os"].__dict__["name"] = "nt"
    views["sys"].__dict__["platform"] = "win32"
    views["ctypes"].__dict__["CDLL"] = _no_library
    views["multiprocessing"].__dict__["get_all_start_methods"] = lambda: ["spawn"]
    views["multiprocessing"].__dict__["get_context"] = _spawn_alone
    views["msvcrt"] = _msvcrt()
    return views


class _View(types.ModuleType):
    """A module without some of its names."""

    def __init__(self, module: types.ModuleType, absent: frozenset[str]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _absent=absent, _replaced=[])

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:  # what is stood in for, which a test changes for a while
            self.__dict__[name] = value
        else:
            self._replaced.append((name, getattr(self._module, name, None)))
            setattr(self._module, name, value)  # sys.stdout = ...

    def __delattr__(self, name: str) -> None:
        """Undo a change: pytest and unittest.mock delete what they set, as it was not the view's own."""
        place = max(number for number, (other, _) in enumerate(self._replaced) if other == name)
        setattr(self._module, *self._replaced.pop(place))


def _no_library(name: str | None, **options: Any) -> Any:
    if name is None:
        raise TypeError("bad argument type for built-in operation")
    return _CDLL(name, **options)


def _spawn_alone(method: str | None = None) -> Any:
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return _get_context("spawn")


def _msvcrt() -> types.ModuleType:
    """Return locks on bytes, as Microsoft's C library has them: not of a whole file, and refused to the same process too."""
    import fcntl

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        assert os.lseek(descriptor, 0, os.SEEK_CUR) >= 1 << 40, "the byte would be among the file's own"
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    module = types.ModuleType("msvcrt")
    module.LK_NBLCK, module.locking = 2, locking  # type: ignore[attr-defined]
    return module


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    file = str(globals.get("__file__", "")) if globals else ""
    if not level and file.startswith(PACKAGES) and file != __file__:  # the stand-in itself needs POSIX
        if name in ABSENT_MODULES:
            raise ImportError(f"No module named {name!r} on Windows", name=name)
        if name in _VIEWS:
            return _VIEWS[name]
    return _real_import(name, globals, locals, fromlist, level)


# --- files -------------------------------------------------------------------------------------------


def _is_held(path: str) -> bool:
    """Say whether this process or one that it started has a file open or mapped that has this path, or lies below it."""
    import psutil

    place = os.path.realpath(path)
    _checking.busy = True
    try:
        processes = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        held = {file for process in processes for file in _open_files(process)}
    finally:
        _checking.busy = False
    return any(file == place or file.startswith(place + os.sep) for file in held)


def _open_files(process: int) -> set[str]:
    try:
        with open(f"/proc/{process}/maps", encoding="utf-8") as maps:
            mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")}
        return mapped | {_link(f"/proc/{process}/fd/{number}") for number in os.listdir(f"/proc/{process}/fd")}
    except OSError:  # it has ended
        return set()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _refusing(change: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return an operation of files that is refused where one of its first `count` arguments is held open."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        own = (
            sys._getframe(1).f_code.co_name == "opener"
        )  # of tempfile: what Windows removes by itself when it is closed
        for path in () if own else args[:count]:
            if ".filelock-probe-" in str(path):  # filelock does not do this on Windows
                continue
            if not getattr(_checking, "busy", False) and os.path.lexists(path) and _is_held(os.fspath(path)):
                raise PermissionError(errno.EACCES, "The process cannot access the file (WinError 32)", os.fspath(path))
        if count == 2 and change is _rename and os.path.lexists(args[1]):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", args[1])
        if count == 2 and os.path.isdir(args[1]):
            raise PermissionError(errno.EACCES, "Access is denied (WinError 5)", args[1])
        return change(*args, **kwargs)

    return changed


def _open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
    if not getattr(_checking, "busy", False) and not isinstance(path, int) and os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    return _open_descriptor(path, flags, *args, **kwargs)


def _symlink(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EPERM, "A required privilege is not held by the client (WinError 1314)", args[1])


_real_import, _CDLL, _get_context = builtins.__import__, ctypes.CDLL, multiprocessing.get_context
_rename, _open_descriptor = os.rename, os.open
_VIEWS = _windows_views()
builtins.__import__ = _import
os.unlink, os.remove = _refusing(os.unlink, 1), _refusing(os.remove, 1)
os.rename, os.replace = _refusing(os.rename, 2), _refusing(os.replace, 2)
os.open, os.symlink = _open, _symlink
shutil._use_fd_functions = False  # type: ignore[attr-defined] - removes by paths
