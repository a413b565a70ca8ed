"""The worker's life inside the server's: opened when the app has started, drained and closed before the app stops.

The invariant: the app sees the lifespan that it would see without homing, once per worker although there are two
listeners; and no request, forwarded or not, is served before its start-up has ended.

Not here: what is opened (`worker.py`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Final

from homing.errors import ConfigurationError, HomingError
from homing.types import Message, Receive, Scope, Send

if TYPE_CHECKING:
    from homing.routing.middleware import SessionRoutingMiddleware

logger = logging.getLogger(__name__)


async def run_lifespan(router: SessionRoutingMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the app's lifespan with the worker's inside it. An app without one gets the worker's alone.

    An app whose lifespan ends or fails while it serves is served on, as a server does: the worker stays until the server
    stops, and what the app raised is raised then.
    """
    lifespan = _Lifespan(router, receive, send)
    router.use_lifespan(scope.get("state"), contextvars.copy_context())
    try:
        try:
            await router.app(scope, lifespan.receive, lifespan.send)
        except Exception:
            if lifespan.serving:
                logger.warning("the app's lifespan failed, and the app is served on", exc_info=True)
                await lifespan.receive()
                raise
            if lifespan.answered or router.policy.lifespan_required:
                raise
            logger.debug("the app has no lifespan", exc_info=True)
        if lifespan.serving:
            await lifespan.until_shutdown()
        elif not lifespan.answered:
            await lifespan.without_app()
    finally:
        await router.aclose()


def _check_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise ConfigurationError(
            "an asyncio event loop is needed, and this server runs the app on another kind (trio, say): choose its asyncio "
            "or uvloop workers"
        ) from error


_ANSWERS: Final = ("lifespan.startup.complete", "lifespan.startup.failed")


class _Lifespan:
    """The events between server and app; the worker opens on the one's way out, and drains on the other's way in."""

    __slots__ = ("_receive", "_router", "_send", "_started", "answered", "serving")

    def __init__(self, router: SessionRoutingMiddleware, receive: Receive, send: Send) -> None:
        self._router = router
        self._receive = receive
        self._send = send
        self._started = False
        self.answered = False
        """The app has said how its start-up went."""
        self.serving = False
        """The app has started, and nobody has told it to stop."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "lifespan.startup":
            self._started = True
        elif message["type"] == "lifespan.shutdown":
            self.serving = False
            await self._router.aclose()
        return message

    async def send(self, message: Message) -> None:
        # Nothing else is an answer: an app that takes every scope for a request's has no lifespan, and its server refuses
        # what it sends. A server may raise from *failed* too.
        first = not self.answered and message["type"] in _ANSWERS
        self.answered = self.answered or first
        if first and message["type"] == "lifespan.startup.complete":
            try:
                _check_loop()
                await self._router.open()
            except (HomingError, OSError) as error:
                await self._send({"type": "lifespan.startup.failed", "message": f"homing: {error}"})
                raise
            self.serving = True
        await self._send(message)

    async def without_app(self) -> None:
        """Be the lifespan of an app that has none."""
        if not self._started:
            await self.receive()
        await self.send({"type": "lifespan.startup.complete"})
        await self.until_shutdown()

    async def until_shutdown(self) -> None:
        """Be the rest of a lifespan whose app does not wait for its end."""
        await self.receive()
        await self.send({"type": "lifespan.shutdown.complete"})
