"""The process that starts a server's workers, watches them, replaces them and stops them.

A small subclass of uvicorn's supervisor: its signals and its words, with these differences. A worker that does not
answer never delays the others or a signal (uvicorn waits for each answer in turn). A replacement that fails to start is
tried again while the other workers keep their sessions (uvicorn stops the whole server). A rolling restart goes on
beside everything else, however long an old worker drains; and it drains: its sessions go on until they end, or for
`drain_seconds`. A queue of connections that no worker of its own accepts from is lent to the others.

The invariant: when `serve` returns or raises, no worker is left.

Not here: the run directory (`server_directory.py`), one worker as seen from here (`process.py`), and what it does (`worker.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Final

from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess

from homing.errors import StartupError
from homing.runtime.config import RunConfig
from homing.runtime.control import Control, Progress
from homing.runtime.heartbeat import LoopClock
from homing.runtime.link import Failed, Loaded, raise_failure
from homing.runtime.listeners import Listener, Listeners
from homing.runtime.process import PING_SECONDS, Worker

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = PING_SECONDS
FORCED_STOP_SECONDS: Final = 5.0
_FIRST_RETRY_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 30.0


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one: each worker holds connections of clients and of peers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports no hard limit and refuses it as a soft one; its own limit then stays.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass
class _Slot:
    """One of the server's N places for a worker; empty while a replacement that failed waits for its next try."""

    listener: Listener
    worker: Worker | None
    replacement: Worker | None = None
    failures: int = 0
    retry_at: float = 0.0


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
        self._slots: list[_Slot] = []
        self._retiring: list[Worker] = []
        self._to_restart: list[Worker] = []
        """Workers, not slots: one that has died meanwhile is not to be taken for the one that serves in its place."""
        self._all_restart = False
        self._announce: Callable[[Loaded], None] | None = announce
        self._all_were_ready = False
        self._failure: Failed | None = None

    def __repr__(self) -> str:
        return f"<Supervisor {os.getpid()}: {len(self._slots)} workers, {len(self._retiring)} retiring>"

    def run(self) -> None:
        """Start the workers and keep them running; return once a signal stopped the server and all are gone.

        Raises:
            ConfigurationError, StartupError: a worker could not start serving; all others were stopped.
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
        self._go_on_restarting()
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

    def _look_at(self, slot: _Slot) -> None:
        worker = slot.worker
        if worker is None:
            if self._clock.monotonic() >= slot.retry_at:
                slot.worker = self._start_worker(slot.listener)
            return
        if worker.ready:
            slot.failures = 0
        if worker.exit_code is None:
            if self._leaves_by_itself(slot, worker):
                # Not when it has exited: what it serves may keep it for long, and all others may leave by then too.
                self._retiring.append(worker)
                slot.worker = self._start_worker(slot.listener)
                _say_replaced(worker.pid, slot.worker.pid)
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

    def _leaves_by_itself(self, slot: _Slot, worker: Worker) -> bool:
        """Whether a worker leaves that nobody here has told to: it has served its number of requests, say."""
        if not (worker.ready and worker.leaving and slot.replacement is None):
            return False
        # At most twice as many processes as workers, however fast they leave.
        room = sum(not each.told_to_leave for each in self._retiring) < len(self._slots)
        # A signal to the whole process group reaches the workers too, and they may have heard it first.
        return room and not (self.should_exit.is_set() or self.signal_queue)

    def _replace(self, slot: _Slot, worker: Worker) -> None:
        worker.listen()
        exit_code, pid = worker.exit_code, worker.pid
        worker.tell(_end_of(worker))
        worker.close()
        # A restart may have begun to replace it; that one has only just started, and serves in its place now.
        slot.worker, slot.replacement = slot.replacement, None
        if worker.ready:
            _say_exited(pid, exit_code)
            if slot.worker is None:
                slot.worker = self._start_worker(slot.listener)
            _say_replaced(pid, slot.worker.pid)
            return
        if not self._all_were_ready:
            # What fails before the server ever served would fail again: the app, its configuration or its address.
            self._failure = self._failure or worker.failed or Failed(_startup_line(pid, exit_code), usage=False)
            self.should_exit.set()
            return
        slot.failures += 1
        wait_seconds = min(_FIRST_RETRY_SECONDS * 2 ** (slot.failures - 1), _LONGEST_RETRY_SECONDS)
        slot.retry_at = self._clock.monotonic() + wait_seconds
        line = worker.failed.line if worker.failed else _startup_line(pid, exit_code)
        fields = {"event": "worker_failed", "pid": pid, "exit_code": exit_code}
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
                    _say_exited(worker.pid, worker.exit_code)
                worker.tell(_end_of(worker))
                worker.close()
                self._retiring.remove(worker)
                continue
            if worker.overdue and worker.left is None:
                _say_told("stop", worker.pid, "stops; its sessions end with it", level=logging.WARNING)
                worker.stop()

    def _add_slot(self) -> None:
        listener = self._listeners.take()
        self._slots.append(_Slot(listener, self._start_worker(listener)))

    def _start_worker(self, listener: Listener) -> Worker:
        return Worker(self.config, listener, self._clock)

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
        """Begin a rolling restart (SIGHUP): each worker's replacement serves before the worker is asked to leave.

        Asked for again meanwhile, the replacements that have started already have their turn too: what they serve may have
        changed since.
        """
        newest = (slot.replacement or slot.worker for slot in self._slots)
        self._to_restart += [worker for worker in newest if worker is not None and worker not in self._to_restart]
        self._all_restart = bool(self._to_restart)

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
            worker.asking.append(asker)
            asker.tell(Progress("waiting"))
            if worker not in self._to_restart:
                self._to_restart.append(worker)

    def _go_on_restarting(self) -> None:
        if not self._to_restart:
            return
        old = self._to_restart[0]
        slot = next((each for each in self._slots if each.worker is old), None)
        if slot is None:
            # It has died or left meanwhile, or SIGTTOU took it away. What serves in its place began after this was asked for.
            self._restarted()
            return
        if any(worker.told_to_leave for worker in self._retiring):
            return  # one at a time: memory for one more worker, not for twice as many
        if slot.replacement is None:
            slot.replacement = self._start_worker(slot.listener)
            old.tell(Progress("starting", slot.replacement.pid))
            return
        new = slot.replacement
        if new.ready:
            slot.worker, slot.replacement = new, None
            _say_replaced(old.pid, new.pid)
            old.replaced_by = new.pid
            old.tell(Progress("draining", new.pid))
            self._retire(old)
            self._restarted()
        elif new.exit_code is not None:
            new.listen()
            line = new.failed.line if new.failed else _startup_line(new.pid, new.exit_code)
            fields = {"event": "worker_failed", "pid": new.pid, "exit_code": new.exit_code}
            logger.error(
                "the restart stops, and the workers that run go on: a new worker could not start: %s",
                line,
                extra=fields,
            )
            new.close()
            slot.replacement = None
            for each in self._to_restart:
                each.tell(Progress("failed", why=f"a new worker could not start: {line}"))
            self._to_restart.clear()
            self._all_restart = False

    def _restarted(self) -> None:
        """The first of the workers to restart is done with."""
        self._to_restart.pop(0)
        if not self._to_restart and self._all_restart:
            self._all_restart = False
            fields = {"event": "server_restarted", "workers": len(self._slots)}
            logger.info("all %d workers were restarted", len(self._slots), extra=fields)

    def _retire(self, worker: Worker) -> None:
        seconds = self.config.drain_seconds
        if worker.ready and seconds > 0:
            _say_told("drain", worker.pid, f"drains: its sessions go on until they end, for {seconds:g} s at most")
            worker.drain(seconds)
        else:
            _say_told("stop", worker.pid, "stops; its sessions end with it")
            worker.stop()
        self._retiring.append(worker)

    def handle_ttin(self) -> None:
        """SIGTTIN: one worker more."""
        self.processes_num += 1
        self._say_how_many("SIGTTIN")
        self._add_slot()

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


def _say_told(what: str, pid: int, says: str, *, level: int = logging.INFO) -> None:
    """A worker was told to do something."""
    logger.log(level, "worker [%d] %s", pid, says, extra={"event": "worker_told", "pid": pid, "to": what})


def _say_exited(pid: int, exit_code: int | None) -> None:
    """A worker that nobody had told to stop."""
    fields = {"event": "worker_exited", "pid": pid, "exit_code": exit_code}
    logger.warning("worker [%d] exited (%s); its sessions are gone", pid, _exit_text(exit_code), extra=fields)


def _say_replaced(pid: int, by: int) -> None:
    fields = {"event": "worker_replaced", "pid": pid, "by": by}
    logger.info("worker [%d] is replaced by worker [%d]", pid, by, extra=fields)


def _exit_text(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    # Of the real-time signals only the first and the last have a name.
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-exit_code, -exit_code)}"


def _end_of(worker: Worker) -> Progress:
    """What to say of a worker that was to drain, and has exited."""
    if worker.left is None:
        why = f"worker [{worker.pid}] exited before it had drained ({_exit_text(worker.exit_code)}); its sessions are gone"
        return Progress("failed", worker.replaced_by, why=why)
    return Progress("drained", worker.replaced_by, sessions=worker.left)


def _startup_line(pid: int, exit_code: int | None) -> str:
    if exit_code == STARTUP_FAILURE:
        return "the app's start-up failed; its own message is above"
    return f"worker [{pid}] exited before it could serve ({_exit_text(exit_code)})"


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
