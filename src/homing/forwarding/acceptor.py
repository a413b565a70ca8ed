"""Taking the connections that other workers make to this one's private socket, also where descriptors are short.

Invariant: whoever connects is taken, waits in the backlog, or is told that this worker is busy. Nothing makes it take this worker for
dead, as a refusal would, and a worker that cannot accept does not fall silent.

Not here: what comes over a connection (`receiver.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from homing.forwarding.frames import BUSY, PREFIX_BYTES
from homing.tasks import ended

logger = logging.getLogger("homing.forwarding.receiver")

_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_DESCRIPTOR_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 5.0
_TAKEN_AT_ONCE: Final = 63
_SENDS_WITHIN_SECONDS: Final = 1.0
"""How long a worker that is turned away may take to send what it has connected for."""

_BUSY_FRAME: Final = BUSY.to_bytes(PREFIX_BYTES, "little")


@dataclass(slots=True)
class Counters:
    """What came through the private socket."""

    received: int = 0
    not_mine: int = 0
    asked: int = 0
    malformed: int = 0
    strangers: int = 0
    turned_away: int = 0


class Acceptor:
    """Accepts on a listening socket until it is closed, which closes the socket.

    Args:
        listener: Non-blocking.
        protocol: Makes what handles a connection.
        make_room: Called where descriptors are short: what is idle may be let go.
        counters: The receiver's.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        protocol: Callable[[], asyncio.Protocol],
        *,
        make_room: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._listener = listener
        self._loop = loop
        self._protocol = protocol
        self._make_room = make_room
        self._counters = counters
        self._spare = _spare_descriptor()
        self._accepting = loop.create_task(self._accept())

    def keep_spare(self) -> None:
        """Now and then: have the descriptor again that turning away takes, if there was none to be had."""
        if self._spare < 0:
            self._spare = _spare_descriptor()

    async def aclose(self) -> None:
        """Stop listening: whoever waits in the backlog is refused."""
        self._accepting.cancel()
        await ended([self._accepting])
        self._listener.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    async def _accept(self) -> None:
        without, pause_seconds = False, 0.0
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                # Giving up would make this worker silent while it counts as alive: whatever it is, the next try follows.
                if error.errno not in (*_NO_DESCRIPTOR, errno.ECONNABORTED):
                    pause_seconds = min(max(pause_seconds * 2, _NO_DESCRIPTOR_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                    logger.exception("cannot take connections from other workers; next try in %.2f s", pause_seconds)
                    await asyncio.sleep(pause_seconds)
                    continue
                # Whoever connects waits in the backlog meanwhile, or is told that it is full. Idle connections are of
                # less use than the one that waits; where there are none to let go, it is told.
                if without:
                    await self._turn_away()
                else:
                    logger.warning("cannot take a connection from another worker now: %s", error.strerror)
                    self._make_room()
                without = error.errno in _NO_DESCRIPTOR
                await asyncio.sleep(_NO_DESCRIPTOR_PAUSE_SECONDS)
                continue
            without, pause_seconds = False, 0.0
            await asyncio.gather(*(self._take(each) for each in (accepted, *self._others_who_wait())))

    def _others_who_wait(self) -> list[socket.socket]:
        """Who else waits in the backlog: each turn of a busy event loop may take long, and one is enough to take many."""
        others: list[socket.socket] = []
        # Whatever goes wrong, the next `sock_accept` says it again.
        with contextlib.suppress(OSError):
            while len(others) < _TAKEN_AT_ONCE:
                other, _ = self._listener.accept()
                other.setblocking(False)
                others.append(other)
        return others

    async def _take(self, accepted: socket.socket) -> None:
        if peer_uid(accepted) != os.geteuid():
            self._counters.strangers += 1
            logger.error("closed a connection to the private socket: it came from another user")
            accepted.close()
            return
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError as error:
            logger.warning("lost a connection from another worker as it was made: %s", error)
            accepted.close()

    async def _turn_away(self) -> None:
        """Tell all who wait in the backlog that this worker is busy, by the descriptor that is kept for this."""
        while self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            try:
                turned, _ = self._listener.accept()
            except OSError:
                self._spare = _spare_descriptor()
                return  # nobody waits, or another thread has taken the descriptor
            turned.setblocking(False)
            try:
                # Not before it has sent something: a write that fails since nobody listens any more is taken for death.
                async with asyncio.timeout(_SENDS_WITHIN_SECONDS):
                    sent = await self._loop.sock_recv(turned, 1)
                if sent:
                    turned.send(_BUSY_FRAME)
                    self._counters.turned_away += 1
            except TimeoutError:
                # It stands still. It keeps the descriptor, as others that were accepted do.
                await self._take(turned)
                return
            except OSError:
                pass  # it has gone
            except BaseException:
                turned.close()
                raise
            turned.close()
            self._spare = _spare_descriptor()


def _spare_descriptor() -> int:
    """A descriptor that can be given up for another; -1 where there is none to be had."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def peer_uid(connected: socket.socket) -> int:
    """The user ID of the process at the other end of a Unix socket, as the kernel noted it at `connect`."""
    if sys.platform == "darwin":
        # struct xucred: version, user ID, groups (`sys/ucred.h`)
        version_and_uid = connected.getsockopt(0, socket.LOCAL_PEERCRED, 76)
        return int(struct.unpack_from("=II", version_and_uid)[1])
    _, uid, _ = struct.unpack("=iII", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
