"""One forwarded request, from the side of the worker that owns its session: the app's events and its `Hop`.

Invariant: the app sees what the server that accepted the request would show it, and nothing of a request is left on the
connection when the exchange lets go of it. After the complete reply it lets go at once; the app may go on without it.

Not here: connections and tasks (`receiver.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from homing.forwarding.base import HOP_SCOPE_KEY
from homing.forwarding.frames import (
    BODY,
    END,
    GONE,
    LAST,
    MINE,
    MINE_FIRST,
    NOT_MINE,
    PULL,
    RAISED,
    START,
    WHOLE,
    WHOLE_EVENT_BYTES,
    event_frame,
    pieces,
    read_event,
)
from homing.forwarding.heads import BODY_NONE, BODY_OPEN, BODY_WHOLE, Request, read_trailers, start_head
from homing.forwarding.stream import FRAME_COST_BYTES, READ_AHEAD_BYTES
from homing.forwarding.values import MalformedFrameError
from homing.types import Message, Reason, Scope

if TYPE_CHECKING:
    from homing.forwarding.receiver import Receiver

logger = logging.getLogger("homing.forwarding.receiver")

_REASONS: Final = tuple(Reason)

SERVICE_RESTART: Final = 1012
"""The close code of a server that stops (IANA's registry of WebSocket close codes), and uvicorn's."""


class ClientGoneError(OSError):
    """The client, or the worker that it is connected to, has left; raised by `send` where the server's would raise."""


class Carrier(Protocol):
    """What a request's events go through: a connection of its own, or its place on a shared one."""

    loop: asyncio.AbstractEventLoop
    receiver: Receiver

    @property
    def write_paused(self) -> bool: ...
    def write(self, kind: int, head: bytes = b"", payload: bytes = b"") -> bool: ...
    async def writable(self) -> None: ...
    def exchange_ended(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


class ReceivedRequest:
    """A request that another worker sent here. Implements `Hop`.

    Borrows the connection, until the reply is complete, the app has returned, or the connection is lost.
    """

    # What is mostly so stands on the class: a request sets only what is otherwise.
    _decided = False
    _flag = 0
    """MINE_FIRST while *mine* waits for a frame to share a write with."""
    _waiting_bytes = 0
    _arrived: asyncio.Event | None = None
    _gone: Message | None = None
    """The event that says that the client has left, once it is known."""
    unsent_start: bytes | None = None
    """The reply's start, for this turn of the event loop: a body that follows at once shares its frame."""
    _in_pieces: asyncio.Event | None = None
    """While a large body event is written in pieces; set once it is, or never will be."""
    _started = False
    _accepted = False
    """A WebSocket that the app has accepted, and has not closed."""
    _trailers = False
    _first_due = False
    """The app has not taken the event that a request without a body begins with, and most such apps never do."""
    _events: deque[tuple[Message, int]] | None = None
    """What else the app has not taken yet, and what each counts towards the read-ahead."""

    def __init__(self, connection: Carrier, request: Request, scope: Scope, payload: bytes) -> None:
        self._connection: Carrier | None = connection
        try:
            self.reason = _REASONS[request.reason]
            self._send_raises = _send_raises(scope["asgi"]["spec_version"])
        except (IndexError, KeyError, ValueError, TypeError) as error:
            raise MalformedFrameError("the reason or the scope of a request cannot be read") from error
        self.note = request.note
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._is_http = scope["type"] == "http"
        self._body_open = request.body == BODY_OPEN
        """The forwarder sends the body without being asked, after *mine*."""
        self._pull_due = self._is_http and not self._body_open
        """The forwarder takes nothing from its server before it is told that the app waits."""
        if request.body == BODY_NONE or not self._is_http:
            self._first_due = True
        else:
            self._take_early(request, payload)

    def _take_early(self, request: Request, payload: bytes) -> None:
        self._events = deque()
        position = 0
        for size in request.early:
            body = payload[position : position + size]
            self._events.append(({"type": "http.request", "body": body, "more_body": True}, 0))
            position += size
        if position != len(payload) or (request.body == BODY_WHOLE and not self._events):
            raise MalformedFrameError("the early body of a request has another size than was said")
        if request.body == BODY_WHOLE:
            self._events[-1][0]["more_body"] = False

    def __repr__(self) -> str:
        return f"<ReceivedRequest {self.reason.name} {'decided' if self._decided else 'undecided'}>"

    # --- Hop ---

    def mine(self) -> None:
        if self._decided:
            raise RuntimeError("a forwarded request is decided once")
        self._decided = True
        self._flag = MINE_FIRST
        connection = self._connection
        if connection is not None:
            if self._body_open:
                connection.loop.call_soon(self.flush)
            elif not connection.receiver.flush_due:
                # Nobody waits for this answer alone: it takes the reply's write, or a later one of many.
                connection.receiver.flush_later()

    def not_mine(self) -> None:
        if self._decided:
            raise RuntimeError("a forwarded request is decided once")
        self._decided = True
        connection = self._connection
        if connection is not None:
            connection.receiver.counters.not_mine += 1
            connection.write(NOT_MINE)
            self._let_go(connection)

    def flush(self) -> None:
        """Write what waits for something to share a write with."""
        connection = self._connection
        if connection is None:
            return
        if self.unsent_start is not None:
            self._write_start(connection)
        elif self._flag:
            self._flag = 0
            connection.write(MINE)

    def _write(self, connection: Carrier, kind: int, head: bytes = b"", payload: bytes = b"") -> None:
        if self.unsent_start is not None:
            self._write_start(connection)
        if self._flag:
            kind |= self._flag
            self._flag = 0
        connection.write(kind, head, payload)

    def _write_start(self, connection: Carrier) -> None:
        assert self.unsent_start is not None
        connection.write(START | self._flag, self.unsent_start)
        self.unsent_start = None
        self._flag = 0

    def _let_go(self, connection: Carrier) -> None:
        self._connection = None
        self.unsent_start = None
        self._events = None
        self._first_due = False
        connection.exchange_ended()
        if self._arrived is not None:
            self._arrived.set()

    # --- from the forwarder ---

    def frame_received(self, kind: int, head: bytes, payload: bytes) -> None:
        """An event of the request has arrived."""
        event: Message
        if kind in (BODY, LAST):
            if not self._is_http:
                raise MalformedFrameError("a WebSocket has no body")
            event = {"type": "http.request", "body": payload, "more_body": kind == BODY}
            if kind == LAST:
                self._pull_due = True
                if head:
                    # Where uvicorn puts them, and as late; `homing.head_length` tells them from the head's own.
                    self._headers.extend(read_trailers(head))
        elif kind == GONE:
            if self._told_to_come():
                return
            self._gone = event = self._disconnect()
        else:
            event = read_event(kind, head, payload, "websocket.receive")
        cost = len(head) + len(payload) + FRAME_COST_BYTES
        if self._events is None:
            self._events = deque()
        self._events.append((event, cost))
        self._waiting_bytes += cost
        if self._waiting_bytes > READ_AHEAD_BYTES and self._connection is not None:
            self._connection.pause_reading()
        if self._arrived is not None:
            self._arrived.set()

    def _told_to_come(self) -> bool:
        """Whether the client's end is known already, or waits to be taken: from now on sends fail, and its code stays."""
        if self._gone is None and self._events and self._events[-1][0]["type"] == "websocket.disconnect":
            self._gone = self._events[-1][0]
        return self._gone is not None

    def _disconnect(self) -> Message:
        return {"type": "http.disconnect"} if self._is_http else {"type": "websocket.disconnect", "code": 1006}

    def goes_on_over(self, connection: Carrier) -> None:
        """The exchange has left its place on a shared connection, where all that it said before was said."""
        self._connection = connection

    def connection_lost(self) -> None:
        """The forwarder is gone, and the client with it."""
        self._connection = None
        self.unsent_start = None
        if not self._told_to_come():
            self._gone = self._disconnect()
        self._events = None
        self._first_due = False
        if self._arrived is not None:
            self._arrived.set()

    async def receive(self) -> Message:
        """The app's `receive`. A body beyond what came with the first frame is there only after `mine`."""
        while True:
            connection = self._connection
            if self._first_due:
                self._first_due = False
                if self._is_http:
                    return {"type": "http.request", "body": b"", "more_body": False}
                return {"type": "websocket.connect"}
            if self._events:
                event, cost = self._events.popleft()
                if event["type"] == "websocket.disconnect":
                    # Only now: what is sent to a client that is not known to have left is the server's to judge.
                    self._gone = event
                self._waiting_bytes -= cost
                if connection is not None and self._waiting_bytes <= READ_AHEAD_BYTES // 2:
                    connection.resume_reading()
                return event
            if self._gone is not None:
                return dict(self._gone)
            if connection is None:
                return self._disconnect()  # the reply is complete: as a server does, say that nothing more comes
            if not self._decided:
                raise RuntimeError("more of a forwarded request arrives only after the hop's mine()")
            if self._pull_due:
                self._pull_due = False
                self._write(connection, PULL)
            if self._arrived is None:
                self._arrived = asyncio.Event()
            self._arrived.clear()
            await self._arrived.wait()

    # --- to the forwarder ---

    async def send(self, message: Message) -> None:
        """The app's `send`: waits while the client is slow, raises or is silent after it left, as the server's would.

        Raises:
            NotCarriedError: the event holds something that cannot cross.
            ClientGoneError: the client has left, and the server's `send` raises then (ASGI spec version 2.4 and later).
            RuntimeError: the event is out of order, or the request is not this worker's.
        """
        connection = self._connection
        while connection is not None and (connection.write_paused or self._in_pieces is not None):
            if self._in_pieces is not None:
                await self._in_pieces.wait()
            else:
                await connection.writable()
            connection = self._connection
        if connection is None or self._gone is not None:
            self._send_without_client(message)
            return
        kind: str = message["type"]
        if kind == "http.response.start":
            self._send_start(connection, message)
        elif kind == "http.response.body" and len(message) <= 3:
            if not self._started:
                raise RuntimeError(f"Expected ASGI message 'http.response.start', but got '{kind}'.")
            body = message.get("body", b"")
            if type(body) is not bytes:
                body = bytes(memoryview(body))
            more = bool(message.get("more_body", False))
            if len(body) > WHOLE_EVENT_BYTES:
                await self._send_pieces(body, more)
            else:
                self._send_body(connection, body, more)
        elif not self._decided:
            raise RuntimeError("a forwarded request is answered after the hop's mine()")
        else:
            self._write(connection, *event_frame(message))
            if kind == "websocket.accept":
                self._accepted = True
                if connection.receiver.ends_websockets:
                    self.end_websocket()
            elif kind == "websocket.close":
                self._accepted = False

    def _send_body(self, connection: Carrier, body: bytes, more: bool) -> None:
        if more:
            self._write(connection, BODY, b"", body)
            return
        if self._trailers:
            # Not the end of the reply, so not LAST: that is END, when the app returns.
            self._write(connection, *event_frame({"type": "http.response.body", "body": body, "more_body": False}))
            return
        if self.unsent_start is not None:
            connection.write(WHOLE | self._flag, self.unsent_start, body)
            self._flag = 0
            self.unsent_start = None
        else:
            self._write(connection, LAST, b"", body)
        self._let_go(connection)

    async def _send_pieces(self, body: bytes, more: bool) -> None:
        """Write a large body event in pieces, each when the one before it was taken.

        A server writes an event as one, whatever other tasks of the app send and whoever cancels the one that waits here. So
        other events wait until this one is written, and a cancellation writes the rest of it at once.
        """
        self._in_pieces = written = asyncio.Event()
        left = iter(pieces(body))
        piece = next(left, None)
        try:
            # Looked for anew each time: it may join another.
            while piece is not None and (connection := self._connection_to_send_by) is not None:
                if connection.write_paused:
                    await connection.writable()
                else:
                    self._write(connection, BODY, b"", piece)
                    piece = next(left, None)
        finally:
            while piece is not None and (connection := self._connection_to_send_by) is not None:
                self._write(connection, BODY, b"", piece)
                piece = next(left, None)
            if not more and (connection := self._connection_to_send_by) is not None:
                self._send_body(connection, b"", more)
            self._in_pieces = None
            written.set()

    @property
    def _connection_to_send_by(self) -> Carrier | None:
        return self._connection if self._gone is None else None

    def _send_without_client(self, message: Message) -> None:
        if self._gone is None:
            if self._started:
                raise RuntimeError(
                    f"Unexpected ASGI message '{message['type']}' sent, after response already completed."
                )
            raise RuntimeError("a request that is not this worker's is not answered here")
        if self._send_raises:
            raise ClientGoneError("the client has left")

    def _send_start(self, connection: Carrier, message: Message) -> None:
        if not self._decided:
            raise RuntimeError("a forwarded request is answered after the hop's mine()")
        if self._started or not self._is_http:
            raise RuntimeError(f"Expected ASGI message 'http.response.body', but got '{message['type']}'.")
        head = start_head(message)
        self._started = True
        if head is None:
            self._trailers = bool(message.get("trailers", False))
            self._write(connection, *event_frame(message))
            return
        self.unsent_start = head
        started = connection.receiver.started
        if not started:
            connection.loop.call_soon(connection.receiver.flush_started)
        started.append(self)

    def end_websocket(self) -> None:
        """This worker stops: close a WebSocket that is open, and tell its app, as a server that stops does with its own."""
        connection = self._connection
        if connection is None or self._gone is not None or not self._accepted:
            return
        self._accepted = False
        self._write(connection, *event_frame({"type": "websocket.close", "code": SERVICE_RESTART, "reason": ""}))
        self._gone = {"type": "websocket.disconnect", "code": SERVICE_RESTART}
        if self._arrived is not None:
            self._arrived.set()

    # --- the app ---

    async def run(self, receiver: Receiver, scope: Scope) -> None:
        """Run the app, and tell the forwarder how it ended, unless its reply was complete."""
        # The scope holds the request, so the request does not hold the scope: cycles would keep the collector busy.
        scope[HOP_SCOPE_KEY] = self
        try:
            await receiver.app(scope, self.receive, self.send)
        except ClientGoneError:
            self._end(END)
        except BaseException:
            # Not what the task says of itself: a task group of the app's leaves it marked as cancelled when it fails, and the
            # app may cancel it too (Python 3.11).
            if receiver.cancels:
                if self._connection is not None:
                    self._connection.abort()
                raise
            # Whatever it is: servers let no SystemExit of a handler end the process, nor a cancellation that is not theirs.
            logger.exception("the app raised in a forwarded request")
            self._end(RAISED)
        else:
            if self._connection is not None:
                self._end(END)
        finally:
            # A callback on each task would cost as much as the look-up of its owner.
            receiver.requests.pop(self, None)
            if receiver.nothing_in_flight is not None:
                receiver.ended()

    def _end(self, kind: int) -> None:
        connection = self._connection
        if connection is not None:
            self._write(connection, kind)
            self._let_go(connection)


@functools.cache
def _send_raises(spec_version: str) -> bool:
    """Whether a server of that ASGI spec version raises from `send` after the client has left."""
    major, minor = spec_version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 4)
