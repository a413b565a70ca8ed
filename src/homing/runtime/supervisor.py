"""The process that starts a server's workers, watches them, replaces them and stops them.

A small subclass of uvicorn's supervisor: its signals and its words, with these differences. A worker that does not
answer never delays the others or a signal (uvicorn waits for each answer in turn). A replacement that fails to start, or for
which there is no process, is tried again while the other workers keep their sessions (uvicorn stops the whole server). A rolling restart goes on
beside everything else, however long an old worker drains; and it drains: its sessions go on until they end, or for
`drain_seconds`. A queue of connections that no worker of its own accepts from is lent to the others.

The invariant: when `serve` returns or raises, no worker is left.

Not here: the run directory (`server_directory.py`), one worker as seen from here (`process.py`), what it does (`worker.py`), and
planned restarts (`restarts.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Final

from uvicorn.supervisors.multiprocess import Multiprocess

from homing.errors import StartupError
from homing.runtime.config import RunConfig
from homing.runtime.control import Control, Progress
from homing.runtime.heartbeat import LoopClock
from homing.runtime.link import Failed, Loaded, raise_failure
from homing.runtime.listeners import Listeners
from homing.runtime.process import PING_SECONDS, Worker
from homing.runtime.restarts import Restarts, end_of
from homing.runtime.slot import Slot
from homing.runtime.worker_lines import say_exited, say_replaced, say_told, why_it_failed

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = PING_SECONDS
FORCED_STOP_SECONDS: Final = 5.0


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one: each worker holds connections of clients and of peers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports no hard limit and refuses it as a soft one; its own limit then stays.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Supervisor(Multiprocess):
    """Run a server's workers until a signal says to stop.

    Borrows `listeners` and `control`; owns its workers. `announce` is called once, when the first worker has loaded the app:
    what cannot be loaded ends in one line, with nothing said before it.

    Args:
        control: Where it can be asked to drain a worker; None: nowhere.
    """

    config: RunConfig

    def __init__(
        self,
        config: RunConfig,
        listeners: Listeners,
        announce: Callable[[Loaded], None],
        control: Control | None = None,
    ) -> None:
        # Where SIGTTIN and SIGTTOU add and remove workers, `processes_num` is the count.
        super().__init__(config, [listeners.bound])
        self._listeners = listeners
        self._control = control
        self._clock = LoopClock(TICK_SECONDS)
        self._slots: list[Slot] = []
        self._retiring: list[Worker] = []
        self._restarts = Restarts(self._slots, self._retiring, start=self._start_worker, retire=self._retire)
        self._announce: Callable[[Loaded], None] | None = announce
        self._all_were_ready = False
        self._failure: Failed | None = None

    def __repr__(self) -> str:
        return f"<Supervisor {os.getpid()}: {len(self._slots)} workers, {len(self._retiring)} retiring>"

    def run(self) -> None:
        """Start the workers and keep them running; return once a signal stopped the server and all are gone.

        Raises:
            ConfigurationError, StartupError: a worker could not start serving; all others were stopped.
            OSError: there is no process or descriptor for the first workers.
        """
        with self._signal_wakeups() as wakeups:
            try:
                for _ in range(self.processes_num):
                    self._add_slot()
                while not self.should_exit.is_set():
                    self._wait(wakeups)
                    self.handle_signals()
                    self._hear_askers()
                    self.keep_subprocess_alive()
                self._stop_all(wakeups)
            finally:
                for worker in self._workers():
                    worker.kill()
                    worker.close()
        if self._failure is not None:
            raise_failure(self._failure)

    # --- watching ---

    def keep_subprocess_alive(self) -> None:
        """Look at every worker once: take in what it said, replace it if it died or hangs. Does not wait."""
        for worker in self._workers():
            worker.listen()
        self._reap()
        for slot in self._slots:
            self._look_at(slot)
        self._restarts.go_on()
        self._lend_queues()
        if self._announce is not None:
            loaded = next((worker.loaded for worker in self._workers() if worker.loaded is not None), None)
            if loaded is not None:
                self._announce(loaded)
                self._announce = None
        if not self._all_were_ready and all(slot.worker is not None and slot.worker.ready for slot in self._slots):
            self._all_were_ready = True
            fields = {"event": "server_ready", "workers": len(self._slots)}
            logger.info("all %d workers are ready", len(self._slots), extra=fields)

    def _look_at(self, slot: Slot) -> None:
        worker = slot.worker
        if worker is None:
            if self._clock.monotonic() >= slot.retry_at:
                self._fill(slot)
            return
        if worker.ready:
            slot.failures = 0
        if worker.exit_code is None:
            if self._leaves_by_itself(slot, worker):
                # Not when it has exited: what it serves may keep it for long, and all others may leave by then too.
                self._retiring.append(worker)
                self._fill(slot, instead_of=worker.pid)
                return
            # One that still starts may be slow to answer: importing an app can take minutes.
            if not worker.ready or not worker.is_hung(self.config.timeout_worker_healthcheck):
                return
            logger.error(
                "worker [%d] did not answer within %d s and is killed; its sessions are gone",
                worker.pid,
                self.config.timeout_worker_healthcheck,
                extra={"event": "worker_hangs", "pid": worker.pid},
            )
            worker.kill()
        self._replace(slot, worker)

    def _leaves_by_itself(self, slot: Slot, worker: Worker) -> bool:
        """Whether a worker leaves that nobody here has told to: it has served its number of requests, say."""
        if not (worker.ready and worker.leaving and slot.replacement is None):
            return False
        # At most twice as many processes as workers, however fast they leave.
        room = sum(not each.told_to_leave for each in self._retiring) < len(self._slots)
        # A signal to the whole process group reaches the workers too, and they may have heard it first.
        return room and not (self.should_exit.is_set() or self.signal_queue)

    def _replace(self, slot: Slot, worker: Worker) -> None:
        worker.listen()
        exit_code, pid = worker.exit_code, worker.pid
        line, fields = why_it_failed(worker)
        worker.tell(end_of(worker))
        worker.close()
        # A restart may have begun to replace it; that one has only just started, and serves in its place now.
        slot.worker, slot.replacement = slot.replacement, None
        if worker.ready:
            say_exited(pid, exit_code)
            if slot.worker is None:
                self._fill(slot, instead_of=pid)
            else:
                say_replaced(pid, slot.worker.pid)
            return
        if not self._all_were_ready:
            # What fails before the server ever served would fail again: the app, its configuration or its address.
            self._failure = self._failure or worker.failed or Failed(line, usage=False)
            self.should_exit.set()
            return
        self._try_later(slot, line, fields)

    def _fill(self, slot: Slot, *, instead_of: int | None = None) -> None:
        """Start a worker in an empty slot, in the place of the process `instead_of`; if that cannot be now, later."""
        try:
            slot.worker = self._start_worker(slot)
        except OSError as error:
            slot.worker = None
            self._try_later(slot, *why_it_failed(error))
            return
        if instead_of is not None:
            say_replaced(instead_of, slot.worker.pid)

    def _try_later(self, slot: Slot, line: str, fields: dict[str, object]) -> None:
        wait_seconds = slot.try_later(self._clock.monotonic())
        logger.error("a new worker could not start (next try in %d s): %s", wait_seconds, line, extra=fields)

    def _reap(self) -> None:
        for worker in list(self._retiring):
            if worker.exit_code is None and worker.is_hung(self.config.timeout_worker_healthcheck):
                worker.kill()
            if worker.exit_code is not None:
                if worker.told_to_leave:
                    fields = {"event": "worker_stopped", "pid": worker.pid}
                    logger.info("worker [%d] has stopped", worker.pid, extra=fields)
                else:
                    say_exited(worker.pid, worker.exit_code)
                worker.tell(end_of(worker))
                worker.close()
                self._retiring.remove(worker)
                continue
            if worker.overdue and worker.left is None:
                say_told("stop", worker.pid, "stops; its sessions end with it", level=logging.WARNING)
                worker.stop()

    def _add_slot(self) -> None:
        """Raises OSError: there is no descriptor or no process for it, and it is not added."""
        slot = Slot(self._listeners.take())
        try:
            slot.worker = self._start_worker(slot)
        except OSError:
            self._listeners.give_back(slot.listener)
            raise
        self._slots.append(slot)

    def _start_worker(self, slot: Slot) -> Worker:
        return Worker(self.config, slot.listener, self._clock)

    def _lend_queues(self) -> None:
        """Lend the queues that no worker of their own accepts from to all workers that do accept."""
        if self._listeners.shared:
            return
        alone = [
            slot.listener
            for slot in self._slots
            if not any(worker is not None and worker.accepts for worker in (slot.worker, slot.replacement))
        ]
        lent = {each.number: each for each in (*alone, *self._listeners.spare) if each.opened}
        for worker in self._workers():
            worker.lend({number: each for number, each in lent.items() if each is not worker.listener})

    def _workers(self) -> list[Worker]:
        return [
            *(worker for slot in self._slots for worker in (slot.worker, slot.replacement) if worker is not None),
            *self._retiring,
        ]

    def _wait(self, wakeups: socket.socket) -> None:
        handles: list[connection.Connection | socket.socket | int] = [wakeups]
        if self._control is not None and not self.should_exit.is_set():
            handles += self._control.handles
        for worker in self._workers():
            # What an exited worker leaves stays readable: waiting for it again would not wait.
            if worker.exit_code is None:
                handles += worker.wait_handles
        if wakeups in connection.wait(handles, timeout=TICK_SECONDS):
            with contextlib.suppress(BlockingIOError):
                wakeups.recv(4096)
        self._clock.turn()

    @contextlib.contextmanager
    def _signal_wakeups(self) -> Iterator[socket.socket]:
        """A socket that becomes readable when a signal arrives, so that `_wait` need not be short."""
        ours, written_by_python = socket.socketpair()
        with ours, written_by_python:
            ours.setblocking(False)
            written_by_python.setblocking(False)
            before = signal.set_wakeup_fd(written_by_python.fileno(), warn_on_full_buffer=False)
            try:
                yield ours
            finally:
                signal.set_wakeup_fd(before)

    # --- signals ---

    def restart_all(self) -> None:
        """SIGHUP: a rolling restart."""
        self._restarts.begin_all()

    def _hear_askers(self) -> None:
        """Take what was asked over the control socket: a planned restart of one worker."""
        if self._control is None:
            return
        for asker, request in self._control.take():
            serving = (slot.worker for slot in self._slots if slot.worker is not None)
            worker = next((each for each in serving if each.pid == request.drain), None)
            if worker is None:
                leaves = any(each.pid == request.drain for each in self._retiring)
                why = "drains already" if leaves else "is no worker of this server that serves"
                asker.tell(Progress("refused", why=f"process {request.drain} {why}"))
                continue
            self._restarts.begin(worker, asker)

    def _retire(self, worker: Worker) -> None:
        seconds = self.config.drain_seconds
        if worker.ready and seconds > 0:
            say_told("drain", worker.pid, f"drains: its sessions go on until they end, for {seconds:g} s at most")
            worker.drain(seconds)
        else:
            say_told("stop", worker.pid, "stops; its sessions end with it")
            worker.stop()
        self._retiring.append(worker)

    def handle_ttin(self) -> None:
        """SIGTTIN: one worker more."""
        try:
            self._add_slot()
        except OSError as error:
            line, fields = why_it_failed(error)
            logger.error("Received SIGTTIN, but a new worker could not start: %s", line, extra=fields)  # noqa: TRY400
            return
        self.processes_num += 1
        self._say_how_many("SIGTTIN")

    def handle_ttou(self) -> None:
        """SIGTTOU: one worker fewer, once it has drained."""
        if self.processes_num <= 1:
            logger.info("Received SIGTTOU, but one worker has to stay.")
            return
        self.processes_num -= 1
        self._say_how_many("SIGTTOU")
        slot = self._slots.pop()
        self._listeners.give_back(slot.listener)
        for worker in (slot.replacement, slot.worker):
            if worker is not None:
                self._retire(worker)

    def _say_how_many(self, received: str) -> None:
        there_are = "is now 1 worker" if self.processes_num == 1 else f"are now {self.processes_num} workers"
        logger.info("Received %s, there %s.", received, there_are)

    # --- stopping ---

    def _stop_all(self, wakeups: socket.socket) -> None:
        """Ask every worker to stop and wait until all have; a second SIGINT stops waiting for what they serve."""
        for worker in self._workers():
            worker.stop()
        forced_at: float | None = None
        while workers := [worker for worker in self._workers() if worker.exit_code is None]:
            self._wait(wakeups)
            if signal.SIGINT in self.signal_queue and forced_at is None:
                logger.info("Received SIGINT again, not waiting for what is being served.")
                forced_at = self._clock.monotonic()
                for worker in workers:
                    worker.signal(signal.SIGINT)
            self.signal_queue.clear()
            overdue = forced_at is not None and self._clock.monotonic() - forced_at > FORCED_STOP_SECONDS
            for worker in workers:
                worker.listen()
                if overdue or (worker.exit_code is None and worker.is_hung(self.config.timeout_worker_healthcheck)):
                    fields = {"event": "worker_hangs", "pid": worker.pid}
                    logger.error("worker [%d] does not stop and is killed", worker.pid, extra=fields)
                    worker.kill()


def serve(
    config: RunConfig, listeners: Listeners, announce: Callable[[Loaded], None], control: Control | None = None
) -> None:
    """Run the workers of `config` until a signal stops the server. The other arguments: as for `Supervisor`.

    Raises:
        ConfigurationError, StartupError: as `Supervisor.run`.
    """
    raise_open_files_limit()
    try:
        Supervisor(config, listeners, announce, control).run()
    except OSError as error:
        raise StartupError(f"cannot start a worker: {error}") from error
