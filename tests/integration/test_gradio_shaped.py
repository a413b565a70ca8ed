"""Requests of the shape of Gradio's, at the root and mounted: each session, call and upload at one worker."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from tests.support.gradio_requests import Page, events
from tests.support.served import Served, served

PAGES = 30
GONE = {"detail": "Session not found.", "error": "Connection errored out. "}
OPTIONS = ("--preset", "gradio", "--no-access-log")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """In the test mode in which every request first lands on a wrong worker."""
    with served("tests.support.gradio_shaped_app:app", *OPTIONS, "--scatter") as server:
        yield server


@pytest.fixture(params=["", "/tools/ledger"], ids=["root", "mounted"])
def url(server: Served, request: pytest.FixtureRequest) -> str:
    return f"{server.url}{request.param}"


def test_clicks_results_and_heartbeat_of_a_page_share_a_worker(url: str) -> None:
    async def visit() -> None:
        page = Page(url)
        pids = set()
        for click in range(1, 5):
            [done] = await page.run(0, 2)
            answer = done["output"]["data"][0]
            assert answer["total"] == 2 * click
            pids.add(answer["pid"])
        [alive] = events(await page.get(f"heartbeat/{page.session}"))
        assert alive == {"total": 8, "pid": pids.pop()}
        assert pids == set()

    async def visits() -> None:
        await asyncio.gather(*(visit() for _ in range(PAGES)))

    asyncio.run(visits())


def test_a_call_finds_its_results_once(url: str) -> None:
    async def check(number: int) -> None:
        page = Page(url)
        called = await page.post("call/add", {"data": [number]})
        path = f"call/add/{called.json()['event_id']}"
        assert events(await page.get(path))[0][0]["total"] == number
        # The call has ended. Who asks again reaches its worker, which knows of it no longer.
        assert events(await page.get(path)) == [None]

    async def checks() -> None:
        await asyncio.gather(*(check(number) for number in range(PAGES)))

    asyncio.run(checks())


def test_an_upload_and_the_stream_that_tells_of_it_meet(url: str) -> None:
    async def check() -> None:
        _, progress = await Page(url).upload("notes.txt", b"line\n" * 20_000)
        assert progress[-1] == {"msg": "done"}
        assert sum(update.get("chunk_size", 0) for update in progress) > 100_000

    async def checks() -> None:
        await asyncio.gather(*(check() for _ in range(8)))

    asyncio.run(checks())


def test_a_killed_worker_s_page_is_told_so_in_gradio_s_words() -> None:
    async def lose(url: str) -> None:
        page = Page(url)
        pid = (await page.run(0, 1))[0]["output"]["data"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        for reply in (
            await page.post("queue/join", {"data": [1], "session_hash": page.session}),
            await page.get(f"queue/data?session_hash={page.session}"),
            await page.get(f"heartbeat/{page.session}"),
        ):
            assert (reply.status, reply.json()) == (404, GONE)
            assert reply.header("homing-error") == "session_gone"
        assert (await Page(url).run(0, 1))[0]["output"]["data"][0]["total"] == 1

    with served("tests.support.gradio_shaped_app:app", *OPTIONS) as server:
        asyncio.run(lose(server.url))
