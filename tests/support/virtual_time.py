"""An event loop whose time is virtual: it stands still while anything can run, and jumps to the next timer when not.

So a wait of an hour takes no time, and a hang is an error: nothing to run and no timer is a deadlock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_SECONDS = 5.0
"""How long (in real time) a thread may take to wake a loop that has nothing else to do."""


class _Jumping(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            ready = super().select(THREAD_SECONDS if self.loop.awaits_threads else 0.01)
            if not ready:
                raise RuntimeError("deadlock: nothing can run, and no timer is set")
            return ready
        ready = super().select(0)
        if not ready and timeout > 0:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Attributes:
    now: Its time; also a `Clock`'s (`monotonic`).
    on_tick: Called after everything that was ready has run: what holds at every await is checked here.
    awaits_threads: A thread may wake it, so it waits for one in real time before it calls a deadlock.
    """

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.now = 1000.0
        self.on_tick: Callable[[], None] = lambda: None
        self.awaits_threads = False
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1_700_000_000.0

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self.on_tick()


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop)` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
