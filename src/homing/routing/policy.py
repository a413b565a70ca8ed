"""How a server treats its sessions: what the router goes by, whatever the app.

Not here: what a user sets (`options.py`), and what follows from it for one request (`route.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from homing.placement import PlacementOptions
from homing.routing.answers import ErrorReply, GoneReply
from homing.types import Scope

if TYPE_CHECKING:
    from homing.routing.worker import Worker


def nothing(scope: Scope, about: object) -> None:
    """For whoever need not be told."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a server treats its sessions.

    Attributes:
        adopts: A session that nobody owns is served where its request lands; else it is *gone*.
        sees_use: The app shows whether it used the session (`RoutedRequest.used`); else the reply's status tells.
        gone_status, gone_reply: The shape of *gone*.
        error_reply: The shape of every error; `gone_reply` goes before it.
        max_sessions: Over it, at one worker, a declared start is refused. Sessions that have ended do not count, starts under
            way do.
        placing: How new sessions are placed, and limited over all workers; None: they begin where they arrive.
        unnamed_start: Told the scope and status of a start that succeeded, and named no session.
        unnamed_request: Told the scope of any other request that names none, and the worker that is about to serve it.
        scatter: Test mode: every request first lands on a wrong worker.
        owner_timeout_seconds, graceful_seconds, sweep_seconds: As their users say.
        lifespan_required: An app without lifespan is an error, as under `--lifespan on`.
    """

    adopts: bool = True
    sees_use: bool = False
    gone_status: int | None = None
    gone_reply: GoneReply | None = None
    error_reply: ErrorReply | None = None
    max_sessions: int | None = None
    placing: PlacementOptions | None = None
    unnamed_start: Callable[[Scope, int], object] = nothing
    unnamed_request: Callable[[Scope, Worker], object] = nothing
    scatter: bool = False
    owner_timeout_seconds: float = 30.0
    graceful_seconds: float | None = None
    sweep_seconds: float = 30.0
    backlog: int = 2048
    lifespan_required: bool = False
