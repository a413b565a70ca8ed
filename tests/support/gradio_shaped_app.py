"""An app with the routes of a Gradio app, and nothing else of it: its state, its queue and its uploads are dicts.

Where requests carry what (`session_hash`, `event_id`, `upload_id`), and which of them stream, is as in Gradio 6; the real
one is driven by `make test-ecosystem`. Its one function adds to a total and says in which process that is.
"""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

totals: dict[str, float] = {}
messages: dict[str, asyncio.Queue[dict[str, object]]] = {}
uploads: dict[str, asyncio.Queue[dict[str, object]]] = {}


def push(session: str, amount: float) -> str:
    event = secrets.token_hex(8)
    totals[session] = totals.get(session, 0) + amount
    output = {"data": [{"total": totals[session], "pid": os.getpid()}]}
    queue = messages.setdefault(session, asyncio.Queue())
    queue.put_nowait({"msg": "process_completed", "event_id": event, "output": output})
    return event


async def join(request: Request) -> JSONResponse:
    body = await request.json()
    return JSONResponse({"event_id": push(body["session_hash"], body["data"][0])})


async def results(request: Request) -> Response:
    session = request.query_params["session_hash"]
    if session not in messages:
        return JSONResponse({"detail": "Session not found."}, 404)

    async def stream() -> AsyncIterator[str]:
        while not messages[session].empty():
            yield f"data: {json.dumps(messages[session].get_nowait())}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


async def call(request: Request) -> JSONResponse:
    session = secrets.token_hex(8)
    event = push(session, (await request.json())["data"][0])
    messages[event] = messages.pop(session)
    return JSONResponse({"event_id": event})


async def call_results(request: Request) -> Response:
    queue = messages.pop(request.path_params["event"], None)
    if queue is None:
        return PlainTextResponse("event: error\ndata: null\n\n", media_type="text/event-stream")
    output = queue.get_nowait()["output"]
    return PlainTextResponse(
        f"event: complete\ndata: {json.dumps(output['data'])}\n\n",  # type: ignore[index]
        media_type="text/event-stream",
    )


async def heartbeat(request: Request) -> StreamingResponse:
    session = request.path_params["session"]

    async def alive() -> AsyncIterator[str]:
        yield f"data: {json.dumps({'total': totals.get(session, 0), 'pid': os.getpid()})}\n\n"

    return StreamingResponse(alive(), media_type="text/event-stream")


async def upload(request: Request) -> JSONResponse:
    said = uploads.setdefault(request.query_params["upload_id"], asyncio.Queue())
    async for chunk in request.stream():
        said.put_nowait({"msg": "update", "chunk_size": len(chunk)})
    said.put_nowait({"msg": "done"})
    return JSONResponse([f"/tmp/{os.getpid()}"])


async def upload_progress(request: Request) -> StreamingResponse:
    said = uploads.setdefault(request.query_params["upload_id"], asyncio.Queue())

    async def stream() -> AsyncIterator[str]:
        update: dict[str, object] = {}
        while update.get("msg") != "done":
            update = await said.get()
            yield f"data: {json.dumps(update)}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


gradio = Starlette(
    routes=[
        Route("/gradio_api/queue/join", join, methods=["POST"]),
        Route("/gradio_api/queue/data", results),
        Route("/gradio_api/call/{name}", call, methods=["POST"]),
        Route("/gradio_api/call/{name}/{event}", call_results),
        Route("/gradio_api/heartbeat/{session}", heartbeat),
        Route("/gradio_api/upload", upload, methods=["POST"]),
        Route("/gradio_api/upload_progress", upload_progress),
    ]
)
app = Starlette(routes=[Mount("/tools/ledger", gradio), Mount("/", gradio)])
