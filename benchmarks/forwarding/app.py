"""The app that every setup serves: a session in a signed cookie, and a counter in this worker's memory.

`BENCH_IMPORTS` names a file of module names to import first: the memory twin of homing's workers, so that what homing
needs beyond its imports can be told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

SECRET = os.environ.get("BENCH_SECRET", "benchmark")
MINTED_SCOPE_KEY = "benchmark.minted"
"""The session ID that a router outside this app has chosen for a new session, as the seeds' router does."""

WORKER = str(os.getpid())
counts: dict[str, int] = {}

if imports := os.environ.get("BENCH_IMPORTS"):
    for name in Path(imports).read_text().split():
        # `__mp_main__` and the like cannot be imported by name, and need not be.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


async def whoami(request: Request) -> JSONResponse:
    return JSONResponse({"worker": WORKER})


async def modules(request: Request) -> JSONResponse:
    return JSONResponse(sorted(sys.modules))


async def start(request: Request) -> JSONResponse:
    session = request.scope.get(MINTED_SCOPE_KEY) or secrets.token_hex(16)
    request.session["sid"] = session
    counts[session] = 0
    return JSONResponse({"session": session, "count": 0, "worker": WORKER})


def counted(session: str) -> dict[str, object]:
    """Wrong data, not an error, for a session it never heard of, as apps with a dict of sessions do."""
    counts[session] = count = counts.get(session, 0) + 1
    return {"session": session, "count": count, "worker": WORKER}


async def step(request: Request) -> JSONResponse:
    return JSONResponse(counted(request.session.get("sid", "")))


async def echo(request: Request) -> Response:
    """What a step says, and then the request's body."""
    said = json.dumps(counted(request.session.get("sid", "")), separators=(",", ":"))
    return Response(said.encode() + await request.body(), media_type="application/octet-stream")


async def events(request: Request) -> StreamingResponse:
    """An endless stream; each event says when it was made, on the clock that all processes of a machine share."""
    session, every = request.session.get("sid", ""), float(request.query_params["every"])

    async def stream() -> AsyncIterator[str]:
        for count in itertools.count(1):
            said = {"session": session, "count": count, "worker": WORKER, "at": time.monotonic()}
            yield f"data: {json.dumps(said, separators=(',', ':'))}\n\n"
            await asyncio.sleep(every)

    # nginx collects a stream of events otherwise.
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def talk(websocket: WebSocket) -> None:
    """Each message is a step, answered with what a step says and then the message."""
    session = websocket.session.get("sid", "")
    await websocket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await websocket.receive_text()
            await websocket.send_text(json.dumps(counted(session), separators=(",", ":")) + message)


async def sink(request: Request) -> JSONResponse:
    """Reads a body of any size, keeping none of it."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
    return JSONResponse({"size": size, "worker": WORKER})


async def source(request: Request) -> StreamingResponse:
    """A body of `size` bytes, made as it is read."""
    size = int(request.query_params["size"])
    block = bytes(65536)

    async def blocks() -> AsyncIterator[bytes]:
        for offset in range(0, size, len(block)):
            yield block[: size - offset]

    return StreamingResponse(blocks(), headers={"content-length": str(size), "x-worker": WORKER})


app = Starlette(
    routes=[
        Route("/whoami", whoami),
        Route("/modules", modules),
        Route("/start", start),
        Route("/step", step),
        Route("/echo", echo, methods=["POST"]),
        Route("/events", events),
        Route("/sink", sink, methods=["POST"]),
        Route("/source", source),
        WebSocketRoute("/ws", talk),
    ],
    middleware=[Middleware(SessionMiddleware, secret_key=SECRET)],
)
