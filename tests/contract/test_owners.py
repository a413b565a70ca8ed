"""What every directory of owners keeps to: `SessionOwners` over the file system, and its twin in memory."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.worlds import FileWorld, MemoryWorld, Worker

from homing.directory import Given, OwnerAliveError, StillOwnedError
from homing.directory.base import Why
from homing.directory.failpoints import failpoint
from homing.errors import (
    DirectoryBusyError,
    DirectoryError,
    ForeignRecordError,
    MalformedRecordError,
    NotHereError,
    SessionGoneError,
    SessionMovingError,
)
from homing.rundir import new_worker_id
from homing.types import PATH, WorkerId

pytestmark = pytest.mark.anyio

WorldT = FileWorld | MemoryWorld


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=[FileWorld, MemoryWorld])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[WorldT]:
    world: WorldT = request.param()
    yield world
    await world.aclose()


@pytest.fixture
async def one(world: WorldT) -> Worker:
    return world.worker()


@pytest.fixture
async def two(world: WorldT) -> Worker:
    return world.worker()


class Serving:
    """A request of a session that is served until it is told to leave."""

    def __init__(self, worker: Worker, session_id: str) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(worker.owners.serving(session_id))

    def leave(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def fenced() -> Iterator[asyncio.Event]:
    """An event that is set when a give has put up its fence."""
    event = asyncio.Event()
    with failpoint("give.fenced", event.set):
        yield event


def own(worker: Worker, session_id: str) -> None:
    worker.held.add(session_id)
    assert worker.owners.acquire(session_id) == worker.id


# --- acquiring, looking, releasing ---


async def test_the_first_worker_to_acquire_a_session_owns_it_for_all(one: Worker, two: Worker) -> None:
    assert one.owners.owner("s") is None
    assert one.owners.acquire("s") == one.id
    assert two.owners.acquire("s") == one.id
    assert one.owners.acquire("s") == one.id
    assert one.owners.owner("s") == two.owners.owner("s") == one.id
    assert one.owners.mine("s")
    assert not two.owners.mine("s")


async def test_a_released_session_is_nobodys_and_can_be_acquired_again(one: Worker, two: Worker) -> None:
    one.owners.acquire("s")
    one.owners.release("s")
    assert one.owners.owner("s") is None
    assert not one.owners.mine("s")
    assert two.owners.acquire("s") == two.id


async def test_a_session_that_is_held_is_not_released(one: Worker) -> None:
    own(one, "s")
    one.owners.release("s")
    assert one.owners.owner("s") == one.id
    one.held.clear()
    one.owners.release("s")
    assert one.owners.owner("s") is None


async def test_a_session_that_is_being_served_is_not_released(one: Worker) -> None:
    one.owners.acquire("s")
    with one.owners.serving("s"):
        one.owners.release("s")
        assert one.owners.owner("s") == one.id


async def test_nothing_enters_between_the_check_of_a_release_and_its_end(one: Worker) -> None:
    one.owners.acquire("s")
    one.owners.release("s")
    with pytest.raises(NotHereError), one.owners.serving("s"):
        pytest.fail("the record of a session that is being served was about to go")


async def test_a_request_is_counted_from_entering_to_leaving(one: Worker) -> None:
    one.owners.acquire("s")
    entries = [one.owners.enter("s"), one.owners.try_enter("s")]
    assert one.owners.served_now("s") == 2
    for entry in entries:
        assert entry is not None
        assert one.owners.owner("s") == one.id
        one.owners.leave(entry)
    assert one.owners.owner("s") is None  # nothing of it is held


async def test_what_is_another_worker_s_is_not_entered(one: Worker, two: Worker) -> None:
    own(one, "s")
    assert two.owners.try_enter("s") is None
    assert two.owners.try_enter("never seen") is None
    with pytest.raises(NotHereError):
        two.owners.enter("s")
    assert one.owners.try_enter("s") is not None


async def test_releasing_what_another_owns_changes_nothing(one: Worker, two: Worker) -> None:
    one.owners.acquire("s")
    two.owners.release("s")
    two.owners.release("never seen")
    assert two.owners.owner("s") == one.id


async def test_a_release_leaves_alone_a_record_that_names_another_by_now(
    world: WorldT, one: Worker, two: Worker
) -> None:
    one.owners.acquire("s")
    world.unplant("s")
    own(two, "s")
    one.owners.release("s")
    assert world.record("s") == f"{world.boot}.{two.id}"
    assert not one.owners.mine("s")


async def test_session_ids_and_path_keys_never_meet(world: WorldT, one: Worker) -> None:
    paths = world.worker(PATH)
    assert one.owners.acquire("/rollouts/x") == one.id
    assert paths.owners.owner("/rollouts/x") is None
    assert paths.owners.acquire("/rollouts/x") == paths.id


@pytest.mark.parametrize("session_id", ["a/b", "../x", "\0", "\ud800x", "x" * 1024, "é" * 512, " ", "."])
async def test_any_text_is_a_session_id(one: Worker, two: Worker, session_id: str) -> None:
    own(one, session_id)
    assert two.owners.owner(session_id) == one.id
    with one.owners.serving(session_id):
        pass


async def test_it_says_what_it_owns_and_serves(one: Worker) -> None:
    own(one, "a")
    own(one, "b")
    with one.owners.serving("a"), one.owners.serving("a"):
        assert repr(one.owners).endswith(f"Owners {one.id[:8]}: 2 owned, 2 serving>")
        assert one.owners.served_now("a") == 2
        assert one.owners.served_now("b") == 0
    assert len(one.owners) == 2
    assert sorted(one.owners.owned_ids()) == ["a", "b"]


async def test_owners_of_nothing_are_true(one: Worker) -> None:
    assert len(one.owners) == 0
    assert one.owners


# --- serving ---


async def test_the_last_request_to_leave_releases_a_session_of_which_nothing_is_left(one: Worker) -> None:
    one.owners.acquire("s")
    first, second = Serving(one, "s"), Serving(one, "s")
    first.leave()
    assert one.owners.owner("s") == one.id
    second.leave()
    assert one.owners.owner("s") is None
    assert one.owners.served_now("s") == 0


async def test_a_request_that_fails_leaves_as_any_other(one: Worker) -> None:
    one.owners.acquire("s")
    with pytest.raises(ZeroDivisionError), one.owners.serving("s"):
        raise ZeroDivisionError
    assert one.owners.owner("s") is None


async def test_a_held_session_stays_when_its_last_request_leaves(one: Worker) -> None:
    own(one, "s")
    with one.owners.serving("s"):
        pass
    assert one.owners.owner("s") == one.id


async def test_a_session_of_another_or_of_nobody_is_not_served(one: Worker, two: Worker) -> None:
    one.owners.acquire("s")
    for session_id in ("s", "nobody's"):
        with pytest.raises(NotHereError), two.owners.serving(session_id):
            pytest.fail("served")
        assert two.owners.served_now(session_id) == 0


async def test_a_record_that_names_a_worker_which_does_not_count_it_means_moving(world: WorldT, one: Worker) -> None:
    world.plant("s", f"{world.boot}.{one.id}")
    with pytest.raises(SessionMovingError), one.owners.serving("s"):
        pytest.fail("served")
    assert one.owners.acquire("s") == one.id
    assert not one.owners.mine("s")


# --- records that are not as they should be ---


@pytest.mark.parametrize(
    "text", ["x", "a.b", "0" * 65, "{boot}.{worker}\n", "{boot}.{worker}/../x", "{boot}." + "A" * 32, "{worker}"]
)
async def test_a_record_that_names_no_worker_is_an_error_and_not_no_owner(
    world: WorldT, one: Worker, text: str
) -> None:
    world.plant("s", text.format(boot=world.boot, worker=one.id))
    for look in (one.owners.owner, one.owners.acquire, one.owners.rewrite):
        with pytest.raises(MalformedRecordError):
            look("s")
    with pytest.raises(MalformedRecordError), one.owners.serving("s"):
        pytest.fail("served")
    with pytest.raises(MalformedRecordError):
        await one.owners.restore("s", world.asking(one), deadline_seconds=5)


async def test_a_record_of_another_boot_means_gone(world: WorldT, one: Worker) -> None:
    world.plant("s", f"{'0' * 32}.{one.id}")
    for look in (one.owners.owner, one.owners.acquire):
        with pytest.raises(ForeignRecordError):
            look("s")
    with pytest.raises(SessionGoneError), one.owners.serving("s"):
        pytest.fail("served")


async def test_a_removed_directory_is_an_error_and_nobody_adopts(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    world.remove()
    for worker in (one, two):
        for look in (worker.owners.owner, worker.owners.acquire, worker.owners.rewrite):
            for session_id in ("s", "new"):
                with pytest.raises(DirectoryError):
                    look(session_id)
        for session_id in ("s", "new"):
            with pytest.raises(DirectoryError), worker.owners.serving(session_id):
                pytest.fail("served")
            with pytest.raises(DirectoryError):
                await worker.owners.restore(session_id, world.asking(worker), deadline_seconds=5)
    assert not two.owners.mine("s")


async def test_a_record_that_vanished_under_its_owner_is_an_error_to_its_owner(world: WorldT, one: Worker) -> None:
    own(one, "s")
    world.unplant("s")
    with pytest.raises(DirectoryError), one.owners.serving("s"):
        pytest.fail("served")
    for change in (one.owners.acquire, one.owners.rewrite):
        with pytest.raises(DirectoryError):
            change("s")
    assert world.record("s") is None
    one.held.clear()
    one.owners.release("s")
    assert not one.owners.mine("s")


async def test_a_session_taken_from_a_live_worker_is_not_served_there_and_its_state_goes(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    world.unplant("s")
    own(two, "s")
    with pytest.raises(NotHereError), one.owners.serving("s"):
        pytest.fail("served")
    assert not one.owners.mine("s")
    assert one.dropped == []  # not under a request that is still being served
    serving.leave()
    assert one.dropped == ["s"]
    assert one.owners.counters.lost == 1
    assert two.owners.owner("s") == two.id


# --- giving ---


async def test_an_idle_session_is_given_at_once_with_its_state_dropped(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    assert await one.owners.give("s", two.id, timeout_seconds=5) is Given.GIVEN
    assert world.record("s") == f"{world.boot}.{two.id}"
    assert one.dropped == ["s"]
    assert not one.owners.mine("s")
    with pytest.raises(NotHereError), one.owners.serving("s"):
        pytest.fail("served")


async def test_why_a_session_is_here_no_more_is_remembered(one: Worker, two: Worker) -> None:
    for session_id in ("given", "closed", "idle", "refused", "kept"):
        own(one, session_id)
    assert await one.owners.give("given", two.id, timeout_seconds=0) is Given.GIVEN
    one.held.clear()
    one.held.add("kept")
    one.owners.release("closed")
    one.owners.release("idle", why=Why.IDLE)
    one.owners.release("refused", why=None)
    one.owners.release("kept")
    assert [(each.key, each.why) for each in one.owners.endings] == [
        ("given", Why.MOVED),
        ("closed", Why.CLOSED),
        ("idle", Why.IDLE),
    ]
    assert all(each.since <= each.at for each in one.owners.endings)
    assert one.owners.counters.ended == {"moved": 1, "closed": 1, "idle": 1}
    assert [entry.key for entry in one.owners.owned()] == ["kept"]


async def test_what_no_session_came_of_is_no_ending(one: Worker) -> None:
    """An ID that a request was about to begin a session under, and did not."""
    one.owners.acquire("s")
    with one.owners.serving("s"):
        pass
    assert len(one.owners) == 0
    assert list(one.owners.endings) == []


async def test_a_give_waits_for_what_is_being_served_and_refuses_what_is_new(one: Worker, two: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    with fenced() as fence:
        giving = asyncio.create_task(one.owners.give("s", two.id, timeout_seconds=30))
        await fence.wait()
    with pytest.raises(SessionMovingError), one.owners.serving("s"):
        pytest.fail("served")
    assert one.owners.owner("s") == one.id
    serving.leave()
    assert await giving is Given.GIVEN
    assert one.owners.owner("s") == two.id


async def test_a_give_that_times_out_has_changed_nothing(one: Worker, two: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    assert await one.owners.give("s", two.id, timeout_seconds=0) is Given.BUSY
    assert one.owners.owner("s") == one.id
    assert one.dropped == []
    with one.owners.serving("s"):
        pass
    serving.leave()
    assert one.owners.counters.busy == 1


async def test_a_give_whose_asker_hung_up_changes_nothing(one: Worker, two: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    hung_up = asyncio.Event()
    with fenced() as fence:
        giving = asyncio.create_task(one.owners.give("s", two.id, timeout_seconds=30, hung_up=hung_up))
        await fence.wait()
    hung_up.set()
    assert await giving is Given.BUSY
    serving.leave()
    with one.owners.serving("s"):
        assert one.owners.owner("s") == one.id


async def test_a_give_that_is_cancelled_changes_nothing(one: Worker, two: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    with fenced() as fence:
        giving = asyncio.create_task(one.owners.give("s", two.id, timeout_seconds=30))
        await fence.wait()
    giving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving
    serving.leave()
    with one.owners.serving("s"):
        assert one.owners.owner("s") == one.id


async def test_only_the_owner_gives(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    third = world.worker()
    assert await two.owners.give("s", third.id, timeout_seconds=5) is Given.NOT_MINE
    assert await two.owners.give("nobody's", third.id, timeout_seconds=5) is Given.NOT_MINE
    assert two.owners.owner("s") == one.id
    with pytest.raises(ValueError, match="another worker"):
        await one.owners.give("s", one.id, timeout_seconds=5)
    with pytest.raises(ValueError, match="another worker"):
        await one.owners.give("s", WorkerId("../x"), timeout_seconds=5)


async def test_a_session_released_while_a_give_waited_is_not_given(world: WorldT, one: Worker, two: Worker) -> None:
    one.owners.acquire("s")
    serving = Serving(one, "s")
    with fenced() as fence:
        giving = asyncio.create_task(one.owners.give("s", two.id, timeout_seconds=30))
        await fence.wait()
    serving.leave()  # nothing is held: it is released
    assert await giving is Given.NOT_MINE
    assert world.record("s") is None
    assert one.dropped == []


async def test_a_session_taken_from_its_owner_while_a_give_waited_is_not_given_again(
    world: WorldT, one: Worker, two: Worker
) -> None:
    third = world.worker()
    own(one, "s")
    serving = Serving(one, "s")
    with fenced() as fence:
        giving = asyncio.create_task(one.owners.give("s", two.id, timeout_seconds=30))
        await fence.wait()
    world.unplant("s")
    own(third, "s")
    serving.leave()
    assert await giving is Given.NOT_MINE
    assert one.owners.owner("s") == third.id


async def test_two_gives_of_one_session_give_it_once(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    third = world.worker()
    serving = Serving(one, "s")
    async with asyncio.TaskGroup() as group:
        gives = [group.create_task(one.owners.give("s", to.id, timeout_seconds=30)) for to in (two, third)]
        with fenced() as fence:
            await fence.wait()
        serving.leave()
    assert sorted(give.result() for give in gives) == [Given.GIVEN, Given.NOT_MINE]
    assert one.dropped == ["s"]


# --- restoring ---


async def test_a_restore_opens_what_nobody_owns(world: WorldT, one: Worker) -> None:
    await one.owners.restore("s", world.asking(one), deadline_seconds=5, opened=one.open)
    assert one.opened == ["s"]
    assert one.owners.mine("s")
    with one.owners.serving("s"):
        pass


async def test_a_restore_takes_what_a_dead_worker_owned(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    await world.kill(one)
    assert two.owners.owner("s") == one.id
    await two.owners.restore("s", world.asking(two), deadline_seconds=5, opened=two.open)
    assert two.opened == ["s"]
    assert two.owners.owner("s") == two.id
    assert two.owners.counters.taken == 1


async def test_a_dead_workers_record_that_changed_before_the_lock_was_held_is_looked_at_anew(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    await world.kill(one)
    third = world.worker()

    def restored_by_another() -> None:
        if not third.opened:
            world.unplant("s")
            third.open("s")
            assert third.owners.acquire("s") == third.id

    with failpoint("lock.held", restored_by_another):
        await two.owners.restore("s", world.asking(two), deadline_seconds=30, opened=two.open)
    assert third.dropped == ["s"]  # it was asked, and gave
    assert two.owners.owner("s") == two.id


async def test_a_restore_takes_what_another_boot_left(world: WorldT, one: Worker) -> None:
    world.plant("s", f"{'0' * 32}.{new_worker_id()}")
    await one.owners.restore("s", world.asking(one), deadline_seconds=5, opened=one.open)
    assert one.owners.owner("s") == one.id


async def test_a_restore_asks_a_live_owner_and_opens_once_it_gave(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    with fenced() as fence:
        restoring = asyncio.create_task(
            two.owners.restore("s", world.asking(two), deadline_seconds=30, opened=two.open)
        )
        await fence.wait()
    assert not two.opened
    serving.leave()
    await restoring
    assert (one.dropped, two.opened) == (["s"], ["s"])
    with two.owners.serving("s"):
        assert one.owners.owner("s") == two.id


async def test_a_restore_of_a_session_that_is_here_drains_it_first(world: WorldT, one: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    restoring = asyncio.create_task(one.owners.restore("s", world.asking(one), deadline_seconds=30, opened=one.open))
    await asyncio.sleep(0)  # the restore begins
    await asyncio.sleep(0)  # and fences
    with pytest.raises(SessionMovingError), one.owners.serving("s"):
        pytest.fail("served")
    assert not one.opened
    serving.leave()
    await restoring
    assert one.opened == ["s"]
    with one.owners.serving("s"):
        pass


async def test_a_session_that_is_drained_for_a_restore_is_not_released_meanwhile(world: WorldT, one: Worker) -> None:
    one.owners.acquire("s")
    serving = Serving(one, "s")
    restoring = asyncio.create_task(one.owners.restore("s", world.asking(one), deadline_seconds=30, opened=one.open))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    serving.leave()  # nothing is held, and yet nobody may acquire it now
    assert one.owners.owner("s") == one.id
    await restoring
    assert one.opened == ["s"]


async def test_the_restores_own_request_does_not_count_as_being_served(world: WorldT, one: Worker) -> None:
    own(one, "s")
    with one.owners.serving("s"):
        await one.owners.restore("s", world.asking(one), deadline_seconds=30, opened=one.open, own_requests=1)
        await one.owners.rewrite_all(["s", "t"], world.asking(one), own_requests_of="s")
    assert one.opened == ["s"]


async def test_an_owner_is_asked_three_times_at_most(one: Worker, two: Worker) -> None:
    own(one, "s")
    asked: list[WorkerId] = []

    async def busy(owner: WorkerId, session_id: str) -> Given:
        asked.append(owner)
        return Given.BUSY

    with pytest.raises(SessionMovingError):
        await two.owners.restore("s", busy, deadline_seconds=30, opened=two.open)
    assert asked == [one.id] * 3
    assert not two.opened
    assert one.owners.owner("s") == one.id


async def test_however_an_ask_ends_the_record_says_what_came_of_it(one: Worker, two: Worker) -> None:
    own(one, "s")

    async def given_and_broken(owner: WorkerId, session_id: str) -> Given:
        await one.owners.give(session_id, two.id, timeout_seconds=5)
        raise ConnectionResetError

    await two.owners.restore("s", given_and_broken, deadline_seconds=30, opened=two.open)
    assert two.opened == ["s"]


async def test_an_owner_that_dies_while_it_is_asked_is_taken_for_dead(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")

    async def dies(owner: WorkerId, session_id: str) -> Given:
        await world.kill(one)
        raise ConnectionResetError

    await two.owners.restore("s", dies, deadline_seconds=30, opened=two.open)
    assert two.opened == ["s"]


async def test_an_owner_whose_asks_fail_is_not_taken_for_dead(one: Worker, two: Worker) -> None:
    own(one, "s")

    async def broken(owner: WorkerId, session_id: str) -> Given:
        raise ConnectionResetError(owner)

    with pytest.raises(SessionMovingError):
        await two.owners.restore("s", broken, deadline_seconds=30, opened=two.open)
    assert two.owners.owner("s") == one.id
    assert two.opened == []
    with one.owners.serving("s"):
        pass


async def test_a_session_that_moved_on_while_it_was_asked_for_is_asked_for_where_it_is(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    third = world.worker()
    asked: list[WorkerId] = []

    async def moves(owner: WorkerId, session_id: str) -> Given:
        asked.append(owner)
        if owner == one.id:
            await third.owners.restore("s", world.asking(third), deadline_seconds=5, opened=third.open)
            return Given.NOT_MINE
        return await world.asking(two)(owner, session_id)

    await two.owners.restore("s", moves, deadline_seconds=30, opened=two.open)
    assert asked == [one.id, third.id]
    assert third.dropped == ["s"]
    assert two.owners.owner("s") == two.id


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_a_restore_nobody_waits_for_any_more_goes_on_and_releases_what_it_is_given(
    world: WorldT, one: Worker, two: Worker, how: str
) -> None:
    own(one, "s")
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(owner: WorkerId, session_id: str) -> Given:
        asked.set()
        await go_on.wait()
        return await one.owners.give(session_id, two.id, timeout_seconds=5)

    if how == "deadline":
        with pytest.raises(SessionMovingError):
            await two.owners.restore("s", slow, deadline_seconds=0, opened=two.open)
        await asked.wait()
    else:
        restoring = asyncio.create_task(two.owners.restore("s", slow, deadline_seconds=30, opened=two.open))
        await asked.wait()
        restoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restoring
    go_on.set()
    await two.owners.aclose()
    assert two.opened == []
    assert one.dropped == ["s"]
    assert world.record("s") is None  # opened and released: nothing names a worker that does not have it
    assert not two.owners.mine("s")


async def test_nobody_opens_because_the_deadline_of_an_ask_passed(one: Worker, two: Worker) -> None:
    own(one, "s")
    go_on = asyncio.Event()

    async def slow(owner: WorkerId, session_id: str) -> Given:
        await go_on.wait()
        return await one.owners.give(session_id, two.id, timeout_seconds=5)

    with contextlib.suppress(SessionMovingError):
        await two.owners.restore("s", slow, deadline_seconds=0, opened=two.open)
    counted, opened = two.owners.mine("s"), list(two.opened)
    with one.owners.serving("s"):
        pass  # its owner goes on with it
    go_on.set()
    await two.owners.aclose()
    assert (counted, opened) == (False, [])


async def test_an_abandoned_restore_of_a_session_that_is_here_leaves_it_as_it_was(world: WorldT, one: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    with pytest.raises(SessionMovingError):
        await one.owners.restore("s", world.asking(one), deadline_seconds=0, opened=one.open)
    await asyncio.sleep(0)
    serving.leave()
    await one.owners.aclose()
    assert one.opened == []
    assert world.record("s") == f"{world.boot}.{one.id}"


async def test_two_restores_of_one_session_leave_one_owner(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    third = world.worker()
    async with asyncio.TaskGroup() as group:
        for worker in (two, third):
            group.create_task(worker.owners.restore("s", world.asking(worker), deadline_seconds=30, opened=worker.open))
    owner = one.owners.owner("s")
    believers = [worker for worker in (one, two, third) if worker.owners.mine("s")]
    assert [worker.id for worker in believers] == [owner]
    assert believers[0].held == {"s"}


async def test_two_restores_of_one_session_at_one_worker_both_open(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(two.owners.restore("s", world.asking(two), deadline_seconds=30, opened=two.open))
    assert two.opened == ["s", "s"]
    assert one.owners.owner("s") == two.id
    assert len(two.owners) == 1


async def test_a_session_on_its_way_here_is_given_on_only_once_it_is_open(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    third = world.worker()
    onward: list[asyncio.Task[Given]] = []

    async def asked(owner: WorkerId, session_id: str) -> Given:
        answer = await one.owners.give(session_id, two.id, timeout_seconds=5)
        with fenced() as fence:
            onward.append(asyncio.create_task(two.owners.give(session_id, third.id, timeout_seconds=30)))
            await fence.wait()
        assert one.owners.owner("s") == two.id
        return answer

    await two.owners.restore("s", asked, deadline_seconds=30, opened=two.open)
    assert await onward[0] is Given.GIVEN
    assert (two.opened, two.dropped) == (["s"], ["s"])
    assert one.owners.owner("s") == third.id


async def test_closing_awaits_restores_and_takes_no_more(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    with fenced() as fence:
        restoring = asyncio.create_task(
            two.owners.restore("s", world.asking(two), deadline_seconds=30, opened=two.open)
        )
        await fence.wait()
    closing = asyncio.create_task(two.owners.aclose())
    serving.leave()
    await closing
    assert restoring.done() or two.opened == ["s"]
    await restoring
    with pytest.raises(DirectoryError):
        await two.owners.restore("t", world.asking(two), deadline_seconds=5)
    assert world.record("s") == f"{world.boot}.{two.id}"


async def test_a_held_lock_is_busy_after_its_deadline_and_nothing_has_changed(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    await world.kill(one)
    with world.lock():
        with pytest.raises(DirectoryBusyError):
            await two.owners.restore("s", world.asking(two), deadline_seconds=30, opened=two.open)
        with pytest.raises(DirectoryBusyError):
            two.owners.rewrite("s")
    assert two.owners.owner("s") == one.id
    assert two.opened == []
    assert two.owners.counters.lock_timeouts == 2
    two.owners.rewrite("s")
    assert two.owners.mine("s")


# --- rewriting ---


async def test_rewrite_takes_what_nobody_this_worker_or_a_dead_one_owns(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "dead's")
    await world.kill(one)
    own(two, "own")
    for session_id in ("dead's", "own", "nobody's"):
        two.owners.rewrite(session_id)
        assert two.owners.mine(session_id)
        assert two.owners.owner(session_id) == two.id


async def test_rewrite_raises_where_it_would_have_to_ask_or_wait(one: Worker, two: Worker) -> None:
    own(one, "s")
    with pytest.raises(OwnerAliveError) as caught:
        two.owners.rewrite("s")
    assert caught.value.owner == one.id
    with one.owners.serving("s"), pytest.raises(SessionMovingError):
        one.owners.rewrite("s")
    assert one.owners.owner("s") == one.id
    assert not two.owners.mine("s")


async def test_rewrite_all_takes_every_session_whoever_owned_it(world: WorldT, one: Worker, two: Worker) -> None:
    third = world.worker()
    ids = [f"s{number}" for number in range(700)]  # three batches
    for number, session_id in enumerate(ids):
        if number % 4 < 3:
            own((one, two, third)[number % 4], session_id)
    await world.kill(one)
    two.held.update(ids)
    await two.owners.rewrite_all([*ids, ids[0]], world.asking(two), opened=two.open)
    assert sorted(two.opened) == sorted(ids)
    assert all(two.owners.owner(session_id) == two.id and two.owners.mine(session_id) for session_id in ids)
    assert len(two.owners) == len(ids)
    assert len(third.dropped) == 175
    assert not len(third.owners)
    assert two.owners.counters.taken == 175


async def test_a_rewrite_all_that_fails_for_one_owns_exactly_what_it_took(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s3")
    ids = [f"s{number}" for number in range(300)]
    two.held.update(ids)

    async def busy(owner: WorkerId, session_id: str) -> Given:
        return Given.BUSY

    with pytest.raises(SessionMovingError):
        await two.owners.rewrite_all(ids, busy)
    assert sorted(two.owners.owned_ids()) == sorted(
        session_id for session_id in ids if world.record(session_id) == f"{world.boot}.{two.id}"
    )
    assert set(two.owners.owned_ids()) == set(ids[:256]) - {"s3"}  # its batch went on, the next never began


async def test_a_rewrite_all_cancelled_twice_ends_with_its_batch_and_owns_exactly_what_it_took(
    world: WorldT, one: Worker
) -> None:
    ids = [f"s{number}" for number in range(600)]
    loop = asyncio.get_running_loop()
    reached, go_on = asyncio.Event(), threading.Event()
    taken = 0

    def half_way() -> None:
        nonlocal taken
        taken += 1
        if taken == 100:
            loop.call_soon_threadsafe(reached.set)
            assert go_on.wait(60)

    with failpoint("rewrite.taken", half_way):
        rewriting = asyncio.create_task(one.owners.rewrite_all(ids, world.asking(one)))
        await reached.wait()
        for _ in range(2):
            rewriting.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not rewriting.done()
        assert len(one.owners) == 0  # known only once the batch has ended
        for session_id in ids:
            one.owners.release(session_id)  # leaves them alone
        assert world.record(ids[0]) == f"{world.boot}.{one.id}"
        with pytest.raises(SessionMovingError), one.owners.serving(ids[0]):
            pytest.fail("served")
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await rewriting
    assert set(one.owners.owned_ids()) == set(ids[:256])
    assert world.record(ids[256]) is None
    for session_id in ids:
        one.owners.release(session_id)
    assert all(world.record(session_id) is None for session_id in ids)


async def test_a_rewrite_all_cancelled_while_it_asks_waits_for_the_answer_and_releases_what_came(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    serving = Serving(one, "s")
    with fenced() as fence:
        rewriting = asyncio.create_task(two.owners.rewrite_all(["s", "t"], world.asking(two), opened=two.open))
        await fence.wait()
    rewriting.cancel()
    await asyncio.sleep(0)
    assert not rewriting.done()
    serving.leave()
    with pytest.raises(asyncio.CancelledError):
        await rewriting
    assert two.owners.owned_ids() == two.opened == ["t"]
    assert world.record("s") is None


async def test_an_abandoned_restore_does_not_release_what_a_rewrite_takes_meanwhile(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    loop = asyncio.get_running_loop()
    asked, go_on, taken, finish = asyncio.Event(), asyncio.Event(), asyncio.Event(), threading.Event()

    async def dies(owner: WorkerId, session_id: str) -> Given:
        asked.set()
        await go_on.wait()
        return Given.NOT_MINE  # after which it looks again at once

    def wait_in_thread() -> None:
        loop.call_soon_threadsafe(taken.set)
        assert finish.wait(60)

    looks_again = asyncio.Event()
    with failpoint("rewrite.taken", wait_in_thread), failpoint("restore.asked", looks_again.set):
        restoring = asyncio.create_task(two.owners.restore("s", dies, deadline_seconds=30))
        await asked.wait()
        await world.kill(one)
        rewriting = asyncio.create_task(two.owners.rewrite_all(["s"], dies))
        await taken.wait()
        restoring.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        await looks_again.wait()  # and looks, and ends, in the same step
        finish.set()
        await rewriting
    assert two.owners.mine("s")
    assert world.record("s") == f"{world.boot}.{two.id}"


async def test_what_a_restore_opened_while_a_rewrite_took_it_is_drained_before_it_is_opened_again(one: Worker) -> None:
    loop = asyncio.get_running_loop()
    taken, finish = asyncio.Event(), threading.Event()
    served_when_opened: list[int] = []

    async def nobody(owner: WorkerId, session_id: str) -> Given:
        raise ConnectionRefusedError(owner)

    def opened(session_id: str) -> None:
        served_when_opened.append(one.owners.served_now(session_id))
        one.open(session_id)

    def wait_in_thread() -> None:
        loop.call_soon_threadsafe(taken.set)
        assert finish.wait(60)

    with failpoint("rewrite.taken", wait_in_thread):
        rewriting = asyncio.create_task(one.owners.rewrite_all(["s"], nobody, opened=opened))
        await taken.wait()
        await one.owners.restore("s", nobody, deadline_seconds=30, opened=opened)
        serving = Serving(one, "s")
        finish.set()
        with contextlib.suppress(SessionMovingError):  # until the rewrite has put up its fence
            while not rewriting.done():
                Serving(one, "s").leave()
                await asyncio.sleep(0)
        serving.leave()
        await rewriting
    assert served_when_opened == [0, 0]
    assert one.owners.mine("s")


async def test_a_rewrite_all_that_finds_the_lock_held_owns_what_it_took_before(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "dead's")
    await world.kill(one)
    two.held |= {"nobody's", "dead's"}
    with world.lock(), pytest.raises(DirectoryBusyError):
        await two.owners.rewrite_all(["nobody's", "dead's"], world.asking(two), opened=two.open)
    assert two.owners.owned_ids() == two.opened == ["nobody's"]
    assert world.record("dead's") == f"{world.boot}.{one.id}"


# --- disowning ---


async def test_disown_forgets_only_what_the_record_no_longer_gives_this_worker(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    with pytest.raises(StillOwnedError):
        one.owners.disown("s")
    assert one.owners.mine("s")
    world.unplant("s")
    world.plant("s", f"{world.boot}.{two.id}")
    one.owners.disown("s")
    assert not one.owners.mine("s")
    one.owners.disown("s")
    one.owners.disown("never seen")
    assert two.owners.owner("s") == two.id


# --- compaction ---


async def test_dead_workers_records_beyond_the_limit_go_the_oldest_workers_first(
    world: WorldT, one: Worker, two: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(40):
        own(one, f"one's {number}")
        own(two, f"two's {number}")
    third = world.worker()
    own(third, "live")
    await world.kill(one)
    await world.kill(two)
    assert await third.owners.compact(limit=80) == 0
    assert await third.owners.compact(limit=50) == 30
    left = [third.owners.owner(f"{name}'s {number}") for name in ("one", "two") for number in range(40)]
    assert (left.count(one.id), left.count(two.id), left.count(None)) == (10, 40, 30)
    assert third.owners.owner("live") == third.id
    assert third.owners.counters.compacted == 30
    assert "the oldest 30 went" in caplog.text


async def test_a_record_that_changed_since_it_was_found_dead_is_not_compacted(
    world: WorldT, one: Worker, two: Worker
) -> None:
    own(one, "s")
    await world.kill(one)
    changed = False

    def restored_by_another() -> None:
        nonlocal changed
        if not changed:
            changed = True
            world.unplant("s")
            world.plant("s", f"{world.boot}.{two.id}")

    with failpoint("lock.held", restored_by_another):
        assert await two.owners.compact(limit=0) == 0
    assert world.record("s") == f"{world.boot}.{two.id}"


async def test_while_the_lock_is_held_nothing_is_compacted(world: WorldT, one: Worker, two: Worker) -> None:
    own(one, "s")
    await world.kill(one)
    with world.lock(), pytest.raises(DirectoryBusyError):
        await two.owners.compact(limit=0)
    assert world.record("s") == f"{world.boot}.{one.id}"
    assert await two.owners.compact(limit=0) == 1
