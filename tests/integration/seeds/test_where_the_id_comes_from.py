"""Each row of the seeds' table of where a request's session ID comes from, and what happens where two places disagree.

A row is shown by two workers: what the first request makes at the one, the second request reaches through the other.
"""

from __future__ import annotations

import json

import httpx
import pytest
from tests.support.seed_servers import TOKEN_HEADER, TOKENS, SeedServer, cookie, cookie_content, set_cookies, token

from homing import RESOURCES, mcp_token_session_id

pytestmark = pytest.mark.anyio

PREFIXES = ["", "/ng-rollout/r1", "/ng-rollout/r1/training-token-capture"]


async def seeded(served: SeedServer, session_id: str, at: int = 0) -> str:
    """Seed an episode's session at a worker; the cookie that the reply set."""
    reply = await served.workers[at].post("/seed_session", {"resources_session_id": session_id, "episode_id": "e"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["worker"] == served.workers[at].id
    (found,) = set_cookies(reply)
    return found


# --- the rows ---


async def test_row_1_any_resources_request_is_named_by_its_cookie(resources: SeedServer) -> None:
    owner, other = resources.workers
    signed = await seeded(resources, "s1")
    assert cookie_content(signed) == {"session_id": "s1"}
    for count, worker in enumerate([other, owner, other], 1):
        reply = await worker.post("/increment_counter", {}, cookie=signed)
        assert reply.json() == {"worker": owner.id, "count": count}


async def test_row_1_holds_for_websockets(resources: SeedServer) -> None:
    owner, other = resources.workers
    signed = await seeded(resources, "s1")
    assert await other.socket("/socket", cookie=signed) == {"worker": owner.id, "session_id": "s1"}
    # Without a cookie it has an ID of its own, which no reply can name, so there is no record of it.
    assert (await other.socket("/socket"))["worker"] == other.id
    assert resources.records() == 1


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
async def test_row_2_a_tool_call_over_mcp_is_named_by_its_token(resources: SeedServer, prefix: str, path: str) -> None:
    owner, other = resources.workers
    await seeded(resources, "s1")
    # Starlette redirects the slash away, at the owner too, which shows the same routing.
    reply = await other.call("POST", f"{prefix}{path}", headers=token("s1"), follow_redirects=True)
    assert reply.json()["worker"] == owner.id
    assert reply.json()["session"] == {"session_id": "s1"}


async def test_row_2_a_token_names_the_session_elsewhere_where_no_cookie_does(resources: SeedServer) -> None:
    owner, other = resources.workers
    await seeded(resources, "s1")
    reply = await other.post("/increment_counter", {}, headers=token("s1"))
    assert reply.json() == {"worker": owner.id, "count": 1}


async def test_a_token_of_a_closed_session_reaches_the_worker_that_knows(resources: SeedServer) -> None:
    """It has no date: once its session has ended, it is worth what that session's cookie is."""
    owner, other = resources.workers
    signed = await seeded(resources, "s1")
    assert (await other.post("/close_session", {"resources_session_id": "s1"})).status_code == 200
    answers = [
        (reply.status_code, reply.json())
        for headers in (token("s1"), {})
        for worker in (owner, other)
        for reply in [await worker.post("/increment_counter", {}, headers=headers, cookie=None if headers else signed)]
    ]
    assert [answer == answers[0] for answer in answers] == [True] * 4, answers
    assert answers[0][1]["worker"] == owner.id
    assert "count" not in answers[0][1]
    assert (len(owner.resources.sessions), len(other.resources.sessions)) == (0, 0)


@pytest.mark.parametrize("route", ["/seed_session", "/close_session"])
@pytest.mark.parametrize("prefix", PREFIXES)
async def test_row_3_an_episodes_seed_and_close_are_named_by_their_body(
    resources: SeedServer, route: str, prefix: str
) -> None:
    owner, other = resources.workers
    await seeded(resources, "s1")
    reply = await other.post(prefix + route, {"resources_session_id": "s1", "episode_id": "e"})
    assert reply.status_code == 200
    assert reply.json() == {"worker": owner.id, "resources_session_id": "s1"}
    # The body's ID is the cookie's, from the first reply on.
    assert [cookie_content(each) for each in set_cookies(reply)] == [{"session_id": "s1"}]


async def test_row_4_any_agent_request_is_named_by_its_cookie(agents: SeedServer) -> None:
    owner, other = agents.workers
    reply = await owner.post("/v1/agent_sessions", {"agent_session_id": "a1"})
    (signed,) = set_cookies(reply)
    assert cookie_content(signed) == {"agent_session_id": "a1"}
    reply = await other.post("/v1/responses", {}, cookie=signed)
    assert (reply.status_code, reply.json()) == (200, {"worker": owner.id, "agent_session_id": "a1"})


@pytest.mark.parametrize("route", ["/v1/agent_sessions", "/v1/agent_sessions/close"])
@pytest.mark.parametrize("prefix", PREFIXES)
async def test_row_5_an_agents_seed_and_close_are_named_by_their_body(
    agents: SeedServer, route: str, prefix: str
) -> None:
    owner, other = agents.workers
    await owner.post("/v1/agent_sessions", {"agent_session_id": "a1"})
    reply = await other.post(prefix + route, {"agent_session_id": "a1"})
    assert (reply.status_code, reply.json()) == (200, {"worker": owner.id, "agent_session_id": "a1"})


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_row_6_a_rollouts_stop_without_a_cookie_is_named_by_its_path(agents: SeedServer, prefix: str) -> None:
    owner, other = agents.workers
    await owner.post(prefix + "/v1/agent_sessions", {"agent_session_id": "a1", "episode_id": {"rollout_id": "r 1"}})
    reply = await other.post(prefix + "/rollouts/r%201/stop", {"reason": "test"})
    assert reply.json() == {"worker": owner.id, "stopped": True}


async def test_a_stop_with_a_cookie_goes_where_the_cookie_says(agents: SeedServer) -> None:
    first, second = agents.workers
    await first.post("/v1/agent_sessions", {"agent_session_id": "a1", "episode_id": {"rollout_id": "r1"}})
    reply = await second.post("/v1/agent_sessions", {"agent_session_id": "a2", "episode_id": {"rollout_id": "r2"}})
    (signed,) = set_cookies(reply)
    reply = await first.post("/rollouts/r1/stop", {}, cookie=signed)
    assert reply.json()["worker"] == second.id


# --- which routes' bodies ---


async def test_a_body_names_a_session_on_seed_and_close_only(resources: SeedServer) -> None:
    other = resources.workers[1]
    await seeded(resources, "s1")
    reply = await other.post("/increment_counter", {"resources_session_id": "s1"})
    assert (reply.status_code, reply.json()["worker"]) == (404, other.id)


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b"null", b'{"resources_session_id": ""}', b'{"resources_session_id": 5}']
)
async def test_a_seed_whose_body_names_no_session_gets_a_new_one(resources: SeedServer, body: bytes) -> None:
    reply = await resources.workers[0].call("POST", "/seed_session", content=body)
    assert reply.status_code == 200
    (signed,) = set_cookies(reply)
    session_id = cookie_content(signed)["session_id"]
    assert resources.workers[1].owner(session_id) == resources.workers[0].id


async def test_an_id_is_any_text(resources: SeedServer) -> None:
    owner, other = resources.workers
    for session_id in ["../../x", "a/b", "%00", " ", "é\u2028😀", "\ud800", "x" * 1024]:
        body = json.dumps({"resources_session_id": session_id, "episode_id": "e"}).encode()
        reply = await owner.call("POST", "/seed_session", content=body)
        (signed,) = set_cookies(reply)
        reply = await other.post("/increment_counter", {}, cookie=signed)
        assert reply.json() == {"worker": owner.id, "count": 1}, ascii(session_id)


async def test_an_id_over_1024_bytes_is_refused(resources: SeedServer) -> None:
    reply = await resources.workers[0].post("/seed_session", {"resources_session_id": "x" * 1025})
    assert (reply.status_code, reply.headers["homing-error"]) == (400, "session_id_too_long")
    assert resources.workers[0].resources.handled == ["/"]


async def test_a_field_that_occurs_twice_is_refused(resources: SeedServer) -> None:
    body = b'{"resources_session_id": "a", "resources_session_id": "b"}'
    reply = await resources.workers[0].call("POST", "/seed_session", content=body)
    assert (reply.status_code, reply.headers["homing-error"]) == (400, "duplicate_field")


def test_the_routes_whose_bodies_are_read_match_below_a_rollout_prefix() -> None:
    for prefix in PREFIXES:
        for path in (RESOURCES.seed_path, RESOURCES.close_path):
            assert RESOURCES.body_paths.fullmatch(prefix + path)
    for path in ("/verify", "/seed_session/", "/x/seed_session", "/ng-rollout/a/b/c/seed_session", "/ng-rollout"):
        assert not RESOURCES.body_paths.fullmatch(path)


def test_a_token_with_a_bad_signature_names_no_session() -> None:
    good = token("s1")[TOKEN_HEADER]
    assert mcp_token_session_id(good, TOKENS) == "s1"
    for bad in (good + "x", "", "nonsense", TOKENS.dumps({"tools": None}), TOKENS.dumps({"sid": 5}), TOKENS.dumps([])):
        assert mcp_token_session_id(str(bad), TOKENS) is None


# --- two places ---


@pytest.mark.parametrize("route", ["/seed_session", "/close_session", "/ng-rollout/r1/seed_session"])
async def test_cookie_and_body_that_differ_are_a_conflict_before_any_handler_runs(
    resources: SeedServer, route: str
) -> None:
    first, second = resources.workers
    signed = await seeded(resources, "s1")
    records = resources.records()
    for worker in (first, second):
        handled = len(worker.resources.handled)
        reply = await worker.post(route, {"resources_session_id": "s2", "episode_id": "e"}, cookie=signed)
        assert (reply.status_code, reply.headers["homing-error"]) == (409, "session_conflict")
        assert not set_cookies(reply)
        assert len(worker.resources.handled) == handled
    assert resources.records() == records


async def test_token_and_body_that_differ_are_a_conflict(resources: SeedServer) -> None:
    reply = await resources.workers[0].post("/seed_session", {"resources_session_id": "s2"}, headers=token("s1"))
    assert (reply.status_code, reply.headers["homing-error"]) == (409, "session_conflict")


async def test_an_agents_cookie_and_body_that_differ_are_a_conflict(agents: SeedServer) -> None:
    worker = agents.workers[0]
    signed = cookie({"agent_session_id": "a1"})
    for route in ("/v1/agent_sessions", "/v1/agent_sessions/close"):
        reply = await worker.post(route, {"agent_session_id": "a2"}, cookie=signed)
        assert reply.status_code == 409
    assert worker.agent.handled == ["/"]


async def test_on_the_mcp_path_the_token_alone_counts(resources: SeedServer) -> None:
    first, second = resources.workers
    await seeded(resources, "token's")
    other = cookie({"session_id": "cookie's", "web_identity_bound": True})
    await second.post("/seed_session", {"resources_session_id": "cookie's", "episode_id": "e"})
    for worker in (first, second):
        reply = await worker.post("/mcp", {}, headers=token("token's"), cookie=other)
        assert reply.json() == {"worker": first.id, "sid": "token's", "session": {"session_id": "token's"}}


@pytest.mark.parametrize("headers", [{}, {TOKEN_HEADER: TOKENS.dumps({"sid": "s1"}) + "x"}])
async def test_on_the_mcp_path_a_cookie_is_not_used_even_without_a_good_token(
    resources: SeedServer, headers: dict[str, str]
) -> None:
    other = resources.workers[1]
    signed = await seeded(resources, "s1")
    reply = await other.post("/mcp", {}, headers=headers, cookie=signed)
    # Handled where it arrives, where the endpoint's own check refuses it; no session of anyone's is seen, or made.
    assert (reply.status_code, reply.json()) == (401, {"worker": other.id, "session": {}})
    assert not set_cookies(reply)
    assert resources.records() == 1


async def test_elsewhere_the_cookie_counts_and_the_token_does_not(resources: SeedServer) -> None:
    first, second = resources.workers
    signed = await seeded(resources, "cookie's")
    await second.post("/seed_session", {"resources_session_id": "token's", "episode_id": "e"})
    for path in ("/session", "/mcp/tools"):
        method = "GET" if path == "/session" else "POST"
        reply = await second.call(method, path, cookie=signed, headers=token("token's"))
        assert reply.json()["worker"] == first.id
        assert reply.json()["session"] == {"session_id": "cookie's"}


async def test_a_rejected_cookie_is_no_cookie(resources: SeedServer) -> None:
    first, second = resources.workers
    await seeded(resources, "s1")
    forged = cookie({"session_id": "forged"}, secret="another")
    reply = await second.get("/session", cookie=forged, headers=token("s1"))
    assert reply.json() == {"worker": first.id, "session": {"session_id": "s1"}}


async def test_a_rejected_token_gets_no_new_session(resources: SeedServer) -> None:
    worker = resources.workers[0]
    reply = await worker.get("/session", headers={TOKEN_HEADER: "forged"})
    assert reply.json() == {"worker": worker.id, "session": {}}
    assert not set_cookies(reply)
    assert resources.records() == 0


async def test_only_the_exact_cookie_counts(resources: SeedServer) -> None:
    worker = resources.workers[1]
    signed = await seeded(resources, "s1")
    reply = await worker.get("/session", cookie="x" + signed)
    assert reply.json()["session"]["session_id"] != "s1"
    assert reply.json()["worker"] == worker.id


# --- what was stripped or mounted since ---


@pytest.mark.parametrize(
    "path", ["/ng-rollout/r1/reset", "/ng-rollout/r1/training-token-capture/reset", "/games/start"]
)
async def test_a_start_is_one_though_the_app_changes_its_path_in_place(resources: SeedServer, path: str) -> None:
    worker = resources.workers[0]
    reply = await worker.post(path, {})
    assert reply.status_code == 200
    resources.clock.advance(10_000)
    resources.sweep()
    # Open, not within the window that a request without a start would leave.
    assert resources.workers[1].owner(reply.json()["session_id"]) == worker.id


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_ends_count_below_a_rollout_prefix(resources: SeedServer, prefix: str) -> None:
    worker = resources.workers[0]
    signed = await seeded(resources, "s1")
    reply: httpx.Response = await worker.post(prefix + "/verify", {}, cookie=signed)
    assert reply.json()["reward"] == 0.0
    resources.clock.advance(301)
    resources.sweep()
    assert worker.owner("s1") is None
