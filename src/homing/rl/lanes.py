"""Threads that environments run on, so that a step never holds up the event loop.

The invariant: whatever is done to one environment is done on one thread, in the order in which it was asked for. Many an
environment can live on the thread that made it only, and none can take two steps at once.

Not the standard library's executor: its futures and their hand-over to the event loop cost more than most steps do.

Not here: what is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar, TypeVarTuple

_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")

CLOSE_SECONDS: Final = 5.0
"""How long a closed lane's last work may take: an environment that hangs must not keep the process."""


class Lane:
    """One thread. `holds` counts the environments on it."""

    def __init__(self, name: str) -> None:
        self.holds = 0
        self._asked: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Any, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[*_Ts], _R], *args: *_Ts) -> _R:
        """Call a function on this thread, after what was asked for before. Cancelled, it is called all the same."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_R] = loop.create_future()
        self._asked.put((loop, future, function, args))
        return await future

    def close(self) -> None:
        """Wait for the thread to finish what it was asked for, but not for ever. Safe to call twice."""
        self._asked.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            loop, future, function, args = asked
            settle: Callable[[asyncio.Future[Any], Any], None] = _set_result
            try:
                result = function(*args)
            except BaseException as error:
                settle, result = _set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, future, result)
            del asked, future, function, args, result  # not until the next one comes


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class Lanes:
    """A fixed number of threads. Owns them."""

    def __init__(self, number: int) -> None:
        self._lanes = [Lane(f"homing environments {place}") for place in range(number)]

    def __repr__(self) -> str:
        return f"<Lanes: {[lane.holds for lane in self._lanes]}>"

    def take(self) -> Lane:
        """The lane with the fewest environments, for one more; give it back with `give_back`."""
        lane = min(self._lanes, key=_held)
        lane.holds += 1
        return lane

    def give_back(self, lane: Lane) -> None:
        lane.holds -= 1

    async def aclose(self) -> None:
        """Wait for all of them. Safe to call twice."""
        await asyncio.gather(*(asyncio.to_thread(lane.close) for lane in self._lanes))


def _held(lane: Lane) -> int:
    return lane.holds
