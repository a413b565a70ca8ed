"""A FastAPI app that was given a `root_path`, plain (`app`) and in a wrapper (`wrapped`).

FastAPI answers with and without that prefix, so that it can be served behind a proxy that strips it and behind one that does not.
"""

from __future__ import annotations

import secrets

from fastapi import FastAPI, HTTPException
from starlette.middleware.gzip import GZipMiddleware

app = FastAPI(root_path="/api")
steps: dict[str, int] = {}


@app.post("/sessions")
def start() -> dict[str, str]:
    session = secrets.token_hex(8)
    steps[session] = 0
    return {"id": session}


@app.post("/sessions/{session}/step")
def step(session: str) -> dict[str, int]:
    if session not in steps:
        raise HTTPException(404, "never heard of it")
    steps[session] += 1
    return {"steps": steps[session]}


wrapped = GZipMiddleware(app)
