"""`x-ng-session-owner`: a request without a session that belongs to one worker, such as an agent's call to itself."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from tests.support.seed_servers import SeedServer, cookie, cookie_content, seed_server, set_cookies

from homing import RESOURCES, SESSION_OWNER_HEADER
from homing.rundir import new_worker_id

pytestmark = pytest.mark.anyio


async def test_a_request_reaches_the_worker_that_it_names(agents: SeedServer) -> None:
    for named in agents.workers:
        for worker in agents.workers:
            reply = await worker.post("/run", {}, headers={SESSION_OWNER_HEADER: named.id})
            # The header is never stripped: the handler passes it on.
            assert reply.json() == {"worker": named.id, "owner_header": named.id, "session": {}}
    assert agents.records() == 0


async def test_a_worker_that_is_gone_is_gone(agents: SeedServer) -> None:
    here, gone = agents.workers
    await agents.stop_worker(gone)
    for named in (gone.id, new_worker_id()):
        reply = await here.post("/run", {}, headers={SESSION_OWNER_HEADER: named})
        assert (reply.status_code, reply.headers["homing-error"]) == (410, "session_gone")
    assert "/run" not in here.agent.handled


@pytest.mark.parametrize("value", ["", "x", "0" * 31, "0" * 33, "A" * 32, "../" + "0" * 29, "0" * 32 + ", " + "0" * 32])
async def test_a_malformed_name_is_refused(agents: SeedServer, value: str) -> None:
    worker = agents.workers[0]
    reply = await worker.post("/run", {}, headers={SESSION_OWNER_HEADER: value})
    assert (reply.status_code, reply.headers["homing-error"]) == (400, "bad_owner_header")
    assert "/run" not in worker.agent.handled


@pytest.mark.parametrize("value", ["nonsense", "0123456789abcdef" * 2])
async def test_it_is_ignored_where_the_request_names_a_session(agents: SeedServer, value: str) -> None:
    first, second = agents.workers
    reply = await first.post("/v1/agent_sessions", {"agent_session_id": "a1"}, headers={SESSION_OWNER_HEADER: value})
    (signed,) = set_cookies(reply)
    reply = await second.post("/v1/responses", {}, cookie=signed, headers={SESSION_OWNER_HEADER: value})
    assert (reply.status_code, reply.json()["worker"]) == (200, first.id)
    reply = await second.post("/run", {}, cookie=signed, headers={SESSION_OWNER_HEADER: value})
    assert reply.json()["owner_header"] == value


async def test_the_named_worker_mints_as_if_the_request_had_arrived_there(resources: SeedServer) -> None:
    first, second = resources.workers
    reply = await first.post("/seed_session", {"episode_id": "e"}, headers={SESSION_OWNER_HEADER: second.id})
    (signed,) = set_cookies(reply)
    assert reply.json()["worker"] == second.id
    assert first.owner(cookie_content(signed)["session_id"]) == second.id


async def test_it_is_an_ordinary_header_to_a_kind_that_does_not_declare_it(
    run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.seed_servers.RESOURCES", dataclasses.replace(RESOURCES, owner_header=False))
    async with seed_server("resources", directory=run_directory) as served:
        here, other = served.workers
        for value in ("nonsense", other.id):
            reply = await here.get("/session", headers={SESSION_OWNER_HEADER: value})
            assert (reply.status_code, reply.json()["worker"]) == (200, here.id)


async def test_the_sessions_of_a_worker_that_exited_are_gone_and_stay_gone(resources: SeedServer) -> None:
    gone, here = resources.workers
    await gone.post("/seed_session", {"resources_session_id": "s1", "episode_id": "e"})
    await resources.stop_worker(gone)
    for _ in range(2):
        reply = await here.post("/increment_counter", {}, cookie=cookie({"session_id": "s1"}))
        assert (reply.status_code, reply.headers["homing-error"]) == (410, "session_gone")
        reply = await here.post("/seed_session", {"resources_session_id": "s1", "episode_id": "e"})
        assert reply.status_code == 410
    assert here.resources.handled == ["/"]
    assert resources.records() == 1
    assert (await here.post("/seed_session", {"resources_session_id": "s2"})).status_code == 200


async def test_requests_for_a_worker_that_is_stopping_are_served_or_gone(resources: SeedServer) -> None:
    """Never *failed*: one that reaches it after its drain has not run, and its caller must be told so."""
    stopping, here = resources.workers
    await stopping.post("/seed_session", {"resources_session_id": "s1", "episode_id": "e"})
    statuses: set[int] = set()

    async def call_until_gone() -> None:
        while 410 not in statuses:
            reply = await here.post("/increment_counter", {}, cookie=cookie({"session_id": "s1"}))
            statuses.add(reply.status_code)

    async with asyncio.timeout(30), asyncio.TaskGroup() as calls:
        for _ in range(8):
            calls.create_task(call_until_gone())
        await resources.stop_worker(stopping)
    assert statuses <= {200, 410, 503}
