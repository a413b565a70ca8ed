"""A worker process as its supervisor sees it: what it said, whether it answers, what it was lent, who has asked for it to leave,
and how to end it.

The invariant: nothing here waits for a worker but `kill`, which nothing survives. A worker that does not read is sent little:
one ping, and no other message while that is unanswered.

Not here: what the worker does (`worker.py`), and when it is started and stopped (`supervisor.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe, connection, resource_tracker
from typing import Final

from uvicorn._subprocess import get_subprocess

from homing.clock import Clock
from homing.runtime.config import RunConfig
from homing.runtime.control import Asker, Progress
from homing.runtime.heartbeat import Heartbeat
from homing.runtime.link import (
    Drain,
    Drained,
    Failed,
    Leaving,
    Lend,
    Loaded,
    NotLent,
    Ping,
    Pong,
    Ready,
    TakeBack,
    carrier_of,
    send_descriptor,
)
from homing.runtime.listeners import Listener
from homing.runtime.worker import WorkerMain

PING_SECONDS: Final = 0.5

LATE_SECONDS: Final = 1.0
"""A worker that has not answered for so long leaves its queue to the others until it does."""

LEND_AGAIN_SECONDS: Final = 0.5
"""So long after a worker had no descriptor for a socket that it was lent, it is lent it again."""

STOP_AFTER_DRAIN_SECONDS: Final = 5.0
"""A worker whose time to drain has been over for so long is told to stop in a way that it cannot miss."""


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Inside, SIGINT waits, and so it does in a process that is started here until that says otherwise (`WorkerServer`).

    A terminal's Ctrl-C reaches the workers too, and would meet one in the middle of Python's own start, as a traceback.
    """
    # It lets the signal through again in whichever process starts it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """A worker process. Owns the process and this end of the link; `close` once it exited. Borrows its listener.

    Args:
        clock: Its deadlines are on this one.

    Raises:
        OSError: there is no process or no descriptor for it now. All that was opened for it is closed.

    Attributes:
        loaded, ready, failed: What it has said of its start.
        leaving: It accepts no more connections.
        left: How many sessions end with it, once it has drained.
        stopping: It was told to stop.
        asking: Who has asked for it to leave.
        replaced_by: The process ID of the worker that serves in its place, once it was told to leave for that one.
    """

    def __init__(self, config: RunConfig, listener: Listener, clock: Clock) -> None:
        self._link, theirs = Pipe()
        # The worker sees this process die only if nobody else holds the worker's end.
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self._link.close)
            self._carrier = undo.enter_context(carrier_of(self._link))
            self._process = get_subprocess(config, WorkerMain(config, theirs), [listener.socket])
            with _interrupts_wait():
                self._process.start()
            undo.pop_all()
        self._clock = clock
        self._heartbeat = Heartbeat(PING_SECONDS, clock=clock)
        self._late = False
        self._lent: set[int] = set()
        self._lend_again_at = 0.0
        self._stop_at: float | None = None
        self.listener = listener
        self.loaded: Loaded | None = None
        self.ready = False
        self.failed: Failed | None = None
        self.leaving = False
        self.left: int | None = None
        self.stopping = False
        self.asking: list[Asker] = []
        self.replaced_by: int | None = None

    def __repr__(self) -> str:
        states = {"stopping": self.stopping, "draining": self.draining, "leaving": self.leaving, "ready": self.ready}
        state = next((name for name, is_so in states.items() if is_so), "starting")
        return f"<Worker {self.pid}: {state}>"

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.exitcode

    @property
    def draining(self) -> bool:
        """It was told to drain, and has not exited."""
        return self._stop_at is not None

    @property
    def wait_handles(self) -> list[connection.Connection | int]:
        """What becomes readable when the worker says something or exits."""
        return [self._process.sentinel] if self._link.closed else [self._link, self._process.sentinel]

    @property
    def accepts(self) -> bool:
        """Whether connections that come to its listener are accepted soon."""
        may = self.ready and not (self.leaving or self.stopping) and self.exit_code is None
        return may and not (self._late or self._heartbeat.missed(LATE_SECONDS))

    def listen(self) -> None:
        """Take in what the worker said since last time. Does not wait."""
        with contextlib.suppress(EOFError, OSError):
            while not self._link.closed and self._link.poll(0):
                message = self._link.recv()
                self._heartbeat.heard()
                match message:
                    case Loaded():
                        self.loaded = message
                    case Ready():
                        self.ready = True
                        self.listener.opened = True
                    case Pong(late):
                        self._late = late
                    case NotLent(number):
                        self._lent.discard(number)
                        self._lend_again_at = self._clock.monotonic() + LEND_AGAIN_SECONDS
                    case Leaving():
                        self.leaving = True
                    case Drained(sessions):
                        self.left = sessions
                    case Failed():
                        self.failed = message
            return
        self._link.close()
        self._carrier.close()

    def is_hung(self, timeout_seconds: float) -> bool:
        """Whether a ping has gone unanswered for so long; pings if that is due. Does not wait."""
        if self._heartbeat.due():
            self._send(Ping())
            self._heartbeat.sent()
        return self._heartbeat.missed(timeout_seconds)

    def lend(self, wanted: Mapping[int, Listener]) -> None:
        """See that it accepts from these listeners beside its own, and from no others."""
        if not self.ready or self.leaving or self.stopping or self._heartbeat.waiting:
            return  # its answer brings the supervisor here again
        for number in self._lent - wanted.keys():
            self._send(TakeBack(number))
        self._lent &= wanted.keys()
        if self._clock.monotonic() < self._lend_again_at:
            return
        for number in wanted.keys() - self._lent:
            self._send(Lend(number))
            with contextlib.suppress(OSError):
                send_descriptor(self._carrier, wanted[number].socket.fileno())
        self._lent = set(wanted)

    def drain(self, seconds: float) -> None:
        """Ask it to begin no more sessions, and to exit once those that it has have ended, or after so long."""
        self._stop_at = self._clock.monotonic() + seconds + STOP_AFTER_DRAIN_SECONDS
        self._send(Drain(seconds))

    @property
    def told_to_leave(self) -> bool:
        """It was told to drain, or to stop."""
        return self.draining or self.stopping

    @property
    def overdue(self) -> bool:
        """It has drained for longer than it was to, and was not told to stop."""
        return self._stop_at is not None and not self.stopping and self._clock.monotonic() > self._stop_at

    def tell(self, progress: Progress) -> None:
        """Say to all who have asked for it to leave how far it is."""
        for asker in self.asking:
            asker.tell(progress)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.exit_code is None:
                os.kill(self.pid, number)

    def stop(self) -> None:
        """Ask it to finish what it serves and exit."""
        self.stopping = True
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Release what is left of an exited worker. Safe to call twice."""
        self._link.close()
        self._carrier.close()
        with contextlib.suppress(ValueError):
            self._process.join()
            self._process.close()

    def _send(self, message: Ping | Lend | TakeBack | Drain) -> None:
        with contextlib.suppress(OSError):
            self._link.send(message)
