"""What these servers lose under plain `uvicorn --workers 3`: shows that the other tests here can fail."""

from pathlib import Path

import pytest
from tests.support.served import MAIN, MCP1, drive, served

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("app", "module", "programs", "options"),
    [
        ("examples.mcp_v1_server:app", "tests.support.mcp_client_v1", MCP1, ("--only-calls", "--calls", "20")),
        ("examples.mcp_v2_server:app", "tests.support.mcp_client_v2", MAIN, ("--only-calls", "--calls", "20")),
        ("examples.mcp_handles_server:app", "tests.support.mcp_client_v2", MAIN, ("--handles", "--calls", "12")),
    ],
    ids=["sdk-1", "sdk-2", "handles"],
)
def test_calls_are_lost_without_homing(app: str, module: str, programs: Path, options: tuple[str, ...]) -> None:
    with served(app, plain=True, programs=programs) as server:
        tally = drive(module, f"{server.url}/mcp", "--clients", "8", *options, programs=programs)
    assert tally["calls"] > 0
    # How many depends on which worker each connection happens to wake; that all are right is as good as impossible.
    assert tally["right"] < tally["calls"]
