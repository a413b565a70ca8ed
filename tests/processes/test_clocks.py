"""The wall clock of a running server jumps by days: only the age of cookies moves with it.

A library that every process of the server is started with adds what a file says to what the kernel calls the time of day.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import secrets
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import plain_http
from tests.support.plain_http import Reply
from tests.support.served import served

import homing

DAY = 86_400
SWEPT_SECONDS = 0.8  # with an idle time of 5 s, a sweep comes every half second
CORE = ("identity", "directory", "lifetime", "forwarding", "routing", "rundir", "runtime", "clock.py", "routes.py")
JSON = {"content-type": "application/json"}

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *shift;

__attribute__((constructor)) static void look(void) {
    const char *path = getenv("WALL_CLOCK_SHIFT");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *at = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
        if (at != MAP_FAILED) shift = at;
        close(fd);
    }
}

int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*of_libc)(clockid_t, struct timespec *);
    if (!of_libc) of_libc = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = of_libc(which, at);
    if (!failed && which == CLOCK_REALTIME && shift) at->tv_sec += *shift;
    return failed;
}
"""


@pytest.fixture
def shifted(tmp_path: Path) -> Iterator[tuple[dict[str, str], Callable[[int], None]]]:
    """The environment that the server is started with, and what sets its wall clock, in seconds off."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    source, library, shift = tmp_path / "shift.c", tmp_path / "shift.so", tmp_path / "shift"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(struct.pack("q", 0))
    with shift.open("r+b", buffering=0) as file:

        def set_to(seconds: int) -> None:
            os.pwrite(file.fileno(), struct.pack("q", seconds), 0)

        yield {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(shift)}, set_to


async def add(url: str, cookie: str) -> Reply:
    body = json.dumps({"item": "one"}).encode()
    return await plain_http.request(f"{url}/basket", "POST", body=body, headers=JSON | {"cookie": cookie})


def test_a_wall_clock_that_jumps_by_a_day_ends_no_session(
    shifted: tuple[dict[str, str], Callable[[int], None]],
) -> None:
    environment, set_to = shifted
    options = ("--session", "signed-cookie:session:sid", "--secret-env", "SESSION_SECRET", "--idle", "5")
    environment |= {"SESSION_SECRET": secrets.token_hex(16)}

    async def test(url: str) -> None:
        cookies = [(await plain_http.request(f"{url}/login", "POST")).cookie for _ in range(8)]
        items = 0

        async def all_go_on() -> None:
            nonlocal items
            items += 1
            replies = await asyncio.gather(*(add(url, cookie) for cookie in cookies))
            assert [reply.json()["items"] for reply in replies] == [items] * len(cookies)

        await all_go_on()
        for shift in (DAY, 13 * DAY, 0):
            set_to(shift)
            swept = time.monotonic() + SWEPT_SECONDS
            while time.monotonic() < swept:
                await all_go_on()
        # The library works: a cookie is too old on that day, and from the future on that one. Its session stays.
        for shift in (15 * DAY, -DAY):
            set_to(shift)
            assert {reply.status for reply in [await add(url, cookie) for cookie in cookies]} == {401}
            swept = time.monotonic() + SWEPT_SECONDS
            while time.monotonic() < swept:
                await add(url, cookies[0])
            set_to(0)
            await all_go_on()

    with served("examples.fastapi_session:app", *options, env=environment) as server:
        asyncio.run(test(server.url))


def test_only_the_age_of_cookies_and_what_people_read_is_told_by_the_wall_clock() -> None:
    """No other module of the core reads it: a duration is on the monotonic clock."""
    package = Path(homing.__file__).parent
    readers: dict[str, set[str]] = {}
    paths = [
        path for name in CORE for path in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py"))
    ]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and node.value.id == "time" and node.attr in ("time", "time_ns"))
                or node.attr in ("wall", "now", "utcnow", "today", "fromtimestamp")
            ):
                readers.setdefault(str(path.relative_to(package)), set()).add(node.attr)
    assert readers == {
        "clock.py": {"time"},
        "identity/cookie.py": {"wall"},
        "identity/set_cookie.py": {"wall"},
        # The supervisor's clock hands it on.
        "runtime/heartbeat.py": {"wall"},
        # How old a directory with nothing in it is, whose time is the file system's.
        "rundir/leftovers.py": {"time"},
        # And when a log line was written, for machines.
        "runtime/logs.py": {"fromtimestamp"},
        # When a worker started, for people to read.
        "runtime/publisher.py": {"wall"},
    }
