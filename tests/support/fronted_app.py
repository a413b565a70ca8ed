"""An app as it stands behind a proxy: sessions in memory, named by `x-session`, made by it or chosen by the client.

POST /sessions    begins one, of the ID that the request names or a new one; the reply's header `x-session` names it
GET /step         {"count", "worker", "client", "scheme"}; 404 if the session is unknown here and none was begun
GET /events       `begun`, and after POST /go, `gone on`, as they come
WebSocket /talk   each text, and the session's count
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

counts: Counter[str] = Counter()
going: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)


def session_of(request: HTTPConnection) -> str:
    return request.headers.get("x-session", "")


async def who(request: Request) -> Response:
    return Response(f"worker {os.getpid()}")


async def begin(request: Request) -> Response:
    session = session_of(request) or secrets.token_hex(16)
    counts[session] = 0
    return JSONResponse({"session": session}, headers={"x-session": session})


async def step(request: Request) -> Response:
    counts[session_of(request)] += 1
    seen = {"count": counts[session_of(request)], "worker": os.getpid(), "scheme": request.url.scheme}
    return JSONResponse(seen | {"client": request.client.host if request.client else None})


async def events(request: Request) -> Response:
    async def told() -> AsyncIterator[str]:
        yield "data: begun\n\n"
        await going[session_of(request)].wait()
        yield "data: gone on\n\n"

    return StreamingResponse(told(), media_type="text/event-stream")


async def go(request: Request) -> Response:
    going[session_of(request)].set()
    return Response(status_code=204)


async def talk(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        counts[session_of(websocket)] += 1
        await websocket.send_text(f"{text} {counts[session_of(websocket)]}")


app = Starlette(
    routes=[
        Route("/", who),
        Route("/sessions", begin, methods=["POST"]),
        Route("/step", step),
        Route("/events", events),
        Route("/go", go, methods=["POST"]),
        WebSocketRoute("/talk", talk),
    ]
)
