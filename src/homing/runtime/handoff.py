"""Connections that move: which worker a client's connection goes to, and how it gets there.

A clear-text HTTP/1.1 connection that keeps asking for sessions of one other worker is given to that worker as a whole:
its descriptor crosses a datagram socket (`SCM_RIGHTS`), and what the client sends next is read there, at the cost of a
request that is served where it arrives.

The invariant: a connection moves only while it is idle. Its last reply has left in full and nothing of a next request has
been read, so there is no state to carry, and nothing can be half done: a client whose connection is lost on the way,
because either worker died, sees it closed before any reply. What it has sent meanwhile waits in the kernel.

Not here: forwarding, which any request gets whose connection does not move (`homing.forwarding`), and what the HTTP
protocol does on both sides (`protocol.py`).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from homing.rundir import close_after_fork, is_worker_id, worker_handoff_path
from homing.types import WorkerId

logger = logging.getLogger(__name__)

MOVES_AFTER: Final = 2
"""So many requests in a row for sessions of the same other worker, and the connection is given to it."""

MAX_MOVES: Final = 2
"""How often one connection moves so readily without settling. One that asks for sessions of many workers in turn would be moved
for nothing."""

SETTLED_AFTER: Final = 16
"""A connection that so many requests in a row have kept at one worker has settled there, and may move as readily again as a new
one. One that has used its moves up goes where so many in a row ask for. Several times what makes a move pay: it costs as much as
forwarding two or three requests."""

_WORD: Final = b"homing connection 2 "
"""What a datagram begins with; who gives it follows, and in one byte how often it has moved without settling. One descriptor comes
with it."""
_GIVEN_BACK: Final = 255
"""Instead of how often: it comes back from where there was no room, and stays, or two full workers would never stop giving it."""

_GIVER: Final = slice(len(_WORD), len(_WORD) + 32)
_SIZE: Final = _GIVER.stop + 1

_TAKEN_AT_ONCE: Final = 32
_ADOPTED_WITHIN_SECONDS: Final = 1.0
"""Adopting a connection takes no longer than a turn of the event loop; a stop does not hang on one that does."""
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
_DESCRIPTOR: Final = array.array("i", [0]).itemsize
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group. unix(7)

Adopt = Callable[[socket.socket, int], Awaitable[object]]
"""Serves a connection that came from another worker, and has moved so often without settling. Owns the socket."""


@dataclass(slots=True)
class Counters:
    """What became of connections that were to move."""

    given: int = 0
    followed: int = 0
    """Of those given, the ones that went after their requests, and not since their worker leaves."""
    about_to_follow: int = 0
    """The other worker has handled their last request, and whether they go there is decided within this turn of the loop."""
    stayed: int = 0
    """The other worker did not take it: gone, stopping, or with a full queue."""
    adopted: int = 0
    lost: int = 0
    """It came without its descriptor, for want of room, or could not be served; its client saw it closed."""
    strangers: int = 0


class Handoffs:
    """One worker's end of the connections that move. Opened and closed by its server.

    Args:
        socket_dir: The run directory.
        worker_id: This worker.
        adopt: What serves a connection that comes here.
        has_room: Whether so many connections more would be served here. One that would not goes back to the worker that it comes from.
    """

    def __init__(
        self, socket_dir: str, worker_id: WorkerId, adopt: Adopt, has_room: Callable[[int], bool] = lambda _: True
    ) -> None:
        self.counters = Counters()
        self._socket_dir = socket_dir
        self._path = worker_handoff_path(socket_dir, worker_id)
        self._adopt = adopt
        self._has_room = has_room
        self._word = _WORD + worker_id.encode()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paths: dict[WorkerId, str] = {}
        self._receiving = self._sending = _datagram_socket()
        with contextlib.ExitStack() as undo:
            undo.callback(self._receiving.close)
            self._receiving.bind(self._path)
            undo.callback(os.unlink, self._path)  # else the next try finds the name taken
            os.chmod(self._path, 0o600)
            if sys.platform == "linux":
                self._receiving.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sending = _datagram_socket()
            undo.pop_all()
        self._undo_receiving = close_after_fork(self._receiving)
        self._undo_sending = close_after_fork(self._sending)
        self._takes = self._gives = True
        self._loop.add_reader(self._receiving.fileno(), self._take)

    def __repr__(self) -> str:
        return f"<Handoffs: {self.counters.given} given, {self.counters.adopted} adopted>"

    def give(self, owner: WorkerId, descriptor: int, moves: int) -> bool:
        """Give a connection to `owner`. Does not wait.

        Args:
            descriptor: The connection's. On True the caller closes its copy, without a word to the client.
            moves: How often it has moved without settling, this time included.

        Returns:
            False: the owner did not take it, and the connection is the caller's as before.
        """
        if not self._gives:
            return False
        path = self._paths.get(owner)
        if path is None:
            path = self._paths[owner] = worker_handoff_path(self._socket_dir, owner)
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            self._sending.sendmsg([self._word + bytes([moves])], [rights], 0, path)
        except OSError as error:
            # Its queue is full, it stops, or it is dead, which forwarding finds out. The connection goes on here.
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                self._paths.pop(owner, None)
            self.counters.stayed += 1
            return False
        self.counters.given += 1
        return True

    def refuse(self) -> None:
        """Take no more connections: those that have come are adopted, and later ones stay where they are."""
        if not self._takes:
            return
        self._takes = False
        self._loop.remove_reader(self._receiving.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        if sys.platform == "linux":
            # Whoever has found the socket by then is told that it takes nothing: what came behind the last look would be
            # lost with it. (Elsewhere this would drop what has come.)
            self._receiving.shutdown(socket.SHUT_RD)
        while self._take():
            pass
        self._undo_receiving()
        self._receiving.close()

    async def taken(self) -> None:
        """As `refuse`, and wait, for a second at most, until those that have come are adopted. They may be given further."""
        self.refuse()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ADOPTED_WITHIN_SECONDS)

    async def aclose(self) -> None:
        """As `taken`; and give none away either. Safe to call twice."""
        await self.taken()
        if self._gives:
            self._gives = False
            self._undo_sending()
            self._sending.close()

    def _take(self) -> bool:
        """Adopt what has come; whether there may be more."""
        for _ in range(_TAKEN_AT_ONCE):
            try:
                data, ancillary, flags, _ = self._receiving.recvmsg(
                    _SIZE + 1,
                    socket.CMSG_SPACE(_DESCRIPTOR) + socket.CMSG_SPACE(_CREDENTIALS.size),
                    getattr(socket, "MSG_CMSG_CLOEXEC", 0),
                )
            except BlockingIOError:
                return False
            except OSError as error:
                logger.warning("cannot take a connection from another worker now: %s", error.strerror)
                return False
            self._took(data, ancillary, flags)
        return True

    def _took(self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        descriptors: list[int] = []
        user = os.geteuid()
        for level, kind, content in ancillary:
            if level != socket.SOL_SOCKET:
                continue
            if kind == socket.SCM_RIGHTS:
                whole = len(content) // _DESCRIPTOR * _DESCRIPTOR
                descriptors += array.array("i", content[:whole])
            elif sys.platform == "linux" and kind == socket.SCM_CREDENTIALS:
                user = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[1]
        giver = data[_GIVER].decode("latin-1")
        well_formed = (
            len(data) == _SIZE and data.startswith(_WORD) and is_worker_id(giver) and not flags & socket.MSG_CTRUNC
        )
        connection = None
        if user == os.geteuid() and well_formed and len(descriptors) == 1:
            connection = _connection(descriptors.pop())
        for each in descriptors:
            os.close(each)
        if connection is None:
            if user != os.geteuid():
                self.counters.strangers += 1
                logger.error("closed a connection that another user sent to this worker")
            else:
                self.counters.lost += 1
                logger.warning("lost a connection on its way from another worker: it came without its descriptor")
            return
        given_back = data[-1] == _GIVEN_BACK
        has_room = given_back or self._has_room(len(self._tasks) + 1)
        if not has_room and self.give(WorkerId(giver), connection.fileno(), _GIVEN_BACK):
            self.counters.adopted += 1  # and given on, so that the sums of all workers agree
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection, MAX_MOVES if given_back else data[-1]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, moves: int) -> None:
        try:
            connection.setblocking(False)
            connection.set_inheritable(False)
            await self._adopt(connection, moves)
        except Exception as error:
            # Mostly a client that has left meanwhile.
            self.counters.lost += 1
            logger.warning("lost a connection from another worker as it was adopted: %s", error)
            connection.close()
        else:
            self.counters.adopted += 1


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _connection(descriptor: int) -> socket.socket | None:
    """The connection that a descriptor is, over TCP or a Unix socket (`--uds`); closed, and None, if it is something else."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    if found.family in _FAMILIES and found.type == socket.SOCK_STREAM:
        return found
    found.close()
    return None
