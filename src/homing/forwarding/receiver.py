"""A worker's private socket: takes the requests that other workers send, and calls the app with them.

The socket is 0600 in a 0700 directory, and whoever connects must have this process's user ID: a request's origin is the
socket it came through, which no client reaches, never something that a client can send.

Invariant: every app call, connection and descriptor here ends before `aclose` returns.

Not here: the socket itself (`private_socket.py`), and accepting (`acceptor.py`); one request's events (`exchange.py`); who may be served (the app that is called:
`homing.routing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from homing.forwarding.acceptor import Acceptor, Counters
from homing.forwarding.base import Answer
from homing.forwarding.exchange import Carrier, ReceivedRequest
from homing.forwarding.frames import ANSWER, ASK, FROM_FORWARDER, JOIN, REQUEST, SHARE, SHOW, SHOWN
from homing.forwarding.heads import read_request, request_scope
from homing.forwarding.shared_peer import Place, SharedPeer
from homing.forwarding.stream import FrameStream
from homing.forwarding.values import MalformedFrameError, decode_value, encode_value
from homing.tasks import ended
from homing.types import ASGIApp

logger = logging.getLogger(__name__)

OnAsk = Callable[[str, str, str, asyncio.Event], Awaitable[Answer]]
"""Called with kind, key, the asking worker's ID, and an event that is set when it hangs up."""

OnShow = Callable[[int], AsyncGenerator[bytes, None]]
"""Called with how many sessions at most; gives what is to be shown, in parts that are not empty."""

_MINE_WITHIN_SECONDS: Final = 0.02
_LAST_ANSWERS_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05
"""How often to look whether what was written has been sent: a transport tells nobody when it has."""

_LET_GO_WITHIN_SECONDS: Final = 0.25
"""How long the forwarders may take to close the shared connections of a worker that stops, once all has been said there."""

_SHOWN_WITHIN_SECONDS: Final = 5.0


class PeerConnection(FrameStream):
    """One connection from another worker."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self.receiver = receiver
        self.loop = receiver.loop
        self.idle_since = 0.0
        self.busy = False
        self.fresh = True
        """It has carried nothing yet. Whoever made it was just about to send, and would take its loss for our death."""
        self._request: ReceivedRequest | None = None
        self._hung_up: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self.receiver.connections.add(self)

    def frame_received(self, kind: int, head: bytes, payload: bytes) -> None:
        request = self._request
        if kind == REQUEST:
            if self.busy:
                raise MalformedFrameError("a request came before the one before it was done with")
            self.busy = True
            self._request = self.receiver.begin(self, head, payload)
        elif kind == ASK:
            if self.busy:
                raise MalformedFrameError("a question came before a request was done with")
            question = decode_value(head)
            if not (
                isinstance(question, list) and len(question) == 3 and all(isinstance(text, str) for text in question)
            ):
                raise MalformedFrameError("a question has a kind, a key and an asker")
            self.busy = True
            self._hung_up = asyncio.Event()
            self.receiver.answer(self, question[0], question[1], question[2], self._hung_up)
        elif kind == SHOW:
            limit = decode_value(head)
            if self.busy or not isinstance(limit, int) or limit < 0:
                raise MalformedFrameError("a question about sessions has a number, and comes alone")
            self.busy = True
            self.receiver.show(self, limit)
        elif request is not None:
            request.frame_received(kind, head, payload)
        elif kind == JOIN and not self.busy:
            self.busy = True
            self._request = self.receiver.join(self, decode_value(head))
            if self._request is None:
                self.exchange_ended()
        elif kind == SHARE and not self.busy:
            self._becomes_shared()
        elif kind not in FROM_FORWARDER:
            raise MalformedFrameError(f"a forwarder sent a frame of kind {kind}")
        # Anything else belongs to a request that is done with: its reply was complete before its body was.

    def malformed(self) -> None:
        self.receiver.counters.malformed += 1

    def _becomes_shared(self) -> None:
        """From here on it carries numbered frames, which are another's to read."""
        if self.receiver.closed:
            self.abort()  # LAST_READ, which says what was not read, has been said where it will be
            return
        self.receiver.connections.discard(self)
        self._undo_close_after_fork()
        # Nothing more is read here: the forwarder says nothing else before it has heard SHARED.
        self.lost = True
        shared = SharedPeer(self.receiver)
        self.transport.set_protocol(shared)
        shared.connection_made(self.transport)

    def exchange_ended(self) -> None:
        """The request or the question is done with; the connection takes another."""
        self._request = None
        self._hung_up = None
        self.busy = self.fresh = False
        self.idle_since = self.loop.time()
        if self.receiver.closed:
            self.pause_reading()
        elif self.read_paused:
            self.resume_reading()

    def ended(self) -> None:
        self.receiver.connections.discard(self)
        request, self._request = self._request, None
        if request is not None:
            request.connection_lost()
        if self._hung_up is not None:
            self._hung_up.set()


class Receiver:
    """A worker's private socket and what came through it. Made by `serve_private_socket`, which closes it.

    Attributes:
        listener: The listening socket; a forked child closes its copy.
        counters: What came through it.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        listener: socket.socket,
        *,
        state: Callable[[], dict[str, Any] | None],
        on_ask: OnAsk | None,
        on_show: OnShow | None,
        idle_seconds: float,
        context: contextvars.Context | None,
    ) -> None:
        self.listener = listener
        self.counters = Counters()
        self.loop = asyncio.get_running_loop()
        self.connections: set[PeerConnection] = set()
        self.shared: set[SharedPeer] = set()
        self._nothing_shared: asyncio.Event | None = None
        self.called: dict[int, Place] = {}
        """The exchanges that a forwarder has yet to join to a connection of their own."""
        self._calls = 0
        self.app = app
        self._path = path
        self.state = state
        self._on_ask = on_ask
        self._on_show = on_show
        self._idle_seconds = idle_seconds
        self.context = contextvars.copy_context() if context is None else context
        self.requests: dict[ReceivedRequest, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.nothing_in_flight: asyncio.Event | None = None
        """Set by `ended`, once somebody has waited for it."""
        self.started: list[ReceivedRequest] = []
        """Those whose reply started in this turn of the event loop."""
        self.flush_due = False
        """A timer will write what waits for something to share a write with."""
        self._ticker = self.loop.call_later(idle_seconds / 4, self._tick)
        self._acceptor = Acceptor(
            listener,
            self.loop,
            lambda: PeerConnection(self),
            make_room=lambda: self._drop_idle(used_before=float("inf"), keep_fresh=True),
            counters=self.counters,
        )
        self.closed = False
        self.cancels = False
        """Requests that still run are cancelled, by this worker: it stops."""
        self.ends_websockets = False
        """A WebSocket that is accepted is closed at once."""

    def __repr__(self) -> str:
        return f"<Receiver: {self.in_flight} in flight, {len(self.connections)} connections>"

    @property
    def in_flight(self) -> int:
        """Requests whose app call has not returned, and questions not answered yet."""
        return len(self.requests) + len(self._tasks)

    def end_websockets(self) -> None:
        """Close those that are open, and those to come: nothing else would end them before their time is over."""
        self.ends_websockets = True
        for request in list(self.requests):
            request.end_websocket()

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until nothing is in flight, and all replies are sent; False if that takes more than `timeout_seconds`.

        New requests are taken.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.in_flight or self._unsent():
                    if not self.in_flight:
                        await asyncio.sleep(_LOOK_SECONDS)
                        continue
                    self.nothing_in_flight = self.nothing_in_flight or asyncio.Event()
                    self.nothing_in_flight.clear()
                    await self.nothing_in_flight.wait()
        except TimeoutError:
            return not self.in_flight and not self._unsent()
        return True

    def _unsent(self) -> bool:
        return (
            bool(self.called)
            or any(connection.unsent for connection in self.connections)
            or any(shared.unsent for shared in self.shared)
        )

    async def aclose(self) -> None:
        """Stop listening, let what has arrived be answered, cancel what takes longer, drop all connections.

        Safe to call twice. What has not been read stays unread, so that its sender sees a reset, and knows that it did
        not run, or is said to be unread (LAST_READ); what has been read is the router's to answer (*not mine*, from a worker that
        has drained).
        """
        if self.closed:
            return
        self.closed = True
        self._ticker.cancel()
        await self._acceptor.aclose()
        for connection in self.connections:
            if not connection.busy and not connection.inside_a_frame:
                connection.pause_reading()
        for shared in self.shared:
            shared.say_last_read()
        await self.drain(_LAST_ANSWERS_SECONDS)
        self.cancels = True
        tasks = [*self.requests.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await ended(tasks)
        self.requests.clear()
        for connection in list(self.connections):
            connection.abort()
        await self._wait_for_forwarders()
        for shared in list(self.shared):
            shared.abort()

    async def _wait_for_forwarders(self) -> None:
        """Wait until they have closed the shared connections, but not long.

        Closed here, such a connection would fail at the forwarder's next write, and what it has yet to read there would be lost.
        """
        if self.shared:
            self._nothing_shared = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LET_GO_WITHIN_SECONDS):
                    await self._nothing_shared.wait()

    def shared_ended(self, shared: SharedPeer) -> None:
        self.shared.discard(shared)
        if self._nothing_shared is not None and not self.shared:
            self._nothing_shared.set()

    # --- connections ---

    def _drop_idle(self, used_before: float, *, keep_fresh: bool = False) -> None:
        for connection in list(self.connections):
            idle = not connection.busy and not connection.inside_a_frame and connection.idle_since <= used_before
            if idle and connection.unsent:
                connection.idle_since = self.loop.time()  # dropped now, a reply that its app has completed would be cut
            elif idle and not (keep_fresh and connection.fresh):
                connection.abort()

    def _tick(self) -> None:
        self._acceptor.keep_spare()
        self._drop_idle(used_before=self.loop.time() - self._idle_seconds)
        self._ticker = self.loop.call_later(self._idle_seconds / 4, self._tick)

    # --- requests ---

    def begin(self, connection: Carrier, head: bytes, payload: bytes) -> ReceivedRequest:
        """Call the app with a request that has arrived over `connection`."""
        contents = read_request(head)
        scope = request_scope(contents)
        request = ReceivedRequest(connection, contents, scope, payload)
        self.counters.received += 1
        state = self.state()
        if state is not None:
            scope["state"] = state.copy()
        self.requests[request] = self.loop.create_task(request.run(self, scope), context=self.context.copy())
        return request

    def call(self, place: Place) -> int:
        """What the forwarder is to join the exchange with."""
        self._calls += 1
        self.called[self._calls] = place
        return self._calls

    def join(self, connection: PeerConnection, call: object) -> ReceivedRequest | None:
        """The exchange that was called goes on over `connection`; None if there is nothing more to be said of it."""
        if not isinstance(call, int) or not 0 < call <= self._calls:
            raise MalformedFrameError("an exchange was joined that was not called")
        place = self.called.pop(call, None)
        if place is None:
            # Its client has left. What says so came over the shared connection, and has overtaken this.
            connection.abort()
            return None
        return place.join(connection)

    def ended(self) -> None:
        """A request or a question has ended, while somebody waits until none is in flight."""
        if self.nothing_in_flight is not None and not self.in_flight:
            self.nothing_in_flight.set()

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.ended()
        if not task.cancelled() and task.exception() is not None:
            logger.error("a worker's question was not answered", exc_info=task.exception())

    def flush_started(self) -> None:
        """Write the starts of the replies that began in this turn of the loop, where no body has taken them along."""
        requests, self.started = self.started, []
        for request in requests:
            if request.unsent_start is not None:
                request.flush()

    def flush_later(self) -> None:
        """Write each *mine* soon that no reply has taken along by then. One timer for all requests."""
        self.flush_due = True
        self.loop.call_later(_MINE_WITHIN_SECONDS, self._flush)

    def _flush(self) -> None:
        self.flush_due = False
        for request in self.requests:
            request.flush()

    # --- questions ---

    def answer(self, connection: PeerConnection, kind: str, key: str, asker: str, hung_up: asyncio.Event) -> None:
        self.counters.asked += 1
        self._own(self.loop.create_task(self._answer(connection, kind, key, asker, hung_up)))

    async def _answer(
        self, connection: PeerConnection, kind: str, key: str, asker: str, hung_up: asyncio.Event
    ) -> None:
        try:
            answer = Answer.NOT_MINE if self._on_ask is None else await self._on_ask(kind, key, asker, hung_up)
        except BaseException:
            connection.abort()
            raise
        connection.write(ANSWER, encode_value(int(answer), "the answer"))
        connection.exchange_ended()

    def show(self, connection: PeerConnection, limit: int) -> None:
        self._own(self.loop.create_task(self._show(connection, limit)))

    async def _show(self, connection: PeerConnection, limit: int) -> None:
        try:
            if self._on_show is not None:
                async with contextlib.aclosing(self._on_show(limit)) as parts:
                    async for part in parts:
                        # Whoever asked and does not read holds up nothing but the answer, and no longer than a moment.
                        async with asyncio.timeout(_SHOWN_WITHIN_SECONDS):
                            await connection.writable()
                        if not connection.write(SHOWN, b"", part):
                            return
        except TimeoutError:
            connection.abort()
            return
        except BaseException:
            connection.abort()
            raise
        connection.write(SHOWN)
        connection.exchange_ended()
