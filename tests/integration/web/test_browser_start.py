"""A browser that does not start, in every way that leaves something behind: processes of a session without its leader too."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chromium import require_chromium

from homing.web.base import BrowserSpec
from homing.web.chromium.provider import LocalProvider, LocalSettings
from homing.web.errors import BrowserStartError
from homing.web.models import Task
from homing.web.processes import OWNER_ENV, is_stopped, mark

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# What a browser does: it leads a session of processes, whose environment tells nothing.
STARTS = """#!/bin/sh
[ "$1" = --version ] && {{ echo "Chromium 1"; exit; }}
env -i sleep {number} &
{then}
"""


def with_argument(text: str) -> list[int]:
    """The processes that were started with this argument, dead ones left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and mark(int(entry.name)) is not None:
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line.split(b"\0"):
                found.append(int(entry.name))
    return found


@pytest.fixture
def number(tmp_path: Path) -> Iterator[str]:
    """A time to sleep that nobody else sleeps."""
    number = f"{1000 + os.getpid() / 1e7:.7f}"
    yield number
    assert with_argument(number) == []


def provider(tmp_path: Path, number: str, then: str) -> LocalProvider:
    require_chromium()
    path = tmp_path / "chromium"
    path.write_text(STARTS.format(number=number, then=then))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return LocalProvider(LocalSettings(executable=str(path), warm=0))


SPEC = BrowserSpec("s", Task(benchmark="pages", task_id="/"), lease_seconds=60.0)


def test_a_part_that_is_held_is_ended_though_its_leader_died_before_it_served(tmp_path: Path, number: str) -> None:
    async def test() -> None:
        supply = provider(tmp_path, number, "kill -STOP $!; sleep 0.3; kill -KILL $$")
        async with asyncio.timeout(60):
            with pytest.raises(BrowserStartError, match="did not start"):
                await supply.acquire(SPEC)
            assert with_argument(number) == []
            await supply.aclose()

    asyncio.run(test())


def test_a_start_ends_early_where_a_part_is_held(tmp_path: Path, number: str) -> None:
    async def test() -> None:
        supply = provider(tmp_path, number, f"kill -STOP $!; exec sleep {number}")
        # Half of what a start may take.
        async with asyncio.timeout(15):
            with pytest.raises(BrowserStartError, match="did not start"):
                await supply.acquire(SPEC)
        await supply.aclose()

    asyncio.run(test())


def test_the_end_does_not_wait_for_a_browser_that_does_not_start_nor_for_those_behind_it(
    tmp_path: Path, number: str
) -> None:
    async def test() -> None:
        supply = provider(tmp_path, number, f"exec sleep {number}")
        starting = [asyncio.create_task(supply.acquire(SPEC)) for _ in range(3)]
        while not (found := with_argument(number)):
            await asyncio.sleep(0.02)
        assert not any(is_stopped(each) for pid in found if (each := mark(pid)) is not None)
        async with asyncio.timeout(15):
            await supply.aclose()
            for each in starting:
                with pytest.raises(BrowserStartError, match="is closed"):
                    await each

    asyncio.run(test())


def test_sessions_that_come_together_open_one_way_out_and_the_end_leaves_none(tmp_path: Path, number: str) -> None:
    async def test() -> None:
        def listening() -> int:
            return len([line for line in Path("/proc/self/net/tcp").read_text().splitlines() if _is_ours(line)])

        before = listening()
        supply = provider(tmp_path, number, f"exec sleep {number}")
        starting = [asyncio.create_task(supply.acquire(SPEC)) for _ in range(5)]
        while not with_argument(number):
            await asyncio.sleep(0.02)
        assert listening() == before + 1
        await supply.aclose()
        for each in starting:
            with pytest.raises(BrowserStartError, match="is closed"):
                await each
        assert listening() == before

    asyncio.run(test())


def _is_ours(line: str) -> bool:
    """Whether a line of the kernel's table is of a socket of this process that listens."""
    fields = line.split()
    if fields[3] != "0A":
        return False
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return f"socket:[{fields[9]}]" in {os.readlink(link) for link in links if os.path.lexists(link)}


def test_what_a_browser_starts_shows_no_mark_in_these_tests(tmp_path: Path, number: str) -> None:
    async def test() -> None:
        supply = provider(tmp_path, number, f"exec sleep {number}")
        starting = asyncio.create_task(supply.acquire(SPEC))
        while len(found := with_argument(number)) < 2:
            await asyncio.sleep(0.02)
        marked = [pid for pid in found if OWNER_ENV.encode() in Path(f"/proc/{pid}/environ").read_bytes()]
        assert len(marked) == 1
        await supply.aclose()
        with pytest.raises(BrowserStartError):
            await starting

    asyncio.run(test())
