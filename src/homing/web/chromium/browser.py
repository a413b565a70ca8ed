"""One Chromium process tree, and the evidence of what of it is gone.

A browser leads a session of processes of its own, so everything it starts is found by that, whatever becomes of the
driver. It ends in steps, each with a deadline: the driver closes it; what is left of its processes is killed; its
folder is deleted. Only when nothing of that is left has it ended.

Contexts are made one at a time, so that the renderer that comes into being is known as that context's: two contexts
never share one.

Not here: what a session does in a context (`context.py`), who gets which browser (`provider.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from homing.tasks import ended
from homing.web.base import Footprint, ProcessMark
from homing.web.chromium.binary import CHROMIUM_ENV, Binary
from homing.web.chromium.driver import Driver
from homing.web.errors import BrowserStartError
from homing.web.processes import (
    browser_environment,
    children,
    command_line,
    end,
    is_running,
    is_stopped,
    led_by,
    mark,
    memory_of,
    remove_folder,
)
from homing.web.worker_folder import forget_leader, note_leader

if TYPE_CHECKING:
    from playwright.async_api import Browser as PlaywrightBrowser
    from playwright.async_api import BrowserContext, CDPSession

logger = logging.getLogger(__name__)

_LAUNCH_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 2.0
_CONTEXT_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.02
"""A new browser needs longer until it has children."""
_ANSWER_SECONDS: Final = 1.0
_KILL_SECONDS: Final = 2.0

_KIND: Final = re.compile(r"(?:^| )--type=([\w-]+)")

FLAGS: Final = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-breakpad",
    "--no-pings",
    "--mute-audio",
    # A process that waits for a page that is not there yet would be nobody's.
    "--disable-features=SpareRendererForSitePerProcess,AsyncDns,DnsOverHttps,WebOTP,Translate,OptimizationHints",
    # What does not go through the proxy does not go.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a browser is started.

    Attributes:
        proxy: Where every connection goes through; None: none.
        bypass: Hosts with ports that are reached directly.
        folder: Where its folder is made.
    """

    binary: Binary
    folder: Path
    proxy: str | None = None
    bypass: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Chromium's arguments."""
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        return [*sandbox, *FLAGS, *self.flags]


class Browser:
    """One browser. Owned by its provider, which ends it with `aclose`; borrows the driver."""

    def __init__(self, driver: Driver, playwright: PlaywrightBrowser, cdp: CDPSession, folder: Path) -> None:
        self.driver = driver
        self.playwright = playwright
        self.folder = folder
        self.process: ProcessMark | None = None
        self.leases = 0
        self.served = 0
        self.is_retired = False
        self._cdp = cdp
        self._known: set[ProcessMark] = set()
        self._making = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def launch(cls, driver: Driver, launch: Launch) -> Browser:
        """Start one.

        Raises:
            BrowserStartError: it does not start; nothing of it is left.
        """
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="browser-", dir=launch.folder))
        playwright = None
        leaders: list[ProcessMark] = []
        try:
            async with (
                asyncio.timeout(_LAUNCH_SECONDS) as limit,
                driver.watched(limit, lambda: any(_is_held(led_by(each)) for each in leaders)),
                _noting_launch(driver, launch.folder, leaders),
            ):
                playwright = await driver.playwright.chromium.launch(
                    executable_path=launch.binary.path,
                    args=launch.arguments(),
                    env=dict(browser_environment()),
                    downloads_path=folder,
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                    timeout=(_LAUNCH_SECONDS - 1) * 1000,
                    proxy=None
                    if launch.proxy is None
                    else {"server": launch.proxy, "bypass": ",".join(["<-loopback>", *launch.bypass])},
                )
                cdp = await playwright.new_browser_cdp_session()
                browser = cls(driver, playwright, cdp, folder)
                pids = await browser._pids("browser")
                browser.process = next(iter(pids), None)
                if browser.process is not None and browser.process not in leaders:
                    await asyncio.to_thread(note_leader, launch.folder, browser.process)
        except BaseException as error:
            with contextlib.suppress(Exception):
                if playwright is not None:
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await playwright.close()
            for leader in leaders:
                # It may be dead, and what it started be held by a signal: then nobody else ends that.
                if not await asyncio.to_thread(end, led_by(leader), _KILL_SECONDS):
                    await asyncio.to_thread(forget_leader, launch.folder, leader)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(remove_folder, folder)
            if not isinstance(error, Exception):
                raise
            logger.warning("%s did not start; %s can name another", launch.binary, CHROMIUM_ENV, exc_info=error)
            raise BrowserStartError("the browser did not start; the server's log says why") from error
        logger.info("browser started, process %s", browser.process and browser.process.pid)
        return browser

    @property
    def is_running(self) -> bool:
        """Whether it is there and its driver speaks to it; a stopped one is."""
        return (
            self._closing is None
            and self.playwright.is_connected()
            and self.driver.is_running
            and (self.process is None or is_running(self.process))
        )

    @property
    def is_usable(self) -> bool:
        """Whether it may be given a session: it runs, and no signal holds it."""
        return self.is_running and not (self.process is not None and is_stopped(self.process))

    async def new_context(self, **options: Any) -> tuple[BrowserContext, Any, Footprint]:
        """A context with one page, and its renderer as its footprint.

        Raises:
            Exception: the browser does not make one; nothing of it is left that the browser's end does not end.
        """
        async with self._making:
            if self.is_retired:
                raise BrowserStartError("the browser takes no more sessions")  # those before this one have seen to it
            raw = None
            try:
                async with (
                    asyncio.timeout(_CONTEXT_SECONDS) as limit,
                    self.driver.watched(limit, lambda: _is_held(self._processes())),
                ):
                    before = await self._renderers()
                    raw = await self.playwright.new_context(**options)
                    page = await raw.new_page()
                    new = await self._renderers() - before
            except BaseException:
                if raw is not None:
                    with contextlib.suppress(Exception):
                        async with asyncio.timeout(_CLOSE_SECONDS):
                            await raw.close()
                raise
            self.served += 1
            # More than one: another context's page has moved to another site meanwhile; neither is known then.
            footprint = Footprint(processes=new if len(new) == 1 else set())
            self._known |= footprint.processes
            return raw, page, footprint

    async def close_context(self, raw: BrowserContext, footprint: Footprint) -> bool:
        """Close a context and end what it leaves; whether the browser still answers."""
        closed = False
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await raw.close()
            closed = True
        if await self._wait_gone(footprint.processes, 0.05 if closed else 0.0):
            await asyncio.to_thread(end, footprint.processes, _KILL_SECONDS)
        await self._end_stopped_strangers()
        self._known -= footprint.processes
        return closed or await self.answers()

    async def _end_stopped_strangers(self) -> None:
        """Renderers that are held by a signal and are no known context's: of a page that moved to another site. Pages
        that are closed leave such a one behind, and it would be there for ever."""
        try:
            # Asked of the browser: a look at every process of the machine costs more than the context's close.
            async with asyncio.timeout(_ANSWER_SECONDS):
                renderers = await self._renderers()
        except Exception:
            return  # it does not answer, and is ended for that
        strangers = [each for each in renderers if each not in self._known and is_stopped(each)]
        if strangers:
            await asyncio.to_thread(end, strangers, _KILL_SECONDS)

    async def memory_bytes(self) -> int:
        """What its processes hold, what they share counted in proportion."""
        return await asyncio.to_thread(lambda: memory_of(self._processes()))

    async def answers(self, seconds: float = _ANSWER_SECONDS) -> bool:
        """Whether the browser itself answers in time, however its pages are."""
        try:
            async with asyncio.timeout(seconds):
                await self._cdp.send("Browser.getVersion")
        except Exception:
            return False
        return True

    async def aclose(self) -> None:
        """End it, by force in the end. Safe to call twice and at once: there is one end, which outlives its callers.

        Raises:
            RuntimeError: something of it is left.
        """
        if self._closing is None or (self._closing.done() and self._closing.exception() is not None):
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close browser")
        await asyncio.shield(self._closing)

    async def kill(self) -> None:
        """End it by force, without asking it; its sessions see it go."""
        await asyncio.to_thread(end, self._processes(), _KILL_SECONDS)

    async def _close(self) -> None:
        processes = await asyncio.to_thread(self._processes)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.playwright.close()
        # What came into being meanwhile is in the session too.
        left = await asyncio.to_thread(end, {*processes, *self._processes()}, _KILL_SECONDS)
        await asyncio.to_thread(remove_folder, self.folder)
        if self.process is not None and not left:
            await asyncio.to_thread(forget_leader, self.folder.parent, self.process)
        if left:
            raise RuntimeError(f"{len(left)} processes of a browser cannot be ended")

    def _processes(self) -> Sequence[ProcessMark]:
        return [] if self.process is None else led_by(self.process)

    async def _renderers(self) -> set[ProcessMark]:
        return await self._pids("renderer")

    async def _pids(self, kind: str) -> set[ProcessMark]:
        found = await self._cdp.send("SystemInfo.getProcessInfo")
        marks = (mark(each["id"]) for each in found["processInfo"] if each["type"] == kind)
        return {each for each in marks if each is not None}

    async def _wait_gone(self, processes: set[ProcessMark], grace_seconds: float) -> list[ProcessMark]:
        """Those still there after a moment: a renderer needs some milliseconds to end."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        left = [each for each in processes if is_running(each)]
        while left and loop.time() < until:
            await asyncio.sleep(0.005)
            left = [each for each in left if is_running(each)]
        return left

    def __repr__(self) -> str:
        state = "retired" if self.is_retired else "running" if self.is_running else "gone"
        return f"<Browser {self.process.pid if self.process else '?'}: {state}, {self.leases} leases, {self.served} served>"


def kind_of(process: ProcessMark) -> str:
    """What a process of Chromium is: `renderer`, `zygote`, `gpu-process`, `utility`; `browser` for the one that leads.

    Those that a zygote has forked show all their arguments as one text, so it is searched, not taken apart.
    """
    found = _KIND.search(" ".join(command_line(process)))
    return found[1] if found else "browser"


def _is_held(processes: Iterable[ProcessMark]) -> bool:
    """Whether a part that all pages need is held by a signal."""
    return any(is_stopped(each) and kind_of(each) != "renderer" for each in processes)


@contextlib.asynccontextmanager
async def _noting_launch(driver: Driver, folder: Path, leaders: list[ProcessMark]) -> AsyncIterator[None]:
    """Note the process that the driver starts meanwhile as soon as it is there, in `folder` and in `leaders`.

    The driver tells of a browser only once it serves. One that dies before leaves children that show no mark; unless their
    session is known by then, nobody can tell whose they are.
    """
    process = driver.process
    if process is None:
        yield
        return
    before = set(await asyncio.to_thread(children, process.pid))

    async def watch() -> None:
        while not leaders:
            await asyncio.sleep(_LOOK_SECONDS)
            for each in set(await asyncio.to_thread(children, process.pid)) - before:
                leaders.append(each)
                await asyncio.to_thread(note_leader, folder, each)

    watching = asyncio.get_running_loop().create_task(watch(), name="watch browser's start")
    try:
        yield
    finally:
        watching.cancel()
        await ended([watching])
