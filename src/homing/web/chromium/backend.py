"""One session's task, played in its pages.

Every operation is bounded, and ends at once when the page's process, the context or the browser goes: so a call gets an
answer or one of the room's errors, whatever the page does.

An observation is read in one look from the page's isolated world. The refs in it are good until the next one.

Not here: how a page is read (`view.py`, `walk.js`), how an action is done (`hands.py`), what a task is (a task set).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from homing.web.actions import Command, observation_named, read_action
from homing.web.base import BackendSpec, Progress, Runner, TaskSet
from homing.web.chromium.context import Context
from homing.web.chromium.hands import NAVIGATION_SECONDS, ActionFailedError, Hands
from homing.web.chromium.held import Held
from homing.web.chromium.rules import NavigationRules
from homing.web.chromium.screencast import Screencast
from homing.web.chromium.trace import Trace
from homing.web.chromium.view import View
from homing.web.errors import (
    BrowserLostError,
    EvaluatorError,
    InvalidTaskError,
    PageCrashedError,
    PageUnresponsiveError,
    SessionConflictError,
    StaleRefError,
)
from homing.web.models import Action, Observation, Screenshot, StepResult, Tab, Task, VerifierResult
from homing.web.profiles import ObservationProfile, RuntimeProfile, observation_profile, runtime_profile
from homing.web.runners import LoopRunner, OperationGate
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE_SECONDS: Final = 5.0
_MARGIN: Final = 0.9
_RESET_TIMES: Final = 4.0
_TITLE_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 0.2
_LOOKS: Final = 3
_PAGE_END_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """How sessions are played.

    Attributes:
        settle_seconds: How long a step waits for a navigation that it has begun.
        navigation_seconds: How long `goto` and its like wait for the page.
        rules: Where an action may go; the connections have rules of their own, which are the provider's.
        trace: Every session is traced; else those whose task asks for it.
    """

    settle_seconds: float = _SETTLE_SECONDS
    navigation_seconds: float = NAVIGATION_SECONDS
    rules: NavigationRules = field(default_factory=NavigationRules)
    trace: bool = False


class ChromiumBackends:
    """Makes sessions' backends: see `BackendFactory`.

    Args:
        task_sets: By benchmark.
        gate: What all their operations go through.
    """

    def __init__(
        self, task_sets: Mapping[str, TaskSet], gate: OperationGate, settings: PlaySettings | None = None
    ) -> None:
        self._task_sets = task_sets
        self._gate = gate
        self._settings = settings or PlaySettings()

    def check(self, task: Task) -> Task:
        """See `BackendFactory.check`."""
        task_set = self._task_sets.get(task.benchmark)
        if task_set is None:
            raise InvalidTaskError(f"there is no such benchmark; there are {', '.join(sorted(self._task_sets))}")
        checked = task_set.check(task)
        observation_profile(checked.observation_profile)
        runtime_profile(checked.runtime_profile)
        return checked

    def backend(self, spec: BackendSpec) -> ChromiumBackend:
        """See `BackendFactory.backend`."""
        task_set = self._task_sets[spec.task.benchmark]
        rules = NavigationRules(
            self._settings.rules.origins | frozenset(task_set.origins()), self._settings.rules.private
        )
        return ChromiumBackend(spec, task_set, rules, self._settings)

    def runner(self, session_id: str) -> Runner:
        """See `BackendFactory.runner`."""
        return LoopRunner(self._gate)


class ChromiumBackend:
    """See `Backend`. Owns the recording of the page's picture; borrows the context, which the provider closes."""

    def __init__(self, spec: BackendSpec, task_set: TaskSet, rules: NavigationRules, settings: PlaySettings) -> None:
        self._spec = spec
        self._task_set = task_set
        self._settings = settings
        held: Held = spec.browser.state
        self._held = held
        self._context: Context = held.context
        self._rules = rules
        self._hands = Hands(self._context, rules, settings.navigation_seconds)
        self._profile = ObservationProfile()
        self._runtime = RuntimeProfile()
        self._tasks = Tasks()
        self._task = spec.task
        self._goal: tuple[str, ...] = ()
        self._observation_number = 0
        self._observation_id = ""
        self._next_ref = 1
        self._last_action = ""
        self._last_error = ""
        self._began = asyncio.get_running_loop().time()
        self._ended: Progress | None = None
        self._screencast = None if spec.recording.folder is None else Screencast(spec.recording.folder)
        self._trace = None if spec.recording.folder is None else Trace(self._context.raw, spec.recording.folder)

    # --- operations ---

    async def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]:
        """See `Backend.reset`."""
        self._task = task
        self._profile = observation_profile(task.observation_profile)
        self._runtime = runtime_profile(task.runtime_profile)
        self._hands = Hands(self._context, self._rules, self._settings.navigation_seconds)
        self._last_action = self._last_error = ""
        self._ended = None
        self._next_ref = 1
        self._began = asyncio.get_running_loop().time()
        self._context.forget()
        # The first load may take longer than a step; the manager has a bound of its own for it.
        observation = await self._guarded(self._begin(task), times=_RESET_TIMES)
        return observation, {"task_id": task.task_id, "seed": task.seed}

    async def observe(self) -> Observation:
        """See `Backend.observe`."""
        return await self._guarded(self._look())

    async def step(self, action: Action) -> StepResult:
        """See `Backend.step`."""
        command = read_action(action)
        named = observation_named(action)
        if named is not None and named != self._observation_id:
            raise StaleRefError("the action goes by an observation that is not the last one")
        if self._ended is not None:
            raise SessionConflictError("the task has ended: reset it, or close the session")
        try:
            return await self._guarded(self._step(command))
        except PageCrashedError:
            if not self._runtime.new_page_after_crash:
                raise
            return await self._guarded(self._after_crash(), crashes=False)

    async def evaluate(self, final_answer: str | None) -> VerifierResult:
        """See `Backend.evaluate`."""
        answer = final_answer if final_answer is not None else self._hands.answer
        if self._task_page().is_closed():
            raise EvaluatorError("the task's page is gone, and with it what it would have said")
        return await self._guarded(self._task_set.evaluate(self._task_page(), self._task, answer))

    async def close(self) -> None:
        """See `Backend.close`."""
        if self._screencast is not None:
            await self._screencast.aclose()
        if self._trace is not None:
            await self._trace.aclose()
        left = await self._tasks.aclose(_STOP_SECONDS)
        if left:
            raise RuntimeError("an operation has not stopped")

    # --- inside an operation's bound ---

    async def _begin(self, task: Task) -> Observation:
        view = self._context.views[0]
        if not view.is_usable:
            view = await self._context.new_page()
        await self._context.close_others(view)
        self._context.activate(view)
        await self._context.raw.clear_cookies()
        wanted = self._runtime.viewport
        if wanted is not None and wanted != self._held.viewport:
            await view.page.set_viewport_size({"width": wanted[0], "height": wanted[1]})
            self._held.viewport = wanted
        if self._screencast is not None:
            await self._screencast.start(view)
        if self._runtime.trace or self._settings.trace:
            if self._trace is None:
                raise ValueError("a trace was asked for, and this server keeps no recordings: leave it out")
            await self._trace.start()
        self._goal = await self._task_set.begin(view.page, task)
        return await self._look()

    async def _step(self, command: Command) -> StepResult:
        from playwright.async_api import Error

        if self._screencast is not None:
            self._screencast.next_step()
        self._last_action = str(command)
        self._last_error = ""
        before = self._context.active
        try:
            await self._hands.do(command)
        except ActionFailedError as error:
            self._last_error = str(error)
        except Error:
            # An action that closes its page has been done, though its answer never came.
            await asyncio.sleep(_PAGE_END_SECONDS)
            if not before.page.is_closed() or before.crashed.done():
                raise
        await self._settle()
        if self._screencast is not None and self._context.has_page and self._context.active is not before:
            await self._screencast.start(self._context.active)
        progress = await self._progress()
        terminated = progress.done or self._hands.has_stopped
        if terminated:
            self._ended = progress
        observation = await self._look()
        if self._trace is not None:
            await self._trace.count_step()
        info = dict(progress.info)
        if self._hands.infeasible is not None:
            info["infeasible"] = self._hands.infeasible
        if self._hands.messages:
            info["messages"] = list(self._hands.messages)
        return StepResult(
            observation=observation,
            execution_ok=not self._last_error,
            reward=progress.reward,
            terminated=terminated,
            info=info,
        )

    async def _after_crash(self) -> StepResult:
        """An empty page in place of those that have crashed; nothing is done in them again."""
        for view in self._context.views:
            if view.crashed.done():
                with contextlib.suppress(Exception):
                    await view.page.close()
        if not self._context.has_page:
            await self._context.new_page()
        self._last_error = "the page's process has ended; an empty page is in its place"
        return StepResult(observation=await self._look(), execution_ok=False)

    async def _progress(self) -> Progress:
        page = self._task_page()
        if page.is_closed():
            return Progress(info={"page": "closed"})
        return await self._task_set.progress(page, self._task)

    def _task_page(self) -> Any:
        return self._context.views[0].page

    async def _settle(self) -> None:
        """Wait, for a while, for a navigation that has begun."""
        if not self._context.has_page:
            await self._context.new_page()
        view = self._context.active
        if not view.is_usable:
            return
        await view.cdp()
        if not view.settled.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.settle_seconds):
                    await view.settled.wait()

    async def _seen(self) -> tuple[View, Any]:
        """The active page, and what it shows. If it closes under the look, the next one: a page may close itself."""
        from playwright.async_api import Error

        for _ in range(_LOOKS):
            if not self._context.has_page:
                await self._context.new_page()
            view = self._context.active
            try:
                return view, await view.call("look", self._look_options())
            except Error:
                # Playwright may hear of the page's end a moment after the call has failed for it.
                await asyncio.sleep(_PAGE_END_SECONDS)
                if not view.page.is_closed():
                    raise
        raise PageCrashedError("each page that was looked at has closed")

    async def _look(self) -> Observation:
        view, seen = await self._seen()
        if not view.settled.is_set() and seen["ready"] != "complete":
            # A navigation began after the step had looked for one.
            await self._settle()
            view, seen = await self._seen()
        self._next_ref = seen["next"]
        self._observation_number += 1
        self._observation_id = f"o{self._observation_number}"
        errors, dropped = self._context.take_console()
        tabs = self._context.tabs()
        cut = [
            name
            for name, is_cut in (("axtree", seen["cut"]), ("dom", seen["domCut"]), ("console_errors", dropped))
            if is_cut
        ]
        return Observation(
            observation_id=self._observation_id,
            goal=self._goal,
            url=seen["url"],
            title=seen["title"],
            tabs=await self._tabs(tabs, view, seen),
            active_tab=tabs.index(view) if view in tabs else 0,
            axtree=seen["text"],
            truncated=tuple(cut),
            screenshot=await self._screenshot(view) if self._profile.screenshot else None,
            dom=seen["dom"],
            focused_ref=seen["focused"],
            dialog=self._context.take_dialog(),
            downloads=self._context.downloads(),
            file_chooser=self._context.chooser is not None,
            console_errors=errors,
            last_action=self._last_action,
            last_action_error=self._last_error,
            elapsed_seconds=round(asyncio.get_running_loop().time() - self._began, 3),
            metadata={"viewport": [seen["width"], seen["height"]], "scroll": seen["scroll"]},
        )

    def _look_options(self) -> dict[str, object]:
        profile = self._profile
        return {
            "layout": profile.layout,
            "size": profile.characters,
            "nodes": profile.nodes,
            "milliseconds": profile.milliseconds,
            "next": self._next_ref,
            "dom": profile.dom_characters if profile.dom else 0,
        }

    async def _tabs(self, tabs: list[View], active: View, seen: dict[str, Any]) -> tuple[Tab, ...]:
        shown = []
        for index, view in enumerate(tabs):
            title = seen["title"] if view is active else await _title(view)
            url = seen["url"] if view is active else view.page.url
            shown.append(Tab(index=index, url=url, title=title, active=view is active))
        return tuple(shown)

    async def _screenshot(self, view: View) -> Screenshot:
        profile = self._profile
        cdp = await view.cdp()
        kind = profile.screenshot or "png"
        options: dict[str, Any] = {"format": kind, "optimizeForSpeed": True}
        if kind == "jpeg":
            options["quality"] = 70
        taken = await cdp.send("Page.captureScreenshot", options)
        return Screenshot(mime_type=f"image/{kind}", data_url=f"data:image/{kind};base64,{taken['data']}")

    # --- bounds ---

    async def _guarded(self, coroutine: Coroutine[Any, Any, T], *, times: float = 1.0, crashes: bool = True) -> T:
        """What it gives, unless the page (where `crashes` says so) or the browser goes, or the operation's time.

        Raises:
            PageCrashedError, BrowserLostError, PageUnresponsiveError: just that.
        """
        task = self._tasks.spawn(coroutine, "operation")
        waited: list[asyncio.Future[Any]] = [task, self._context.lost]
        if crashes and self._context.has_page:
            waited.append(self._context.active.crashed)
        try:
            told, _ = await asyncio.wait(
                waited, timeout=self._spec.operation_seconds * _MARGIN * times, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not told:
            # At once, since the operation's own limit is near, and would say less: the close waits for what it leaves.
            task.cancel()
            raise self._sign() or PageUnresponsiveError("the page does not answer; the session ends")
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_STOP_SECONDS)
            raise self._sign() or PageUnresponsiveError("the page does not answer; the session ends")
        if task.cancelled():
            raise self._sign() or PageUnresponsiveError("the page does not answer; the session ends")
        error = task.exception()
        if error is not None:
            await self._raise_told(error)
        sign = self._sign()
        if sign is not None:
            raise sign
        return task.result()

    async def _raise_told(self, error: BaseException) -> None:
        from playwright.async_api import Error

        if isinstance(error, Error):
            # Who has gone is told by an event that may come a moment after the call's failure.
            await asyncio.sleep(0.02)
            sign = self._sign()
            if sign is not None:
                raise sign from error
        raise error

    def _sign(self) -> Exception | None:
        if self._context.lost.done() or not self._held.is_connected():
            return BrowserLostError("the session's browser is gone")
        if any(view.crashed.done() and not view.page.is_closed() for view in self._context.views):
            return PageCrashedError("the page's process has ended; the session ends with it")
        return None

    def __repr__(self) -> str:
        return f"<ChromiumBackend {self._task.benchmark}/{self._task.task_id}: {self._context!r}>"


async def _title(view: View) -> str:
    """A page's title, if it says it at once: one that hangs must not hold up the others."""
    try:
        async with asyncio.timeout(_TITLE_SECONDS):
            return (await view.page.title())[:300]
    except Exception:
        return ""


def picture(screenshot: Screenshot) -> bytes:
    """The bytes of an inline screenshot."""
    assert screenshot.data_url is not None
    return base64.b64decode(screenshot.data_url.partition(",")[2])
