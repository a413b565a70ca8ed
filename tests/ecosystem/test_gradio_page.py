"""Gradio's page in a real browser: its clicks add up at one worker, and it recovers when that worker dies."""

import asyncio
import os
import signal
import tempfile

import pytest
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.served import ECOSYSTEM, served

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium-headless-shell)"),
]

PAGES = 4
CLICKS = 4
ENTER_5 = """(() => {
  const field = document.querySelector("input[type=number]");
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, "5");
  field.dispatchEvent(new Event("input", {bubbles: true}));
  field.dispatchEvent(new Event("change", {bubbles: true}));
})()"""
CLICK = """[...document.querySelectorAll("button")].find(button => button.innerText.trim() === "Add").click()"""


async def add(page: Page, total: int) -> int:
    """Click once; the process that answered, once the page shows that total."""
    await page.run(CLICK)
    text = await page.shows(rf"total\D+{total}\b[\s\S]*pid\D+(\d+)")
    return int(text[1])


async def enter(page: Page) -> None:
    await page.shows("Shout")  # it is drawn
    await page.run(ENTER_5)


@pytest.mark.parametrize("options", [(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def test_pages_keep_their_totals_and_one_whose_worker_died_begins_anew(options: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="h-") as files:
        env = {"LEDGER_PATH": "/", "GRADIO_TEMP_DIR": files, "GRADIO_ANALYTICS_ENABLED": "False"}
        options = ("--preset", "gradio", "--timeout-graceful-shutdown", "3", *options)
        app = "examples.gradio_ledger:app"
        with served(app, *options, workers=4, programs=ECOSYSTEM, env=env, start_seconds=360) as server:
            asyncio.run(_visit(server.url))


async def _visit(url: str) -> None:
    async with asyncio.timeout(300), browser() as chromium:
        pages = [await chromium.open(url) for _ in range(PAGES)]
        for page in pages:
            await enter(page)
        pids = []
        for page in pages:
            seen = {await add(page, 5 * click) for click in range(1, CLICKS + 1)}
            assert len(seen) == 1
            pids += seen
        lost = pages[0]
        os.kill(pids[0], signal.SIGKILL)
        await lost.run(CLICK)
        await lost.loaded()
        await enter(lost)
        assert await add(lost, 5) != pids[0]
        for page, pid in zip(pages, pids, strict=True):
            if pid != pids[0]:
                assert await add(page, 5 * (CLICKS + 1)) == pid
