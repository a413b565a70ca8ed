"""The workers of a soak's server as they come and go, and what became of each.

Not here: which fault hits which of them (`faults`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.soak.oracle import Fate
from tests.support.servers import ServerProcess

WATCH_SECONDS: Final = 0.1
_RESTART_OVER: Final = r"workers were restarted|the restart stops"
_DRAINS: Final = r"worker \[(\d+)\] drains: its sessions go on"
_DRAINED: Final = r"worker \[(\d+)\](?: has drained|: the time to drain is over)"
_STOPS: Final = r"worker \[(\d+)\] stops; its sessions end"
_SEEN_WITHIN_SECONDS: Final = 2.0
"""How long after a line was logged it is seen here, at most, on a busy machine."""


class Workers:
    """The server's workers as they come and go. Made by `watched`, which keeps looking."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.fates: dict[int, Fate] = {}
        self._restarts: list[list[float]] = []
        """When each was asked for, and when it was over."""
        self._restarts_over = 0
        self._drains: dict[int, float] = {}
        """When a worker was seen to drain."""
        self._ended: set[int] = set()
        self._pidfds: dict[int, int] = {}

    def alive(self) -> list[int]:
        """The workers that have not exited, by when they started."""
        return [pid for pid, fate in self.fates.items() if fate.exited == float("inf")]

    def settled(self, count: int) -> bool:
        """So many workers, and none of them about to end."""
        self.look()
        alive = self.alive()
        doomed = any(self.fates[pid].doomed < float("inf") for pid in alive)
        return len(alive) == count and not doomed and not any(over == float("inf") for _, over in self._restarts)

    def look(self) -> None:
        """Take note of new workers, and of restarts that are over."""
        over, before = len(self._server.log.find(_RESTART_OVER)), self._restarts_over
        self._restarts_over = over  # fewer, once the log has dropped its oldest lines
        if over > before:
            for restart in self._restarts:
                restart[1] = min(restart[1], time.monotonic())
        for match in self._server.log.find(_DRAINS):
            self._drains.setdefault(int(match[1]), time.monotonic())
        for pattern in (_DRAINED, _STOPS):
            for match in self._server.log.find(pattern):
                self._ends(int(match[1]))
        for pid in self._server.worker_pids():
            if pid in self.fates:
                continue
            with contextlib.suppress(OSError):
                # Python's resource tracker is a child of the supervisor too.
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    self._watch(pid)

    def _ends(self, pid: int) -> None:
        """A worker has drained, or was stopped without that: from now on, and not before, its sessions may be gone."""
        fate = self.fates.get(pid)
        if pid in self._ended or fate is None:
            return
        self._ended.add(pid)
        began = self._drains.get(pid, fate.born)
        fate.doomed = min(fate.doomed, max(began, time.monotonic() - _SEEN_WITHIN_SECONDS))

    def _watch(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        fate = self.fates[pid] = Fate(pid, born=time.monotonic())
        self._pidfds[pid] = pidfd
        loop = asyncio.get_running_loop()

        def exited() -> None:
            fate.exited = time.monotonic()
            self._forget(pid)

        loop.add_reader(pidfd, exited)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to one worker, unless it is gone."""
        fate = self.fates[pid]
        if number in (signal.SIGKILL, signal.SIGTERM):
            fate.doomed = min(fate.doomed, time.monotonic())
        if number == signal.SIGKILL:
            fate.killed = min(fate.killed, time.monotonic())
        if pid in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[pid], number)

    def restart(self) -> None:
        """SIGHUP to the supervisor: each worker is replaced in turn."""
        self._restarts.append([time.monotonic(), float("inf")])
        self._server.signal(signal.SIGHUP)

    def grow(self) -> None:
        """SIGTTIN: one worker more."""
        self._server.signal(signal.SIGTTIN)

    def shrink(self) -> None:
        """SIGTTOU: one worker fewer; the log says which."""
        self._server.signal(signal.SIGTTOU)

    def close(self) -> None:
        for pid in list(self._pidfds):
            self._forget(pid)


@asynccontextmanager
async def watched(server: ServerProcess) -> AsyncIterator[Workers]:
    """The workers of this server, looked for often enough that none comes and goes unseen."""
    workers = Workers(server)

    async def watch() -> None:
        while True:
            workers.look()
            await asyncio.sleep(WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        workers.look()
        yield workers
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        workers.close()
