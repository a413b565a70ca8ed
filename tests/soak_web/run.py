"""One fault run: a server, players, chaos; then no more faults, every session closed, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import httpx
from tests.soak_web.control import Control
from tests.soak_web.faults import Chaos, kind_of_process, marked, of_browsers
from tests.soak_web.oracle import Oracle
from tests.soak_web.play import ChromiumPlayer, Player
from tests.support.running import HOMING, ROOT, Running, running

from homing.rundir import SITES_DIR
from homing.web.processes import led_by

SETTLE_SECONDS = 60.0
MOST_THREADS = 16
OLDEST_BROWSER_SECONDS = 15.0


@dataclass(frozen=True)
class Subject:
    """What is run, and who plays on it.

    Attributes:
        keeps_processes: Browsers are kept ready while the server serves, so processes are counted after its end only.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    player: type[Player]
    every_seconds: float
    keeps_processes: bool


FAKES = Subject(
    (*HOMING, "run"), ("tests.support.web_app:soak_server", "--factory"), Player, 0.25, keeps_processes=False
)
CHROMIUM = Subject(
    (*HOMING, "run"),
    ("tests.support.web_chromium_app:soak_server", "--factory"),
    ChromiumPlayer,
    1.0,
    keeps_processes=True,
)


@dataclass
class Report:
    """What a run came to.

    Attributes:
        bound: With no violation in n faults, the rate of violations per fault is below this with 95 % confidence (3/n).
        late: Calls that were back after their limit, as measured; those that the machine does not account for are
            violations.
        left: What was not released: empty after a good run.
    """

    seed: int
    seconds: float
    sessions: int
    faults: Counter[str]
    calls: Counter[str]
    outcomes: Counter[str]
    slowest: dict[str, float]
    late: list[str]
    violations: list[str]
    left: list[str] = field(default_factory=list)

    @property
    def fault_count(self) -> int:
        return sum(self.faults.values())

    @property
    def bound(self) -> float:
        return 3 / max(1, self.fault_count)

    def json(self) -> dict[str, Any]:
        """For machines; `benchmarks/web/faults.py` makes the page of it."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        told |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in told.items()}

    def lines(self) -> list[str]:
        """For people."""
        good = not self.violations and not self.left
        return [
            f"seed {self.seed}, {self.seconds:.0f} s, {platform.machine()}, {os.cpu_count()} cores",
            f"sessions {self.sessions}, faults {self.fault_count}: {_counts(self.faults)}",
            f"calls: {_counts(self.calls)}",
            f"outcomes: {_counts(self.outcomes)}",
            "slowest, seconds over the limit: "
            + ", ".join(f"{call} {over:+.2f}" for call, over in sorted(self.slowest.items())),
            f"late as measured: {len(self.late)}",
            *(f"LATE {each}" for each in self.late[:20]),
            *(f"VIOLATION {each}" for each in self.violations[:20]),
            *(f"LEFT {each}" for each in self.left[:20]),
            f"violations {len(self.violations)}, left {len(self.left)}"
            + (f"; below {100 * self.bound:.2f} % per fault with 95 % confidence (3/n)" if good else ""),
        ]


def fault_run(
    *,
    seed: int,
    faults: int,
    players: int = 8,
    subject: Subject = FAKES,
    sessions: int = 0,
    fault_rate: float = 0.45,
    worker_share: float = 0.06,
    slack_seconds: float = 0.25,
    max_seconds: float = 3600.0,
) -> Report:
    """Run until so many faults have been done in so many sessions, then settle.

    Args:
        subject: What is run; `every_seconds` is between two faults to a process, on average.
        fault_rate: How likely a session asks the fakes for one fault more.
        worker_share: The share of process faults that meet a worker.
        slack_seconds: How much later than its limit a call may be back.
    """
    oracle = Oracle(slack_seconds)
    with running(*subject.arguments, "--workers", "2", "--no-access-log", cwd=ROOT, command=subject.command) as server:
        server.wait_for("Application startup complete", 2)
        url = f"http://127.0.0.1:{server.port}"
        spared = float("inf") if subject.keeps_processes else OLDEST_BROWSER_SECONDS
        control = Control(server.workers)
        chaos = Chaos(server, seed, subject.every_seconds, worker_share, control, spares_older_seconds=spared)
        everyone = [subject.player(f"p{n}", url, seed * 1000 + n, oracle, fault_rate, control) for n in range(players)]
        began = time.monotonic()

        def count() -> int:
            return sum(chaos.done.values()) + sum(player.faults for player in everyone)

        async def play() -> None:
            enough = asyncio.Event()
            tasks = [asyncio.create_task(player.play(enough)) for player in everyone]
            while (
                (count() < faults or sum(player.sessions for player in everyone) < sessions)
                and time.monotonic() - began < max_seconds
                and not any(t.done() for t in tasks)
            ):
                await asyncio.sleep(0.1)
                if server.process.poll() is not None:
                    for each in tasks:
                        each.cancel()
                    await asyncio.wait(tasks)
                    raise AssertionError(f"the server ended:\n{server.log[-6000:]}")
            enough.set()
            await asyncio.gather(*tasks)

        chaos.start()
        try:
            asyncio.run(play())
        finally:
            chaos.stop()
        ended = server.workers()
        chaos.workers_seen.update(ended)
        left = _what_is_left(server, chaos.workers_seen, subject.keeps_processes)
        report = Report(
            seed,
            time.monotonic() - began,
            sum(player.sessions for player in everyone),
            chaos.done + Counter({"asked of the server, hang-ups": sum(p.faults for p in everyone)}),
            oracle.calls,
            oracle.outcomes,
            oracle.slowest,
            oracle.late,
            oracle.violations,
            left,
        )
    # A browser's children are found by the session that it led, whatever they show of a mark.
    after = {*marked(chaos.workers_seen), *(each for leader in chaos.leaders for each in led_by(leader))}
    report.left += [f"process {process.pid} after the server's end" for process in after]
    # A killed worker's folders are removed by the next one that starts a browser; who ends in order removes its own.
    report.left += [f"folder {folder}" for pid in ended for folder in Path(gettempdir()).glob(f"homing-web-*.{pid}.*")]
    return report


def _what_is_left(server: Running, workers: set[int], keeps_processes: bool) -> list[str]:
    """What a server without sessions still has, once it had time to settle."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        found = _look(server, workers, keeps_processes)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.2)


def _look(server: Running, workers: set[int], keeps_processes: bool) -> list[str]:
    try:
        healths = _healths(server)
    except httpx.HTTPError as error:
        return [f"health: {error!r}"]
    found = [] if len(healths) == 2 else [f"{len(healths)} workers answer"]
    for worker, health in healths.items():
        for kind, counts in health["ledger"].items():
            if counts["acquired"] != counts["live"] + counts["pending"] + counts["released"]:
                found.append(f"worker {worker}: the ledger of {kind} does not add up: {json.dumps(counts)}")
            if counts["live"] or counts["pending"]:
                found.append(f"worker {worker}: {kind} {json.dumps(counts)} {json.dumps(health['pending'])[:300]}")
        if health["site_pool"]["leases"] or health["site_pool"].get("waiting"):
            found.append(f"worker {worker}: sites {json.dumps(health['site_pool'])}")
        if health["browser_provider"].get("contexts"):
            found.append(f"worker {worker}: {health['browser_provider']['contexts']} contexts")
    here = server.workers()
    if keeps_processes:
        found += _more_than_is_kept(here, list(healths.values()))
        workers = workers - set(here)
    found += [f"process {process.pid}" for process in marked(workers)]
    # The loop's pool of threads has as many as it ever had; a thread per session that is never ended would be seen here.
    found += [f"worker [{pid}]: {count} threads" for pid in here if (count := _threads(pid)) > MOST_THREADS]
    sites = os.path.join(server.run_directory, SITES_DIR)
    locks = os.listdir(sites) if os.path.isdir(sites) else []
    return found + [f"ticket {name}" for name in locks if name.endswith(".ticket")]


def _more_than_is_kept(workers: Sequence[int], healths: Sequence[Mapping[str, Any]]) -> list[str]:
    """Renderers, browsers, drivers and folders beyond those of the contexts that are kept ready."""
    kinds = Counter(kind_of_process(pid) for worker in workers for pid in of_browsers(worker))
    warm = sum(health["browser_provider"]["warm"] for health in healths)
    browsers = sum(health["browser_provider"]["browsers"] for health in healths)
    folders = [path for pid in workers for path in Path(gettempdir()).glob(f"homing-web-*.{pid}.*/browser-*")]
    limits = {"renderer": warm, "browser": browsers, "driver": len(workers)}
    found = [f"{kinds[kind]} {kind} processes for {limit}" for kind, limit in limits.items() if kinds[kind] > limit]
    if len(folders) > browsers:
        found.append(f"{len(folders)} folders of {browsers} browsers")
    return found


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


def _healths(server: Running) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=10, limits=limits) as client:
        for _ in range(60):
            health = client.get("/healthz").json()
            found[health["worker"]] = health
            if len(found) == 2:
                break
    return found


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
