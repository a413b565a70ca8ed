"""MCP's sessionless era (2026-07-28): a handle that one tool's result made finds its worker in every later call."""

import pytest
from tests.support.served import drive, served

BOOKS = 8
CALLS = 12
DRIVER = "tests.support.mcp_client_v2"


@pytest.mark.parametrize("test_mode", [(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def test_each_call_reaches_the_worker_that_made_its_handle(test_mode: tuple[str, ...]) -> None:
    """A new client for every call. Scattered, every request first lands on a wrong worker."""
    options = ("--preset", "mcp", "--session", "mcp-handle:book", *test_mode)
    with served("examples.mcp_handles_server:mcp", *options) as server:
        tally = drive(DRIVER, f"{server.url}/mcp", "--handles", "--clients", str(BOOKS), "--calls", str(CALLS))
    assert tally["errors"] == {}
    assert (tally["right"], tally["calls"]) == (BOOKS * CALLS, BOOKS * CALLS)
    assert set(tally["statuses"]) == {"POST 200"}
    assert tally["param_headers"] > 0, "no client sent Mcp-Param-Book"
