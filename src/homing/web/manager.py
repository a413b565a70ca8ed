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
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from homing.clock import SYSTEM_CLOCK, Clock
from homing.web.base import (
    BackendFactory,
    BackendSpec,
    BrowserProvider,
    BrowserSpec,
    PrepareRuntime,
    Ran,
    RecordedEvent,
    Recordings,
    Runner,
    SiteLease,
    SitePool,
)
from homing.web.errors import (
    BackendError,
    BenchmarkPreconditionError,
    CapacityError,
    EvaluatorConfigurationError,
    EvaluatorError,
    InvalidActionError,
    InvalidTaskError,
    SessionBusyError,
    SessionConflictError,
    SessionLostError,
    WebError,
)
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
from homing.web.session import Reason, Session, Stepped, Surroundings, release_browser
from homing.web.settings import WebSettings
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

REMEMBERED_ENDS: Final = 10_000
"""How many ended sessions are remembered, so that a late call learns why its session ended."""

_CANCELLED: Final = Reason("session_conflict", "the call that made the session was cancelled")
_LAST_TRY_SECONDS: Final = 1.0
_STOPPING: Final = Reason("capacity_unavailable", "the server stops")


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of a session that has gone."""

    status: SessionStatus
    reason: Reason | None
    verdict: VerifierResult | None
    artifacts: tuple[ArtifactRef, ...]


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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings: Final = settings
        self.ledger: Final = Ledger()
        self._factory = backend_factory
        self._sites = site_pool
        self._provider = browser_session_provider
        self._recordings = recordings
        self._runner = operation_runner
        self._prepare = prepare_runtime
        self._clock = clock
        self._tasks = Tasks()
        self._loops = Tasks()
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._changed = asyncio.Event()
        self._prepared: asyncio.Task[None] | None = None
        self._started_at = clock.monotonic()
        self._stopping = False
        self._heartbeat_failures = 0
        self._last_provider_error = ""
        self._around = Surroundings(
            settings, clock, self.ledger, self._tasks, browser_session_provider, self._note_change
        )

    # --- life of the manager ---

    async def start(self) -> None:
        """Begin to look after sessions. Safe to call twice."""
        if self._loops or self._stopping:
            return
        self._loops.spawn(self._sweep_loop(), "sweep")
        if self._provider.renewable:
            self._loops.spawn(self._heartbeat_loop(), "heartbeats")

    async def stop(self) -> list[str]:
        """End every session and wait, at most `stop_seconds` and a few; safe to call twice.

        Returns:
            What could not be released, in words: empty if nothing is left.
        """
        self._stopping = True
        loop = asyncio.get_running_loop()
        until = loop.time() + self.settings.stop_seconds
        await self._loops.aclose(1.0)
        for session in list(self._sessions.values()):
            session.end(SessionStatus.FAILED, _STOPPING)
        while self._sessions and loop.time() < until:
            self._changed.clear()
            for session in list(self._sessions.values()):
                session.retry()
            if self._sessions:
                await self._wait_for_change(min(self.settings.retry_seconds, max(0.0, until - loop.time())))
        left = await self._close(self._provider.aclose(), "browser provider", until)
        # With every browser gone, what failed before may succeed now.
        last = [session.end(SessionStatus.FAILED, _STOPPING) for session in self._sessions.values()]
        if last:
            await asyncio.wait(last, timeout=_LAST_TRY_SECONDS)
        left += [f"session {s.tag}: {what}" for s in self._sessions.values() for what in s.pending()]
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
            return self._seed_reply(session)
        session.calls += 1
        seed = session.start(self._seed(session), "seed")
        seed.add_done_callback(lambda _: None if session.seeded else self._end(session, _CANCELLED))
        try:
            await asyncio.wait((seed,))
        except asyncio.CancelledError:
            self._end(session, _CANCELLED)
            raise
        finally:
            session.calls -= 1
        self._raise_if_ended_meanwhile(session, seed)
        seed.result()
        return self._seed_reply(session)

    async def observe(self, session_id: str) -> Observation:
        """What there is to see now.

        Raises:
            SessionLostError: no such session.
            WebError: what became of it.
        """
        session = self._get(session_id)
        return await self._call(session, "observe", self._observe(session))

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
        step = self._start(session, "step", self._step(session, action))
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
        ended = self._ended.get(session_id)
        if ended is not None and ended.verdict is not None and session_id not in self._sessions:
            return ended.verdict
        session = self._get(session_id)
        if session.verdict is None:
            verdict = self._start(session, "evaluate", self._evaluate(session, final_answer))
            session.verdict = verdict
            verdict.add_done_callback(partial(_forget_failed_verdict, session))
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
        reset = self._start(session, "reset", self._reset(session, checked))
        try:
            await self._wait_for(session, reset)
        except asyncio.CancelledError:
            self._end(session, Reason("session_conflict", "its reset was cancelled"))
            raise
        return self._seed_reply(session)

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
            raise self._lost(session_id)
        return SessionState(
            session_id=session_id,
            benchmark=session.task.benchmark,
            task_id=session.task.task_id,
            status=session.status,
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
        return session_id not in self._sessions and not self._stopping

    async def recording_artifacts(self, session_id: str) -> tuple[ArtifactRef, ...]:
        """What the session left, once its browser has closed; empty before, and where nothing is kept."""
        session = self._sessions.get(session_id)
        if session is not None:
            return session.artifacts
        ended = self._ended.get(session_id)
        return () if ended is None else ended.artifacts

    async def health(self) -> dict[str, Any]:
        """What there is, what is being made, and what could not be released yet."""
        sessions = list(self._sessions.values())
        browsers = self.ledger.counts(Kind.BROWSER)
        return {
            "status": "stopping" if self._stopping else "ok",
            "uptime_seconds": round(self._clock.monotonic() - self._started_at, 3),
            "sessions": sum(1 for each in sessions if each.status is SessionStatus.LIVE),
            "creating": sum(1 for each in sessions if each.status is SessionStatus.SEEDING),
            "capacity": self.settings.max_sessions,
            "cleanup_pending": sum(1 for each in sessions if each.fenced),
            "late_acquires": sum(1 for each in sessions if each.fenced and each.is_acquiring),
            "late_release_pending": browsers.pending,
            "pending": [
                {"session": each.tag, "left": each.pending(), "next_try_seconds": self._next_try(each)}
                for each in sessions
                if each.fenced
            ],
            "ledger": {
                kind.value: {
                    "acquired": counts.acquired,
                    "live": counts.live,
                    "pending": counts.pending,
                    "released": counts.released,
                }
                for kind in Kind
                for counts in (self.ledger.counts(kind),)
            },
            "site_pool": dict(self._sites.health()),
            "browser_provider": {
                "name": self._provider.name,
                "active_leases": browsers.live,
                "acquired": browsers.acquired,
                "released": browsers.released,
                "release_failures": self.ledger.failed_releases,
                "heartbeat_failures": self._heartbeat_failures,
                "last_error": self._last_provider_error,
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
        self._sessions[session_id] = session
        self._ended.pop(session_id, None)
        return session, True

    def _get(self, session_id: str) -> Session:
        """A session that can be used.

        Raises:
            SessionLostError: there is none, or it is ending.
            SessionConflictError: it is not ready yet.
        """
        session = self._sessions.get(session_id)
        if session is None or session.fenced:
            raise self._lost(session_id)
        if session.status is not SessionStatus.LIVE:
            raise SessionConflictError("the session is still being seeded")
        return session

    def _lost(self, session_id: str) -> SessionLostError:
        session, ended = self._sessions.get(session_id), self._ended.get(session_id)
        reason = session.reason if session is not None else None if ended is None else ended.reason
        if reason is not None:
            return SessionLostError(f"the session failed ({reason.error_kind}): {reason.line}; start a new one")
        if session is not None or ended is not None:
            return SessionLostError("the session has been closed; start a new one")
        return SessionLostError("the session is gone, or never was: start a new one")

    # --- seeding ---

    async def _seed(self, session: Session) -> None:
        with _EndsOnFailure(self, session, always=True):
            await self._runtime_prepared()
            site = await self._site(session)
            browser = await self._browser(session)
            assert session.recording is not None
            spec = BackendSpec(session.id, session.task, browser, session.recording, self.settings.operation_seconds)
            # No await from here to the books: both are made without I/O.
            session.site, session.browser = site, browser
            session.backend = backend = self._factory.backend(spec)
            backend_entry = session.hold(Kind.BACKEND, partial(self._close_backend, session))
            if self._runner is None:
                session.runner = runner = self._factory.runner(session.id)
                session.hold(Kind.RUNNER, runner.aclose, needs=(backend_entry,))
            else:
                session.runner = self._runner
            ran = await self._run(session, backend.reset, session.task, seconds=self.settings.reset_seconds)
            observation, info = ran.value
            session.note(
                RecordedEvent(
                    "seed",
                    session.age(),
                    waited_seconds=ran.waited_seconds,
                    ran_seconds=ran.ran_seconds,
                    observation=observation,
                )
            )
            session.publish(observation, info)

    async def _runtime_prepared(self) -> None:
        """Run `prepare_runtime` and the provider's start, once; a failure is the next seed's to try again."""
        if self._prepared is None or (
            self._prepared.done() and (self._prepared.cancelled() or self._prepared.exception() is not None)
        ):
            self._prepared = self._tasks.spawn(self._prepare_runtime(), "prepare runtime")
        await asyncio.wait((self._prepared,), timeout=self.settings.acquire_seconds)
        if not self._prepared.done():
            raise CapacityError("the browser supply is not ready yet; try again")
        if self._prepared.cancelled():
            raise CapacityError("the server stops")
        error = self._prepared.exception()
        if error is not None:
            self._last_provider_error = str(error)
            raise error if isinstance(error, WebError) else CapacityError(f"no browser can be had: {error}") from error

    async def _prepare_runtime(self) -> None:
        if self._prepare is not None:
            await asyncio.to_thread(self._prepare)
        await self._provider.start()

    async def _site(self, session: Session) -> SiteLease:
        try:
            site, _ = await session.acquire(
                Kind.SITE,
                lambda: self._sites.acquire(session.id, session.task),
                lambda lease: self._release_site(session, lease),
                seconds=self.settings.site_wait_seconds,
                stop_when_given_up=True,
            )
        except TimeoutError as error:
            raise CapacityError("the task's sites are taken; try again") from error
        except WebError:
            raise
        except Exception as error:
            logger.exception("no site for session %s", session.tag)
            raise CapacityError("no site could be had; the server's log says why") from error
        return site

    async def _release_site(self, session: Session, lease: SiteLease) -> None:
        await self._sites.release(lease, healthy=session.healthy)

    async def _browser(self, session: Session) -> Any:
        spec = BrowserSpec(session.id, session.task, self.settings.lease_seconds)
        try:
            browser, _ = await session.acquire(
                Kind.BROWSER,
                lambda: self._provider.acquire(spec),
                lambda handle: release_browser(self._provider, handle),
                seconds=self.settings.acquire_seconds,
                stop_when_given_up=False,
            )
        except TimeoutError as error:
            self._last_provider_error = str(error)
            raise CapacityError("no browser could be had in time; try again") from error
        except WebError:
            raise
        except Exception as error:
            self._last_provider_error = f"{type(error).__name__}: {error}"
            logger.warning("no browser for session %s: %s", session.tag, self._last_provider_error)
            raise CapacityError("no browser could be had; the server's log says why") from error
        return browser

    async def _close_backend(self, session: Session) -> None:
        assert session.backend is not None
        if session.runner is None:
            # Its runner could not be made, so nothing ever ran on it.
            return
        await session.runner.run(session.backend.close, timeout_seconds=self.settings.close_seconds)

    def _seed_reply(self, session: Session) -> SeedReply:
        assert session.seeded is not None
        observation, info = session.seeded
        told = dict(info)
        if session.site is not None:
            told["site"] = {
                "lease_id": session.site.lease_id,
                "isolated": session.site.isolated,
                "metadata": dict(session.site.metadata),
            }
        if session.browser is not None:
            told["browser"] = {
                "lease_id": session.browser.lease_id,
                "provider": session.browser.provider,
                "transport": session.browser.transport,
            }
        return SeedReply(
            session_id=session.id,
            task_id=session.task.task_id,
            status=session.status,
            observation=observation,
            info=told,
        )

    # --- operations ---

    async def _observe(self, session: Session) -> Observation:
        async with self._turn(session):
            assert session.backend is not None
            with _EndsOnFailure(self, session, value_error=BackendError):
                ran = await self._run(session, session.backend.observe, seconds=self.settings.operation_seconds)
            observation: Observation = ran.value
            session.note(_event("observe", session, ran, observation=observation))
            return observation

    async def _step(self, session: Session, action: Action) -> StepResult:
        async with self._turn(session):
            assert session.backend is not None
            with _EndsOnFailure(self, session, value_error=InvalidActionError):
                ran = await self._run(session, session.backend.step, action, seconds=self.settings.operation_seconds)
            result: StepResult = ran.value
            session.note(
                _event(
                    "step",
                    session,
                    ran,
                    action=action,
                    observation=result.observation,
                    reward=result.reward,
                    terminated=result.terminated,
                    truncated=result.truncated,
                )
            )
            result.info.setdefault("waited_seconds", round(ran.waited_seconds, 6))
            result.info.setdefault("ran_seconds", round(ran.ran_seconds, 6))
            return result

    async def _evaluate(self, session: Session, final_answer: str | None) -> VerifierResult:
        async with self._turn(session):
            assert session.backend is not None
            with _EndsOnFailure(self, session, value_error=EvaluatorConfigurationError, other_error=EvaluatorError):
                ran = await self._run(
                    session, session.backend.evaluate, final_answer, seconds=self.settings.operation_seconds
                )
            verdict: VerifierResult = ran.value
            session.note(_event("evaluate", session, ran, verdict=verdict))
            return verdict

    async def _reset(self, session: Session, task: Task) -> None:
        async with self._turn(session):
            assert session.backend is not None
            with _EndsOnFailure(self, session, always=True, spared=CapacityError):
                ran = await self._run(session, session.backend.reset, task, seconds=self.settings.reset_seconds)
            observation, info = ran.value
            session.task = task
            # What is queued behind the reset belongs to the new try.
            for operation_id in [each for each, stepped in session.stepped.items() if stepped.task.done()]:
                del session.stepped[operation_id]
            if session.verdict is not None and session.verdict.done():
                session.verdict = None
            session.seeded = (observation, info)
            session.note(_event("reset", session, ran, observation=observation))

    async def _run(self, session: Session, operation: Callable[..., Any], *arguments: object, seconds: float) -> Ran:
        assert session.runner is not None
        ran = await session.runner.run(operation, *arguments, timeout_seconds=seconds)
        session.touch()
        return ran

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

    def _turn(self, session: Session) -> _Turn:
        return _Turn(session, self.settings.wait_seconds)

    def _remember(self, session: Session, operation_id: str, stepped: Stepped) -> None:
        session.stepped[operation_id] = stepped
        stepped.task.add_done_callback(partial(_forget_failed_step, session, operation_id))
        while len(session.stepped) > self.settings.remembered_operations:
            session.stepped.popitem(last=False)

    # --- ends ---

    def _end(self, session: Session, reason: Reason) -> None:
        if not session.fenced:
            logger.warning("session %s ends: %s", session.tag, reason.line)
        session.end(SessionStatus.FAILED, reason)

    def _note_change(self) -> None:
        """A teardown ended: forget the sessions of which nothing is left."""
        for session in [each for each in self._sessions.values() if each.is_released]:
            del self._sessions[session.id]
            verdict = session.verdict
            given = verdict is not None and verdict.done() and not verdict.cancelled() and not verdict.exception()
            self._ended[session.id] = Ended(
                session.status, session.reason, verdict.result() if verdict and given else None, session.artifacts
            )
            while len(self._ended) > REMEMBERED_ENDS:
                self._ended.popitem(last=False)
        self._changed.set()

    def _next_try(self, session: Session) -> float | None:
        if session.retry_at is None:
            return None
        return round(max(0.0, session.retry_at - self._clock.monotonic()), 3)

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _sweep_loop(self) -> None:
        """Close what is idle or too old, and try again what could not be released."""
        while True:
            self._changed.clear()
            try:
                self.sweep()
            except Exception:
                logger.exception("a sweep failed")
            due = [s.retry_at - self._clock.monotonic() for s in self._sessions.values() if s.retry_at is not None]
            await self._wait_for_change(max(0.01, min([self.settings.sweep_seconds, *due])))

    def sweep(self) -> None:
        """One look at every session."""
        now = self._clock.monotonic()
        for session in list(self._sessions.values()):
            if session.fenced:
                session.retry()
            elif session.age() >= self.settings.max_age_seconds:
                self._end(session, Reason("session_lost", "it reached the greatest age that a session may have"))
            elif session.is_idle and now - session.used_at >= self.settings.idle_seconds:
                self._end(session, Reason("session_lost", "nobody used it for so long as a session may be idle"))

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(self.settings.heartbeat_every_seconds)
            await self.heartbeats()

    async def heartbeats(self) -> None:
        """Renew every lease in use, all at once."""
        sessions = [each for each in self._sessions.values() if not each.fenced and each.browser is not None]
        await asyncio.gather(*(self._heartbeat(each) for each in sessions))

    async def _heartbeat(self, session: Session) -> None:
        assert session.browser is not None
        try:
            await self._tasks.bounded(
                self._provider.heartbeat(session.browser), self.settings.heartbeat_seconds, f"heartbeat {session.tag}"
            )
        except Exception as error:
            self._heartbeat_failures += 1
            session.heartbeat_failures += 1
            self._last_provider_error = f"{type(error).__name__}: {error}"
            if session.heartbeat_failures >= self.settings.heartbeat_limit:
                self._end(session, Reason("browser_lost", "its browser lease could not be renewed"))
        else:
            session.heartbeat_failures = 0


class _Turn:
    """One operation's turn in its session: after those before it, and not once the session is to end."""

    def __init__(self, session: Session, wait_seconds: float) -> None:
        self._session = session
        self._wait_seconds = wait_seconds

    async def __aenter__(self) -> None:
        lock = self._session.lock
        try:
            async with asyncio.timeout(self._wait_seconds):
                await lock.acquire()
        except TimeoutError as error:
            raise SessionBusyError("another call of this session is still under way; send this one again") from error
        if self._session.fenced:
            lock.release()
            raise SessionConflictError("the session was ended before the call was done")

    async def __aexit__(self, *_: object) -> None:
        self._session.lock.release()


class _EndsOnFailure:
    """What an operation raised, as the caller is told it; ends the session where it cannot go on.

    Args:
        value_error: What a `ValueError` of the backend means here.
        other_error: What any other error means.
        always: The session cannot go on after any failure.
        spared: But after this one, which says that nothing ran.
    """

    def __init__(
        self,
        manager: WebSessionManager,
        session: Session,
        *,
        value_error: type[WebError] = BenchmarkPreconditionError,
        other_error: type[WebError] = BackendError,
        always: bool = False,
        spared: type[WebError] | None = None,
    ) -> None:
        self._manager = manager
        self._session = session
        self._value_error = value_error
        self._other_error = other_error
        self._always = always
        self._spared = spared

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        told = self._told(error)
        if isinstance(told, WebError):
            spared = self._spared is not None and isinstance(told, self._spared)
            ends = told.ends_session or (self._always and not spared)
            reason = Reason(told.error_kind, told.shown)
        else:
            # Cancelled in the middle: what it did to the page is unknown.
            ends, reason = True, _CANCELLED
        if ends:
            self._manager._end(self._session, reason)
        elif isinstance(told, WebError):
            self._session.note(
                RecordedEvent("failure", self._session.age(), error_kind=told.error_kind, error=told.shown)
            )
        if told is not error:
            raise told from error

    def _told(self, error: BaseException) -> BaseException:
        if isinstance(error, WebError) or not isinstance(error, Exception):
            return error
        if isinstance(error, ValueError):
            return self._value_error(str(error) or "the backend gave no reason")
        logger.error("an operation of session %s failed", self._session.tag, exc_info=error)
        return self._other_error(f"the session's backend failed: {type(error).__name__}")


def _event(kind: str, session: Session, ran: Ran, **facts: Any) -> RecordedEvent:
    return RecordedEvent(kind, session.age(), waited_seconds=ran.waited_seconds, ran_seconds=ran.ran_seconds, **facts)


def _forget_failed_step(session: Session, operation_id: str, task: asyncio.Task[Any]) -> None:
    """A step that failed and left the session as it was may be sent again under its ID."""
    if task.cancelled() or task.exception() is not None:
        known = session.stepped.get(operation_id)
        if known is not None and known.task is task:
            del session.stepped[operation_id]


def _forget_failed_verdict(session: Session, task: asyncio.Task[Any]) -> None:
    if (task.cancelled() or task.exception() is not None) and session.verdict is task:
        session.verdict = None
