"""The single costs of owner records, with few sessions and with many. See question.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

from homing.directory import SessionOwners
from homing.rundir import SESSION_OWNERS_DIR, create_session_socket_dir, new_worker_id, remove_run_directory
from homing.types import SESSION, key_digest

CALLS = 2000
FEW, MANY = 100, 100_000


class Bench:
    """One server's directory with so many live sessions, owned by one worker, and another worker that looks."""

    def __init__(self, sessions: int) -> None:
        self.path = create_session_socket_dir()
        self.here = SessionOwners(self.path, new_worker_id(), lambda session_id: session_id.startswith("live"))
        self.there = SessionOwners(self.path, new_worker_id(), lambda session_id: True)
        for number in range(sessions):
            self.here.acquire(f"live {number}")
        self.live = [f"live {number * (sessions // 100)}" for number in range(100)] * (CALLS // 100)
        self.new = [f"new {number}" for number in range(CALLS)]
        self.records = os.path.join(self.path, SESSION_OWNERS_DIR)

    def rows(self) -> dict[str, Callable[[], float]]:
        return {
            "bare symlink": self.bare_symlink,
            "bare readlink": self.bare_readlink,
            "acquire": self.acquire,
            "acquire + release": self.acquire_release,
            "acquire, another owns it": lambda: timed(self.there.acquire, self.live),
            "owner, this worker": lambda: timed(self.here.owner, self.live),
            "owner, another worker": lambda: timed(self.there.owner, self.live),
            "owner, nobody": lambda: timed(self.there.owner, self.new),
            "mine": lambda: timed(self.here.mine, self.live),
            "serving": self.serving,
        }

    def bare_symlink(self) -> float:
        names = [os.path.join(self.records, f"bare {number}") for number in range(CALLS)]
        cost = timed(lambda name: os.symlink("x" * 65, name), names)
        for name in names:
            os.unlink(name)
        return cost

    def bare_readlink(self) -> float:
        names = [os.path.join(self.records, key_digest(SESSION, session_id)) for session_id in self.live]
        return timed(os.readlink, names)

    def acquire(self) -> float:
        cost = timed(self.here.acquire, self.new)
        for session_id in self.new:
            self.here.release(session_id)
        return cost

    def acquire_release(self) -> float:
        def both(session_id: str) -> None:
            self.here.acquire(session_id)
            self.here.release(session_id)

        return timed(both, self.new)

    def serving(self) -> float:
        def serve(session_id: str) -> None:
            with self.here.serving(session_id):
                pass

        return timed(serve, self.live)

    async def aclose(self) -> None:
        await self.here.aclose()
        await self.there.aclose()
        remove_run_directory(self.path)


def timed(act: Callable[[str], object], keys: list[str]) -> float:
    """CPU microseconds per call, the loop's own cost included."""
    start = time.process_time_ns()
    for key in keys:
        act(key)
    return (time.process_time_ns() - start) / len(keys) / 1000


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the raw rounds to this file")
    options = parser.parse_args()
    few, many = Bench(FEW), Bench(MANY)
    rounds: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for name in few.rows():
            rounds.setdefault(name, []).append((few.rows()[name](), many.rows()[name]()))
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs, {few.path}")
    print(f"{options.rounds} rounds of {CALLS} calls; CPU µs per call: median (least–greatest)\n")
    print(f"| {'':24} | {FEW} sessions | {MANY} sessions | ratio |\n| --- | --- | --- | --- |")
    for name, costs in rounds.items():
        columns = [_spread([cost[size] for cost in costs], 1) for size in (0, 1)]
        columns.append(_spread([cost[1] / cost[0] for cost in costs], 2))
        print(f"| {name:24} | {' | '.join(columns)} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"sessions": [FEW, MANY], "calls": CALLS, "microseconds": rounds}, file, indent=1)
    await few.aclose()
    await many.aclose()


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


if __name__ == "__main__":
    asyncio.run(main())
