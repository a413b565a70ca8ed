"""What the public socket's HTTP protocol adds: where a request's head ended, how to cut a reply, whether a client that waits is
still there, and connections that move to another worker.

uvicorn with httptools appends a request's trailers to the list of headers that the app sees; a trailer never names a
session, so the length of the head is kept. A reply that was cut must look cut: one that ends with its connection
(HTTP/1.0) looks complete once the connection is closed, so it is reset.

uvicorn arms a timer with every reply and cancels it with the next request; here one timer stays, and looks when it fires
since when the connection is idle.

Not here: other protocols. Under h11 or zttp no key is set, all headers count, and connections stay. How replies are written
is in `replies.py`, how a connection gets to another worker in `handoff.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from typing import Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from homing.forwarding.base import WHOLE_BODY_SCOPE_KEY
from homing.identity import HEAD_LENGTH_SCOPE_KEY
from homing.routing import SESSION_ID_SCOPE_KEY
from homing.routing.middleware import ABORT_SCOPE_KEY, CLIENT_LEFT_SCOPE_KEY, FORWARDED_SCOPE_KEY
from homing.runtime.handoff import MAX_MOVES, MOVES_AFTER, SETTLED_AFTER, Handoffs
from homing.runtime.replies import QuickReply, ReplyWriter, turn_of
from homing.runtime.underneath import connections_can_move, replies_are_known
from homing.types import Receive, Scope, WorkerId

# On, for 0 s: what is unsent is dropped, and the peer gets a reset where a close would look like an end. socket(7).
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

# That the peer sends no more is told by POLLHUP alone on macOS, which has no POLLRDHUP.
_ENDED: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_LOOK_SECONDS: Final = 0.5
"""How often is looked whether a client has left whose connection is not read from."""

_CYCLES_ARE_KNOWN: Final = connections_can_move()
_REPLIES_ARE_KNOWN: Final = replies_are_known()


class HomingHttpToolsProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol, which also sets up to five keys of an HTTP scope.

    `homing.head_length`: how many of the headers are the head's (int); later ones are trailers.
    `homing.abort`: a callable without arguments that resets the client's connection.
    `homing.client_left`: where starts may wait in the queue, a coroutine function that returns once the client has left.
    `homing.whole_body`: gives the body if all of it is here (`homing.forwarding.base`).
    `homing.forwarded`: where connections may move, a callable that is told which other worker has handled the request.
    """

    # What is mostly so stands on the class.
    _starts_wait = False
    _lost: asyncio.Event | None = None
    _moves = 0
    """How often it has moved without having settled since; `MAX_MOVES` stands for that or more."""
    _answered = 0
    _last = False
    """This worker leaves, and the connection cannot move: the reply to its next request is the last."""
    _asked_for: WorkerId | None = None
    """The other worker that handled the connection's last request; what follows says how many in a row."""
    _asked_at = 0
    _in_a_row = 0
    _idle_since: float | None = None
    """When its last reply had left, on the loop's clock; None while a request is under way, or before there was one."""

    def on_headers_complete(self) -> None:
        scope: Scope = self.scope  # type: ignore[assignment]  # of which uvicorn has a type that knows no keys of ours
        scope[HEAD_LENGTH_SCOPE_KEY] = len(self.headers)
        scope[ABORT_SCOPE_KEY] = self.reset_connection
        if self._starts_wait:
            scope[CLIENT_LEFT_SCOPE_KEY] = self.client_left
        if self._handoffs is not None:
            scope[FORWARDED_SCOPE_KEY] = self.forwarded
        if _CYCLES_ARE_KNOWN:
            scope[WHOLE_BODY_SCOPE_KEY] = self.whole_body
        super().on_headers_complete()
        cycle = self.cycle
        if self._last and cycle is not None:
            cycle.keep_alive = False
        # A HEAD's reply is complete without another write, and the protocol may close the connection at once after it.
        if cycle is not None and cycle.scope is scope and scope["method"] != "HEAD":
            self._replies.begins = True
            cycle.transport = self._replies_as_transport
            if _REPLIES_ARE_KNOWN:
                QuickReply.serve(cycle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._replies = ReplyWriter(transport, turn_of(self.loop))
        self._replies_as_transport = cast("asyncio.Transport", self._replies)
        self._starts_wait = getattr(self.config, "starts_wait", False)
        self._handoffs: Handoffs | None = getattr(self.config, "handoffs", None) if self.scheme == "http" else None
        if self._moves:
            # Idle, as it was at the worker that it comes from, and for as long.
            self._idle_since = self.loop.time()
            self._look_after(self.timeout_keep_alive)

    def whole_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body of the request with this scope, if all of it is here and nothing of it was taken.

        None too if `receive` is not the one that it would be taken by: what is around it may make another body of it.
        """
        cycle = self.cycle
        if cycle.scope is not scope or cycle.more_body or not cycle.body or receive != cycle.receive:
            return None
        return bytes(cycle.body)

    # --- how long it may be idle ---

    def on_response_complete(self) -> None:
        self._answered += 1
        begins_the_next = bool(self.pipeline)
        if begins_the_next or self.timeout_keep_alive_task is None or self.transport.is_closing():
            super().on_response_complete()  # which else arms the timer
        else:
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        if not begins_the_next:
            self._idle_since = self.loop.time()

    def _unset_keepalive_if_required(self) -> None:
        """A request has begun, or the connection has ended. The timer stays: to arm one with each reply costs far more."""
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the next reply arms it again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._look_after(left)
        else:
            super().timeout_keep_alive_handler()

    def _look_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _end_timer(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)
        if self._lost is not None:
            self._lost.set()

    async def client_left(self) -> None:
        """Return once the client's connection has ended.

        An end is not heard while the connection is not read from, more of a body having come than is kept, or a next
        request: it is looked for.
        """
        self._lost = self._lost or asyncio.Event()
        while not (self.transport.is_closing() or self._has_ended()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._lost.wait()

    def _has_ended(self) -> bool:
        ends = select.poll()
        ends.register(self.transport.get_extra_info("socket"), _ENDED)
        return bool(ends.poll(0))

    # --- moving to another worker ---

    def has_moved(self, moves: int) -> None:
        """Say, before it is connected, that this connection comes from another worker, and has moved so often unsettled."""
        self._moves = moves

    def forwarded(self, owner: WorkerId) -> None:
        """`owner` has answered this connection's last request. Enough of those in a row take the connection there."""
        asked_before, self._asked_at = self._asked_at, self._answered
        if self._answered - asked_before != 1 or owner != self._asked_for:
            if self._answered - asked_before > SETTLED_AFTER:
                self._moves = 0
            self._asked_for = owner
            self._in_a_row = 1
            return
        self._in_a_row += 1
        enough = MOVES_AFTER if self._moves < MAX_MOVES else SETTLED_AFTER
        if self._in_a_row >= enough and self._handoffs is not None:
            self._handoffs.counters.about_to_follow += 1
            # Once the reply is on its way: the server has handed its end to the transport, which writes it in this turn.
            self.loop.call_soon(self._move, self._handoffs, owner)

    def _move(self, handoffs: Handoffs, owner: WorkerId) -> None:
        """Give the connection to `owner`, if it is idle; else it stays, and the next forwarded request tries again."""
        handoffs.counters.about_to_follow -= 1
        if self._is_idle() and self._give(handoffs, owner, min(self._moves + 1, MAX_MOVES)):
            handoffs.counters.followed += 1

    def _is_idle(self) -> bool:
        """The last reply has left in full, if there was a request at all, and nothing of a next one was read."""
        cycle = self.cycle
        if cycle is None:
            return self.scope is None and not self.transport.is_closing()
        return bool(
            self.scope is cycle.scope  # nothing of a next request was read
            and cycle.response_complete
            and not cycle.more_body
            and cycle.keep_alive
            and not self.pipeline
            and not self.transport.is_closing()
            and self._replies.empty
        )

    def _give(self, handoffs: Handoffs, to: WorkerId, moves: int) -> bool:
        descriptor = self.transport.get_extra_info("socket").fileno()
        if not handoffs.give(to, descriptor, moves):
            return False
        # Nothing can have been read in between: this is one block without an await.
        self._end_timer()
        self.transport.abort()
        return True

    # --- as this worker leaves ---

    @property
    def can_leave(self) -> bool:
        """Whether it could move to another worker once it is idle. Its worker leaving, it may do so once more than otherwise."""
        return self.scheme == "http" and getattr(self.config, "handoffs", None) is not None

    @property
    def waits_to_leave(self) -> bool:
        """It could move now, if another worker took it."""
        return self.can_leave and self._is_idle()

    @property
    def has_asked(self) -> bool:
        """A request has begun on it."""
        return self.scope is not None

    @property
    def is_asking(self) -> bool:
        """A request has begun on it whose head is not whole: no task serves it yet, and the server takes it for idle."""
        return self.scope is not None and (self.cycle is None or self.scope is not self.cycle.scope)

    @property
    def session_id(self) -> str | None:
        """The session of the last request that was served here."""
        found: str | None = None if self.cycle is None else self.cycle.scope.get(SESSION_ID_SCOPE_KEY)  # type: ignore[assignment]
        return found

    @property
    def asks_for(self) -> WorkerId | None:
        """The other worker that handled a request of this connection last."""
        return self._asked_for

    def leave(self, to: WorkerId) -> bool:
        """Give the connection to `to`, if it is idle; else it stays."""
        handoffs: Handoffs | None = getattr(self.config, "handoffs", None)
        if handoffs is None or not self.waits_to_leave:
            return False
        # One that has moved has its time to stay idle begun; one that was only just made has not.
        return self._give(handoffs, to, self._moves if self.cycle is None else max(1, self._moves))

    def answer_last(self) -> None:
        """The connection stays, so its client is told with the next reply to make another."""
        self._last = True

    def send_400_response(self, msg: str) -> None:
        self._replies.flush()
        super().send_400_response(msg)

    def reset_connection(self) -> None:
        """Reset the client's connection, so that no reply on it can look complete. Nothing happens if it is closed."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            # Closed already, the client having left: asyncio's socket says so with an OSError, uvloop's with a ValueError.
            with contextlib.suppress(OSError, ValueError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()
