"""Which session does a request's body name? Reading it, within limits, and giving it to the app once more.

Bodies are read only on declared routes. A body is read no further than it takes to see that it is no JSON document;
such a one goes on to the app as it comes. A JSON body is read whole, or refused: a session named in a part that was not
read would be missed, and its request run against another session.

The app gets the same bytes once, as one event, followed by the server's own later events. If the client left half-way,
the app gets what came and then the disconnect, as it would have.

Not here: which field counts (`sources`, `kinds`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from homing.errors import BodyTimeoutError, BodyTooLargeError, EncodedBodyError, UnavailableError
from homing.identity.documents import NOT_JSON, Json, opens_a_document, parse_document
from homing.types import Message, Receive, Scope

MAX_BODY_BYTES: Final = 2**20
"""How large a JSON body on a declared route may be, unless set."""

BODY_GAP_SECONDS: Final = 10.0
"""How long a client may take between two parts of such a body."""

BODY_SECONDS: Final = 60.0
"""How long a client may take for all of such a body."""

BUFFERED_BYTES: Final = 2**28
"""How much all bodies that are being read may hold together, per worker; beyond it, 503."""

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class Body:
    """What reading a body found.

    Attributes:
        document: The JSON document, or `NOT_JSON`.
        complete: The client sent all of it, or it is no JSON document. Not so if the client left half-way: such a body
            names nothing and starts nothing.
        receive: Gives the body once more, then the later events.
    """

    document: Json
    complete: bool
    receive: Receive


class BodyReader:
    """Reads JSON bodies within limits; one object per app, which counts what it holds of the bodies it is reading.

    Args:
        max_body_bytes: The largest JSON body.
        keys: The keys of every field that will be looked up; one that an object has twice is remembered.
        gap_seconds: The longest wait for another part of a body.
        total_seconds: The longest wait for a whole body.
        buffered_bytes: The most that bodies being read may hold at once, together.
    """

    def __init__(
        self,
        max_body_bytes: int = MAX_BODY_BYTES,
        keys: Iterable[str] = (),
        *,
        gap_seconds: float = BODY_GAP_SECONDS,
        total_seconds: float = BODY_SECONDS,
        buffered_bytes: int = BUFFERED_BYTES,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._keys = frozenset(keys)
        self._gap_seconds = gap_seconds
        self._total_seconds = total_seconds
        self._buffered_bytes = buffered_bytes
        self._held_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> Body:
        """The request's body as a JSON document, and a `receive` that gives it to the app.

        Cancelled, it leaves nothing behind but the part of the body that was taken from `receive`.

        Raises:
            EncodedBodyError: 415, the body has a Content-Encoding, so it cannot be read.
            BodyTooLargeError: 413, a JSON body is larger than `max_body_bytes`.
            BodyTimeoutError: 408, no further part came in time, or not all of it.
            BadRequestError: 400, the JSON is nested too deeply to be read.
            UnavailableError: 503, the bodies that are being read hold too much together.
        """
        length = _checked_length(scope)
        body = bytearray()
        is_document: bool | None = None
        last: Message | None = None
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(started + min(self._gap_seconds, self._total_seconds)) as limit:
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        last = message
                        break
                    part = message.get("body", b"")
                    body += part
                    self._held_bytes += len(part)
                    if is_document is None:
                        # Only blanks came before, so the part alone decides: a client that sends blanks one by one would
                        # else have all of them looked at again with each.
                        is_document = opens_a_document(part)
                    if is_document is False:
                        return Body(
                            NOT_JSON, True, _replay(bytes(body), message.get("more_body", False), None, receive)
                        )
                    if len(body) > self._max_body_bytes or (is_document and length > self._max_body_bytes):
                        raise BodyTooLargeError(f"a JSON body is larger than {self._max_body_bytes} bytes (--max-body)")
                    if not message.get("more_body", False):
                        break
                    if self._held_bytes > self._buffered_bytes:
                        raise UnavailableError(f"bodies that are being read hold over {self._buffered_bytes} bytes")
                    now = asyncio.get_running_loop().time()
                    limit.reschedule(min(now + self._gap_seconds, started + self._total_seconds))
        except TimeoutError:
            if not limit.expired():
                raise
            raise BodyTimeoutError(
                f"a body did not arrive within {self._gap_seconds} s between parts, {self._total_seconds} s in all"
            ) from None
        finally:
            self._held_bytes -= len(body)
        content = bytes(body)
        if last is not None:
            return Body(NOT_JSON, False, _replay(content, True, last, receive))
        document = parse_document(content, self._keys) if is_document else NOT_JSON
        return Body(document, True, _replay(content, False, None, receive))


def has_body(scope: Scope) -> bool:
    """Whether the request may have a body: a GET, say, without a length and without chunks has none."""
    if scope["method"] in _WITH_BODY or not scope.get("http_version", "1.1").startswith("1"):
        return True
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _checked_length(scope: Scope) -> int:
    """The declared length; 0 where none is.

    Raises:
        EncodedBodyError: the body is encoded.
    """
    length = 0
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            length = int(value[:20])
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise EncodedBodyError
    return length


def _replay(body: bytes, more: bool, last: Message | None, receive: Receive) -> Receive:
    """A `receive` that gives `body` as one event, then `last` if there is one, then what the server's own gives."""
    events: list[Message] = [] if last is None else [last]
    if body or last is None:
        events.append({"type": "http.request", "body": body, "more_body": more})

    async def replayed() -> Message:
        return events.pop() if events else await receive()

    return replayed
