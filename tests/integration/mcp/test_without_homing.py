"""What these servers lose where nothing keeps a session together: shows that the other tests here can fail."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.fair_port import fair_port
from tests.support.served import MAIN, MCP1, drive, served

pytestmark = pytest.mark.long

PROCESSES = 3


@pytest.mark.parametrize(
    ("app", "module", "programs", "options"),
    [
        ("examples.mcp_v1_server:app", "tests.support.mcp_client_v1", MCP1, ("--only-calls", "--calls", "20")),
        ("examples.mcp_v2_server:app", "tests.support.mcp_client_v2", MAIN, ("--only-calls", "--calls", "20")),
        ("examples.mcp_handles_server:app", "tests.support.mcp_client_v2", MAIN, ("--handles", "--calls", "12")),
    ],
    ids=["sdk-1", "sdk-2", "handles"],
)
def test_most_calls_are_lost_without_homing(app: str, module: str, programs: Path, options: tuple[str, ...]) -> None:
    """Of three processes that get connections in turn, two know nothing of a session."""
    with ExitStack() as servers:
        each = [servers.enter_context(served(app, plain=True, workers=1, programs=programs)) for _ in range(PROCESSES)]
        url = servers.enter_context(fair_port([int(server.url.rpartition(":")[2]) for server in each]))
        tally = drive(module, f"{url}/mcp", "--clients", "8", "--new-connections", *options, programs=programs)
    assert tally["calls"] > 0
    assert tally["right"] < tally["calls"] / 2, tally
