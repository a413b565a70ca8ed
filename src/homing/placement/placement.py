"""One worker's part in the placement of new sessions: its row, the choice, its permits and its queue.

Not here: sending a start to the worker that was chosen, and taking one that was sent here (`homing.routing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

from homing.errors import DirectoryError, RunDirectoryError
from homing.placement.board import (
    BEAT_SECONDS,
    DRAINS,
    IN_FLIGHT,
    LAG,
    SENT,
    SESSIONS,
    STUCK_SECONDS,
    Board,
    Other,
)
from homing.placement.choice import Place, Standing, choose
from homing.placement.permits import Permits
from homing.placement.queue import Queue, Start
from homing.rundir import PERMITS_NAME, RunDirectory
from homing.types import WorkerId

logger = logging.getLogger(__name__)

_NANO: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """How new sessions are placed and limited.

    Attributes:
        place: Where a declared start runs.
        max_sessions: How many live sessions the whole server may have; None: no limit.
        max_sessions_per_worker: How many each worker may have; None: no limit.
        queue_seconds: How long a start over a limit waits; 0: it is refused at once.
        workers: How many workers the server has, if that is known.
    """

    place: Place = "accepting"
    max_sessions: int | None = None
    max_sessions_per_worker: int | None = None
    queue_seconds: float = 0.0
    workers: int | None = None

    @property
    def needed(self) -> bool:
        """Whether there is anything to do beyond each worker's own limit."""
        return self.place != "accepting" or self.max_sessions is not None or self.queue_seconds > 0


class OnItsWay:
    """A start that was sent to another worker: counted there until that worker has taken it, or it goes elsewhere."""

    __slots__ = ("_board", "_slot")

    def __init__(self, board: Board, slot: int) -> None:
        self._board: Board | None = board
        self._slot = slot
        board.send(slot)

    def close(self) -> None:
        """Safe to call twice."""
        board, self._board = self._board, None
        if board is not None:
            board.sent(self._slot)


class Placement:
    """Places new sessions for one worker, and keeps it within the server's limit. `close` is safe to call twice.

    Args:
        app: Tells this worker's app from others in the run directory.

    Raises:
        RunDirectoryError: the board or the permits cannot be used.
    """

    def __init__(
        self,
        options: PlacementOptions,
        run_directory: RunDirectory,
        worker_id: WorkerId,
        app: str,
        *,
        chance: random.Random | None = None,
    ) -> None:
        self.options = options
        self.placed: Counter[str] = Counter()
        self._chance = chance or random.Random()  # noqa: S311 - which worker is no secret
        self._live = 0
        with contextlib.ExitStack() as opening:
            self.board = Board(run_directory, worker_id, app)
            opening.callback(self.board.close)
            self.permits: Permits | None = None
            if options.max_sessions is not None:
                # Each worker begins where its share does.
                share = options.max_sessions // max(options.workers or 1, self.board.slot + 1)
                path = f"{run_directory.path}/{PERMITS_NAME}{app.replace(' ', '-')}"
                self.permits = Permits(path, options.max_sessions, begin=self.board.slot * share)
                opening.callback(self.permits.close)
            self._stack = opening.pop_all()
        self.queue = Queue(self.board, options.queue_seconds, self._has_room)

    @classmethod
    def open(cls, options: PlacementOptions, run_directory: RunDirectory, worker_id: WorkerId, app: str) -> Self | None:
        """As made; None where nothing is limited and there is no board: starts then run where they arrive.

        Raises:
            RunDirectoryError: a limit could not be kept.
        """
        try:
            return cls(options, run_directory, worker_id, app)
        except RunDirectoryError as error:
            if options.max_sessions is not None or options.queue_seconds:
                raise
            logger.warning("new sessions stay where they arrive: %s", error)
            return None

    def __repr__(self) -> str:
        return f"<Placement {self.options.place}: {self._live} sessions here, {self.board!r}>"

    # --- what this worker says ---

    def count(self, live: int, in_flight: int) -> None:
        """So many live sessions are here, starts under way among them; called whenever that changes. Does not raise."""
        self._live = live
        self.board[SESSIONS] = live
        self.board[IN_FLIGHT] = in_flight
        if self.permits is not None:
            self.permits.keep(live)
            self._settle()

    def drain(self) -> None:
        """From now on no start is placed here, and one that arrives here goes elsewhere if it can."""
        self.board[DRAINS] = 1

    def stop(self) -> None:
        """This worker is about to exit: as `drain`, and none waits here any longer."""
        self.drain()
        self.queue.close()

    async def beat_forever(self, count: Callable[[], None]) -> None:
        """Show that the event loop runs, until cancelled.

        Args:
            count: Calls `count`: what changed without its being told is seen now.
        """
        loop = asyncio.get_running_loop()
        lag = 0.0
        while True:
            due = loop.time() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            # One late turn does not make a slow loop, and one in time no quick one.
            lag = (lag + max(0.0, loop.time() - due)) / 2
            self.board.beat(lag)
            self.board.refresh()
            count()
            self._settle()

    def _settle(self) -> None:
        """Sessions that did not come by a declared start count too, as far as there are permits."""
        permits = self.permits
        with contextlib.suppress(DirectoryError):  # the kernel has no more locks: at the next time perhaps
            while permits is not None and len(permits) < self._live and permits.take():
                pass

    # --- where a start runs ---

    def choose(self) -> Other | None:
        """The worker that a start which arrived here is to run at; None: this one."""
        others = list(self.board.others())
        here, *theirs = self._standings(others)
        slot = choose(self.options.place, here, theirs, self._chance)
        return None if slot is None else next(each for each in others if each.slot == slot)

    def _standings(self, others: list[Other]) -> Iterator[Standing]:
        """This worker, then the others in their order."""
        senders = [each for each in others if each[SENT]]
        yield self._here(senders)
        for each in others:
            yield self._standing(each, senders)

    def _here(self, senders: list[Other]) -> Standing:
        board = self.board
        sessions = self._live + sum(each.sent_to(board.slot) for each in senders)
        return Standing(
            board.slot,
            sessions,
            board[IN_FLIGHT],
            board[LAG] / _NANO,
            takes=not board[DRAINS] and self._below_limit(sessions),
        )

    def _standing(self, other: Other, senders: list[Other]) -> Standing:
        on_their_way = self.board.sent_to(other.slot) + sum(each.sent_to(other.slot) for each in senders)
        sessions = other[SESSIONS] + on_their_way
        silent = other.silent_seconds()
        return Standing(
            other.slot,
            sessions,
            other[IN_FLIGHT],
            max(other[LAG] / _NANO, silent),
            takes=not other[DRAINS] and silent <= STUCK_SECONDS and self._below_limit(sessions),
        )

    def _below_limit(self, sessions: int) -> bool:
        limit = self.options.max_sessions_per_worker
        return limit is None or sessions < limit

    def on_its_way(self, target: Other) -> OnItsWay:
        """A start is about to be sent there; the caller closes what this returns."""
        return OnItsWay(self.board, target.slot)

    def refused_by(self, target: Other) -> None:
        """The worker did not listen: if it is dead, nothing is placed there again."""
        self.board.is_dead(target)

    # --- whether it may run ---

    def new_start(self) -> Start:
        """A declared start of a client's own has arrived here."""
        return Start(self.queue)

    def take(self) -> bool:
        """Take what one more session needs; False if the server has as many as it may. `count` follows in the same block."""
        return self.permits is None or self.permits.take()

    def has_permit(self) -> bool:
        """Whether `take` would succeed at this moment."""
        return self.permits is None or self.permits.any_free()

    def _has_room(self) -> bool:
        return self.has_permit() and any(each.takes for each in self._standings(list(self.board.others())))

    def close(self) -> None:
        self._stack.close()
