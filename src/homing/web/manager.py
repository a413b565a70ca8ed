"""Live browser sessions: who may have one, what may run in it, and what becomes of it.

The invariants:

- Admission is one block without an await: as many sessions as there may be, one per ID, one task per session. Whatever
  has something still to release counts.
- A session is acquired in order (site, browser, backend, runner) and published last. A seed that fails or is cancelled
  is torn down by a task of its own.
- One operation at a time in a session; none begins once it is to end. A failure of the machinery is an error of a closed
  set and never a reward; there is one verdict at most.
- acquired = live + pending release + released (`ledger.py`), at every await.

Not here: the life of one session (`session.py`), HTTP (`server.py`), seeds that are sent twice (`control.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from homing.clock import SYSTEM_CLOCK, Clock
from homing.web.base import BackendFactory, BrowserProvider, PrepareRuntime, Recordings, Runner, SitePool
from homing.web.care import Care
from homing.web.errors import (
    CapacityError,
    InvalidTaskError,
    SessionBusyError,
    SessionConflictError,
)
from homing.web.health import health_of_browsers, health_of_ledger, health_of_sessions
from homing.web.ledger import Kind, Ledger
from homing.web.models import (
    Action,
    ArtifactRef,
    Observation,
    SeedReply,
    SessionState,
    SessionStatus,
    StepResult,
    Task,
    VerifierResult,
)
from homing.web.operations import CANCELLED, Operations, forget_failed_step, forget_failed_verdict
from homing.web.seeding import Seeding, seed_reply
from homing.web.session import Reason, Session, Stepped, Surroundings
from homing.web.settings import WebSettings
from homing.web.table import SessionTable
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_TRY_SECONDS: Final = 1.0
_STOPPING: Final = Reason("capacity_unavailable", "the server stops")


def _nobody(session_id: str) -> None:
    pass


class WebSessionManager:
    """Binds session IDs to live backends, one worker's. Owns its sessions; `start` before use, `stop` at the end.

    Args:
        settings: How many and how long.
        backend_factory: Knows the tasks, and makes a session's backend and runner.
        site_pool: Guards sites that sessions change.
        browser_session_provider: Supplies browsers.
        recordings: Keeps what people look at.
        operation_runner: One runner for all sessions, borrowed; None: each session has its own, from the factory.
        prepare_runtime: Runs once, in a thread, before the first browser.
        on_gone: Told each session of which nothing is left, however it ended.
        clock: Idle time and age are measured on it; every wait is on the event loop's.
    """

    def __init__(
        self,
        settings: WebSettings,
        backend_factory: BackendFactory,
        *,
        site_pool: SitePool,
        browser_session_provider: BrowserProvider,
        recordings: Recordings,
        operation_runner: Runner | None = None,
        prepare_runtime: PrepareRuntime | None = None,
        on_gone: Callable[[str], None] = _nobody,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings: Final = settings
        self.ledger: Final = Ledger()
        self._sites = site_pool
        self._provider = browser_session_provider
        self._factory = backend_factory
        self._recordings = recordings
        self._clock = clock
        self._started_at = clock.monotonic()
        self._stopping = False
        self._tasks = Tasks()
        self._sessions = SessionTable(on_gone)
        self._around = Surroundings(
            settings, clock, self.ledger, self._tasks, browser_session_provider, self._sessions.forget_released
        )
        self._operations = Operations(settings, self._sessions.end)
        self._care = Care(settings, clock, self._sessions, browser_session_provider, self._tasks)
        self._seeding = Seeding(
            settings,
            backend_factory,
            site_pool,
            browser_session_provider,
            self._tasks,
            self._sessions.end,
            runner=operation_runner,
            prepare=prepare_runtime,
        )

    # --- life of the manager ---

    async def start(self) -> None:
        """Begin to look after sessions. Safe to call twice."""
        if not self._stopping:
            self._care.start()

    async def stop(self) -> list[str]:
        """End every session and wait, at most `stop_seconds` and a few; safe to call twice.

        Returns:
            What could not be released, in words: empty if nothing is left.
        """
        self._stopping = True
        loop = asyncio.get_running_loop()
        until = loop.time() + self.settings.stop_seconds
        await self._care.aclose()
        for session in self._sessions:
            session.end(SessionStatus.FAILED, _STOPPING)
        while self._sessions and loop.time() < until:
            self._sessions.note_seen()
            for session in self._sessions:
                session.retry()
            if self._sessions:
                await self._sessions.wait_for_change(min(self.settings.retry_seconds, max(0.0, until - loop.time())))
        left = await self._close(self._provider.aclose(), "browser provider", until)
        # With every browser gone, what failed before may succeed now.
        last = [session.end(SessionStatus.FAILED, _STOPPING) for session in self._sessions]
        if last:
            await asyncio.wait(last, timeout=_LAST_TRY_SECONDS)
        left += [f"session {s.tag}: {what}" for s in self._sessions for what in s.pending()]
        left += await self._close(self._sites.aclose(), "site pool", until)
        for line in left:
            logger.error("not released at the stop: %s", line)
        return left

    async def _close(self, closing: Coroutine[Any, Any, None], name: str, until: float) -> list[str]:
        seconds = max(_LAST_TRY_SECONDS, until - asyncio.get_running_loop().time())
        try:
            await self._tasks.bounded(closing, seconds, name)
        except Exception as error:
            return [f"{name}: {error or type(error).__name__}"]
        return []

    async def __aenter__(self) -> WebSessionManager:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- the session's verbs ---

    async def seed_session(self, session_id: str, task: Task) -> SeedReply:
        """Make the session, or say again what it was seeded with.

        Cancelled, or failing, it leaves a teardown that runs by itself; `can_retry_seed` says when that is over.

        Raises:
            InvalidTaskError: no such task.
            SessionConflictError: the session has another task, is being seeded, or is ending.
            CapacityError: no room, no site or no browser in time.
            BenchmarkPreconditionError: the task's start refused.
            WebError: what else became of it.
        """
        session, is_new = self._admit(session_id, task)
        if not is_new:
            return seed_reply(session)
        session.calls += 1
        seed = session.start(self._seeding.seed(session), "seed")
        seed.add_done_callback(lambda _: None if session.seeded else self._sessions.end(session, CANCELLED))
        try:
            await asyncio.wait((seed,))
        except asyncio.CancelledError:
            self._sessions.end(session, CANCELLED)
            raise
        finally:
            session.calls -= 1
        self._raise_if_ended_meanwhile(session, seed)
        seed.result()
        return seed_reply(session)

    async def observe(self, session_id: str) -> Observation:
        """What there is to see now.

        Raises:
            SessionLostError: no such session.
            WebError: what became of it.
        """
        session = self._get(session_id)
        return await self._call(session, "observe", self._operations.observe(session))

    async def step(self, session_id: str, operation_id: str | None, action: Action) -> StepResult:
        """Do one action. It goes on if its caller is cancelled, and sent again with its ID it gives what it gave.

        Raises:
            SessionLostError: no such session.
            SessionConflictError: it has been evaluated, or the ID is another action's.
            InvalidActionError: nothing was tried.
            WebError: what else became of it.
        """
        session = self._get(session_id)
        if operation_id is not None and (known := session.stepped.get(operation_id)) is not None:
            if known.action != action:
                raise SessionConflictError("this operation_id was used for another action: give each step its own")
            session.stepped.move_to_end(operation_id)
            return await self._wait_for(session, known.task)
        if session.verdict is not None:
            raise SessionConflictError("the session has been evaluated: reset it, or start another")
        step = self._start(session, "step", self._operations.step(session, action))
        if operation_id is not None:
            self._remember(session, operation_id, Stepped(action, step))
        return await self._wait_for(session, step)

    async def evaluate(self, session_id: str, final_answer: str | None = None) -> VerifierResult:
        """The session's verdict: the first call's, whatever a later one says, also once the session has been closed.

        Raises:
            SessionLostError: no such session, and no verdict of it.
            EvaluatorConfigurationError: the task cannot be evaluated.
            EvaluatorError: there is no verdict; asked again, there may be.
            WebError: what else became of it.
        """
        ended = self._sessions.ended(session_id)
        if ended is not None and ended.verdict is not None:
            return ended.verdict
        session = self._get(session_id)
        if session.verdict is None:
            verdict = self._start(session, "evaluate", self._operations.evaluate(session, final_answer))
            session.verdict = verdict
            verdict.add_done_callback(partial(forget_failed_verdict, session))
        return await self._wait_for(session, session.verdict)

    async def reset_session(self, session_id: str, task: Task) -> SeedReply:
        """Begin the session's task again, perhaps in another variation; operations and verdict are forgotten.

        Failing or cancelled, it ends the session at once: what it left of the page is nobody's.

        Raises:
            SessionConflictError: another task.
            WebError: as `seed_session`.
        """
        session = self._get(session_id)
        checked = self._check(task)
        if not session.task.is_same(checked):
            raise SessionConflictError("the session has another task: a reset begins the same one again")
        reset = self._start(session, "reset", self._operations.reset(session, checked))
        try:
            await self._wait_for(session, reset)
        except asyncio.CancelledError:
            self._sessions.end(session, Reason("session_conflict", "its reset was cancelled"))
            raise
        return seed_reply(session)

    async def close_session(self, session_id: str) -> bool:
        """End the session and release what it has. Unknown: true, there is nothing to release.

        Returns:
            True: all of it is released. False: something is kept and tried again; call again to learn more.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return True
        teardown = session.end(SessionStatus.CLOSING, healthy=True)
        await asyncio.wait((teardown,))
        return session_id not in self._sessions

    async def session_status(self, session_id: str) -> SessionState:
        """What there is to say about it, without keeping it alive.

        Raises:
            SessionLostError: no such session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise self._sessions.lost(session_id)
        return SessionState(
            session_id=session_id,
            benchmark=session.task.benchmark,
            task_id=session.task.task_id,
            status=session.wire_status,
            created_at=session.created_wall,
            last_access_at=session.used_wall,
            site_lease_id=None if session.site is None else session.site.lease_id,
            browser_lease_id=None if session.browser is None else session.browser.lease_id,
            browser_provider=None if session.browser is None else session.browser.provider,
            browser_transport=None if session.browser is None else session.browser.transport,
        )

    async def is_live_session(self, session_id: str) -> bool:
        """Whether it can be used, without keeping it alive."""
        return self.is_live(session_id)

    def is_live(self, session_id: str) -> bool:
        """As `is_live_session`."""
        session = self._sessions.get(session_id)
        return session is not None and session.status is SessionStatus.LIVE

    async def can_retry_seed(self, session_id: str) -> bool:
        """Whether nothing of an earlier seed is left: neither its cleanup nor a browser that may still come."""
        return self.may_be_seeded(session_id)

    def may_be_seeded(self, session_id: str) -> bool:
        """As `can_retry_seed`."""
        return session_id not in self._sessions and not self._stopping

    async def recording_artifacts(self, session_id: str) -> tuple[ArtifactRef, ...]:
        """What the session left, once its browser has closed; empty before, and where nothing is kept."""
        session = self._sessions.get(session_id)
        if session is not None:
            return session.artifacts
        ended = self._sessions.ended(session_id)
        return () if ended is None else ended.artifacts

    def failure_of(self, session_id: str) -> Reason | None:
        """Why the session ended, if it was not closed but failed."""
        session, ended = self._sessions.get(session_id), self._sessions.ended(session_id)
        if session is not None:
            return session.reason
        return None if ended is None else ended.reason

    async def health(self) -> dict[str, Any]:
        """What there is, what is being made, and what could not be released yet."""
        return {
            "status": "stopping" if self._stopping else "ok",
            "uptime_seconds": round(self._clock.monotonic() - self._started_at, 3),
            "capacity": self.settings.max_sessions,
            **health_of_sessions(self._sessions),
            "late_release_pending": self.ledger.counts(Kind.BROWSER).pending,
            "ledger": health_of_ledger(self.ledger),
            "site_pool": dict(self._sites.health()),
            "browser_provider": {
                "name": self._provider.name,
                **health_of_browsers(self.ledger),
                "heartbeat_failures": self._care.heartbeat_failures,
                "last_error": self._care.last_error or self._seeding.last_provider_error,
                **self._provider.health(),
            },
        }

    def __len__(self) -> int:
        """Sessions that occupy capacity, those with something still to release among them."""
        return len(self._sessions)

    def __repr__(self) -> str:
        return f"<WebSessionManager: {len(self)} sessions, {self.ledger!r}>"

    # --- admission ---

    def _check(self, task: Task) -> Task:
        allowed = self.settings.allowed_benchmarks
        if allowed is not None and task.benchmark not in allowed:
            raise InvalidTaskError("this server does not serve that benchmark")
        return self._factory.check(task)

    def _admit(self, session_id: str, task: Task) -> tuple[Session, bool]:
        """The session, and whether it is new. No await: two seeds of one ID, or for the last place, cannot both pass."""
        checked = self._check(task)
        known = self._sessions.get(session_id)
        if known is not None:
            if known.status is SessionStatus.LIVE and known.task.is_same(checked) and known.task.seed == checked.seed:
                known.touch()
                return known, False
            if known.status is SessionStatus.LIVE:
                raise SessionConflictError("the session has another task: close it, or use another session")
            raise SessionConflictError(f"the session is {known.status}: wait, or use another session")
        if self._stopping:
            raise CapacityError("the server stops")
        if len(self._sessions) >= self.settings.max_sessions:
            raise CapacityError(f"the server has {self.settings.max_sessions} sessions, as many as it may; try again")
        session = Session(session_id, checked, self._around)
        # Refused here, where nothing has been acquired, if it cannot be recorded as asked.
        session.recording = self._recordings.open(session_id, checked)
        self._sessions.add(session)
        return session, True

    def _get(self, session_id: str) -> Session:
        """A session that can be used.

        Raises:
            SessionLostError: there is none, or it is ending.
            SessionConflictError: it is not ready yet.
        """
        session = self._sessions.get(session_id)
        if session is None or session.fenced:
            raise self._sessions.lost(session_id)
        if session.status is not SessionStatus.LIVE:
            raise SessionConflictError("the session is still being seeded")
        return session

    # --- operations ---

    def _start(self, session: Session, name: str, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        if session.calls > self.settings.waiting_calls:
            operation.close()
            raise SessionBusyError(f"{session.calls} calls wait for this session already; send the call again")
        return session.start(operation, name)

    async def _call(self, session: Session, name: str, operation: Coroutine[Any, Any, T]) -> T:
        return await self._wait_for(session, self._start(session, name, operation))

    async def _wait_for(self, session: Session, task: asyncio.Task[T]) -> T:
        """Wait for an operation, which goes on if this caller is cancelled."""
        session.calls += 1
        try:
            await asyncio.wait((task,))
        finally:
            session.calls -= 1
        self._raise_if_ended_meanwhile(session, task)
        return task.result()

    def _raise_if_ended_meanwhile(self, session: Session, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            why = "" if session.reason is None else f" ({session.reason.line})"
            raise SessionConflictError(f"the session was ended before the call was done{why}")

    def _remember(self, session: Session, operation_id: str, stepped: Stepped) -> None:
        session.stepped[operation_id] = stepped
        stepped.task.add_done_callback(partial(forget_failed_step, session, operation_id))
        while len(session.stepped) > self.settings.remembered_operations:
            session.stepped.popitem(last=False)
