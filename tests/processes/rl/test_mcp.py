"""A resources server's tools over MCP on several workers, with the official client, of SDK 2.x and of 1.x."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.running import ROOT, Running, running
from tests.support.served import MAIN, MCP1, drive

from homing.rl.calls import Answer, Caller
from homing.rl.protocol import MCP_TOKEN_HEADER

WORKERS = 2
ACCEPT = {"accept": "application/json, text/event-stream"}
PROGRAMS = {"2.x": MAIN, "1.x": MCP1}


@pytest.fixture(scope="module", params=["2.x", "1.x"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    python = sys.executable if request.param == "2.x" else str(MCP1 / "python")
    app = ("tests.support.rl_servers:counter_mcp", "--workers", str(WORKERS))
    with running(*app, cwd=ROOT, command=(python, "-m", "homing", "run")) as server:
        server.wait_for(f"all {WORKERS} workers are ready")
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.fixture
def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module", params=list(PROGRAMS))
def found(server: Running, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the clients of an SDK saw: one process for all of them, which takes a while to import it."""
    url = f"http://127.0.0.1:{server.port}"
    return drive("tests.support.rl_mcp_client", url, programs=PROGRAMS[request.param], timeout_seconds=250)


@pytest.mark.timeout(300)
def test_64_sessions_at_once_call_their_tools_with_the_official_client(found: dict[str, Any]) -> None:
    assert found["tally"] == {
        "listed": 8,
        "right": 128,
        "refused arguments": 8,
        "told": 8,
        "closed": 64,
        "after the close: 404 session_lost": 64,
    }
    assert len(found["pids"]) == WORKERS


@pytest.mark.timeout(300)
def test_an_agents_own_mcp_client_sees_the_same_under_both_sdks(found: dict[str, Any]) -> None:
    assert found["agent"] == {
        "parameters": "integer",
        "described": True,
        "counted": [12, 12, False],
        "refused": [["nothing can be divided by 0"], True],
        "lost": [False, True, True],
    }


def seed(url: str, **data: Any) -> tuple[Caller, dict[str, Any], str]:
    caller = Caller(url)
    names = {"resources_session_id": secrets.token_hex(16), "episode_id": {"rollout_id": secrets.token_hex(4)}}
    task = {"task_id": {"taskset": "t", "task_id": "1"}, "task_data": data}
    seeded = caller.post("/seed_session", names | task)
    access = seeded.content["resources_tools"]
    assert (access["server_name"], access["transport"], access["url_path"]) == ("srv", "http", "/mcp")
    return caller, names, access["headers"][MCP_TOKEN_HEADER]


def ask(url: str, token: str | None, method: str = "tools/list", **parameters: Any) -> Answer:
    headers = ACCEPT if token is None else ACCEPT | {MCP_TOKEN_HEADER: token}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
    return Caller(url).post("/mcp", body, headers=headers)


def records(server: Running) -> set[str]:
    return {each.name for each in (Path(server.run_directory) / "session-owners").iterdir()}


def test_a_tampered_token_is_refused_and_leaves_no_record(server: Running, url: str) -> None:
    caller, names, token = seed(url)
    assert ask(url, token).status == 200
    before = records(server)
    changed = ("A" if token[0] != "A" else "B") + token[1:]
    for bad in (changed, token[:-1], token + "x", "", "x" * 4000, None):
        refused = ask(url, bad)
        assert (refused.status, refused.code) == (401, "bad_session_token"), bad
        assert "set-cookie" not in refused.headers
    assert records(server) == before
    assert caller.post("/close_session", names).status == 200


def test_a_token_of_a_closed_session_is_refused(url: str) -> None:
    caller, names, token = seed(url)
    called = ask(url, token, "tools/call", name="increment", arguments={"by": 2})
    assert called.content["result"]["structuredContent"]["count"] == 2
    assert caller.post("/close_session", names).status == 200
    for _ in range(6):
        refused = ask(url, token, "tools/call", name="increment", arguments={"by": 2})
        assert (refused.status, refused.code) == (404, "session_lost")


def test_the_token_wins_over_a_cookie_on_the_mcp_path(url: str) -> None:
    _, _, token = seed(url)
    other, other_names, _ = seed(url)
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "increment", "arguments": {"by": 7}}}
    called = other.post("/mcp", body, headers=ACCEPT | {MCP_TOKEN_HEADER: token})
    assert called.content["result"]["structuredContent"]["count"] == 7
    assert other.post("/increment", {"by": 1}).content["count"] == 1
    assert other.post("/close_session", other_names).status == 200


def test_a_token_without_a_cookie_names_the_session_of_a_direct_tool_call(url: str) -> None:
    _, _, token = seed(url)
    for count in range(1, 7):
        called = Caller(url).post("/increment", {"by": 1}, headers={MCP_TOKEN_HEADER: token})
        assert called.content["count"] == count


def test_a_token_that_is_limited_to_some_tools_is_so_wherever_it_names_the_session(url: str) -> None:
    caller, names, token = seed(url, tools=["increment"])
    listed = ask(url, token).content["result"]["tools"]
    assert [each["name"] for each in listed] == ["increment"]
    refused = ask(url, token, "tools/call", name="divide", arguments={"by": 1}).content["result"]
    assert refused["isError"] is True
    assert refused["content"][0]["text"] == "unknown tool: 'divide'; there are increment"
    called = ask(url, token, "tools/call", name="increment", arguments={"by": 2})
    assert called.content["result"]["structuredContent"]["count"] == 2
    direct = Caller(url).post("/divide", {"by": 1}, headers={MCP_TOKEN_HEADER: token})
    assert (direct.status, direct.code) == (404, "not_found")
    assert direct.content["error"]["detail"].endswith("it gives increment.")
    assert Caller(url).post("/increment", headers={MCP_TOKEN_HEADER: token}).content["count"] == 3
    # The session's cookie is whose session it is.
    assert caller.post("/divide", {"by": 3}, headers={MCP_TOKEN_HEADER: token}).content == 1
    assert caller.post("/close_session", names).status == 200


def test_only_post_is_served(url: str) -> None:
    _, _, token = seed(url)
    for method in ("GET", "DELETE"):
        refused = Caller(url).call(method, "/mcp", headers=ACCEPT | {MCP_TOKEN_HEADER: token})
        assert (refused.status, refused.headers["allow"]) == (405, "POST")
