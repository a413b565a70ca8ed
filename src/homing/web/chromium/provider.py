"""Who gets which browser: the provider `local_process`.

One browser serves many sessions, each in a context of its own; or each session has a browser (`isolation="browser"`).
A few contexts are kept ready, never used before and never used again: what one session leaves cannot reach another.
A browser's life is bounded: after so many sessions, or over so much memory, it takes no more and ends with its last one.

A release ends by evidence: the context's renderers and folders are gone. What does not end is ended by force, from the
page outwards: renderer, browser, driver.

Not here: one browser (`browser.py`), a session's pages (`context.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from homing.errors import ConfigurationError
from homing.web.base import BrowserHandle, BrowserSpec
from homing.web.chromium.binary import Binary, find_binary
from homing.web.chromium.browser import Browser, Launch
from homing.web.chromium.context import Context
from homing.web.chromium.driver import Driver
from homing.web.chromium.gateway import Gateway
from homing.web.chromium.held import Held
from homing.web.chromium.rules import NavigationRules
from homing.web.errors import BrowserStartError
from homing.web.processes import (
    end,
    end_orphans,
    left_of,
    owner_mark,
    remove_folder,
    remove_folders_of_the_dead,
)
from homing.web.tasks import Tasks
from homing.web.worker_folder import make_worker_folder

logger = logging.getLogger(__name__)

VIEWPORT: Final = (1280, 720)
_INTERRUPT_SECONDS: Final = 0.5
_REFILL_SECONDS: Final = 5.0
_HELD_SECONDS: Final = 0.5
"""For so long a signal may hold the driver before it is taken for lost."""
_MEASURED_EVERY: Final = 10
"""A browser's memory is looked at after so many sessions: it takes some milliseconds."""

_numbers = itertools.count(1)


@dataclass(eq=False, slots=True)
class LocalHeld(Held):
    """A context of a browser of ours.

    Attributes:
        release: Its one end; set when it begins.
    """

    browser: Browser
    own_browser: bool
    release: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How local browsers are held.

    Attributes:
        executable: The Chromium; None: the first that is found.
        isolation: `context` (sessions share a browser) or `browser` (each has its own).
        warm: Contexts kept ready.
        sessions_per_browser: A browser that has served so many takes no more.
        memory_bytes: Neither does one that holds more, by proportional share.
        viewport: Width and height of pages, CSS pixels.
        flags: Chromium's own, beside those that are always given.
    """

    executable: str | None = None
    isolation: str = "context"
    warm: int = 2
    sessions_per_browser: int = 500
    memory_bytes: int = 3 * 2**30
    viewport: tuple[int, int] = VIEWPORT
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.executable is not None and not isinstance(self.executable, str):
            raise ConfigurationError(f"web: executable is {self.executable!r}; it has to be a path")
        for name in ("warm", "sessions_per_browser", "memory_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigurationError(f"web: {name} is {value!r}; it has to be a whole number")
        check_viewport(self.viewport)
        if not isinstance(self.flags, tuple) or not all(isinstance(each, str) for each in self.flags):
            raise ConfigurationError(f"web: flags is {self.flags!r}; it has to be a list of texts")
        if self.isolation not in ("context", "browser"):
            raise ConfigurationError("web: isolation is 'context' or 'browser'")
        if self.warm < 0 or self.sessions_per_browser < 1:
            raise ConfigurationError("web: warm is 0 or more, sessions_per_browser 1 or more")


def check_viewport(given: object) -> None:
    """See that a viewport is one.

    Raises:
        ConfigurationError: it is not.
    """
    sides = given if isinstance(given, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        shown = list(given) if isinstance(given, tuple) else given
        raise ConfigurationError(f"web: viewport is {shown!r}; it has to be a width and a height, such as [1280, 720]")


class LocalProvider:
    """Browsers of this machine. Owns the driver, the browsers, the way out and its folder.

    Args:
        origins: Called at the first start: the task sets' own origins, which a browser may reach though they are local.
        rules: What may be reached beside them.
    """

    name = "local_process"
    renewable = False

    def __init__(
        self,
        settings: LocalSettings | None = None,
        *,
        origins: Callable[[], Sequence[str]] = tuple,
        rules: NavigationRules | None = None,
    ) -> None:
        self.settings: Final = settings or LocalSettings()
        self.rules = rules or NavigationRules()
        self.binary: Binary | None = None
        self.gateway: Gateway | None = None
        self._origins = origins
        self._folder: Path | None = None
        self._driver: Driver | None = None
        self._browsers: list[Browser] = []
        self._ending: set[Browser] = set()
        self._warm: deque[LocalHeld] = deque()
        self._live: set[LocalHeld] = set()
        self._starting = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._refill: asyncio.Task[None] | None = None
        self._launching: asyncio.Task[Browser] | None = None
        self._tasks = Tasks()
        self._closed = False
        self.launched = 0
        self.last_error: str | None = None

    # --- the provider ---

    async def start(self) -> None:
        """See `BrowserProvider.start`: finds the binary, ends what dead workers left, opens the way out.

        Raises:
            BrowserStartError: there is no Chromium.
        """
        self._closed = False
        await self._open()

    async def _open(self) -> None:
        """What `start` does; for one at a time, since sessions that come together would each open a way out."""
        async with self._opening:
            if self._closed:
                raise BrowserStartError("the browser supply is closed")
            if self.binary is None:
                self.binary = await asyncio.to_thread(find_binary, self.settings.executable)
            if self.gateway is not None:
                return
            await asyncio.to_thread(end_orphans)
            if self._folder is None:
                await asyncio.to_thread(remove_folders_of_the_dead)
                self._folder = await asyncio.to_thread(make_worker_folder, owner_mark())
            origins = frozenset(self._origins())
            self.rules = NavigationRules(self.rules.origins | origins, self.rules.private)
            gateway = Gateway(self.rules)
            await gateway.start()
            self.gateway = gateway

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        """See `BrowserProvider.acquire`.

        Raises:
            BrowserStartError: no browser starts.
        """
        if self._closed:
            raise BrowserStartError("the browser supply is closed")
        if self.gateway is None:
            await self._open()
        held = self._ready()
        if held is None:
            try:
                held = await self._make()
            except Exception as error:
                self.last_error = f"{type(error).__name__}: {error}"
                raise
        self._live.add(held)
        self._plan_refill()
        return BrowserHandle(
            lease_id=f"local-{os.getpid()}-{next(_numbers)}",
            session_id=spec.session_id,
            provider=self.name,
            transport="local_process",
            owner_pid=os.getpid(),
            footprint=held.footprint,
            state=held,
        )

    async def release(self, handle: BrowserHandle) -> None:
        """See `BrowserProvider.release`.

        Raises:
            RuntimeError: something of the lease is left, or the lease is another process's.
        """
        if handle.owner_pid != os.getpid():
            raise RuntimeError("the browser lease belongs to another process")
        held: LocalHeld = handle.state
        if held.release is None or (held.release.done() and _failed(held.release)):
            held.release = self._tasks.spawn(self._release(held), "release browser lease")
        await asyncio.shield(held.release)

    async def heartbeat(self, handle: BrowserHandle) -> None:
        """Not called: local leases do not end by themselves."""

    async def interrupt(self, handle: BrowserHandle) -> None:
        """See `BrowserProvider.interrupt`: the pages' renderers are ended, which needs no answer of theirs."""
        held: LocalHeld = handle.state
        with contextlib.suppress(Exception):
            await asyncio.to_thread(end, held.footprint.processes, _INTERRUPT_SECONDS)
        for view in held.context.tabs():
            if view.is_usable:
                # A page that moved to another site has a renderer that only the browser knows.
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(_INTERRUPT_SECONDS):
                        await (await view.cdp()).send("Page.crash")

    async def aclose(self) -> None:
        """See `BrowserProvider.aclose`.

        Raises:
            RuntimeError: something could not be ended.
        """
        self._closed = True
        if self._launching is not None:
            self._launching.cancel()
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait((self._refill,), timeout=_REFILL_SECONDS)
        async with self._starting:
            self._warm.clear()
            browsers = {*self._browsers, *self._ending}
            failures = [
                each
                for each in await asyncio.gather(*(self._end(browser) for browser in browsers), return_exceptions=True)
                if isinstance(each, BaseException)
            ]
            if self._driver is not None:
                driver, self._driver = self._driver, None
                try:
                    await driver.aclose()
                except RuntimeError as error:
                    failures.append(error)
        await self._tasks.aclose(1.0)
        async with self._opening:  # nothing is opened any more after that
            if self.gateway is not None:
                gateway, self.gateway = self.gateway, None
                await gateway.aclose()
            if self._folder is not None:
                folder, self._folder = self._folder, None
                await asyncio.to_thread(remove_folder, folder)
        if failures:
            raise RuntimeError("; ".join(str(each) for each in failures))

    def health(self) -> Mapping[str, Any]:
        """See `BrowserProvider.health`."""
        return {
            "binary": None if self.binary is None else str(self.binary.path),
            "kind": None if self.binary is None else self.binary.kind,
            "version": None if self.binary is None else self.binary.version,
            "isolation": self.settings.isolation,
            "browsers": len(self._browsers),
            "launched": self.launched,
            "contexts": len(self._live),
            "warm": len(self._warm),
            "connections_refused": 0 if self.gateway is None else self.gateway.refused,
        }

    # --- contexts ---

    def _ready(self) -> LocalHeld | None:
        while self._warm:
            held = self._warm.popleft()
            if held.browser.is_usable and not held.browser.is_retired and held.context.has_page:
                return held
            held.browser.leases -= 1
        return None

    async def _make(self) -> LocalHeld:
        for attempt in (1, 2):
            browser = await self._browser()
            try:
                raw, page, footprint = await browser.new_context(
                    viewport={"width": self.settings.viewport[0], "height": self.settings.viewport[1]},
                    accept_downloads=True,
                    service_workers="block",
                    permissions=[],
                    locale="en-US",
                    timezone_id="UTC",
                )
            except Exception as error:
                browser.leases -= 1
                # A browser that makes no context serves nobody: it goes, with whom it still has.
                await self._retire(browser, now=not await browser.answers())
                if attempt == 2 or self._closed:
                    raise BrowserStartError("the browser does not open pages; the server's log says why") from error
                logger.warning("a browser made no context; another is tried", exc_info=error)
                continue
            if self.settings.isolation == "browser":
                if browser.process is not None:
                    footprint.processes.add(browser.process)
                footprint.folders.add(browser.folder)
            return LocalHeld(
                browser.playwright.is_connected,
                Context(raw, page),
                footprint,
                self.settings.viewport,
                browser=browser,
                own_browser=self.settings.isolation == "browser",
            )
        raise AssertionError("unreachable")

    async def _browser(self) -> Browser:
        """A browser with room for one more, counted in already."""
        async with self._starting:
            if self._closed:
                raise BrowserStartError("the browser supply is closed")
            await self._end_lost_driver()
            if self.settings.isolation == "context":
                for browser in list(self._browsers):
                    if browser.is_retired:
                        continue
                    if not browser.is_running:
                        await self._retire(browser, now=True)
                        continue
                    if browser.served >= self.settings.sessions_per_browser or not browser.is_usable:
                        await self._retire(browser)
                        continue
                    browser.leases += 1
                    return browser
            assert self._folder is not None
            assert self.binary is not None
            assert self.gateway is not None
            if self._driver is None:
                self._driver = await Driver.start(self._folder)
            launch = Launch(
                self.binary,
                self._folder,
                proxy=self.gateway.address,
                bypass=tuple(origin.partition("://")[2] for origin in sorted(self.rules.origins)),
                flags=self.settings.flags,
            )
            try:
                browser = await self._launch(self._driver, launch)
            except BrowserStartError:
                if not await self._driver.answers():
                    await self._end_driver()  # else it would fail the next one too
                raise
            self.launched += 1
            browser.leases += 1
            self._browsers.append(browser)
            return browser

    async def _launch(self, driver: Driver, launch: Launch) -> Browser:
        """A new browser; the supply's end does not wait until one starts that does not.

        Raises:
            BrowserStartError: it does not start, or the supply is closed.
        """
        self._launching = self._tasks.spawn(Browser.launch(driver, launch), "launch browser")
        try:
            return await self._launching
        except asyncio.CancelledError:
            if self._closed and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise BrowserStartError("the browser supply is closed") from None
            raise
        finally:
            self._launching = None

    async def _end_lost_driver(self) -> None:
        """A driver that is gone, or that a signal holds, speaks to no browser of its own: all of them go with it."""
        if self._driver is not None and self._driver.is_held:
            await asyncio.sleep(_HELD_SECONDS)
        if self._driver is not None and (self._driver.is_held or not self._driver.is_running):
            await self._end_driver()

    async def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            logger.warning("the browser driver does not answer and is ended, with its browsers")
            with contextlib.suppress(RuntimeError):
                await driver.aclose()

    async def _retire(self, browser: Browser, *, now: bool = False) -> None:
        """Give a browser no more sessions, and end it when it has none, or now."""
        browser.is_retired = True
        if now or browser.leases <= 0:
            self._tasks.spawn(self._end(browser), "close retired browser")

    async def _end(self, browser: Browser) -> None:
        """End a browser, which nobody is given any more.

        Until its end is seen `aclose` waits for it: its files are in the folder that is deleted last.

        Raises:
            RuntimeError: something of it is left.
        """
        if browser in self._browsers:
            self._browsers.remove(browser)
        self._ending.add(browser)
        await browser.aclose()
        self._ending.discard(browser)

    def _plan_refill(self) -> None:
        # From half on: seeds that come together find what is ready, and do not wait for what is made for later ones.
        if self._closed or self.settings.isolation != "context" or not self.settings.warm:
            return
        if len(self._warm) > self.settings.warm // 2:
            return
        if self._refill is None or self._refill.done():
            self._refill = self._tasks.spawn(self._refill_warm(), "make contexts ready")

    async def _refill_warm(self) -> None:
        while len(self._warm) < self.settings.warm and not self._closed:
            try:
                held = await self._make()
            except Exception as error:
                self.last_error = f"{type(error).__name__}: {error}"
                logger.warning("no context could be made ready: %s", self.last_error)
                return
            self._warm.append(held)

    async def _release(self, held: LocalHeld) -> None:
        browser = held.browser
        if held in self._live:
            self._live.discard(held)
            browser.leases -= 1
        with contextlib.suppress(RuntimeError):
            await held.context.aclose()
        if held.own_browser:
            await self._end(browser)
        elif browser.is_running:
            answers = await browser.close_context(held.context.raw, held.footprint)
            if not answers:
                logger.warning("a browser does not answer and is ended, with its %d sessions", browser.leases)
                await browser.kill()
                await self._retire(browser, now=True)
                if self._driver is not None and not self._driver.is_running:
                    self._driver = None
            else:
                await self._retire_if_spent(browser)
        else:
            await asyncio.to_thread(end, held.footprint.processes, 2.0)
            await self._retire(browser, now=True)
        left = left_of(held.footprint)
        if left:
            raise RuntimeError(f"left of the lease: {', '.join(left)}")

    async def _retire_if_spent(self, browser: Browser) -> None:
        """End it if it was to end and nobody has it; look now and then whether it has grown too large."""
        is_large = False
        if not browser.is_retired and browser.served % _MEASURED_EVERY == 0:
            is_large = await browser.memory_bytes() > self.settings.memory_bytes
        if is_large or (browser.is_retired and browser.leases <= 0):
            await self._retire(browser)

    def __repr__(self) -> str:
        return f"<LocalProvider: {len(self._browsers)} browsers, {len(self._live)} leases, {len(self._warm)} warm>"


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
