"""µs and Python calls that the router adds to a request served where it arrives; `question.md` says what is measured."""

from __future__ import annotations

import argparse
import asyncio
import base64
import cProfile
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from itsdangerous import TimestampSigner

from homing.routing.options import RoutingOptions
from homing.routing.sticky import build
from homing.rundir import SESSION_OWNERS_DIR

SECRET = "benchmark"
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-length", b"2"), (b"content-type", b"application/json")],
}
BODY = {"type": "http.response.body", "body": b"{}"}


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send(dict(START))
    await send(dict(BODY))


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(message: Any) -> None:
    pass


def request_scope() -> dict[str, Any]:
    """What `homing run`'s protocol gives for a request of the benchmarks' loader, and a few headers more."""
    signed = TimestampSigner(SECRET).sign(base64.b64encode(json.dumps({"sid": "0123456789abcdef" * 2}).encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "scheme": "http",
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1:8000"),
            (b"user-agent", b"benchmark"),
            (b"accept", b"*/*"),
            (b"cookie", b"session=" + signed),
        ],
        "state": {},
        "method": "GET",
        "path": "/step",
        "raw_path": b"/step",
        "query_string": b"",
        "homing.head_length": 4,
        "homing.abort": print,
    }


def drive(target: Any, scope: dict[str, Any], times: int) -> None:
    cookie = scope["headers"][3][1]
    for _ in range(times):
        # Bytes of its own, as every request's are: their hash is not known yet.
        scope["headers"][3] = (b"cookie", bytes(memoryview(cookie)))
        try:
            target(dict(scope), receive, send).send(None)
        except StopIteration:
            continue
        raise AssertionError("the request waited for something")


def lowest_us(act: Callable[[int], None], batches: int, size: int = 100) -> float:
    lowest = float("inf")
    for _ in range(batches):
        before = time.perf_counter()
        act(size)
        lowest = min(lowest, time.perf_counter() - before)
    return lowest / size * 1e6


def python_calls(target: Any, scope: dict[str, Any]) -> list[str]:
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    drive(target, scope, 1)
    sys.setprofile(None)
    return calls[1:]


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        chosen = RoutingOptions(sessions=("signed-cookie:session:sid",), secret=SECRET, socket_dir=directory, workers=2)
        router = build(app, chosen)
        await router.open()
        try:
            scope = request_scope()
            drive(router, scope, 1000)
            calls = python_calls(router, scope)
            if options.calls:
                print(*calls, sep="\n")
            if options.profile:
                with cProfile.Profile() as profile:
                    drive(router, scope, 20_000)
                profile.print_stats("tottime")
            owners = os.path.join(directory, SESSION_OWNERS_DIR)
            name = os.listdir(owners)[0]
            fd = os.open(owners, os.O_RDONLY)

            def look(times: int) -> None:
                for _ in range(times):
                    os.readlink(name, dir_fd=fd)

            routed = lowest_us(lambda times: drive(router, scope, times), options.batches)
            alone = lowest_us(lambda times: drive(app, scope, times), options.batches)
            one_look = lowest_us(look, options.batches)
            os.close(fd)
        finally:
            await router.aclose()
    print(f"added {routed - alone:6.2f} µs (with {routed:.2f}, the app alone {alone:.2f}, one look {one_look:.2f})")
    print(f"added {len(calls) - len(python_calls(app, scope)):3} Python calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--calls", action="store_true", help="list the Python calls of one request")
    parser.add_argument("--profile", action="store_true", help="profile 20,000 requests")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
