"""MCP's session era on several workers: servers and clients of both SDKs, every request at the session's worker."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.served import MAIN, MCP1, Served, drive, served

SERVER_1 = ("examples.mcp_v1_server:mcp", MCP1)
SERVER_2 = ("examples.mcp_v2_server:mcp", MAIN)
SERVERS = [
    pytest.param((*SERVER_1, ()), id="server-1"),
    pytest.param((*SERVER_2, ()), id="server-2"),
    pytest.param((*SERVER_1, ("--scatter",)), id="server-1-scattered", marks=pytest.mark.long),
    pytest.param((*SERVER_2, ("--scatter",)), id="server-2-scattered", marks=pytest.mark.long),
]
CLIENTS = {"client-1": ("tests.support.mcp_client_v1", MCP1), "client-2": ("tests.support.mcp_client_v2", MAIN)}


@dataclass(frozen=True)
class Driver:
    """One SDK's client."""

    module: str
    programs: Path

    def run(self, server: Served, *options: str) -> dict[str, Any]:
        return drive(self.module, f"{server.url}/mcp", *options, programs=self.programs)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """The server object itself, not an ASGI app. Scattered, every request first lands on a wrong worker."""
    app, programs, options = request.param
    with served(app, "--preset", "mcp", "--no-access-log", *options, programs=programs) as server:
        yield server


# For each test anew: with two parameters of a module, pytest's order would start a server twice.
@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Driver:
    return Driver(*CLIENTS[request.param])


def check(tally: dict[str, Any], *, clients: int, calls: int) -> None:
    """Each client made its calls, saw its notification, answered its question, and ended its session."""
    assert tally["errors"] == {}
    assert tally["clients"] == clients
    assert (tally["right"], tally["calls"]) == (clients * (calls + 2),) * 2
    assert (tally["noticed"], tally["answered"]) == (clients, clients)
    assert not [status for status in tally["statuses"] if status.endswith("404")], "lost before its DELETE"
    assert tally["statuses"]["DELETE 200"] == clients
    assert tally["after_delete"] == {"POST 404": clients, "GET 404": clients, "DELETE 404": clients}


def test_a_session_stays_whole_from_initialize_to_delete(server: Served, client: Driver) -> None:
    """Two clients: one as it comes, and one that opens a new connection for every request."""
    check(client.run(server, "--clients", "2", "--calls", "20", "--new-connections"), clients=2, calls=20)


def test_many_clients_at_once(server: Served, client: Driver) -> None:
    """Fifty of the newer client, and some of the older one, which differs in what it says and not in how many say it."""
    clients = 50 if client.programs == MAIN else 12
    tally = client.run(server, "--clients", str(clients), "--calls", "1")
    check(tally, clients=clients, calls=1)
    pids = set(tally["pids"])
    while len(pids) == 1:  # all was right, and nothing is shown: which worker takes a connection is the kernel's choice
        tally = client.run(server, "--clients", str(clients), "--calls", "1")
        check(tally, clients=clients, calls=1)
        pids |= set(tally["pids"])


@pytest.mark.long
def test_fifty_clients_of_either_sdk_at_once(server: Served, client: Driver) -> None:
    """Each with all its calls, and half of them with a new connection for every request."""
    tally = client.run(server, "--clients", "50", "--calls", "20", "--new-connections")
    check(tally, clients=50, calls=20)


def test_a_killed_workers_session_is_gone_within_a_second_and_new_ones_work(server: Served, client: Driver) -> None:
    tally = client.run(server, "--kill", "--calls", "3")
    assert tally["errors"] == {}
    assert tally["seconds_to_gone"] is not None, tally["after_kill"]
    assert tally["seconds_to_gone"] < 1
    assert tally["error_after_kill"] in {"Session terminated", "Session not found"}
    assert tally["clients"] == 2, "a new session must work at once"
    assert tally["right"] == 3 + 3 + 2


@pytest.mark.parametrize("server", SERVERS[:1], indirect=True)
def test_a_client_that_first_probes_for_the_sessionless_era_falls_back(server: Served) -> None:
    """The 2.x client's default mode; a 1.x server answers its probe with a 400 that names a session it throws away."""
    tally = Driver(*CLIENTS["client-2"]).run(server, "--mode", "auto", "--calls", "5")
    assert tally["statuses"].pop("POST 400") == 1
    check(tally, clients=1, calls=5)


def test_the_older_sse_transport_keeps_its_sessions() -> None:
    """Its ID is first named by an event that is no JSON; every message is a POST of its own, answered on one GET stream."""
    with served("tests.support.mcp_sse_app:app", "--preset", "mcp", "--scatter", programs=MCP1) as server:
        options = ("--sse", "--clients", "8", "--calls", "5")
        tally = drive("tests.support.mcp_client_v1", f"{server.url}/sse", *options, programs=MCP1)
    assert tally["errors"] == {}
    assert (tally["right"], tally["calls"]) == (8 * 7, 8 * 7)
    assert (tally["noticed"], tally["answered"]) == (8, 8)
