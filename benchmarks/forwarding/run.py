"""`make bench`: measures all setups in interleaved rounds, and writes `rounds.json` and `results.md`.

A round starts every setup anew, then goes load by load through all of them, so that what a ratio compares was measured
seconds apart; each round begins with another setup. Nothing here is a timed test: noise ends up in the spread.

Not here: the servers (`setups.py`), the load (`benchmarks.load`), ratios, goals and the page (`report.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.forwarding import report
from benchmarks.forwarding.loads import INTERLEAVED_SESSIONS, LOADS, MOVES_WARM_SECONDS, WARM_SECONDS
from benchmarks.forwarding.setups import (
    MEMORY_TWIN,
    SETUPS,
    Server,
    Setup,
    SetupError,
    all_serving,
    haproxy_program,
    nginx_program,
    serving,
)
from benchmarks.load import Load, Loader, LoaderError, build_loader

SCHEMA: Final = 2
MEMORY_SECONDS: Final = 1.0
MAX_FAILED_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of a round: a setup under one load in one mode."""

    setup: Setup
    mode: str
    load: str

    def of(self, seconds: float) -> Load:
        load = LOADS[self.load]
        moves = self.mode in ("remote", "inter")
        return Load(
            mode=self.mode if self.mode in ("local", "remote", "inter") else "local",
            connections=load.connections,
            seconds=seconds,
            workers=self.setup.workers,
            kind=load.kind,
            body_bytes=load.body_bytes,
            every_seconds=load.every_seconds,
            requests_per_second=load.requests_per_second,
            sessions_per_connection=INTERLEAVED_SESSIONS if self.mode == "inter" else 1,
            # A round too short to measure anything, which shows that it works, need not wait for the moves.
            warm_seconds=min(MOVES_WARM_SECONDS, 3 * seconds) if moves else min(WARM_SECONDS, seconds),
            behind_proxy=self.setup.behind_proxy or self.mode == "placed",
        )


def cells_of_round(setups: list[Setup], number: int) -> list[Cell]:
    """Load by load; within a load every setup and mode, starting one further in each round."""
    cells: list[Cell] = []
    for load in LOADS:
        of_load = [Cell(setup, mode, load) for setup in setups for mode, loads in setup.modes.items() if load in loads]
        if of_load:
            first = number % len(of_load)
            cells += of_load[first:] + of_load[:first]
    return cells


def measure(loader: Loader, server: Server, load: Load) -> dict[str, Any]:
    """One loader run against a running setup, and `memory_kib`, the memory of all its processes at the end.

    Raises:
        LoaderError: The load could not be made, or the server's processes changed, so their CPU time is unknown.
    """
    pids = server.pids()
    result = loader.run(server.port, load, pids)
    if server.pids() != pids:
        raise LoaderError(f"processes of setup {server.setup.key} came or went while it was measured")
    result["memory_kib"] = sum(memory_kib(pid)["pss"] for pid in pids)
    return result


def memory_kib(pid: int) -> dict[str, int]:
    """Resident, proportional and private memory of a process, in KiB."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0])
    return {
        "rss": fields["Rss"],
        "pss": fields["Pss"],
        "private": fields["Private_Clean"] + fields["Private_Dirty"],
    }


def measure_memory(loader: Loader, server: Server, mode: str, seconds: float) -> list[dict[str, int]]:
    """Each worker's memory after one short load on a server that has served nothing else."""
    load = Cell(server.setup, mode, "sat").of(seconds)
    result = measure(loader, server, load)
    return [memory_kib(int(worker)) for worker in result["workers"]]


def measure_all_memory(
    loader: Loader, servers: dict[str, Server], scratch: Path, seconds: float
) -> dict[str, list[dict[str, int]]]:
    """Memory per worker of each two-worker setup, and of a twin of homing's workers that imports the same but routes
    nothing: what homing needs beyond its imports is the difference."""
    memory = {
        key: measure_memory(loader, server, "remote" if "remote" in server.setup.modes else "local", seconds)
        for key, server in servers.items()
        if server.setup.workers == 2 and not server.setup.behind_proxy
    }
    if "H" in servers:
        (scratch / "imports.txt").write_text("\n".join(servers["H"].ask("/modules")))
        with serving(MEMORY_TWIN, scratch) as twin:
            memory[MEMORY_TWIN.key] = measure_memory(loader, twin, "local", seconds)
    return memory


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_round(loader: Loader, setups: list[Setup], number: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Everything measured once; the servers live for this round only."""
    cells = cells_of_round(setups, number)
    measured: list[dict[str, Any]] = []
    load_average = os.getloadavg()[0]
    began = time.monotonic()
    # Short paths: a Unix socket's may have 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="homing-bench-") as scratch,
        all_serving(setups, Path(scratch)) as servers,
    ):
        memory = measure_all_memory(loader, servers, Path(scratch), min(MEMORY_SECONDS, 2 * seconds))
        for done, cell in enumerate(cells, start=1):
            result = measure(loader, servers[cell.setup.key], cell.of(seconds))
            measured.append({"setup": cell.setup.key, "mode": cell.mode, "load": cell.load, **result})
            say(
                f"round {number + 1}/{rounds} {done:3}/{len(cells)}  {cell.setup.key:3}{cell.mode:7}{cell.load:10}"
                f"{result['cpu_us']:7.0f} µs CPU {result['requests_per_second']:8.0f} per s"
                f"{result['p50_us']:8.0f} µs p50 {result['p99_us']:8.0f} µs p99"
                + (f"  {result['errors']} ERRORS" if result["errors"] else "")
                + (f"  {result['wrong']} WRONG" if result["wrong"] else "")
            )
    return {
        "cells": measured,
        "memory_kib": memory,
        "load_average_before": load_average,
        "seconds": round(time.monotonic() - began, 1),
    }


def version_of(program: str | None) -> str | None:
    """What a proxy says of itself: `HAProxy version 2.6.12…`, `nginx version: nginx/1.22.1`."""
    if program is None:
        return None
    done = subprocess.run([program, "-v"], capture_output=True, text=True, check=False)
    found = re.search(r"version:? (?:nginx/)?(\S+)", done.stdout + done.stderr)
    return found[1] if found else None


def chosen(keys: str | None) -> tuple[list[Setup], list[str]]:
    """The setups to measure, and a line for each that this machine cannot run.

    Raises:
        SystemExit: A key that names no setup.
    """
    known = {setup.key: setup for setup in SETUPS}
    wanted = list(known) if keys is None else keys.split(",")
    for key in wanted:
        if key not in known:
            raise SystemExit(f"no setup {key!r}: choose from {','.join(known)}")
    present: list[Setup] = []
    skipped: list[str] = []
    for key in wanted:
        reason = known[key].missing()
        if reason is None:
            present.append(known[key])
        else:
            skipped.append(f"{key} ({known[key].title}): {reason}")
    return present, skipped


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="default 15; fewer give wide intervals")
    parser.add_argument("--seconds", type=float, default=0.35, help="measured time of each cell (default 0.35)")
    parser.add_argument("--setups", help=f"comma-separated, default all: {','.join(s.key for s in SETUPS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where rounds.json and results.md go")
    parser.add_argument("--json", action="store_true", help="also print the rounds as JSON on stdout")
    return parser.parse_args()


def main() -> int:
    """Exit status: 0; 1 if any setup gave a wrong reply or an error, or could not be run."""
    options = arguments()
    setups, skipped = chosen(options.setups)
    for line in skipped:
        say(f"skipped {line}")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        **machine.described(haproxy=version_of(haproxy_program()), nginx=version_of(nginx_program())),
        "seconds_per_cell": options.seconds,
        "skipped": skipped,
        "rounds": [],
    }
    failed: list[str] = []
    try:
        loader = build_loader()
    except LoaderError as error:
        say(f"bench: {error}")
        return 1
    for number in range(options.rounds):
        try:
            result["rounds"].append(run_round(loader, setups, number, options.rounds, options.seconds))
        except (LoaderError, SetupError) as error:
            failed.append(f"{number + 1}: {error}")
            say(f"bench: round {failed[-1]}")
            if len(failed) == MAX_FAILED_ROUNDS:
                break
    result["failed_rounds"] = failed
    if not result["rounds"]:
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rounds.json").write_text(json.dumps(result, indent=1) + "\n")
    page = report.page(result)
    (options.out / "results.md").write_text(page)
    if options.json:
        print(json.dumps(result))
    say(f"\n{report.goals_table(result)}\nwrote {options.out / 'rounds.json'} and {options.out / 'results.md'}")
    bad = sum(cell["errors"] + cell["wrong"] for a_round in result["rounds"] for cell in a_round["cells"])
    return 1 if bad or failed else 0


if __name__ == "__main__":
    sys.exit(main())
