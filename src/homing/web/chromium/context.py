"""One session's pages: which there are, which is active, and what happened in them since the last look.

Nothing a page does waits for an answer: a dialog is answered at once and noted, a new page becomes the active one, a
download and a file chooser are noted. So no step hangs on them.

Not here: what a session does (`backend.py`), how the context came to be and ends (`provider.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from homing.web.chromium.view import View
from homing.web.errors import BrowserLostError
from homing.web.models import Dialog, Download
from homing.web.tasks import Tasks

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, ConsoleMessage, FileChooser, Page
    from playwright.async_api import Dialog as PlaywrightDialog
    from playwright.async_api import Download as PlaywrightDownload
    from playwright.async_api import Error as PlaywrightError

logger = logging.getLogger(__name__)

MAX_PAGES: Final = 20
MAX_DOWNLOADS: Final = 50
MAX_DOWNLOAD_BYTES: Final = 100 * 2**20
_NOTED: Final = 50
_TEXT: Final = 500


@dataclass(slots=True)
class _Entry:
    name: str
    url: str
    status: str = "started"
    size_bytes: int | None = None

    def shown(self) -> Download:
        return Download(name=self.name, url=self.url, status=self.status, size_bytes=self.size_bytes)


class Context:
    """A session's pages and what happens in them. Owns its listeners' tasks; borrows the Playwright context."""

    def __init__(self, raw: BrowserContext, page: Page) -> None:
        self.raw = raw
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.views: list[View] = []
        self.dialog: Dialog | None = None
        self.dialog_answer: tuple[bool, str | None] | None = None
        self.chooser: FileChooser | None = None
        self.console: deque[str] = deque(maxlen=_NOTED)
        self.console_dropped = False
        self._downloads: list[_Entry] = []
        self._tasks = Tasks()
        self._history: list[View] = []
        self._adopt(page)
        raw.on("page", self._on_page)
        raw.on("close", self._on_close)

    @property
    def active(self) -> View:
        """The page that actions go to: the newest one, unless another was chosen.

        Raises:
            BrowserLostError: the context has no page.
        """
        while self._history and self._history[-1].page.is_closed():
            self._history.pop()
        if not self._history:
            raise BrowserLostError("the session has no page any more")
        return self._history[-1]

    @property
    def has_page(self) -> bool:
        return any(not view.page.is_closed() for view in self._history)

    def tabs(self) -> list[View]:
        """The open pages, oldest first."""
        return [view for view in self.views if not view.page.is_closed()]

    def activate(self, view: View) -> None:
        """Make a page the active one."""
        if view in self._history:
            self._history.remove(view)
        self._history.append(view)

    async def new_page(self) -> View:
        """Open an empty page, which becomes the active one."""
        page = await self.raw.new_page()
        view = self._view_of(page) or self._adopt(page)
        self.activate(view)
        return view

    async def close_others(self, kept: View) -> None:
        """Close every page but one."""
        for view in self.tabs():
            if view is not kept:
                with contextlib.suppress(Exception):
                    await view.page.close()

    def downloads(self) -> tuple[Download, ...]:
        """Those of the session so far; those under way with their state now."""
        return tuple(entry.shown() for entry in self._downloads)

    def take_dialog(self) -> Dialog | None:
        """The last dialog since this was last asked."""
        dialog, self.dialog = self.dialog, None
        return dialog

    def take_console(self) -> tuple[tuple[str, ...], bool]:
        """The console's errors since this was last asked, and whether there were more than are kept."""
        errors, dropped = tuple(self.console), self.console_dropped
        self.console.clear()
        self.console_dropped = False
        return errors, dropped

    def forget(self) -> None:
        """Forget what has happened: another try begins."""
        self.take_dialog()
        self.take_console()
        self._downloads.clear()
        self.dialog_answer = None
        self.chooser = None

    async def aclose(self) -> None:
        """End what listens. Safe to call twice."""
        for entry in self._downloads:
            if entry.status == "started":
                entry.status = "cancelled"
        left = await self._tasks.aclose(1.0)
        if left:
            raise RuntimeError(f"still running: {', '.join(left)}")

    def _view_of(self, page: Page) -> View | None:
        return next((view for view in self.views if view.page is page), None)

    def _adopt(self, page: Page) -> View:
        view = View(page)
        self.views.append(view)
        self._history.append(view)
        page.on("dialog", self._on_dialog)
        page.on("download", self._on_download)
        page.on("filechooser", self._on_chooser)
        page.on("console", self._on_console)
        page.on("pageerror", self._on_page_error)
        return view

    def _on_page(self, page: Page) -> None:
        if self._view_of(page) is not None:
            return
        if len(self.tabs()) >= MAX_PAGES:
            self._note(f"a new page was closed: a session has {MAX_PAGES} at most")
            self._tasks.spawn(_quietly(page.close()), "close page")
            return
        self._adopt(page)

    def _on_close(self, _: object) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def _on_dialog(self, dialog: PlaywrightDialog) -> None:
        kind = dialog.type
        accept, text = self.dialog_answer or (kind == "beforeunload", None)
        self.dialog_answer = None
        self.dialog = Dialog(kind=kind, message=dialog.message[:_TEXT], handled="accepted" if accept else "dismissed")
        answer = dialog.accept(text or "") if accept else dialog.dismiss()
        self._tasks.spawn(_quietly(answer), "answer dialog")

    def _on_download(self, download: PlaywrightDownload) -> None:
        entry = _Entry(download.suggested_filename[:_TEXT], download.url[:_TEXT])
        if len(self._downloads) >= MAX_DOWNLOADS:
            self._note(f"a download was refused: a session has {MAX_DOWNLOADS} at most")
            self._tasks.spawn(_quietly(download.cancel()), "refuse download")
            return
        self._downloads.append(entry)
        self._tasks.spawn(self._follow(download, entry), "follow download")

    async def _follow(self, download: PlaywrightDownload, entry: _Entry) -> None:
        try:
            path = await download.path()
        except Exception:
            if entry.status == "started":
                entry.status = "cancelled"
            return
        size = (await asyncio.to_thread(path.stat)).st_size
        entry.size_bytes = size
        entry.status = "complete"

    def _on_chooser(self, chooser: FileChooser) -> None:
        self.chooser = chooser

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._note(message.text)

    def _on_page_error(self, error: PlaywrightError) -> None:
        self._note(str(error))

    def _note(self, text: str) -> None:
        if len(self.console) == self.console.maxlen:
            self.console_dropped = True
        self.console.append(text if len(text) <= _TEXT else f"{text[:_TEXT]}…")

    def __repr__(self) -> str:
        return f"<Context: {len(self.tabs())} pages, {len(self._downloads)} downloads>"


async def _quietly(awaitable: Any) -> None:
    """Whatever becomes of it: the page may be gone before it is answered."""
    with contextlib.suppress(Exception):
        await awaitable
