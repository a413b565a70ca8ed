"""Threads that environments run on, so that a step never holds up the event loop.

The invariant: whatever is done to one environment is done on one thread, in the order in which it was asked for. Many an
environment can live on the thread that made it only, and none can take two steps at once.

A thread cannot be stopped from outside. One whose work never ends is given up: nobody waits for it any more, nothing else is
asked of it, and another takes its place.

Not the standard library's executor: its futures and their hand-over to the event loop cost more than most steps do.

Not here: what is done, and what becomes of the environments of a thread that was given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar, TypeVarTuple

from homing.rl.errors import EnvironmentHungError

_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")

CLOSE_SECONDS: Final = 5.0
"""How long a closed lane's last work may take: an environment that hangs must not keep the process."""

_LOOKS: Final = 4
"""How often a lane is looked at before its work has taken too long. Looks, and no clock: a process that was stopped for a
while, or had no core, has not looked, and its environments have not had that time either."""
_MAX_LOOK_SECONDS: Final = 5.0


class Lane:
    """One thread.

    Attributes:
        holds: How many environments are on it.
        acts: Counts what is done. Work of several parts counts each, by `next_act`, so that it is not taken for one that hangs.
        given_up: Its thread does not come back: its environments are out of reach.
    """

    def __init__(self, name: str) -> None:
        self.holds = 0
        self.acts = 0
        self.given_up = False
        self._asked: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Any, Any] | None] = SimpleQueue()
        self._doing: asyncio.Future[Any] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._doing is not None

    async def run(self, function: Callable[[*_Ts], _R], *args: *_Ts) -> _R:
        """Call a function on this thread, after what was asked for before. Cancelled, it is called all the same.

        Raises:
            EnvironmentHungError: the thread was given up.
            Exception: what the function raised.
        """
        if self.given_up:
            raise EnvironmentHungError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_R] = loop.create_future()
        self._asked.put((loop, future, function, args))
        return await future

    def next_act(self) -> None:
        """On this thread: what is done now is another part of the work."""
        self.acts += 1

    def give_up(self) -> str:
        """Leave the thread to itself, and fail all that waits for it. Returns where its work is, as a traceback's text.

        On the event loop. If the work ends after all, nobody hears of it, and the thread ends too.
        """
        self.given_up = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "" if frame is None else "".join(traceback.format_stack(frame))
        if self._doing is not None:
            _set_exception(self._doing, EnvironmentHungError())
        with contextlib.suppress(Empty):
            while (asked := self._asked.get_nowait()) is not None:
                _set_exception(asked[1], EnvironmentHungError())
        self._asked.put(None)
        return where

    def close(self) -> None:
        """Wait for the thread to finish what it was asked for, but not for ever. Safe to call twice."""
        if not self.given_up:
            self._asked.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            loop, future, function, args = asked
            settle: Callable[[asyncio.Future[Any], Any], None] = _set_result
            self.acts += 1
            self._doing = future
            try:
                result = function(*args)
            except BaseException as error:
                settle, result = _set_exception, error
            self._doing = None
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, future, result)
            del asked, future, function, args, result  # not until the next one comes
            if self.given_up:
                return


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class Lanes:
    """A fixed number of threads. Owns them.

    Attributes:
        act_seconds: How long one act may take before its thread is given up, by `watch`; may be changed at any time.
        given_up: How many threads were.
    """

    def __init__(self, number: int, act_seconds: float) -> None:
        self.act_seconds = act_seconds
        self.given_up = 0
        self._lanes = [_lane(place) for place in range(number)]

    def __repr__(self) -> str:
        return f"<Lanes: {[lane.holds for lane in self._lanes]}, {self.given_up} given up>"

    def take(self) -> Lane:
        """The lane with the fewest environments, for one more; give it back with `give_back`."""
        lane = min(self._lanes, key=_held)
        lane.holds += 1
        return lane

    def give_back(self, lane: Lane) -> None:
        lane.holds -= 1

    async def watch(self, hung: Callable[[Lane, str], None]) -> None:
        """Look after them until this is cancelled: one whose work does not end is replaced, and given up.

        Args:
            hung: Told of it, and where its work is, in the same step: nothing can be asked of it in between.
        """
        seen: dict[Lane, tuple[int, int]] = {}
        while True:
            interval = min(self.act_seconds / _LOOKS, _MAX_LOOK_SECONDS)
            await asyncio.sleep(interval)
            for place, lane in enumerate(self._lanes):
                acts, looks = seen.pop(lane, (lane.acts, 0))
                if not lane.busy or acts != lane.acts:
                    continue
                # Seen first at some moment of an interval, so a whole one less has passed.
                if looks * interval < self.act_seconds:
                    seen[lane] = (acts, looks + 1)
                    continue
                self._lanes[place] = _lane(place)
                self.given_up += 1
                hung(lane, lane.give_up())

    async def aclose(self) -> None:
        """Wait for all of them. Safe to call twice."""
        await asyncio.gather(*(asyncio.to_thread(lane.close) for lane in self._lanes))


def _lane(place: int) -> Lane:
    return Lane(f"homing environments {place}")


def _held(lane: Lane) -> int:
    return lane.holds
