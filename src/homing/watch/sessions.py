"""The sessions of a running server: each living worker is asked for its own, and what dead ones leave behind is read off the records.

A worker answers over its private socket, from what it keeps anyway; only this user's processes get an answer. What a
dead worker owned is told by the owner records that still name it.

Not here: what a worker says (`homing.routing.shown`), and how it is shown (`homing.cli`).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec

from homing.clock import boot_seconds
from homing.directory.base import Why
from homing.forwarding.frames import PREFIX_BYTES, SHOW, SHOWN
from homing.forwarding.values import encode_value
from homing.routing.shown import EndedSession, Shown, ShownSession
from homing.rundir import SESSION_OWNERS_DIR, boot_id, worker_socket_path
from homing.types import WorkerId
from homing.watch.figures import Figures
from homing.watch.servers import Server

LIMIT: Final = 1000
"""Sessions of one worker that are asked for, where nobody says how many."""

ANSWER_SECONDS: Final = 5.0
_AT_ONCE: Final = 32
_MAX_PART_BYTES: Final = 2**20

_decoder = msgspec.msgpack.Decoder(Shown)


@dataclass(frozen=True, slots=True)
class WorkerSessions:
    """One worker's sessions.

    Attributes:
        pid: None: it has exited.
        answered: False: it lives, and did not answer in time, so nothing is known of its sessions.
        left_out: Sessions beyond the limit.
    """

    worker: str
    pid: int | None
    sessions: Sequence[ShownSession] = ()
    ended: Sequence[EndedSession] = ()
    left_out: int = 0
    answered: bool = True


def sessions_of(server: Server, *, limit: int = LIMIT) -> list[WorkerSessions]:
    """The sessions of every worker, living ones first. Waits for those that do not answer, at most 5 s for all.

    Args:
        limit: Sessions of one worker, and endings of all dead ones, at most.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        living = list(threads.map(lambda figures: _asked(server.path, figures, limit), server.alive))
    return [*living, *_dead(server, limit)]


def _asked(path: str, figures: Figures, limit: int) -> WorkerSessions:
    shown = ask(path, figures.worker, limit)
    if shown is None:
        return WorkerSessions(figures.worker, figures.pid, answered=False)
    return WorkerSessions(figures.worker, figures.pid, shown.sessions, shown.ended, shown.left_out)


def ask(path: str, worker: str, limit: int, *, seconds: float = ANSWER_SECONDS) -> Shown | None:
    """What a worker says of its sessions; None if it does not answer within so many seconds, or has exited."""
    whole = Shown([], [])
    head = encode_value(limit, "the question")
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(seconds)
            asking.connect(worker_socket_path(path, worker))
            asking.sendall((SHOW | len(head) << 8).to_bytes(PREFIX_BYTES, "little") + head)
            while True:
                prefix = int.from_bytes(_read(asking, PREFIX_BYTES, deadline), "little")
                size = prefix >> 32
                if prefix & 0xFFFFFFFF != SHOWN or size > _MAX_PART_BYTES:
                    return None
                if not size:
                    return whole
                part = _decoder.decode(_read(asking, size, deadline))
                whole = Shown(whole.sessions + part.sessions, whole.ended + part.ended, part.left_out)
    except (OSError, msgspec.MsgspecError):
        return None


def _read(connected: socket.socket, size: int, deadline: float) -> bytes:
    read = bytearray()
    while len(read) < size:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        part = connected.recv(size - len(read))
        if not part:
            raise ConnectionResetError
        read += part
    return bytes(read)


def _dead(server: Server, limit: int) -> Iterable[WorkerSessions]:
    """What the records still say of workers that have exited. Reads every record, and looks closer at the newest."""
    folder = os.path.join(server.path, SESSION_OWNERS_DIR)
    ours = f"{boot_id()}."
    alive = {figures.worker for figures in server.alive}
    left: list[tuple[float, str, WorkerId]] = []
    with contextlib.suppress(OSError), os.scandir(folder) as records:
        for record in records:
            with contextlib.suppress(OSError):
                text = os.readlink(record.path)
                worker = WorkerId(text.removeprefix(ours))
                if text.startswith(ours) and worker not in alive and len(record.name) == 64:
                    # The link was made when the session came here, and nothing touches it after that.
                    left.append((record.stat(follow_symlinks=False).st_mtime, record.name, worker))
    now = time.time()
    # Links have their times by the wall clock, rows by the machine's.
    last_words = {figures.worker: now - (boot_seconds() - figures.written) for figures in server.dead}
    found: dict[str, list[EndedSession]] = {}
    for made, name, worker in heapq.nlargest(limit, left):
        ended = last_words.get(worker)
        age, ago = (None, None) if ended is None else (round(max(0.0, ended - made), 3), round(now - ended, 3))
        found.setdefault(worker, []).append(EndedSession(name[:12], Why.WORKER_EXIT.value, age, ago))
    left_out = len(left) - min(limit, len(left))
    for worker_id, ended_there in found.items():
        yield WorkerSessions(worker_id, None, ended=ended_there, left_out=left_out)
        left_out = 0
