"""What to say of requests that name no session, where one was to be expected. Each is said once for as long as a worker runs.

A declared start that was answered as a success, and whose reply names no session either, makes one that nobody can find
again: the place where its reply names it has not been declared. A worker whose first requests all name none may look in
the wrong place. And a preset knows requests whose sessions take a source that it cannot know.

Not here: what starts a session, reading replies, and what a preset knows (`homing.identity`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from homing.routes import Route, Routes, path_below_root, request_method
from homing.types import Scope

if TYPE_CHECKING:
    from homing.routing.worker import Worker

logger = logging.getLogger(__name__)

NAMELESS_REQUESTS: Final = 100
"""After so many requests of which none has named a session it is said that none has."""


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


class UnnamedRequests:
    """Sees the requests that name no session and start none, and warns if there is nothing else.

    It is not told of those that name one, which so pay nothing for it: whether there were any is seen by what the worker
    has done meanwhile.

    Args:
        sources: Where sessions are looked for, as the user declared it.
        hint: What is missing, where a request with this scope names no session; None: nothing is.
        scatter: The test mode, in which that a worker has sent requests elsewhere says nothing about them.
    """

    def __init__(
        self, sources: Sequence[str], hint: Callable[[Scope], str | None] | None = None, *, scatter: bool = False
    ) -> None:
        self._sources = sources
        self._hint = hint
        self._scatter = scatter
        self._nameless = 0
        self._counts = True

    def __call__(self, scope: Scope, worker: Worker) -> None:
        """This worker is about to serve a request with this scope, which names no session and starts none."""
        if self._hint is not None and (missing := self._hint(scope)) is not None:
            self._hint = None
            self._counts = False
            logger.warning("%s", missing)
        if not self._counts:
            return
        if self._any_session(worker):
            self._counts = False
            return
        self._nameless += 1
        if self._nameless == NAMELESS_REQUESTS:
            self._counts = False
            logger.warning(
                "none of the first %d requests has named a session, so each was served where it arrived: looked for %s; "
                "if they have a session, say where they name it with --session (in code: sessions=)",
                NAMELESS_REQUESTS,
                ", ".join(self._sources),
            )

    def _any_session(self, worker: Worker) -> bool:
        """Whether this worker has served anything else, has sent a request to another, or owns a session."""
        forwarded = 0 if self._scatter else worker.forwarder.counters.forwarded
        return worker.served != self._nameless or forwarded > 0 or len(worker.owners) > 0 or bool(worker.answers)

    def __repr__(self) -> str:
        return f"<UnnamedRequests {', '.join(self._sources)}: {self._nameless} seen>"
