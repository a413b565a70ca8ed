"""Where do a server's workers accept connections? One queue for each worker's place, where the system can do that.

With one socket for all workers, whoever wakes first accepts, and one worker of two may end up with twice the other's
connections. On Linux each place for a worker (a slot) has a socket of its own, all bound to one address with SO_REUSEPORT, and
the kernel spreads connections over them.

The invariant: no connection is lost with a worker. The supervisor holds every socket for as long as the server lives, so a
queue outlives the worker that served it, and others are lent it (`supervisor.py`). A socket is never closed before: what waits
in its queue would be reset.

A second server still finds the port in use: the sockets are bound only after a plain bind has shown that nobody listens there,
and only by the one server that holds the port's name among the abstract Unix sockets, which live in the same network namespace
as the port. Without that, two servers of one user that start at the same time could share a port unnoticed.

Not here: the plain bind and what is said when it fails (`config.py`), and accepting (`accepting.py`).
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import Final, Self

SLOTS_HAVE_SOCKETS: Final = sys.platform == "linux" and hasattr(socket, "SO_REUSEPORT")
"""Elsewhere SO_REUSEPORT spreads nothing (macOS), or there is no way to tell who holds a port."""


class Listener:
    """A listening socket of the server, and its number. `number` is the same for what all slots share."""

    __slots__ = ("number", "opened", "socket")

    def __init__(self, number: int, made: socket.socket) -> None:
        self.number = number
        self.socket = made
        self.opened = False
        """A worker has served it: connections may be waiting."""

    def __repr__(self) -> str:
        return f"<Listener {self.number}{'' if self.opened else ', not opened yet'}>"


class Listeners:
    """The sockets of a server's slots. Owns them, and `bound`; `close` is safe to call twice.

    Args:
        bound: A socket that was bound without SO_REUSEPORT: the port was free. All slots share it where they cannot have
            sockets of their own: on other systems than Linux, on a Unix socket, or if another server of homing's is about to
            listen on this port.

    Attributes:
        spare: Those whose slot was taken away. Others accept from them, and the next new slot gets one.
    """

    def __init__(self, bound: socket.socket) -> None:
        self._bound = bound
        self._address = bound.getsockname()
        self._count = 0
        self._made: list[socket.socket] = []
        self.spare: list[Listener] = []
        self._shared: Listener | None = None
        self._name = _hold_port(bound) if SLOTS_HAVE_SOCKETS else None
        if self._name is None:
            self._share()

    def __repr__(self) -> str:
        return f"<Listeners of {self._address}: {'shared' if self._shared is not None else len(self._made)}>"

    @property
    def bound(self) -> socket.socket:
        """One of them, to tell the address by."""
        return self._bound

    @property
    def shared(self) -> bool:
        """Whether all slots have the same one."""
        return self._shared is not None

    def take(self) -> Listener:
        """The socket of a new slot."""
        if self._shared is not None:
            return self._shared
        if self.spare:
            return self.spare.pop()
        try:
            made = _bind_beside(self._bound)
        except OSError:
            if self._made:
                raise
            # The very first: a system that knows SO_REUSEPORT and does not let us have it.
            return self._share()
        self._made.append(made)
        if len(self._made) == 1:
            # From here on the port is held by sockets of our own kind, which the plain one would not let listen.
            self._bound.close()
            self._bound = made
        self._count += 1
        return Listener(self._count, made)

    def give_back(self, listener: Listener) -> None:
        """The slot that had this socket is no more."""
        if self._shared is None:
            self.spare.append(listener)

    def close(self) -> None:
        for each in (*self._made, self._bound):
            each.close()
        if self._name is not None:
            self._name.close()

    def _share(self) -> Listener:
        self._shared = Listener(0, self._bound)
        return self._shared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep_alive(listener: socket.socket) -> None:
    """Have the kernel ask now and then whether the other ends of idle connections are still there: accepted sockets inherit
    it. Without it, a client that vanished without a word keeps its request, and its session's place, for ever."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _bind_beside(bound: socket.socket) -> socket.socket:
    """Another socket at the address of `bound`, which the kernel gives a share of the connections once both listen."""
    made = socket.socket(bound.family, bound.type)
    try:
        # What the last server's connections have left (TIME_WAIT) is no other server.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keep_alive(made)
        made.bind(bound.getsockname())
    except BaseException:
        made.close()
        raise
    made.set_inheritable(True)
    return made


def _hold_port(bound: socket.socket) -> socket.socket | None:
    """Hold the name of the port of a TCP socket, as no two servers can; None if that cannot be had."""
    if bound.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):
        name.bind(f"\0homing port {bound.getsockname()[1]}")
        return name
    name.close()
    return None
