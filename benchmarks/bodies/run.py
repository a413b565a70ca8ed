"""Measures the memory of a worker that forwards large bodies; writes `rounds.json` and `results.md` beside this file.

`question.md` says what is measured and why.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.forwarding.setups import SETUPS, Server, SetupError, serving
from benchmarks.spread import Spread, spread, table, verdict

STREAMS: Final = 20
MIB: Final = 1 << 20
BLOCK: Final = 1 << 18
GOAL_MIB_PER_STREAM: Final = 2.0
MAX_CONNECTIONS: Final = 4000
TIMEOUT_SECONDS: Final = 300
WAYS: Final = ("upload", "download")
GOAL: Final = "{mib:g} MiB on each of {streams} streams, {way}: extra memory in the forwarder per stream"


class WrongReplyError(Exception):
    """A body came back short, changed or from another worker."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A connection to the forwarder, with a session of the owner's. Owns its connection."""

    connection: HTTPConnection
    cookie: str
    owner: str

    def upload(self, size: int) -> None:
        self.connection.putrequest("POST", "/sink")
        self.connection.putheader("Content-Length", str(size))
        self.connection.putheader("Cookie", self.cookie)
        self.connection.endheaders()
        block = bytes(BLOCK)
        for offset in range(0, size, BLOCK):
            self.connection.send(block[: size - offset])
        with self.connection.getresponse() as reply:
            said = json.loads(reply.read())
        if said != {"size": size, "worker": self.owner}:
            raise WrongReplyError(f"{size} bytes uploaded to worker {self.owner}, and the reply is {said}")

    def download(self, size: int) -> None:
        self.connection.request("GET", f"/source?size={size}", headers={"Cookie": self.cookie})
        with self.connection.getresponse() as reply:
            self._compare(reply, size)

    def _compare(self, reply: HTTPResponse, size: int) -> None:
        worker, zeros, got, left = reply.getheader("x-worker"), bytes(BLOCK), bytearray(BLOCK), size
        while count := reply.readinto(got):
            left -= count
            if got[:count] != zeros[:count]:
                raise WrongReplyError("a downloaded body has changed on its way")
        if left or worker != self.owner:
            raise WrongReplyError(f"{left} of {size} bytes are missing, from worker {worker} instead of {self.owner}")


def asked(connection: HTTPConnection, path: str) -> tuple[str, str]:
    """The worker that a reply names, and the cookie that it sets."""
    connection.request("GET", path)
    with connection.getresponse() as reply:
        worker: str = json.loads(reply.read())["worker"]
        return worker, (reply.getheader("Set-Cookie") or "").split(";")[0]


@contextmanager
def streams(port: int) -> Iterator[tuple[str, list[Stream]]]:
    """The worker that has enough connections first, which forwards, and streams from it to the other one."""
    with ExitStack() as stack:
        at: dict[str, list[HTTPConnection]] = {}
        forwarder = ""
        while not (forwarder and len(at) > 1):
            connection = stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)))
            worker, _ = asked(connection, "/whoami")
            at.setdefault(worker, []).append(connection)
            if sum(map(len, at.values())) > MAX_CONNECTIONS:
                raise SetupError(f"{MAX_CONNECTIONS} connections did not reach both workers")
            if not forwarder and len(at[worker]) == STREAMS:
                forwarder = worker
        [owner] = at.keys() - {forwarder}
        # The server may put a new session at another worker than the one asked.
        new = (asked(at[owner][0], "/start") for _ in range(MAX_CONNECTIONS))
        cookies = itertools.islice((cookie for worker, cookie in new if worker == owner), STREAMS)
        them = [Stream(connection, cookie, owner) for connection, cookie in zip(at[forwarder], cookies, strict=False)]
        if len(them) < STREAMS:
            raise SetupError(f"{MAX_CONNECTIONS} sessions did not give {STREAMS} to worker {owner}")
        yield forwarder, them


def resident_kib(pid: str) -> tuple[int, int]:
    """Now, and at most since `forget_peak`."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]), int(fields["VmHWM"].split()[0])


def forget_peak(pid: str) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def transfer(them: list[Stream], way: str, size: int) -> None:
    act = Stream.upload if way == "upload" else Stream.download
    with ThreadPoolExecutor(len(them)) as threads:
        list(threads.map(act, them, [size] * len(them)))


def measured(them: list[Stream], forwarder: str, way: str, size: int) -> dict[str, float]:
    """KiB above what the workers held before, and bytes per second."""
    workers = {"forwarder": forwarder, "owner": them[0].owner}
    for pid in workers.values():
        forget_peak(pid)
    before = {name: resident_kib(pid)[0] for name, pid in workers.items()}
    began = time.monotonic()
    transfer(them, way, size)
    seconds = time.monotonic() - began
    rises = {f"{name}_kib": float(resident_kib(pid)[1] - before[name]) for name, pid in workers.items()}
    return {**rises, "seconds": seconds, "mib_per_second": len(them) * size / MIB / seconds}


def one_round(server: Server, size: int) -> dict[str, dict[str, float]]:
    with streams(server.port) as (forwarder, them):
        for way in WAYS:
            transfer(them[:1], way, 8 * MIB)
        return {way: measured(them, forwarder, way, size) for way in WAYS}


def goal_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for way in WAYS:
        found = per_stream_mib(result, way, "forwarder")
        rows.append(
            (
                GOAL.format(mib=result["mib_per_stream"], streams=STREAMS, way=way),
                f"≤ {GOAL_MIB_PER_STREAM:g} MiB",
                f"{found.text(2)} MiB",
                verdict(found.median, GOAL_MIB_PER_STREAM),
            )
        )
    return rows


def per_stream_mib(result: dict[str, Any], way: str, worker: str) -> Spread:
    return spread([one[way][f"{worker}_kib"] / 1024 / STREAMS for one in result["rounds"]])


def section(result: dict[str, Any]) -> str:
    count, size = len(result["rounds"]), result["mib_per_stream"]
    rows = [
        (
            way,
            per_stream_mib(result, way, "forwarder").text(2),
            per_stream_mib(result, way, "owner").text(2),
            spread([one[way]["mib_per_second"] for one in result["rounds"]]).text(0),
        )
        for way in WAYS
    ]
    head = (
        f"{STREAMS} streams of {size:g} MiB",
        "forwarder, MiB per stream",
        "owner, MiB per stream",
        "MiB/s, all streams",
    )
    return "\n\n".join(
        (
            f"{machine.text(result)} Rounds: {count}. Load average before: {result['load_average']:.1f}.",
            table(("goal", "bound", "median (interval)", ""), goal_rows(result)),
            table(head, rows),
        )
    )


def page(results: list[dict[str, Any]]) -> str:
    parts = [
        "# What does a forwarded body cost in memory?",
        "Made by `benchmarks/bodies/run.py`, from `rounds.json` and `rounds-each-gib.json`; `question.md` says how. Medians, "
        "in brackets an interval of order statistics. Do not edit.",
    ]
    for result in results:
        parts += [f"## {result['mib_per_stream'] * STREAMS / 1024:.2g} GiB each way in all", section(result)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Exit status: 0; 1 if a reply was wrong, or the server could not be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each-gib", action="store_true", help="one round with 1 GiB on each stream; minutes")
    parser.add_argument("--mib", type=float, default=1024 / STREAMS, help="of each stream (default: 1 GiB in all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the rounds and results.md go")
    options = parser.parse_args()
    rounds, mib, name = options.rounds, options.mib, "rounds.json"
    if options.each_gib:
        rounds, mib, name = 1, 1024.0, "rounds-each-gib.json"
    setup = next(setup for setup in SETUPS if setup.key == "H0")
    result: dict[str, Any] = {
        **machine.described(),
        "mib_per_stream": mib,
        "load_average": os.getloadavg()[0],
        "rounds": [],
    }
    try:
        for number in range(rounds):
            with (
                tempfile.TemporaryDirectory(prefix="homing-bench-") as scratch,
                serving(setup, Path(scratch)) as server,
            ):
                result["rounds"].append(one_round(server, int(mib * MIB)))
            print(f"bodies: round {number + 1}/{rounds} {result['rounds'][-1]}", file=sys.stderr, flush=True)
    except (WrongReplyError, SetupError, OSError) as error:
        print(f"bodies: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / name).write_text(json.dumps(result, indent=1) + "\n")
    kept = [options.out / each for each in ("rounds.json", "rounds-each-gib.json")]
    (options.out / "results.md").write_text(page([json.loads(each.read_text()) for each in kept if each.exists()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
