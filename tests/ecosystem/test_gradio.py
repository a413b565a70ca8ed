"""A real Gradio app on several workers, driven by Gradio's own client and by its requests made by hand."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.support.gradio_requests import Page
from tests.support.served import ECOSYSTEM, Served, drive, served

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(1200)]

APP = "examples.gradio_ledger:app"
OPTIONS = ("--preset", "gradio", "--no-access-log", "--timeout-graceful-shutdown", "3")
GONE = {"detail": "Session not found.", "error": "Connection errored out. "}
DRIVER = "tests.support.gradio_driver"
ADD, COUNT = 0, 1
"""The numbers of the functions, in the order of the app."""


@dataclass(frozen=True)
class Ledger:
    server: Served
    url: str

    def page(self) -> Page:
        return Page(self.url.rstrip("/"))


@pytest.fixture(
    scope="module", params=[("/", ()), ("/tools/ledger", ("--scatter",))], ids=["root", "mounted-scattered"]
)
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """Scattered, every request first lands on a wrong worker."""
    path, options = request.param
    with tempfile.TemporaryDirectory(prefix="h-") as files:
        env = {"LEDGER_PATH": path, "GRADIO_TEMP_DIR": files, "GRADIO_ANALYTICS_ENABLED": "False"}
        with served(APP, *OPTIONS, *options, workers=4, programs=ECOSYSTEM, env=env, start_seconds=360) as server:
            yield Ledger(server, server.url + path)


def test_each_client_keeps_its_state_its_files_and_its_stream(ledger: Ledger) -> None:
    tally = drive(DRIVER, ledger.url, "--clients", "10", "--calls", "3", programs=ECOSYSTEM, timeout_seconds=200)
    assert [one["right"] for one in tally] == [one["checks"] for one in tally] == [10] * 10
    assert [len(one["pids"]) for one in tally] == [1] * 10


def test_a_page_s_clicks_add_up_whatever_connection_brings_them(ledger: Ledger) -> None:
    async def visit() -> int:
        page = ledger.page()
        pids = set()
        for click in range(1, 5):
            done = (await page.run(ADD, 2, None))[-1]
            assert done["msg"] == "process_completed"
            answer = done["output"]["data"][0]
            assert answer["total"] == 2 * click
            pids.add(answer["pid"])
        steps = [m["output"] for m in await page.run(COUNT, 3, None) if m["msg"] == "process_generating"]
        assert steps
        assert len(pids) == 1
        return pids.pop()

    async def visits() -> list[int]:
        return await asyncio.gather(*(visit() for _ in range(16)))

    pids = set(asyncio.run(visits()))
    while len(pids) < 2:  # which worker takes a page is the kernel's choice
        pids |= set(asyncio.run(visits()))


def test_a_call_by_its_name_finds_its_results_by_their_event(ledger: Ledger) -> None:
    async def calls() -> list[object]:
        return await asyncio.gather(*(ledger.page().call("add", number) for number in range(20)))

    answers = asyncio.run(calls())
    assert [answer[0]["total"] for answer in answers] == list(range(20))  # type: ignore[index]


def test_an_upload_tells_of_its_progress_and_every_worker_gives_the_file_out(ledger: Ledger) -> None:
    async def check() -> None:
        page = ledger.page()
        path, progress = await page.upload("notes.txt", b"line\n" * 100_000)
        # At another worker: 404 after a while, for it would know of no such upload.
        assert progress[-1] == {"msg": "done"}
        for _ in range(8):
            got = await page.get(f"file={path}")
            assert (got.status, got.body) == (200, b"line\n" * 100_000)

    asyncio.run(check())


def test_a_killed_worker_s_page_is_told_and_a_new_one_works(ledger: Ledger) -> None:
    tally = drive(DRIVER, ledger.url, "--kill", programs=ECOSYSTEM)
    assert "404 Not Found" in tally["error"]
    assert (tally["total_after"], tally["moved"]) == (1.0, True)

    async def by_hand() -> None:
        page = ledger.page()
        pid = (await page.run(ADD, 1, None))[-1]["output"]["data"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        for reply in (
            await page.post("queue/join", {"data": [1, None], "fn_index": ADD, "session_hash": page.session}),
            await page.get(f"queue/data?session_hash={page.session}"),
        ):
            assert (reply.status, reply.json()) == (404, GONE)
            assert reply.header("homing-error") == "session_gone"

    asyncio.run(by_hand())
