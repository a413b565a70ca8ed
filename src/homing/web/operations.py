"""One operation in a session: its turn, the backend's call, and what its failure means.

The invariant: whatever a backend raises, the caller is told a `WebError` of the closed set, and the session either is as
it was or ends. A failure of the machinery never becomes a reward.

Not here: who may call them (`manager.py`), and where they run (`runners.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from homing.web.base import Ran, RecordedEvent
from homing.web.errors import (
    BackendError,
    BenchmarkPreconditionError,
    CapacityError,
    EvaluatorConfigurationError,
    EvaluatorError,
    InvalidActionError,
    SessionBusyError,
    SessionConflictError,
    WebError,
)
from homing.web.models import Action, Observation, StepResult, Task, VerifierResult
from homing.web.session import Reason, Session
from homing.web.settings import WebSettings

logger = logging.getLogger(__name__)

CANCELLED: Final = Reason("session_conflict", "the call that it depended on was cancelled")


class Turn:
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


class EndsOnFailure:
    """What an operation raised, as the caller is told it; ends the session where it cannot go on.

    Args:
        end: Ends the session, with the reason.
        value_error: What a `ValueError` of the backend means here.
        other_error: What any other error means.
        always: The session cannot go on after any failure.
        spared: But after this one, which says that nothing ran.
    """

    def __init__(
        self,
        session: Session,
        end: Callable[[Session, Reason], None],
        *,
        value_error: type[WebError] = BenchmarkPreconditionError,
        other_error: type[WebError] = BackendError,
        always: bool = False,
        spared: type[WebError] | None = None,
    ) -> None:
        self._session = session
        self._end = end
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
            ends, reason = True, CANCELLED
        if ends:
            self._end(self._session, reason)
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


def event(kind: str, session: Session, ran: Ran, **facts: Any) -> RecordedEvent:
    return RecordedEvent(kind, session.age(), waited_seconds=ran.waited_seconds, ran_seconds=ran.ran_seconds, **facts)


def forget_failed_step(session: Session, operation_id: str, task: asyncio.Task[Any]) -> None:
    """A step that failed and left the session as it was may be sent again under its ID."""
    if task.cancelled() or task.exception() is not None:
        known = session.stepped.get(operation_id)
        if known is not None and known.task is task:
            del session.stepped[operation_id]


def forget_failed_verdict(session: Session, task: asyncio.Task[Any]) -> None:
    if (task.cancelled() or task.exception() is not None) and session.verdict is task:
        session.verdict = None


class Operations:
    """The operations of a manager's sessions, each a coroutine that takes its turn first. Borrows everything.

    Args:
        end: Ends a session, with the reason.
    """

    def __init__(self, settings: WebSettings, end: Callable[[Session, Reason], None]) -> None:
        self._settings = settings
        self._end = end

    async def observe(self, session: Session) -> Observation:
        """What there is to see."""
        async with Turn(session, self._settings.wait_seconds):
            assert session.backend is not None
            with EndsOnFailure(session, self._end, value_error=BackendError):
                ran = await self._run(session, session.backend.observe, seconds=self._settings.operation_seconds)
            observation: Observation = ran.value
            session.note(event("observe", session, ran, observation=observation))
            return observation

    async def step(self, session: Session, action: Action) -> StepResult:
        """One action. What it waited and ran is in its `info`."""
        async with Turn(session, self._settings.wait_seconds):
            assert session.backend is not None
            with EndsOnFailure(session, self._end, value_error=InvalidActionError):
                session.is_stepping = True
                try:
                    ran = await self._run(
                        session, session.backend.step, action, seconds=self._settings.operation_seconds
                    )
                finally:
                    session.is_stepping = False
            result: StepResult = ran.value
            session.is_finished = result.terminated or result.truncated
            session.note(
                event(
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

    async def evaluate(self, session: Session, final_answer: str | None) -> VerifierResult:
        """The verdict."""
        async with Turn(session, self._settings.wait_seconds):
            assert session.backend is not None
            with EndsOnFailure(session, self._end, value_error=EvaluatorConfigurationError, other_error=EvaluatorError):
                ran = await self._run(
                    session, session.backend.evaluate, final_answer, seconds=self._settings.operation_seconds
                )
            verdict: VerifierResult = ran.value
            session.note(event("evaluate", session, ran, verdict=verdict))
            return verdict

    async def reset(self, session: Session, task: Task) -> None:
        """The task again; what is remembered of the try before is forgotten."""
        async with Turn(session, self._settings.wait_seconds):
            assert session.backend is not None
            with EndsOnFailure(session, self._end, always=True, spared=CapacityError):
                ran = await self._run(session, session.backend.reset, task, seconds=self._settings.reset_seconds)
            observation, info = ran.value
            session.task = task
            session.is_finished = False
            # What is queued behind the reset belongs to the new try.
            for operation_id in [each for each, stepped in session.stepped.items() if stepped.task.done()]:
                del session.stepped[operation_id]
            if session.verdict is not None and session.verdict.done():
                session.verdict = None
            session.seeded = (observation, info)
            session.note(event("reset", session, ran, observation=observation))

    async def _run(self, session: Session, operation: Callable[..., Any], *arguments: object, seconds: float) -> Ran:
        assert session.runner is not None
        ran = await session.runner.run(operation, *arguments, timeout_seconds=seconds)
        session.touch()
        return ran
