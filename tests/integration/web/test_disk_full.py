"""A disk without room, as it is: a small file system that is filled to the last byte under live sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chromium import ChromiumWorld, play, ref_of

from homing.web.errors import CapacityError
from homing.web.recording import EVENTS_FILE, TRACE_FILE
from homing.web.replay import find_recording, replay_page

PAGE = "<title>Page</title><button onclick=\"this.textContent = 'Gone'\">Go</button> <a href=/file>File</a>"


async def large_file(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 3000000\r\n"
        b"content-disposition: attachment; filename=report.bin\r\nconnection: close\r\n\r\n" + b"x" * 3_000_000
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of this test's own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m,mode=0700", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take what room there is; whoever deletes the file has it back."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return ballast


def test_a_full_disk_costs_files_and_no_session(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Recordings, traces, downloads and the browsers' own files are all on it.
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    recordings = disk / "recordings"

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/", runtime_profile="trace")
        await world.click("s", "File")
        while not (seen := await world.manager.observe("s")).downloads or seen.downloads[0].status == "started":
            await asyncio.sleep(0.02)
        assert seen.downloads[0].status == "complete"
        while not [path for path in recordings.glob(f"*/{EVENTS_FILE}") if path.stat().st_size]:
            await asyncio.sleep(0.02)  # what came before the disk was full is kept
        ballast = fill(disk)
        assert os.statvfs(disk).f_bavail == 0
        # The session is as it was: it looks, acts, and is told what became of a download.
        result = await world.click("s", "Go")
        assert result.execution_ok
        assert "Gone" in result.observation.axtree
        await world.step("s", {"action": "click", "ref": ref_of(result.observation, "File")})
        while len(seen.downloads) < 2 or seen.downloads[1].status == "started":
            await asyncio.sleep(0.02)
            seen = await world.manager.observe("s")
        assert (seen.downloads[0].status, seen.downloads[1].status) == ("complete", "cancelled")
        # A seed has a session, or a reason: nothing in between.
        with contextlib.suppress(CapacityError):
            await world.seed("t", "/")
        assert await world.manager.close_session("t")
        assert (await world.manager.evaluate("s")).reward == 0.0
        assert await world.manager.close_session("s")
        artifacts = {each.uri.rpartition("/")[2]: each for each in await world.manager.recording_artifacts("s")}
        assert artifacts[EVENTS_FILE].status == "failed"
        assert artifacts[TRACE_FILE].status == "failed"
        assert all((each.status == "complete") == (each.size_bytes > 0) for each in artifacts.values())
        ballast.unlink()
        assert (await world.seed("after", "/", runtime_profile="trace")).title == "Page"
        assert await world.manager.close_session("after")
        assert {each.status for each in await world.manager.recording_artifacts("after")} == {"complete"}

    play({"/": PAGE, "/file": large_file}, script, recordings=recordings)
    page = replay_page(find_recording(recordings, "s"))
    assert "button &quot;Go&quot;" in page  # as far as it could be written
    assert 'base64,"' not in page
    assert os.listdir(disk) == ["recordings"]
