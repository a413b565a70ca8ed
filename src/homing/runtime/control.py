"""Asking a running server's supervisor for something, over a socket in its run directory (`control.sock`, 0600).

One JSON document a line, in both directions. The one request is `{"drain": <worker's process ID>}`; replies follow as the drain
goes on, each with a `state`: `waiting`, `starting`, `draining`, then `drained`, `failed` or `refused`, which is the last.

The invariant: the supervisor never waits for who asks. What cannot be sent at once is dropped with its connection; what was
asked goes on without anybody listening.

Not here: draining (`supervisor.py`), and what a user sees of it (`homing.cli`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Final, Literal, Self

import msgspec

from homing.errors import RunDirectoryError, StartupError
from homing.forwarding.acceptor import peer_uid
from homing.rundir import CONTROL_SOCKET, close_after_fork

State = Literal["waiting", "starting", "draining", "drained", "failed", "refused"]

_LONGEST_REQUEST: Final = 1024
_MOST_ASKERS: Final = 32


class Request(msgspec.Struct, frozen=True):
    """What is asked. `drain`: the process ID of the worker that is to leave."""

    drain: int


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far it is.

    Attributes:
        state: `waiting` for other workers to leave; `starting` its replacement; `draining`, and gone: `drained`; or
            `failed`, and the worker goes on; or `refused`.
        replacement: The process ID of the worker that serves in its place.
        sessions: How many were still open when the time was over, and have ended with the worker.
        why: What failed.
    """

    state: State
    replacement: int | None = None
    sessions: int | None = None
    why: str | None = None

    @property
    def last(self) -> bool:
        """Nothing follows."""
        return self.state in ("drained", "failed", "refused")


_encode = msgspec.json.Encoder().encode
_request = msgspec.json.Decoder(Request)
_progress = msgspec.json.Decoder(Progress)


class Asker:
    """Someone who has asked, and is told how it goes on while it listens. Owned by `Control`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._undo = close_after_fork(connection)
        self._received = b""

    def tell(self, progress: Progress) -> None:
        """Say how far it is. Whoever does not read is told no more."""
        if self.connection.fileno() < 0:
            return
        line = _encode(progress) + b"\n"
        try:
            whole = self.connection.send(line) == len(line)
        except OSError:
            whole = False
        if not whole or progress.last:
            self.close()

    def take(self) -> Request | None:
        """The request, once it is whole. Closed if it never will be."""
        try:
            data = self.connection.recv(_LONGEST_REQUEST)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._received += data
        line, ended, _ = self._received.partition(b"\n")
        if ended:
            self._received = b""
            try:
                return _request.decode(line)
            except msgspec.MsgspecError:
                self.tell(Progress("refused", why="that is no request that this version of homing knows"))
        elif not data or len(self._received) > _LONGEST_REQUEST:
            self.close()
        return None

    def close(self) -> None:
        self._undo()
        self.connection.close()


class Control:
    """The supervisor's end. `handles` become readable when there is something to `take`. Owns all its sockets."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, CONTROL_SOCKET)
        self._askers: list[Asker] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(self._path)
            os.chmod(self._path, 0o600)  # nobody can connect before `listen`
            self._file = os.lstat(self._path)
            self._listener.listen(_MOST_ASKERS)
        except OSError as error:
            self._listener.close()
            raise RunDirectoryError(f"{self._path} cannot be made: {error.strerror}") from error

    @property
    def handles(self) -> list[socket.socket]:
        askers = [each.connection for each in self._askers if each.connection.fileno() >= 0]
        return askers if len(askers) >= _MOST_ASKERS else [self._listener, *askers]

    def take(self) -> Iterator[tuple[Asker, Request]]:
        """What was asked since last time. Does not wait."""
        with contextlib.suppress(OSError):
            while len(self._askers) < _MOST_ASKERS:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if peer_uid(connection) != os.geteuid():
                    connection.close()
                    continue
                self._askers.append(Asker(connection))
        for asker in list(self._askers):
            if asker.connection.fileno() >= 0 and (request := asker.take()) is not None:
                yield asker, request
        self._askers = [each for each in self._askers if each.connection.fileno() >= 0]

    def close(self) -> None:
        """Close everything; whoever still listens sees that the server has gone. Twice is fine."""
        for asker in self._askers:
            asker.close()
        # While the listener is open no other file gets its file's number: the socket at the path may be another server's.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self._path), self._file):
                os.unlink(self._path)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_to_drain(run_directory: str, pid: int, *, look_seconds: float) -> Iterator[Progress | None]:
    """Ask for a worker to be drained, and give how it goes on until it is over; None whenever that took `look_seconds`.

    Raises:
        StartupError: the server does not answer, or has stopped meanwhile.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(look_seconds)
            connection.connect(os.path.join(run_directory, CONTROL_SOCKET))
            connection.sendall(_encode(Request(pid)) + b"\n")
        except OSError as error:
            raise StartupError(
                f"the server cannot be asked to drain a worker: {error.strerror or error}; is it of an older version?"
            ) from error
        received = b""
        while True:
            try:
                data = connection.recv(_LONGEST_REQUEST)
            except TimeoutError:
                yield None
                continue
            except OSError:
                data = b""
            if not data:
                raise StartupError("the server has stopped before the worker had drained")
            received += data
            while b"\n" in received:
                line, _, received = received.partition(b"\n")
                progress = _progress.decode(line)
                yield progress
                if progress.last:
                    return
