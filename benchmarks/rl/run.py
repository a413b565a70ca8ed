"""Measures steps of served environments, and writes `rounds.json` and `results.md` beside this file.

`question.md` says what is measured and why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks import machine
from benchmarks.forwarding.setups import free_port
from benchmarks.load import Load, Loader, build_loader
from benchmarks.rl.env import Work
from benchmarks.spread import spread, table

from homing.rl import RemoteVectorEnv
from homing.rl.calls import Caller

ROOT: Final = Path(__file__).resolve().parents[2]
CONNECTIONS: Final = 16
VECTOR: Final = 64
IDLE_SESSIONS: Final = 20_000
ROUND_OF_ALL_SECONDS: Final = 8.0
"""Long enough to step every one of them at least once."""
START_SECONDS: Final = 120.0
SERVER: Final = ("--host=127.0.0.1", "--http=httptools", "--loop=uvloop", "--no-access-log", "--timeout-keep-alive=120")

Cell = dict[str, float]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and all its processes."""

    port: int
    pids: list[int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """CPU time of all its processes, all their threads."""
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)  # CLOCK_PROCESS_CPUTIME_ID of another

    def resident_kib(self) -> int:
        """Private memory of its processes; what they share with each other counts once per process that touched it."""
        total = 0
        for pid in self.pids:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Private_Dirty:", "Private_Clean:")):
                    total += int(line.split()[1])
        return total


@contextlib.contextmanager
def serving(words: tuple[str, ...], workers: int, **environment: str) -> Iterator[Server]:
    """A server, from before all its workers serve until it has exited.

    Raises:
        RuntimeError: it did not start.
    """
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        command = (sys.executable, "-m", *words, f"--port={port}", f"--workers={workers}", *SERVER)
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **environment}
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                log.seek(0)
                text = log.read()
                if ("Uvicorn running on" if workers == 1 else f"all {workers} workers are ready") in text:
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(words)} did not start:\n{text[-2000:]}")
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Server(port, [process.pid, *map(int, children)])
        finally:
            process.terminate()
            process.wait(60)


def plain(milliseconds: float, *, threads: bool = False) -> contextlib.AbstractContextManager[Server]:
    environment = {"BENCH_MILLISECONDS": str(milliseconds), **({"BENCH_THREADS": "1"} if threads else {})}
    return serving(("uvicorn", "benchmarks.rl.plain_server:app"), 1, **environment)


def homing(milliseconds: float, workers: int) -> contextlib.AbstractContextManager[Server]:
    kwargs = json.dumps({"milliseconds": milliseconds})
    return serving(("homing", "rl", "serve", "benchmarks.rl.env:Work-v0", "--env-kwargs", kwargs), workers)


# --- cells ---


def in_process(milliseconds: float, seconds: float) -> Cell:
    env = Work(milliseconds)
    env.reset()
    steps, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        env.step(1)
        steps += 1
    return _cell(steps, time.perf_counter() - began, time.process_time() - cpu)


def loaded(loader: Loader, server: Server, mode: str, workers: int, seconds: float) -> Cell:
    load = Load(
        mode,
        CONNECTIONS,
        seconds,
        workers,
        sessions_per_connection=2 if mode == "inter" else 1,
        warm_seconds=min(0.5, seconds),
        gymnasium=True,
    )
    result = loader.run(server.port, load, server.pids)
    if result["errors"] or result["wrong"]:
        raise RuntimeError(f"the server gave {result['errors']} errors and {result['wrong']} wrong observations")
    return {
        "steps_per_second": result["requests_per_second"],
        "cpu_us": result["cpu_us"],
        "p50_us": result["p50_us"],
        "p99_us": result["p99_us"],
    }


def vector(server: Server, seconds: float, *, batch: bool) -> Cell:
    actions = np.ones(VECTOR, dtype=np.int64)
    with contextlib.closing(RemoteVectorEnv(server.url, VECTOR, batch=batch)) as env:
        env.reset()
        env.step(actions)
        steps, began, cpu = 1, time.perf_counter(), server.cpu_seconds()
        while time.perf_counter() < began + seconds:
            observations = env.step(actions)[0]
            steps += 1
        if not (observations == steps).all():
            raise RuntimeError("an environment missed a step")
        return _cell((steps - 1) * VECTOR, time.perf_counter() - began, server.cpu_seconds() - cpu)


def _cell(steps: int, seconds: float, cpu: float) -> Cell:
    return {"steps_per_second": steps / seconds, "cpu_us": cpu / steps * 1e6}


def round_of(loader: Loader, seconds: float, number: int) -> dict[str, Cell]:
    """Every cell once; each round begins with another server."""
    cells: dict[str, Cell] = {}

    def of_plain(milliseconds: float, threads: bool) -> None:
        with plain(milliseconds, threads=threads) as server:
            cells[f"plain{' threads' if threads else ''} {milliseconds:g}"] = loaded(
                loader, server, "local", 1, seconds
            )

    def of_one(milliseconds: float) -> None:
        with homing(milliseconds, 1) as server:
            cells[f"homing 1 local {milliseconds:g}"] = loaded(loader, server, "local", 1, seconds)

    def of_two(milliseconds: float) -> None:
        with homing(milliseconds, 2) as server:
            for mode in ("local", "inter"):
                cells[f"homing 2 {mode} {milliseconds:g}"] = loaded(loader, server, mode, 2, seconds)
            cells[f"vector batch {milliseconds:g}"] = vector(server, seconds, batch=True)
            cells[f"vector single {milliseconds:g}"] = vector(server, seconds, batch=False)

    acts: list[Callable[[], None]] = []
    for milliseconds in (0.0, 2.0):
        acts += [
            lambda ms=milliseconds: cells.__setitem__(f"in process {ms:g}", in_process(ms, seconds / 2)),
            lambda ms=milliseconds: of_plain(ms, False),
            lambda ms=milliseconds: of_one(ms),
            lambda ms=milliseconds: of_two(ms),
            lambda ms=milliseconds: of_plain(ms, True),
        ]
    first = number % len(acts)
    for act in acts[first:] + acts[:first]:
        act()
    return cells


# --- memory ---

_ENVIRONMENTS = """
import sys, gymnasium, benchmarks.rl.env
from pathlib import Path
def private():
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))
number = int(sys.argv[1])
make = lambda: gymnasium.make("benchmarks.rl.env:Work-v0", disable_env_checker=True)
kept = [make() for _ in range(100)]
for env in kept: env.reset()
before = private()
kept += [make() for _ in range(number)]
for env in kept: env.reset()
print((private() - before) / number)
"""


def memory(loader: Loader) -> dict[str, float]:
    """KiB per idle session on two workers, with the environment, and of the environment alone; how many are open, and how
    they answer: the loader steps each of them and compares what it gets."""
    with homing(0.0, 2) as server:
        loaded(loader, server, "local", 2, 0.5)
        opened_before, before = open_environments(server.url, 2), server.resident_kib()
        load = Load(
            "local",
            CONNECTIONS,
            ROUND_OF_ALL_SECONDS,
            2,
            sessions_per_connection=IDLE_SESSIONS // CONNECTIONS,
            warm_seconds=0,
            gymnasium=True,
        )
        stepped = loader.run(server.port, load, server.pids)
        whole = (server.resident_kib() - before) / IDLE_SESSIONS
        opened = open_environments(server.url, 2) - opened_before
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = (sys.executable, "-c", _ENVIRONMENTS, str(IDLE_SESSIONS))
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "session_kib": whole,
        "environment_kib": float(done.stdout),
        "open_sessions": opened,
        "steps": stepped["replies"],
        "wrong": stepped["errors"] + stepped["wrong"],
    }


def open_environments(url: str, workers: int) -> int:
    """How many environments a server has: each worker says its own, and a new connection may reach any."""
    found: dict[str, int] = {}
    while len(found) < workers:
        told = Caller(url).call("GET", "/healthz").content
        found[told["worker"]] = told["environments"]
    return sum(found.values())


# --- the page ---


def page(result: dict[str, Any]) -> str:
    rounds: list[dict[str, Cell]] = result["rounds"]

    def of(cell: str, figure: str) -> list[float]:
        return [each[cell][figure] for each in rounds]

    def text(values: list[float], digits: int) -> str:
        return spread(values).text(digits)

    def ratio(above: str, below: str) -> list[float]:
        figure = "steps_per_second"
        return [up / down for up, down in zip(of(above, figure), of(below, figure), strict=True)]

    goals: list[tuple[str, list[float], float, bool]] = [
        ("steps/s at 2 ms, two workers ÷ plain", ratio("homing 2 local 2", "plain 2"), 1.8, True),
        ("the same, half of the requests forwarded", ratio("homing 2 inter 2", "plain 2"), 1.8, True),
        ("the same through RemoteVectorEnv", ratio("vector batch 2", "plain 2"), 1.5, True),
        (
            "CPU per step at 0 ms, two workers ÷ plain",
            _quotient(of("homing 2 local 0", "cpu_us"), of("plain 0", "cpu_us")),
            1.0,
            False,
        ),
        ("steps/s at 0 ms, batch ÷ single requests", ratio("vector batch 0", "vector single 0"), 5.0, True),
        ("the same ÷ single requests of the loader", ratio("vector batch 0", "homing 2 local 0"), 1.0, True),
        (
            "KiB per idle session beside the environment",
            [result["memory"]["session_kib"] - result["memory"]["environment_kib"]],
            20.0,
            False,
        ),
        ("open sessions on one server, none answering wrong", [_answering(result["memory"])], IDLE_SESSIONS, True),
    ]
    rows = []
    for name, values, bound, at_least in goals:
        found = spread(values)
        reached = found.median >= bound if at_least else found.median <= bound
        digits = 0 if bound >= 100 else 2
        shown = f"{'≥' if at_least else '≤'} {bound:,g}"
        rows.append((name, shown, found.text(digits), "reached" if reached else "**missed**"))
    cells = []
    for name in sorted(rounds[0]):
        latency = [text(of(name, key), 0) if key in rounds[0][name] else "–" for key in ("p50_us", "p99_us")]
        cells.append((name, text(of(name, "steps_per_second"), 0), text(of(name, "cpu_us"), 0), *latency))
    return "\n".join(
        [
            "# What does a step of a served environment cost, and what do two workers give?",
            "",
            "Made by `benchmarks/rl/run.py`, from `rounds.json`; `question.md` says how. Do not edit.",
            "",
            machine.text(result)
            + f" {len(rounds)} rounds of {result['seconds']:g} s per cell; medians, in brackets an "
            f"interval that holds the true median with probability {spread(goals[0][1]).coverage:.0%}. Load average before: "
            f"{result['load_average']:.1f}.",
            "",
            table(("goal", "bound", "median (interval)", ""), rows),
            "",
            f"Memory, with {IDLE_SESSIONS:,} open sessions on two workers: {result['memory']['session_kib']:.1f} KiB per "
            f"session, of which the environment takes {result['memory']['environment_kib']:.1f}.",
            "",
            "The name's last number is the environment's work per step in ms.",
            "",
            table(("", "steps/s", "CPU µs per step", "p50 µs", "p99 µs"), cells),
            "",
        ]
    )


def _answering(memory: dict[str, float]) -> float:
    """The open sessions, each of which had time for a step, and none of which gave a wrong observation."""
    return memory["open_sessions"] if not memory["wrong"] and memory["steps"] >= IDLE_SESSIONS else 0.0


def _quotient(above: list[float], below: list[float]) -> list[float]:
    return [up / down for up, down in zip(above, below, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    loader = build_loader()
    versions = {name: __import__(name).__version__ for name in ("gymnasium", "numpy", "fastapi", "pydantic")}
    result: dict[str, Any] = {
        **machine.described(**versions),
        "seconds": given.seconds,
        "load_average": os.getloadavg()[0],
    }
    result["memory"] = memory(loader)
    result["rounds"] = []
    for number in range(given.rounds):
        result["rounds"].append(round_of(loader, given.seconds, number))
        print(f"round {number + 1} of {given.rounds} is done", file=sys.stderr)
    (given.out / "rounds.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.out / "results.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
