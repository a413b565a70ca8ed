"""What to say when a declared start was answered as a success, and neither request nor reply named a session.

Such a start makes a session that nobody can find again: the place where its reply names it has not been declared.

Not here: what starts a session, and reading replies (`homing.identity`).
"""

from __future__ import annotations

import logging

from homing.routes import Route, Routes, path_below_root, request_method
from homing.types import Scope

logger = logging.getLogger(__name__)


class UnnamedStarts:
    """Warns of each start route whose reply names no session, once for as long as this worker runs."""

    def __init__(self, starts: Routes) -> None:
        self._starts = starts
        self._told: set[Route] = set()

    def __call__(self, scope: Scope, status: int) -> None:
        """A start with this scope was answered with this status, and named no session."""
        method, path = request_method(scope), path_below_root(scope)
        for route in self._starts.routes:
            if route.matches(method, path):
                if route not in self._told:
                    self._told.add(route)
                    logger.warning(
                        "%s answered %d, but its reply names no session: add --learn body:FIELD@%s (in code: learn=…), "
                        "or the header or cookie that names it",
                        route,
                        status,
                        route.template,
                    )
                return

    def __repr__(self) -> str:
        return f"<UnnamedStarts {self._starts!r}: {len(self._told)} told>"
