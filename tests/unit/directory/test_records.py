"""Owner records in the file system, where something is not as it should be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.worlds import FileWorld, Worker

from homing.directory import Given, SessionOwners
from homing.directory.failpoints import failpoint
from homing.errors import DirectoryError, MalformedRecordError, RunDirectoryError
from homing.rundir import SESSION_OWNERS_DIR, RunDirectory, new_worker_id
from homing.types import SESSION, key_digest

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world() -> AsyncIterator[FileWorld]:
    world = FileWorld()
    yield world
    await world.aclose()


@pytest.fixture
async def here(world: FileWorld) -> Worker:
    return world.worker()


@pytest.mark.parametrize("junk", ["file", "empty", "fifo", "directory", "hard link"])
async def test_what_is_no_symbolic_link_is_malformed_and_never_waited_for(
    world: FileWorld, here: Worker, junk: str
) -> None:
    path = Path(world.record_path("s"))
    match junk:
        case "file":
            path.write_text(f"{world.boot}.{here.id}")
        case "empty":
            path.touch()
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "hard link":
            Path(world.path, "other").write_text("x")
            path.hardlink_to(Path(world.path, "other"))
    for look in (here.owners.owner, here.owners.acquire, here.owners.rewrite):
        with pytest.raises(MalformedRecordError):
            look("s")
    with pytest.raises(MalformedRecordError), here.owners.serving("s"):
        pytest.fail("served")
    with pytest.raises(MalformedRecordError):
        await here.owners.rewrite_all(["s"], world.asking(here))
    assert path.exists()


async def test_a_record_may_lead_anywhere_and_is_never_followed(world: FileWorld, here: Worker) -> None:
    world.plant("s", "/etc/passwd")
    with pytest.raises(MalformedRecordError):
        here.owners.acquire("s")


async def test_a_directory_that_was_moved_away_takes_no_new_session(world: FileWorld, here: Worker) -> None:
    here.held.add("s")
    here.owners.acquire("s")
    moved = world.path + "-moved"
    os.rename(world.path, moved)
    os.mkdir(world.path, 0o700)
    try:
        with pytest.raises(DirectoryError):
            here.owners.acquire("new")
        with pytest.raises(DirectoryError):
            here.owners.owner("new")
        assert os.listdir(os.path.join(moved, SESSION_OWNERS_DIR)) != []
        assert len(os.listdir(os.path.join(moved, SESSION_OWNERS_DIR))) == 1  # the new one left no record
    finally:
        os.rmdir(world.path)
        os.rename(moved, world.path)


async def test_a_replaced_records_directory_takes_no_new_session(world: FileWorld, here: Worker) -> None:
    records = os.path.join(world.path, SESSION_OWNERS_DIR)
    os.rename(records, records + "-old")
    os.mkdir(records, 0o700)
    for look in (here.owners.owner, here.owners.acquire):
        with pytest.raises(DirectoryError):
            look("new")


async def test_a_release_that_cannot_unlink_is_pending_and_tried_again(world: FileWorld, here: Worker) -> None:
    here.owners.acquire("s")
    moved = world.path + "-moved"
    records = os.path.join(world.path, SESSION_OWNERS_DIR)
    os.rename(world.record_path("s"), os.path.join(world.path, "kept"))
    os.rename(records, moved)
    here.owners.release("s")  # does not raise, and cannot tell whether the record is gone
    assert not here.owners.mine("s")
    assert here.owners.release_pending() == 1
    os.rename(moved, records)
    os.rename(os.path.join(world.path, "kept"), world.record_path("s"))
    assert here.owners.owner("s") == here.id
    assert here.owners.release_pending() == 0
    assert here.owners.owner("s") is None
    assert here.owners.counters.release_failures == 2


async def test_a_session_whose_release_is_pending_can_be_started_again(world: FileWorld, here: Worker) -> None:
    here.owners.acquire("s")
    records = os.path.join(world.path, SESSION_OWNERS_DIR)
    os.rename(world.record_path("s"), os.path.join(world.path, "kept"))
    os.rename(records, world.path + "-moved")
    here.owners.release("s")
    os.rename(world.path + "-moved", records)
    os.rename(os.path.join(world.path, "kept"), world.record_path("s"))
    here.held.add("s")
    assert here.owners.acquire("s") == here.id
    assert here.owners.mine("s")
    assert here.owners.release_pending() == 0
    with here.owners.serving("s"):
        pass


async def test_a_session_whose_release_is_pending_is_not_given(world: FileWorld, here: Worker) -> None:
    other = world.worker()
    here.owners.acquire("s")
    records, moved, kept = os.path.join(world.path, SESSION_OWNERS_DIR), world.path + "-moved", world.path + "-kept"
    fenced = asyncio.Event()
    with failpoint("give.fenced", fenced.set), here.owners.serving("s"):
        giving = asyncio.create_task(here.owners.give("s", other.id, timeout_seconds=30))
        await fenced.wait()
        os.rename(world.record_path("s"), kept)
        os.rename(records, moved)
    os.rename(moved, records)
    os.rename(kept, world.record_path("s"))
    assert await giving is Given.BUSY
    assert here.dropped == []
    assert here.owners.release_pending() == 0
    assert here.owners.owner("s") is None


async def test_a_give_that_fails_after_the_state_was_dropped_leaves_no_record(world: FileWorld, here: Worker) -> None:
    other = world.worker()
    here.held.add("s")
    here.owners.acquire("s")

    def lose_what_was_prepared() -> None:
        for name in os.listdir(world.path):
            if name.startswith(f".{here.id}."):
                os.unlink(os.path.join(world.path, name))

    with failpoint("give.before_rename", lose_what_was_prepared):
        assert await here.owners.give("s", other.id, timeout_seconds=5) is Given.BUSY
    # A record that named this worker would stand for a session without its state; without one the asker's restore opens it.
    assert here.dropped == ["s"]
    assert world.record("s") is None
    assert not here.owners.mine("s")


async def test_a_record_says_whose_it_is_from_its_first_moment(world: FileWorld, here: Worker) -> None:
    made: list[object] = []

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        # A hook stays for good, so it looks at this session's record only.
        if event == "os.symlink" and arguments[1] == key_digest(SESSION, "from its first moment"):
            made.append(arguments[0])

    sys.addaudithook(audit)
    here.owners.acquire("from its first moment")
    assert made == [f"{world.boot}.{here.id}"]


async def test_the_lock_file_is_never_removed_and_one_inode(world: FileWorld, here: Worker) -> None:
    other = world.worker()
    other.owners.acquire("s")
    other.owners.acquire("t")
    await world.kill(other)
    here.owners.rewrite("s")
    inode = os.stat(os.path.join(world.path, "owners.lock")).st_ino
    here.owners.rewrite("t")
    assert os.stat(os.path.join(world.path, "owners.lock")).st_ino == inode


async def test_owners_hold_their_workers_life_unless_the_run_directory_does(world: FileWorld) -> None:
    worker_id = new_worker_id()
    with RunDirectory.open(world.path) as run, RunDirectory.open(world.path) as watcher:
        life = run.hold_life(worker_id)
        borrowing = SessionOwners(world.path, worker_id, lambda session_id: True, run_directory=run)
        borrowing.acquire("s")
        await borrowing.aclose()
        await borrowing.aclose()
        assert not watcher.is_dead(worker_id)
        assert run.intact()
        life.close()
        assert watcher.is_dead(worker_id)

        owning = SessionOwners(world.path, new_worker_id(), lambda session_id: True)
        assert not watcher.is_dead(owning.worker_id)
        await owning.aclose()
        assert watcher.is_dead(owning.worker_id)


async def test_a_worker_id_is_used_once(world: FileWorld, here: Worker) -> None:
    with pytest.raises(RunDirectoryError):
        SessionOwners(world.path, here.id, lambda session_id: True)
    with pytest.raises(ValueError, match="worker ID"):
        SessionOwners(world.path, "../x", lambda session_id: True)


@pytest.fixture
def tiny() -> Iterator[str]:
    """A file system with room for a few files only; needs the right to mount one."""
    path = tempfile.mkdtemp(prefix="homing-tiny-")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=12,mode=0700", "homing-test", path]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        os.rmdir(path)
        pytest.skip("a tiny tmpfs cannot be mounted here: run as root")
    yield path
    subprocess.run(["umount", "-l", path], check=True)
    os.rmdir(path)


async def test_on_a_full_disk_new_sessions_fail_and_those_there_are_go_on(tiny: str) -> None:
    owners = SessionOwners(tiny, new_worker_id(), lambda session_id: held)
    held = True
    acquired = 0
    with pytest.raises(DirectoryError, match="cannot be made"):
        for acquired in range(100):
            owners.acquire(f"session {acquired}")
    assert 0 < acquired < 12
    assert len(owners) == acquired
    assert owners.owner(f"session {acquired}") is None
    with owners.serving("session 0"):
        assert owners.owner("session 0") == owners.worker_id
    held = False
    owners.release("session 0")
    assert owners.acquire("after relief") == owners.worker_id
    await owners.aclose()


WITHOUT_PERMISSION = """
import asyncio, os, tempfile
from homing.directory import SessionOwners
from homing.errors import DirectoryError
from homing.rundir import SESSION_OWNERS_DIR, boot_id, new_worker_id

boot_id()  # reads with a codec, which another user may have no way to load
if os.geteuid() == 0:  # who may write everywhere
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
path = tempfile.mkdtemp(prefix="homing-test-")
records = os.path.join(path, SESSION_OWNERS_DIR)
held = True

async def main():
    global held
    owners, other = (SessionOwners(path, new_worker_id(), lambda session_id: held) for _ in range(2))
    for session in ("one", "two"):
        assert owners.acquire(session) == owners.worker_id
    os.chmod(records, 0o500)  # to be read, and not to be written
    for each in (owners, other):
        try:
            each.acquire("new")
        except DirectoryError:
            pass
        else:
            raise AssertionError("acquired without permission")
        assert each.owner("one") == owners.worker_id and each.owner("new") is None
    with owners.serving("one"):
        pass
    held = False
    owners.release("one")
    assert other.owner("one") == owners.worker_id  # pending: its record is still there
    os.chmod(records, 0o000)  # nor to be read
    for each in (owners, other):
        try:
            each.owner("two")
        except DirectoryError:
            pass
        else:
            raise AssertionError("looked up without permission")
    os.chmod(records, 0o700)
    owners.release_pending()
    assert other.owner("one") is None and other.owner("two") == owners.worker_id
    await owners.aclose()
    await other.aclose()

try:
    asyncio.run(main())
    print("done")
finally:
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
"""


async def test_without_permission_new_sessions_fail_and_those_there_are_go_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PERMISSION], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


async def test_closed_owners_look_nowhere_else(world: FileWorld, here: Worker) -> None:
    here.owners.acquire("s")
    await here.owners.aclose()
    for look in (here.owners.owner, here.owners.acquire):
        for session_id in ("s", "new"):
            with pytest.raises(DirectoryError):
                look(session_id)
    with pytest.raises(DirectoryError):
        await here.owners.compact(0)
    with pytest.raises(DirectoryError):
        here.owners.rewrite("s")
