"""Threads that environments run on, so that a step never holds up the event loop.

The invariant: whatever is done to one environment is done on one thread, in the order in which it was asked for. Many an
environment can live on the thread that made it only, and none can take two steps at once.

Not here: what is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")


class Lane:
    """One thread. `holds` counts the environments on it."""

    def __init__(self, name: str) -> None:
        self.holds = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[[Unpack[_Ts]], _R], *args: *_Ts) -> _R:
        """Call a function on this thread, after what was asked for before. Cancelled, it is called all the same."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def close(self) -> None:
        """Wait for the thread to finish what it was asked for. Safe to call twice."""
        self._thread.shutdown(wait=True)


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
