"""What one worker has open while it serves: its place in the run directory, its sockets, its sessions.

The invariant: *refused* means dead. The private socket opens before the public one accepts, and closes after this
worker's last handler; if the whole server is stopping, after every other worker has drained too, since until then one of
them may still forward a request here.

Not here: what a request does with all this (`middleware.py`), and when a worker starts and stops (the server's lifespan).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from types import FrameType
from typing import Any, Final, Self, TypeVar

from homing.clock import SYSTEM_CLOCK, Clock
from homing.directory import SessionOwners
from homing.directory.base import Given
from homing.errors import HomingError
from homing.forwarding.base import Answer
from homing.forwarding.forwarder import Forwarder
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.receiver import Receiver
from homing.lifetime.base import SessionLifetimes
from homing.placement import Placement, PlacementOptions
from homing.routing.path_keys import PathKeys
from homing.routing.shown import shown
from homing.routing.sweeper import sweep_forever
from homing.rundir import RunDirectory, new_worker_id, worker_socket_path
from homing.tasks import call_in_loop, ended
from homing.types import PATH, SESSION, ASGIApp, WorkerId

logger = logging.getLogger(__name__)

GRACEFUL_SECONDS: Final = 30.0
"""How long a stopping worker waits for the others to drain, where the server has no limit of its own."""

LAST_SECONDS: Final = 0.5
"""What a worker waits at least, if its own connections took all of the limit: the others reach it a moment later."""

_DRAIN_POLL_SECONDS: Final = 0.05

_ANSWERS: Final = {Given.GIVEN: Answer.GIVEN, Given.BUSY: Answer.BUSY, Given.NOT_MINE: Answer.NOT_MINE}

_current: Worker | None = None

_T = TypeVar("_T")


def worker_id() -> WorkerId:
    """This process's worker ID: 32 lowercase hex digits, new at every start.

    Raises:
        LookupError: no routed server runs in this process.
    """
    if _current is None:
        raise LookupError("no homing worker runs in this process: call worker_id() once the server has started")
    return _current.id


def current_worker() -> Worker | None:
    """What this process's routed server has open; None before it has started, and where nothing is routed."""
    return _current


class Worker:
    """One worker of a server that has several. Owns everything it opens; `aclose` is safe to call twice.

    Args:
        app: Tells the apps apart that share a run directory; None: its sessions are those of the directory.
        placing: How new sessions are placed and limited; None: they begin where they arrive.
        limited: This worker alone has a limit of sessions.

    Attributes:
        id: New at every start of a process.
        owners, path_keys: Which worker owns each session and path key.
        lifetimes: How long this worker keeps its own. Borrowed.
        forwarder: How requests reach other workers.
        placement: Where new sessions begin; None: where they arrive.
        looks_at_starts: Starts are placed or limited, so one of a session that is here may have to be looked at too.
        starting: Starts under way whose sessions have no ID yet.
        serving: Requests whose handler is running.
        served: Requests whose handler has been called, `received` from other workers among them.
        answers: Replies of homing's own, by their code, `peer_answers` to requests that other workers sent among them.
        draining: No session begins here any more, and those that are here go on: this worker is to leave.
        went_idle: Sessions whose lifetime the sweep under way found over, though nothing had ended them.
        drained: Nothing more is taken from other workers: this one is about to exit.
    """

    def __init__(
        self,
        socket_dir: str,
        identifier: WorkerId,
        lifetimes: SessionLifetimes,
        *,
        owner_timeout_seconds: float,
        graceful_seconds: float | None,
        app: str | None = None,
        drop: Callable[[str], None] | None = None,
        placing: PlacementOptions | None = None,
        limited: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.id = identifier
        self.lifetimes = lifetimes
        self.starting = 0
        self.serving = self.served = self.received = 0
        self.answers: Counter[str] = Counter()
        self.peer_answers: Counter[str] = Counter()
        self.draining = False
        self.went_idle: set[str] = set()
        if hasattr(lifetimes, "on_idle"):
            lifetimes.on_idle = self.went_idle.add
        self.drained = False
        self._closed = False
        self._graceful_seconds = graceful_seconds
        self._told_at: float | None = None
        self._owner_timeout_seconds = owner_timeout_seconds
        self._clock = clock
        self._receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        with ExitStack() as opening:
            self.run_directory = opening.enter_context(RunDirectory.open(socket_dir))
            self.run_directory.tidy()
            self._app = apart = "" if app is None else self.run_directory.tell_apart(app)
            # Before the first record and before the private socket: a worker without a life is dead.
            opening.callback(self.run_directory.hold_life(identifier, apart).close)
            self.owners = SessionOwners(
                socket_dir,
                identifier,
                lifetimes.holds,
                kind=SESSION + apart,
                drop=drop,
                run_directory=self.run_directory,
            )
            self.path_keys = PathKeys(self.run_directory, identifier, kind=PATH + apart)
            self.forwarder = _forwarder(socket_dir, owner_timeout_seconds)
            self.placement: Placement | None = None
            if placing is not None and placing.needed:
                self.placement = Placement.open(placing, self.run_directory, identifier, apart)
            if self.placement is not None:
                opening.callback(self.placement.close)
                self.owners.count_changed = self.count_sessions
            self.looks_at_starts = limited or self.placement is not None
            self._stack = AsyncExitStack()
            self._stack.push(opening.pop_all())

    def __repr__(self) -> str:
        return f"<Worker {self.id[:6]} {self.owners!r}>"

    async def open(
        self,
        app: ASGIApp,
        *,
        state: Callable[[], dict[str, Any] | None],
        context: contextvars.Context | None,
        backlog: int,
        sweep_seconds: float,
    ) -> Self:
        """Take this worker's place: private socket and sweeper. What fails half-way is closed again.

        Args:
            app: Called for each request that another worker sends here.
            state: The lifespan's state, of which each request gets a copy.
            context: Each request runs in a copy of it.
        """
        global _current  # noqa: PLW0603 - one process is one worker
        self._loop = asyncio.get_running_loop()
        self._stack.push_async_callback(self.owners.aclose)
        self._stack.push_async_callback(self.path_keys.owners.aclose)
        try:
            self._receiver = await self._stack.enter_async_context(
                serve_private_socket(
                    app,
                    worker_socket_path(self.run_directory.path, self.id),
                    backlog,
                    state=state,
                    context=context,
                    on_ask=self._asked,
                    on_show=lambda limit: shown(self, limit),
                )
            )
            self._stack.push_async_callback(self.forwarder.aclose)
            sweeper = asyncio.create_task(
                sweep_forever(self, interval_seconds=sweep_seconds, clock=self._clock), name="homing sweeper"
            )
            self._stack.push_async_callback(_cancel, sweeper)
            if self.placement is not None:
                beat = asyncio.create_task(self.placement.beat_forever(self.count_sessions), name="homing placement")
                self._stack.push_async_callback(_cancel, beat)
            self._stack.enter_context(_stop_signals_marked(self._told_to_stop))
        except BaseException:
            await self.aclose()
            raise
        _current = self
        self._say("serves")
        logger.debug("worker %s: run directory %s", self.id, self.run_directory.path)
        return self

    def in_loop(self, call: Callable[[], _T]) -> _T:
        """Call on this worker's event loop, from whatever thread, and wait for the outcome; on the loop itself, at once.

        A look at a record and what follows from it are one block for the loop alone: from another thread it would be two.
        Frameworks run handlers that are plain functions on threads.

        Raises:
            HomingError: the worker has ended. And what `call` raises.
        """
        if self._loop is None or asyncio._get_running_loop() is self._loop:
            return call()
        return call_in_loop(self._loop, call)

    def begin_draining(self) -> None:
        """From now on no session begins here, if another worker takes it. Those that are here go on."""
        self.draining = True
        if self.placement is not None:
            self.placement.drain()
        self._mark("draining")

    @property
    def open_sessions(self) -> int:
        """Sessions of this worker that have not ended, and starts under way."""
        return max(0, len(self.owners) - self.count_ended()) + self.starting

    async def drain(self) -> None:
        """Wait until nothing is served for other workers, and, if the server is stopping, until they have drained.

        After that nothing more is taken (`drained`): what still comes is answered *not mine*, since it would be cut off.
        """
        if self.placement is not None:
            self.placement.stop()
        self._say("drains")
        self._mark("drained")
        deadline = self._drain_until()
        # Marks are files that other processes make: there is no event to wait for.
        while self._others_still_drain() and self._clock.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        # From here on whoever still sends something goes on without this worker: under load, waiting until nothing
        # comes would take the whole graceful limit, and then cut off what had come.
        self.drained = True
        if self._receiver is not None:
            # The server has closed those that it accepted itself, and whoever stops too has closed its own by now.
            self._receiver.end_websockets()
            await self._receiver.drain(max(deadline - self._clock.monotonic(), 0.0))

    def _drain_until(self) -> float:
        """When to stop waiting, on the clock.

        A limit that was set counts from the signal, since the server has spent some of it on its own connections: counted
        anew, a stop would take twice the limit.
        """
        now = self._clock.monotonic()
        if self._graceful_seconds is None:
            return now + GRACEFUL_SECONDS
        if self._told_at is None:
            return now + self._graceful_seconds
        return max(self._told_at + self._graceful_seconds, now + min(self._graceful_seconds, LAST_SECONDS))

    def _told_to_stop(self) -> None:
        if self._told_at is None:
            self._told_at = self._clock.monotonic()
        if self.placement is not None:
            self.placement.stop()
        self._mark("stopping")

    def _mark(self, state: str) -> None:
        """Tell the others. A worker that cannot, with no room or no directory left, stops all the same."""
        try:
            self.run_directory.mark(self.id, state)
        except HomingError as error:
            logger.warning("the other workers are not told: %s", error)

    def _others_still_drain(self) -> bool:
        try:
            draining = self.run_directory.marks("stopping") - self.run_directory.marks("drained") - {self.id}
            # A worker of another app forwards nothing here, and one of this very process may drain only after this one.
            return any(self._serves_same(each) and not self.run_directory.is_dead(each) for each in draining)
        except HomingError as error:
            logger.warning("not waiting for the other workers: %s", error)
            return False

    async def aclose(self) -> None:
        """Close everything, the private socket after the last handler and the life lock last."""
        global _current  # noqa: PLW0603
        if _current is self:
            _current = None
        if self._receiver is not None and not self._closed:
            self._closed = True
            self._say("stops")
        await self._stack.aclose()

    def _say(self, what: str) -> None:
        """One line for each event of a worker's life."""
        sessions = len(self.owners)
        fields = {"event": f"worker_{what}", "worker": self.id, "pid": os.getpid(), "sessions": sessions}
        lost = ""
        if what == "stops" and sessions:
            lost = "; 1 session ends with it" if sessions == 1 else f"; {sessions} sessions end with it"
        logger.info("worker %s [%d] %s%s", self.id, os.getpid(), what, lost, extra=fields)

    def count_ended(self) -> int:
        """How many of this worker's sessions have ended, and are in their close retry window."""
        count = getattr(self.lifetimes, "count_ended", None)
        return 0 if count is None else int(count())

    def has_ended(self, session_id: str) -> bool:
        """Whether a session of this worker has ended, and is in its close retry window."""
        see = getattr(self.lifetimes, "seen", None)
        known = None if see is None else see(session_id)
        return known is not None and bool(known.ended)

    def count_live(self) -> int:
        """How many sessions of this worker have not ended, starts under way whose sessions have no ID yet among them."""
        return len(self.owners) + self.starting - self.count_ended()

    def count_sessions(self) -> None:
        """Tell the other workers how many sessions are live here: called whenever that may have changed."""
        if self.placement is not None:
            self.placement.count(self.count_live(), self.serving)

    @property
    def not_mine(self) -> int:
        """How many requests this worker has sent back to another worker, since the session was not here."""
        return 0 if self._receiver is None else self._receiver.counters.not_mine

    def another(self, *, than: WorkerId | None = None) -> WorkerId | None:
        """Some other live worker, for the test mode; None if there is none. Lists the run directory: a few files."""
        others = [each for each in self.run_directory.live_workers() if each not in (self.id, than)]
        others = [each for each in others if self._serves_same(each)]
        return random.choice(others) if others else None  # noqa: S311 - a detour needs no secrecy

    def others_to_start_at(self) -> list[WorkerId]:
        """Live workers of this app that neither drain nor stop: where a session may begin. Lists the run directory: a few files.

        Raises:
            DirectoryError: they cannot be told.
        """
        return [each for each in self.others_that_stay() if self._serves_same(each)]

    def others_that_stay(self) -> list[WorkerId]:
        """Live workers that neither drain nor stop, whatever app they serve. One that still starts is among them.

        Raises:
            DirectoryError: they cannot be told.
        """
        leaving = self.run_directory.marks("draining") | self.run_directory.marks("stopping")
        return [each for each in self.run_directory.live_workers() if each != self.id and each not in leaving]

    def _serves_same(self, worker_id: WorkerId) -> bool:
        return self.run_directory.app_of(worker_id) == self._app

    async def _asked(self, kind: str, key: str, asker: str, hung_up: asyncio.Event) -> Answer:
        owners = self.path_keys.owners if kind == self.path_keys.owners.kind else self.owners
        given = await owners.give(key, WorkerId(asker), timeout_seconds=self._owner_timeout_seconds, hung_up=hung_up)
        return _ANSWERS[given]

    async def ask(self, owner: WorkerId, session_id: str) -> Given:
        """Ask a live owner for a session, over its private socket."""
        answer = await self.forwarder.ask(owner, self.owners.kind, session_id, self.id)
        return Given[answer.name]


def fresh_worker_id() -> tuple[WorkerId, int]:
    """A worker ID and the process it is for: a fork must make its own."""
    return new_worker_id(), os.getpid()


def _forwarder(socket_dir: str, owner_timeout_seconds: float) -> Forwarder:
    """A forwarder; one that also makes spans where OpenTelemetry's API is installed, which is looked for this once."""
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError:
        return Forwarder(socket_dir, owner_timeout_seconds=owner_timeout_seconds)
    from homing.routing.spans import TracingForwarder

    return TracingForwarder(socket_dir, owner_timeout_seconds=owner_timeout_seconds)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await ended([task])


@contextmanager
def _stop_signals_marked(mark: Callable[[], None]) -> Iterator[None]:
    """Note in the run directory when this worker is told to stop, then do as the server's own handler does.

    A worker that has drained has to know whether the others are draining too, or only it was told to stop (a rolling
    restart, a recycled worker). No server tells an app, so the signal is noted where it arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {}
    stops: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        mark()
        before = previous[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in stops:
        before = signal.getsignal(number)
        # One that is ignored (hypercorn's workers ignore SIGINT) stops nobody; one whose handler is not Python's (None)
        # could be neither called nor put back.
        if before is None or before == signal.SIG_IGN:
            continue
        previous[number] = before
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, before in previous.items():
            # Whoever installed another handler meanwhile keeps it.
            if signal.getsignal(number) is handle:
                signal.signal(number, before)
