"""A request that is cancelled at any of its awaits leaves nothing: no count, no record, no connection, no descriptor.

Two workers in this process, each a `homing.sticky` app of one run directory, called as a server calls them; so a test can
cancel a request after each turn of the event loop, which no client can time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import homing
from homing.types import SESSION, Message, Receive, Scope, Send, key_digest

TURNS = 40
"""More turns than any of these requests takes."""


class App:
    """Waits a turn between any two steps, and knows how many of its calls have not ended."""

    def __init__(self) -> None:
        self.running = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        self.running += 1
        try:
            while (await receive()).get("more_body"):
                pass
            await asyncio.sleep(0)
            status = int(dict(scope["headers"])[b"x-status"])
            await send({"type": "http.response.start", "status": status, "headers": []})
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"1", "more_body": True})
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"2"})
            await asyncio.sleep(0)
        finally:
            self.running -= 1
            self.ended.set()

    async def quiet(self) -> None:
        async with asyncio.timeout(5):
            while self.running:
                self.ended.clear()
                await self.ended.wait()


@contextlib.asynccontextmanager
async def worker() -> AsyncIterator[tuple[App, homing.SessionRoutingMiddleware]]:
    """A worker that is up, as a server would bring it up."""
    app = App()
    router = homing.sticky(app, sessions=[homing.header("x-session"), homing.body("session", "/named")])
    events: asyncio.Queue[Message] = asyncio.Queue()
    replies: asyncio.Queue[Message] = asyncio.Queue()
    life = asyncio.create_task(router({"type": "lifespan", "asgi": {"version": "3.0"}}, events.get, replies.put))
    for stage in ("startup", "shutdown"):
        events.put_nowait({"type": f"lifespan.{stage}"})
        async with asyncio.timeout(10):
            assert (await replies.get())["type"] == f"lifespan.{stage}.complete"
        if stage == "startup":
            yield app, router
    await life


def a_request(session: str, status: int, *, in_body: bool) -> tuple[Scope, list[Message]]:
    headers = [(b"x-status", b"%d" % status), (b"content-length", b"30")]
    body = b'{"session": "' + session.encode() + b'"}'
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/named" if in_body else "/",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": headers if in_body else [(b"x-session", session.encode()), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": {},
    }
    pieces: list[Message] = [
        {"type": "http.request", "body": part, "more_body": True} for part in (body[:9], body[9:20])
    ]
    return scope, [*pieces, {"type": "http.request", "body": body[20:], "more_body": False}]


async def sent(
    router: Any, session: str, status: int, *, in_body: bool, cancelled_after: int | None = None
) -> int | None:
    """Call the router as a server does; the reply's status, or None if it was cancelled before there was one."""
    scope, events = a_request(session, status, in_body=in_body)
    replies: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(0)
        if events:
            return events.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        replies.append(message)

    task = asyncio.create_task(router(scope, receive, send))
    if cancelled_after is not None:
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await task
    return replies[0]["status"] if replies else None


@pytest.mark.parametrize("in_body", [False, True], ids=["header", "body"])
@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("forwarded", [False, True], ids=["here", "forwarded"])
def test_a_request_cancelled_at_any_await_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwarded: bool, status: int, in_body: bool
) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("HOMING_SESSION_SOCKET_DIR", str(run))

    def record(session: str) -> Path:
        return run / "session-owners" / key_digest(SESSION, session)

    async def test() -> None:
        async with worker() as (app, owner), worker() as (_, other):
            at = other if forwarded else owner
            assert await sent(owner, "held", 200, in_body=False) == 200
            assert await sent(at, "held", status, in_body=in_body) == status
            await app.quiet()
            before = len(os.listdir("/proc/self/fd"))
            for turn in range(TURNS):
                await sent(at, "held", status, in_body=in_body, cancelled_after=turn)
                await app.quiet()
                assert owner.served_now("held") == 0, turn
                assert record("held").is_symlink(), turn
                if not forwarded:
                    # One that nobody has yet: kept only if its reply had begun, and was below 400.
                    session = f"new-{turn}"
                    got = await sent(at, session, status, in_body=in_body, cancelled_after=turn)
                    await app.quiet()
                    assert owner.served_now(session) == 0, turn
                    assert not (record(session).is_symlink() and status >= 400), turn
                    assert record(session).is_symlink() or got is None or status >= 400, turn
            assert await sent(at, "held", status, in_body=in_body) == status
            assert ", 0 live," in repr(other.worker.forwarder if other.worker else "")
            assert len(os.listdir("/proc/self/fd")) <= before + 1

    asyncio.run(test())
