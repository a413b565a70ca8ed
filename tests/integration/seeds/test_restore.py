"""The primitives of a restore, driven through the router's worker: the asker asks over the private socket, the owner gives.

The protocol itself has its own suites (`directory`); here is what clients see while a session moves, and what the giver
and the taker are left with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.seed_servers import SeedServer, SeedWorker, cookie, seed_server

from homing import SessionMovingError
from homing.directory import Given, OwnerAliveError, StillOwnedError
from homing.directory.failpoints import failpoint
from homing.types import SessionId, WorkerId, session_tag
from homing.watch.sessions import ask

pytestmark = pytest.mark.anyio

COOKIE = cookie({"session_id": "s1"})
EPISODE = {"resources_session_id": "s1", "episode_id": "e"}


@pytest.fixture
async def three(run_directory: str) -> AsyncIterator[SeedServer]:
    async with seed_server("resources", directory=run_directory, count=3) as served:
        yield served


async def install(worker: SeedWorker, session_id: str = "s1", count: int = 100) -> None:
    """Restore a session at a worker, as a checkpoint's restore would: state first, opened with the record."""
    lifetimes: Any = worker.router.lifetimes

    def opened(found: str) -> None:
        worker.resources.sessions[found] = {"episode": "e", "count": count}
        lifetimes.opened(found)

    await worker.worker.owners.restore(session_id, worker.worker.ask, deadline_seconds=20, opened=opened)


def holders(served: SeedServer, session_id: str = "s1") -> list[SeedWorker]:
    return [each for each in served.workers if each.worker.owners.mine(session_id)]


async def counted(worker: SeedWorker) -> Any:
    return (await worker.post("/increment_counter", {}, cookie=COOKIE)).json()


# --- where the record is ---


async def test_a_session_of_a_live_worker_moves_and_its_old_cookie_reaches_the_new_holder(three: SeedServer) -> None:
    old, new, third = three.workers
    await old.post("/seed_session", EPISODE)
    await install(new)
    assert [await counted(each) for each in three.workers] == [
        {"worker": new.id, "count": count} for count in (101, 102, 103)
    ]
    # The giver has let go of it all: its state, and its lifetime, which would have kept it for ever.
    assert old.resources.sessions == {}
    assert not old.router.lifetimes.holds("s1")
    assert holders(three) == [new]
    three.clock.advance(10_000)
    three.sweep()
    assert third.owner("s1") == new.id
    await old.post("/close_session", EPISODE)
    three.clock.advance(301)
    three.sweep()
    assert three.records() == 0


async def test_a_session_that_has_moved_is_told_as_moved_where_it_was_and_as_open_where_it_is(
    three: SeedServer,
) -> None:
    old, new, _ = three.workers
    await old.post("/seed_session", EPISODE)
    await install(new)
    assert three.directory is not None
    gone, there = [await asyncio.to_thread(ask, three.directory, each.id, 10) for each in (old, new)]
    assert gone is not None
    assert there is not None
    assert [(each.tag, each.why) for each in gone.ended] == [(session_tag("s1"), "moved")]
    assert [(each.tag, each.ended) for each in there.sessions] == [(session_tag("s1"), False)]
    assert (gone.sessions, there.ended) == ([], [])


async def test_a_session_that_nobody_owns_is_opened_where_it_is_restored(three: SeedServer) -> None:
    new = three.workers[0]
    await install(new)
    assert await counted(three.workers[1]) == {"worker": new.id, "count": 101}


async def test_a_dead_workers_session_is_taken(three: SeedServer) -> None:
    gone, new, third = three.workers
    await gone.post("/seed_session", EPISODE)
    await three.stop_worker(gone)
    assert (await third.post("/increment_counter", {}, cookie=COOKIE)).status_code == 410
    await install(new)
    assert await counted(third) == {"worker": new.id, "count": 101}
    assert new.worker.owners.counters.taken == 1


async def test_a_session_is_restored_where_it_is_and_its_own_request_does_not_count(three: SeedServer) -> None:
    owner = three.workers[0]
    await owner.post("/seed_session", EPISODE)
    own = asyncio.create_task(owner.post("/slow", {}, cookie=COOKIE))
    await owner.resources.entered.wait()
    await owner.worker.owners.restore("s1", owner.worker.ask, deadline_seconds=20, own_requests=1)
    owner.resources.proceed.set()
    assert (await own).json()["worker"] == owner.id


# --- while it moves ---


async def test_the_owner_finishes_what_it_serves_and_takes_no_more_of_it_before_it_gives(three: SeedServer) -> None:
    old, new, third = three.workers
    await old.post("/seed_session", EPISODE)
    slow = asyncio.create_task(third.post("/slow", {}, cookie=COOKIE))
    await old.resources.entered.wait()
    fenced = asyncio.Event()
    with failpoint("give.fenced", fenced.set):
        restoring = asyncio.create_task(install(new))
        await fenced.wait()
        for worker in three.workers:
            reply = await worker.post("/increment_counter", {}, cookie=COOKIE)
            assert (reply.status_code, reply.headers["homing-error"]) == (503, "session_moving")
            assert reply.headers["retry-after"] == "1"
        assert new.resources.sessions == {}
        old.resources.proceed.set()
        await restoring
    assert (await slow).json()["worker"] == old.id
    assert await counted(old) == {"worker": new.id, "count": 101}


async def test_an_owner_that_stays_busy_keeps_the_session(run_directory: str) -> None:
    async with seed_server("resources", directory=run_directory, owner_timeout_seconds=0.1) as served:
        old, new = served.workers
        await old.post("/seed_session", EPISODE)
        slow = asyncio.create_task(old.post("/slow", {}, cookie=COOKIE))
        await old.resources.entered.wait()
        with pytest.raises(SessionMovingError):
            await install(new)
        assert old.worker.owners.counters.busy == 3
        assert new.resources.sessions == {}
        # The fence is lifted, with the slow request still there: nothing has changed.
        assert await counted(old) == {"worker": old.id, "count": 1}
        old.resources.proceed.set()
        assert (await slow).status_code == 200
        assert holders(served) == [old]


async def test_an_asker_that_hangs_up_lifts_the_fence(three: SeedServer) -> None:
    old, new, _ = three.workers
    await old.post("/seed_session", EPISODE)
    slow = asyncio.create_task(old.post("/slow", {}, cookie=COOKIE))
    await old.resources.entered.wait()
    fenced = asyncio.Event()
    with failpoint("give.fenced", fenced.set):
        asking = asyncio.create_task(new.worker.ask(WorkerId(old.id), "s1"))
        await fenced.wait()
        asking.cancel()
        await asyncio.wait({asking})
    async with asyncio.timeout(10):
        while (await old.get("/peek", cookie=COOKIE)).status_code == 503:
            pass  # until the owner has heard of it
    old.resources.proceed.set()
    await slow
    assert holders(three) == [old]


async def test_a_worker_that_is_asked_for_what_it_does_not_own_says_so(three: SeedServer) -> None:
    old, new, third = three.workers
    await old.post("/seed_session", EPISODE)
    assert await new.worker.ask(WorkerId(third.id), "s1") is Given.NOT_MINE
    assert holders(three) == [old]


async def test_two_restores_of_one_session_leave_one_holder(three: SeedServer) -> None:
    old, second, third = three.workers
    for _ in range(10):
        await old.post("/seed_session", EPISODE)
        outcomes = await asyncio.gather(install(second), install(third), return_exceptions=True)
        assert any(each is None for each in outcomes)
        assert all(each is None or isinstance(each, SessionMovingError) for each in outcomes)
        (holder,) = holders(three)
        assert {each.owner("s1") for each in three.workers} == {holder.id}
        assert [each.id for each in three.workers if "s1" in each.resources.sessions] == [holder.id]
        await old.post("/close_session", EPISODE)
        three.clock.advance(301)
        three.sweep()
        assert three.records() == 0


async def test_a_deadline_ends_the_wait_and_not_the_ask(three: SeedServer) -> None:
    old, new, _ = three.workers
    await old.post("/seed_session", EPISODE)
    slow = asyncio.create_task(old.post("/slow", {}, cookie=COOKIE))
    await old.resources.entered.wait()
    opened: list[str] = []
    fenced, released = asyncio.Event(), asyncio.Event()
    with failpoint("give.fenced", fenced.set), failpoint("release.after_unlink", released.set):
        restoring = asyncio.create_task(
            new.worker.owners.restore("s1", new.worker.ask, deadline_seconds=0.05, opened=opened.append)
        )
        await fenced.wait()
        with pytest.raises(SessionMovingError):
            await restoring
        old.resources.proceed.set()
        await slow
        # Given to a restore that nobody waits for any more: opened by nobody, and released.
        await released.wait()
    assert opened == []
    assert holders(three) == []
    assert three.records() == 0


async def test_a_record_that_names_a_worker_which_has_not_opened_the_session_means_moving(three: SeedServer) -> None:
    old, new, third = three.workers
    await old.post("/seed_session", EPISODE)
    assert await old.worker.owners.give("s1", WorkerId(new.id), timeout_seconds=1) is Given.GIVEN
    handled = [list(each.resources.handled) for each in three.workers]
    for worker in (old, new, third):
        for path in ("/increment_counter", "/seed_session"):
            reply = await worker.post(path, EPISODE, cookie=COOKIE)
            assert (reply.status_code, reply.headers["homing-error"]) == (503, "session_moving")
    assert [each.resources.handled for each in three.workers] == handled
    await install(new)
    assert await counted(third) == {"worker": new.id, "count": 101}


# --- the seeds' own primitives ---


async def test_rewrite_takes_what_no_live_worker_owns_and_asks_nobody(three: SeedServer) -> None:
    gone, alive, new = three.workers
    await gone.post("/seed_session", {**EPISODE, "resources_session_id": "dead's"})
    await alive.post("/seed_session", {**EPISODE, "resources_session_id": "alive's"})
    await three.stop_worker(gone)
    for session_id in ("dead's", "nobody's", "nobody's"):
        new.worker.owners.rewrite(session_id)
        assert alive.owner(session_id) == new.id
    with pytest.raises(OwnerAliveError):
        new.worker.owners.rewrite("alive's")
    assert alive.owner("alive's") == alive.id


async def test_rewrite_all_asks_the_owners_that_live(three: SeedServer) -> None:
    gone, alive, new = three.workers
    lifetimes: Any = new.router.lifetimes
    ids = [f"s{number}" for number in range(300)]
    for session_id in ids[:20]:
        await gone.post("/seed_session", {**EPISODE, "resources_session_id": session_id})
    for session_id in ids[20:40]:
        await alive.post("/seed_session", {**EPISODE, "resources_session_id": session_id})
    await three.stop_worker(gone)
    await new.worker.owners.rewrite_all(ids, new.worker.ask, opened=lifetimes.opened)
    assert {alive.owner(session_id) for session_id in ids} == {new.id}
    assert len(new.worker.owners) == 300
    assert len(alive.worker.owners) == 0
    assert alive.resources.sessions == {}


async def test_disown_forgets_only_what_is_anothers(three: SeedServer) -> None:
    old = three.workers[0]
    await old.post("/seed_session", EPISODE)
    with pytest.raises(StillOwnedError):
        old.worker.owners.disown("s1")
    assert holders(three) == [old]
    old.worker.owners.disown("unknown")


# --- agents ---


async def test_a_session_given_away_holds_its_path_key_no_longer(agents: SeedServer) -> None:
    old, new = agents.workers
    await old.post("/v1/agent_sessions", {"agent_session_id": "a", "episode_id": {"rollout_id": "x"}})
    await new.worker.owners.restore("a", new.worker.ask, deadline_seconds=20)
    assert new.worker.path_keys.owners.owner("/rollouts/x") is None
    # Whoever restores the session binds the key, as its seed did.
    assert new.worker.path_keys.bind(SessionId("a"), "/rollouts/x") == new.id
    new.agent.write("a", "open", "x")
    reply = await old.post("/rollouts/x/stop", {})
    assert reply.json() == {"worker": new.id, "stopped": True}
    await old.post("/v1/agent_sessions/close", {"agent_session_id": "a"})
    assert new.worker.path_keys.owners.owner("/rollouts/x") is None
