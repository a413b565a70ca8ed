"""What a worker and its supervisor say to each other, over one pair of connected sockets that they share and nothing else.

The supervisor sends `Ping`, `Lend`, `TakeBack` and `Drain`; the worker sends `Loaded`, `Ready`, `Pong`, `NotLent`, `Leaving`, `Drained`
and `Failed`. The end of one side is the other's death.

Not here: what either does about it (`worker.py`, `process.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from homing.errors import ConfigurationError, HomingError, StartupError
from homing.runtime.config import RoutedBy

logger = logging.getLogger(__name__)

# --- from the worker ---


@dataclass(frozen=True, slots=True)
class Loaded:
    """The app was loaded and can be routed; its start-up follows."""

    routing: RoutedBy


@dataclass(frozen=True, slots=True)
class Ready:
    """The app has started and the worker accepts requests."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The worker is alive enough to answer. `late`: its event loop has not turned since the ping before."""

    late: bool = False


@dataclass(frozen=True, slots=True)
class NotLent:
    """The worker does not accept from a socket that it was lent, for want of a descriptor: it may be lent it again later."""

    number: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """The worker accepts no more connections, and exits once what it serves has ended."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The worker has drained and exits now; so many sessions were still open, and end with it."""

    sessions: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot serve. `usage` tells a mistake on the command line from an app or address that failed."""

    line: str
    usage: bool


FromWorker = Loaded | Ready | Pong | NotLent | Leaving | Drained | Failed


def failure(error: HomingError) -> Failed:
    """What a worker says about an error it stops for."""
    return Failed(str(error), usage=isinstance(error, ConfigurationError))


def raise_failure(failed: Failed) -> None:
    """The same error again, in the supervisor.

    Raises:
        ConfigurationError, StartupError: as it was raised in the worker.
    """
    raise ConfigurationError(failed.line) if failed.usage else StartupError(failed.line)


# --- from the supervisor ---


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer."""


@dataclass(frozen=True, slots=True)
class Lend:
    """Accept from this listening socket too. Its descriptor follows (`send_descriptor`)."""

    number: int


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Accept no more from a socket that was lent."""

    number: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Begin no more sessions, go on with those that are here until they end, at most so long, and exit."""

    seconds: float


_CARRIER: Final = b"\0"


def carrier_of(link: Connection) -> socket.socket:
    """The same connection as a socket, for descriptors. Made early and kept: later there may be no descriptor for it."""
    return socket.socket(fileno=os.dup(link.fileno()))


def send_descriptor(carrier: socket.socket, descriptor: int) -> None:
    """Send a descriptor after a message. OSError: the worker is gone."""
    socket.send_fds(carrier, [_CARRIER], [descriptor])


def _receive_descriptor(carrier: socket.socket) -> int | None:
    """The descriptor that follows a message; None if there was none to be had for it."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, descriptors, _, _ = socket.recv_fds(carrier, len(_CARRIER), 1, flags)
    if not data:
        raise EOFError
    return descriptors[0] if descriptors else None


class SupervisorLink:
    """The worker's end. Owns the connection for the life of the process.

    `on_lend`, `on_take_back` and `on_drain` are called in the event loop, once `turn_in` has said which.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._carrier = carrier_of(connection)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = False
        self._late = False
        self._not_lent: set[int] = set()
        self.on_lend: Callable[[int, socket.socket], None] | None = None
        self.on_take_back: Callable[[int], None] | None = None
        self.on_drain: Callable[[float], None] | None = None

    def send(self, message: FromWorker) -> None:
        """Tell the supervisor; it may be gone, which `answer_until_closed` notices."""
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                logger.debug("the supervisor is gone", exc_info=True)

    def not_lent(self, number: int, why: str) -> None:
        """Say that nothing is accepted from a socket that was lent. The log hears of it once for all tries."""
        if number not in self._not_lent:
            self._not_lent.add(number)
            logger.warning("cannot accept connections that wait for another worker: %s", why)
        self.send(NotLent(number))

    def turn_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on a ping asks too whether this event loop turns."""
        self._loop = loop

    def answer_until_closed(self) -> None:
        """Answer and do what is asked until the supervisor's end is closed, which only its death does."""
        while True:
            try:
                self._take(self._connection.recv())
            except (EOFError, OSError):
                return

    def _take(self, message: object) -> None:
        match message:
            case Ping():
                self._late = self._asked
                self.send(Pong(self._late))
                if not self._asked:
                    self._asked = True  # before the loop may answer
                    if not self._call(self._turned):
                        self._asked = False
            case Lend(number):
                descriptor = _receive_descriptor(self._carrier)
                if descriptor is None:
                    self.not_lent(number, "no descriptor is left for them")
                    return
                self._not_lent.discard(number)
                lent = socket.socket(fileno=descriptor)
                if self.on_lend is None or not self._call(self.on_lend, number, lent):
                    lent.close()
            case TakeBack(number):
                self._not_lent.discard(number)
                if self.on_take_back is not None:
                    self._call(self.on_take_back, number)
            case Drain(seconds):
                if self.on_drain is not None:
                    self._call(self.on_drain, seconds)

    def _turned(self) -> None:
        self._asked = False
        if self._late:
            self._late = False
            self.send(Pong())

    def _call(self, what: Callable[..., object], *arguments: object) -> bool:
        """Call it in the event loop; False if there is none (yet, or any more)."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # closed
            return False
        return True
