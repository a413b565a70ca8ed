"""MCP's sessionless era (2026-07-28): a handle that one tool's result made finds its worker in every later call."""

from collections.abc import Iterator

import pytest
from tests.support.served import Served, drive, served

BOOKS = 8
CALLS = 12
DRIVER = "tests.support.mcp_client_v2"


@pytest.fixture(scope="module", params=[(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Scattered, every request first lands on a wrong worker."""
    options = ("--preset", "mcp", "--session", "mcp-handle:book", "--no-access-log", *request.param)
    with served("examples.mcp_handles_server:mcp", *options) as server:
        yield server


def test_each_call_reaches_the_worker_that_made_its_handle(server: Served) -> None:
    """A new client for every call. Every third call asks for an answer, and is repeated with it."""
    tally = drive(DRIVER, f"{server.url}/mcp", "--handles", "--clients", str(BOOKS), "--calls", str(CALLS))
    assert tally["errors"] == {}
    assert (tally["right"], tally["calls"]) == (BOOKS * CALLS, BOOKS * CALLS)
    assert set(tally["statuses"]) == {"POST 200"}
    assert tally["param_headers"] > 0, "no client sent Mcp-Param-Book"


def test_a_killed_workers_handle_is_gone_and_new_ones_work(server: Served) -> None:
    tally = drive(DRIVER, f"{server.url}/mcp", "--handles", "--kill", "--calls", "3")
    assert tally["errors"] == {}
    assert tally["error_after_kill"] == "Session not found"
    assert tally["statuses"]["POST 404"] == 1
    assert (tally["clients"], tally["right"]) == (2, 6)


@pytest.mark.parametrize(("handle", "lines"), [((), 1), (("--session", "mcp-handle:book"), 0)], ids=["none", "book"])
def test_calls_without_a_session_and_without_a_handle_are_warned_of_once(handle: tuple[str, ...], lines: int) -> None:
    with served("examples.mcp_handles_server:mcp", "--preset", "mcp", *handle, "--no-handoff", workers=2) as server:
        drive(DRIVER, f"{server.url}/mcp", "--handles", "--clients", "1", "--calls", "3")
    told = [line for line in server.lines if "add --session mcp-handle:NAME" in line]
    # Each worker says it once, and both may have been asked.
    assert bool(told) is bool(lines)
    assert len(told) <= 2 * lines
