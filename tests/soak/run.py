"""One soak: a real `homing run` server, its clients, the faults, the return to rest, and what came of it all.

After the faults, within bounds: as many workers as before serve, new sessions work on each and through each, and every
worker is back at what it had open at its start, with no owner record left of a session that ended.

Not here: what counts as broken in the history (`oracle`).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import os
import re
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.soak.app import JOURNAL_ENV
from tests.soak.faults import KINDS, ROWS, Fault, Injector, plan
from tests.soak.load import Client, Crowd, Load, play
from tests.soak.oracle import Call, History, Outcome, check, read_journals
from tests.soak.place import Place, namespace
from tests.soak.workers import Workers, watched
from tests.support.raw import Address, Wire, WireError, connect, request
from tests.support.servers import LEFT_BEHIND, ServerProcess, homing_run, serve_workers
from tests.support.workers import connections

WORKERS: Final = 3
PLAYERS: Final = 24
CROWD: Final = 6
CROWD_SESSIONS: Final = 2
FAULT_EVERY_SECONDS: Final = 0.8
"""With the waits until two workers serve, a fault about every 1.3 s."""

IDLE_SECONDS: Final = 5.0
OWNER_TIMEOUT_SECONDS: Final = 2.0
HOP_IDLE_SECONDS: Final = 15.0
DRAIN_SECONDS: Final = 4.0
"""How long a connection between workers is kept unused: nobody is at rest before that."""

RECOVER_SECONDS: Final = 60.0
REST_SECONDS: Final = HOP_IDLE_SECONDS + IDLE_SECONDS + 15.0

FD_SLACK: Final = 3  # one of them: the queue of a worker that was taken away, which all others are lent
TASK_SLACK: Final = 1

OPTIONS: Final = (
    *("--workers", str(WORKERS), "--session", "header:x-session", "--start", "POST /start", "--end", "POST /close"),
    *("--idle", str(IDLE_SECONDS), "--owner-timeout", str(OWNER_TIMEOUT_SECONDS)),
    *("--backlog", "64", "--timeout-keep-alive", "120", "--timeout-graceful-shutdown", "20", "--no-access-log"),
    *("--drain-timeout", str(DRAIN_SECONDS)),
)

# What `homing.rundir` says lies in a run directory, once no record is being replaced.
_EXPECTED_NAME: Final = re.compile(
    r"[0-9a-f]{32}\.(sock|conn|life|draining|stopping|drained)|owners\.lock|server\.(lock|json)|session-owners|page|first-app|control\.sock"
)


@dataclass
class Report:
    """What one soak came to. `broken` is empty if all promises were kept."""

    seed: int
    seconds: float
    players: int = PLAYERS
    lasted_seconds: float = 0.0
    """How long the load went on."""
    calls: int = 0
    sessions: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """Of the server's and of the clients, by kind."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of each row of `docs/design/faults.md`, how many."""
    not_raised: list[str] = field(default_factory=list)
    """Kinds that cannot be raised on this machine."""
    injected: int = 0
    """Faults of the server's, without what clients do."""
    in_flight: int = 0
    """Of these, how many hit a request under way."""
    broken: list[str] = field(default_factory=list)
    at_most_broken: float = 1.0
    """With nothing broken in n faults of the server's, the 95 % upper bound of the share that break something: 3/n."""
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    first_gone_ms: list[float] = field(default_factory=list)
    """From each kill to the first *gone* for one of that worker's sessions."""
    replaced_seconds: list[float] = field(default_factory=list)
    """From each kill or orderly end to the next worker that was ready."""
    full_service_seconds: float = 0.0
    """From the last fault to new sessions on all workers."""
    at_rest_seconds: float = 0.0
    """From the end of the load until everything was back."""
    start: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    load_average: list[float] = field(default_factory=list)
    """The machine's, over a minute, at the start and at the end."""
    log: list[str] = field(default_factory=list)
    """The server's, where something is broken, with the seconds since its first line, and the faults between its lines."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}, {self.lasted_seconds:.0f} s: {self.calls} calls of {self.sessions} sessions; "
                f"p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.0f} ms, max {self.max_ms:.0f} ms",
                f"statuses {self.statuses}",
                f"outcomes {self.outcomes}",
                f"{self.injected} faults, {self.in_flight} of them hit requests under way; with the clients' own: {self.faults}",
                f"rows {self.rows}; not raised here: {self.not_raised}",
                f"first gone after a kill, ms: {spread(self.first_gone_ms)}; a new worker ready, s: "
                f"{spread(self.replaced_seconds)}",
                f"full service {self.full_service_seconds:.1f} s after the last fault, at rest {self.at_rest_seconds:.1f} s "
                "after the load",
                f"start {self.start}\npeak  {self.peak}\nend   {self.end}",
                f"load average {self.load_average}",
                *(self.broken[:50] or ["nothing broken"]),
                f"95 % upper bound of faults that break something: {self.at_most_broken:.2%}",
            ]
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def spread(figures: list[float]) -> str:
    """Median and greatest of some figures."""
    return f"median {statistics.median(figures):g}, max {max(figures):g} of {len(figures)}" if figures else "none"


async def soak(seconds: float, seed: int, players: int = PLAYERS) -> Report:
    """One soak of so many seconds under load and faults, and then until everything is at rest."""
    report = Report(seed, seconds, players, load_average=[round(os.getloadavg()[0], 1)])
    with (
        tempfile.TemporaryDirectory(prefix="homing-soak-") as directory,
        tempfile.TemporaryDirectory(prefix="homing-soak-run-") as mounted,
    ):
        journals = Path(directory)
        environment = {JOURNAL_ENV: directory, "HOMING_SESSION_SOCKET_DIR": None}
        wrap = namespace(mounted)
        argv = [*wrap, *homing_run("tests.soak.app:app", *OPTIONS, *(("--run-dir", f"{mounted}/run") if wrap else ()))]
        async with (
            serve_workers(argv, workers=WORKERS, env=environment, clean=False) as server,
            watched(server) as workers,
        ):
            await server.log.until(r"all \d+ workers are ready")
            run_directory = server.log.find(r"run directory (\S+)$")[0][1]
            place = Place(server, run_directory, mounted if wrap else None)
            faults = await _soak(report, server, workers, journals, place)
            if code := await server.stop(timeout_seconds=40):
                report.broken.append(f"P3: the server's exit code is {code}")
            left = os.listdir(run_directory) if wrap and os.path.exists(run_directory) else []
            if left or (not wrap and os.path.exists(run_directory)):
                report.broken.append(f"P3: the run directory {run_directory} outlived its server: {left}")
        report.broken += [f"P3: the log says {match.string!r}" for match in server.log.find(LEFT_BEHIND)]
        report.broken += [f"the log has {text}" for text in _errors(server.log.lines)]
        if report.broken:
            report.log = server.log.timed(
                (fault.time, f"------- {fault.kind} of {fault.pid}, {fault.hit} requests under way") for fault in faults
            )
    report.load_average.append(round(os.getloadavg()[0], 1))
    return report


def _errors(lines: Iterable[str]) -> list[str]:
    """The tracebacks in the log, each with what was raised from it, and what must never be logged.

    One is uvicorn's own: told to stop, it ends a WebSocket's handshake with a 500, and then trips over the refusal that
    the app sends for it. Others were asked for.
    """
    found, block = [], list[str]()
    for line in [*lines, ""]:
        inside = line.startswith((" ", "Traceback", "During handling", "The above exception")) or not line
        if inside and (block or line.startswith("Traceback")):
            block.append(line)
        elif block and block[-1].startswith(" "):
            block.append(line)  # the exception itself
        elif block:
            found.append("\n".join(block))
            block = []
        if re.search("taken from this live worker|sweep failed", line):
            found.append(line)
    if block:
        found.append("\n".join(block))
    expected = ("assert not self.eof_sent", "SoakError: asked to", "RemoteAppError: the app raised at worker")
    return [text for text in found if not any(line in text for line in expected)]


async def _soak(report: Report, server: ServerProcess, workers: Workers, journals: Path, place: Place) -> list[Fault]:
    random = Random(report.seed)
    load = Load(server.address)
    start = await _vitals_of_all(server.address, workers)
    report.start = {**_largest(start), "records": len(_records(place.path))}
    injector = Injector(load, workers, place, lambda: _ready(journals, workers))
    kinds = {kind: often for kind, often in KINDS.items() if kind != "no room" or place.can_be_full}
    report.not_raised = sorted(set(KINDS) - set(kinds))
    plans = plan(random, report.seconds - 1.0, every_seconds=FAULT_EVERY_SECONDS, kinds=kinds)
    crowd = Crowd(load, CROWD_SESSIONS)
    began = time.monotonic()
    async with asyncio.TaskGroup() as clients:
        for _ in range(report.players):
            clients.create_task(play(load, Random(random.getrandbits(64)), idle_seconds=IDLE_SECONDS))
        for _ in range(CROWD):
            clients.create_task(crowd.join(Random(random.getrandbits(64))))
        clients.create_task(_sample(report, server.address, place.path, workers, load))
        await injector.run(plans, report.seconds - 1.0)
        last_fault = time.monotonic()
        await asyncio.sleep(max(0.0, began + report.seconds - last_fault))
        load.stopping.set()
    ended = time.monotonic()
    report.lasted_seconds = round(ended - began, 1)
    await _full_service(report, load, workers, journals, last_fault)
    await _at_rest(report, server, place.path, workers, start, ended)
    history = History(load.calls, read_journals(journals), dict(workers.fates), IDLE_SECONDS, injector.windows)
    report.broken += map(str, check(history))
    _count(report, history, load, injector)
    return injector.faults


# --- workers ---


def _ready(journals: Path, workers: Workers) -> list[int]:
    """The live workers whose app has started."""
    started = {int(name.partition("-")[0]) for name in os.listdir(journals)}
    return [pid for pid in workers.alive() if pid in started]


async def _vitals(address: Address) -> dict[str, Any]:
    """Those of the worker that happens to take this connection."""
    async with connect(address) as wire:
        await wire.send(request("GET", "/vitals"))
        reply = await wire.reply()
        if not reply.complete or reply.status != 200:
            raise WireError(f"no vitals: {reply}")
        vitals: dict[str, Any] = json.loads(reply.body)
        return vitals


async def _vitals_of_all(address: Address, workers: Workers) -> dict[int, dict[str, Any]]:
    """Those of every live worker, each over a connection of its own and with no other of ours open."""
    found: dict[int, dict[str, Any]] = {}
    while set(workers.alive()) - set(found):
        vitals = await _vitals(address)
        found[vitals["pid"]] = vitals
    return {pid: vitals for pid, vitals in found.items() if pid in workers.alive()}


async def _sample(report: Report, address: Address, run_directory: Path, workers: Workers, load: Load) -> None:
    """The most that any worker had open, looked at twice a second while the load runs."""
    while not load.stopping.is_set():
        for pid in workers.alive():
            with contextlib.suppress(OSError):  # it has just exited
                _raise_peak(report, _seen_from_outside(pid))
        with contextlib.suppress(WireError, OSError, TimeoutError):
            _raise_peak(report, {**_counts(await _vitals(address)), "records": len(_records(run_directory))})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await load.stopping.wait()


def _seen_from_outside(pid: int) -> dict[str, int]:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"fds": len(os.listdir(f"/proc/{pid}/fd")), "resident_bytes": resident}


def _counts(vitals: dict[str, Any]) -> dict[str, int]:
    return {name: vitals[name] for name in ("fds", "tasks", "resident_bytes")}


def _largest(vitals: dict[int, dict[str, Any]]) -> dict[str, int]:
    largest: dict[str, int] = {}
    for each in vitals.values():
        for name, count in _counts(each).items():
            largest[name] = max(largest.get(name, 0), count)
    return largest


def _raise_peak(report: Report, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        report.peak[name] = max(report.peak.get(name, 0), count)


def _records(run_directory: Path) -> list[str]:
    """The worker ID in each owner record."""
    owners = []
    for name in os.listdir(run_directory / "session-owners"):
        with contextlib.suppress(FileNotFoundError):
            owners.append(os.readlink(run_directory / "session-owners" / name).partition(".")[2])
    return owners


# --- after the faults ---


async def _full_service(report: Report, load: Load, workers: Workers, journals: Path, last_fault: float) -> None:
    """New sessions work on all workers, each used through every other."""
    try:
        async with asyncio.timeout(RECOVER_SECONDS):
            while not (workers.settled(WORKERS) and set(workers.alive()) == set(_ready(journals, workers))):
                await asyncio.sleep(0.05)
            async with connections(load.address, WORKERS, target="/pid") as wires:
                for at, wire in wires.items():
                    await _works(load, at, wire, wires)
    except (TimeoutError, AssertionError) as error:
        for pid in workers.alive():
            workers.signal(pid, signal.SIGUSR1)  # their log then says what they wait for
        fates = {pid: workers.fates[pid] for pid in workers.alive()}
        report.broken.append(f"recovery: at {time.monotonic()} there are {fates}, able {_ready(journals, workers)}")
        report.broken.append(f"recovery: not all workers serve {RECOVER_SECONDS} s after the last fault: {error!r}")
    report.full_service_seconds = time.monotonic() - last_fault


async def _works(load: Load, at: int, wire: Wire, wires: dict[int, Wire]) -> None:
    client = Client(load, Random(0))
    started = await client.over(wire, "start", f"after-{at}")
    assert started.outcome is Outcome.ANSWERED, started
    assert started.pid == at, started
    for number, other in enumerate(wires.values(), 1):
        step = await client.over(other, "step", f"after-{at}")
        assert (step.outcome, step.pid, step.sequence) == (Outcome.ANSWERED, at, number), step


async def _at_rest(
    report: Report,
    server: ServerProcess,
    run_directory: Path,
    workers: Workers,
    start: dict[int, dict[str, Any]],
    ended: float,
) -> None:
    """Every worker has as much open as at the start, and owns nothing; no file is where none belongs."""
    base = _largest(start)
    left: list[str] = ["nobody looked"]
    while left and time.monotonic() < ended + REST_SECONDS:
        await asyncio.sleep(0.25)
        left = []
        vitals = await _vitals_of_all(server.address, workers)
        records = Counter(_records(run_directory))
        for pid, each in vitals.items():
            if each["fds"] > base["fds"] + FD_SLACK:
                more = Counter(map(_kind_of_fd, each["fd_names"]))
                more.subtract(map(_kind_of_fd, next(iter(start.values()))["fd_names"]))
                left.append(f"P3: worker {pid} has {each['fds']} descriptors, {base['fds']} at the start: {+more}")
            if each["tasks"] > base["tasks"] + TASK_SLACK:
                left.append(
                    f"P3: worker {pid} has {each['tasks']} tasks, {base['tasks']} at the start: {each['task_names']}"
                )
            if records[each["worker"]]:
                left.append(f"P3: worker {pid} still owns {records[each['worker']]} sessions that have ended")
        strays = [name for name in os.listdir(run_directory) if not _EXPECTED_NAME.fullmatch(name)]
        if strays:
            left.append(f"P3: files that belong to nobody: {strays}")
        report.end = {**_largest(vitals), "records": sum(records[each["worker"]] for each in vitals.values())}
        report.end["records of dead workers"] = sum(records.values()) - report.end["records"]
    report.broken += left
    report.at_rest_seconds = time.monotonic() - ended


def _kind_of_fd(name: str) -> str:
    return name.partition(":")[0]


# --- counting ---


def _count(report: Report, history: History, load: Load, injector: Injector) -> None:
    calls = history.calls
    report.calls = len(calls)
    report.sessions = len({call.session for call in calls})
    report.statuses = dict(sorted(Counter(_status(call.status, call.code, call.outcome) for call in calls).items()))
    report.outcomes = dict(Counter(call.outcome.value for call in calls))
    report.faults = dict(Counter(fault.kind for fault in injector.faults) + load.faults)
    report.injected = len(injector.faults)
    report.in_flight = sum(fault.hit > 0 for fault in injector.faults)
    report.at_most_broken = min(1.0, 3 / max(1, report.injected))
    report.rows = _rows(report.faults, history, injector)
    taken = sorted((call.done - call.sent) * 1000 for call in calls if call.outcome is Outcome.ANSWERED)
    if taken:
        report.p50_ms = round(statistics.median(taken), 1)
        report.p99_ms = round(taken[int(len(taken) * 0.99)], 1)
        report.max_ms = round(taken[-1], 1)
    readies = [line.time for line in history.lines if line.what == "ready"]
    for fault in injector.faults:
        if fault.kind == "kill":
            gone = [
                call.done - fault.time
                for call in calls
                if call.owner == fault.pid and call.status == 410 and call.done >= fault.time
            ]
            if gone:
                report.first_gone_ms.append(round(min(gone) * 1000, 1))
        if fault.kind in ("kill", "term", "term two"):
            later = bisect.bisect_left(readies, fault.time)
            if later < len(readies):
                report.replaced_seconds.append(round(readies[later] - fault.time, 2))


def _rows(faults: dict[str, int], history: History, injector: Injector) -> dict[str, int]:
    """How often each row of `docs/design/faults.md` was met. A kill is a row by what it hit."""
    rows: Counter[str] = Counter()
    for kind, count in faults.items():
        if kind != "kill":
            rows[ROWS[kind]] += count
    for fault in injector.faults:
        if fault.kind == "kill":
            rows["F20"] += 1
            rows["F1"] += any(_found_it_gone(fault, call) for call in history.calls)
            rows["F2"] += fault.hit > fault.streams
            rows["F3"] += fault.streams > 0
    rows["F4"] = sum(_lost_its_forwarder(history, call) for call in history.calls)
    return {row: rows[row] for row in sorted(rows, key=lambda row: int(row[1:]))}


def _found_it_gone(fault: Fault, call: Call) -> bool:
    """The call's session had no request under way when its worker was killed."""
    return call.owner == fault.pid and call.status == 410 and call.sent >= fault.time


def _lost_its_forwarder(history: History, call: Call) -> bool:
    """It was cut off though the worker of its session goes on: the worker that had taken it has ended."""
    if call.outcome is not Outcome.UNKNOWN or call.status is not None or call.owner is None:
        return False
    return call.owner in history.fates and history.fates[call.owner].doomed > call.done + 0.1


def _status(status: int | None, code: str | None, outcome: Outcome) -> str:
    if outcome is Outcome.CLOSED:
        return "404 by the app"
    if status is None:
        return "none"
    return f"{status} {code}" if code else str(status)
