"""One session: what it holds, what runs in it, and where it is in its life.

    seeding ──► live ──► closing ──► closed        all of it released: nothing of the session is left here
        └─────────┴────► failed  ──┘                the same, with a reason that later calls are told

The invariants: `end` is one synchronous block and irrevocable, so from the moment a session is to end no operation
begins in it; its teardown is one task at a time, which no caller's cancellation reaches; a layer that could not be
released stays, keeps what it needs (a thread as long as its backend is open, a site as long as backend or browser may
change it), and is tried again.

Not here: admission, and the meaning of operations (`manager.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from homing.clock import Clock
from homing.types import session_tag
from homing.web.base import (
    AnyBackend,
    BrowserHandle,
    BrowserProvider,
    RecordedEvent,
    Recording,
    Runner,
    SiteLease,
)
from homing.web.errors import ReleaseError
from homing.web.ledger import Entry, Kind, Ledger
from homing.web.models import (
    Action,
    ArtifactRef,
    Observation,
    SessionStatus,
    StepResult,
    Task,
    VerifierResult,
    WireStatus,
)
from homing.web.processes import left_of
from homing.web.settings import WebSettings
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_SECONDS: Final = 1.0
"""How long operations that were told to stop are waited for before their browser is interrupted."""

_WIRE: Final = {
    SessionStatus.SEEDING: WireStatus.CREATING,
    SessionStatus.CLOSING: WireStatus.CLOSING,
    SessionStatus.CLOSED: WireStatus.CLOSED,
    SessionStatus.FAILED: WireStatus.ERROR,
}

TEARDOWN_ORDER: Final = (Kind.BACKEND, Kind.RUNNER, Kind.BROWSER, Kind.SITE)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a session ended: a kind of the closed set, and a line for people."""

    error_kind: str
    line: str


@dataclass(slots=True)
class Stepped:
    """A step under its operation ID: whoever sends it again gets what it gave, or will give."""

    action: Action
    task: asyncio.Task[StepResult]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every session of a manager shares. Borrowed."""

    settings: WebSettings
    clock: Clock
    ledger: Ledger
    tasks: Tasks
    provider: BrowserProvider
    changed: Callable[[], None]


class Session:
    """One session. Made by the manager's admission; leaves the manager's table once `is_released`.

    Attributes:
        task: What it is for; the reset's, once there was one.
        fenced: It is to end, or has: no operation begins.
        is_stepping: A step has its turn.
        is_finished: The task has ended: the last step said so.
        healthy: It ended as it should; its sites are in the state that the task left them in.
        used_at: When its last operation ended; status and health do not count.
        retry_at: When the teardown is tried again; None: it runs, or there is none.
        heartbeat_failures: In a row.
        artifacts: What it left; known after the browser has closed.
    """

    def __init__(self, session_id: str, task: Task, surroundings: Surroundings) -> None:
        self.id: Final = session_id
        self.tag: Final = session_tag(session_id)
        self.task = task
        self.status = SessionStatus.SEEDING
        self.reason: Reason | None = None
        self.fenced = False
        self.is_stepping = False
        self.is_finished = False
        self.healthy = True
        self.created_at: Final = surroundings.clock.monotonic()
        self.created_wall: Final = surroundings.clock.wall()
        self.used_at = self.created_at
        self.used_wall = self.created_wall
        self.retry_at: float | None = None
        self.heartbeat_failures = 0
        self.lock: Final = asyncio.Lock()
        self.calls = 0
        self.operations: Final[set[asyncio.Task[Any]]] = set()
        self.stepped: Final[OrderedDict[str, Stepped]] = OrderedDict()
        self.verdict: asyncio.Task[VerifierResult] | None = None
        self.site: SiteLease | None = None
        self.browser: BrowserHandle | None = None
        self.backend: AnyBackend | None = None
        self.runner: Runner | None = None
        self.recording: Recording | None = None
        self.seeded: tuple[Observation, dict[str, Any]] | None = None
        self.artifacts: tuple[ArtifactRef, ...] = ()
        self._around: Final = surroundings
        self._entries: Final[list[Entry]] = []
        self._acquiring: Final[set[asyncio.Task[Any]]] = set()
        self._teardown: asyncio.Task[bool] | None = None
        self._recorded = False
        self._tries = 0

    # --- acquiring ---

    async def acquire(
        self,
        kind: Kind,
        acquire: Callable[[], Awaitable[T]],
        release: Callable[[T], Awaitable[None]],
        *,
        needs: Sequence[Entry] = (),
        seconds: float,
        stop_when_given_up: bool,
    ) -> tuple[T, Entry]:
        """Acquire a layer. What arrives is in the books at once, also when nobody waits for it any more.

        Args:
            seconds: How long it is waited for.
            stop_when_given_up: A wait in a queue is left; a provider's call is not cancelled, since the browser it is
                starting would be lost: it goes on, and its browser is released when it comes.

        Raises:
            TimeoutError: it did not come in time.
            Exception: what `acquire` raised.
        """

        async def get() -> tuple[T, Entry]:
            got = await acquire()
            # No await from here to the books.
            entry = self.hold(kind, lambda: release(got), needs=needs)
            return got, entry

        task = self._around.tasks.spawn(get(), f"acquire {kind} {self.tag}")
        self._acquiring.add(task)
        task.add_done_callback(self._acquired)
        try:
            await asyncio.wait((task,), timeout=seconds)
        except asyncio.CancelledError:
            if stop_when_given_up:
                task.cancel()
            raise
        if task.done():
            if task.cancelled():
                raise RuntimeError(f"acquiring a {kind} was cancelled from inside")
            return task.result()
        if stop_when_given_up:
            task.cancel()
        raise TimeoutError(f"no {kind} within {seconds:g} s")

    def hold(self, kind: Kind, release: Callable[[], Awaitable[None]], *, needs: Sequence[Entry] = ()) -> Entry:
        """Enter a layer that this session now has."""
        entry = self._around.ledger.hold(kind, release, tuple(needs))
        if kind in (Kind.BROWSER, Kind.BACKEND):
            # Sites are let go of only when neither can change them any more.
            for site in self.needing(Kind.SITE):
                site.needs = (*site.needs, entry)
        self._entries.append(entry)
        if self.fenced:
            self._around.ledger.give_up(entry)
        return entry

    def needing(self, *kinds: Kind) -> tuple[Entry, ...]:
        """This session's entries of these kinds."""
        return tuple(entry for entry in self._entries if entry.kind in kinds)

    def _acquired(self, task: asyncio.Task[Any]) -> None:
        self._acquiring.discard(task)
        if self.fenced and self._teardown is None:
            # Late: the teardown that ran meanwhile did not see it.
            self._tear_down_again()

    # --- life ---

    @property
    def is_released(self) -> bool:
        """Nothing of it is left: it has ended, and no acquire is under way that could still bring something."""
        return (
            self.fenced and self._teardown is None and not self._acquiring and all(e.is_released for e in self._entries)
        )

    @property
    def is_acquiring(self) -> bool:
        return bool(self._acquiring)

    @property
    def wire_status(self) -> WireStatus:
        """What replies call its status."""
        if self.status is not SessionStatus.LIVE:
            return _WIRE[self.status]
        if self.is_stepping:
            return WireStatus.STEPPING
        is_over = self.is_finished or self.given_verdict() is not None
        return WireStatus.FINISHED if is_over else WireStatus.READY

    @property
    def is_idle(self) -> bool:
        """No call of it is under way."""
        return self.calls == 0 and not self.operations

    def publish(self, observation: Observation, info: dict[str, Any]) -> None:
        """The last act of a seed."""
        self.seeded = (observation, info)
        self.status = SessionStatus.LIVE
        self.touch()

    def touch(self) -> None:
        """An operation ended: the idle time runs from now."""
        self.used_at = self._around.clock.monotonic()
        self.used_wall = self._around.clock.wall()

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run an operation as a task of the session's own: its caller's cancellation does not reach it, `end` does."""
        task = self._around.tasks.spawn(coroutine, f"{name} {self.tag}")
        self.operations.add(task)
        task.add_done_callback(self.operations.discard)
        return task

    def note(self, event: RecordedEvent) -> None:
        if self.recording is not None and not self._recorded:
            self.recording.note(event)

    def age(self) -> float:
        return self._around.clock.monotonic() - self.created_at

    def end(self, status: SessionStatus, reason: Reason | None = None, *, healthy: bool = False) -> asyncio.Task[bool]:
        """From here on the session only ends. Synchronous, and safe to call again: what was said first stands.

        Returns:
            The teardown under way. True: everything is released; false: something is kept, and tried again.
        """
        if not self.fenced:
            self.fenced = True
            self.status = status
            self.reason = reason
            self.healthy = healthy
            for entry in self._entries:
                self._around.ledger.give_up(entry)
            here = asyncio.current_task()
            for task in self.operations:
                if task is not here:  # an operation that failed is on its way out by itself
                    task.cancel()
            self.note(
                RecordedEvent(
                    "failure" if reason is not None else "close",
                    self.age(),
                    error_kind=None if reason is None else reason.error_kind,
                    error=None if reason is None else reason.line,
                )
            )
        return self._tear_down_again()

    def retry(self) -> asyncio.Task[bool] | None:
        """Try again to release what is kept, if it is time; the teardown under way, if one is."""
        due = self.retry_at is not None and self.retry_at <= self._around.clock.monotonic()
        return self._tear_down_again() if due else self._teardown

    def given_verdict(self) -> VerifierResult | None:
        """The verdict, if there is one."""
        verdict = self.verdict
        if verdict is None or not verdict.done() or verdict.cancelled() or verdict.exception() is not None:
            return None
        return verdict.result()

    def next_try_seconds(self) -> float | None:
        """Until the teardown is tried again; None: it runs, or waits for something to come."""
        if self.retry_at is None:
            return None
        return round(max(0.0, self.retry_at - self._around.clock.monotonic()), 3)

    def pending(self) -> list[str]:
        """What is kept and not released, in words, for `health` and for `stop`."""
        left = [f"{e.kind}: {e.last_error or 'not tried yet'}" for e in self._entries if not e.is_released]
        return left + [f"{task.get_name()}: not answered yet" for task in self._acquiring]

    # --- teardown ---

    def _tear_down_again(self) -> asyncio.Task[bool]:
        if self._teardown is None:
            self.retry_at = None
            self._teardown = self._around.tasks.spawn(self._tear_down(), f"teardown {self.tag}")
            self._teardown.add_done_callback(self._torn_down)
        return self._teardown

    def _torn_down(self, task: asyncio.Task[bool]) -> None:
        self._teardown = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("the teardown of session %s failed", self.tag, exc_info=task.exception())
        if not self.is_released:
            settings = self._around.settings
            delay = min(settings.retry_seconds * 2 ** min(self._tries, 16), settings.max_retry_seconds)
            self._tries += 1
            # What waits for an acquire alone is tried as soon as that ends.
            waits = all(entry.is_released for entry in self._entries)
            self.retry_at = None if waits else self._around.clock.monotonic() + delay
        elif self.status is SessionStatus.CLOSING:
            self.status = SessionStatus.CLOSED
        self._around.changed()

    async def _tear_down(self) -> bool:
        await self._stop_operations()
        for kind in TEARDOWN_ORDER:
            if kind is Kind.SITE:
                await self._finish_recording()
            for entry in [entry for entry in self._entries if entry.kind is kind and not entry.is_released]:
                if entry.may_be_released:
                    if not await self._release(entry) and kind is Kind.BACKEND:
                        # Its thread, or an operation of it, may hang in the page: what frees it is the end of the page.
                        await self.interrupt()
                        await self._release(entry)
                else:
                    entry.last_error = (
                        f"kept until its {' and '.join(e.kind for e in entry.needs if not e.is_released)} is"
                    )
        return not self._acquiring and all(entry.is_released for entry in self._entries)

    async def _stop_operations(self) -> None:
        """Wait for the operations that were told to stop; interrupt the browser of those that do not."""
        for interrupts in (False, True):
            running = [task for task in self.operations if not task.done()]
            if not running:
                return
            if interrupts:
                await self.interrupt()
            await asyncio.wait(running, timeout=_GRACE_SECONDS)

    async def interrupt(self) -> None:
        """Make what hangs in the session's browser come back."""
        if self.browser is None:
            return
        try:
            await self._around.tasks.bounded(
                self._around.provider.interrupt(self.browser), _GRACE_SECONDS, f"interrupt {self.tag}"
            )
        except Exception:
            logger.warning("the browser of session %s could not be interrupted", self.tag, exc_info=True)

    async def _release(self, entry: Entry) -> bool:
        settings = self._around.settings
        seconds = settings.close_seconds if entry.kind in (Kind.BACKEND, Kind.RUNNER) else settings.release_seconds
        entry.tries += 1
        try:
            await self._around.tasks.bounded(_awaited(entry.release), seconds, f"release {entry.kind} {self.tag}")
        except Exception as error:
            self._around.ledger.fail(entry, f"{type(error).__name__}: {error}")
            logger.warning(
                "the %s of session %s could not be released (try %d): %s",
                entry.kind,
                self.tag,
                entry.tries,
                error or type(error).__name__,
            )
            return False
        self._around.ledger.settle(entry)
        return True

    async def _finish_recording(self) -> None:
        """Once, after the browser has closed: only then are its files whole."""
        if self._recorded or self.recording is None or not all(e.is_released for e in self.needing(Kind.BROWSER)):
            return
        self._recorded = True
        try:
            found = await self._around.tasks.bounded(
                self.recording.finish(), self._around.settings.recording_seconds, f"recording {self.tag}"
            )
            self.artifacts = tuple(found)
        except Exception:
            logger.exception("the recording of session %s could not be finished", self.tag)

    def __repr__(self) -> str:
        return f"<Session {self.tag}: {self.status}, {len(self.needing(*Kind))} entries, {self.calls} calls>"


async def _awaited(release: Callable[[], Awaitable[None]]) -> None:
    await release()


async def release_browser(provider: BrowserProvider, handle: BrowserHandle) -> None:
    """Release a lease and see that it is gone: a close that returned has been known to leave a process.

    Raises:
        ReleaseError: something of it is still there.
        Exception: what the provider raised.
    """
    await provider.release(handle)
    left = left_of(handle.footprint)
    if left:
        raise ReleaseError(f"the provider says it is released; still there: {', '.join(left)}")
