"""The public check of resources servers: what it lets pass, and what it finds, in servers that are not homing's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from tests.support.servers import serving

from homing.rl.testing import check_resources_server
from homing.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Stateless:
    """Judges by the request alone: any seed and any close is fine, and no session can be lost."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        status, reply = self.answer(scope["path"], json.loads(body))
        headers = [(b"content-type", b"application/json"), (b"set-cookie", b"session=any")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/verify":
            return 200, {"reward": 1.0}
        return 200, {"resources_session_id": asked["resources_session_id"]}


class ClosesOnce(Stateless):
    """Knows which sessions it has closed, and takes a second close for a mistake."""

    def __init__(self) -> None:
        self.closed: set[str] = set()

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/close_session":
            if asked["resources_session_id"] in self.closed:
                return 404, {}
            self.closed.add(asked["resources_session_id"])
        return super().answer(path, asked)


@pytest.mark.parametrize(
    ("app", "keeps_state", "says"),
    [
        (Stateless(), False, None),
        (Stateless(), True, "with another episode is answered 409, not 200"),
        (ClosesOnce(), False, "the same close again is answered 200, not 404"),
    ],
)
async def test_a_server_that_keeps_no_state_is_exempt_and_what_breaks_the_contract_is_found(
    app: Stateless, keeps_state: bool, says: str | None
) -> None:
    async with serving(app, lifespan="on") as (host, port):
        checking = asyncio.to_thread(check_resources_server, f"http://{host}:{port}", keeps_state=keeps_state)
        with contextlib.nullcontext() if says is None else pytest.raises(AssertionError, match=says):
            await checking
