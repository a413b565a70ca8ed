"""Workers that are processes and run nothing but their `SessionOwners`, told what to do through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from homing.directory import Given, SessionOwners
from homing.directory.failpoints import FAILPOINTS_ENV
from homing.rundir import new_worker_id
from homing.types import WorkerId

_SPAWN = multiprocessing.get_context("spawn")


class OwnerProcess:
    """One worker. Its calls block until it has answered, or raise EOFError if it died instead."""

    def __init__(self, path: str, failpoints: str = "") -> None:
        self.id = new_worker_id()
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_main, args=(path, self.id, theirs), daemon=True)
        with _environment(FAILPOINTS_ENV, failpoints):
            self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, command: str, *arguments: Any) -> None:
        self._pipe.send((command, *arguments))

    def answer(self) -> Any:
        """What the last command came to; an error it raised is raised here."""
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, command: str, *arguments: Any) -> Any:
        self.send(command, *arguments)
        return self.answer()

    async def asked(self, asker: WorkerId, session_id: str) -> Given:
        """Ask it for a session, as the hop does: a broken connection if it dies meanwhile."""
        try:
            return Given(await asyncio.to_thread(self.call, "give", session_id, asker))
        except (EOFError, OSError) as error:
            raise ConnectionResetError(self.id) from error

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        self._process.join()

    def stop_signal(self) -> None:
        """Wait until it has stopped itself (a failpoint)."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _main(path: str, worker_id: WorkerId, pipe: Connection) -> None:
    asyncio.run(_serve(path, worker_id, pipe))


async def _serve(path: str, worker_id: WorkerId, pipe: Connection) -> None:
    held: set[str] = set()
    owners = SessionOwners(path, worker_id, held.__contains__, drop=held.discard)

    async def nobody(owner: WorkerId, session_id: str) -> Given:
        raise ConnectionRefusedError(owner)

    async def do(command: str, *arguments: Any) -> Any:
        match command, arguments:
            case "acquire", (str(session_id),):
                held.add(session_id)
                return owners.acquire(session_id)
            case "release", (str(session_id),):
                held.discard(session_id)
                return owners.release(session_id)
            case "give", (str(session_id), str(to)):
                return int(await owners.give(session_id, WorkerId(to), timeout_seconds=10))
            case "restore", (str(session_id),):
                return await owners.restore(session_id, nobody, deadline_seconds=10, opened=held.add)
            case "mine", (str(session_id),):
                return owners.mine(session_id)
            case "fork", ():
                return _forked()
        raise AssertionError(command)

    pipe.send("ready")
    while True:
        try:
            command = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        try:
            answer = await do(*command)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
    await owners.aclose()


def _forked() -> int:
    """Fork a child that outlives this process until it is killed; its PID, once it runs."""
    runs, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(says, b".")
        signal.pause()
        os._exit(0)
    os.read(runs, 1)
    os.close(runs)
    os.close(says)
    return pid
