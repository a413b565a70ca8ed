"""Apps that the process tests serve; each is one function or class of this module."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tests.support import counter_app

import homing
from homing.routing.worker import current_worker
from homing.rundir import worker_handoff_path


def note(text: str) -> None:
    """Append a line to the file that the test named."""
    if path := os.environ.get("TEST_NOTES"):
        with open(path, "a", encoding="utf-8") as notes:
            notes.write(f"{text} {os.getpid()}\n")


@asynccontextmanager
async def lifespan(app: Any) -> Any:
    if (path := os.environ.get("TEST_FAIL_IF")) and Path(path).exists():
        raise RuntimeError("the test wants this start-up to fail")
    note("startup")
    yield
    note("shutdown")


async def who(request: Request) -> JSONResponse:
    return JSONResponse({"pid": os.getpid(), "client": request.client.host if request.client else None})


async def stream(request: Request) -> StreamingResponse:
    async def ticks() -> Any:
        while True:
            yield b"tick\n"
            await asyncio.sleep(0.05)

    return StreamingResponse(ticks())


async def halves(request: Request) -> StreamingResponse:
    async def both() -> Any:
        yield b"begun\n"
        await asyncio.sleep(1)
        yield b"ended\n"

    return StreamingResponse(both())


async def block(request: Request) -> JSONResponse:
    """The event loop stands still until the file is there that the query names."""
    note("blocked")
    while not os.path.exists(request.query_params["until"]):
        time.sleep(0.02)
    return JSONResponse({"pid": os.getpid()})


async def limits(request: Request) -> JSONResponse:
    import resource

    return JSONResponse(resource.getrlimit(resource.RLIMIT_NOFILE))


async def surroundings(request: Request) -> JSONResponse:
    return JSONResponse({name: text for name, text in os.environ.items() if name.startswith("HOMING_")})


app = Starlette(
    routes=[
        Route("/who", who),
        Route("/stream", stream),
        Route("/halves", halves),
        Route("/block", block),
        Route("/limits", limits),
        Route("/surroundings", surroundings),
    ],
    lifespan=lifespan,
)


routed = homing.sticky(app, sessions=[homing.cookie("visit")])


async def head(scope: Any, receive: Any, send: Any) -> None:
    """Replies with what `homing run`'s protocol class noted, seen from outside the router (`--no-sessions`)."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body", False):
        pass
    seen = {"head_length": scope.get("homing.head_length"), "headers": [n.decode() for n, _ in scope["headers"]]}
    seen["aborts"] = callable(scope.get("homing.abort"))
    body = json.dumps(seen).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def headers_once(scope: Any, receive: Any, send: Any) -> None:
    """Gives its headers as iterators, which ASGI allows: whoever reads them leaves nothing for the server."""
    headers = iter([(b"x-only", b"once"), (b"content-length", b"2")])
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})
    elif scope["type"] == "websocket":
        await receive()
        if scope["path"] == "/denied":
            await send({"type": "websocket.http.response.start", "status": 418, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": b"no"})
            return
        await send({"type": "websocket.accept", "headers": map(tuple, [[b"x-only", b"once"]])})
        await send({"type": "websocket.close", "code": 1000})


async def cut(scope: Any, receive: Any, send: Any) -> None:
    """Begins a reply and aborts the connection."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    scope["homing.abort"]()


async def slow_to_shut_down(scope: Any, receive: Any, send: Any) -> None:
    """`counter_app`, whose shutdown takes some seconds, or never ends, or lets the event loop stand still."""
    if scope["type"] != "lifespan":
        await counter_app.app(scope, receive, send)
        return
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    note("shutdown")
    match os.environ["TEST_SHUTDOWN"]:
        case "never":
            await asyncio.Event().wait()
        case "blocks":
            threading.Event().wait()
        case seconds:
            await asyncio.sleep(float(seconds))
    note("complete")
    await send({"type": "lifespan.shutdown.complete"})


async def nothing_moves(scope: Any, receive: Any, send: Any) -> None:
    """`counter_app`, where somebody has the name of the worker's socket for connections that move."""

    async def taking_the_name(event: Any) -> None:
        await send(event)
        if event["type"] == "lifespan.startup.complete":
            worker = current_worker()
            assert worker is not None
            Path(worker_handoff_path(worker.run_directory.path, worker.id)).touch()

    await counter_app.app(scope, receive, taking_the_name if scope["type"] == "lifespan" else send)


async def starts_when_told(scope: Any, receive: Any, send: Any) -> None:
    """`counter_app`, whose start-up goes on for as long as the file `TEST_HOLD` is there."""

    async def held(event: Any) -> None:
        while event["type"] == "lifespan.startup.complete" and Path(os.environ["TEST_HOLD"]).exists():
            await asyncio.sleep(0.01)  # until another process removes it
        await send(event)

    await counter_app.app(scope, receive, held if scope["type"] == "lifespan" else send)
