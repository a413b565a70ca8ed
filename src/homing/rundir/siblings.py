"""Which processes are workers of this process's server, where no supervisor of homing's has made them?

The rule: processes are siblings if a launcher made them for one server. Two servers never meet, whoever started them; a
process that cannot be told from a server of its own is one, and says so. `docs/design/meeting-rules.md` has the whole of it.

Not here: making, checking and removing the directory itself (`places.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import multiprocessing.context
import os
import socket
import stat
import sys
from typing import Final

from homing.rundir.leftovers import begin_in, note_begun_by, remove_stale, run_directory_pid
from homing.rundir.names import SESSION_SOCKET_DIR_ENV, boot_id
from homing.rundir.places import (
    create_session_socket_dir,
    made,
    named_run_directory,
    no_base,
    remove_run_directory,
    run_directory_bases,
)
from homing.rundir.processes import namespaces, own_name, parent_in_proc, process_name, started, stat_fields

logger = logging.getLogger(__name__)

_PUBLIC_FAMILIES: Final = {socket.AF_INET, socket.AF_INET6, socket.AF_UNIX}

GRANIAN_WORKER: Final = "granian-worker"
"""What granian names the processes of its workers."""


def siblings_directory(settings: str) -> str:
    """The run directory that this process shares with the sibling workers of its launcher, ready to use.

    Siblings are the processes that one launcher (uvicorn, gunicorn, hypercorn, granian) made to serve one app at one
    address: same user, boot, PID namespace, parent process, command line and public sockets, and `settings`, which tells
    the apps of one process apart. Any other process gets a directory of its own. `homing run`, and else
    `HOMING_SESSION_SOCKET_DIR`, overrides: that directory, emptied of what an earlier server left there.

    Raises:
        RunDirectoryError: as `create_session_socket_dir`.
    """
    if named_run_directory() is not None:
        path = create_session_socket_dir()
        begin_in(path, _launcher_name())
        return path
    sockets = _sockets_of_server()
    if sockets is None:
        if _is_made_by_python():
            logger.warning(
                "this process was made by another Python process and is taken for a server of its own; if it is one of "
                "several workers of one server, name a directory for all of them with %s",
                SESSION_SOCKET_DIR_ENV,
            )
        path = create_session_socket_dir()
        note_begun_by(path, own_name())
        return path
    parent = os.getppid()
    facts = (os.getuid(), boot_id(), namespaces(), parent, started(parent_in_proc()), sys.argv, sockets, settings)
    name = f"homing-{parent}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    for base in run_directory_bases():
        remove_stale(base)
        with contextlib.suppress(OSError):
            path = made(os.path.join(base, name))
            note_begun_by(path, _launcher_name())
            return path
    raise no_base()


def made_by_launcher() -> bool:
    """Whether this process may have siblings: a launcher has made it to be one of the workers of a server."""
    return _sockets_of_server() is not None


def leave_run_directory(path: str) -> None:
    """Remove the run directory that `siblings_directory` gave, if nobody can need it any more.

    That is so if this process has it to itself, or if the launcher has gone and nobody else is in it. While the launcher
    lives, it may start workers that have to know whose sessions are gone; then the directory goes when the next server of
    this user starts.
    """
    pid = run_directory_pid(path)
    if pid is None or named_run_directory() is not None:
        return
    if pid == os.getpid():
        remove_run_directory(path)
    else:
        remove_stale(os.path.dirname(path))


def _sockets_of_server() -> tuple[int, ...] | None:
    """The public sockets that this process shares with its siblings, by inode; None: it is a server of its own.

    Empty where the launcher's process is known to be one server's alone.
    """
    process = multiprocessing.current_process()
    if not _is_made_by_python():
        return None
    if multiprocessing.parent_process() is None:
        if _is_gunicorn_worker():
            # The sockets would mislead: a later worker inherits the control socket, an earlier one does not.
            return ()
    elif process.name == GRANIAN_WORKER:
        return ()  # its workers bind sockets of their own, to one port
    elif not _is_spawned(process):
        # A child that `multiprocessing` forked has whatever its parent listens at: nothing tells what it is to serve.
        return None
    return _inherited_sockets() or None


def _is_made_by_python() -> bool:
    """Whether this process is a child of `multiprocessing`, or a fork of its parent that has run nothing else since."""
    return multiprocessing.parent_process() is not None or _is_gunicorn_worker() or _forked()


def _is_gunicorn_worker() -> bool:
    # The module alone proves nothing, since an app may import a worker class; the variable alone neither, since whatever a
    # worker starts inherits it. The arbiter sets it, in the process that it forks its workers from.
    return "gunicorn.arbiter" in sys.modules and os.environ.get("SERVER_SOFTWARE", "").startswith("gunicorn/")


def _is_spawned(process: object) -> bool:
    if isinstance(process, multiprocessing.context.SpawnProcess):
        return True
    known = (multiprocessing.context.ForkProcess, multiprocessing.context.ForkServerProcess)
    return not isinstance(process, known) and multiprocessing.get_start_method(allow_none=True) == "spawn"


def _forked() -> bool:
    """Whether this process is a fork of its parent that has run nothing else since."""
    parent = parent_in_proc()
    with (
        contextlib.suppress(OSError),
        open("/proc/self/cmdline", "rb") as own,
        open(f"/proc/{parent}/cmdline", "rb") as its,
    ):
        if own.read() == its.read():
            return True
    # A launcher that renames its processes has forked all the same: an exec would have moved the stack (field 28 of
    # proc(5)), which a fork shares with its parent.
    stacks = {tuple(stat_fields(pid)[25:26]) for pid in ("self", parent)}
    return len(stacks) == 1 and stacks.isdisjoint({(), ("0",), ("1",)})


# --- sockets ---


def _inherited_sockets() -> tuple[int, ...]:
    """The bound stream sockets that this process has from its parent, by inode.

    Bound, not listening: uvicorn and hypercorn hand down sockets that each worker listens at only once it has started.
    """
    of_parent = _sockets_of_process(parent_in_proc())
    bound = _bound_sockets()
    return tuple(sorted(bound if of_parent is None else bound & of_parent))


def _bound_sockets() -> set[int]:
    directory = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = set()
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and _is_bound(int(name)):
                found.add(status.st_ino)
    return found


def _is_bound(fd: int) -> bool:
    blocking = os.get_blocking(fd)
    with socket.socket(fileno=os.dup(fd)) as copy:
        if os.get_blocking(fd) != blocking:
            os.set_blocking(fd, blocking)  # `socket.setdefaulttimeout` would change it for whoever has it open
        if copy.type != socket.SOCK_STREAM or copy.family not in _PUBLIC_FAMILIES:
            return False
        with contextlib.suppress(OSError):
            copy.getpeername()
            return False
        name = copy.getsockname()
        return bool(name) if copy.family == socket.AF_UNIX else bool(name[1])


def _sockets_of_process(pid: str) -> set[int] | None:
    """The inodes of a process's sockets; None if they cannot be seen."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if link.startswith("socket:["):
                    found.add(int(link[8:-1]))
    except OSError:
        return None
    return found


# --- processes ---


def _launcher_name() -> str:
    """The process that decides when this worker's server begins and ends: its launcher, or itself if it has none."""
    return process_name(os.getppid(), parent_in_proc()) if _is_made_by_python() else own_name()
