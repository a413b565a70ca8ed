"""Placed and limited starts of servers in the seeds' way: under minted IDs, with path keys, and where only one worker will do.

Not here: servers whose sessions are told by sources (`tests/processes/test_placement.py`, `test_session_limit.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.support.seed_servers import SeedServer, SeedWorker, cookie, seed_server

from homing.placement import PlacementOptions
from homing.watch.figures import figures_of
from homing.watch.metrics import outcomes

pytestmark = pytest.mark.anyio

QUEUE_SECONDS = 60.0


@asynccontextmanager
async def placed(
    kind: str, directory: str, *, count: int = 2, per_worker: int | None = None, **options: Any
) -> AsyncIterator[SeedServer]:
    """A server whose starts are placed and limited, as `homing run` tells those that ask it."""
    placing = PlacementOptions(max_sessions_per_worker=per_worker, workers=count, **options)
    async with seed_server(kind, directory=directory, count=count, placing=placing, max_sessions=per_worker) as served:
        yield served


def agent_seed(session_id: str, rollout: str) -> dict[str, Any]:
    return {"agent_session_id": session_id, "episode_id": {"rollout_id": rollout, "attempt": 0}}


async def seed_agent(worker: SeedWorker, session_id: str, rollout: str) -> httpx.Response:
    return await worker.post("/v1/agent_sessions", agent_seed(session_id, rollout))


async def close_agent(worker: SeedWorker, session_id: str, rollout: str) -> None:
    reply = await worker.post("/v1/agent_sessions/close", agent_seed(session_id, rollout))
    assert reply.status_code == 200, reply.text


def is_refused(reply: httpx.Response) -> bool:
    refused = reply.headers.get("homing-error") == "session_limit"
    assert refused == (reply.status_code == 503), reply.text
    return refused


async def waits(served: SeedServer, count: int) -> None:
    """Return once so many starts wait at all workers: what is on the board has no event."""
    async with asyncio.timeout(20):
        while sum(len(each.worker.placement.queue) for each in served.workers if each.worker.placement) != count:
            await asyncio.sleep(0.005)


# --- where they begin ---


async def test_seeds_without_an_id_begin_where_they_are_placed_under_the_ids_that_are_minted_there(
    run_directory: str,
) -> None:
    async with placed("resources", run_directory, count=3, place="fewest") as served:
        first = served.workers[0]
        made: dict[str, str] = {}
        for number in range(9):
            reply = await first.post("/seed_session", {"episode_id": f"e{number}"})
            assert reply.status_code == 200, reply.text
            made[reply.json()["resources_session_id"]] = reply.json()["worker"]
        assert Counter(made.values()) == {each.id: 3 for each in served.workers}
        for session_id, worker_id in made.items():
            assert {each.owner(session_id) for each in served.workers} == {worker_id}
            for count, each in enumerate(served.workers, 1):
                reply = await each.post("/increment_counter", {}, cookie=cookie({"session_id": session_id}))
                assert reply.json() == {"worker": worker_id, "count": count}
        assert served.records() == 9


async def test_seeds_with_path_keys_spread_and_those_of_one_rollout_stay_together(run_directory: str) -> None:
    async with placed("agent", run_directory, count=3, place="fewest") as served:
        first, *others = served.workers
        at: dict[str, str] = {}
        for number in range(9):
            reply = await seed_agent(first, f"{number}-a", f"r{number}")
            at[f"r{number}"] = reply.json()["worker"]
        assert Counter(at.values()) == {each.id: 3 for each in served.workers}
        for number, rollout in enumerate(at):
            # The second session of a rollout is placed by its key, wherever it arrives and however many are there.
            for place, each in enumerate(others):
                reply = await seed_agent(each, f"{number}-b{place}", rollout)
                assert reply.json()["worker"] == at[rollout]
            for each in served.workers:
                reply = await each.post(f"/rollouts/{rollout}/stop", {})
                assert reply.json() == {"worker": at[rollout], "stopped": True}
        for number, rollout in enumerate(at):
            for name in ("a", "b0", "b1"):
                await close_agent(first, f"{number}-{name}", rollout)
        assert {each.worker.path_keys.owners.owner(f"/rollouts/{rollout}") for each in others for rollout in at} == {
            None
        }


async def test_two_seeds_of_one_rollout_that_are_placed_apart_at_once_end_up_at_one_worker(run_directory: str) -> None:
    async with placed("agent", run_directory, count=3, place="random") as served:
        for number in range(30):
            replies = await asyncio.gather(
                *(seed_agent(each, f"{number}-{place}", f"r{number}") for place, each in enumerate(served.workers))
            )
            assert {each.status_code for each in replies} == {200}
            assert len({each.json()["worker"] for each in replies}) == 1


async def test_a_seed_that_names_a_worker_begins_there_however_many_are_there(run_directory: str) -> None:
    async with placed("resources", run_directory, place="fewest") as served:
        first, second = served.workers
        for number in range(6):
            reply = await (first, second)[number % 2].post(
                "/seed_session", {"episode_id": "e"}, headers={"x-ng-session-owner": second.id}
            )
            assert reply.json()["worker"] == second.id


# --- how many there may be ---


async def test_a_seed_whose_rollout_runs_elsewhere_waits_its_turn_and_begins_there(run_directory: str) -> None:
    async with placed("agent", run_directory, place="accepting", max_sessions=2, queue_seconds=QUEUE_SECONDS) as served:
        first, second = served.workers
        assert (await seed_agent(first, "a", "x")).status_code == 200
        assert (await seed_agent(second, "b", "y")).status_code == 200
        waiting = asyncio.create_task(seed_agent(second, "c", "x"))
        await waits(served, 1)
        await close_agent(first, "b", "y")
        assert (await waiting).json() == {"worker": first.id, "agent_session_id": "c"}


async def test_a_seed_whose_rollout_runs_elsewhere_begins_there_though_its_own_worker_is_full(
    run_directory: str,
) -> None:
    async with placed("agent", run_directory, place="accepting", per_worker=2, queue_seconds=QUEUE_SECONDS) as served:
        first, second = served.workers
        assert (await seed_agent(first, "a", "x")).json()["worker"] == first.id
        for name in ("b", "c"):
            assert (await seed_agent(second, name, name)).json()["worker"] == second.id
        assert (await seed_agent(second, "d", "x")).json()["worker"] == first.id
        # Now both are full, and one that may begin nowhere else does not wait.
        assert is_refused(await seed_agent(second, "e", "x"))
        assert is_refused(await seed_agent(first, "e", "x"))
        assert [each.worker.count_live() for each in served.workers] == [2, 2]


async def test_a_seed_that_names_a_worker_waits_for_the_servers_limit_and_not_for_that_workers_own(
    run_directory: str,
) -> None:
    options = {"place": "accepting", "max_sessions": 3, "per_worker": 2, "queue_seconds": QUEUE_SECONDS}
    async with placed("resources", run_directory, **options) as served:
        first, second = served.workers

        def named(number: int) -> Any:
            return first.post("/seed_session", {"episode_id": "e"}, headers={"x-ng-session-owner": second.id})

        assert (await named(0)).json()["worker"] == second.id
        held = (await first.post("/seed_session", {"episode_id": "e"})).json()["resources_session_id"]
        assert (await first.post("/seed_session", {"episode_id": "e"})).json()["worker"] == first.id
        waiting = asyncio.create_task(named(1))
        await waits(served, 1)
        await second.post("/close_session", {}, cookie=cookie({"session_id": held}))
        assert (await waiting).json()["worker"] == second.id
        assert is_refused(await named(2))
        assert [each.worker.count_live() for each in served.workers] == [1, 2]


async def test_restored_and_rewritten_sessions_are_never_refused_and_count(run_directory: str) -> None:
    async with placed("resources", run_directory, place="accepting", max_sessions=2) as served:
        first, second = served.workers
        lifetimes: Any = second.router.lifetimes
        for name in ("a", "b"):
            reply = await first.post("/seed_session", {"resources_session_id": name, "episode_id": "e"})
            assert reply.status_code == 200
        # The server is full, which a restore does not ask.
        await second.worker.owners.restore("a", second.worker.ask, deadline_seconds=20, opened=lifetimes.opened)
        more = ["c", "d", "e"]
        await second.worker.owners.rewrite_all(more, second.worker.ask, opened=lifetimes.opened)
        assert [each.worker.count_live() for each in served.workers] == [1, 4]
        for each in served.workers:
            assert is_refused(await each.post("/seed_session", {"episode_id": "e"}))
        # Five live ones of two that may be: three have to end before the fourth makes room.
        for name in more:
            await first.post("/close_session", {}, cookie=cookie({"session_id": name}))
        assert [each.worker.count_live() for each in served.workers] == [1, 1]
        assert is_refused(await first.post("/seed_session", {"episode_id": "e"}))
        await first.post("/close_session", {}, cookie=cookie({"session_id": "a"}))
        async with asyncio.timeout(20):
            while is_refused(await first.post("/seed_session", {"episode_id": "e"})):
                pass  # until its worker has seen the end of what it has answered


# --- what is counted of it ---


async def test_a_request_that_is_refused_at_another_worker_is_counted_once(run_directory: str) -> None:
    async with placed("agent", run_directory, place="accepting", per_worker=1) as served:
        first, second = served.workers

        def counted() -> Counter[str]:
            sums: Counter[str] = Counter()
            for each in served.workers:
                sums.update(outcomes(figures_of(each.worker, started=0.0, began=0.0)))
            del sums["not_mine"]
            return sums

        assert (await seed_agent(first, "a", "x")).status_code == 200
        before = counted()
        assert is_refused(await seed_agent(second, "b", "x"))
        assert counted() - before == {"forwarded": 1}
        assert is_refused(await seed_agent(first, "b", "x"))
        assert counted() - before == {"forwarded": 1, "refused": 1}
        assert first.worker.answers == {"session_limit": 2}
