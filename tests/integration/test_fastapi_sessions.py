"""An untouched FastAPI app with Starlette's signed session cookie, on several workers."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import plain_http
from tests.support.plain_http import Reply
from tests.support.served import Served, served
from tests.support.servers import ROOT, STARTED, serve_workers, uvicorn_run
from tests.support.stories import blocks

VISITORS = 30
ITEMS = 10
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module", params=[(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Scattered, every request first lands on a wrong worker."""
    options = ("--session", "signed-cookie:session:sid", "--secret-env", "SESSION_SECRET", *request.param)
    env = {"SESSION_SECRET": secrets.token_hex(16)}
    with served("examples.fastapi_session:app", *options, env=env) as server:
        yield server


async def add(url: str, item: str, cookie: str) -> Reply:
    body = json.dumps({"item": item}).encode()
    return await plain_http.request(f"{url}/basket", "POST", body=body, headers=JSON | {"cookie": cookie})


def test_each_visitor_keeps_one_basket(server: Served) -> None:
    async def visit() -> tuple[int, list[object]]:
        login = await plain_http.request(f"{server.url}/login", "POST")
        replies = [await add(server.url, f"item {number}", login.cookie) for number in range(ITEMS)]
        return login.json()["pid"], [reply.json() for reply in replies]

    async def visits() -> list[tuple[int, list[object]]]:
        return await asyncio.gather(*(visit() for _ in range(VISITORS)))

    seen = asyncio.run(visits())
    for pid, replies in seen:
        assert replies == [{"items": number, "pid": pid} for number in range(1, ITEMS + 1)]


def test_a_cookie_that_the_app_rejects_names_no_session(server: Served) -> None:
    """It is served where it arrives and judged by the app, as one worker would do."""

    async def tampered() -> list[Reply]:
        login = await plain_http.request(f"{server.url}/login", "POST")
        payload, stamp, signature = login.cookie.rsplit(".", 2)
        cookies = (f"{payload}.{stamp}.{signature[::-1]}", f"session={payload}", "session=", "session=é")
        return [await add(server.url, "one", cookie) for cookie in cookies]

    assert [reply.status for reply in asyncio.run(tampered())] == [401] * 4


@pytest.mark.parametrize("app", ["app", "wrapped"])
def test_an_app_with_a_root_path_of_its_own_keeps_sessions_with_and_without_that_prefix(app: str) -> None:
    """FastAPI puts it into the scope once it is called, which is after the router has looked at the path."""

    async def play(url: str) -> list[object]:
        session = (await plain_http.request(f"{url}/sessions", "POST")).json()["id"]
        replies = [await plain_http.request(f"{url}/sessions/{session}/step", "POST") for _ in range(3)]
        return [reply.json() for reply in replies]

    options = ("--session", "path:/sessions/{session}", "--learn", "body:id@/sessions", "--start", "POST /sessions")
    with served(f"tests.support.root_path_app:{app}", *options, "--scatter") as server:
        for prefix in ("", "/api"):
            for _ in range(4):
                assert asyncio.run(play(server.url + prefix)) == [{"steps": number} for number in (1, 2, 3)]


def test_a_visitor_whose_worker_has_died_loses_the_cookie_and_begins_anew_as_the_page_says(tmp_path: Path) -> None:
    for block in blocks(ROOT / "docs" / "howto" / "fastapi-sessions.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    argv = uvicorn_run("forgetting_shop:app", "--workers", "2")
    env = {"SESSION_SECRET": secrets.token_hex(16), "HOMING_SESSION_SOCKET_DIR": None}

    async def test() -> None:
        async with serve_workers(argv, workers=2, env=env, cwd=tmp_path, clean=False) as server:
            url = "http://{}:{}".format(*server.address)

            async def post(path: str, cookie: str | None = None) -> Reply:
                return await plain_http.request(
                    url + path, "POST", headers=None if cookie is None else {"cookie": cookie}
                )

            cookie = (await post("/login")).cookie
            assert (await post("/basket?item=tea", cookie)).json() == {"items": ["tea"]}
            # Whichever has the session: each is killed, and has been replaced before the next one is.
            workers = await server.log.until(r"Started server process \[(\d+)\]", 2)
            for started, worker in enumerate(workers[:2], 3):
                os.kill(int(worker[1]), signal.SIGKILL)
                await server.log.until(STARTED, started)
            for path in ("/basket?item=milk", "/login"):
                gone = await post(path, cookie)
                assert (gone.status, gone.header("homing-error")) == (410, "session_gone")
                assert gone.header("set-cookie") == "session=; path=/; max-age=0"
            anew = (await post("/login")).cookie
            assert (await post("/basket?item=tea", anew)).json() == {"items": ["tea"]}

    asyncio.run(test())
