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
from homing.forwarding.frames import FROM_OWNER, MINE, MINE_FIRST, PREFIX, PULL, WHOLE
from homing.forwarding.shared import SharedConnection
from homing.forwarding.stream import FRAME_COST_BYTES, READ_AHEAD_BYTES, FrameStream
from homing.forwarding.values import MalformedFrameError
from homing.histogram import Histogram
from homing.types import WorkerId

MAX_LIVE: Final = 100_000
"""Requests under way to one owner; more are answered 503, as a full backlog is."""

MAX_IDLE: Final = 64
"""Connections kept for later to one owner."""

Frame = tuple[int, bytes, bytes]

WHOLE_AT_ONCE: Final = WHOLE | MINE_FIRST
"""The usual answer, in one frame. An exchange that waits for a frame gets it as it is, and is not told of *mine* before."""


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
        self.frames: deque[Frame] = deque()
        """What has arrived and was not taken."""
        self._waiting_bytes = 0
        self.waiter: asyncio.Future[Frame | None] | None = None
        """Awaited by whoever found no frame: gets the next one, or None if the connection is lost."""

    def frame_received(self, kind: int, head: bytes, payload: bytes) -> None:
        waiter = self.waiter
        if kind == WHOLE_AT_ONCE and waiter is not None and not waiter.done():
            self.answer_by = 0.0
            self.waiter = None
            waiter.set_result((kind, head, payload))
            return
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
        if waiter is not None and not waiter.done():
            self.waiter = None
            waiter.set_result((kind, head, payload))
            return
        self.frames.append((kind, head, payload))
        self._waiting_bytes += len(head) + len(payload) + FRAME_COST_BYTES
        if self._waiting_bytes > READ_AHEAD_BYTES:
            self.pause_reading()

    def write_first(self, kind: int, head: bytes, payload: bytes = b"") -> bool:
        """Write the first frame of an exchange. If the other end has closed already, that counts as a failed write.

        An idle connection may have ended since it was taken: False, nothing was written, and nobody has read anything.
        """
        # Like `write`, which is called for the rest: this is done for every request.
        if not (payload or self.lost or self.transport.is_closing()):
            self.transport.write(PREFIX.pack(kind | len(head) << 8, 0) + head)
            return True
        if self.write(kind, head, payload):
            return True
        error = BrokenPipeError(errno.EPIPE, "the connection was closed before anything was written")
        self.abort(error)
        self.error = error
        return False

    def ended(self) -> None:
        self.answer_by = 0.0
        self.pool.forget(self)
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def frame_that_waits(self) -> Frame:
        """The owner's next frame, which is in `frames`."""
        _, head, payload = taken = self.frames.popleft()
        self._waiting_bytes -= len(head) + len(payload) + FRAME_COST_BYTES
        if self.read_paused and self._waiting_bytes <= READ_AHEAD_BYTES // 2:
            self.resume_reading()
        return taken

    async def next_frame(self) -> Frame | None:
        """The owner's next frame; None if the connection is lost. One is awaited at a time."""
        if self.frames:
            return self.frame_that_waits()
        if self.lost:
            return None
        waiter: asyncio.Future[Frame | None] = self.pool.loop.create_future()
        self.waiter = waiter
        return await waiter


class OwnerPool:
    """The connections to one owner.

    Args:
        hops: How long owners took to say *mine*; borrowed.
        shared_from: As for `Forwarder`.
    """

    def __init__(
        self, owner: WorkerId, path: str, loop: asyncio.AbstractEventLoop, hops: Histogram, shared_from: int
    ) -> None:
        self.owner = owner
        self.hops = hops
        self.path = path
        self.loop = loop
        self.connections: set[OwnerConnection] = set()
        """All of them: those in `idle`, and those that carry something."""
        self.opening = 0
        self.idle: list[OwnerConnection] = []
        self.shared: SharedConnection | None = None
        """The connection that small exchanges share, where many are under way."""
        self.shares_again_at = 0.0
        """Not before is it tried to have one."""
        self._shared_from = shared_from
        self._peak = 0
        self._peak_before = 0
        """The most requests under way at once since it was last looked at, and between then and the look before."""

    @property
    def under_way(self) -> int:
        """How many connections of their own carry something, or are about to."""
        return len(self.connections) - len(self.idle) + self.opening

    def meets_many(self) -> bool:
        """Whether, with one more, many requests are under way at once, or were a moment ago: then small ones share a connection."""
        shared = self.shared
        count = 1 + len(self.connections) - len(self.idle) + self.opening + (len(shared.exchanges) if shared else 0)
        self._peak = max(self._peak, count)
        return self._peak >= self._shared_from or self._peak_before >= self._shared_from

    def take(self) -> OwnerConnection | None:
        """An idle connection, the one used last first; None if there is none."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.lost and not connection.transport.is_closing():
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
        if not connection.lost:
            self.connections.add(connection)
        return connection

    async def open_shared(self) -> None:
        """Make a connection that small exchanges share; it is used once the owner says that it takes them.

        Raises:
            OwnerRefusedError, OwnerBusyError: as `open`.
        """
        connected = connect(self.path, self.owner)
        self.opening += 1
        try:
            _, shared = await self.loop.create_unix_connection(lambda: SharedConnection(self), sock=connected)
        except BaseException:
            connected.close()
            raise
        finally:
            self.opening -= 1
        if self.shared is not None:
            shared.abort()  # another was made meanwhile, and nobody would ever close this one
        elif not shared.lost:
            self.shared = shared
            shared.open()

    def forget_shared(self, shared: SharedConnection) -> None:
        """The shared connection is lost."""
        if self.shared is shared:
            self.shared = None

    def unused(self) -> bool:
        return not (self.connections or self.opening or self.shared)

    def _check_room(self) -> None:
        if self.under_way >= MAX_LIVE:
            raise OwnerBusyError(
                f"{self.under_way} requests are under way to worker {self.owner}, and no more are sent"
            )

    def give_back(self, connection: OwnerConnection) -> None:
        """Both ends are done with what the connection carried."""
        connection.exchange = None
        connection.answer_by = 0.0
        if connection.lost:
            return
        if len(self.idle) >= MAX_IDLE or connection.frames or connection.read_paused:
            connection.abort()
            return
        connection.idle_since = self.loop.time()
        self.idle.append(connection)

    def forget(self, connection: OwnerConnection) -> None:
        """The connection is lost."""
        self.connections.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def drop_idle(self, used_before: float) -> None:
        """Close the connections that were last used before that time on the loop's clock."""
        for connection in [each for each in self.idle if each.idle_since <= used_before]:
            connection.abort()
        if self.shared is not None and self.shared.idle and self.shared.used_at <= used_before:
            self.shared.abort()

    def expire(self, now: float) -> None:
        """Drop what waits for an owner that has not said *mine* or *not mine* in time; called now and then."""
        self._peak_before, self._peak = self._peak, 0
        for connection in [each for each in self.connections if 0.0 < each.answer_by <= now]:
            connection.timed_out = True
            connection.abort()
        if self.shared is not None:
            self.shared.expire(now)

    def drop(self) -> None:
        """Close all connections: the owner refuses, or the forwarder is done."""
        for connection in list(self.connections):
            connection.abort()
        if self.shared is not None:
            self.shared.abort()


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
