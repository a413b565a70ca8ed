"""One serving process: uvicorn's server, what it tells its supervisor, and its end when the supervisor is gone.

A worker and its supervisor share one pair of connected sockets and nothing else. The supervisor sends `ping`; the
worker sends `Loaded`, `Ready`, `Pong` and `Failed`. Its end is the other's death: a worker whose supervisor was killed
stops within `ORPHAN_SECONDS`, since nobody is left who could restart it or remove its directory.

Not here: starting and replacing workers (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from socket import socket
from typing import Final

from uvicorn.config import STARTUP_FAILURE
from uvicorn.server import Server

from homing.errors import ConfigurationError, HomingError, StartupError
from homing.routing.worker import current_worker
from homing.rundir import close_after_fork
from homing.runtime.config import RoutedBy, RunConfig, address_line
from homing.runtime.handoff import Handoffs
from homing.runtime.protocol import HomingHttpToolsProtocol
from homing.runtime.publisher import Publisher
from homing.runtime.secret import keep_server_secret

logger = logging.getLogger(__name__)

USAGE_EXIT_CODE: Final = 2
ORPHAN_SECONDS: Final = 4.0
"""How long a worker outlives its supervisor, at most: requests in flight may end for 2.5 s of it."""
_ORPHAN_GRACE_SECONDS: Final = 2.5


@dataclass(frozen=True, slots=True)
class Loaded:
    """The app was loaded and can be routed; its start-up follows."""

    routing: RoutedBy


@dataclass(frozen=True, slots=True)
class Ready:
    """The app has started and the worker accepts requests."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The worker is alive enough to answer."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot serve. `usage` tells a mistake on the command line from an app or address that failed."""

    line: str
    usage: bool


def failure(error: HomingError) -> Failed:
    """What a worker says about an error it stops for."""
    return Failed(str(error), usage=isinstance(error, ConfigurationError))


def raise_failure(failed: Failed) -> None:
    """The same error again, in the supervisor.

    Raises:
        ConfigurationError, StartupError: as it was raised in the worker.
    """
    raise ConfigurationError(failed.line) if failed.usage else StartupError(failed.line)


class HomingServer(Server):
    """uvicorn's server, which also says when the app is loaded and when it serves, and which port it could not have."""

    config: RunConfig

    def __init__(self, config: RunConfig, told: Callable[[Loaded | Ready], None]) -> None:
        super().__init__(config)
        self._tell = told
        self._publisher: Publisher | None = None

    def run(self, sockets: list[socket] | None = None) -> None:
        self.config.check_loop()
        super().run(sockets)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._tell(Loaded(self.config.routed_by))
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            # Two servers may bind one port as long as neither listens; the second to listen finds out here.
            if error.errno != errno.EADDRINUSE:
                raise
            await self.lifespan.shutdown()
            raise StartupError(address_line(error, self.config.host, self.config.port)) from error
        if self.started:
            self._open_handoffs()
            self._publish()
            self._tell(Ready())

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        # Before the server goes through its connections: one that comes here later would be cut off with no word.
        if self.config.handoffs is not None:
            await self.config.handoffs.aclose()
        if self._publisher is not None:
            await self._publisher.aclose()
        await super().shutdown(sockets)

    def _open_handoffs(self) -> None:
        worker = current_worker()
        if worker is None or not (self.config.handoff and self.config.moves_connections):
            return
        self.config.handoffs = Handoffs(worker.run_directory.path, worker.id, self._adopt)

    def _publish(self) -> None:
        # Nothing is awaited between listening and uvicorn's main loop: its first turn makes the `Date` header.
        worker = current_worker()
        if worker is not None:
            self._publisher = Publisher(worker, self.config.handoffs)
            self._publisher.start()

    async def _adopt(self, connection: socket, moves: int) -> None:
        """Serve a connection that another worker gave, as one that was accepted here."""

        def make_protocol() -> HomingHttpToolsProtocol:
            # As uvicorn's own `Server.startup` makes it.
            protocol = HomingHttpToolsProtocol(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            protocol.has_moved(moves)
            return protocol

        await asyncio.get_running_loop().connect_accepted_socket(make_protocol, connection)


class WorkerServer(HomingServer):
    """The server of a process that only serves: told twice to stop, it ends there."""

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # What is still served would be cancelled now, one traceback each, while nobody waits for any of it.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)


class SupervisorLink:
    """The worker's end of what joins it to its supervisor. Owns the connection for the life of the process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Loaded | Ready | Pong | Failed) -> None:
        """Tell the supervisor; it may be gone, which `answer_until_closed` notices."""
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                logger.debug("the supervisor is gone", exc_info=True)

    def answer_until_closed(self) -> None:
        """Answer pings until the supervisor's end is closed, which only its death does."""
        while True:
            try:
                self._connection.recv()
            except (EOFError, OSError):
                return
            self.send(Pong())


class WorkerMain:
    """What a spawned worker runs. Picklable, and holds the worker's end of the link only, so that it sees it close."""

    def __init__(self, config: RunConfig, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def __call__(self, sockets: list[socket] | None = None) -> None:
        keep_server_secret()
        link = SupervisorLink(self._connection)
        for listener in sockets or ():
            close_after_fork(listener)  # else the port stays taken for as long as a child of the app lives
        server = WorkerServer(self._config, link.send)
        threading.Thread(target=_live_with_supervisor, args=(link, server), name="homing-link", daemon=True).start()
        try:
            server.run(sockets)
        except HomingError as error:
            link.send(failure(error))
            sys.exit(USAGE_EXIT_CODE if isinstance(error, ConfigurationError) else STARTUP_FAILURE)


def _live_with_supervisor(link: SupervisorLink, server: HomingServer) -> None:
    link.answer_until_closed()
    logger.warning("the supervisor is gone: worker [%d] stops", os.getpid())
    # uvicorn's handler runs in the main thread; before it is installed, the signal ends the process at once.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    end = threading.Event()
    end.wait(_ORPHAN_GRACE_SECONDS)
    server.force_exit = True
    end.wait(ORPHAN_SECONDS - _ORPHAN_GRACE_SECONDS)
    os._exit(1)
