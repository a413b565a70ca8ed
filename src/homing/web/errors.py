"""What a web session's caller is told when a call fails: one class per kind, each with its status and whether to retry.

The invariant: a failure of the machinery has a kind of its own and is never a reward. The kinds are a closed set
(`ERROR_KINDS`); a reply's body is `{"detail", "error_kind", "retryable"}`, and `detail` is fixed text or one that was
written to be shown: never a path, an errno, a cookie, or what the caller sent.

Not here: turning an error into a reply (`server.py`).
"""

from __future__ import annotations

from typing import ClassVar, Final

from homing.errors import HomingError


class WebError(HomingError):
    """The root: an error that a web session's caller is answered with.

    Attributes:
        status: The HTTP status.
        error_kind: One of a closed set; what a client decides by.
        retryable: The same call, or a new session, may succeed; false: what was sent has to change first.
        ends_session: The session cannot go on after it: the manager closes it and says so to later calls.
        detail: What the caller is shown, if the message is not fit to be shown.
    """

    status: ClassVar[int] = 500
    error_kind: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    ends_session: ClassVar[bool] = False
    detail: ClassVar[str | None] = None

    @property
    def shown(self) -> str:
        """The reply's `detail`."""
        return self.detail or str(self)


# --- what the caller sent ---


class InvalidTaskError(WebError):
    """No such benchmark or task, or a task that says something that cannot be."""

    status = 400
    error_kind = "invalid_task"


class InvalidActionError(WebError):
    """The action cannot be read, or names what this server does not do; nothing was tried, the session is as it was."""

    status = 400
    error_kind = "invalid_action"


class StaleRefError(InvalidActionError):
    """The action's ref, or the observation it goes by, is not of the last observation; nothing was tried."""

    error_kind = "stale_ref"


class BenchmarkPreconditionError(WebError):
    """The task's start refused: the site is not in the state the task needs, or the task says something it cannot do."""

    status = 422
    error_kind = "benchmark_precondition"


class EvaluatorConfigurationError(WebError):
    """The task has no evaluator, or one that is not set up."""

    status = 422
    error_kind = "evaluator_configuration"


class NoIdentityError(WebError):
    """The request names no session: neither a cookie nor an identity in its body."""

    status = 400
    error_kind = "invalid_request"
    detail = "The request names no session: send the session cookie of the seed's reply."


class AuthenticationError(WebError):
    """The identity's token is another's (403)."""

    status = 403
    error_kind = "authentication_error"
    detail = "The session's close token does not match."


class BearerError(AuthenticationError):
    """The server needs a bearer token, and the request has none or a wrong one."""

    status = 401
    detail = "This server needs a bearer token."


class SessionConflictError(WebError):
    """The session exists with another task, or is in a state in which the call makes no sense: a new session, or the call
    once the session is ready, may succeed."""

    status = 409
    error_kind = "session_conflict"
    retryable = True


class SessionBusyError(SessionConflictError):
    """As many calls as may wait for this session do already; nothing ran, so the call can be sent again."""


# --- what the machinery did ---


class SessionLostError(WebError):
    """No such session here: it was never seeded, has been closed, or failed. Start a new one."""

    status = 404
    error_kind = "session_lost"
    retryable = True


class CapacityError(WebError):
    """No room for a session now: as many as may be live, a site or the browser supply is exhausted, or stopping."""

    status = 503
    error_kind = "capacity_unavailable"
    retryable = True


class ReleaseError(WebError):
    """Something of the session could not be released yet; it is kept and tried again. Send the close again."""

    status = 503
    error_kind = "session_release_failed"
    retryable = True


class EvaluatorError(WebError):
    """The evaluator could not do its work: there is no verdict, which is not a reward of 0."""

    status = 502
    error_kind = "evaluator_infrastructure"
    retryable = True


class OperationTimeoutError(WebError):
    """The operation did not end within its time; what it did to the page is unknown, so the session ends."""

    status = 504
    error_kind = "operation_timeout"
    retryable = True
    ends_session = True


class PageUnresponsiveError(WebError):
    """The page does not answer: an endless loop, or a stopped renderer."""

    status = 504
    error_kind = "page_unresponsive"
    retryable = True
    ends_session = True


class PageCrashedError(WebError):
    """The page's renderer died."""

    status = 502
    error_kind = "page_crashed"
    retryable = True
    ends_session = True


class BrowserLostError(WebError):
    """The browser, its driver or the connection to it is gone."""

    status = 502
    error_kind = "browser_lost"
    retryable = True
    ends_session = True


class BrowserStartError(CapacityError):
    """The browser supply could not start one; the message, for the log, names what is missing.

    Args:
        shown: What the caller is shown, where the message has a path.
    """

    def __init__(self, message: str, *, shown: str | None = None) -> None:
        super().__init__(message)
        self._shown = shown

    @property
    def shown(self) -> str:
        return self._shown or super().shown


class NoBrowserError(BrowserStartError):
    """No browser starts here, and no retry makes one: whoever runs the server has to install one, or to name another."""

    retryable = False


class BackendError(WebError):
    """The backend failed in a way that it does not explain; the session ends."""

    status = 502
    error_kind = "backend_failure"
    retryable = True
    ends_session = True
    detail = "The session's backend failed; the server's log says how."


ERROR_KINDS: Final = frozenset(
    {
        "authentication_error",
        "backend_failure",
        "benchmark_precondition",
        "browser_lost",
        "capacity_unavailable",
        "evaluator_configuration",
        "evaluator_infrastructure",
        "internal_error",
        "invalid_action",
        "invalid_request",
        "invalid_task",
        "operation_timeout",
        "page_crashed",
        "page_unresponsive",
        "session_conflict",
        "session_gone",
        "session_lost",
        "session_release_failed",
        "stale_ref",
    }
)
"""Every `error_kind` there is; `session_gone` is the router's, for a session whose worker has exited."""
