"""Which rollout is a request for? The prefix `/ng-rollout/<id>` of its path says so, and comes off before the routes.

The invariant: the prefix is known to the handler (`current_rollout`), and never to its route.

Not here: routing, which matches paths with and without the prefix itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Final

from homing.routes import ROLLOUT_PATH_PREFIX, path_below_root
from homing.types import ASGIApp, Receive, Scope, Send

TRAINING_TOKEN_CAPTURE: Final = "training-token-capture"  # noqa: S105 - a path's segment

_PREFIX: Final = re.compile(rf"/{ROLLOUT_PATH_PREFIX}/([^/]+)(?:/({TRAINING_TOKEN_CAPTURE}))?(?=/)")
_START: Final = f"/{ROLLOUT_PATH_PREFIX}/"

_current: ContextVar[str | None] = ContextVar("homing.rl.rollout", default=None)


def current_rollout() -> str | None:
    """The capture key of the rollout that the request being served is for; None where its path has no prefix."""
    return _current.get()


class RolloutPrefixMiddleware:
    """Takes `/ng-rollout/<id>` off the path, and keeps the ID for the handler.

    Args:
        keep: Second segments that the app routes itself, such as `training-token-capture`: they stay in the path.
    """

    def __init__(self, app: ASGIApp, keep: Iterable[str] = ()) -> None:
        self.app = app
        self._keep = frozenset(keep)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _START not in scope["path"]:
            await self.app(scope, receive, send)
            return
        path = path_below_root(scope)
        found = _PREFIX.match(path)
        if found is None:
            await self.app(scope, receive, send)
            return
        rest = path[found.end(1) if found[2] in self._keep else found.end() :]
        root = scope["path"][: len(scope["path"]) - len(path)]
        scope = {**scope, "path": root + rest, "raw_path": None}
        token = _current.set(found[1])
        try:
            await self.app(scope, receive, send)
        finally:
            _current.reset(token)
