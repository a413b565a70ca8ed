"""One operation in a session: its turn, and what its failure means.

The invariant: whatever a backend raises, the caller is told a `WebError` of the closed set, and the session either is as
it was or ends. A failure of the machinery never becomes a reward.

Not here: which operations there are (`manager.py`), and where they run (`runners.py`).
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
    SessionBusyError,
    SessionConflictError,
    WebError,
)
from homing.web.session import Reason, Session

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
