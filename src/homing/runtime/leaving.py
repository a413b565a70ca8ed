"""How does a worker leave while its server goes on? Its clients are not to notice, but for the sessions that end with it.

While it drains, no session begins here (`homing.routing`), and those that are here go on. Connections that ask for other
workers' sessions, or for none, move to other workers while they are idle (`handoff.py`); one that cannot move is told that its
next reply is the last on it. At the end all that are idle move.

The invariant: a client whose connection was accepted is answered. One that has not sent its request yet moves too, or is
waited for; one that has sent half of it is waited for. Where all leave together, idle connections wait for a worker that takes
them.

Not here: when a worker drains, and what follows (`worker.py`, `supervisor.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from uvicorn.server import ServerState

from homing.errors import HomingError
from homing.routing.worker import Worker
from homing.runtime.config import RunConfig
from homing.runtime.protocol import HomingHttpToolsProtocol
from homing.types import WorkerId

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.1
"""How often a worker that drains looks for connections that have become idle, as often as uvicorn looks whether to stop."""

TAKES_WITHIN_SECONDS: Final = 1.0
"""How long a worker that leaves tries without a pause to give its idle connections away while no other takes any. A worker's queue
of them is short (`net.unix.max_dgram_qlen`), so many connections go as fast as they are taken."""

_TAKES_LOOK_SECONDS: Final = 0.002

FIRST_REQUEST_SECONDS: Final = 1.0
"""How long a worker that leaves waits for the first request of a connection that cannot move, or for its TLS handshake; and, at the
end, for what is missing of a request's head."""


class Leave:
    """One worker's leave. Borrows the server's state, the worker and its handoffs.

    Args:
        worker: None: nothing is routed, and no connection moves.
        config: Where the worker's handoffs are; as long as there are none, no connection moves.
    """

    def __init__(self, state: ServerState, worker: Worker | None, config: RunConfig) -> None:
        self._state = state
        self._worker = worker
        self._config = config
        self._began: float | None = None

    def begin(self) -> None:
        """No session begins here any more, and all others are told so."""
        self._began = time.monotonic()
        if self._worker is not None:
            self._worker.begin_draining()

    async def until_nothing_is_left(self, deadline: float, told_to_stop: Callable[[], bool]) -> int:
        """Wait until no session is open here and no request under way; how many sessions are left at the deadline.

        Args:
            deadline: On the monotonic clock.
            told_to_stop: Whether to wait no more.
        """
        while (self.sessions or self._is_serving) and time.monotonic() < deadline and not told_to_stop():
            self._send_away(all_idle=False)
            await asyncio.sleep(LOOK_SECONDS)
        return self.sessions

    async def end(self, in_a_hurry: Callable[[], bool]) -> None:
        """Before the server closes what is idle: what can move has moved, and whoever is just connecting is heard.

        Args:
            in_a_hurry: Whether the worker was told to stop, and so was its server perhaps: nobody waits for silent clients.
        """
        if in_a_hurry():
            self._send_away(all_idle=True)
            return
        await self._send_all_away(TAKES_WITHIN_SECONDS)
        ends = time.monotonic()
        # One that has drained has accepted nothing since; one that was to serve so many requests stops just now.
        silent_since = ends if self._began is None else self._began
        # As long as what is served: the others may have reached their number of requests too, and their replacements still start.
        graceful_seconds = self._config.timeout_graceful_shutdown or 0
        while not in_a_hurry() and (
            (_is_within(FIRST_REQUEST_SECONDS, silent_since) and not self._all_heard())
            or (_is_within(FIRST_REQUEST_SECONDS, ends) and self._is_asked())
            or (_is_within(graceful_seconds, ends) and self._will_be_taken())
        ):
            await asyncio.sleep(LOOK_SECONDS)
            await self._send_all_away(0.0)

    async def _send_all_away(self, seconds: float) -> None:
        """Give away all connections that are idle; a queue that is full is tried again for so long, and while the others take any."""
        until = time.monotonic() + seconds
        while True:
            given, stayed = self._given_and_stayed()
            self._send_away(all_idle=True)
            given_now, stayed_now = self._given_and_stayed()
            if given_now > given:
                until = time.monotonic() + TAKES_WITHIN_SECONDS
            if stayed_now == stayed or time.monotonic() >= until:
                return
            await asyncio.sleep(_TAKES_LOOK_SECONDS)

    def _given_and_stayed(self) -> tuple[int, int]:
        counters = None if self._config.handoffs is None else self._config.handoffs.counters
        return (0, 0) if counters is None else (counters.given, counters.stayed)

    @property
    def sessions(self) -> int:
        """Sessions that are open here."""
        return 0 if self._worker is None else self._worker.open_sessions

    @property
    def _is_serving(self) -> bool:
        """A request is under way: one that arrived here, of which the server has a task, or one that another worker sent."""
        return bool(self._state.tasks) or (self._worker is not None and self._worker.serving > 0)

    def _send_away(self, *, all_idle: bool) -> None:
        to = self._others()
        for connection in list(self._state.connections):
            if not isinstance(connection, HomingHttpToolsProtocol):
                continue
            if not (to and connection.can_leave) or (all_idle and connection.is_asking):
                connection.answer_last()
            elif all_idle or not self._is_here(connection.session_id):
                connection.leave(connection.asks_for if connection.asks_for in to else random.choice(to))  # noqa: S311

    def _is_here(self, session_id: str | None) -> bool:
        return session_id is not None and self._worker is not None and self._worker.owners.mine(session_id)

    def _others(self) -> list[WorkerId]:
        if self._worker is None or self._config.handoffs is None:
            return []
        try:
            return self._worker.others_to_start_at()
        except HomingError as error:
            logger.warning("no connection moves to another worker: %s", error)
            return []

    def _will_be_taken(self) -> bool:
        """Connections are idle that can move, and whoever is to take them is still starting, or has no room for them now."""
        if self._worker is None or not any(
            isinstance(each, HomingHttpToolsProtocol) and each.waits_to_leave for each in self._state.connections
        ):
            return False
        # Where those that stay serve another app, after a restart, say, nobody would ever take them.
        with contextlib.suppress(HomingError):
            return bool(self._worker.others_to_start_at()) or not self._worker.others_that_stay()
        return False

    def _is_asked(self) -> bool:
        """A request's head is on its way, of which the server would know nothing."""
        return any(isinstance(each, HomingHttpToolsProtocol) and each.is_asking for each in self._state.connections)

    def _all_heard(self) -> bool:
        """Every connection has sent a request. Of one that is still in its TLS handshake nothing is known."""
        connections = [each for each in self._state.connections if isinstance(each, HomingHttpToolsProtocol)]
        if len(connections) < len(self._state.connections) or self._config.handoffs is None:
            return False
        return all(each.has_asked for each in connections)


def _is_within(seconds: float, since: float) -> bool:
    return time.monotonic() < since + seconds
