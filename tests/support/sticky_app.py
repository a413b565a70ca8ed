"""An app that is routed in its own module, and whose handlers use what homing offers them.

GET /                                the worker's process ID as the last word of a text
POST /sessions                       a new session: {"session", "worker"}
GET /sessions/{id}                   {"count", "worker"}; 404 if it is unknown here
POST /sessions/{id}/finish           ends it from inside (`homing.end`)
POST /sessions/{id}/touch/{other}    {"count"} of the other session, or {"here": false} (`homing.serving`)
GET /sessions/{id}/hold              replies once
POST /sessions/{id}/let-go           has come
GET /sessions/{id}/pipe?path=…       the text that somebody writes into that FIFO
POST /sessions/{id}/echo             the body, piece by piece
WebSocket /sessions/{id}/talk        each text, once the session's count was added
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import homing

counts: dict[str, int] = {}
held: dict[str, asyncio.Event] = {}


async def who(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"worker {os.getpid()}")


async def start(request: Request) -> JSONResponse:
    session = secrets.token_urlsafe(16)
    counts[session] = 0
    return JSONResponse({"session": session, "worker": homing.worker_id()})


async def look(request: Request) -> JSONResponse:
    session = request.path_params["session"]
    if session not in counts:
        return JSONResponse({"worker": homing.worker_id()}, 404)
    counts[session] += 1
    return JSONResponse({"count": counts[session], "worker": homing.worker_id()})


async def finish(request: Request) -> JSONResponse:
    homing.end(request.scope)
    counts.pop(request.path_params["session"], None)
    return JSONResponse({})


async def touch(request: Request) -> JSONResponse:
    other = request.path_params["other"]
    try:
        with homing.serving(request.scope, other):
            counts[other] += 1
            return JSONResponse({"here": True, "count": counts[other]})
    except homing.NotHereError:
        return JSONResponse({"here": False})


async def hold(request: Request) -> JSONResponse:
    await held.setdefault(request.path_params["session"], asyncio.Event()).wait()
    return JSONResponse({"held": True})


async def let_go(request: Request) -> JSONResponse:
    held.setdefault(request.path_params["session"], asyncio.Event()).set()
    return JSONResponse({})


async def pipe(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await asyncio.to_thread(Path(request.query_params["path"]).read_text))


async def echo(request: Request) -> StreamingResponse:
    # Read first: the response listens for the client's leaving, and would take the body for itself.
    read = [chunk async for chunk in request.stream()]

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in read:
            yield chunk

    return StreamingResponse(chunks(), media_type="application/octet-stream")


async def talk(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        counts[websocket.path_params["session"]] += 1
        await websocket.send_text(f"{text} {counts[websocket.path_params['session']]}")


app = homing.sticky(
    Starlette(
        routes=[
            Route("/", who),
            Route("/sessions", start, methods=["POST"]),
            Route("/sessions/{session}", look),
            Route("/sessions/{session}/finish", finish, methods=["POST"]),
            Route("/sessions/{session}/touch/{other}", touch, methods=["POST"]),
            Route("/sessions/{session}/hold", hold),
            Route("/sessions/{session}/let-go", let_go, methods=["POST"]),
            Route("/sessions/{session}/pipe", pipe),
            Route("/sessions/{session}/echo", echo, methods=["POST"]),
            WebSocketRoute("/sessions/{session}/talk", talk),
        ]
    ),
    sessions=[homing.path("/sessions/{session}")],
    learn=[homing.body("session", "/sessions")],
    starts=["POST /sessions"],
    idle_seconds=float(os.environ.get("TEST_IDLE_SECONDS", "86400")),
)
