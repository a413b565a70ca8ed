"""Where a backend's operations run.

- `LoopRunner`, for async backends: on the event loop, through a gate as wide as there are cores. Many pages at work at
  once make each of them slow, and then their own time limits fire; so they wait for their turn first, in order, and the
  wait is not charged to the operation.
- `ThreadRunner`, for sync backends: on one thread of the session's own, which such drivers are bound to.

Not here: what an operation does, and what becomes of a session whose operation is out of time (`manager.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from homing.web.base import Ran
from homing.web.errors import CapacityError, OperationTimeoutError
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

_STOP_SECONDS: Final = 0.2
"""How long an operation that was told to stop, or interrupted, is waited for before the next one is refused."""


TURN_SECONDS: Final = 2.0
"""A hundred times what an operation takes."""


class OperationGate:
    """Lets so many operations of one worker run at once; the others wait in the order they came.

    An operation that takes long has its turn for so long and goes on without it: it waits for a page, or hangs in one,
    and those that could run would wait with it.

    Args:
        width: How many.
        wait_seconds: How long one waits at most.
        turn_seconds: How long a turn is.
    """

    def __init__(self, width: int, wait_seconds: float, turn_seconds: float = TURN_SECONDS) -> None:
        self.width: Final = width
        self.inside = 0
        self.waiting = 0
        self._wait_seconds = wait_seconds
        self._turn_seconds = turn_seconds
        self._places = asyncio.Semaphore(width)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One turn.

        Raises:
            CapacityError: it did not come in time.
        """
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._places.acquire()
        except TimeoutError as error:
            raise CapacityError("the server is busy: no core was free in time; send the call again") from error
        finally:
            self.waiting -= 1
        self.inside += 1
        is_over = False

        def end_turn() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.inside -= 1
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._turn_seconds, end_turn)
        try:
            yield
        finally:
            timer.cancel()
            end_turn()

    def __repr__(self) -> str:
        return f"<OperationGate: {self.inside} of {self.width} inside, {self.waiting} waiting>"


class LoopRunner:
    """Runs an async backend's operations on the loop. Owns the operations that did not stop when they were told to."""

    def __init__(self, gate: OperationGate) -> None:
        self._gate = gate
        self._tasks = Tasks()
        self._closed = False

    async def run(self, operation: Callable[..., Any], *arguments: object, timeout_seconds: float) -> Ran:
        """See `Runner.run`.

        Raises:
            CapacityError: its turn did not come in time, or an earlier operation still runs; nothing ran.
            OperationTimeoutError: it did not end in time, and has been told to stop.
        """
        if self._closed:
            raise RuntimeError("the runner is closed")
        loop = asyncio.get_running_loop()
        asked = loop.time()
        async with self._gate.turn():
            # One operation at a time is the backend's right; one that was told to stop may need a moment.
            if not await self._tasks.wait(_STOP_SECONDS):
                raise CapacityError("an earlier operation of the session has not stopped yet")
            began = loop.time()
            try:
                value = await self._tasks.bounded(operation(*arguments), timeout_seconds, "operation")
            except TimeoutError as error:
                if self._tasks:
                    raise OperationTimeoutError(
                        f"the operation did not end within {timeout_seconds:g} s; the session ends"
                    ) from error
                raise  # the operation's own
            ended = loop.time()
        return Ran(value, began - asked, ended - began)

    async def aclose(self) -> None:
        """See `Runner.aclose`."""
        self._closed = True
        if self._tasks:
            raise RuntimeError("an operation has not stopped yet")

    def __repr__(self) -> str:
        return f"<LoopRunner: {len(self._tasks)} running>"


@dataclass(slots=True, eq=False)
class _Call:
    operation: Callable[..., Any]
    arguments: tuple[object, ...]
    loop: asyncio.AbstractEventLoop
    began: asyncio.Future[float]
    ended: asyncio.Future[Any]
    # Begun by the thread or given up by its waiter, never both.
    claim: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)


class ThreadRunner:
    """Runs a sync backend's operations on one thread, made at the first of them. Owns the thread.

    An operation that is out of time keeps the thread: nothing else runs on it until the operation has ended, which the
    browser's `interrupt` brings about. `aclose` ends the thread once nothing runs on it.

    Args:
        name: The thread's, for those who look at it.
        wait_seconds: How long an operation waits for the thread.
        finalizer: Called on the thread before it ends.
    """

    def __init__(self, name: str, wait_seconds: float, finalizer: Callable[[], None] | None = None) -> None:
        self._name = name
        self._wait_seconds = wait_seconds
        self._finalizer = finalizer
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._gone: asyncio.Future[None] | None = None

    async def run(self, operation: Callable[..., Any], *arguments: object, timeout_seconds: float) -> Ran:
        """See `Runner.run`.

        Raises:
            CapacityError: the thread is taken by another operation, or did not come free in time; nothing ran.
            OperationTimeoutError: it did not end in time, and goes on.
            RuntimeError: the runner is closed.
        """
        if self._closed:
            raise RuntimeError("the runner is closed")
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._idle.wait()
        except TimeoutError as error:
            raise CapacityError("an earlier operation of the session has not ended yet") from error
        loop = asyncio.get_running_loop()
        self._start()
        call = _Call(operation, arguments, loop, loop.create_future(), loop.create_future())
        asked = loop.time()
        self._waiting += 1
        self._idle.clear()
        call.ended.add_done_callback(self._has_ended)
        self._calls.put(call)
        try:
            await asyncio.wait((call.began,), timeout=self._wait_seconds)
        except asyncio.CancelledError:
            call.claim.cancel()
            raise
        if not call.began.done() and call.claim.cancel():
            raise CapacityError("the session's thread did not come free in time")
        began = await call.began  # already set, or on its way from the thread
        await asyncio.wait((call.ended,), timeout=timeout_seconds)
        if not call.ended.done():
            raise OperationTimeoutError(f"the operation did not end within {timeout_seconds:g} s; the session ends")
        return Ran(call.ended.result(), began - asked, loop.time() - began)

    async def aclose(self) -> None:
        """See `Runner.aclose`. Waits for the thread, which ends as soon as nothing runs on it."""
        self._closed = True
        if self._thread is None:
            return
        if self._waiting:
            raise RuntimeError("an operation still runs on the session's thread")
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            self._calls.put(None)
        await asyncio.wait((self._gone,))
        self._thread.join()  # it has said that it ends, so this takes no time
        self._thread = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ThreadRunner {self._name}: {state}, {self._waiting} running>"

    def _has_ended(self, ended: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        self._idle.set()
        if not ended.cancelled():
            ended.exception()  # read, if nobody waits for it any more

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a page that never answers must not keep the process from ending.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            _play(call)
        if self._finalizer is not None:
            try:
                self._finalizer()
            except Exception:
                logger.exception("the finalizer of %s failed", self._name)
        gone = self._gone
        assert gone is not None
        _tell(gone.get_loop(), gone, None)


def _play(call: _Call) -> None:
    """On the thread. An operation that nobody waits for any more, since it never began, is not begun."""
    if not call.claim.set_running_or_notify_cancel():
        _tell(call.loop, call.ended, None)
        return
    _tell(call.loop, call.began, call.loop.time())
    try:
        value = call.operation(*call.arguments)
    except BaseException as error:  # the thread lives on: SystemExit in an operation is that operation's failure
        # No future takes a StopIteration.
        fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
        failure = error if fit else RuntimeError(f"the operation raised {error!r}")
        _tell(call.loop, call.ended, failure)
    else:
        _tell(call.loop, call.ended, value)


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: object) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits
        logger.debug("an operation ended after its event loop")
