"""What an RL server answers when it cannot do as it was asked: a status, a code, a sentence, and the fields at fault.

Not here: the errors of routing (`homing.errors`), which have the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from homing.errors import HomingError, ReplyError


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One field of a body that cannot be used: its dotted name (empty: the whole body), and what is wrong with it."""

    field: str
    problem: str


class RlError(ReplyError):
    """An error that an RL server answers with. Unlike routing's, its detail may say what the caller has to change."""

    def __init__(self, detail: str | None = None, *, fields: Sequence[FieldProblem] = ()) -> None:
        super().__init__(detail)
        if detail is not None:
            self.detail = detail  # type: ignore[misc]  # this error's own sentence, in place of its class's
        self.fields = tuple(fields)

    @classmethod
    def about(cls, field: str, problem: str) -> Self:
        """The error that one field causes."""
        return cls(f"{field}: {problem}", fields=[FieldProblem(field, problem)])


class InvalidRequestError(RlError):
    """The body is not what the route takes; the message names the field."""

    status = 422
    code = "invalid_request"
    detail = "The body is not what this route takes."


class SeedRejectedError(RlError):
    """A seed whose input no retry can fix. Raise it from `seed` if the task cannot be served."""

    status = 422
    code = "seed_rejected"
    detail = "This task cannot be seeded."


class ConflictError(RlError):
    """The session is bound to something else, or has been closed."""

    status = 409
    code = "session_conflict"
    detail = "The session is bound to another episode."


class SessionClosedError(ConflictError):
    """A seed that came after its close."""

    code = "session_closed"
    detail = "The session has been closed; seed a new one."


class SessionClosingError(ConflictError):
    """The session is being closed, or its release failed and has to be tried again: it can only be closed."""

    code = "session_closing"
    detail = "The session is being closed; it can only be closed again."


class SessionLostError(RlError):
    """A request for a session that this server does not hold."""

    status = 404
    code = "session_lost"
    detail = "No such session is open here: seed one first."


class NotFoundError(RlError):
    status = 404
    code = "not_found"
    detail = "There is nothing here."


class ReleaseFailedError(RlError):
    """A session's state could not be let go. It is still there, and the close can be sent again."""

    status = 503
    code = "release_failed"
    detail = "The session's state could not be released; send the close again."
    retry_after_seconds = 1


class SessionBusyError(RlError):
    """Another request has held the session for too long."""

    status = 503
    code = "session_busy"
    detail = "The session is busy with another request; nothing ran, so this one can be sent again."
    retry_after_seconds = 1


class EnvironmentHungError(RlError):
    """An environment's step, reset or close does not end. Its thread was given up, with every environment on it."""

    status = 504
    code = "environment_hung"
    detail = "An environment on this session's thread hangs: the thread was given up and its sessions are lost; reset to begin anew."


class ToolError(RlError):
    """Raise it from a tool that cannot do as it was asked: the caller, often a model, gets the message."""

    status = 400
    code = "tool_error"
    detail = "The tool could not do that."


class BodyTooLargeError(RlError):
    status = 413
    code = "body_too_large"
    detail = "The body is too large."


def invalid(error: ValidationError, *, inside: str = "") -> InvalidRequestError:
    """A validation error as a reply: each field's dotted name and what is wrong with it, and nothing that was sent.

    Args:
        inside: The field that was validated, if it was not the whole body.
    """
    return InvalidRequestError(fields=problems(error, inside=inside), **_sentence(error, inside))


def problems(error: ValidationError, *, inside: str = "") -> list[FieldProblem]:
    """What is wrong, field by field."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [FieldProblem(_dotted(inside, each["loc"]), each["msg"].removeprefix("Value error, ")) for each in found]


def _sentence(error: ValidationError, inside: str) -> dict[str, Any]:
    first, *others = problems(error, inside=inside)
    more = f" (and {len(others)} more)" if others else ""
    return {"detail": f"{first.field or 'the body'}: {first.problem}{more}"}


def _dotted(inside: str, location: Sequence[int | str]) -> str:
    parts = [inside] if inside else []
    return ".".join([*parts, *(str(each) for each in location)])


class RemoteError(HomingError):
    """A server's client could not be given what it asked for.

    Attributes:
        status: The reply's; None if there was none.
        code: What the server calls it (`session_gone`, `session_lost`, `invalid_request`, …), if it says.
    """

    def __init__(self, message: str, *, status: int | None, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
