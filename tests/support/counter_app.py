"""A stateful app as people write them: sessions in a dict, and wrong data, not an error, where a session is unknown.

Each session is a counter with a random incarnation, so that a reply shows whether it came from the session's own state:

    POST /sessions                      {"session", "incarnation", "pid"}; state is made
    POST /sessions/{id}/step            {"count", "incarnation", "hollow", "pid"}; counts
    DELETE /sessions/{id}               ends
    GET /sessions/{id}/events           `data: <n>` for ever
    WebSocket /sessions/{id}/socket     echoes text, after the incarnation
    POST /sessions/{id}/fork            {"child"}: a child process that lives until it is killed
    POST /sessions/{id}/thread          {"pid"}: a thread that Python waits for, and that never ends
    GET /                               the worker's process ID as the last word of a text
    POST /start                         {"made", "incarnation", "pid"}: the session that `x-session` names, made if unknown
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import threading
from typing import Any

from homing.types import Receive, Scope, Send

sessions: dict[str, dict[str, Any]] = {}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    match scope["path"].split("/")[1:]:
        case ["sessions"]:
            session = secrets.token_urlsafe(16)
            sessions[session] = {"incarnation": secrets.token_hex(8), "count": 0}
            await _reply(
                send, {"session": session, "incarnation": sessions[session]["incarnation"], "pid": os.getpid()}
            )
        case ["start"]:
            session = dict(scope["headers"])[b"x-session"].decode()
            made = session not in sessions
            state = sessions.setdefault(session, {"incarnation": secrets.token_hex(8), "count": 0})
            await _reply(send, {"made": made, "incarnation": state["incarnation"], "pid": os.getpid()})
        case ["sessions", session]:
            sessions.pop(session, None)
            await _reply(send, {"pid": os.getpid()})
        case ["sessions", session, what]:
            hollow = session not in sessions
            state = sessions.setdefault(session, {"incarnation": secrets.token_hex(8), "count": 0})
            if what == "events":
                await _events(receive, send)
            elif what == "socket":
                await _socket(state, receive, send)
            elif what == "fork":
                await _reply(send, {"child": _forked()})
            elif what == "thread":
                threading.Thread(target=threading.Event().wait, name="endless").start()
                await _reply(send, {"pid": os.getpid()})
            else:
                state["count"] += 1
                await _reply(send, {**state, "hollow": hollow, "pid": os.getpid()})
        case _:
            await _send(send, b"text/plain", b"counter %d" % os.getpid())


async def _lifespan(receive: Receive, send: Send) -> None:
    for stage in ("startup", "shutdown"):
        await receive()
        print(f"app {stage} {os.getpid()}", flush=True)
        await send({"type": f"lifespan.{stage}.complete"})


async def _reply(send: Send, value: dict[str, Any]) -> None:
    await _send(send, b"application/json", json.dumps(value).encode())


async def _send(send: Send, content_type: bytes, data: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _events(receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    left = asyncio.create_task(_left(receive))
    number = 0
    while not left.done():
        number += 1
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
        await asyncio.wait({left}, timeout=0.05)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _socket(state: dict[str, Any], receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": state["incarnation"]})
    while (event := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": event["text"]})


def _forked() -> int:
    """A child that keeps what a fork gives it until it is killed, as a pool of worker processes would."""
    runs, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(says, b".")
        os.close(1)  # the server's log, which ends with the server
        os.close(2)
        signal.pause()
        os._exit(0)
    os.read(runs, 1)
    os.close(runs)
    os.close(says)
    return pid
