"""Contexts in a browser that runs elsewhere, reached by its DevTools endpoint: the provider `remote_cdp`.

Its processes are not ours to know or to end: a release is a context closed in time, and a lease that would not close is
reported and tried again. Whoever runs that browser bounds its life.

Not here: browsers of this machine (`provider.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from homing.errors import ConfigurationError
from homing.web.base import BrowserHandle, BrowserSpec, Footprint
from homing.web.chromium.context import Context
from homing.web.chromium.driver import Driver
from homing.web.chromium.held import Held
from homing.web.chromium.provider import check_viewport
from homing.web.errors import BrowserStartError
from homing.web.processes import remove_folder

if TYPE_CHECKING:
    from playwright.async_api import Browser as PlaywrightBrowser

_CONNECT_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 5.0
_INTERRUPT_SECONDS: Final = 0.5

_numbers = itertools.count(1)


class RemoteProvider:
    """Contexts of a browser elsewhere. Owns its driver and the connection.

    Args:
        endpoint: `http://host:port` or `ws://…` of the browser's DevTools.
    """

    name = "remote_cdp"
    renewable = False

    def __init__(self, endpoint: str, viewport: tuple[int, int] = (1280, 720)) -> None:
        if not isinstance(endpoint, str) or urlsplit(endpoint).scheme not in ("http", "https", "ws", "wss"):
            raise ConfigurationError("web: the endpoint of remote_cdp is an http or ws URL")
        check_viewport(viewport)
        self._endpoint = endpoint
        self._viewport = (int(viewport[0]), int(viewport[1]))
        self._folder: Path | None = None
        self._driver: Driver | None = None
        self._browser: PlaywrightBrowser | None = None
        self._connecting = asyncio.Lock()
        self._live: set[Held] = set()

    async def start(self) -> None:
        """See `BrowserProvider.start`."""
        await self._connected()

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        """See `BrowserProvider.acquire`.

        Raises:
            BrowserStartError: the browser cannot be reached, or gives no page.
        """
        browser = await self._connected()
        raw = None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                raw = await browser.new_context(
                    viewport={"width": self._viewport[0], "height": self._viewport[1]}, service_workers="block"
                )
                page = await raw.new_page()
        except Exception as error:
            if raw is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(raw.close(), _CLOSE_SECONDS)
            raise BrowserStartError("the remote browser gives no page; the server's log says why") from error
        held = Held(browser.is_connected, Context(raw, page), Footprint(), self._viewport)
        self._live.add(held)
        return BrowserHandle(
            lease_id=f"remote-{os.getpid()}-{next(_numbers)}",
            session_id=spec.session_id,
            provider=self.name,
            transport="remote_cdp",
            endpoint=self._endpoint,
            owner_pid=os.getpid(),
            footprint=held.footprint,
            state=held,
        )

    async def release(self, handle: BrowserHandle) -> None:
        """See `BrowserProvider.release`.

        Raises:
            Exception: the context has not closed in time.
        """
        held: Held = handle.state
        await held.context.aclose()
        if held.is_connected():
            async with asyncio.timeout(_CLOSE_SECONDS):
                await held.context.raw.close()
        self._live.discard(held)

    async def heartbeat(self, handle: BrowserHandle) -> None:
        """Not called: these leases do not end by themselves."""

    async def interrupt(self, handle: BrowserHandle) -> None:
        """See `BrowserProvider.interrupt`."""
        held: Held = handle.state
        for view in held.context.tabs():
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_INTERRUPT_SECONDS):
                    await (await view.cdp()).send("Page.crash")

    async def aclose(self) -> None:
        """See `BrowserProvider.aclose`: leaves that browser running, with none of our contexts."""
        for held in list(self._live):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await held.context.raw.close()
        self._live.clear()
        driver, self._driver, self._browser = self._driver, None, None
        if driver is not None:
            await driver.aclose()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove_folder, folder)

    def health(self) -> Mapping[str, Any]:
        """See `BrowserProvider.health`."""
        return {
            "endpoint": self._endpoint,
            "connected": self._browser is not None and self._browser.is_connected(),
            "version": self._browser.version if self._browser is not None else None,
            "contexts": len(self._live),
        }

    async def _connected(self) -> PlaywrightBrowser:
        async with self._connecting:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            if self._folder is None:
                self._folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="homing-web-remote-"))
            if self._driver is None or not self._driver.is_running:
                self._driver = await Driver.start(self._folder)
            try:
                self._browser = await self._driver.playwright.chromium.connect_over_cdp(
                    self._endpoint, timeout=_CONNECT_SECONDS * 1000
                )
            except Exception as error:
                raise BrowserStartError("the remote browser cannot be reached; the server's log says why") from error
            return self._browser

    def __repr__(self) -> str:
        return f"<RemoteProvider: {len(self._live)} leases>"
