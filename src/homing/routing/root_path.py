"""Which part of an app sets `root_path` by itself? A FastAPI app that was given one does, once it is called.

Its routes then match the path with that prefix and without it, and so must what tells its sessions.
"""

from __future__ import annotations

import sys
from typing import Final, Protocol

_MAX_WRAPPERS: Final = 32


class WithRootPath(Protocol):
    """An app that sets a scope's `root_path` to its own, unless that is empty."""

    root_path: str


def app_with_root_path(app: object) -> WithRootPath | None:
    """The FastAPI app that `app` is or wraps, where each wrapper keeps what it wraps in `.app`; None if there is none."""
    fastapi = getattr(sys.modules.get("fastapi"), "FastAPI", None)  # without it nothing here is an app of it
    if fastapi is None:
        return None
    for _ in range(_MAX_WRAPPERS):
        if isinstance(app, fastapi):
            found: WithRootPath = app
            return found
        app = getattr(app, "app", None)
        if app is None:
            return None
    return None
