"""How long a worker keeps ownership of a session: the seam that the router records through."""

from __future__ import annotations

from typing import Protocol

from homing.types import Scope


class SessionLifetimes(Protocol):
    """How long a worker keeps ownership of the sessions it serves.

    Attributes:
        judges_routes: `served` looks at more of a request than whether its handler ended the session, so the scope has to
            be as it came.
        ends: How many ends it has recorded. Noted as a request begins, it tells `served` which ends have come since
            (`BEGAN_SCOPE_KEY`); 0 where a request never opens what has ended.
    """

    @property
    def ends(self) -> int: ...

    @property
    def judges_routes(self) -> bool: ...

    def starts(self, path: str) -> bool:
        """Whether a request on path starts a session, so it takes ownership whatever its handler does."""
        ...

    def served(self, session_id: str, scope: Scope, status: int | None) -> None:
        """Record a request for a session this worker owns, once it is served; status is None if it failed."""
        ...

    def holds(self, session_id: str) -> bool:
        """Whether this worker still keeps any record of the session."""
        ...

    def opened(self, session_id: str) -> None:
        """Open a session that a reply has just made known, or that a restore installed here."""
        ...

    def ended(self, session_id: str) -> None:
        """End a session from inside its handler, or from a route that ends it under another name."""
        ...

    def postpone(self, seconds: float) -> None:
        """Move every deadline: the event loop lagged, and requests that were queued meanwhile win over a sweep."""
        ...

    def sweep(self) -> list[str]:
        """Drop the records whose time has passed, and return the sessions whose ownership can be released."""
        ...
