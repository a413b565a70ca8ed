"""Path keys: `/rollouts/<id>` leads to the worker that runs the rollout, from its seed to its last close."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.seed_servers import SeedServer, SeedWorker, cookie, seed_server, set_cookies

from homing.types import SessionId

pytestmark = pytest.mark.anyio


def seed(session_id: str, rollout: str = "x", **more: Any) -> dict[str, Any]:
    return {"agent_session_id": session_id, "episode_id": {"rollout_id": rollout, "attempt": 0}, **more}


async def stop(worker: SeedWorker, rollout: str = "x") -> dict[str, Any]:
    reply = await worker.post(f"/rollouts/{rollout}/stop", {"reason": "test"})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert isinstance(found, dict)
    return found


def key_owner(worker: SeedWorker, rollout: str = "x") -> str | None:
    return worker.worker.path_keys.owners.owner(f"/rollouts/{rollout}")


async def test_a_stop_reaches_the_worker_that_runs_the_rollout(agents: SeedServer) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", seed("a"))
    for worker in (owner, other):
        assert await stop(worker) == {"worker": owner.id, "stopped": True}


async def test_a_stop_reaches_it_from_the_start_of_the_seed(agents: SeedServer) -> None:
    owner, other = agents.workers
    seeding = asyncio.create_task(owner.post("/v1/agent_sessions", seed("a", wait=True)))
    await owner.agent.entered.wait()
    assert (await stop(other))["worker"] == owner.id
    owner.agent.proceed.set()
    assert (await seeding).status_code == 200


async def test_a_stop_for_a_rollout_that_nobody_runs_is_handled_where_it_lands_and_leaves_no_record(
    agents: SeedServer,
) -> None:
    for worker in agents.workers:
        assert await stop(worker) == {"worker": worker.id, "stopped": False}
    assert agents.records() == 0


async def test_the_close_lets_the_key_go(agents: SeedServer) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", seed("a"))
    await other.post("/v1/agent_sessions/close", seed("a"))
    assert key_owner(other) is None
    assert agents.records() == 1  # the session's, for its window
    assert await stop(other) == {"worker": other.id, "stopped": False}


async def test_of_two_sessions_that_share_a_key_the_first_close_does_not_free_it(agents: SeedServer) -> None:
    owner, other = agents.workers
    # The second start lands at the other worker, and is placed where the key is.
    replies = [
        await owner.post("/v1/agent_sessions", seed("a")),
        await other.post("/v1/agent_sessions", seed("b")),
    ]
    assert [each.json()["worker"] for each in replies] == [owner.id] * 2
    assert other.owner("b") == owner.id
    await other.post("/v1/agent_sessions/close", seed("a"))
    await other.post("/v1/agent_sessions/close", seed("a"))
    assert await stop(other) == {"worker": owner.id, "stopped": True}
    await other.post("/v1/agent_sessions/close", seed("b"))
    assert key_owner(owner) is None


async def test_a_start_placed_elsewhere_leaves_nothing_where_it_landed(agents: SeedServer) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", seed("a"))
    reply = await other.post("/v1/agent_sessions", seed("b"))
    assert set_cookies(reply)
    assert other.agent.handled == ["/"]
    assert len(other.worker.owners) == 0
    assert agents.records() == 3


async def test_two_starts_of_one_rollout_at_once_run_at_one_worker(agents: SeedServer) -> None:
    for number in range(20):
        rollout = f"r{number}"
        replies = await asyncio.gather(
            *(
                worker.post("/v1/agent_sessions", seed(f"{number}-{place}", rollout))
                for place, worker in enumerate(agents.workers)
            )
        )
        assert {each.status_code for each in replies} == {200}
        assert len({each.json()["worker"] for each in replies}) == 1


async def test_a_start_takes_the_path_key_of_a_dead_worker(agents: SeedServer) -> None:
    gone, here = agents.workers
    await gone.post("/v1/agent_sessions", seed("a"))
    await agents.stop_worker(gone)
    # The attempt that ran there is lost, and a stop of it is told so; the next attempt is not lost with it.
    reply = await here.post("/rollouts/x/stop", {})
    assert (reply.status_code, reply.headers["homing-error"]) == (410, "session_gone")
    reply = await here.post("/v1/agent_sessions", seed("b"))
    assert reply.status_code == 200, reply.text
    assert key_owner(here) == here.id
    assert await stop(here) == {"worker": here.id, "stopped": True}
    await here.post("/v1/agent_sessions/close", seed("b"))
    assert key_owner(here) is None


async def test_of_several_starts_one_takes_the_path_key_of_a_dead_worker(run_directory: str) -> None:
    async with seed_server("agent", directory=run_directory, count=3) as agents:
        await _take_at_once(agents)


async def _take_at_once(agents: SeedServer) -> None:
    gone, *live = agents.workers
    for number in range(20):
        await gone.post("/v1/agent_sessions", seed(f"first-{number}", f"r{number}"))
    await agents.stop_worker(gone)
    for number in range(20):
        replies = await asyncio.gather(
            *(w.post("/v1/agent_sessions", seed(f"{number}-{place}", f"r{number}")) for place, w in enumerate(live))
        )
        assert {each.status_code for each in replies} == {200}
        assert len({each.json()["worker"] for each in replies}) == 1
        assert key_owner(live[0], f"r{number}") == replies[0].json()["worker"]


async def test_a_session_id_that_looks_like_a_path_key_is_none(agents: SeedServer) -> None:
    first, second = agents.workers
    attack = await second.post("/v1/agent_sessions", {"agent_session_id": "/rollouts/x"})
    assert attack.status_code == 200
    assert await stop(first) == {"worker": first.id, "stopped": False}
    # Nor does it keep the rollout's own worker from its key.
    await first.post("/v1/agent_sessions", seed("a"))
    assert await stop(second) == {"worker": first.id, "stopped": True}
    await second.post("/v1/agent_sessions/close", {"agent_session_id": "/rollouts/x"})
    assert await stop(second) == {"worker": first.id, "stopped": True}


@pytest.mark.parametrize("prefix", ["", "/ng-rollout/x", "/ng-rollout/x/training-token-capture"])
async def test_the_key_has_no_rollout_prefix(agents: SeedServer, prefix: str) -> None:
    owner, other = agents.workers
    await owner.post(f"{prefix}/v1/agent_sessions", seed("a"))
    assert key_owner(other) == owner.id
    reply = await other.post(f"{prefix}/rollouts/x/stop", {})
    assert reply.json() == {"worker": owner.id, "stopped": True}
    await other.post(f"{prefix}/v1/agent_sessions/close", seed("a"))
    assert key_owner(other) is None


@pytest.mark.parametrize("rollout", ["a/b", "", 5, None])
async def test_what_is_no_segment_of_a_path_forms_no_key(agents: SeedServer, rollout: Any) -> None:
    reply = await agents.workers[0].post("/v1/agent_sessions", seed("a", rollout))
    assert reply.status_code == 200
    assert agents.records() == 1


async def test_a_failed_seed_lets_the_key_go(agents: SeedServer) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", seed("a", fail=True))
    assert agents.records() == 0
    await owner.post("/v1/agent_sessions", seed("b", fail="kept"))
    # The failed seed is a record; it runs nothing, so the rollout may run elsewhere.
    assert agents.records() == 1
    reply = await other.post("/v1/agent_sessions", seed("c"))
    assert reply.json()["worker"] == other.id


async def test_a_late_seed_that_is_refused_holds_no_key(agents: SeedServer) -> None:
    first, second = agents.workers
    await first.post("/v1/agent_sessions/close", seed("a"))
    reply = await second.post("/v1/agent_sessions", seed("a"))
    assert (reply.status_code, reply.json()["refused"]) == (409, "closed")
    assert key_owner(first) is None


async def test_a_repeated_seed_that_is_refused_does_not_free_the_running_ones_key(agents: SeedServer) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", seed("a"))
    assert (await other.post("/v1/agent_sessions", seed("a", "another"))).status_code == 409
    assert await stop(other) == {"worker": owner.id, "stopped": True}


async def test_a_seed_that_fails_while_another_of_its_session_succeeds_does_not_free_its_key(
    agents: SeedServer,
) -> None:
    owner, other = agents.workers
    failing = asyncio.create_task(owner.post("/v1/agent_sessions", seed("a", wait=True, fail=True)))
    await owner.agent.entered.wait()
    assert (await other.post("/v1/agent_sessions", seed("a"))).status_code == 200
    owner.agent.proceed.set()
    assert (await failing).status_code == 500
    assert await stop(other) == {"worker": owner.id, "stopped": True}


async def test_a_seed_that_fails_before_another_of_its_session_succeeds_does_not_free_its_key(
    agents: SeedServer,
) -> None:
    owner, other = agents.workers
    succeeding = asyncio.create_task(owner.post("/v1/agent_sessions", seed("a", wait=True)))
    await owner.agent.entered.wait()
    assert (await other.post("/v1/agent_sessions", seed("a", fail=True))).status_code == 500
    owner.agent.proceed.set()
    assert (await succeeding).status_code == 200
    assert await stop(other) == {"worker": owner.id, "stopped": True}


async def test_a_session_that_the_agent_dropped_by_itself_holds_its_key_no_longer(agents: SeedServer) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", seed("a", "x"))
    del owner.agent.records["a"]
    assert owner.agent.owners is not None
    owner.agent.owners.release("a")
    # At once, if the ID begins anew, and with the next sweep, if it does not.
    await owner.post("/v1/agent_sessions", seed("a", "y"))
    assert (key_owner(other, "x"), key_owner(other, "y")) == (None, owner.id)
    del owner.agent.records["a"]
    owner.agent.owners.release("a")
    owner.sweep()
    assert agents.records() == 0


async def test_the_cookie_names_the_session_where_path_and_cookie_do(agents: SeedServer) -> None:
    first, second = agents.workers
    await first.post("/v1/agent_sessions", seed("a"))
    await second.post("/v1/agent_sessions", {"agent_session_id": "b"})
    reply = await first.post("/rollouts/x/stop", {}, cookie=cookie({"agent_session_id": "b"}))
    assert reply.json() == {"worker": second.id, "stopped": False}


async def test_a_session_that_is_given_takes_its_hold_on_the_key_along(agents: SeedServer) -> None:
    old, new = agents.workers
    await old.post("/v1/agent_sessions", seed("a"))
    await old.post("/v1/agent_sessions", seed("b"))

    async def moved(session_id: str) -> str | None:
        def opened(found: str) -> None:
            new.agent.write(found, "open", "x")
            new.worker.path_keys.bind(SessionId(found), "/rollouts/x")

        await new.worker.owners.restore(session_id, new.worker.ask, deadline_seconds=20, opened=opened)
        return key_owner(new)

    assert await moved("a") == old.id  # of another session there
    assert await moved("b") == new.id  # at once: the giver does not hold it until its next sweep
    assert new.worker.path_keys.bind(SessionId("a"), "/rollouts/x") == new.id
    for worker in agents.workers:
        assert (await stop(worker))["worker"] == new.id
