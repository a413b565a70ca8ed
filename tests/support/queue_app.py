"""An app that names its sessions as Gradio's queue does: in a JSON body, then in a query or a path.

`POST /queue/join` puts work into the queue of the client's own `session_hash`, and
`GET /queue/data?session_hash=…` streams that queue's results. `POST /call/predict` answers with an
`event_id` of the server's, and `GET /call/predict/{event}` has only that.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

queues: dict[str, list[str]] = {}


async def join(request: Request) -> Response:
    body = await request.body()
    try:
        session = json.loads(body)["session_hash"]
    except ValueError:
        return Response(body, 422, media_type="application/octet-stream")
    queues.setdefault(session, []).append(f"done by {os.getpid()}")
    return JSONResponse({"pid": os.getpid()})


async def predict(request: Request) -> JSONResponse:
    event = secrets.token_hex(8)
    queues[event] = [f"done by {os.getpid()}"]
    return JSONResponse({"event_id": event})


async def stream(request: Request) -> Response:
    session = request.path_params.get("event") or request.query_params["session_hash"]
    if session not in queues:
        return JSONResponse({"error": "no such queue"}, 404)

    async def events() -> AsyncIterator[str]:
        for done in queues[session]:
            yield f"data: {json.dumps({'msg': done, 'pid': os.getpid()})}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


app = Starlette(
    routes=[
        Route("/queue/join", join, methods=["POST"]),
        Route("/queue/data", stream),
        Route("/call/predict", predict, methods=["POST"]),
        Route("/call/predict/{event}", stream),
    ]
)
