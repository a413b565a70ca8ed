"""A declared start of a client's own, until a worker has taken it: its turn, and the worker where it is to run.

The invariant: a start that was placed and not taken runs where it arrived, once; nothing that may have been delivered is sent
again.

Not here: the choice, permits and the queue (`homing.placement`), and looking up sessions (`route.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from homing.errors import HomingError, OwnerBusyError, OwnerRefusedError, SessionLimitError
from homing.forwarding.frames import EARLY_BODY_BYTES
from homing.forwarding.replay import Replayable
from homing.identity import Named
from homing.placement import Placement, Start
from homing.routing.worker import Worker
from homing.types import Reason, Scope, Send, WorkerId

_T = TypeVar("_T")

_LEFT = ("http.disconnect", "websocket.disconnect")


class StartOnItsWay:
    """One start. Borrows what it is given.

    Args:
        receive: What the handler will read from, and this until then.
        note: What the worker that is chosen should know of the request.
        client_left: Returns, once awaited, when the client has left; None: only `receive` tells.
    """

    __slots__ = ("_left", "_named", "_note", "_placement", "_receive", "_scope", "_send", "_start", "_worker")

    def __init__(
        self,
        worker: Worker,
        placement: Placement,
        named: Named,
        note: tuple[object, ...],
        scope: Scope,
        receive: Replayable,
        send: Send,
        *,
        client_left: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._worker = worker
        self._placement = placement
        self._named = named
        self._note = note
        self._scope = scope
        self._receive = receive
        self._send = send
        self._left = client_left
        self._start: Start = placement.new_start()

    @property
    def allowed(self) -> bool:
        """Whether it may begin a session: nobody waits who came before it."""
        return self._start.allowed

    async def in_turn(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Have `attempt` done when it is this start's turn.

        Raises:
            SessionLimitError: there was no room in time.
        """
        self._receive.on_release = self._start.settled
        try:
            begun = await self._placement.queue.run(self._start, attempt, self._client_left)
            if begun is not None:
                self._placement.placed["here"] += 1
            return begun
        finally:
            self._receive.on_release = None

    async def placed(self) -> bool:
        """Send it to the worker where new sessions are to begin; False: it runs here.

        Raises:
            SessionLimitError: it may not begin now. ReplyError, ReplyCutError, RemoteAppError: as `Forwarder.forward`.
        """
        start, placement = self._start, self._placement
        if start.placed or self._belongs_to_a_path():
            return False
        start.placed = True
        if (target := placement.choose()) is None:
            return False
        if not (start.allowed and placement.has_permit()):
            raise SessionLimitError("the server has as many sessions as it may have")
        way = placement.on_its_way(target)

        def taken() -> None:
            way.close()
            start.settled()

        self._receive.on_release = taken
        try:
            taken_there = await self._worker.forwarder.forward(
                target.worker_id, Reason.PLACED, self._note, self._scope, self._receive, self._send
            )
        except OwnerRefusedError:
            placement.refused_by(target)
            return False
        except OwnerBusyError:
            return False
        else:
            placement.placed["elsewhere"] += taken_there
            return taken_there
        finally:
            way.close()
            self._receive.on_release = start.settled

    def _belongs_to_a_path(self) -> bool:
        """Whether a worker holds the start's path key already: then it belongs there, wherever that is."""
        key = self._named.start_path_key
        if key is None:
            return False
        try:
            holder: WorkerId | None = self._worker.path_keys.owners.owner(key)
        except HomingError:
            return True  # whoever binds the key says what is wrong with it
        return holder is not None

    async def _client_left(self) -> None:
        """Return once the client has left. What is taken meanwhile is given again."""
        if self._left is not None:
            await self._left()
            return
        if any(name == b"expect" for name, _ in self._scope["headers"]):
            # To take anything would tell the client to send its body, which no app has asked for.
            await asyncio.Event().wait()
        taken = 0
        try:
            whole = False
            while whole or taken < EARLY_BODY_BYTES:  # after the whole body nothing comes but the client's leave
                event = await self._receive()
                if event["type"] in _LEFT:
                    return
                taken += len(event.get("body", b""))
                whole = not event.get("more_body", False)
            await asyncio.Event().wait()
        finally:
            self._receive.rewind()
