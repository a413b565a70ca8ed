"""A real NiceGUI page on several workers: the page, its Socket.IO connection and its events share a process."""

import asyncio
import re
import secrets
import tempfile
from collections.abc import Iterator
from urllib.parse import urlencode

import aiohttp
import pytest
import socketio
from tests.support.browser import CHROMIUM, browser
from tests.support.plain_http import request
from tests.support.served import ECOSYSTEM, Served, served

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]

OPTIONS = ("--preset", "engineio", "--session", "signed-cookie:session:id", "--secret-env", "STORAGE_SECRET")
CLICKS = 5
PAGES = 12


@pytest.fixture(scope="module", params=[(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Scattered, every request first lands on a wrong worker."""
    with tempfile.TemporaryDirectory(prefix="h-") as storage:
        env = {"STORAGE_SECRET": secrets.token_hex(16), "NICEGUI_STORAGE_PATH": storage}
        options = (*OPTIONS, "--timeout-graceful-shutdown", "3", *request.param)
        app = "examples.nicegui_counter:app"
        with served(app, *options, workers=4, programs=ECOSYSTEM, env=env, start_seconds=180) as server:
            yield server


@pytest.mark.parametrize("transports", [["websocket"], ["polling", "websocket"]], ids=["websocket", "upgraded"])
def test_every_click_reaches_the_process_that_built_the_page(server: Served, transports: list[str]) -> None:
    async def pages() -> list[str]:
        return await asyncio.gather(*(_click(server.url, transports) for _ in range(PAGES)))

    pids = set(asyncio.run(pages()))
    while len(pids) < 2:  # which worker takes a page is the kernel's choice
        pids |= set(asyncio.run(pages()))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium-headless-shell)")
def test_the_page_s_own_script_in_a_browser_counts_its_clicks(server: Served) -> None:
    asyncio.run(_browse(server.url))


async def _browse(url: str) -> None:
    async with asyncio.timeout(200), browser() as chromium:
        for _ in range(3):
            page = await chromium.open(url)
            _, pid = await page.shows(r"0 clicks at (\d+)")
            await page.run(
                "new Promise(go => { const ask = () => window.socket?.connected ? go() : setTimeout(ask); ask() })"
            )
            for click in range(1, CLICKS + 1):
                await page.run('[...document.querySelectorAll("button")].find(b => /click/i.test(b.innerText)).click()')
                await page.shows(f"{click} clicks at {pid}")


async def _click(url: str, transports: list[str]) -> str:
    """Open a page, click its button as its script does, and see the label change each time: the page's process."""
    page = await request(f"{url}/")
    html = page.body.decode()
    built = re.search(r'"text":"0 clicks at (\d+)"', html)
    client_id = re.search(r"'client_id': '([^']+)'", html)
    button = re.search(r'"(\d+)":\{"tag":"q-btn".*?"listener_id":"([^"]+)","type":"click"', html)
    assert built and client_id and button, html  # noqa: PT018 - one line says which by what is None
    query = {
        "client_id": client_id[1],
        "tab_id": secrets.token_hex(4),
        "old_tab_id": "",
        "document_id": secrets.token_hex(4),
        "next_message_id": 0,
        "implicit_handshake": "true",
    }
    shown: asyncio.Queue[str] = asyncio.Queue()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        client = socketio.AsyncClient(http_session=http, reconnection=False, request_timeout=30)

        @client.on("update")
        async def update(message: object) -> None:
            if found := re.search(r"(\d+) clicks at (\d+)", str(message)):
                shown.put_nowait(found[0])

        async with asyncio.timeout(60):
            await client.connect(
                f"{url}?{urlencode(query)}",
                headers={"cookie": page.cookie},
                transports=transports,
                socketio_path="/_nicegui_ws/socket.io",
                wait_timeout=30,
            )
            for click in range(1, CLICKS + 1):
                await client.emit(
                    "event",
                    {"id": int(button[1]), "client_id": client_id[1], "listener_id": button[2], "args": []},
                )
                assert await shown.get() == f"{click} clicks at {built[1]}"
            await client.disconnect()
    return built[1]
