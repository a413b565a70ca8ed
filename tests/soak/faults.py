"""What is done to a running server: to its workers, its disk, its descriptors and its records, in an order the seed fixes.

A fault that hits a worker is aimed at one that has requests under way, and says how many it hit. The invariant: what was stopped goes on again, and what was made wrong is made right again, whatever happens
here; no process is touched but this soak's own server and its workers.

`ROWS` says which rows of `docs/design/faults.md` each kind raises. Not here: what clients do that no client should (`load`
counts those), and rows that a running server cannot meet, which have tests of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from tests.soak.load import ANSWER_SECONDS, Client, Load
from tests.soak.oracle import Outcome, Window
from tests.soak.place import MANY_INODES, Place, without_descriptors
from tests.soak.workers import WATCH_SECONDS, Workers
from tests.support.raw import WireError, connect, request

_TWO_WORKERS_SECONDS: Final = 120.0
_TRIES_FROM_INSIDE: Final = 3
_WALL_CLOCK_SHIFTS: Final = (-86_400.0, -3_600.0, 3_600.0, 86_400.0)
_GARBAGE: Final = "nobody"

KINDS: Final = {
    "kill": 16,
    "stop": 16,
    "full backlog": 5,
    "term": 5,
    "term two": 2,
    "restart": 2,
    "resize": 2,
    "no room": 4,
    "descriptors": 4,
    "block": 5,
    "clock": 3,
    "fork": 3,
    "record": 3,
}
"""How often each comes, relative to the others."""

ROWS: Final = {
    "kill": "F1 F2 F3 F4 F20",
    "stop": "F14",
    "full backlog": "F13",
    "term": "F8",
    "term two": "F9",
    "restart": "F33",
    "resize": "F33",
    "no room": "F10",
    "descriptors": "F11",
    "block": "F26",
    "clock": "F18",
    "fork": "F19",
    "record": "F29",
    "read slowly": "F15",
    "wrote slowly": "F16",
    "left inside the request": "F17",
    "left while it was served": "F17",
    "left inside a stream": "F17",
    "started by several at once": "F23",
    "closed while others use and start it": "F24",
    "used again as its idle time ended": "F25",
    "the app raised": "F31",
}
"""The rows of `docs/design/faults.md` that each kind raises, those of the clients included."""


@dataclass(slots=True)
class Fault:
    """One that was injected.

    Attributes:
        hit: How many requests were under way for sessions of the worker, or of any worker where all are concerned.
        streams: How many of these were streams.
    """

    kind: str
    time: float
    pid: int
    hit: int
    streams: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A fault to come: how long after the one before it, and which kind; `choice` picks among workers."""

    after_seconds: float
    kind: str
    choice: float
    seconds: float


def plan(random: Random, seconds: float, *, every_seconds: float, kinds: dict[str, int] = KINDS) -> list[Plan]:
    """Faults for a soak of so many seconds; the first ones are one of each kind, in some order."""
    first = list(kinds)
    random.shuffle(first)
    plans: list[Plan] = []
    at = 0.0
    while True:
        kind = first.pop() if first else random.choices(list(kinds), list(kinds.values()))[0]
        lasts = random.uniform(0.2, 3.0) if random.random() < 0.92 else random.uniform(4.0, 10.0)
        planned = Plan(random.uniform(0.4, 1.6) * every_seconds, kind, random.random(), lasts)
        at += planned.after_seconds
        if at >= seconds:
            return plans
        plans.append(planned)


class Injector:
    """Carries out a plan, and keeps what it did."""

    def __init__(self, load: Load, workers: Workers, place: Place, ready: Callable[[], list[int]]) -> None:
        self._load = load
        self._workers = workers
        self._place = place
        self._ready = ready
        self._stopped: set[int] = set()
        self._hindered: set[int] = set()
        self._disk = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._random = Random(0)
        self._records = 0
        self.faults: list[Fault] = []
        self.windows: list[Window] = []

    async def run(self, plans: list[Plan], seconds: float) -> None:
        """The faults of the plan, each when its time has come, and two workers are there; none after so many seconds."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as self._tasks:
            try:
                for planned in plans:
                    await asyncio.sleep(planned.after_seconds)
                    if time.monotonic() > until:
                        break
                    async with asyncio.timeout(_TWO_WORKERS_SECONDS):
                        while len(able := self._able()) < 2:
                            await asyncio.sleep(WATCH_SECONDS)
                    self._inject(planned, able)
            finally:
                for pid in list(self._stopped):
                    self._go_on(pid)

    def _able(self) -> list[int]:
        """The workers that serve, and that no fault of ours has ended, stopped or hindered."""
        self._workers.look()
        return [
            pid
            for pid in self._ready()
            if pid not in self._stopped | self._hindered and self._workers.fates[pid].doomed == float("inf")
        ]

    def _note(self, kind: str, pid: int = 0, *, hit: int | None = None, seconds: float = 0.0) -> Fault:
        pids = [pid] if pid else self._workers.alive()
        hits = sum(map(self._load.hit, pids)) if hit is None else hit
        streams = sum(self._load.hit(each, streams=True) for each in pids)
        fault = Fault(kind, time.monotonic(), pid, hits, streams, seconds)
        self.faults.append(fault)
        return fault

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(what)

    def _inject(self, planned: Plan, able: list[int]) -> None:
        workers = self._workers
        pid = self._aimed(planned, able)
        match planned.kind:
            case "restart":
                self._note("restart")
                workers.restart()
            case "resize":
                self._do(self._resize(planned.seconds))
            case "kill":
                self._note("kill", pid)
                workers.signal(pid, signal.SIGKILL)
            case "term":
                self._note("term", pid)
                workers.signal(pid, signal.SIGTERM)
            case "term two":
                # One worker at least goes on undisturbed.
                for each in [pid, *(other for other in able if other != pid)][: min(2, len(able) - 1)]:
                    self._note("term two", each)
                    workers.signal(each, signal.SIGTERM)
            case "stop":
                self._do(self._stop(pid, planned.seconds))
            case "full backlog":
                self._do(self._fill_backlog(pid, planned.seconds))
            case "descriptors":
                self._do(self._take_descriptors(pid, planned.seconds))
            case "no room":
                self._do(self._take_room(int(planned.choice * 3), min(planned.seconds, 1.0)))
            case "record":
                self._do(self._spoil_a_record(min(planned.seconds, 0.5)))
            case "block":
                self._do(self._from_inside("block", f"/block?seconds={planned.seconds}", planned.seconds))
            case "fork":
                self._do(self._from_inside("fork", f"/fork?seconds={min(planned.seconds, 1.0)}", 0.0))
            case "clock":
                shift = _WALL_CLOCK_SHIFTS[int(planned.choice * len(_WALL_CLOCK_SHIFTS))]
                self._do(self._from_inside("clock", f"/clock?shift={shift}", 0.0))
            case kind:
                raise AssertionError(f"no such fault: {kind}")

    def _aimed(self, planned: Plan, able: list[int]) -> int:
        """The worker that a fault hits: one of those that are busy."""
        busy = [pid for pid in self._load.busiest(able) if self._load.hit(pid)] or able
        return busy[int(planned.choice * len(busy))]

    async def _resize(self, seconds: float) -> None:
        self._note("resize")
        self._workers.grow()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._note("resize")
            self._workers.shrink()

    async def _stop(self, pid: int, seconds: float, kind: str = "stop") -> None:
        self._note(kind, pid, seconds=seconds)
        self._workers.signal(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._go_on(pid)

    def _go_on(self, pid: int) -> None:
        self._stopped.discard(pid)
        self._workers.signal(pid, signal.SIGCONT)

    async def _fill_backlog(self, pid: int, seconds: float) -> None:
        """Stop a worker, and connect to its private socket until no more fit."""
        with contextlib.ExitStack() as opened:
            worker_id = self._load.worker_ids.get(pid)
            stopping = asyncio.ensure_future(self._stop(pid, seconds, "full backlog"))
            try:
                await asyncio.sleep(0)  # it is stopped now
                with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                    while worker_id is not None:
                        connecting = opened.enter_context(socket.socket(socket.AF_UNIX))
                        connecting.setblocking(False)
                        connecting.connect(self._place.socket_path(worker_id))
            finally:
                await stopping

    async def _take_descriptors(self, pid: int, seconds: float) -> None:
        self._hindered.add(pid)
        began = time.monotonic()
        try:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError), without_descriptors(pid):
                self._note("descriptors", pid, seconds=seconds)
                await asyncio.sleep(seconds)
        finally:
            self._hindered.discard(pid)
            self.windows.append(Window("descriptors", began, time.monotonic(), pid))

    async def _take_room(self, more: int, seconds: float) -> None:
        """For a while there is room for so many files more, and then for none."""
        async with self._disk:
            began = time.monotonic()
            try:
                for _ in range(5):
                    if await self._place.limit(self._place.used_inodes() + more):
                        self._note("no room", seconds=seconds)
                        await asyncio.sleep(seconds)
                        break
            finally:
                await asyncio.shield(self._place.limit(MANY_INODES))
                self.windows.append(Window("room", began, time.monotonic()))

    async def _spoil_a_record(self, seconds: float) -> None:
        """A session of its own whose record names nobody for a while: it is refused, and then it is there again."""
        async with self._disk:
            self._records += 1
            session = f"spoiled-{self._records}"
            client = Client(self._load, self._random)
            record, garbage = self._place.record_path(session), self._place.path / "soak-garbage"
            try:
                if (await client.post("start", session)).outcome is not Outcome.ANSWERED:
                    return
                told = os.readlink(record)
                began = time.monotonic()
                os.symlink(_GARBAGE, garbage)
                os.rename(garbage, record)
                try:
                    began_inside = time.monotonic()
                    calls = await asyncio.gather(*(self._beside(client, session) for _ in range(3)))
                    self._note("record", hit=len(calls), seconds=seconds)
                    await asyncio.sleep(seconds)
                finally:
                    ended_inside = time.monotonic()
                    os.symlink(told, garbage)
                    os.rename(garbage, record)
                    self.windows.append(Window("record", began, time.monotonic(), session))
                    self.windows.append(Window("record, surely", began_inside, ended_inside, session))
                await client.post("step", session)
                await client.post("close", session)
            finally:
                await client.aclose()

    async def _beside(self, client: Client, session: str) -> None:
        other = Client(self._load, Random(self._random.getrandbits(64)))
        other.owner = client.owner
        try:
            await other.post("step", session)
        finally:
            await other.aclose()

    async def _from_inside(self, kind: str, target: str, seconds: float) -> None:
        """A fault of the app's own, at whichever worker takes this connection; at another if that one does not answer."""
        for _ in range(_TRIES_FROM_INSIDE):
            with contextlib.suppress(WireError, OSError):
                async with connect(self._load.address) as wire:
                    await wire.send(request("GET", target))
                    reply = await wire.reply(timeout_seconds=ANSWER_SECONDS + seconds)
                    if reply.complete and reply.status == 200:
                        self._note(kind, json.loads(reply.body), seconds=seconds)
                        return
