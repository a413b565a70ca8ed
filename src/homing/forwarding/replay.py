"""A `receive` whose events can be given again, as long as the request may still go to another worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from homing.forwarding.base import WHOLE_BODY_SCOPE_KEY
from homing.types import Message, Receive, Scope


class Replayable:
    """A `receive` that keeps what it gave, until `release`, and gives it again after `rewind`.

    Holds at most what the forwarder takes before *mine* (64 KiB and one event) beside what its maker put in.
    """

    # On the class: most requests have no body, and nothing is ever taken from theirs.
    _given: list[Message] | None = None
    _waiting: deque[Message] | None = None
    _keeping = True
    on_release: Callable[[], object] | None = None
    """Called once the request is somebody's for good: another worker said *mine*, or it stays here."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __call__(self) -> Message:
        event = self._waiting.popleft() if self._waiting else await self._receive()
        if self._keeping:
            if self._given is None:
                self._given = []
            self._given.append(event)
        return event

    def whole_body(self, scope: Scope) -> bytes | None:
        """The request's body, if it is known that all of it is here; it is given as if this had not been asked."""
        look: Callable[[Scope, Receive], bytes | None] | None = scope.get(WHOLE_BODY_SCOPE_KEY)
        return None if look is None or self._given or self._waiting else look(scope, self._receive)

    def rewind(self) -> None:
        """What was given, and not released, is given again."""
        if self._given:
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.extendleft(reversed(self._given))
            self._given = None

    def release(self) -> None:
        """The request stays where it is: nothing is kept from now on. What waits to be given again still is."""
        self._keeping = False
        self._given = None
        if self.on_release is not None:
            self.on_release()

    async def rewind_after(self, taker: asyncio.Task[None] | None) -> None:
        """Wait until `taker`, cancelled, takes nothing more; then `rewind`."""
        if taker is not None:
            await asyncio.wait({taker})
        self.rewind()


def replayable(receive: Receive) -> Replayable:
    """`receive`, so that what it gave can be given again; itself if it can do so already."""
    return receive if isinstance(receive, Replayable) else Replayable(receive)
