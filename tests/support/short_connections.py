"""Clients that connect, ask once and close, over and over, and what became of each connection.

Which connections a worker has accepted is seen from outside (`accepted_by`): the kernel says which sockets of a port a process
holds, and which nobody has accepted yet. Source: proc(5), `/proc/net/tcp`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_TIMEOUT_SECONDS: Final = 60.0
_ESTABLISHED, _LISTEN = "01", "0A"


@dataclass(frozen=True, slots=True)
class Broken:
    """A connection that did not end as it should."""

    port: int
    how: str
    began: float
    ended: float


@dataclass
class Clients:
    """So many clients at once, each in a thread of its own, until `stop`.

    Attributes:
        answered: How many connections were answered with 200 and closed in an orderly way, by the process that answered.
        broken: All others.
    """

    port: int
    path: str = "/"
    answered: dict[str, int] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._run, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop once what is under way has ended."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_SECONDS + 10)
            assert not thread.is_alive()

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.answered.values()) + len(self.broken)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            port, how, said = ask(self.port, self.path)
            with self._lock:
                if how == "answered":
                    self.answered[said] = self.answered.get(said, 0) + 1
                else:
                    self.broken.append(Broken(port, how, began, time.monotonic()))


def ask(server: int, path: str = "/", *, timeout_seconds: float = _TIMEOUT_SECONDS) -> tuple[int, str, str]:
    """One request on a connection of its own: the client's port, what became of it, and the reply's last word."""
    received = b""
    with socket.socket() as connection:
        connection.settimeout(timeout_seconds)
        port = 0
        try:
            connection.connect(("127.0.0.1", server))
            port = connection.getsockname()[1]
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
            while data := connection.recv(65536):
                received += data
        except TimeoutError:
            return port, f"not answered within {timeout_seconds} s", ""
        except OSError as error:
            with contextlib.suppress(OSError):
                port = port or connection.getsockname()[1]
            return port, f"{type(error).__name__} after {len(received)} bytes", ""
    status = received[9:12].decode()
    if status != "200":
        return port, f"answered {status}: {received[:300]!r}" if received else "closed without an answer", ""
    return port, "answered", received.split()[-1].decode()


def _rows(server: int) -> list[list[str]]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row for row in rows if int(row[1].rpartition(":")[2], 16) == server]


def listening_sockets(server: int) -> int:
    """How many sockets listen on a port."""
    return sum(row[3] == _LISTEN for row in _rows(server))


def not_accepted(server: int) -> int:
    """How many connections of a port nobody has accepted yet."""
    return sum(row[3] == _ESTABLISHED and row[9] == "0" for row in _rows(server))


def accepted_by(pid: int, server: int) -> set[int]:
    """The clients' ports of the connections that a process holds."""
    held = _held(pid)
    return {int(row[2].rpartition(":")[2], 16) for row in _rows(server) if row[3] != _LISTEN and row[9] in held}


def listens_at(pid: int, server: int) -> int:
    """How many of the sockets that listen on a port a process holds."""
    held = _held(pid)
    return sum(row[3] == _LISTEN and row[9] in held for row in _rows(server))


def _held(pid: int) -> set[str]:
    """The sockets that a process has open, by their inodes."""
    held = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    return held
