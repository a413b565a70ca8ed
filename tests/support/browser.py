"""A real browser for tests: headless Chromium, driven over its DevTools protocol.

Only what a test of a page needs: open one, run JavaScript in it, wait until it shows something, know that it was loaded
anew. Waits are for the page's own changes, never for a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from websockets.asyncio.client import ClientConnection, connect

CHROMIUM: Final = next(
    (
        found
        for name in (
            "chromium",
            "chromium-browser",
            "google-chrome",
            "chromium-headless-shell",
            "chrome-headless-shell",
        )
        if (found := shutil.which(name)) is not None
    ),
    None,
)
SHOWS: Final = """
new Promise(resolve => {
  const pattern = new RegExp(PATTERN);
  let observer;
  const look = () => {
    const found = pattern.exec(document.body ? document.body.innerText : "");
    if (found) { observer && observer.disconnect(); resolve([...found]); }
    return found;
  };
  observer = new MutationObserver(look);
  observer.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
  look();
})
"""


class Browser:
    """One Chromium. `browser` opens and closes it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.loads: dict[str, asyncio.Queue[None]] = {}

    async def listen(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if (answer := self._answers.pop(message.get("id", -1), None)) is not None:
                if not answer.done():
                    answer.set_result(message)
            elif message.get("method") == "Page.loadEventFired":
                self.loads[message["sessionId"]].put_nowait(None)

    async def ask(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """The result of a command.

        Raises:
            RuntimeError: the browser refused it, such as because the page went away under it.
        """
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        command = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send(json.dumps(command | ({"sessionId": session} if session else {})))
        reply = await answer
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    async def open(self, url: str) -> Page:
        """A page in a browser context of its own, once it is loaded: no cookie of another page reaches it."""
        context = (await self.ask("Target.createBrowserContext"))["browserContextId"]
        target = (await self.ask("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        self.loads[session] = asyncio.Queue()
        page = Page(self, session)
        await self.ask("Page.enable", session)
        await self.ask("Page.navigate", session, url=url)
        await page.loaded()
        return page


class Page:
    """One page of a `Browser`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited if it is a promise."""
        result = await self._browser.ask(
            "Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def shows(self, pattern: str) -> list[str]:
        """The match and its groups, once the page's text matches (a regular expression of JavaScript)."""
        found: list[str] = await self.run(SHOWS.replace("PATTERN", json.dumps(pattern)))
        return found

    async def loaded(self) -> None:
        """Return once the page has been loaded, or loaded anew."""
        await self._browser.loads[self._session].get()


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A headless Chromium with a profile of its own."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="h-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            address = ""
            async with asyncio.timeout(60):
                while not address:
                    line = (await process.stderr.readline()).decode(errors="replace")
                    assert line, "chromium ended before it listened"
                    if found := re.search(r"DevTools listening on (ws://\S+)", line):
                        address = found[1]
            draining = asyncio.create_task(_drain(process.stderr))
            async with connect(address, max_size=None) as socket:
                opened = Browser(socket)
                listening = asyncio.create_task(opened.listen())
                try:
                    yield opened
                finally:
                    listening.cancel()
                    draining.cancel()
                    await asyncio.gather(listening, draining, return_exceptions=True)
        finally:
            # With its children: one that lives on holds the pipe open, and the pipe's end is waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await _drain(process.stderr)
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65_536):
        pass
