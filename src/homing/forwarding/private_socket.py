"""A worker's private socket, from the bind until its file is gone.

Invariant: it is this user's alone before anybody can connect, and its file goes last, by the process that made it.

Not here: what comes through it (`receiver.py`).
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from homing.forwarding.receiver import OnAsk, OnShow, Receiver
from homing.rundir import close_after_fork
from homing.types import ASGIApp


def _no_state() -> None:
    return None


@contextlib.asynccontextmanager
async def serve_private_socket(
    app: ASGIApp,
    path: str,
    backlog: int = 2048,
    *,
    state: Callable[[], dict[str, Any] | None] = _no_state,
    on_ask: OnAsk | None = None,
    on_show: OnShow | None = None,
    idle_seconds: float = 30.0,
    context: contextvars.Context | None = None,
) -> AsyncIterator[Receiver]:
    """Listen on a worker's private socket, and call `app` for each request that another worker sends.

    Args:
        app: Called with `scope["homing.hop"]`, a `Hop`; it calls `mine` or `not_mine` before anything else.
        path: Where the socket is bound, 0600; removed when this ends, as the last thing.
        state: This worker's lifespan state; each request gets a copy, as servers give it. None: no such key.
        on_ask: Answers a worker that asks for a session; without it, the answer is `Answer.NOT_MINE`.
        on_show: Answers whoever asks what sessions are here; without it, the answer is empty.
        idle_seconds: How long an unused connection is kept. More than the forwarder's, which lets go first.
        context: Each request runs in a copy of it; None: of the caller's. Give the one that the server's own requests
            run in: what an app sets in its lifespan is not seen by them.

    Raises:
        OSError: the socket cannot be bound, for one because the path exists.
    """
    listener, identity = _bind(path, backlog)
    maker = os.getpid()
    # A child with a copy would let connections to a dead worker wait, where they have to be refused.
    undo = close_after_fork(listener)
    receiver = Receiver(
        app, path, listener, state=state, on_ask=on_ask, on_show=on_show, idle_seconds=idle_seconds, context=context
    )
    try:
        yield receiver
    finally:
        try:
            await receiver.aclose()
        finally:
            undo()
            listener.close()
            with contextlib.suppress(FileNotFoundError):
                # A forked child, or whoever finds another socket at the path, does not remove it.
                if os.getpid() == maker and _identity(path) == identity:
                    os.unlink(path)


def _bind(path: str, backlog: int) -> tuple[socket.socket, tuple[int, int]]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before `listen`
        identity = _identity(path)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener, identity


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino
