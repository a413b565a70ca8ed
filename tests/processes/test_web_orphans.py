"""What dead workers leave is found by its mark and ended; everything else is left alone. Real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.running import ROOT, wait_until_gone

from homing.rundir import SESSION_SOCKET_DIR_ENV
from homing.web.base import Footprint, ProcessMark
from homing.web.processes import (
    OWNER_ENV,
    browser_environment,
    end,
    end_orphans,
    is_running,
    left_of,
    mark,
    orphans,
    owner_mark,
    remove_folder,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WORKER = """
import os, subprocess, sys
from homing.web.processes import browser_environment
# A browser in a session of its own, as drivers start it; it has a child that has cleared its environment.
browser = subprocess.Popen(
    [sys.executable, "-c", '''
import os, subprocess, sys
child = subprocess.Popen(["sleep", "300"], env={})
print(os.getpid(), child.pid, flush=True)
sys.stdin.read()
child.wait()
'''],
    env=browser_environment(), stdin=subprocess.PIPE, stdout=sys.stdout, start_new_session=True,
)
sys.stdin.read()
"""


@contextlib.contextmanager
def worker() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A worker with a browser; everything of it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), SESSION_SOCKET_DIR_ENV: "/nowhere"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    found = [int(pid) for pid in process.stdout.readline().split()]
    try:
        yield process, found
    finally:
        for pid in [process.pid, *found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_orphans_are_found_by_their_mark_and_ended_in_time_and_other_processes_are_left_alone() -> None:
    with worker() as (alive, of_living), worker() as (dead, of_dead):
        other = subprocess.Popen(["sleep", "300"])
        try:
            assert not {each.pid for each in orphans()} & {*of_living, *of_dead}
            os.kill(of_dead[0], signal.SIGSTOP)  # one that cannot end by itself
            dead.kill()
            dead.wait()
            assert {each.pid for each in orphans()} >= set(of_dead)
            began = time.monotonic()
            assert end_orphans() >= 2
            assert time.monotonic() - began < 2.0
            for pid in of_dead:
                wait_until_gone(pid, 1.0)
            assert not {each.pid for each in orphans()} & set(of_dead)
            assert all(mark(pid) is not None for pid in of_living)
            assert alive.poll() is None
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


def test_nothing_is_an_orphan_to_who_counts_time_otherwise() -> None:
    """In a time namespace every process has started at another time than its own worker has written down."""
    elsewhere = ["unshare", "--time", "--boottime", "1000"]
    if not shutil.which("unshare") or subprocess.run([*elsewhere, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a time namespace (unshare --time): run the tests where it may")
    looking = "from homing.web.processes import orphans; print(*(each.pid for each in orphans()))"
    with worker() as (_, of_living):
        seen = subprocess.run(
            [*elsewhere, sys.executable, "-c", looking],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert not {int(pid) for pid in seen.stdout.split()} & set(of_living)


def test_a_browser_knows_its_worker_and_not_the_run_directory() -> None:
    with worker() as (process, (browser, child)):
        environment = Path(f"/proc/{browser}/environ").read_bytes().split(b"\0")
        marks = [each for each in environment if each.startswith(OWNER_ENV.encode())]
        assert len(marks) == 1
        assert f".{process.pid}.".encode() in marks[0]
        assert not [each for each in environment if each.startswith(SESSION_SOCKET_DIR_ENV.encode())]
        assert Path(f"/proc/{child}/environ").read_bytes() == b""


def test_a_mark_is_this_very_process_and_no_zombie() -> None:
    process = subprocess.Popen(["sleep", "300"])
    found = mark(process.pid)
    assert found is not None
    assert is_running(found)
    assert not is_running(ProcessMark(found.pid, found.started - 1))
    assert end([found], 5.0) == []
    assert not is_running(found)
    process.wait()
    # Nothing is done to a process that is not the very one, though its PID is.
    own = mark(os.getpid())
    assert own is not None
    assert end([ProcessMark(own.pid, own.started - 1)], 5.0) == []


def test_what_is_left_of_a_lease_is_said_until_it_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "file").write_text("x")
    process = subprocess.Popen(["sleep", "300"])
    found = mark(process.pid)
    assert found is not None
    footprint = Footprint({found}, {folder})
    assert left_of(footprint) == [f"process {process.pid}", f"folder {folder}"]
    end([found], 5.0)
    process.wait()
    remove_folder(folder)
    remove_folder(folder)
    assert left_of(footprint) == []


def test_a_folder_that_others_delete_too_is_gone_whoever_is_quicker(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / str(number)
        for part in range(20):
            (folder / f"part{part}").mkdir(parents=True)
            for each in range(10):
                (folder / f"part{part}" / str(each)).touch()
        with ThreadPoolExecutor(2) as threads:
            inner = threads.submit(lambda folder=folder: [remove_folder(each) for each in sorted(folder.iterdir())])
            remove_folder(folder)
            assert not folder.exists()
            inner.result()


@pytest.mark.parametrize(
    "text",
    ["", "x", "1.2", "a.b.c", f"{os.getpid()}.{os.getpid()}.1"],
    ids=["empty", "word", "two", "letters", "namespace"],
)
def test_a_mark_that_cannot_be_read_or_is_another_namespaces_is_nobodys(text: str) -> None:
    process = subprocess.Popen(["sleep", "300"], env={OWNER_ENV: text})
    try:
        assert process.pid not in {each.pid for each in orphans()}
    finally:
        process.kill()
        process.wait()


def test_the_environment_for_a_browser_can_be_made_of_another() -> None:
    made = browser_environment({"A": "b", SESSION_SOCKET_DIR_ENV: "/x"})
    assert made == {"A": "b", OWNER_ENV: owner_mark()}
