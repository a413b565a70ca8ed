"""One page of a session: its connection to the browser, and the reader that looks at it from an isolated world.

The page's own scripts cannot see or change that world, nor what is called in it. It is made again after every
navigation. A page that has crashed says so to every call at once.

Not here: which page is active (`context.py`), what is done in it (`hands.py`).
"""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from homing.web.errors import PageCrashedError

if TYPE_CHECKING:
    from playwright.async_api import CDPSession, Page

_WORLD: Final = "homing"
_ATTEMPTS: Final = 4
_WALK: Final = resources.files("homing.web.chromium").joinpath("walk.js").read_text("utf-8")


class View:
    """One page. Borrows it: the context closes it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cdp: CDPSession | None = None
        self._frame = ""
        self._world: int | None = None
        self._loading: set[str] = set()
        self.settled = asyncio.Event()
        self.settled.set()
        page.on("crash", self._on_crash)

    def _on_crash(self, _: object) -> None:
        if not self.crashed.done():
            self.crashed.set_result(None)

    @property
    def is_usable(self) -> bool:
        return not self.crashed.done() and not self.page.is_closed()

    async def cdp(self) -> CDPSession:
        """The page's own DevTools connection."""
        if self._cdp is None:
            cdp = await self.page.context.new_cdp_session(self.page)
            tree = await cdp.send("Page.getFrameTree")
            self._frame = tree["frameTree"]["frame"]["id"]
            cdp.on("Page.frameStartedLoading", self._started)
            cdp.on("Page.frameStartedNavigating", self._started)
            cdp.on("Page.frameStoppedLoading", self._stopped)
            await cdp.send("Page.enable")
            self._cdp = cdp
        return self._cdp

    def _started(self, event: dict[str, Any]) -> None:
        if event.get("frameId") == self._frame and event.get("navigationType") not in (
            "sameDocument",
            "historySameDocument",
        ):
            self.settled.clear()

    def _stopped(self, event: dict[str, Any]) -> None:
        if event.get("frameId") == self._frame:
            self.settled.set()

    async def call(self, name: str, *arguments: object) -> Any:
        """What a function of the reader gives.

        Raises:
            PageCrashedError: the renderer is gone.
            playwright.async_api.Error: the page is closed, or does not stop navigating.
        """
        from playwright.async_api import Error

        expression = f"homing.{name}({','.join(json.dumps(each) for each in arguments)})"
        for attempt in range(_ATTEMPTS):
            if self.crashed.done():
                raise PageCrashedError("the page's process has ended; the session ends with it")
            cdp = await self.cdp()
            try:
                if self._world is None:
                    made = await cdp.send("Page.createIsolatedWorld", {"frameId": self._frame, "worldName": _WORLD})
                    self._world = made["executionContextId"]
                    await self._evaluate(cdp, _WALK)
                return await self._evaluate(cdp, expression)
            except Error:
                # The document was replaced under the call; the next one has a world of its own.
                self._world = None
                if attempt == _ATTEMPTS - 1 or self.page.is_closed() or self.crashed.done():
                    if self.crashed.done():
                        raise PageCrashedError("the page's process has ended; the session ends with it") from None
                    raise
                await asyncio.sleep(0.02 * (attempt + 1))
        raise AssertionError("unreachable")

    async def _evaluate(self, cdp: CDPSession, expression: str) -> Any:
        from playwright.async_api import Error

        answer = await cdp.send(
            "Runtime.evaluate", {"expression": expression, "contextId": self._world, "returnByValue": True}
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise Error(str(details.get("exception", {}).get("description", details.get("text", "")))[:500])
        return answer["result"].get("value")

    def __repr__(self) -> str:
        return f"<View {'crashed' if self.crashed.done() else 'closed' if self.page.is_closed() else 'open'}>"
