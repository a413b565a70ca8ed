"""The running servers of this user: found by their run directories, and what their workers say.

A server describes itself in `server.json` in its run directory, and holds `server.lock` while it runs. One whose directory the user
has chosen elsewhere leaves a link where the others are, so that it is found too.

Not here: how it is shown (`homing.cli`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from homing.errors import ConfigurationError, RunDirectoryError
from homing.rundir import (
    LINK_PREFIX,
    NEW_DESCRIPTION,
    SERVER_DESCRIPTION,
    SERVER_LOCK,
    RunDirectory,
    cannot_be_made,
    check_run_directory,
    run_directory_bases,
)
from homing.types import WorkerId
from homing.watch.figures import Figures, decode_figures
from homing.watch.page import read_rows


class Description(msgspec.Struct, frozen=True):
    """What a supervisor says of its server.

    Attributes:
        pid: The supervisor's.
        address: `127.0.0.1:8000` or `[::1]:8000`, or the path of a Unix socket.
        app: As on the command line.
        workers: How many it was started with.
        began: When it started, as `homing.clock.boot_seconds` tells.
        version: homing's.
    """

    pid: int
    address: str
    app: str
    workers: int
    began: float
    version: str


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        path: Its run directory.
        alive: What its living workers say, in the order they started.
        dead: What those had said that have exited since.
    """

    path: str
    description: Description
    alive: tuple[Figures, ...]
    dead: tuple[Figures, ...]

    @property
    def all(self) -> tuple[Figures, ...]:
        return self.alive + self.dead


@contextlib.contextmanager
def describe(path: str, description: Description) -> Iterator[None]:
    """Say what server has the run directory, while it runs.

    Raises:
        RunDirectoryError: it cannot be said there, since there is no room, say.
    """
    with RunDirectory.open(path) as directory, contextlib.ExitStack() as stack:
        stack.callback(_unlink, SERVER_DESCRIPTION, directory.fd)
        _write(directory, msgspec.json.encode(description))
        if not _lies_with_the_others(path):
            stack.enter_context(_linked(path, description.pid))
        yield


def _write(directory: RunDirectory, content: bytes) -> None:
    try:
        # New, and no link: what an earlier server left was removed when this one took the directory.
        fd = os.open(NEW_DESCRIPTION, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory.fd)
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(NEW_DESCRIPTION, SERVER_DESCRIPTION, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    except OSError as error:
        raise cannot_be_made(os.path.join(directory.path, SERVER_DESCRIPTION), error) from error


@contextlib.contextmanager
def _linked(path: str, pid: int) -> Iterator[None]:
    """A link to a run directory, where the others are; none if there is no such place, or no room."""
    link = None
    with contextlib.suppress(OSError, StopIteration):
        link = os.path.join(next(run_directory_bases()), f"{LINK_PREFIX}{pid}")
        _unlink(link)  # of a dead process that had the same number
        os.symlink(path, link)
    try:
        yield
    finally:
        if link is not None:
            _unlink(link)


def _unlink(name: str, directory: int | None = None) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _lies_with_the_others(path: str) -> bool:
    return os.path.basename(path).startswith("homing-") and os.path.dirname(path) in run_directory_bases()


def running_servers() -> list[Server]:
    """This user's servers with several workers, in the order they started."""
    found = {}
    for base in run_directory_bases():
        with contextlib.suppress(OSError), os.scandir(base) as entries:
            for entry in entries:
                if not entry.name.startswith("homing-"):
                    continue
                if entry.is_symlink():
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                            continue
                path = os.path.realpath(entry.path)
                server = look_at(path)
                if server is not None:
                    found[path] = server
    return sorted(found.values(), key=lambda server: (server.description.began, server.path))


def find_server(name: str) -> Server:
    """The server that a user names: by its address, a port, its supervisor's process ID, or its run directory.

    Raises:
        ConfigurationError: none, or more than one, is called so; the message lists them.
    """
    if os.path.isdir(name):
        server = look_at(os.path.realpath(name))
        if server is not None:
            return server
    servers = running_servers()
    found = [each for each in servers if name in _names(each)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{each.description.address} [{each.description.pid}]" for each in servers) or "none"
    if found:
        raise ConfigurationError(f"more than one server is called {name}; running: {listed}")
    raise ConfigurationError(
        f"no running server is called {name}; running: {listed} (a server with one worker routes nothing, and is not listed)"
    )


def _names(server: Server) -> tuple[str, ...]:
    address = server.description.address
    return (address, address.rpartition(":")[2], str(server.description.pid), server.path)


def look_at(path: str) -> Server | None:
    """The server that has this run directory; None if none has."""
    try:
        check_run_directory(path)
        if not _is_locked(os.path.join(path, SERVER_LOCK)):
            return None
        with open(os.path.join(path, SERVER_DESCRIPTION), "rb") as file:
            description = msgspec.json.decode(file.read(), type=Description)
        rows = [figures for row in read_rows(path) if (figures := decode_figures(row)) is not None]
        alive: list[Figures] = []
        dead: list[Figures] = []
        with RunDirectory.open(path) as directory:
            for figures in rows:
                (dead if directory.is_dead(WorkerId(figures.worker)) else alive).append(figures)
    except (OSError, RunDirectoryError, msgspec.MsgspecError):
        return None
    return Server(path, description, tuple(alive), tuple(dead))


def _is_locked(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
