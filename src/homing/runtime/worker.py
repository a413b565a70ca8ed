"""One serving process: uvicorn's server, what it tells its supervisor, and its end when the supervisor is gone.

A worker whose supervisor was killed stops within `ORPHAN_SECONDS`, since nobody is left who could restart it or remove its
directory.

Not here: starting and replacing workers (`supervisor.py`), what the two say to each other (`link.py`), and how a worker leaves
while its server goes on (`leaving.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from socket import SO_ACCEPTCONN, SOL_SOCKET, socket
from types import FrameType
from typing import Final, NoReturn

from uvicorn.config import STARTUP_FAILURE
from uvicorn.server import Server

from homing.errors import ConfigurationError, HomingError, StartupError
from homing.routing.worker import GRACEFUL_SECONDS, current_worker
from homing.rundir import close_after_fork, use_run_directory
from homing.runtime.accepting import Accepting
from homing.runtime.config import RunConfig, address_line, unix_line
from homing.runtime.handoff import Handoffs
from homing.runtime.leaving import Leave
from homing.runtime.link import Drained, FromWorker, Leaving, Loaded, Ready, SupervisorLink, failure
from homing.runtime.protocol import HomingHttpToolsProtocol
from homing.runtime.publisher import WRITE_SECONDS, Publisher
from homing.runtime.secret import keep_server_secret

logger = logging.getLogger(__name__)

USAGE_EXIT_CODE: Final = 2
ORPHAN_SECONDS: Final = 4.0
"""How long a worker outlives its supervisor, at most: requests in flight may end for 2.5 s of it."""
_ORPHAN_GRACE_SECONDS: Final = 2.5
_LOOK_SECONDS: Final = 0.1


class HomingServer(Server):
    """uvicorn's server, which also says when the app is loaded and when it serves, and which port it could not have."""

    config: RunConfig

    def __init__(self, config: RunConfig, told: Callable[[FromWorker], None]) -> None:
        super().__init__(config)
        self._tell = told
        self._publisher: Publisher | None = None
        self._accepting: Accepting | None = None
        self._leave: Leave | None = None
        self._draining: asyncio.Task[None] | None = None
        self._handoffs_later: asyncio.TimerHandle | None = None
        self._signalled = False

    def run(self, sockets: list[socket] | None = None) -> None:
        self.config.check_loop()
        super().run(sockets)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._tell(Loaded(self.config.routed_by))
        try:
            await super().startup(sockets=sockets)
            if self.started and not all(map(_listens, sockets or ())):
                # uvloop tells nobody that it could not.
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))  # noqa: TRY301
        except OSError as error:
            # Two servers may bind one port as long as neither listens; the second to listen finds out here.
            if error.errno != errno.EADDRINUSE and self.config.uds is None:
                raise
            self.started = False
            await self.lifespan.shutdown()
            if self.config.uds is not None:
                raise StartupError(unix_line(error, self.config.uds)) from error
            raise StartupError(address_line(error, self.config.host, self.config.port)) from error
        if self.started:
            if sockets is None:
                self.config.note_unix_socket()
            self._open_handoffs()
            self._accepting = Accepting(
                self.servers, self._make_protocol, tls=self.config.ssl, backlog=self.config.backlog
            )
            self._leave = Leave(self.server_state, current_worker(), self.config)
            self._publish()
            self.serves(self._accepting)
            self._tell(Ready())

    def serves(self, accepting: Accepting) -> None:
        """Called once the worker accepts connections, in its event loop."""

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        # At once: until the supervisor knows, what waits in this worker's queue waits for nobody.
        self._tell(Leaving())
        if self._handoffs_later is not None:
            self._handoffs_later.cancel()
        if self._draining is not None:
            await asyncio.wait([self._draining])
        elif not self._signalled and self._leave is not None:
            # It has served its number of requests: what begins from now on begins at a worker that stays.
            self._leave.begin()
            self._limit_graceful_shutdown()
        if self._accepting is not None:
            await self._accepting.aclose()
        # Before those that are idle go elsewhere: one that comes later would be cut off by the server with no word.
        if self.config.handoffs is not None:
            await self.config.handoffs.taken()
        if self._leave is not None:
            await self._leave.end(lambda: self._signalled)
        if self.config.handoffs is not None:
            await self.config.handoffs.aclose()
        await super().shutdown(sockets)
        # Not before: what is served to the end counts, and a worker that takes its time over it is not a silent one.
        if self._publisher is not None:
            await self._publisher.aclose()
        if sockets is None:
            # Not at the process's end: the signal that stopped the server is raised anew, and ends it before.
            self.config.remove_unix_socket()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signalled = True
        super().handle_exit(sig, frame)

    def drain(self, seconds: float) -> None:
        """Begin no more sessions, go on with those that are here until they end, at most so long, and exit. In the event loop."""
        if self._draining is None and not self.should_exit:
            self._draining = asyncio.get_running_loop().create_task(self._drain(seconds), name="homing drain")

    async def _drain(self, seconds: float) -> None:
        assert self._leave is not None
        assert self._accepting is not None
        self._tell(Leaving())
        self._leave.begin()
        await self._accepting.aclose()
        left = await self._leave.until_nothing_is_left(time.monotonic() + seconds, lambda: self.should_exit)
        if self.should_exit:
            return
        self._tell(Drained(left))
        fields = {"event": "worker_drained", "pid": os.getpid(), "sessions": left}
        if left:
            ends = "1 session ends" if left == 1 else f"{left} sessions end"
            logger.warning("worker [%d]: the time to drain is over; %s with it", os.getpid(), ends, extra=fields)
        else:
            logger.info("worker [%d] has drained", os.getpid(), extra=fields)
        self._limit_graceful_shutdown()
        self.should_exit = True

    def _limit_graceful_shutdown(self) -> None:
        if self.config.timeout_graceful_shutdown is None:
            # A stream that its client never ends would keep the worker, and whatever waits for it to go.
            self.config.timeout_graceful_shutdown = int(GRACEFUL_SECONDS)

    def _open_handoffs(self) -> None:
        worker = current_worker()
        if worker is None or not (self.config.handoff and self.config.moves_connections):
            return
        try:
            self.config.handoffs = Handoffs(worker.run_directory.path, worker.id, self._adopt, self._has_room)
        except OSError as error:
            # A full or missing run directory: requests are forwarded meanwhile, as they are where connections cannot move.
            if self._handoffs_later is None:
                logger.warning("no connection moves to this worker or from it: %s", error.strerror)
            self._handoffs_later = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._open_handoffs)
        else:
            if self._handoffs_later is not None:
                logger.info("connections move to this worker and from it from now on")

    def _publish(self) -> None:
        # Nothing is awaited between listening and uvicorn's main loop: its first turn makes the `Date` header.
        worker = current_worker()
        if worker is not None:
            self._publisher = Publisher(worker, self.config)
            self._publisher.start()

    def _make_protocol(self) -> asyncio.Protocol:
        """As uvicorn's own `Server.startup` makes what serves a connection."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    def _has_room(self, connections: int) -> bool:
        """Whether uvicorn would serve the requests of so many connections more: its protocol counts them so."""
        limit = self.config.limit_concurrency
        return limit is None or len(self.server_state.connections) + connections < limit

    async def _adopt(self, connection: socket, moves: int) -> None:
        """Serve a connection that another worker gave, as one that was accepted here."""

        def make_protocol() -> HomingHttpToolsProtocol:
            protocol = self._make_protocol()
            assert isinstance(protocol, HomingHttpToolsProtocol)
            protocol.has_moved(moves)
            return protocol

        await asyncio.get_running_loop().connect_accepted_socket(make_protocol, connection)


def _listens(bound: socket) -> bool:
    try:
        return bool(bound.getsockopt(SOL_SOCKET, SO_ACCEPTCONN))
    except OSError:  # closed
        return False


class WorkerServer(HomingServer):
    """The server of a process that only serves: told twice to stop, it ends there.

    Args:
        link: To the supervisor, which lends it sockets and tells it to drain.
    """

    def __init__(self, config: RunConfig, link: SupervisorLink) -> None:
        super().__init__(config, link.send)
        self._link = link
        # Only one that was set: an app may have much to put away.
        self._app_shutdown_seconds = config.timeout_graceful_shutdown

    async def startup(self, sockets: list[socket] | None = None) -> None:
        shut_down = functools.partial(self._shut_app_down, self.lifespan.shutdown)
        self.lifespan.shutdown = shut_down
        if (routing := self.config.routing) is not None and routing.socket_dir is not None:
            use_run_directory(routing.socket_dir)  # where a router of the app's own looks
        await super().startup(sockets)

    async def _shut_app_down(self, shut_down: Callable[[], Awaitable[None]]) -> None:
        """Have the app shut down. Of a worker that leaves while its server goes on, within the graceful limit if one was set:
        whatever waits for the worker to go, a restart say, would wait for ever."""
        if self._app_shutdown_seconds is None or self._signalled:
            await shut_down()
            return
        ended = threading.Event()
        arguments = (ended, self._app_shutdown_seconds)
        threading.Thread(target=_exit_unless, args=arguments, name="homing-shutdown", daemon=True).start()
        try:
            await shut_down()
        finally:
            ended.set()

    def serves(self, accepting: Accepting) -> None:
        link = self._link
        link.on_lend, link.on_take_back, link.on_drain = accepting.lend, accepting.take_back, self.drain
        accepting.on_not_lent = link.not_lent
        link.turn_in(asyncio.get_running_loop())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            # What came while this process started has waited (`process.py`).
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            yield

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # What is still served would be cancelled now, one traceback each, while nobody waits for any of it.
            _exit_at_once()
        # Threads of the app's may be in the middle of something, so they have as long as requests have.
        seconds = self.config.timeout_graceful_shutdown
        arguments = (GRACEFUL_SECONDS if seconds is None else seconds,)
        threading.Thread(target=_exit_within, args=arguments, name="homing-exit", daemon=True).start()


def _exit_within(seconds: float) -> None:
    """End this process if it does not end: Python waits for threads, for ever, and the slot or a restart for the process.

    One that a signal stops does not get so far: the server raises the signal anew once it has served.
    """
    threading.Event().wait(seconds)
    own = (threading.main_thread(), threading.current_thread())
    names = sorted(each.name for each in threading.enumerate() if not each.daemon and each not in own)
    _end_lingering(f": its threads go on ({', '.join(names)})" if names else "", names)


def _exit_unless(ended: threading.Event, seconds: float) -> None:
    """End this process if the app has not ended its shutdown so long after it was told to. A thread, since it may block the loop."""
    while current_worker() is not None:  # the app is told once nothing is served any more, which has a limit of its own
        if ended.wait(_LOOK_SECONDS):
            return
    if not ended.wait(seconds):
        _end_lingering(": its app's shutdown goes on", [])


def _end_lingering(why: str, threads: list[str]) -> NoReturn:
    fields = {"event": "worker_lingers", "pid": os.getpid(), "threads": threads}
    text = "worker [%d] has served all and does not exit, so it is ended now%s"
    logger.warning(text, os.getpid(), why, extra=fields)
    _exit_at_once()


def _exit_at_once() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


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
        server = WorkerServer(self._config, link)
        threading.Thread(target=_live_with_supervisor, args=(link, server), name="homing-link", daemon=True).start()
        try:
            server.run(sockets)
        except HomingError as error:
            link.send(failure(error))
            # Not `sys.exit`: a thread that the app began before it failed would keep this process, and all would wait for it.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(USAGE_EXIT_CODE if isinstance(error, ConfigurationError) else STARTUP_FAILURE)


def _live_with_supervisor(link: SupervisorLink, server: HomingServer) -> None:
    link.answer_until_closed()
    fields = {"event": "supervisor_gone", "pid": os.getpid()}
    logger.warning("the supervisor is gone: worker [%d] stops", os.getpid(), extra=fields)
    # uvicorn's handler runs in the main thread; before it is installed, the signal ends the process at once.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    end = threading.Event()
    end.wait(_ORPHAN_GRACE_SECONDS)
    server.force_exit = True
    end.wait(ORPHAN_SECONDS - _ORPHAN_GRACE_SECONDS)
    os._exit(1)
