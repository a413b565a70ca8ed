"""Workers killed, stopped and forked between two steps of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from tests.support.owner_processes import OwnerProcess
from tests.support.worlds import FileWorld, Worker

from homing.directory import Given
from homing.directory.restores import Restores
from homing.errors import DirectoryBusyError, DirectoryError
from homing.rundir import RunDirectory
from homing.types import WorkerId

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
    """The worker that this process is."""
    return world.worker()


Start = Callable[..., OwnerProcess]


@pytest.fixture
def start(world: FileWorld) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(failpoints: str = "") -> OwnerProcess:
            process = OwnerProcess(world.path, failpoints)
            stack.callback(process.close)
            return process

        yield start


def dies(process: OwnerProcess, command: str, *arguments: str) -> None:
    process.send(command, *arguments)
    with pytest.raises(EOFError):
        process.answer()
    process.join()


async def nobody(owner: WorkerId, session_id: str) -> Given:
    raise ConnectionRefusedError(owner)


async def test_killed_after_the_record_before_the_handler_its_session_stays_gone(
    world: FileWorld, here: Worker, start: Start
) -> None:
    process = start("acquire.after_symlink=kill")
    dies(process, "acquire", "s")
    assert here.owners.owner("s") == process.id
    assert here.owners.acquire("s") == process.id  # found, not adopted: that ID is burnt
    await here.owners.restore("s", nobody, deadline_seconds=10, opened=here.open)
    assert here.opened == ["s"]


async def test_killed_after_the_unlink_before_forgetting_its_session_is_nobodys(here: Worker, start: Start) -> None:
    process = start("release.after_unlink=kill")
    assert process.call("acquire", "s") == process.id
    dies(process, "release", "s")
    assert here.owners.owner("s") is None
    assert here.owners.acquire("s") == here.id


async def test_killed_while_holding_the_lock_the_next_gets_it_at_once(here: Worker, start: Start) -> None:
    first = start()
    first.call("acquire", "s")
    first.kill()
    second = start("lock.held=kill")
    dies(second, "restore", "s")
    await here.owners.restore("s", nobody, deadline_seconds=10, opened=here.open)
    assert here.opened == ["s"]
    assert here.owners.counters.lock_timeouts == 0


async def test_killed_with_a_prepared_link_the_next_who_holds_the_lock_removes_it(
    world: FileWorld, here: Worker, start: Start
) -> None:
    first = start()
    first.call("acquire", "s")
    first.kill()
    second = start("take.before_rename=kill")
    dies(second, "restore", "s")
    assert any(name.startswith(f".{second.id}.") for name in os.listdir(world.path))
    assert here.owners.owner("s") == first.id
    await here.owners.restore("s", nobody, deadline_seconds=10, opened=here.open)
    assert not any(name.startswith(".") for name in os.listdir(world.path))


async def test_killed_after_it_took_a_dead_workers_record_it_is_the_dead_owner(here: Worker, start: Start) -> None:
    first = start()
    first.call("acquire", "s")
    first.kill()
    second = start("take.after_rename=kill")
    dies(second, "restore", "s")
    assert here.owners.owner("s") == second.id
    await here.owners.restore("s", nobody, deadline_seconds=10, opened=here.open)
    assert here.owners.mine("s")


@pytest.mark.parametrize("point", ["give.fenced", "give.before_rename", "give.after_rename"])
async def test_an_owner_killed_inside_a_give_leaves_the_session_to_the_asker(
    here: Worker, start: Start, point: str
) -> None:
    process = start(f"{point}=kill")
    process.call("acquire", "s")

    async def ask(owner: WorkerId, session_id: str) -> Given:
        return await process.asked(here.id, session_id)

    await here.owners.restore("s", ask, deadline_seconds=30, opened=here.open)
    assert here.opened == ["s"]
    assert here.owners.owner("s") == here.id
    assert here.owners.counters.taken == (point != "give.after_rename")


async def test_a_live_owner_gives_to_a_restore_in_another_process(here: Worker, start: Start) -> None:
    process = start()
    process.call("acquire", "s")

    async def ask(owner: WorkerId, session_id: str) -> Given:
        return await process.asked(here.id, session_id)

    await here.owners.restore("s", ask, deadline_seconds=30, opened=here.open)
    assert here.opened == ["s"]
    assert process.call("mine", "s") is False


async def test_a_paused_lock_holder_stops_restores_for_a_while_and_nobodys_event_loop(
    world: FileWorld, here: Worker, start: Start
) -> None:
    first = start()
    for session_id in ("s", "t"):
        first.call("acquire", session_id)
    first.kill()
    here.held.add("own")
    here.owners.acquire("own")
    paused = start("lock.held=stop")
    paused.send("restore", "s")
    paused.stop_signal()

    served = 0
    restoring = asyncio.create_task(here.owners.restore("t", nobody, deadline_seconds=10, opened=here.open))
    while not restoring.done():
        with here.owners.serving("own"):
            served += 1
        await asyncio.sleep(0)
    assert isinstance(restoring.exception(), DirectoryBusyError)
    assert served > 10  # requests went on all the while
    assert here.owners.owner("t") == first.id
    assert here.owners.acquire("new") == here.id  # and take no lock

    paused.go_on()
    paused.answer()
    await here.owners.restore("t", nobody, deadline_seconds=10, opened=here.open)
    assert here.owners.owner("s") == paused.id


async def test_a_paused_owner_is_not_dead(world: FileWorld, here: Worker, start: Start) -> None:
    process = start()
    process.call("acquire", "s")
    os.kill(process.pid, signal.SIGSTOP)
    process.stop_signal()
    with RunDirectory.open(world.path) as run:
        assert not run.is_dead(process.id)
        assert process.id in run.live_workers()
        process.kill()
        assert run.is_dead(process.id)
        assert process.id not in run.live_workers()


async def test_a_forked_child_does_not_keep_its_dead_parent_alive(world: FileWorld, here: Worker, start: Start) -> None:
    process = start()
    process.call("acquire", "s")
    child = process.call("fork")
    try:
        process.kill()
        with RunDirectory.open(world.path) as run:
            assert run.is_dead(process.id)
        await here.owners.restore("s", nobody, deadline_seconds=10, opened=here.open)
        assert here.owners.mine("s")
    finally:
        os.kill(child, signal.SIGKILL)


async def test_a_forked_child_owns_nothing_and_releases_nothing(world: FileWorld, here: Worker) -> None:
    here.owners.acquire("s")
    with here.owners.serving("s"):
        pid = os.fork()
        if pid == 0:
            os._exit(_owns_something(here.owners, "s"))
    # The parent's own request left after the fork: it is the one that releases.
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert here.owners.owner("s") is None

    here.held.add("t")
    here.owners.acquire("t")
    pid = os.fork()
    if pid == 0:
        here.held.clear()
        os._exit(_owns_something(here.owners, "t"))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert here.owners.owner("t") == here.id
    assert here.owners.mine("t")


def _owns_something(owners: Restores, session_id: str) -> int:
    """In the child: 0 if it owns nothing and can do nothing to what its parent owns."""
    owners.release(session_id)
    refused = 0
    for attempt in (owners.owner, owners.acquire, owners.rewrite, lambda key: owners.serving(key).__enter__()):
        for key in (session_id, "new"):
            try:
                attempt(key)
            except DirectoryError:
                refused += 1
    return int(owners.mine(session_id) or len(owners) != 0 or refused != 8)


async def test_without_descriptors_nobody_is_taken_for_dead(world: FileWorld, here: Worker, start: Start) -> None:
    process = start()
    process.call("acquire", "s")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(DirectoryError):
            await here.owners.restore("s", nobody, deadline_seconds=10, opened=here.open)
        assert here.owners.acquire("new") == here.id  # takes no descriptor
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert here.owners.owner("s") == process.id
    assert here.opened == []
