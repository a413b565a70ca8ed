"""The app of `homing demo`: a dict in memory, as thousands of small servers have one.

Each session counts its own calls. An unknown session is not refused but found empty, as `setdefault` finds it: served
by the wrong process, the app answers 200 with wrong data and never fails.
"""

from __future__ import annotations

import json
import os
import uuid

from homing.types import Receive, Scope, Send

COUNTS: dict[str, int] = {}

COOKIE = b"visit"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """`POST /count` → `{"count": n, "worker": pid}`, n: the session's calls so far; `GET /worker` names no session."""
    if scope["type"] != "http":
        raise RuntimeError("this app speaks HTTP only")
    while (await receive()).get("more_body", False):
        pass
    reply: dict[str, int] = {"worker": os.getpid()}
    headers = [(b"content-type", b"application/json")]
    if scope["path"] == "/count":
        session = _session(scope)
        if session is None:
            session = uuid.uuid4().hex
            headers.append((b"set-cookie", COOKIE + b"=" + session.encode() + b"; Path=/; HttpOnly"))
        COUNTS[session] = COUNTS.get(session, 0) + 1
        reply["count"] = COUNTS[session]
    body = json.dumps(reply).encode()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _session(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, _, text = pair.strip().partition(b"=")
                if key == COOKIE:
                    return str(text.decode("latin-1"))
    return None
