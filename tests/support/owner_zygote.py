"""Many short-lived workers that run nothing but their `SessionOwners` and the hop's questions: real processes, made by fork.

A zygote process imports everything once; a worker is a fork of it (some milliseconds instead of a second). The test talks
to each over a socket of its own, in messages; a worker that is about to stop itself at a failpoint says so first.

Requests stay inside until they are told to leave, so a test holds them open over whatever else happens. What happens to
a session's state is written to a journal, as `owner_history` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import owner_history
from tests.support.owner_history import Journal

from homing.directory import Ask, Given, SessionOwners, failpoints, restores, waiting
from homing.directory.ownership import Entry
from homing.errors import HomingError
from homing.forwarding.base import Answer
from homing.forwarding.forwarder import Forwarder
from homing.forwarding.private_socket import serve_private_socket
from homing.rundir import new_worker_id, worker_socket_path
from homing.types import WorkerId

GIVE_SECONDS = 0.2
HANG_SECONDS = 30.0
_STOPS, _GOES_ON = -1, -2
"""In place of an answer's number: it stops itself at a failpoint next; it has gone on from there."""
_ANSWERS = {Given.GIVEN: Answer.GIVEN, Given.BUSY: Answer.BUSY, Given.NOT_MINE: Answer.NOT_MINE}


class DiedError(Exception):
    """The worker died before it answered."""


class StoppedError(Exception):
    """The worker stopped itself at a failpoint, and answers once it goes on."""


class Zygote:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.owner_zygote", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def fork(self, path: str, journal_fd: int) -> ForkedWorker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker_id = new_worker_id()
        socket.send_fds(self._socket, [json.dumps([path, worker_id]).encode()], [theirs.fileno(), journal_fd])
        theirs.close()
        pid = int(self._socket.recv(100))
        worker = ForkedWorker(worker_id, pid, ours)
        assert worker.answer(0) == "ready"
        return worker

    def close(self) -> None:
        self._socket.close()
        self._process.wait(HANG_SECONDS)


class ForkedWorker:
    """One worker, from the test's side."""

    def __init__(self, worker_id: WorkerId, pid: int, control: socket.socket) -> None:
        self.id = worker_id
        self.pid = pid
        self._control = control
        self._answers: dict[int, Any] = {}
        self._numbers = 0
        self._at_a_point = False
        self.stopped = False
        self.dead = False

    def fileno(self) -> int:
        return self._control.fileno()

    def send(self, command: str, *arguments: Any) -> int:
        """Tell it to do something; the number under which it will answer."""
        self._numbers += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: the answer says so
            self._control.send(json.dumps([self._numbers, command, *arguments]).encode())
        return self._numbers

    def answered(self, number: int, wait_seconds: float) -> bool:
        """Whether it has answered; waits for that, unless it stops or dies."""
        while number not in self._answers and not self.dead:
            if not self._receive(0.0 if self.stopped else wait_seconds):
                return False
        return True

    def answer(self, number: int) -> Any:
        """Its answer; `DiedError` and `StoppedError` if there is none (yet)."""
        if not self.answered(number, HANG_SECONDS):
            if self.stopped:
                raise StoppedError
            raise AssertionError(f"worker {self.id} hangs")
        if number not in self._answers:
            raise DiedError
        return self._answers.pop(number)

    def call(self, command: str, *arguments: Any) -> Any:
        return self.answer(self.send(command, *arguments))

    def hear(self) -> None:
        """Take what it has said meanwhile."""
        while not self.dead and self._receive(0.0):
            pass

    def _receive(self, wait_seconds: float) -> bool:
        if not select.select([self._control], [], [], wait_seconds)[0]:
            return False
        try:
            message = self._control.recv(1 << 20)
        except ConnectionResetError:
            message = b""
        if not message:
            self.dead = True
            return True
        number, answer = json.loads(message)
        if number == _STOPS:
            self._at_a_point = True
            self._wait_until_stopped()
        elif number == _GOES_ON:
            self._at_a_point = False
        else:
            self._answers[number] = answer
        return True

    def _wait_until_stopped(self) -> None:
        """It has said that it stops, and does so next: let go on before that, it would stop for ever."""
        deadline = time.monotonic() + HANG_SECONDS
        with contextlib.suppress(OSError):
            while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < deadline, f"worker {self.id} does not stop"
                os.sched_yield()
        self.stopped = True

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # a failpoint has killed it, which is heard of later
            os.kill(self.pid, signal.SIGSTOP)
            self.stopped = True

    def stop_now(self) -> None:
        """As `stop`, and wait until it runs no more."""
        self.stop()
        self._wait_until_stopped()

    def go_on(self) -> None:
        self._wait_until_stopped()
        self.hear()  # it may have come to a point just before it was paused
        self.stopped = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            while self._at_a_point and not self._receive(0.01) and not self.dead:
                os.kill(self.pid, signal.SIGCONT)  # paused between its word and its own signal, it has stopped again

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.hear_its_death()

    def hear_its_death(self) -> None:
        while not self.dead:
            assert self._receive(HANG_SECONDS), f"worker {self.id} does not die"
        self.stopped = False

    def close(self) -> None:
        if not self.dead:
            self.kill()
        self._control.close()


# --- the other side ---


class _Worker:
    """One worker, in its process."""

    def __init__(self, path: str, worker_id: WorkerId, control: socket.socket, journal: Journal) -> None:
        self.id = worker_id
        self._path = path
        self._control = control
        self._journal = journal
        self.states: dict[str, int] = {}
        self._ended_here: set[str] = set()
        self._kept: Counter[str] = Counter()
        self._inside: dict[int, tuple[str, Entry]] = {}
        self._commands: set[asyncio.Task[None]] = set()
        self._cancellable: set[asyncio.Task[None]] = set()
        self.owners = SessionOwners(path, worker_id, self._holds, drop=self._drop)
        self.forwarder = Forwarder(path, owner_timeout_seconds=HANG_SECONDS)
        self._over = asyncio.Event()

    # --- what owners are given ---

    def _holds(self, session_id: str) -> bool:
        return session_id in self.states or self._kept[session_id] > 0

    def _drop(self, session_id: str) -> None:
        if session_id in self.states:
            self._journal(owner_history.DROPPED, session_id)
            del self.states[session_id]
        self._ended_here.discard(session_id)

    def _opener(self, token: int) -> Callable[[str], None]:
        def opened(session_id: str) -> None:
            self._journal(owner_history.OPENED, session_id, token)
            self.states[session_id] = token
            self._ended_here.discard(session_id)

        return opened

    def _end(self, session_id: str) -> None:
        if session_id in self.states:
            self._journal(owner_history.ENDED, session_id)
            del self.states[session_id]
            self._ended_here.add(session_id)

    def _asking(self, fails: str) -> Ask:
        """Asks that fail though the owner lives: `before` it is asked, or `after` its answer; empty: none does."""

        async def ask(owner: WorkerId, session_id: str) -> Given:
            if fails == "before":
                raise BlockingIOError("its backlog is full")
            answer = await self.forwarder.ask(owner, self.owners.kind, session_id, self.id)
            if fails == "after":
                raise ConnectionResetError("the answer was lost")
            return Given[answer.name]

        return ask

    async def _asked(self, kind: str, key: str, asker: str, hung_up: asyncio.Event) -> Answer:
        return _ANSWERS[await self.owners.give(key, WorkerId(asker), timeout_seconds=GIVE_SECONDS, hung_up=hung_up)]

    # --- commands ---

    async def start(self, session_id: str, number: int, token: int) -> str:
        """As the router does with a start: enter, or acquire and enter, in one block."""
        entry = self.owners.try_enter(session_id)
        if entry is None:
            if self.owners.mine(session_id) or self.owners.acquire(session_id) != self.id:
                return "elsewhere"
            if not self.owners.mine(session_id):
                return "moving"
            self._journal(owner_history.BEGAN, session_id, token)
            self.states[session_id] = token
            try:
                entry = self.owners.enter(session_id)
            except HomingError:
                self._end(session_id)
                self.owners.release(session_id)
                raise
        elif session_id in self._ended_here:  # in its window: it begins again
            self._journal(owner_history.BEGAN, session_id, token)
            self.states[session_id] = token
        return self._in(session_id, number, entry)

    async def request(self, session_id: str, number: int) -> str:
        """As the router does with any other request."""
        entry = self.owners.try_enter(session_id)
        if entry is None:
            return "elsewhere"
        if session_id in self._ended_here:
            self.owners.leave(entry)
            return "ended"
        return self._in(session_id, number, entry)

    def _in(self, session_id: str, number: int, entry: Entry) -> str:
        self._ended_here.discard(session_id)
        self._journal(owner_history.ENTERED, session_id, self.states.get(session_id, 0))
        self._inside[number] = session_id, entry
        return "inside"

    async def leave(self, number: int, ends: bool) -> None:
        if number not in self._inside:
            return
        session_id, entry = self._inside.pop(number)
        if ends:
            self._end(session_id)
        self._journal(owner_history.LEFT, session_id)
        self.owners.leave(entry)

    async def release(self, session_id: str) -> None:
        """As a sweep does with a session whose time is over."""
        if not self.owners.served_now(session_id) and not self._kept[session_id]:
            self._end(session_id)
        self.owners.release(session_id)
        self.owners.release_pending()

    @contextlib.contextmanager
    def _told_of_failure(self, token: int) -> Iterator[None]:
        """A caller that is told of a failure lets its state go: nothing may open that any more."""
        try:
            yield
        except BaseException:
            self._journal(owner_history.FAILED, token=token)
            raise

    async def restore(self, session_id: str, token: int, deadline_seconds: float, asks_fail: str = "") -> None:
        with self._told_of_failure(token):
            await self.owners.restore(
                session_id,
                self._asking(asks_fail),
                deadline_seconds=deadline_seconds,
                opened=self._opener(token),
            )

    async def rewrite(self, session_id: str, token: int) -> None:
        was_mine = self.owners.mine(session_id)
        self.owners.rewrite(session_id)
        if not was_mine:
            self._opener(token)(session_id)

    async def rewrite_all(self, session_ids: list[str], token: int, asks_fail: str = "") -> None:
        self._kept.update(session_ids)
        try:
            with self._told_of_failure(token):
                await self.owners.rewrite_all(
                    session_ids,
                    self._asking(asks_fail),
                    deadline_seconds=GIVE_SECONDS,
                    opened=self._opener(token),
                )
        except BaseException:
            self._kept.subtract(session_ids)
            for session_id in session_ids:  # what it has taken is known: the caller lets go of it
                if self.states.get(session_id) == token and not self.owners.served_now(session_id):
                    self._end(session_id)
                    self.owners.release(session_id)
            raise
        self._kept.subtract(session_ids)

    async def cancel(self) -> int:
        """Cancel every restore and rewrite under way, twice."""
        found = list(self._cancellable)
        for _ in range(2):
            for task in found:
                task.cancel()
            await asyncio.sleep(0)
        return len(found)

    async def compact(self, limit: int) -> int:
        self._journal(owner_history.COMPACTS)
        try:
            return await self.owners.compact(limit)
        finally:
            self._journal(owner_history.COMPACTED)

    async def disown(self, session_id: str) -> None:
        self.owners.disown(session_id)

    async def arm(self, point: str, action: str) -> None:
        """At the point, the next time: die, stop, or cancel every restore and rewrite. Then it is off again."""
        loop = asyncio.get_running_loop()

        def act() -> None:
            failpoints.on = None
            if action == "kill":
                self._journal(owner_history.DIES)
                os.kill(os.getpid(), signal.SIGKILL)
            elif action == "cancel":
                cancelled = asyncio.run_coroutine_threadsafe(self.cancel(), loop)
                if threading.current_thread() is not threading.main_thread():
                    cancelled.result(HANG_SECONDS)  # the thread goes on once they have heard of it
            else:
                self._control.send(json.dumps([_STOPS, point]).encode())
                os.kill(os.getpid(), signal.SIGSTOP)
                self._control.send(json.dumps([_GOES_ON, point]).encode())

        failpoints.on = {point: act}

    async def settle(self) -> None:
        """Let all requests leave, and everything under way end."""
        failpoints.on = None
        for number in list(self._inside):
            await self.leave(number, False)
        while under_way := self._commands - {asyncio.current_task()}:
            await asyncio.wait(under_way)

    async def books(self) -> dict[str, Any]:
        """What this worker believes."""
        self.owners.release_pending()
        return {
            "mine": sorted(self.owners.owned_ids()),
            "states": self.states,
            "looks": repr(self.owners),
            "lost": self.owners.counters.lost,
        }

    # --- the loop ---

    def _told(self) -> None:
        try:
            message = self._control.recv(1 << 20)
        except BlockingIOError:
            return
        if not message:
            self._over.set()
            return
        number, command, *arguments = json.loads(message)
        task = asyncio.get_running_loop().create_task(self._do(number, command, arguments))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _do(self, number: int, command: str, arguments: list[Any]) -> None:
        answer: Any
        task = asyncio.current_task()
        if task is not None and command in ("restore", "rewrite_all"):
            # From here on: cancelled before it had begun, it would not answer.
            self._cancellable.add(task)
            task.add_done_callback(self._cancellable.discard)
        try:
            answer = await getattr(self, command)(*arguments)
        except (HomingError, asyncio.CancelledError) as error:
            answer = type(error).__name__
        except Exception:
            answer = ["bug", traceback.format_exc()]
        self._control.send(json.dumps([number, answer]).encode())

    async def run(self) -> None:
        async def nothing(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("no requests come this way")

        async with (
            self.forwarder,
            serve_private_socket(nothing, worker_socket_path(self._path, self.id), on_ask=self._asked),
        ):
            loop = asyncio.get_running_loop()
            loop.add_reader(self._control, self._told)
            self._control.send(json.dumps([0, "ready"]).encode())
            await self._over.wait()
        os._exit(0)


def _worker(path: str, worker_id: WorkerId, control: socket.socket, journal_fd: int) -> None:
    # Waits that are there for other processes' sake: short, so that a test waits no longer than it has to.
    restores.BETWEEN_ASKS_SECONDS = 0.002  # type: ignore[misc]
    waiting.LOCK_SECONDS = 0.02  # type: ignore[misc]
    control.setblocking(False)

    async def main() -> None:
        await _Worker(path, worker_id, control, Journal(journal_fd, worker_id)).run()

    asyncio.run(main())


def _bury(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _serve(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, _bury)
    logging.disable(logging.WARNING)
    gc.freeze()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 10_000, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                path, worker_id = json.loads(message)
                _worker(path, WorkerId(worker_id), socket.socket(fileno=fds[0]), fds[1])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
