"""Requests and replies as ASGI values, for the tests of what names a session."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

from homing.clock import Clock
from homing.identity.base import Learned, Learner
from homing.identity.cookie import ClockedSigner
from homing.types import Message, Receive, Scope


class SetClock:
    """A clock that stands where it is put."""

    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self.now = wall

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def request(
    method: str = "GET",
    path: str = "/",
    headers: Iterable[tuple[str | bytes, str | bytes]] = (),
    query: bytes = b"",
    **more: Any,
) -> Scope:
    """The scope of an HTTP request."""
    raw = [(_bytes(name), _bytes(value)) for name, value in headers]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": raw,
        "http_version": "1.1",
        "root_path": "",
        **more,
    }


def handshake(
    path: str = "/", headers: Iterable[tuple[str | bytes, str | bytes]] = (), query: bytes = b"", **more: Any
) -> Scope:
    """The scope of a WebSocket."""
    scope = request("GET", path, headers, query, **more)
    del scope["method"]
    scope["type"] = "websocket"
    return scope


def parts(*bodies: bytes, disconnect: bool = False) -> list[Message]:
    """A request's body in parts, and the disconnect after them; before its end if `disconnect`."""
    events: list[Message] = [
        {"type": "http.request", "body": body, "more_body": disconnect or number < len(bodies) - 1}
        for number, body in enumerate(bodies)
    ]
    return [*events, {"type": "http.disconnect"}]


def receiving(events: Sequence[Message]) -> Receive:
    """A `receive` that gives the events, and then waits for ever, as a server does for a client that stays."""
    left = list(events)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


async def whole_body(receive: Receive) -> tuple[bytes, Message | None]:
    """The body an app reads, and the event that cut it short, if one did."""
    body = b""
    while True:
        event = await receive()
        if event["type"] != "http.request":
            return body, event
        body += event.get("body", b"")
        if not event.get("more_body", False):
            return body, None


def start(status: int = 200, *headers: tuple[str, str | bytes]) -> Message:
    """The first event of a reply."""
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(_bytes(name), _bytes(value)) for name, value in headers],
    }


def part(body: bytes, more: bool = False) -> Message:
    """A part of a reply's body, by default the last."""
    return {"type": "http.response.body", "body": body, "more_body": more}


def learned(learner: Learner | None, *events: Message) -> list[str]:
    """The IDs that a reply makes known, in order; checks that its bytes leave as they came, and all of them do."""
    assert learner is not None
    steps = [learner.feed(event) for event in events]
    assert body_of(message for step in steps for message in step.messages) == body_of(events)
    return [one for step in steps for one in step.session_ids]


def body_of(events: Iterable[Message]) -> bytes:
    return b"".join(event.get("body", b"") for event in events)


def leaving(step: Learned) -> bytes:
    """The bytes of the body that may leave."""
    return body_of(step.messages)


def signed(session: object, secret: str, clock: Clock) -> str:
    """A cookie as the session middleware signs it at the clock's instant."""
    payload = base64.b64encode(json.dumps(session).encode())
    return ClockedSigner(secret, clock).sign(payload).decode()


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
