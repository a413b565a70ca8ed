"""A FastAPI app with Starlette's signed session cookie and each visitor's basket in this process's memory.

    export SESSION_SECRET=…
    homing run examples.fastapi_session:app --workers 3 \\
        --session signed-cookie:session:sid --secret-env SESSION_SECRET

The app is as it would be for one process. Homing reads `sid` from the signed cookie with the app's
own secret, as the installed SessionMiddleware would, and sends each request to the worker that has
that visitor's basket.
"""

import os
import secrets
from typing import Annotated

from fastapi import Body, FastAPI, HTTPException, Request
from starlette.middleware.sessions import SessionMiddleware

app = FastAPI()
app.add_middleware(SessionMiddleware, secret_key=os.environ["SESSION_SECRET"])
baskets: dict[str, list[str]] = {}


@app.post("/login")
async def login(request: Request) -> dict[str, int]:
    """Begin an empty basket; the cookie that names it is in the reply."""
    request.session["sid"] = secrets.token_hex(8)
    baskets[request.session["sid"]] = []
    return {"pid": os.getpid()}


@app.post("/basket")
async def add(request: Request, item: Annotated[str, Body(embed=True)]) -> dict[str, int]:
    """Put one more item into the visitor's basket."""
    basket = baskets.get(request.session.get("sid", ""))
    if basket is None:
        raise HTTPException(status_code=401, detail=f"process {os.getpid()} has no basket of yours")
    basket.append(item)
    return {"items": len(basket), "pid": os.getpid()}
