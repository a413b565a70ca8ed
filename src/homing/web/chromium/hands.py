"""Doing an action in a page, as a person would: by pointing, typing and pressing.

An element is pointed at where it is now; what covers it is named instead of being clicked. No action waits for a page to
get ready beyond its own bound, so what an action comes to does not hang on the machine's load.

What an action could not do is an `ActionFailedError`, which the observation shows; what it must not be is an
`InvalidActionError`, and nothing was tried.

Not here: what there is to see afterwards (`observing.py`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from homing.web.actions import Command
from homing.web.chromium.context import Context
from homing.web.chromium.rules import NavigationRules
from homing.web.chromium.view import View
from homing.web.errors import InvalidActionError, StaleRefError

if TYPE_CHECKING:
    from playwright.async_api import FilePayload

NAVIGATION_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 1.0
_CHOOSER_SECONDS: Final = 2.0
_NOOP_MILLISECONDS: Final = 1000
_WAIT_MILLISECONDS: Final = 5000
_POLL_SECONDS: Final = 0.05
_DRAG_STEPS: Final = 8
MAX_UPLOAD_BYTES: Final = 10 * 2**20

_REASONS: Final = {
    "gone": "the element is not in the page any more",
    "hidden": "the element is not visible",
    "disabled": "the element is disabled",
    "readonly": "the field is read-only",
    "outside": "the element cannot be scrolled into view",
    "not a field": "the element is no field to write in",
    "not a select": "the element has no options to select",
    "no such option": "there is no such option",
    "one option only": "only one option can be selected there",
    "malformed": "the value is not of the form that the field takes",
    "not checkable": "the element can be neither checked nor unchecked",
    "option": "an option of a closed list is not clicked: use select_option",
}


class ActionFailedError(Exception):
    """The action could not do what it says; the session goes on, and the observation shows the message."""


class Hands:
    """Does commands in a session's pages. Borrows the context."""

    def __init__(
        self, context: Context, rules: NavigationRules, navigation_seconds: float = NAVIGATION_SECONDS
    ) -> None:
        self._context = context
        self._rules = rules
        self._navigation_seconds = navigation_seconds
        self.messages: list[str] = []
        self.answer: str | None = None
        self.infeasible: str | None = None
        self.has_stopped = False
        self._clipboard = ""

    async def do(self, command: Command) -> None:
        """Do it.

        Raises:
            InvalidActionError: it names what is not there; nothing was tried.
            ActionFailedError: it could not be done.
            playwright.async_api.Error: the page went away under it, or the browser refused.
        """
        act: Callable[..., Awaitable[None]] = getattr(self, f"_do_{command.name}")
        await act(**command.arguments)

    # --- elements ---

    async def _point(self, ref: str, *, enabled: bool = True) -> tuple[float, float]:
        found = await self._ask("locate", ref, {"enabled": enabled, "force": False})
        return found["x"], found["y"]

    async def _ask(self, name: str, ref: str, *arguments: object) -> Any:
        answer = await self._context.active.call(name, number_of(ref), *arguments)
        error = answer.get("error") if isinstance(answer, dict) else None
        if error == "stale":
            raise StaleRefError(f"the ref {_shown(ref)} is not of the last observation")
        if error == "covered":
            raise ActionFailedError(f"the element is covered by {answer['by']}")
        if error is not None:
            raise ActionFailedError(_REASONS.get(error, error))
        return answer

    async def _do_click(
        self,
        ref: str | None = None,
        button: str = "left",
        modifiers: list[str] | None = None,
        x: float | None = None,
        y: float | None = None,
        count: int = 1,
    ) -> None:
        if ref is not None:
            x, y = await self._point(ref)
        assert x is not None
        assert y is not None
        page = self._context.active.page
        held = list(modifiers or [])
        for key in held:
            await page.keyboard.down(key)
        try:
            await page.mouse.click(x, y, button=button, click_count=count)  # type: ignore[arg-type]  # one of three
        finally:
            for key in reversed(held):
                await page.keyboard.up(key)

    async def _do_dblclick(self, **arguments: Any) -> None:
        await self._do_click(**arguments, count=2)

    async def _do_hover(self, ref: str) -> None:
        x, y = await self._point(ref, enabled=False)
        await self._context.active.page.mouse.move(x, y)

    async def _do_focus(self, ref: str) -> None:
        await self._ask("focus", ref)

    async def _do_fill(self, ref: str, value: str, enable_autocomplete_menu: bool = False) -> None:
        ready = await self._ask("prepare", ref, value)
        if ready.get("done"):
            return
        keyboard = self._context.active.page.keyboard
        if not ready["empty"]:
            await keyboard.press("Delete")
        if not value:
            return
        if enable_autocomplete_menu:
            await keyboard.insert_text(value[:-1])
            await keyboard.type(value[-1])
        else:
            await keyboard.insert_text(value)

    async def _do_clear(self, ref: str) -> None:
        await self._do_fill(ref, "")

    async def _do_press(self, ref: str, key: str) -> None:
        await self._ask("focus", ref)
        await self._do_keyboard_press(key)

    async def _do_select_option(self, ref: str, options: list[str]) -> None:
        await self._ask("choose", ref, options)

    async def _do_check(self, ref: str, wanted: bool = True) -> None:
        state = await self._ask("checked", ref)
        if state["checked"] == wanted:
            return
        if state["radio"] and not wanted:
            raise ActionFailedError("a radio button is unchecked by checking another")
        await self._do_click(ref)
        if (await self._ask("checked", ref))["checked"] != wanted:
            raise ActionFailedError("the element did not change")

    async def _do_uncheck(self, ref: str) -> None:
        await self._do_check(ref, wanted=False)

    async def _do_select_text(self, ref: str, start: int | None = None, end: int | None = None) -> None:
        if (start is None) != (end is None):
            raise InvalidActionError("select_text needs both start and end, or neither")
        await self._ask("selectText", ref, start, end)

    async def _do_drag_and_drop(self, from_ref: str, to_ref: str) -> None:
        await self._point(from_ref)
        end = await self._point(to_ref, enabled=False)
        # Looking for the second may have scrolled the first.
        start = await self._point(from_ref)
        await self._do_mouse_drag_and_drop(*start, *end)

    async def _do_scroll(self, delta_x: float = 0, delta_y: float = 0, ref: str | None = None) -> None:
        if ref is not None:
            await self._ask("scroll", ref, delta_x, delta_y)
        else:
            await self._context.active.page.mouse.wheel(delta_x, delta_y)

    async def _do_upload_file(self, ref: str, files: list[dict[str, str]]) -> None:
        payloads = [_payload(each) for each in files]
        if sum(len(each["buffer"]) for each in payloads) > MAX_UPLOAD_BYTES:
            raise InvalidActionError(f"the files are larger than {MAX_UPLOAD_BYTES} bytes")
        x, y = await self._point(ref)
        page = self._context.active.page
        self._context.chooser = None
        await page.mouse.click(x, y)
        deadline = asyncio.get_running_loop().time() + _CHOOSER_SECONDS
        while self._context.chooser is None:
            if asyncio.get_running_loop().time() > deadline:
                raise ActionFailedError("the element asks for no files")
            await asyncio.sleep(_POLL_SECONDS)
        chooser, self._context.chooser = self._context.chooser, None
        await chooser.set_files(payloads)

    # --- keyboard and mouse ---

    async def _do_keyboard_type(self, text: str) -> None:
        await self._context.active.page.keyboard.type(text)

    async def _do_keyboard_insert_text(self, text: str) -> None:
        await self._context.active.page.keyboard.insert_text(text)

    async def _do_keyboard_press(self, key: str) -> None:
        command = _clipboard_command(key)
        if command is not None:
            await self._use_clipboard(command)
            return
        with _bad_key(key):
            await self._context.active.page.keyboard.press(key)

    async def _use_clipboard(self, command: str) -> None:
        """The browser has one clipboard for all its sessions, so a session has one of its own instead."""
        keyboard = self._context.active.page.keyboard
        if command == "paste":
            if self._clipboard:
                await keyboard.insert_text(self._clipboard)
            return
        selected = await self._context.active.call("copy")
        if selected["text"]:
            self._clipboard = selected["text"]
            if command == "cut" and selected["editable"]:
                await keyboard.press("Delete")

    async def _do_keyboard_down(self, key: str) -> None:
        with _bad_key(key):
            await self._context.active.page.keyboard.down(key)

    async def _do_keyboard_up(self, key: str) -> None:
        with _bad_key(key):
            await self._context.active.page.keyboard.up(key)

    async def _do_mouse_move(self, x: float, y: float) -> None:
        await self._context.active.page.mouse.move(x, y)

    async def _do_mouse_down(self, x: float, y: float, button: str = "left") -> None:
        mouse = self._context.active.page.mouse
        await mouse.move(x, y)
        await mouse.down(button=button)  # type: ignore[arg-type]  # one of three

    async def _do_mouse_up(self, x: float, y: float, button: str = "left") -> None:
        mouse = self._context.active.page.mouse
        await mouse.move(x, y)
        await mouse.up(button=button)  # type: ignore[arg-type]  # one of three

    async def _do_mouse_click(self, x: float, y: float, button: str = "left") -> None:
        await self._do_click(x=x, y=y, button=button)

    async def _do_mouse_dblclick(self, x: float, y: float, button: str = "left") -> None:
        await self._do_click(x=x, y=y, button=button, count=2)

    async def _do_mouse_drag_and_drop(self, from_x: float, from_y: float, to_x: float, to_y: float) -> None:
        mouse = self._context.active.page.mouse
        await mouse.move(from_x, from_y)
        await mouse.down()
        try:
            await mouse.move(to_x, to_y, steps=_DRAG_STEPS)
        finally:
            await mouse.up()

    # --- pages ---

    async def _do_goto(self, url: str) -> None:
        why = self._rules.refused_url(url)
        if why is not None:
            raise ActionFailedError(f"the page was not opened: {why}")
        await self._navigate(self._context.active.page.goto(url, timeout=self._navigation_seconds * 1000))

    async def _do_go_back(self) -> None:
        await self._navigate(self._context.active.page.go_back(timeout=self._navigation_seconds * 1000))

    async def _do_go_forward(self) -> None:
        await self._navigate(self._context.active.page.go_forward(timeout=self._navigation_seconds * 1000))

    async def _navigate(self, going: Awaitable[object]) -> None:
        from playwright.async_api import TimeoutError as PlaywrightTimeoutError

        downloads = len(self._context.downloads())
        view = self._context.active
        try:
            await going
        except PlaywrightTimeoutError as error:
            # Else what is looked at would go on changing.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_STOP_SECONDS):
                    await (await view.cdp()).send("Page.stopLoading")
            raise ActionFailedError(f"the page had not loaded after {self._navigation_seconds:g} s") from error
        except Exception as error:
            if len(self._context.downloads()) > downloads or not view.is_usable:
                return  # a download took its place, or the crash is told by who sees it
            raise ActionFailedError(f"the page was not opened: {_first_line(error)}") from error

    async def _do_new_tab(self) -> None:
        await self._context.new_page()

    async def _do_tab_focus(self, index: int) -> None:
        view = self._tab(index)
        self._context.activate(view)
        with contextlib.suppress(Exception):
            await view.page.bring_to_front()

    async def _do_tab_close(self) -> None:
        await self._context.active.page.close()
        if not self._context.has_page:
            await self._context.new_page()

    def _tab(self, index: int) -> View:
        tabs = self._context.tabs()
        if not 0 <= index < len(tabs):
            raise InvalidActionError(f"there is no tab {index}; there are {len(tabs)}")
        return tabs[index]

    async def _do_handle_dialog(self, accept: bool, prompt_text: str | None = None) -> None:
        # Dialogs are answered when they open, so that nothing waits for them: this is for the next one.
        self._context.dialog_answer = (accept, prompt_text)

    # --- waiting and telling ---

    async def _do_noop(self, milliseconds: float | None = None) -> None:
        await asyncio.sleep(milliseconds / 1000 if milliseconds is not None else 0)

    async def _do_wait_for(
        self, text: str | None = None, ref: str | None = None, milliseconds: float = _WAIT_MILLISECONDS
    ) -> None:
        if (text is None) == (ref is None):
            raise InvalidActionError("wait_for needs a text or a ref")
        loop = asyncio.get_running_loop()
        until = loop.time() + milliseconds / 1000
        while True:
            if text is not None:
                if await self._context.active.call("shows", text):
                    return
            elif ref is not None:
                await self._ask("holds", ref)
                found = await self._context.active.call("locate", number_of(ref), {"enabled": True, "force": False})
                if "x" in found:
                    return
            if loop.time() > until:
                raise ActionFailedError(f"it had not come after {milliseconds / 1000:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    async def _do_send_msg_to_user(self, text: str) -> None:
        self.messages.append(text)
        self.answer = text

    async def _do_report_infeasible(self, reason: str) -> None:
        self.infeasible = reason
        self.has_stopped = True

    async def _do_stop(self, answer: str | None = None) -> None:
        self.answer = answer if answer is not None else self.answer
        self.has_stopped = True


def number_of(ref: str) -> int:
    """The element's number that a ref names.

    Raises:
        InvalidActionError: it is no ref.
    """
    digits = ref.removeprefix("e")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 9:
        raise InvalidActionError(f"{_shown(ref)} is no ref; the observation's are such as e12")
    return int(digits)


_CLIPBOARD_KEYS: Final = {
    **{f"{modifier}+{key}": command for modifier in ("Control", "ControlOrMeta", "Meta") for key, command in (
        ("c", "copy"), ("x", "cut"), ("v", "paste"), ("KeyC", "copy"), ("KeyX", "cut"), ("KeyV", "paste"),
        ("Insert", "copy"),
    )},
    "Shift+Insert": "paste",
    "Shift+Delete": "cut",
    "Copy": "copy", "Cut": "cut", "Paste": "paste",
}  # fmt: skip


def _clipboard_command(key: str) -> str | None:
    known = _CLIPBOARD_KEYS.get(key)
    if known is None and len(key.rpartition("+")[2]) == 1:
        known = _CLIPBOARD_KEYS.get(key[:-1] + key[-1].lower())
    return known


@contextlib.contextmanager
def _bad_key(key: str) -> Any:
    from playwright.async_api import Error

    parts = re.split(r"\+(?=.)", key)
    if not key or any(len(part) > 20 for part in parts):
        raise InvalidActionError(f"{_shown(key)} is no key")
    try:
        yield
    except Error as error:
        raise ActionFailedError(f"the key was not pressed: {_first_line(error)}") from error


def _payload(file: dict[str, str]) -> FilePayload:
    name = file["name"].replace("\\", "/").rpartition("/")[2].replace("\0", "")[:200] or "file"
    try:
        content = file["text"].encode() if "text" in file else base64.b64decode(file["base64"], validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidActionError("upload_file: a file's base64 cannot be read") from error
    return {"name": name, "mimeType": file.get("mime_type", "application/octet-stream"), "buffer": content}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
