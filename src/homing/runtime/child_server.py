"""A server that a command starts beside itself, such as a demo's: a process of its own with all its workers.

The invariant: once it is closed, none of its processes is left, however it ended. SIGTERM and SIGHUP (the terminal was closed),
which would end the process that started it and nothing else, close it first; and if that process is killed, the kernel tells the
server to stop (on Linux).

Not here: what is served, and what a server is told by its environment but that it shall not inherit this one's.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from homing.errors import StartupError

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0

_ADDRESS: Final = re.compile(r"running on (https?://\S+:\d+)")
_LINES_KEPT: Final = 20


def clean_environment(*, keep: tuple[str, ...] = ()) -> dict[str, str]:
    """This process's variables without those that say how a server runs, `keep` excepted: a child has its own options."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "WEB_CONCURRENCY" and (name in keep or not name.startswith(("UVICORN_", "HOMING_")))
    }


_ENDING_WITH_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, prctl(2): it outlives what follows
if os.getppid() != int(sys.argv[1]):
    sys.exit("its parent has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _ends_with_this_process() -> tuple[str, ...]:
    """What goes before a command that the kernel shall tell to stop when this process has ended; nothing if there is no way.

    Not `preexec_fn`: in a process with threads, a child that was forked must not run Python.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return ()  # made by another thread, it would be told of that one's end
    return (sys.executable, "-I", "-S", "-c", _ENDING_WITH_PARENT, str(os.getpid()))


class ChildServer:
    """One server's processes. `close` stops them, and waits until they are gone.

    Args:
        name: What it is called in errors.
        command: Program and arguments: a uvicorn command or one of ours, with `--port 0`.
        environment: All its variables.
        ready: What its log says once it is ready; None: it is when it has said its address.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, ready: str | None = None
    ) -> None:
        self.name = name
        self._ready_text = ready
        self._said: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._url: str | None = None
        self._ready = threading.Event()
        self._process = subprocess.Popen(  # noqa: S603 - our own command, and nothing that a stranger typed
            [*_ends_with_this_process(), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C reaches this process alone, which then stops its servers in its own order.
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"homing reads {name}")
        self._reader.start()
        _close_at_signals(self)

    def __repr__(self) -> str:
        return f"<ChildServer {self.name} {self._url}>"

    def wait_until_ready(self) -> str:
        """The server's address, `http://host:port`. Waits; a `close` meanwhile ends the wait.

        Raises:
            StartupError: it ended, or did not get ready in time; with the last that it said.
        """
        if not self._ready.wait(START_SECONDS) or self._url is None:
            said = " / ".join(self._said) or "it said nothing"
            raise StartupError(f"the {self.name} server did not start: {said}")
        return self._url

    def _read(self) -> None:
        assert self._process.stderr is not None
        ready = self._ready_text is None
        for line in self._process.stderr:
            self._said.append(line.strip())
            if found := _ADDRESS.search(line):
                self._url = found[1]
            ready = ready or (self._ready_text is not None and self._ready_text in line)
            if ready and self._url is not None:
                self._ready.set()
        self._ready.set()  # it ended: nobody needs to wait any longer

    def terminate(self) -> None:
        """Ask it to stop. Does not wait; nothing happens if it has ended."""
        self._process.terminate()

    def close(self) -> None:
        """Safe to call twice."""
        _open.discard(self)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                # The whole group at last: a supervisor that is killed cannot stop its workers.
                os.killpg(self._process.pid, number) if number == signal.SIGKILL else self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()


_open: Final[set[ChildServer]] = set()


def _close_at_signals(server: ChildServer) -> None:
    _open.add(server)
    if threading.current_thread() is not threading.main_thread():
        return  # nobody else may set a handler
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Whoever has a handler of their own closes what they opened, and `nohup` has it ignored.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _close_all_and_end)


def _close_all_and_end(number: int, frame: object) -> None:
    """End as the signal does, once no server is left."""
    servers = list(_open)
    for each in servers:  # all at once, and then wait for each
        each.terminate()
    for each in servers:
        each.close()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextlib.asynccontextmanager
async def child_server(
    name: str, command: Sequence[str], environment: Mapping[str, str], *, ready: str | None = None
) -> AsyncIterator[str]:
    """A `ChildServer` for asyncio: gives its address once it is ready, and closes it.

    Raises:
        StartupError: as `wait_until_ready`.
    """
    server = ChildServer(name, command, environment, ready=ready)
    try:
        yield await asyncio.to_thread(server.wait_until_ready)
    finally:
        await asyncio.shield(asyncio.to_thread(server.close))
