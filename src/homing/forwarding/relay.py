"""One forwarded request, from the side of the worker that accepted it.

The request's events are taken from the server by a *pump*, a task that exists only while something is to be taken: the
body, or, once the owner's app waits for what the client does next, that. So the server's `receive` is called when the
app calls its own, as it is with one worker, and a request without a body needs no task.

Invariant: before *mine* at most `EARLY_BODY_BYTES` and one event are taken, and only the first frame is written.

Not here: which connection is used, and what is tried again (`forwarder.py`).
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from typing import Final

from homing.errors import (
    HomingError,
    OwnerBusyError,
    OwnerTimeoutError,
    OwnerUnreachableError,
    RemoteAppError,
    ReplyCutError,
)
from homing.forwarding.frames import (
    BODY,
    BUSY,
    EARLY_BODY_BYTES,
    END,
    GONE,
    JOIN,
    LAST,
    NOT_MINE,
    RAISED,
    REQUEST,
    START,
    WHOLE,
    WHOLE_EVENT_BYTES,
    event_frame,
    pieces,
    read_event,
)
from homing.forwarding.heads import (
    BODY_ASKED,
    BODY_NONE,
    BODY_OPEN,
    BODY_WHOLE,
    read_start,
    request_head,
    trailers_head,
)
from homing.forwarding.pool import WHOLE_AT_ONCE, Frame, OwnerConnection
from homing.forwarding.replay import Replayable
from homing.forwarding.stream import UndeliveredError
from homing.forwarding.values import MalformedFrameError, encode_value
from homing.types import Message, Reason, Scope, Send


def failed_before_answer(connection: OwnerConnection) -> HomingError:
    """What the loss of a connection means while *mine* / *not mine*, or the answer to a question, is awaited."""
    owner, error = connection.pool.owner, connection.error
    if connection.timed_out:
        return OwnerTimeoutError(f"worker {owner} did not say in time whether the session is its own")
    failure: HomingError
    if isinstance(error, BrokenPipeError | ConnectionResetError):
        failure = UndeliveredError(f"worker {owner} closed the connection before it read the request")
    elif isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.ENOTCONN, errno.EAGAIN):
        failure = OwnerBusyError(f"the backlog of worker {owner} is full")
    else:
        failure = OwnerUnreachableError(f"worker {owner} was lost before it said whether the session is its own")
    failure.__cause__ = error
    return failure


_LEFT_WITHIN_SECONDS: Final = 1.0
"""How long a server may take to say with which code a client left, once a send to it has failed."""

_WITHOUT_A_WORD_NO_BODY: Final = ("1.1", "1.0")
_SAY_OF_A_BODY: Final = frozenset({b"content-length", b"transfer-encoding", b"expect"})


def body_of(scope: Scope) -> int:
    """How the body of a request crosses, by RFC 9112, 6.3: HTTP/1 has none without one of two headers."""
    if scope["type"] != "http":
        return BODY_NONE
    found = BODY_NONE if scope.get("http_version", "1.1") in _WITHOUT_A_WORD_NO_BODY else BODY_OPEN
    for name, value in scope["headers"]:
        if name in _SAY_OF_A_BODY:
            if name == b"expect":
                if value.lower() == b"100-continue":
                    return BODY_ASKED
            elif value != b"0" or name == b"transfer-encoding":
                found = BODY_OPEN
    return found


class Relay:
    """One request over one connection. `run` is called once.

    Args:
        joins: What the owner has called the exchange with, which began on a shared connection; None: it begins here.

    Borrows the connection until the exchange ends: then it goes back to its pool, or, unless both ends are done with
    the request, is dropped.
    """

    # What is mostly so stands on the class: a request sets only what is otherwise.
    _began = 0.0
    _mine = False
    _undelivered = True
    _started = False
    _open = False
    """A WebSocket that was accepted and not closed."""
    _client_gone = False
    _closed = False
    """The server has said that a WebSocket's client has left. From then on some servers take a send for a mistake."""
    _denial: Message | None = None
    """The start of a WebSocket's denial response, until the owner's next frame."""
    _pump: asyncio.Task[None] | None = None
    _pulled = False
    """The owner's app waits for what the client does next, and the pump is not done with the body yet."""
    _failure: Exception | None = None
    _pending: deque[Frame] | None = None
    """What was taken before *mine* and did not go with the first frame."""
    _early_bytes = 0
    _sent_headers: int | None = None
    """How many headers went with the head. A server may add trailers to them while the body still comes."""
    _unblocked: asyncio.Future[None] | None = None

    def __init__(
        self, connection: OwnerConnection, tasks: set[asyncio.Task[None]], scope: Scope, joins: int | None = None
    ) -> None:
        self._connection = connection
        self._tasks = tasks
        self._scope = scope
        self._joins = joins

    async def run(
        self, timeout_seconds: float, reason: Reason, note: tuple[object, ...], receive: Replayable, send: Send
    ) -> bool:
        """Send the request and relay its reply; False for *not mine*. Raises as `forward`, and UndeliveredError."""
        connection = self._connection
        connection.exchange = self
        self._receive = receive
        self._send = send
        self._body = body = body_of(self._scope)
        self._began = connection.pool.loop.time()
        finished = False
        try:
            if self._joins is not None:
                self._mine = True
                self._body = BODY_NONE  # the owner has had it
                self._undelivered = not connection.write_first(JOIN, encode_value(self._joins, "the call"))
            elif body == BODY_NONE:
                connection.answer_by = self._began + timeout_seconds
                head = request_head(int(reason), note, self._scope, BODY_NONE, ())
                self._undelivered = not connection.write_first(REQUEST, head)
            elif body != BODY_OPEN:
                self._send_head(timeout_seconds, reason, note)
            else:
                # The pump takes what is there at once; then the head goes, whether or not that was anything.
                self._start_pump()
                connection.pool.loop.call_soon(self._send_head_soon, timeout_seconds, reason, note)
            while True:
                frame: Frame | None
                if connection.frames:
                    frame = connection.frame_that_waits()
                elif connection.lost:
                    frame = None
                else:
                    connection.waiter = waiter = connection.pool.loop.create_future()
                    frame = await waiter
                if self._denial is not None:
                    denial, self._denial = self._denial, None
                    await self._relay(denial)
                if self._failure is not None:
                    raise self._failure
                if frame is None:
                    if self._client_gone:
                        return True
                    raise await self._lost()
                kind, head, payload = frame
                if self._joins is not None and kind != BUSY:
                    self._joins = None  # it has
                if kind in (WHOLE_AT_ONCE, WHOLE):
                    if not self._mine:
                        self._observe()
                    self._mine = True
                    start = read_start(head)
                    finished = self._started = True
                    if self._pump is not None:
                        self._pump.cancel()
                    connection.pool.give_back(connection)
                    try:
                        await send(start)
                        await send({"type": "http.response.body", "body": payload, "more_body": False})
                    except OSError:
                        pass  # the client has left, and nobody is to be told
                    return True
                if kind == START:
                    start = read_start(head)
                    self._started = True
                    await self._relay(start)
                elif kind == BODY:
                    await self._relay({"type": "http.response.body", "body": payload, "more_body": True})
                elif kind == LAST:
                    finished = True
                    self._finish()
                    await self._relay({"type": "http.response.body", "body": payload, "more_body": False})
                    return True
                elif kind == END:
                    finished = True
                    self._finish()
                    return True
                elif kind == NOT_MINE:
                    finished = not self._mine
                    self._refuse_late_not_mine()
                    self._finish()
                    return False
                elif kind == BUSY and (self._joins is not None or not self._mine):
                    raise OwnerBusyError(f"worker {connection.pool.owner} has no descriptors left")
                elif kind == RAISED:
                    finished = True
                    self._finish()
                    raise RemoteAppError(
                        f"the app raised at worker {connection.pool.owner}, which logged the traceback"
                    )
                else:
                    event = read_event(kind, head, payload, "websocket.send")
                    self._note(event["type"])
                    if event["type"] == "websocket.http.response.start":
                        # The body goes with it, in one turn: uvicorn's legacy WebSockets send what they have in the next.
                        self._denial = event
                    else:
                        await self._relay(event)
        except MalformedFrameError as error:
            connection.abort(error)
            raise await self._lost() from error
        finally:
            if self._pump is not None:
                self._pump.cancel()
            if not finished:
                connection.abort()

    def _observe(self) -> None:
        pool = self._connection.pool
        pool.hops.observe(pool.loop.time() - self._began)

    def _refuse_late_not_mine(self) -> None:
        if self._mine:
            raise MalformedFrameError("an owner said not mine after mine")

    def stopped(self) -> asyncio.Task[None] | None:
        """The pump, cancelled, which may not have ended yet; None if there is none."""
        return self._pump

    def _finish(self) -> None:
        """Both ends are done. The connection may serve another request while the client still takes this reply."""
        if self._pump is not None:
            self._pump.cancel()
        self._connection.pool.give_back(self._connection)

    async def _lost(self) -> HomingError:
        """What the loss of the connection means now."""
        connection = self._connection
        owner = connection.pool.owner
        failure: HomingError
        if not self._mine or self._joins is not None:
            if self._undelivered:
                return UndeliveredError(f"the connection to worker {owner} ended before the request was written")
            return failed_before_answer(connection)
        if not self._started:
            failure = OwnerUnreachableError(f"worker {owner} was lost before its reply")
        else:
            failure = ReplyCutError(f"worker {owner} was lost inside its reply")
            if self._open:
                await self._relay({"type": "websocket.close", "code": 1011, "reason": ""})
        failure.__cause__ = connection.error
        return failure

    # --- to the owner ---

    def _send_head(self, timeout_seconds: float, reason: Reason, note: tuple[object, ...]) -> None:
        connection = self._connection
        early: list[int] = []
        payload = b""
        body = self._body
        if self._pending is not None:
            taken: list[bytes] = []
            while self._pending and body == BODY_OPEN:
                kind, _, part = self._pending[0]
                if kind > LAST or sum(early) + len(part) > EARLY_BODY_BYTES:
                    break
                self._pending.popleft()
                taken.append(part)
                early.append(len(part))
                if kind == LAST:
                    body = BODY_WHOLE
            payload = b"".join(taken)
        head = request_head(int(reason), note, self._scope, body, tuple(early))
        connection.answer_by = connection.pool.loop.time() + timeout_seconds
        self._undelivered = not connection.write_first(REQUEST, head, payload)
        self._sent_headers = len(self._scope["headers"])

    def _send_head_soon(self, timeout_seconds: float, reason: Reason, note: tuple[object, ...]) -> None:
        try:
            self._send_head(timeout_seconds, reason, note)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the exchange with an error of this side's; `run` raises it."""
        self._failure = error
        self._connection.abort(error)

    def mine_received(self) -> None:
        if self._mine:
            return
        self._mine = True
        self._observe()
        self._receive.release()
        if self._pending is not None:
            for frame in self._pending:
                self._connection.write(*frame)
            self._pending = None
        if self._unblocked is not None and not self._unblocked.done():
            self._unblocked.set_result(None)
        if self._scope["type"] == "websocket":
            self._start_pump()

    def pull_received(self) -> None:
        if self._pump is None or self._pump.done():
            self._start_pump()
        else:
            # The owner has the whole body, and the pump has yet to see that its last part was taken.
            self._pulled = True

    def _start_pump(self) -> None:
        self._pump = pump = self._connection.pool.loop.create_task(self._take())
        self._tasks.add(pump)
        pump.add_done_callback(self._tasks.discard)

    async def _take(self) -> None:
        try:
            await self._take_events()
        except Exception as error:
            self._fail(error)

    async def _take_events(self) -> None:
        """Take events from the server for the owner: up to the body's end, or the end of the client."""
        connection = self._connection
        made_up = self._body == BODY_NONE
        while not connection.lost:
            event = await self._receive()
            kind: str = event["type"]
            if kind == "http.request":
                if made_up:
                    continue
                more = bool(event.get("more_body", False))
                await self._put_body(event.get("body", b""), more)
                if not more:
                    if not self._pulled:
                        return
                    self._pulled = False
            elif kind == "http.disconnect":
                await self._put(GONE)
                return
            elif kind == "websocket.connect" and made_up:
                continue
            else:
                self._closed = kind == "websocket.disconnect"
                await self._put(*event_frame(event))
                if self._closed:
                    return

    async def _put_body(self, body: bytes, more: bool) -> None:
        if len(body) > WHOLE_EVENT_BYTES:
            for piece in pieces(body):
                await self._put(BODY, b"", piece)
            body = b""
            if more:
                return
        if more:
            await self._put(BODY, b"", bytes(body))
        else:
            await self._put(LAST, self._late_trailers(), bytes(body))

    def _late_trailers(self) -> bytes:
        if self._sent_headers is None or self._scope["type"] != "http":
            return b""
        return trailers_head(self._scope["headers"][self._sent_headers :])

    async def _put(self, kind: int, head: bytes = b"", payload: bytes = b"") -> None:
        connection = self._connection
        if self._mine:
            connection.write(kind, head, payload)
            if connection.write_paused:
                await connection.writable()
            return
        if self._pending is None:
            self._pending = deque()
        self._pending.append((kind, head, payload))
        self._early_bytes += len(payload)
        if self._early_bytes >= EARLY_BODY_BYTES:
            self._unblocked = connection.pool.loop.create_future()
            await self._unblocked
            await connection.writable()

    # --- to the client ---

    def _note(self, kind: str) -> None:
        if kind == "websocket.accept":
            self._started = self._open = True
        elif kind == "websocket.close":
            self._started, self._open = True, False
        elif kind in ("http.response.start", "websocket.http.response.start"):
            self._started = True

    async def _relay(self, event: Message) -> None:
        if self._client_gone:
            return
        try:
            await self._send(event)
        except Exception as error:
            # ASGI: a server may raise OSError from `send` after the client has left. The app at the owner is told, and
            # goes on to its end as it would here.
            if not isinstance(error, OSError) and not self._closed:
                raise
            self._client_gone = True
            if self._open and self._pump is not None:
                # The server's own event has the client's close code, and follows at once. The app is told of it first.
                await asyncio.wait([self._pump], timeout=_LEFT_WITHIN_SECONDS)
            if self._connection.exchange is not self:
                return
            if self._connection.write_paused:
                self._connection.abort()
            else:
                self._connection.write(GONE)
