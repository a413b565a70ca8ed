"""An untouched FastAPI app with Starlette's signed session cookie, on several workers."""

import asyncio
import json
import secrets
from collections.abc import Iterator

import pytest
from tests.support import plain_http
from tests.support.plain_http import Reply
from tests.support.served import Served, served

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
