"""How long an owner record lasts: open, then the close retry window, judged from real requests on a clock that is moved.

The table of states itself is tested with `homing.lifetime`; here are the router's side of it, and scenarios 7 and 8.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.seed_servers import CLOSE_FOLLOWS, SeedServer, cookie, seed_server, set_cookies

from homing.routing.sweeper import sweep_forever, sweep_interval

pytestmark = pytest.mark.anyio

EPISODE = {"resources_session_id": "s1", "episode_id": "e"}
COOKIE = cookie({"session_id": "s1"})


def after(served: SeedServer, seconds: float) -> bool:
    """Whether the session `s1` is owned once so many seconds have passed."""
    served.clock.advance(seconds)
    served.sweep()
    return served.workers[0].owner("s1") is not None


# --- resources ---


async def test_an_open_session_keeps_its_owner_with_no_limit_of_time(resources: SeedServer) -> None:
    await resources.workers[0].post("/seed_session", EPISODE)
    assert after(resources, 30 * 86_400)


@pytest.mark.parametrize("end", ["/close_session", "/verify", "/terminal_step"])
async def test_an_ended_session_keeps_its_owner_for_the_close_retry_window(resources: SeedServer, end: str) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    await second.post(end, {}, cookie=COOKIE)
    assert after(resources, 299)
    assert not after(resources, 2)
    assert resources.records() == 0


async def test_the_window_runs_from_the_last_request(resources: SeedServer) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    await first.post("/close_session", EPISODE)
    assert after(resources, 200)
    await second.get("/", cookie=COOKIE)
    assert after(resources, 299)
    assert not after(resources, 2)


async def test_a_change_of_the_wall_clock_ends_no_session(resources: SeedServer) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    await first.post("/close_session", EPISODE)
    resources.clock.wall_is_ahead_seconds = 86_400.0
    assert after(resources, 299)
    resources.clock.wall_is_ahead_seconds = -86_400.0
    assert not after(resources, 2)
    assert second.owner("s1") is None


async def test_a_session_that_was_used_and_never_started_keeps_its_owner_for_the_window(resources: SeedServer) -> None:
    await resources.workers[0].get("/peek", cookie=COOKIE)
    assert after(resources, 299)
    assert not after(resources, 2)


@pytest.mark.parametrize("route", ["/close_session", "/seed_session"])
async def test_a_failed_close_or_seed_of_an_open_session_leaves_it_open(resources: SeedServer, route: str) -> None:
    worker = resources.workers[0]
    await worker.post("/seed_session", EPISODE)
    assert (await worker.post(route, {**EPISODE, "fail": True})).status_code == 500
    assert after(resources, 10_000)


async def test_verify_that_says_a_close_follows_leaves_the_session_open_for_it(resources: SeedServer) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    await second.post("/verify", {}, cookie=COOKIE, headers={CLOSE_FOLLOWS: "1"})
    assert after(resources, 10_000)
    await second.post("/close_session", EPISODE)
    assert not after(resources, 301)


async def test_a_close_that_was_announced_and_never_comes_is_not_waited_for_for_ever(resources: SeedServer) -> None:
    worker = resources.workers[0]
    await worker.post("/seed_session", EPISODE)
    await worker.post("/verify", {}, cookie=COOKIE, headers={CLOSE_FOLLOWS: "1"})
    assert after(resources, 80_000)
    # Said again, it moves nothing.
    await worker.post("/verify", {}, cookie=COOKIE, headers={CLOSE_FOLLOWS: "1"})
    assert not after(resources, 6_401)


@pytest.mark.parametrize("value", ["true", "0", "", "yes", "1.0", "11"])
async def test_close_follows_is_1_and_nothing_else(resources: SeedServer, value: str) -> None:
    worker = resources.workers[0]
    await worker.post("/seed_session", EPISODE)
    await worker.post("/verify", {}, cookie=COOKIE, headers={CLOSE_FOLLOWS: value})
    assert not after(resources, 301)


async def test_close_follows_counts_on_end_routes_only(resources: SeedServer) -> None:
    worker = resources.workers[0]
    await worker.post("/increment_counter", {}, cookie=COOKIE, headers={CLOSE_FOLLOWS: "1"})
    assert not after(resources, 301)
    await worker.post("/seed_session", {**EPISODE, "resources_session_id": "s1", "episode_id": "e"})
    await worker.post("/close_session", EPISODE, headers={CLOSE_FOLLOWS: "1"})  # a close is the close
    assert not after(resources, 301)


async def test_a_session_that_is_being_served_is_not_released(resources: SeedServer) -> None:
    owner, other = resources.workers
    await owner.get("/peek", cookie=COOKIE)
    slow = asyncio.create_task(other.post("/slow", {}, cookie=COOKIE))
    await owner.resources.entered.wait()
    assert after(resources, 301)
    owner.resources.proceed.set()
    await slow
    assert after(resources, 299)
    assert not after(resources, 2)


async def test_retain_keeps_a_retired_session_until_its_end(resources: SeedServer) -> None:
    owner, other = resources.workers
    lifetimes: Any = owner.router.lifetimes
    await owner.post("/seed_session", EPISODE)
    lifetimes.retain("s1")
    assert (await other.get("/peek", cookie=COOKIE)).json()["worker"] == owner.id
    assert after(resources, 10_000)
    lifetimes.ended("s1")
    assert not after(resources, 301)


async def test_forget_lets_a_failed_install_be_released_at_once(resources: SeedServer) -> None:
    owner = resources.workers[0]
    lifetimes: Any = owner.router.lifetimes
    owner.worker.owners.rewrite("s1")
    lifetimes.opened("s1")
    owner.worker.owners.release("s1")
    assert owner.worker.owners.mine("s1")
    lifetimes.forget("s1")
    owner.worker.owners.release("s1")
    assert resources.records() == 0


async def test_lifetimes_of_nothing_are_falsy(resources: SeedServer) -> None:
    owner = resources.workers[0]
    lifetimes: Any = owner.router.lifetimes
    assert (len(lifetimes), bool(lifetimes)) == (0, False)
    await owner.post("/seed_session", EPISODE)
    assert (len(lifetimes), bool(lifetimes)) == (1, True)
    assert lifetimes.starts("/seed_session")
    assert lifetimes.starts("/ng-rollout/r1/reset")
    assert not lifetimes.starts("/verify")


async def test_the_sweeper_releases_without_any_request(run_directory: str) -> None:
    async with seed_server("resources", directory=run_directory, count=1) as served:
        (worker,) = served.workers
        await worker.get("/peek", cookie=COOKIE)
        served.clock.advance(301)
        released = asyncio.Event()
        release = worker.worker.lifetimes.sweep

        def swept() -> list[str]:
            found = release()
            if found:
                released.set()
            return found

        worker.worker.lifetimes.sweep = swept  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            sweeping = asyncio.create_task(sweep_forever(worker.worker, interval_seconds=0.05, clock=served.clock))
            await released.wait()
        sweeping.cancel()
        await asyncio.wait({sweeping})
        assert served.records() == 0


def test_a_sweep_comes_every_tenth_of_the_window_within_bounds() -> None:
    assert [sweep_interval(each) for each in (0.1, 10, 300, 86_400)] == [0.05, 1.0, 30.0, 30.0]


# --- agents: their records decide ---


async def test_an_agents_session_is_owned_until_the_agent_drops_its_last_record(agents: SeedServer) -> None:
    first, second = agents.workers
    body = {"agent_session_id": "s1"}
    await first.post("/v1/agent_sessions", body)
    assert after(agents, 10_000)
    await second.post("/v1/agent_sessions/close", body)
    assert after(agents, 299)
    assert not after(agents, 2)
    assert agents.records() == 0


async def test_a_failed_seed_is_a_record_too(agents: SeedServer) -> None:
    await agents.workers[0].post("/v1/agent_sessions", {"agent_session_id": "s1", "fail": "kept"})
    assert after(agents, 299)
    assert not after(agents, 2)


async def test_a_failed_seed_of_which_the_agent_keeps_nothing_leaves_nothing(agents: SeedServer) -> None:
    reply = await agents.workers[0].post("/v1/agent_sessions", {"agent_session_id": "s1", "fail": True})
    assert reply.status_code == 500
    assert not set_cookies(reply)
    assert agents.records() == 0


async def test_an_agents_close_of_a_never_seeded_session_takes_ownership(agents: SeedServer) -> None:
    first, second = agents.workers
    body = {"agent_session_id": "s1"}
    await first.post("/v1/agent_sessions/close", body)
    assert second.owner("s1") == first.id
    reply = await second.post("/v1/agent_sessions", body)
    assert (reply.status_code, reply.json()) == (409, {"worker": first.id, "refused": "closed"})


# --- scenarios 7 and 8 ---


async def test_scenario_7a_a_start_whose_reply_was_lost_is_repeated_through_another_worker(
    resources: SeedServer,
) -> None:
    first, second = resources.workers
    replies = [await worker.post("/seed_session", EPISODE) for worker in (first, second)]
    assert [each.json() for each in replies] == [{"worker": first.id, "resources_session_id": "s1"}] * 2
    assert first.resources.allocations + second.resources.allocations == 1


async def test_scenario_7b_a_changed_retry_is_refused_by_the_worker_that_knows(resources: SeedServer) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    reply = await second.post("/seed_session", {**EPISODE, "episode_id": "another"})
    assert (reply.status_code, reply.json()) == (409, {"worker": first.id, "refused": "another episode"})


async def test_scenario_7c_a_start_that_is_late_for_its_close_is_refused_where_the_fence_is(
    resources: SeedServer,
) -> None:
    first, second = resources.workers
    await first.post("/close_session", EPISODE)
    assert second.owner("s1") == first.id
    reply = await second.post("/seed_session", EPISODE)
    assert (reply.status_code, reply.json()) == (409, {"worker": first.id, "refused": "closed"})
    assert first.resources.allocations + second.resources.allocations == 0


async def test_scenario_7d_a_cookie_of_one_session_and_a_body_of_another_run_nothing(resources: SeedServer) -> None:
    worker = resources.workers[1]
    reply = await worker.post("/seed_session", {**EPISODE, "resources_session_id": "s2"}, cookie=COOKIE)
    assert reply.status_code == 409
    assert worker.resources.handled == ["/"]
    assert resources.records() == 0


async def test_scenario_8_a_session_closed_twice_is_let_go_once(resources: SeedServer) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    # Without the cookie: the seed's reply may have been lost.
    replies = [await worker.post("/close_session", EPISODE) for worker in (first, second)]
    assert [each.json() for each in replies] == [{"worker": first.id, "resources_session_id": "s1"}] * 2
    assert first.resources.releases == 1
    assert not after(resources, 301)
    assert resources.records() == 0
    # Later ones are closes of a session nobody knows.
    reply = await second.post("/close_session", EPISODE)
    assert (reply.status_code, reply.json()["worker"]) == (200, second.id)
    assert not after(resources, 301)
    assert first.resources.releases + second.resources.releases == 1
