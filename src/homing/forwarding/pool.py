"""The forwarder's connections to owners: how one is opened, what it waits for, which idle ones are kept.

Invariant: a connection carries one request at a time, and returns to its pool only when both ends are done with that
request; any other end of a request drops the connection, so nothing of one request is ever taken for another's.

Not here: what is sent over a connection (`forwarder.py`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from typing import Final, Protocol

from homing.errors import OwnerBusyError, OwnerRefusedError
from homing.forwarding.frames import FROM_OWNER, MINE, MINE_FIRST, PULL, MalformedFrameError
from homing.forwarding.stream import FRAME_COST_BYTES, READ_AHEAD_BYTES, FrameStream
from homing.types import WorkerId

MAX_LIVE: Final = 1000
"""Requests under way to one owner; more are answered 503, as a full backlog is."""

MAX_IDLE: Final = 64
"""Connections kept for later to one owner."""

Frame = tuple[int, bytes, bytes]


class Exchange(Protocol):
    """What a connection carries at present."""

    def mine_received(self) -> None: ...
    def pull_received(self) -> None: ...


class OwnerConnection(FrameStream):
    """One connection to an owner, idle in its pool or carrying one exchange."""

    def __init__(self, pool: OwnerPool) -> None:
        super().__init__()
        self.pool = pool
        self.exchange: Exchange | None = None
        self.answer_by = 0.0
        """When *mine* or *not mine* is due, on the loop's clock; 0 when it is not awaited."""
        self.idle_since = 0.0
        self.timed_out = False
        self._frames: deque[Frame] = deque()
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[Frame | None] | None = None

    def frame_received(self, kind: int, head: bytes, payload: bytes) -> None:
        exchange = self.exchange
        if exchange is None or kind & ~MINE_FIRST not in FROM_OWNER:
            raise MalformedFrameError(f"an owner sent a frame of kind {kind} unasked")
        if kind & MINE_FIRST or kind == MINE:
            self.answer_by = 0.0
            exchange.mine_received()
            kind &= ~MINE_FIRST
        # These two do not wait for their turn, which comes only when the client has taken the reply so far.
        if kind == MINE:
            return
        if kind == PULL:
            exchange.pull_received()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            self._waiter = None
            waiter.set_result((kind, head, payload))
            return
        self._frames.append((kind, head, payload))
        self._waiting_bytes += len(head) + len(payload) + FRAME_COST_BYTES
        if self._waiting_bytes > READ_AHEAD_BYTES:
            self.pause_reading()

    def write_first(self, kind: int, head: bytes, payload: bytes = b"") -> None:
        """Write the first frame of an exchange. If the other end has closed already, that counts as a failed write."""
        if not self.write(kind, head, payload):
            error = BrokenPipeError(errno.EPIPE, "the connection was closed before anything was written")
            self.abort(error)
            self.error = error

    def ended(self) -> None:
        self.answer_by = 0.0
        self.pool.forget(self)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def frame_that_waits(self) -> Frame | None:
        """The owner's next frame, if it has arrived."""
        if not self._frames:
            return None
        _, head, payload = taken = self._frames.popleft()
        self._waiting_bytes -= len(head) + len(payload) + FRAME_COST_BYTES
        if self.read_paused and self._waiting_bytes <= READ_AHEAD_BYTES // 2:
            self.resume_reading()
        return taken

    def next_frame(self) -> asyncio.Future[Frame | None]:
        """To be awaited when no frame waits: the next one; None if the connection is lost. One is awaited at a time."""
        waiter: asyncio.Future[Frame | None] = self.pool.loop.create_future()
        if self.lost:
            waiter.set_result(None)
        else:
            self._waiter = waiter
        return waiter

    def has_frames(self) -> bool:
        return bool(self._frames)


class OwnerPool:
    """The connections to one owner."""

    def __init__(self, owner: WorkerId, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.path = path
        self.loop = loop
        self.live: set[OwnerConnection] = set()
        self.opening = 0
        self.idle: list[OwnerConnection] = []

    def take(self) -> OwnerConnection | None:
        """An idle connection, the one used last first; None if there is none."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.lost and not connection.transport.is_closing():
                self.live.add(connection)
                return connection
        return None

    async def open(self) -> OwnerConnection:
        """A new connection.

        Raises:
            OwnerRefusedError: there is no such socket, or nobody listens on it. Nothing was sent.
            OwnerBusyError: its backlog is full, or there are no descriptors left here. Nothing was sent.
        """
        self._check_room()
        connected = connect(self.path, self.owner)
        self.opening += 1
        try:
            _, connection = await self.loop.create_unix_connection(lambda: OwnerConnection(self), sock=connected)
        except BaseException:
            connected.close()
            raise
        finally:
            self.opening -= 1
        self.live.add(connection)
        return connection

    def unused(self) -> bool:
        return not (self.live or self.idle or self.opening)

    def _check_room(self) -> None:
        if len(self.live) + self.opening >= MAX_LIVE:
            raise OwnerBusyError(
                f"{len(self.live)} requests are under way to worker {self.owner}, and no more are sent"
            )

    def give_back(self, connection: OwnerConnection) -> None:
        """Both ends are done with what the connection carried."""
        self.live.discard(connection)
        connection.exchange = None
        connection.answer_by = 0.0
        if connection.lost:
            return
        if len(self.idle) >= MAX_IDLE or connection.has_frames() or connection.read_paused:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        self.idle.append(connection)

    def forget(self, connection: OwnerConnection) -> None:
        """The connection is lost."""
        self.live.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def drop_idle(self, used_before: float) -> None:
        """Close the connections that were last used before that time on the loop's clock."""
        for connection in [each for each in self.idle if each.idle_since <= used_before]:
            connection.abort()

    def expire(self, now: float) -> None:
        """Drop the connections whose owner has not said *mine* or *not mine* in time."""
        for connection in [each for each in self.live if 0.0 < each.answer_by <= now]:
            connection.timed_out = True
            connection.abort()

    def drop(self) -> None:
        """Close all connections: the owner refuses, or the forwarder is done."""
        for connection in [*self.idle, *self.live]:
            connection.abort()


def connect(path: str, owner: WorkerId) -> socket.socket:
    """A connected, non-blocking socket. Connecting to a Unix socket never waits: it succeeds or fails at once.

    Raises:
        OwnerRefusedError, OwnerBusyError: as `OwnerPool.open` says. An error that proves neither counts as busy, since
            only a refusal may be taken for death.
    """
    try:
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise OwnerBusyError(f"no socket could be made to reach worker {owner}: {error}") from error
    try:
        connecting.setblocking(False)
        connecting.connect(path)
    except OSError as error:
        connecting.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            raise OwnerRefusedError(
                f"worker {owner} does not listen on its private socket: {error.strerror}"
            ) from error
        raise OwnerBusyError(f"worker {owner} cannot be reached now: {error.strerror or error}") from error
    return connecting
