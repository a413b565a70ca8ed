"""One small piece of memory that a server's workers share: in its row each says what those who place a start have to know.

A row is written in place, number by number, as things change; a number is aligned and written at once, so a reader without a lock
sees the old one or the new one. Numbers of one row need not be of one moment: they are figures to choose by, and nothing that
is promised rests on them.

A row belongs to a worker from when it locks the row's byte until it is dead, and is then another's. Which worker, of which
app and of which boot, the row says; that a worker is dead, its life lock proves.

Not here: what is chosen (`choice.py`), and figures for people (`homing.watch`, whose rows outlive their workers).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import time
from collections.abc import Iterator
from typing import Final

from homing.errors import DirectoryError, RunDirectoryError
from homing.placement.locks import try_lock
from homing.rundir import BOARD_NAME, RunDirectory, allocate, boot_id, close_after_fork
from homing.types import WorkerId

SLOTS: Final = 256
"""Workers at once that get a row, those that are being replaced among them."""

# A row: numbers of 8 bytes, then one of 2 bytes for each slot: starts on their way to it that it has not taken yet.
_NUMBERS: Final = 16
_SENT_AT: Final = _NUMBERS * 8 // 2
ROW_BYTES: Final = _NUMBERS * 8 + SLOTS * 2
BOARD_BYTES: Final = ROW_BYTES * SLOTS + 8
_ROW_NUMBERS: Final = ROW_BYTES // 8
_ROW_SHORTS: Final = ROW_BYTES // 2
_CHANGED: Final = SLOTS * _ROW_NUMBERS
"""The number behind the rows: when a row was last begun or given back. Whoever reads another one than before looks who is there."""

# Which number of a row is what.
_ID_HIGH, _ID_LOW, _BOOT, _APP = 0, 1, 2, 3
BEAT: Final = 4
"""When the worker's event loop last ran its beat: nanoseconds of the monotonic clock, which all processes share."""
DRAINS: Final = 5
"""1: it takes no new sessions."""
SESSIONS: Final = 6
"""Live sessions, starts under way among them."""
IN_FLIGHT: Final = 7
"""Requests whose handler is running."""
LAG: Final = 8
"""By how many nanoseconds the event loop was late."""
TICKET: Final = 9
"""When the start came that waits here for the longest, as BEAT; 0: none waits."""
WAITING: Final = 10
"""How many starts wait here."""
SENT: Final = 11
"""Starts on their way from here to others, over all."""

_MOST_SENT: Final = 2**16 - 1

BEAT_SECONDS: Final = 0.25
LOOK_SECONDS: Final = 0.5
"""A row without a beat for so long: its worker's life is looked at."""
STUCK_SECONDS: Final = 2.0
"""A worker without a beat for so long is stopped or stuck: nothing is placed there, and nobody waits for it."""

_NANO: Final = 1_000_000_000


class Other:
    """Another worker's row, to read."""

    __slots__ = ("_at", "_numbers", "_shorts", "slot", "worker_id")

    def __init__(self, numbers: memoryview, shorts: memoryview, slot: int, worker_id: WorkerId) -> None:
        self._numbers = numbers
        self._shorts = shorts
        self._at = slot * _ROW_NUMBERS
        self.slot = slot
        self.worker_id = worker_id

    def __repr__(self) -> str:
        return f"<Other {self.slot}: worker {self.worker_id[:6]}>"

    def __getitem__(self, number: int) -> int:
        return int(self._numbers[self._at + number])

    def sent_to(self, slot: int) -> int:
        return int(self._shorts[self.slot * _ROW_SHORTS + _SENT_AT + slot])

    def silent_seconds(self) -> float:
        """For how long its event loop has not run its beat, beyond the time that it has for it."""
        return max(0.0, (time.monotonic_ns() - self[BEAT]) / _NANO - BEAT_SECONDS)


class Board:
    """This worker's row, to write, and the others' to read. `close` gives the row back, and is safe to call twice.

    Args:
        app: Tells this worker's app from others in the run directory: only its workers are read.

    Raises:
        RunDirectoryError: the board cannot be made (no room), or has no free row.
    """

    def __init__(self, run_directory: RunDirectory, worker_id: WorkerId, app: str) -> None:
        self.worker_id = worker_id
        self._run_directory = run_directory
        self._dead: set[WorkerId] = set()
        self._others: list[Other] = []
        self._seen = 0
        path = os.path.join(run_directory.path, BOARD_NAME)
        with contextlib.ExitStack() as opening:
            try:
                self._map = _mapped(path)
                opening.callback(self._map.close)
                self._fd = _opened(path)
                opening.callback(os.close, self._fd)
                self.slot = self._claim(path)
            except OSError as error:
                raise RunDirectoryError(f"{path} cannot be used: {error.strerror}") from error
            opening.pop_all()
        self._undo = close_after_fork(self._fd)
        self._numbers = memoryview(self._map).cast("Q")
        self._shorts = memoryview(self._map).cast("H")
        self._at = self.slot * _ROW_NUMBERS
        self._sent_at = self.slot * _ROW_SHORTS + _SENT_AT
        self._identity = (_number(boot_id()), _number(hashlib.sha256(app.encode()).hexdigest()))
        self._begin_row()
        self.refresh()

    def __repr__(self) -> str:
        return f"<Board: row {self.slot} of worker {self.worker_id[:6]}, {len(self._others)} others>"

    def _claim(self, path: str) -> int:
        for slot in range(SLOTS):
            if try_lock(self._fd, slot):
                return slot
        raise RunDirectoryError(f"{path} has rows for {SLOTS} workers, and all are taken")

    def _begin_row(self) -> None:
        start = self.slot * ROW_BYTES
        # Whoever had the row is dead. Who it is now, it says last.
        self._map[start : start + ROW_BYTES] = bytes(ROW_BYTES)
        self.beat(0.0)
        at = self._at
        self._numbers[at + _BOOT], self._numbers[at + _APP] = self._identity
        self._numbers[at + _ID_LOW] = int(self.worker_id[16:], 16)
        self._numbers[at + _ID_HIGH] = int(self.worker_id[:16], 16)
        self._numbers[_CHANGED] = time.monotonic_ns()

    # --- the worker's own row ---

    def __getitem__(self, number: int) -> int:
        return int(self._numbers[self._at + number])

    def __setitem__(self, number: int, value: int) -> None:
        if not self._map.closed:
            self._numbers[self._at + number] = value

    def beat(self, lag_seconds: float) -> None:
        """The event loop runs, and was late by so much."""
        self[LAG] = int(lag_seconds * _NANO)
        self[BEAT] = time.monotonic_ns()

    def send(self, slot: int) -> None:
        """One more start is on its way to the worker in that slot, until `sent`."""
        self._change_sent(slot, 1)

    def sent(self, slot: int) -> None:
        """That worker has taken it, or it does not go there after all."""
        self._change_sent(slot, -1)

    def _change_sent(self, slot: int, by: int) -> None:
        if self._map.closed:
            return
        count = self._shorts[self._sent_at + slot]
        # A figure to choose by: one that has no room for the truth is left as it is.
        self._shorts[self._sent_at + slot] = min(max(count + by, 0), _MOST_SENT)
        self[SENT] = max(self[SENT] + by, 0)

    def sent_to(self, slot: int) -> int:
        """Starts on their way from here to the worker in that slot."""
        return int(self._shorts[self._sent_at + slot])

    # --- the others' rows ---

    def refresh(self) -> None:
        """Look again which rows are those of living workers of this app. About 20 µs; with every beat and new worker."""
        numbers, found = self._numbers, []
        self._seen = numbers[_CHANGED]  # before the rows: one that begins meanwhile is seen at the next look
        for slot in range(SLOTS):
            at = slot * _ROW_NUMBERS
            if not numbers[at] or slot == self.slot or (numbers[at + _BOOT], numbers[at + _APP]) != self._identity:
                continue
            worker_id = WorkerId(f"{numbers[at + _ID_HIGH]:016x}{numbers[at + _ID_LOW]:016x}")
            found.append(Other(numbers, self._shorts, slot, worker_id))
        self._dead &= {each.worker_id for each in found}
        self._others = found

    def others(self) -> Iterator[Other]:
        """The rows of the living workers of this app, but for this one's; none of a worker that is known to be dead."""
        if not self._map.closed and self._numbers[_CHANGED] != self._seen:
            self.refresh()
        for each in self._others:
            if each.worker_id in self._dead:
                continue
            if each.silent_seconds() > LOOK_SECONDS and self.is_dead(each):
                continue
            yield each

    def is_dead(self, other: Other) -> bool:
        """Whether a worker is proved dead. It is then left out of `others` for good."""
        if other.worker_id in self._dead:
            return True
        try:
            dead = self._run_directory.is_dead(other.worker_id)
        except DirectoryError:
            return False  # which cannot be told at the moment
        if dead:
            self._dead.add(other.worker_id)
        return dead

    def close(self) -> None:
        if self._map.closed:
            return
        self[_ID_HIGH] = self[_ID_LOW] = 0
        self._numbers[_CHANGED] = time.monotonic_ns()
        self._others = []
        self._numbers.release()
        self._shorts.release()
        self._map.close()
        self._undo()
        os.close(self._fd)


def _mapped(path: str) -> mmap.mmap:
    # A descriptor of its own, which the map copies: a forked child keeps that copy, and must not keep the row's lock by it.
    fd = _opened(path)
    try:
        # Room for all of it now: to write to a page that a full file system has no room for would be SIGBUS.
        allocate(fd, BOARD_BYTES)
        return mmap.mmap(fd, BOARD_BYTES)
    finally:
        os.close(fd)


def _opened(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _number(text: str) -> int:
    return int(text[:15], 16)
