"""Who gets an ID, an owner and a cookie: a start before its handler, another request if its handler used the session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.support.seed_servers import SeedServer, cookie, cookie_content, seed_server, set_cookies

from homing import SESSION_OWNERS_DIR, worker_socket_path

pytestmark = pytest.mark.anyio


def minted(reply: Any) -> str:
    (signed,) = set_cookies(reply)
    found = cookie_content(signed)["session_id"]
    assert isinstance(found, str)
    return found


# --- minting, and use ---


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/aggregate_metrics"), ("GET", "/no-such-path")])
async def test_a_request_that_keeps_nothing_leaves_no_record_and_gets_no_cookie(
    resources: SeedServer, method: str, path: str
) -> None:
    reply = await resources.workers[0].call(method, path)
    assert not reply.headers.get_list("set-cookie")
    assert "vary" not in reply.headers
    assert resources.records() == 0


async def test_a_health_check_with_the_cookie_of_an_ended_session_leaves_no_record(resources: SeedServer) -> None:
    reply = await resources.workers[0].get("/", cookie=cookie({"session_id": "long-ago"}))
    assert reply.status_code == 200
    assert not set_cookies(reply)
    assert resources.records() == 0


async def test_a_start_without_an_id_gets_one_that_its_reply_names(resources: SeedServer) -> None:
    owner, other = resources.workers
    reply = await owner.post("/seed_session", {"episode_id": "e"})
    session_id = minted(reply)
    assert len(session_id) == 32
    assert other.owner(session_id) == owner.id
    reply = await other.post("/increment_counter", {}, cookie=cookie({"session_id": session_id}))
    assert reply.json() == {"worker": owner.id, "count": 1}


async def test_two_starts_without_an_id_get_two(resources: SeedServer) -> None:
    worker = resources.workers[0]
    replies = [await worker.post("/seed_session", {"episode_id": "e"}) for _ in range(2)]
    assert len({minted(each) for each in replies}) == 2


async def test_reading_the_session_is_use(resources: SeedServer) -> None:
    owner, other = resources.workers
    reply = await owner.get("/peek")
    assert other.owner(minted(reply)) == owner.id


async def test_use_counts_whatever_the_status(resources: SeedServer) -> None:
    owner, other = resources.workers
    reply = await owner.post("/increment_counter", {})
    assert reply.status_code == 404
    assert other.owner(minted(reply)) == owner.id


async def test_a_start_names_its_session_though_its_handler_did_not_look_at_it(resources: SeedServer) -> None:
    owner, other = resources.workers
    reply = await owner.post("/reset", {})
    assert minted(reply) == reply.json()["session_id"]
    assert other.owner(minted(reply)) == owner.id


async def test_a_handler_may_acquire_its_minted_session_before_its_reply(resources: SeedServer) -> None:
    worker = resources.workers[0]
    reply = await worker.post("/acquire", {})
    assert reply.json() == {"worker": worker.id, "session_id": minted(reply), "owner": worker.id}
    assert worker.owner(minted(reply)) == worker.id


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", "/reset"), ("GET", "/seed_session")])
async def test_what_is_no_start_though_on_its_path_names_none(resources: SeedServer, method: str, path: str) -> None:
    reply = await resources.workers[0].call(method, path)
    assert not set_cookies(reply)
    assert resources.records() == 0


async def test_a_start_that_failed_and_did_not_use_its_session_leaves_nothing(resources: SeedServer) -> None:
    for body in ({"fail": "unused"}, {"fail": "unused", "resources_session_id": "s1"}):
        reply = await resources.workers[0].post("/seed_session", body)
        assert reply.status_code == 503
        assert "retry-after" not in reply.headers
        assert not set_cookies(reply)
    assert resources.records() == 0


async def test_an_id_that_left_with_a_reply_that_broke_later_is_owned(resources: SeedServer) -> None:
    owner, other = resources.workers
    async with owner._client.stream("POST", "/broken_reset") as reply:
        session_id = minted(reply)
        with pytest.raises(Exception, match="peer closed connection"):
            await reply.aread()
    assert other.owner(session_id) == owner.id


async def test_a_start_owns_its_session_before_its_handler_runs(resources: SeedServer) -> None:
    first, second = resources.workers
    body = {"resources_session_id": "s1", "episode_id": "e"}
    replies = await asyncio.gather(*(worker.post("/seed_session", body) for worker in (first, second) * 5))
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["worker"] for reply in replies}) == 1
    assert first.resources.allocations + second.resources.allocations == 1


async def test_a_request_whose_cookie_names_an_ended_session_makes_its_server_the_owner(resources: SeedServer) -> None:
    first, second = resources.workers
    reply = await first.post("/seed_session", {"episode_id": "e"})
    session_id = minted(reply)
    signed = cookie({"session_id": session_id})
    await first.post("/close_session", {}, cookie=signed)
    resources.clock.advance(301)
    resources.sweep()
    assert first.owner(session_id) is None
    reply = await second.get("/peek", cookie=signed)
    assert reply.json()["worker"] == second.id
    assert not set_cookies(reply)  # it has it
    assert first.owner(session_id) == second.id


async def test_agents_never_mint(agents: SeedServer) -> None:
    worker = agents.workers[0]
    for method, path, body in [
        ("POST", "/run", {}),
        ("POST", "/v1/responses", {}),
        ("POST", "/v1/agent_sessions", {"agent_session_id": ""}),
    ]:
        reply = await worker.call(method, path, json=body)
        assert not set_cookies(reply)
    assert agents.records() == 0


# --- Set-Cookie ---


async def test_a_reply_carries_the_owners_cookie_and_no_other(resources: SeedServer) -> None:
    owner, other = resources.workers
    signed = set_cookies(await owner.post("/seed_session", {"episode_id": "e"}))[0]
    for worker in (owner, other):
        reply = await worker.post("/note", {"at": worker.id}, cookie=signed)
        (changed,) = set_cookies(reply)
        assert cookie_content(changed) == {**cookie_content(signed), "at": worker.id}
        assert reply.json()["worker"] == owner.id
        assert not set_cookies(await worker.get("/peek", cookie=signed))


async def test_scenario_40_a_slow_reply_does_not_overwrite_newer_session_data(resources: SeedServer) -> None:
    owner, other = resources.workers
    signed = set_cookies(await owner.post("/seed_session", {"episode_id": "e"}))[0]
    slow = asyncio.create_task(other.post("/slow", {}, cookie=signed))
    await owner.resources.entered.wait()
    (newer,) = set_cookies(await other.post("/note", {"newer": True}, cookie=signed))
    owner.resources.proceed.set()
    reply = await slow
    assert reply.json()["session"] == cookie_content(signed)
    # It read the session and wrote nothing, so it sets no cookie: the newer one stays the client's.
    assert not set_cookies(reply)
    assert cookie_content(newer)["newer"] is True
    assert "cookie" in reply.headers["vary"].lower()


# --- an ID that cannot be recorded ---


@pytest.fixture
def unwritable(resources: SeedServer) -> Any:
    """Makes the records unmakeable, as a removed directory or a lost permission does."""

    def removed() -> None:
        assert resources.directory is not None
        shutil.rmtree(Path(resources.directory, SESSION_OWNERS_DIR))

    def forbidden() -> None:
        assert resources.directory is not None
        os.chmod(Path(resources.directory, SESSION_OWNERS_DIR), 0o500)

    return {"removed": removed, "forbidden": forbidden}


HARMS = ["removed", pytest.param("forbidden", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write"))]


@pytest.mark.parametrize("harm", HARMS)
async def test_an_id_that_cannot_be_recorded_at_the_reply_never_leaves(
    resources: SeedServer, unwritable: Any, harm: str
) -> None:
    worker = resources.workers[0]
    unwritable[harm]()
    reply = await worker.get("/peek")
    assert (reply.status_code, reply.headers["homing-error"]) == (500, "session_not_recorded")
    assert not set_cookies(reply)
    assert "retry-after" not in reply.headers
    assert worker.resources.handled.count("/peek") == 1
    assert reply.json()["error"]["code"] == "session_not_recorded"
    assert resources.directory is not None
    assert resources.directory not in reply.text


@pytest.mark.parametrize("harm", HARMS)
async def test_a_start_that_cannot_be_recorded_does_not_run(resources: SeedServer, unwritable: Any, harm: str) -> None:
    worker = resources.workers[0]
    unwritable[harm]()
    for body in ({}, {"resources_session_id": "s1"}):
        reply = await worker.post("/seed_session", body)
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert not set_cookies(reply)
    assert worker.resources.allocations == 0


async def test_a_request_that_keeps_nothing_is_served_without_any_directory(
    resources: SeedServer, unwritable: Any
) -> None:
    unwritable["removed"]()
    assert (await resources.workers[0].get("/")).status_code == 200


# --- one worker ---


async def test_one_worker_checks_and_names_and_owns_nothing() -> None:
    async with seed_server("resources", directory=None, count=1) as served:
        (worker,) = served.workers
        assert worker.app.state.homing_routing_id is None
        assert worker.router.worker is None
        reply = await worker.post("/seed_session", {"resources_session_id": "s1", "episode_id": "e"})
        (signed,) = set_cookies(reply)
        assert cookie_content(signed) == {"session_id": "s1"}
        assert (await worker.post("/increment_counter", {}, cookie=signed)).json()["count"] == 1
        reply = await worker.post("/seed_session", {"resources_session_id": "s2"}, cookie=signed)
        assert (reply.status_code, reply.headers["homing-error"]) == (409, "session_conflict")
        reply = await worker.post("/seed_session", {"resources_session_id": "x" * 1025})
        assert reply.status_code == 400
        assert minted(await worker.get("/peek"))
        assert not set_cookies(await worker.get("/"))
        reply = await worker.get("/", headers={"x-ng-session-owner": "nonsense"})
        assert reply.status_code == 400


async def test_one_agent_worker_gives_the_bodys_id_to_the_cookie() -> None:
    async with seed_server("agent", directory=None, count=1) as served:
        (worker,) = served.workers
        reply = await worker.post("/v1/agent_sessions", {"agent_session_id": "a1"})
        assert [cookie_content(each) for each in set_cookies(reply)] == [{"agent_session_id": "a1"}]
        assert not set_cookies(await worker.post("/run", {}))


async def test_the_backlog_reaches_the_private_socket(run_directory: str) -> None:
    async with seed_server("resources", directory=run_directory, count=1, backlog=3) as served:
        (worker,) = served.workers
        with contextlib.ExitStack() as stack:
            waiting = 0
            # The worker accepts on this very event loop, so nobody is accepted before the next await.
            with contextlib.suppress(BlockingIOError):
                while waiting < 100:
                    peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                    peer.setblocking(False)
                    peer.connect(worker_socket_path(run_directory, worker.id))
                    waiting += 1
        assert waiting == 4  # Linux lets one more wait than it is told
