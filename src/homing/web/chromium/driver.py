"""The Playwright driver: one Node process that speaks to a worker's browsers.

Its process is known from its start, carries the worker's mark in its environment, and does not know the run directory.
Playwright is imported here on first use: it is heavy, and a server without sessions needs none of it.

Not here: the browsers (`browser.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from homing.errors import ConfigurationError
from homing.web.base import ProcessMark
from homing.web.errors import BrowserStartError, NoBrowserError
from homing.web.processes import browser_environment, children, command_line, end, is_running, is_stopped

if TYPE_CHECKING:
    from playwright.async_api import Playwright

logger = logging.getLogger(__name__)

DRIVER_MISSING: Final = "browsers need their driver, Playwright: pip install 'homing[web]'"
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 1.0


def check_driver() -> None:
    """See that Playwright is installed, without importing it.

    Raises:
        ConfigurationError: it is not.
    """
    if importlib.util.find_spec("playwright") is None:
        raise ConfigurationError(f"web: {DRIVER_MISSING}")


def import_driver() -> None:
    """Half a second of importing, which must not be the event loop's.

    Raises:
        NoBrowserError: it is not installed.
    """
    try:
        importlib.import_module("playwright.async_api")
    except ImportError as error:
        raise NoBrowserError(f"{DRIVER_MISSING} ({error})", shown=DRIVER_MISSING) from error


class Driver:
    """One driver process. Owned by whoever started it, who ends with `aclose`."""

    def __init__(self, playwright: Playwright, process: ProcessMark | None) -> None:
        self.playwright = playwright
        self.process = process

    @classmethod
    async def start(cls, folder: Path) -> Driver:
        """Start one whose temporary files are below `folder`. One at a time: its process is told from what was there.

        Raises:
            NoBrowserError: it is not installed.
            BrowserStartError: it does not start.
        """
        try:
            from playwright.async_api import async_playwright
        except ImportError as error:
            raise NoBrowserError(DRIVER_MISSING) from error
        before = set(children(os.getpid()))
        try:
            with _environment(folder):
                async with asyncio.timeout(_START_SECONDS):
                    playwright = await async_playwright().start()
        except Exception as error:
            started = set(children(os.getpid())) - before
            await asyncio.to_thread(end, started & _drivers(started), _STOP_SECONDS)
            raise BrowserStartError("the browser driver did not start; the server's log says why") from error
        started = _drivers(set(children(os.getpid())) - before)
        return cls(playwright, next(iter(started), None))

    @property
    def is_running(self) -> bool:
        return self.process is None or is_running(self.process)

    @property
    def is_held(self) -> bool:
        """Whether a signal holds it: it is there, and answers nobody until it is let go on."""
        return self.process is not None and is_stopped(self.process)

    @contextlib.asynccontextmanager
    async def watched(self, limit: asyncio.Timeout, is_held: Callable[[], bool] | None = None) -> AsyncIterator[None]:
        """End a limit as soon as a signal is seen to hold the driver, which then gives no answer. A look before asking it
        is not enough: a process is seen to be held some time after the signal was sent.

        Args:
            is_held: What else would give none; runs in a thread.
        """
        loop = asyncio.get_running_loop()

        async def watch() -> None:
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                if self.is_held or (is_held is not None and await asyncio.to_thread(is_held)):
                    limit.reschedule(loop.time())
                    return

        watching = loop.create_task(watch(), name="watch driver")
        try:
            yield
        finally:
            watching.cancel()

    async def answers(self, seconds: float = _ANSWER_SECONDS) -> bool:
        """Whether it answers in time, whatever its browsers do."""
        try:
            async with asyncio.timeout(seconds):
                asked = await self.playwright.request.new_context()
                await asked.dispose()
        except Exception:
            return False
        return True

    async def aclose(self) -> None:
        """End it, by force after two seconds; its browsers end with it. Safe to call twice."""
        if self.process is not None and self.is_held:
            await asyncio.to_thread(end, [self.process], _STOP_SECONDS)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STOP_SECONDS):
                await self.playwright.stop()
        if self.process is not None:
            left = await asyncio.to_thread(end, [self.process], _STOP_SECONDS)
            if left:
                raise RuntimeError(f"the browser driver, process {self.process.pid}, cannot be ended")

    def __repr__(self) -> str:
        return f"<Driver {self.process.pid if self.process else '?'}>"


def _drivers(processes: set[ProcessMark]) -> set[ProcessMark]:
    return {process for process in processes if "run-driver" in command_line(process)}


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """The driver takes this process's environment and no other, so it is another while the driver starts."""
    wanted = {**browser_environment(), "TMPDIR": str(folder)}
    had = dict(os.environ)
    try:
        for name in had.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted)
        yield
    finally:
        for name in wanted.keys() - had.keys():
            os.environ.pop(name, None)
        os.environ.update(had)
