"""How the replies of `homing run`'s HTTP protocol leave: what uvicorn writes, in fewer writes and fewer steps.

uvicorn writes a reply's head and its body apart. A write to a TCP socket costs about 6 µs, as much as the parsing of the
whole request, so the head waits for a body that follows in the same turn of the event loop.

For each header of a reply uvicorn searches two regular expressions and compares it with three names. Of a short reply that is
more work than all that homing does for the request, so the usual reply is put together here.

Invariant: the bytes that leave, and what uvicorn then knows of the reply, are those of uvicorn's own `send`.

Not here: the connection (`protocol.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from homing.types import Message

_JOINED_BYTES: Final = 64 * 1024
"""Up to this size a body is copied behind its head for one write."""


class Turn:
    """What the connections of an event loop hold back in this turn of it: one callback for all of them has it written."""

    __slots__ = ("_writers",)

    def __init__(self) -> None:
        self._writers: list[ReplyWriter] = []

    def flush_at_its_end(self, writer: ReplyWriter) -> None:
        if not self._writers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._writers.append(writer)

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "the head of a reply cannot be written", "exception": error}
                )


_turns: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Turn]] = WeakKeyDictionary()


def turn_of(loop: asyncio.AbstractEventLoop) -> Turn:
    """The one that the connections of this event loop share."""
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = Turn()
    return turn


class ReplyWriter:
    """The transport as the replies of one connection use it: the first write of a reply joins the next one.

    It is written at the latest in the event loop's next turn, so a head whose body is still to come does not wait for it,
    and at most one write is ever held back. Borrows the transport.

    Attributes:
        begins: A reply begins, so its first write may be held back.
    """

    __slots__ = ("_held", "_transport", "_turn", "begins")

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        self._transport = transport
        self._turn = turn
        self.begins = False
        self._held: bytes | None = None

    def write(self, data: bytes) -> None:
        held = self._held
        if held is not None:
            if len(data) <= _JOINED_BYTES:
                data = held + data  # a body that is no bytes raises here, and the head is written without it
            else:
                self._transport.write(held)
            self._held = None
            self._transport.write(data)
        elif self.begins and type(data) is bytes and len(data) <= _JOINED_BYTES:
            self.begins = False
            self._held = data
            self._turn.flush_at_its_end(self)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write what is held back, unless the connection is closing."""
        held, self._held = self._held, None
        if held is not None and not self._transport.is_closing():
            self._transport.write(held)

    @property
    def empty(self) -> bool:
        """Nothing is held back, and the transport has sent all that it was given."""
        return self._held is None and not self._transport.get_write_buffer_size()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


# --- the usual reply ---

_OF_THE_CONNECTION: Final = frozenset({b"connection", b"transfer-encoding"})
_LENGTH: Final = b"content-length: "
_CONTROL: Final = bytes(code for code in range(128) if HEADER_VALUE_RE.match(bytes((code,))))
"""The bytes that uvicorn takes in no header's value; a line's end is among them."""

_MOST_NAMES: Final = 1000
_beginnings: Final[dict[bytes, bytes]] = {b"content-length": _LENGTH}
"""How the line of a header begins, by the header's name as an app spelt it."""


def _beginning(name: bytes) -> bytes | None:
    """How the line of a header begins; None: uvicorn has to look at it."""
    small = name.lower()
    if small in _OF_THE_CONNECTION or HEADER_RE.search(name):
        return None
    beginning = _LENGTH if small == b"content-length" else small + b": "
    if len(_beginnings) < _MOST_NAMES:
        _beginnings[name] = beginning
    return beginning


class _Lines:
    """The lines of the headers that the server gives every reply. It makes a new list of them when the date changes."""

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._lines: bytes | None = None

    def of(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        """None: uvicorn has to look at them."""
        if headers is not self._headers:
            self._lines = self._made(headers)
            self._headers = headers
        return self._lines

    @staticmethod
    def _made(headers: list[tuple[bytes, bytes]]) -> bytes | None:
        lines: list[bytes] = []
        for name, value in headers:
            beginning = _beginning(name)
            if beginning is None or beginning is _LENGTH or HEADER_VALUE_RE.search(value):
                return None
            lines += (beginning, value, b"\r\n")
        return b"".join(lines)


_lines_of_the_server: Final = _Lines()


class QuickReply:
    """The `send` of one reply: uvicorn's, in fewer steps where the reply is a usual one.

    That is a head with one Content-Length and with nothing about the connection, and a body that comes whole. All else is
    uvicorn's own to send, to log or to refuse, from whichever event on: what is done here leaves its cycle as it would.
    """

    __slots__ = ("_cycle", "_of_uvicorn")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._of_uvicorn: Callable[[Any], Awaitable[None]] = cycle.send

    @staticmethod
    def serve(cycle: RequestResponseCycle) -> None:
        """Have the app send by it, unless uvicorn has to log the reply. The app's task, not begun yet, gives it `cycle.send`."""
        if not cycle.access_log:
            cycle.send = QuickReply(cycle).send  # type: ignore[method-assign,assignment]

    async def send(self, message: Message) -> None:
        """As ASGI's, and uvicorn's, which raises what there is to raise."""
        cycle = self._cycle
        if not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete):
            kind = message["type"]
            if kind == "http.response.body":
                if cycle.response_started and self._end(message):
                    return
            elif kind == "http.response.start" and not cycle.response_started and self._begin(message):
                return
        await self._of_uvicorn(message)
        if cycle.response_complete and "send" in vars(cycle):
            del cycle.send

    def _begin(self, message: Message) -> bool:
        cycle = self._cycle
        of_the_server = _lines_of_the_server.of(cycle.default_headers)
        headers = message.get("headers")
        if of_the_server is None or type(headers) is not list or not cycle.keep_alive:
            return False
        length: int | None = None
        lines = []
        try:
            status_line = STATUS_LINE[message["status"]]
            for name, value in headers:
                if type(name) is not bytes:
                    return False
                beginning = _beginnings.get(name) or _beginning(name)
                if beginning is _LENGTH:
                    if length is not None or not value.isdigit():
                        return False
                    length = int(value)
                lines.append(beginning + value)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False  # uvicorn raises what there is to raise
        head = b"\r\n".join(lines)
        if length is None or len(head.translate(None, _CONTROL)) != len(head) - 2 * (len(lines) - 1):
            return False
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        cycle.chunked_encoding = False
        cycle.expected_content_length = length
        cycle.transport.write(b"".join((status_line, of_the_server, head, b"\r\n\r\n")))
        return True

    def _end(self, message: Message) -> bool:
        cycle = self._cycle
        body = message.get("body", b"")
        if (
            message.get("more_body")
            or cycle.chunked_encoding is not False
            or len(body) != cycle.expected_content_length
        ):
            return False
        cycle.expected_content_length = 0
        cycle.transport.write(body)
        cycle.response_complete = True
        del cycle.send  # they hold each other, which would keep the collector busy
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True
