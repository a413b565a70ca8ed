"""Which sessions does a reply make known? Reads it as it passes, one event at a time, and never waits.

An ID must be owned before the bytes that carry it leave, so what may carry one is held back until it is complete: a
JSON reply as a whole, a server-sent event up to its end, the opening of a reply of another shape up to where it says
which session it is of. Everything else passes at once, unchanged and in order. The
bytes that leave are the bytes that came.

Nothing is learned from a reply of status 400 and above, from an error (a JSON-RPC error, a tool result that says
`isError`), from a `Content-Encoding` (an opening may know one), or from an ID that the request already named. What is longer than the limit
passes on unread.

Not here: what to do with an ID that was learned. The router owns it, or answers 500.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from homing.errors import BadRequestError
from homing.identity.base import Learned
from homing.identity.documents import NOT_JSON, may_hold, parse_document
from homing.identity.events import Event, EventSplitter
from homing.identity.ids import fits
from homing.identity.sources import BodyField, Headers, HeadersReader, ReplyOpening
from homing.types import Message, SessionId, with_lasting_headers

_NO_KEYS: frozenset[str] = frozenset()


class ReplyLearner:
    """Reads one reply, of a request or of a WebSocket's handshake.

    Args:
        in_headers: Read the headers of a reply, or of an accepted WebSocket.
        in_bodies: The fields of bodies that this request's route declares.
        in_events: Read the first server-sent event of a stream, beyond its JSON data.
        in_openings: Read how the reply to this very request begins.
        known: Gives the IDs that the request named, which are not news; asked only when an ID was found.
        has_body: The reply may have a body: the request was not a HEAD.
        max_held_bytes: The most that is held back.
    """

    def __init__(
        self,
        in_headers: Collection[HeadersReader],
        in_bodies: Collection[BodyField],
        in_events: Collection[Callable[[Event], Iterator[str]]],
        in_openings: Collection[ReplyOpening],
        known: Callable[[], Iterable[str]],
        *,
        has_body: bool,
        max_held_bytes: int,
    ) -> None:
        self._in_headers = in_headers
        self._in_bodies = in_bodies
        self._in_events = in_events
        self._in_openings = in_openings
        self._encoding = b""
        self._known = known
        self._seen: set[str] | None = None
        self._has_body = has_body
        self._max_held_bytes = max_held_bytes
        self._next: Callable[[Message], Learned] = self._before_head
        self._held: list[Message] = []
        self._held_ids: tuple[SessionId, ...] = ()
        self._body = bytearray()
        self._events: EventSplitter | None = None
        self.done = False

    def feed(self, message: Message) -> Learned:
        """Take the app's next event; say what may leave now, and which IDs that makes known."""
        return self._next(message)

    def __repr__(self) -> str:
        state = "done" if self.done else f"holding {len(self._held)} events" if self._held else "reading"
        return f"<ReplyLearner {state}>"

    # --- the head ---

    def _before_head(self, message: Message) -> Learned:
        kind = message["type"]
        message = with_lasting_headers(message)
        if kind == "websocket.accept":
            return self._finished((message,), self._in_reply_headers(message))
        if kind in ("websocket.close", "websocket.http.response.start"):
            return self._finished((message,))
        if kind != "http.response.start":
            return Learned((), (message,))  # early hints and the like
        status: int = message["status"]
        if status >= 400:
            return self._finished((message,))
        found = self._in_reply_headers(message)
        reads = self._body_reader(message) if self._has_body and status not in (204, 304) else None
        if reads is None:
            return self._finished((message,), found)
        self._next = reads
        if self._events is not None:
            return Learned(found, (message,))
        # The status and headers of what is held back wait too: once they left, a session that cannot be recorded has no 500.
        self._hold(message)
        self._held_ids = found
        return Learned((), ())

    def _in_reply_headers(self, message: Message) -> tuple[SessionId, ...]:
        if not self._in_headers:
            return ()
        headers: Headers = message.get("headers", ())
        found: list[str] = []
        for read in self._in_headers:
            found += read(headers)
        return self._new(found) if found else ()

    def _body_reader(self, message: Message) -> Callable[[Message], Learned] | None:
        if not self._in_bodies and not self._in_events and not self._in_openings:
            return None
        content_type, encoding, length = b"", b"", 0
        for name, value in message.get("headers", ()):
            lower = name.lower()
            if lower == b"content-type":
                content_type = content_type or value.split(b";")[0].strip().lower()
            elif lower == b"content-length" and value.isdigit():
                length = int(value[:20])
            elif lower == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                encoding = value.strip().lower()
        if self._in_openings and content_type != b"text/event-stream":
            self._encoding = encoding
            return self._read_opening
        if encoding:
            return None
        if content_type == b"text/event-stream" and (self._in_bodies or self._in_events):
            self._events = EventSplitter(self._max_held_bytes)
            return self._read_events
        if self._in_bodies and _is_json(content_type) and length <= self._max_held_bytes:
            return self._read_json
        return None

    # --- a JSON reply ---

    def _read_json(self, message: Message) -> Learned:
        self._hold(message)
        kind = message["type"]
        if kind != "http.response.body":
            # A file that the server sends by itself cannot be read here; anything else keeps its place.
            return self._released() if kind in _UNREADABLE else Learned((), ())
        self._body += message.get("body", b"")
        if len(self._body) > self._max_held_bytes:
            return self._released()
        if message.get("more_body", False):
            return Learned((), ())
        return self._released(self._in_document(self._body))

    def _released(self, found: tuple[SessionId, ...] = ()) -> Learned:
        held, self._held = tuple(self._held), []
        self._body = bytearray()
        return self._finished(held, self._held_ids + found)

    def _in_document(self, data: bytes | bytearray) -> tuple[SessionId, ...]:
        fields = [one for one in self._in_bodies if may_hold(data, one.reply_keys)]
        if not fields:
            return ()
        try:
            document = parse_document(bytes(data), _NO_KEYS)
        except BadRequestError:
            return ()
        if document is NOT_JSON:
            return ()
        return self._new(chain.from_iterable(one.in_reply(document) for one in fields))

    # --- a reply that begins in a shape of its own ---

    def _read_opening(self, message: Message) -> Learned:
        self._hold(message)
        if message["type"] != "http.response.body":
            return self._released() if message["type"] in _UNREADABLE else Learned((), ())
        self._body += message.get("body", b"")
        complete = not message.get("more_body", False)
        data = bytes(self._body)
        self._in_openings = [
            opening
            for opening in self._in_openings
            if not self._has_read(opening, data, complete or len(data) > opening.max_bytes)
        ]
        return Learned((), ()) if self._in_openings else self._released()

    def _has_read(self, opening: ReplyOpening, data: bytes, complete: bool) -> bool:
        found = opening.read(data, self._encoding, complete)
        if found is None:
            return complete
        self._held_ids += self._new(found)
        return True

    # --- server-sent events ---

    def _read_events(self, message: Message) -> Learned:
        if message["type"] != "http.response.body":
            if message["type"] in _UNREADABLE:
                return self._stop_reading_events(message)
            return Learned((), (message,))
        assert self._events is not None
        body, more = message.get("body", b""), message.get("more_body", False)
        passed, events = self._events.feed(body)
        rest_wanted = not more or (not self._in_bodies and bool(events))
        if rest_wanted:
            rest, last_events = self._events.finish()
            passed, events = passed + rest, events + last_events
        found: tuple[SessionId, ...] = ()
        for event in events:
            found += self._new(chain.from_iterable(read(event) for read in self._in_events))
            self._in_events = ()
            found += self._in_document(event.data)
        if passed != body:
            message = {**message, "body": passed}
        messages = (message,) if passed or not body or not more else ()
        return self._finished(messages, found) if rest_wanted else Learned(found, messages)

    def _stop_reading_events(self, message: Message) -> Learned:
        assert self._events is not None
        rest, _ = self._events.finish()
        if not rest:
            return self._finished((message,))
        return self._finished(({"type": "http.response.body", "body": rest, "more_body": True}, message))

    # --- shared ---

    def _hold(self, message: Message) -> None:
        """Keep an event as it is now: a server is done with it as `send` returns, so an app may use its parts for the next."""
        held = dict(message)
        if "headers" in held:
            held["headers"] = list(held["headers"])
        if "body" in held and type(held["body"]) is not bytes:
            held["body"] = bytes(memoryview(held["body"]))
        self._held.append(held)

    def _new(self, texts: Iterable[str]) -> tuple[SessionId, ...]:
        """Those of the texts that are session IDs, and news."""
        found: list[SessionId] = []
        for text in texts:
            if not text or not fits(text):
                continue
            if self._seen is None:
                self._seen = set(self._known())
            if text not in self._seen:
                self._seen.add(text)
                found.append(SessionId(text))
        return tuple(found)

    def _finished(self, messages: tuple[Message, ...], found: tuple[SessionId, ...] = ()) -> Learned:
        self.done = True
        self._next = _passing
        return Learned(found, messages)


_UNREADABLE = frozenset({"http.response.pathsend", "http.response.zerocopysend"})


def _passing(message: Message) -> Learned:
    return Learned((), (message,))


def _is_json(content_type: bytes) -> bool:
    return content_type in (b"application/json", b"text/json") or (
        content_type.startswith(b"application/") and content_type.endswith(b"+json")
    )
