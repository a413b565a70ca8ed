"""Which episodes of a server may run now, over all of its workers.

Slots are files in a directory that the workers share, each locked by whoever runs an episode in it: the kernel releases
the slot of a worker that dies. Waiters have a ticket each, a file whose name says when they came and which worker they
are at. The invariants: at most `slots` episodes run in the whole server, whatever is killed; of the waiters that live,
the one that came first is next, and nobody passes it; at most `max_waiting` wait, each for at most its timeout.

A released slot is told to the first waiter by a datagram to its worker, so that nobody polls; a waiter looks by itself
too, every second, since the kernel tells nobody when it releases a dead worker's slot.

Not here: what an episode does (`episode.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Self

from homing.errors import ConfigurationError
from homing.rundir import close_after_fork

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often a waiter looks by itself."""

_TICKET: Final = re.compile(r"([0-9]{20})-([0-9]{8})\.([0-9a-f]{16})")
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class NotAdmittedError(Exception):
    """The episode did not start: the queue was full, or its turn did not come in time.

    Attributes:
        kind: `queue_full` or `queue_timeout`.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Admission:
    """One worker's part in its server's admission. An async context manager.

    Args:
        directory: Shared by the workers of the server; made if it is missing. Beside other files, in which it has no part.
        slots: How many episodes may run at once, in all workers together.
        max_waiting: How many may wait, in all workers together.
    """

    def __init__(self, directory: str, *, slots: int, max_waiting: int) -> None:
        if slots < 1 or max_waiting < 0:
            raise ConfigurationError("a server needs at least one slot for episodes, and a queue of 0 or more")
        self._directory = directory
        self._slots = slots
        self._max_waiting = max_waiting
        self._worker = secrets.token_hex(8)
        self._count = 0
        self._held: dict[int, contextlib.ExitStack] = {}  # slot → what closes its descriptor, and so unlocks it
        self._waiting: dict[str, asyncio.Event] = {}  # ticket → set when it may be its turn
        self._socket: socket.socket | None = None
        self._at_fork = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"<Admission {self._worker}: {len(self._held)} running, {len(self._waiting)} waiting>"

    @property
    def running(self) -> int:
        """Episodes running at this worker."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Episodes waiting at this worker."""
        return len(self._waiting)

    async def __aenter__(self) -> Self:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        wake = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            wake.bind(self._wake_path(self._worker))
        except BaseException:
            wake.close()
            raise
        self._socket = wake
        self._at_fork.callback(close_after_fork(wake))
        asyncio.get_running_loop().add_reader(wake.fileno(), self._woken)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._socket is None:
            return
        wake, self._socket = self._socket, None
        asyncio.get_running_loop().remove_reader(wake.fileno())
        self._at_fork.close()
        wake.close()
        self._unlink(os.path.basename(self._wake_path(self._worker)))

    @asynccontextmanager
    async def admitted(self, timeout_seconds: float) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        Raises:
            NotAdmittedError: the queue is full, or the timeout passed.
        """
        slot = await self._take(timeout_seconds)
        try:
            yield
        finally:
            self._release(slot)

    # --- waiting ---

    async def _take(self, timeout_seconds: float) -> int:
        ticket = self._new_ticket()
        queue = self._queue()
        if not queue:
            slot = self._free_slot()
            if slot is not None:
                return slot
        if len(queue) >= self._max_waiting:
            queue = [each for each in queue if self._alive(each)]
            if len(queue) >= self._max_waiting:
                raise NotAdmittedError("queue_full", f"{self._slots} episodes run, and {len(queue)} wait already")
        turn = self._waiting[ticket] = asyncio.Event()
        try:
            os.close(os.open(self._path(ticket), _FLAGS, 0o600))
            async with asyncio.timeout(timeout_seconds):
                while True:
                    # Between the first look and the ticket, whoever released a slot saw nobody to tell.
                    slot = self._my_turn(ticket)
                    if slot is not None:
                        return slot
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await turn.wait()
                    turn.clear()
        except TimeoutError as error:
            raise NotAdmittedError("queue_timeout", f"no slot was free within {timeout_seconds:g} s") from error
        finally:
            del self._waiting[ticket]
            self._unlink(ticket)
            # It may have been told of a slot that it did not take, or have left others in the queue that can run too.
            self._tell_next()

    def _my_turn(self, ticket: str) -> int | None:
        for each in self._queue():
            if each == ticket:
                return self._free_slot()
            if self._alive(each):
                return None
            self._unlink(each)
        return self._free_slot()

    def _new_ticket(self) -> str:
        self._count += 1
        # CLOCK_MONOTONIC is the same for all processes of a machine.
        return f"{time.monotonic_ns():020d}-{self._count % 10**8:08d}.{self._worker}"

    def _queue(self) -> list[str]:
        """The tickets of all waiters, the first to come first. A few microseconds per waiter."""
        return sorted(name for name in os.listdir(self._directory) if _TICKET.fullmatch(name))

    def _alive(self, ticket: str) -> bool:
        """Whether the ticket's waiter is still there."""
        worker = ticket.rpartition(".")[2]
        return ticket in self._waiting if worker == self._worker else self._send(worker, b"")

    # --- slots ---

    def _free_slot(self) -> int | None:
        for slot in range(self._slots):
            if slot in self._held:
                continue
            fd = os.open(self._path(f"slot-{slot}"), _FLAGS, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            except BaseException:
                os.close(fd)
                raise
            closing = self._held[slot] = contextlib.ExitStack()
            closing.callback(os.close, fd)
            closing.callback(close_after_fork(fd))  # else a child that the app forks would keep the slot
            return slot
        return None

    def _release(self, slot: int) -> None:
        self._held.pop(slot).close()
        self._tell_next()

    def _tell_next(self) -> None:
        """Wake the first waiter that lives; the tickets of dead ones go."""
        try:
            queue = self._queue()
        except OSError as error:
            logger.warning("the waiting episodes are not told of a free slot: %s", error.strerror)
            return
        for ticket in queue:
            worker = ticket.rpartition(".")[2]
            if worker == self._worker:
                turn = self._waiting.get(ticket)
                if turn is not None:
                    turn.set()
                    return
            elif self._send(worker, ticket.encode()):
                return
            self._unlink(ticket)

    # --- telling other workers ---

    def _send(self, worker: str, message: bytes) -> bool:
        """False: that worker is dead."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(message, self._wake_path(worker))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                logger.warning("worker %s is not told of a free slot: %s", worker, error.strerror)
            # It lives, and looks by itself soon.
        return True

    def _woken(self) -> None:
        while self._socket is not None:
            try:
                ticket = self._socket.recv(256).decode("ascii", "replace")
            except BlockingIOError:
                return
            if ticket:
                turn = self._waiting.get(ticket)
                if turn is not None:
                    turn.set()
                else:
                    self._tell_next()  # it gave up meanwhile

    def _wake_path(self, worker: str) -> str:
        return self._path(f"{worker}.wake")

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))
