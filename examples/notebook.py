"""A notebook: the page comes first, then a WebSocket to its kernel, then uploads beside it.

    homing run examples.notebook:app --workers 3 --session cookie:notebook --session "path:/notebooks/{session}"

The page sets a cookie that names the notebook, the WebSocket brings the cookie, the upload has the
same ID in its path. All three must reach the process where the notebook lives, else each makes one
of its own.
"""

import os
import secrets
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket


@dataclass
class Notebook:
    """One notebook's kernel and files; `born` is new with each construction."""

    cells: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    born: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(4)}")


notebooks: dict[str, Notebook] = {}


def find(notebook_id: str) -> Notebook:
    """The notebook of that ID in this process; made if there is none, as kernel managers do."""
    if notebook_id not in notebooks:
        notebooks[notebook_id] = Notebook()
    return notebooks[notebook_id]


async def page(request: Request) -> HTMLResponse:
    """Open a notebook, or the one that the cookie names."""
    notebook_id = request.cookies.get("notebook") or secrets.token_hex(8)
    reply = HTMLResponse(f"<p>notebook born {find(notebook_id).born}</p>")
    reply.set_cookie("notebook", notebook_id, httponly=True)
    return reply


async def kernel(websocket: WebSocket) -> None:
    """Run each text that arrives as a cell."""
    notebook = find(websocket.cookies["notebook"])
    await websocket.accept()
    async for cell in websocket.iter_text():
        notebook.cells.append(cell)
        await websocket.send_json(
            {"born": notebook.born, "cells": len(notebook.cells), "files": sorted(notebook.files)}
        )


async def upload(request: Request) -> JSONResponse:
    """Store a file beside the notebook; only its size is kept here."""
    notebook = find(request.path_params["notebook"])
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
    notebook.files[request.path_params["name"]] = size
    return JSONResponse({"born": notebook.born, "size": size, "cells": len(notebook.cells)}, status_code=201)


app = Starlette(
    routes=[
        Route("/", page),
        WebSocketRoute("/kernel", kernel),
        Route("/notebooks/{notebook}/files/{name}", upload, methods=["PUT"]),
    ]
)
