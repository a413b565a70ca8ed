"""PrefectHQ's fastmcp on several workers."""

from tests.support.served import drive, served


def test_a_fastmcp_server_keeps_its_sessions() -> None:
    with served("examples.fastmcp_server:mcp", "--preset", "mcp") as server:
        tally = drive(
            "tests.support.mcp_client_v2", f"{server.url}/mcp", "--only-calls", "--clients", "8", "--calls", "10"
        )
    assert tally["errors"] == {}
    assert (tally["right"], tally["calls"]) == (80, 80)
    assert tally["after_delete"] == {"POST 404": 8, "GET 404": 8, "DELETE 404": 8}
