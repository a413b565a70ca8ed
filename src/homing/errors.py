"""Every error that homing raises on purpose, as one tree.

Each class that can become a reply carries the HTTP `status` and the `code` it answers with (the header `homing-error`),
and whether the caller may try again (`retry_after_seconds`). Only the router turns errors into replies; the reply
shows `detail`, which never holds a path, an ID or an errno. The message is for the log.
"""

from __future__ import annotations

from typing import ClassVar

from homing.types import SessionId, WorkerId, session_tag


class HomingError(Exception):
    """The root of the tree: anything homing raises on purpose."""


# --- set-up: one line on stderr, exit code not 0 ---


class ConfigurationError(HomingError):
    """A setting that cannot work; the message says which, and what to do."""


class RunDirectoryError(ConfigurationError):
    """The directory for private sockets and owner records cannot be used: missing, not ours, too open, or too long."""


class StartupError(HomingError):
    """The server cannot start: the app cannot be loaded or its start-up failed, or its address is taken."""


# --- replies ---


class ReplyError(HomingError):
    """An error that the router answers a request with."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    detail: ClassVar[str] = "An internal error occurred."
    retry_after_seconds: ClassVar[int | None] = None
    is_heard: ClassVar[bool] = True
    """Somebody is there to be answered: only then it counts as an answer."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or self.detail)


class BadRequestError(ReplyError):
    """The request cannot be routed as it stands; sending it again will not help."""

    status = 400
    code = "bad_request"
    detail = "The request names its session in a way that cannot be read."


class SessionIdTooLongError(BadRequestError):
    code = "session_id_too_long"
    detail = "A session ID is 1 to 1024 bytes long."


class DuplicateFieldError(BadRequestError):
    code = "duplicate_field"
    detail = "The JSON body names its session twice."


class BadOwnerHeaderError(BadRequestError):
    code = "bad_owner_header"
    detail = "x-ng-session-owner is a worker's ID: 32 lowercase hexadecimal digits, once."


class BodyTooLargeError(BadRequestError):
    status = 413
    code = "body_too_large"
    detail = "The JSON body of this route is limited, since a session named in it has to be found."


class EncodedBodyError(BadRequestError):
    status = 415
    code = "encoded_body"
    detail = "The body of this route names the session, so it cannot have a Content-Encoding."


class BodyTimeoutError(BadRequestError):
    status = 408
    code = "body_timeout"
    detail = "The body did not arrive in time."


class HeadTooLargeError(BadRequestError):
    """A request's head does not fit into a frame, so it cannot reach its session's worker (RFC 6585, 5)."""

    status = 431
    code = "head_too_large"
    detail = "The request's head is too large to be passed to its session's worker."


class SessionConflictError(ReplyError):
    """The request names two sessions, or a session bound to something else."""

    status = 409
    code = "session_conflict"
    detail = "Two places of the request name different sessions."


class SessionGoneError(ReplyError):
    """The session's state is lost, or the session was never started or has ended; a new session is needed."""

    status = 410
    code = "session_gone"
    detail = "The session is gone; start a new one."


class OwnerGoneError(SessionGoneError):
    """The worker that owned the session has exited, and the session's state with it."""

    def __init__(self, session_id: SessionId | str, owner: WorkerId | str) -> None:
        super().__init__(
            f"session {session_tag(session_id)} was owned by worker {owner}, which has exited; "
            "its state is lost, so start a new session"
        )
        self.session_id = session_id
        self.owner = owner


class UnavailableError(ReplyError):
    """Nothing ran; the same request may be sent again."""

    status = 503
    code = "unavailable"
    detail = "The server cannot take this request now; nothing ran, so it can be sent again."
    retry_after_seconds = 1


class SessionMovingError(UnavailableError):
    """The session is fenced, or its record names a worker that does not count it among its own: it is on the move."""

    code = "session_moving"
    detail = "The session is moving to another worker; nothing ran, so the request can be sent again."


class NotHereError(UnavailableError):
    """This worker does not own the session, so it does not serve it: the sender looks again where it is."""

    code = "not_here"
    detail = "The session is at another worker; nothing ran, so the request can be sent again."


class SessionLimitError(UnavailableError):
    code = "session_limit"
    detail = "The server holds as many sessions as it may; nothing ran, so try again later."


class StartAbandonedError(SessionLimitError):
    """The client of a start that waited has left: what is answered reaches nobody."""

    is_heard = False


class WorkerFullError(SessionLimitError):
    """The one worker where the session would have to begin has as many as it may: no wait for a place anywhere helps."""


class OwnerBusyError(UnavailableError):
    """The owner is alive and cannot take the request now: its backlog is full, or there is no descriptor."""

    code = "owner_busy"
    detail = "The session's worker cannot take more requests now; nothing ran, so the request can be sent again."


class DirectoryError(UnavailableError):
    """The owner records cannot be read or written as they should; nobody may guess who owns a session."""

    code = "directory_unavailable"
    detail = "The server cannot look up its sessions now; nothing ran, so the request can be sent again."


class DirectoryBusyError(DirectoryError):
    """The lock on dead workers' records was not free within its deadline."""

    code = "directory_busy"


class MalformedRecordError(DirectoryError):
    """An owner record that names no valid worker, which nothing here writes."""

    code = "malformed_record"


class ForeignRecordError(SessionGoneError):
    """An owner record of another boot of this machine: its worker, and the session's state, are gone."""


class OwnerUnreachableError(ReplyError):
    """The connection to the owner broke after the request may have been delivered: its outcome is unknown."""

    status = 502
    code = "owner_unreachable"
    detail = "The session's worker was lost while it may have been handling the request; the outcome is unknown."


class OwnerTimeoutError(ReplyError):
    """The owner did not say within the owner timeout whether the session is its own: the outcome is unknown."""

    status = 504
    code = "owner_timeout"
    detail = "The session's worker did not answer in time; the outcome is unknown."


class SessionNotRecordedError(ReplyError):
    """A session was made for this request and could not be recorded, so its ID must not reach the client."""

    status = 500
    code = "session_not_recorded"
    detail = "The session could not be recorded; the request was handled, and its session cannot be used."


# --- inside the server: the router acts on these, and no reply shows them ---


class OwnerRefusedError(HomingError):
    """Nothing was delivered: the worker's private socket is missing or refuses. Dead, if the record still names it."""


class ReplyCutError(HomingError):
    """The owner was lost inside the reply: abort the client's connection, so a cut reply never looks complete."""


class RemoteAppError(HomingError):
    """The app raised at the owner, which logged the traceback; raised here so that this server reacts as to its own."""
