"""Send a request to the worker that owns its session, and relay that worker's reply.

The owner first says *mine* or *not mine*. Until then the forwarder keeps what it took from the client, so that the
request can go elsewhere; after it, the request is the owner's alone.

Invariant: a request whose first frame may have been read in full is never sent again. A stream socket tells: a failed
write, or a reset, which Linux gives when the other end closed with bytes unread, and nothing but the first frame is
written before the answer.

Not here: who owns a session and what a failure means for the client (`homing.routing`); connections (`pool.py`); the
relaying of one request (`relay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from homing.errors import (
    OwnerBusyError,
    OwnerRefusedError,
    OwnerTimeoutError,
    OwnerUnreachableError,
    RemoteAppError,
    ReplyCutError,
)
from homing.forwarding.base import Answer
from homing.forwarding.frames import ANSWER, ASK, BUSY, CALL, END, NOT_MINE, RAISED, WHOLE
from homing.forwarding.heads import BODY_NONE, BODY_OPEN, BODY_WHOLE, read_start, request_head
from homing.forwarding.pool import Frame, OwnerConnection, OwnerPool
from homing.forwarding.relay import Relay, body_of, failed_before_answer
from homing.forwarding.replay import Replayable, replayable
from homing.forwarding.shared import LARGEST_REQUEST_BYTES, SHARED_FROM
from homing.forwarding.stream import UndeliveredError
from homing.forwarding.values import MalformedFrameError, decode_value, encode_value
from homing.histogram import Histogram
from homing.rundir import worker_socket_path
from homing.tasks import ended
from homing.types import Reason, Scope, Send, WorkerId

__all__ = ["Counters", "Forwarder", "Replayable", "replayable"]

_TICKS_PER_OWNER_TIMEOUT: Final = 10
_JOINED_AGAIN_SECONDS: Final = 0.05
_SHARED_AGAIN_SECONDS: Final = 1.0
"""How soon after it was tried to have a shared connection it is tried again."""


@dataclass(slots=True)
class Counters:
    """What became of requests that this worker forwarded."""

    forwarded: int = 0
    not_mine: int = 0
    refused: int = 0
    busy: int = 0
    timed_out: int = 0
    unreachable: int = 0
    cut: int = 0
    raised: int = 0
    asked: int = 0
    opened: int = 0
    shared: int = 0
    """Of `forwarded` and `not_mine`: over a connection that small exchanges share."""
    retried: int = 0
    hops: Histogram = field(default_factory=Histogram)
    """From when a request is sent until its owner's first word, which may come with the reply."""


class Forwarder:
    """Forwards requests to their owners, over one pool of connections per owner.

    Owns its pools: each opens on first use and closes when its owner refuses or the forwarder is closed. Borrows
    `receive` and `send`. Cancelled, it drops the owner's connection, so the owner's app sees a client disconnect.

    Args:
        socket_dir: Where the workers' private sockets are (`homing.rundir.worker_socket_path`).
        owner_timeout_seconds: How long an owner may take to say *mine* or *not mine*, to a tenth of it. There is no
            limit after that answer: the app may take as long as with one worker.
        idle_seconds: How long an unused connection is kept. Less than the receiver's, so that this end lets go first.
        shared_from: With so many requests under way at once to one owner, small ones share a connection.
    """

    def __init__(
        self,
        socket_dir: str,
        *,
        owner_timeout_seconds: float = 30.0,
        idle_seconds: float = 15.0,
        shared_from: int = SHARED_FROM,
    ) -> None:
        self.counters = Counters()
        self._shared_from = shared_from
        self._socket_dir = socket_dir
        self._owner_timeout = owner_timeout_seconds
        self._idle_seconds = idle_seconds
        self._tick_seconds = min(1.0, idle_seconds / 4, owner_timeout_seconds / _TICKS_PER_OWNER_TIMEOUT)
        self._pools: dict[WorkerId, OwnerPool] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        live = sum(pool.under_way + len(pool.shared.exchanges if pool.shared else ()) for pool in self._pools.values())
        idle = sum(len(pool.idle) for pool in self._pools.values())
        return f"<Forwarder: {len(self._pools)} owners, {live} live, {idle} idle{', closed' if self._closed else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Drop all connections. What is under way fails as if its owner were lost; what comes later is busy."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for pool in self._pools.values():
            pool.drop()
        self._pools.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await ended(tasks)

    async def forward(
        self,
        owner: WorkerId,
        reason: Reason,
        note: tuple[object, ...],
        scope: Scope,
        receive: Replayable,
        send: Send,
    ) -> bool:
        """Have `owner` handle a request, and relay its reply.

        Args:
            reason: Why the request is sent there.
            note: What the receiving router should know of it: values that msgpack carries.
            receive: The server's `receive`, wrapped once per request by `replayable`. What was taken from it is given
                again by the same object after False, `OwnerRefusedError` and `OwnerBusyError`, for the next try.

        Returns:
            True: the owner handled it, and its whole reply was relayed, or as much as its app sent before it returned,
            or as the client stayed for. False: the owner says *not mine*, and nothing ran.

        Raises:
            OwnerRefusedError: nothing was delivered; the worker does not listen. Dead, if the record still names it.
            OwnerBusyError: nothing was delivered; the worker is alive, and full, or this one has no descriptors.
            OwnerTimeoutError: neither *mine* nor *not mine* in time; a later answer is not heard. Outcome unknown.
            OwnerUnreachableError: the connection broke before the reply; the outcome is unknown.
            ReplyCutError: the connection broke inside the reply. A WebSocket has then been closed with 1011.
            RemoteAppError: the app raised there, where the traceback was logged; react as to an app of this worker.
            NotCarriedError: the note, or the scope, cannot cross.
            HeadTooLargeError: the scope is larger than what the owner accepts.

        Cancelled, it drops the connection; the request may have run.
        """
        counters = self.counters
        try:
            pool = self._pools.get(owner) or self._pool(owner)
            if pool.meets_many():
                handled = await self._forward_small(pool, reason, note, scope, receive, send)
                if handled is not None:
                    counters.shared += 1
                    if handled:
                        counters.forwarded += 1
                    else:
                        counters.not_mine += 1
                    return handled
                pool = self._pool(owner)
            connection = pool.take()
            pooled = connection is not None
            if connection is None:
                connection = await self._open(pool)
            while True:
                relay = Relay(connection, self._tasks, scope)
                try:
                    if await relay.run(self._owner_timeout, reason, note, receive, send):
                        counters.forwarded += 1
                        return True
                except UndeliveredError as lost:
                    # A connection that went while it was idle says nothing about its owner; a new one does.
                    await receive.rewind_after(relay.stopped())
                    if not pooled:
                        raise OwnerRefusedError(
                            f"worker {owner} closed its private socket before it read the request"
                        ) from lost.__cause__
                    counters.retried += 1
                    pooled = False
                    connection = await self._open(self._pool(owner))
                    continue
                except OwnerBusyError:
                    await receive.rewind_after(relay.stopped())
                    raise
                await receive.rewind_after(relay.stopped())
                counters.not_mine += 1
                return False
        except OwnerRefusedError:
            counters.refused += 1
            self._drop_pool(owner)
            raise
        except OwnerBusyError:
            counters.busy += 1
            raise
        except OwnerTimeoutError:
            counters.timed_out += 1
            raise
        except OwnerUnreachableError:
            counters.unreachable += 1
            raise
        except ReplyCutError:
            counters.cut += 1
            raise
        except RemoteAppError:
            counters.raised += 1
            raise

    # --- small exchanges ---

    async def _forward_small(
        self,
        pool: OwnerPool,
        reason: Reason,
        note: tuple[object, ...],
        scope: Scope,
        receive: Replayable,
        send: Send,
    ) -> bool | None:
        """Send a small request over the connection that such requests share, and see it to its end.

        Small is one whose head and whole body are here, and of few bytes.

        Returns:
            True and False: as `forward`. None: it is none, there is none, or it was provably not read.
        """
        shared, now = pool.shared, pool.loop.time()
        if shared is None or not shared.takes(now):
            self._share(pool, now)
            return None
        if scope["type"] != "http":
            return None
        body, payload = body_of(scope), b""
        early: tuple[int, ...] = ()
        if body == BODY_OPEN:
            whole = receive.whole_body(scope)
            if whole is None or len(whole) > LARGEST_REQUEST_BYTES:
                return None
            body, payload, early = BODY_WHOLE, whole, (len(whole),)
        elif body != BODY_NONE:
            return None
        head = request_head(int(reason), note, scope, body, early)
        if len(head) > LARGEST_REQUEST_BYTES:
            return None
        exchange = shared.request(head, payload, now, now + self._owner_timeout, receive.release)
        try:
            kind, head, payload = await exchange.answer
            if kind == WHOLE:
                start = read_start(head)
            elif kind == CALL:
                handled = await self._join(pool.owner, _read_call(head), scope, receive, send)
                shared.joined(exchange)
                return handled
        except UndeliveredError:
            self.counters.retried += 1
            return None
        except MalformedFrameError as error:
            shared.refuse(error)
            raise OwnerUnreachableError(f"worker {pool.owner} was lost before its reply") from error
        except BaseException:
            # Where the exchange goes on elsewhere, this says nothing to the owner.
            shared.give_up(exchange)
            raise
        if kind == WHOLE:
            try:
                await send(start)
                await send({"type": "http.response.body", "body": payload, "more_body": False})
            except OSError:
                pass  # the client has left, and nobody is to be told
            return True
        if kind == NOT_MINE:
            return False
        if kind == END:
            return True
        if kind == RAISED:
            raise RemoteAppError(f"the app raised at worker {pool.owner}, which logged the traceback")
        raise OwnerUnreachableError(f"worker {pool.owner} stopped before its reply")

    async def _join(self, owner: WorkerId, call: int, scope: Scope, receive: Replayable, send: Send) -> bool:
        """Go on over a connection of its own with an exchange that the owner has begun, and has called there."""
        give_up_at = asyncio.get_running_loop().time() + self._owner_timeout
        receive.release()
        pooled = True
        while True:
            try:
                pool = self._pool(owner)
                connection = pool.take() if pooled else None
                pooled = connection is not None
                if connection is None:
                    connection = await self._open(pool)
                relay = Relay(connection, self._tasks, scope, call)
                return await relay.run(self._owner_timeout, Reason.OWNED, (), receive, send)
            except UndeliveredError as error:
                # As in `forward`: one that went while it was idle says nothing of its owner.
                if not pooled:
                    raise OwnerUnreachableError(f"worker {owner} was lost before its reply") from error
                pooled = False
            except OwnerRefusedError as error:
                raise OwnerUnreachableError(f"worker {owner} was lost before its reply") from error
            except OwnerBusyError as error:
                # Descriptors are short. The app has begun there, and waits for this.
                if self._closed or asyncio.get_running_loop().time() >= give_up_at:
                    raise OwnerUnreachableError(f"worker {owner} could not be reached for its reply") from error
                await asyncio.sleep(_JOINED_AGAIN_SECONDS)

    def _share(self, pool: OwnerPool, now: float) -> None:
        """Have small exchanges with this owner share a connection."""
        if pool.shared is None and now >= pool.shares_again_at:
            pool.shares_again_at = now + _SHARED_AGAIN_SECONDS
            task = pool.loop.create_task(_shared(pool))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def ask(self, owner: WorkerId, kind: str, key: str, asker: WorkerId) -> Answer:
        """Ask `owner` to give the session or path `key` to `asker` (`docs/design/protocol.md`, rule 6).

        It waits as long as the connection holds. An ask with a deadline of its own would end while the owner may still give,
        and leave a record that names a worker which does not open it.

        Raises:
            OwnerRefusedError, OwnerBusyError, OwnerUnreachableError: as `forward`.

        Cancelled, it hangs up, which the owner is told; whether it has given by then is unknown.
        """
        self.counters.asked += 1
        head = encode_value([kind, key, asker], "the question")
        pool = self._pool(owner)
        connection = pool.take()
        pooled = connection is not None
        if connection is None:
            connection = await self._open(pool)
        while True:
            try:
                return await self._answer(connection, head)
            except UndeliveredError as lost:
                if not pooled:
                    self._drop_pool(owner)
                    raise OwnerRefusedError(
                        f"worker {owner} closed its private socket before it read the question"
                    ) from lost.__cause__
            self.counters.retried += 1
            pooled = False
            connection = await self._open(self._pool(owner))

    async def _answer(self, connection: OwnerConnection, head: bytes) -> Answer:
        connection.exchange = _Question()
        connection.write_first(ASK, head)
        try:
            answer = _read_answer(connection, await connection.next_frame())
        except BaseException:
            connection.abort()
            raise
        connection.pool.give_back(connection)
        return answer

    # --- pools ---

    def _pool(self, owner: WorkerId) -> OwnerPool:
        pool = self._pools.get(owner)
        if pool is None:
            if self._closed:
                raise OwnerBusyError("this worker is stopping, and forwards nothing more")
            loop = asyncio.get_running_loop()
            pool = self._pools[owner] = OwnerPool(
                owner, worker_socket_path(self._socket_dir, owner), loop, self.counters.hops, self._shared_from
            )
            if self._ticker is None:
                self._ticker = loop.call_later(self._tick_seconds, self._tick)
        return pool

    async def _open(self, pool: OwnerPool) -> OwnerConnection:
        connection = await pool.open()
        self.counters.opened += 1
        if self._closed:
            connection.abort()
            raise OwnerBusyError("this worker is stopping, and forwards nothing more")
        return connection

    def _drop_pool(self, owner: WorkerId) -> None:
        pool = self._pools.pop(owner, None)
        if pool is not None:
            pool.drop_idle(used_before=float("inf"))
            if not pool.unused():
                self._pools[owner] = pool  # requests under way end on their own, and the ticker watches over them

    def _tick(self) -> None:
        """One timer for all connections: nothing is armed, and nothing cancelled, for each request."""
        self._ticker = None
        for owner, pool in list(self._pools.items()):
            now = pool.loop.time()
            pool.expire(now)
            pool.drop_idle(used_before=now - self._idle_seconds)
            if pool.unused():
                del self._pools[owner]
        if self._pools:
            loop = asyncio.get_running_loop()
            self._ticker = loop.call_later(self._tick_seconds, self._tick)


async def _shared(pool: OwnerPool) -> None:
    # Without it everything goes over connections of its own, and it is tried again.
    with contextlib.suppress(OwnerRefusedError, OwnerBusyError, OSError):
        await pool.open_shared()


def _read_call(head: bytes) -> int:
    call = decode_value(head)
    if not isinstance(call, int):
        raise MalformedFrameError("an exchange is called with a number")
    return call


def _read_answer(connection: OwnerConnection, frame: Frame | None) -> Answer:
    if frame is None:
        raise failed_before_answer(connection)
    kind, head, _ = frame
    if kind == BUSY:
        raise OwnerBusyError(f"worker {connection.pool.owner} has no descriptors left")
    try:
        if kind == ANSWER:
            return Answer(decode_value(head))
    except (MalformedFrameError, ValueError):
        pass
    raise OwnerUnreachableError(f"worker {connection.pool.owner} answered a question with something else")


class _Question:
    """An exchange that expects one answer only."""

    def mine_received(self) -> None: ...

    def pull_received(self) -> None: ...
