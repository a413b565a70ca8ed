"""Connections that move, under `homing run`: when they do and when not, and that nobody can tell but by the time it takes."""

from __future__ import annotations

import array
import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.running import ROOT, Running, running, until, wait_until_gone
from tests.support.short_connections import accepted_by

from homing.runtime.handoff import MAX_MOVES, SETTLED_AFTER
from homing.watch.servers import look_at

APP = (
    "tests.support.counter_app:app",
    "--session",
    "path:/sessions/{session}",
    "--learn",
    "body:session@/sessions",
    "--start",
    "POST /sessions",
    "--end",
    "DELETE /sessions/{session}",
    "--no-access-log",
    "--place",  # each session at the worker of the connection that starts it
    "accepting",
)
MOST_TRIES = 60


class Connection:
    """One keep-alive connection of a client."""

    def __init__(self, at: int | Path, tls: ssl.SSLContext | None = None) -> None:
        if isinstance(at, Path):
            self._http = http.client.HTTPConnection("localhost")
            self._http.sock = socket.socket(socket.AF_UNIX)
            self._http.sock.settimeout(30)
            self._http.sock.connect(str(at))
        elif tls is None:
            self._http = http.client.HTTPConnection("127.0.0.1", at, timeout=30)
            self._http.connect()
        else:
            self._http = http.client.HTTPSConnection("127.0.0.1", at, timeout=30, context=tls)
            self._http.connect()
        self.socket = self._http.sock
        self.address = self.socket.getsockname()

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}) -> bytes:
        status, data = self.answer(method, path, body, headers)
        assert status == 200, (status, data)
        assert self._http.sock is self.socket, "the connection was closed"
        return data

    def answer(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, bytes]:
        self._http.request(method, path, body, headers)
        with self._http.getresponse() as reply:
            return reply.status, reply.read()

    def at(self) -> int:
        """The process that reads this connection: a request that names no session is served where it lands."""
        return int(self.ask("GET", "/").split()[-1])

    def start(self) -> str:
        return str(json.loads(self.ask("POST", "/sessions"))["session"])

    def step(self, session: str) -> int:
        reply = json.loads(self.ask("POST", f"/sessions/{session}/step"))
        assert not reply["hollow"], reply
        return int(reply["count"])

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def two_workers(
    *options: str, tls: ssl.SSLContext | None = None, app: str = APP[0], uds: Path | None = None
) -> Iterator[tuple[Running, Connection, Connection]]:
    """A server, and a connection to each of its workers."""
    if uds is not None:
        options = (*options, "--uds", str(uds))
    with running(app, *APP[1:], "--workers", "2", *options, cwd=ROOT) as server, contextlib.ExitStack() as stack:
        # Until both accept, one of them has all connections.
        server.wait_for("all 2 workers are ready")
        one = Connection(uds or server.port, tls)
        stack.callback(one.close)
        yield server, one, elsewhere(uds or server.port, one, stack, tls)


def elsewhere(
    at: int | Path, one: Connection, stack: contextlib.ExitStack, tls: ssl.SSLContext | None = None
) -> Connection:
    """A connection to another worker than `one`'s."""
    here = one.at()
    for _ in range(MOST_TRIES):
        other = Connection(at, tls)
        stack.callback(other.close)
        if other.at() != here:
            return other
    raise AssertionError(f"all connections reach worker {here}")


def move(connection: Connection, session: str, to: int) -> None:
    """Ask for the session until the connection is where it lives: at the second request, or later if one came too soon."""
    for tried in range(MOST_TRIES):
        connection.step(session)
        connection.step(session)
        # On a machine that is busy enough a reply wakes its client before the worker has ended that request, and the client's
        # next one comes too soon each time: this client leaves the worker more and more time.
        time.sleep(tried / 1000)
        if connection.at() == to:
            return
    raise AssertionError(f"the connection never moved to {to}")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Running, Connection, Connection]]:
    with two_workers() as found:
        yield found


Pair = tuple[Running, Connection, Connection]


@pytest.fixture
def fresh(pair: Pair) -> Iterator[tuple[Connection, Connection, str, int, int]]:
    """New connections to two workers, a session at the second, and both workers' processes."""
    server, _, _ = pair
    with contextlib.ExitStack() as stack:
        one = Connection(server.port)
        stack.callback(one.close)
        other = elsewhere(server.port, one, stack)
        yield one, other, other.start(), one.at(), other.at()


Fresh = tuple[Connection, Connection, str, int, int]


def test_a_connection_that_keeps_asking_for_one_workers_session_moves_there(fresh: Fresh) -> None:
    one, _, session, _, there = fresh
    assert one.step(session) == 1
    move(one, session, there)
    count = one.step(session)
    assert [one.step(session) for _ in range(20)] == list(range(count + 1, count + 21))


def test_one_request_for_another_workers_session_moves_nothing(fresh: Fresh) -> None:
    one, _, session, here, _ = fresh
    for count in range(1, 10):
        assert one.step(session) == count
        assert one.at() == here  # and a request in between begins the row anew


def test_a_connection_that_asks_for_two_workers_sessions_in_turn_does_not_move(fresh: Fresh) -> None:
    one, _, session, here, _ = fresh
    own = one.start()
    for count in range(1, 10):
        assert one.step(session) == count
        assert one.step(own) == count
    assert one.at() == here


def to_and_fro(connection: Connection, sessions: Mapping[int, str]) -> int:
    """Move the connection as often as it moves without settling; where it is then."""
    at = connection.at()
    for _ in range(MAX_MOVES):
        [at] = sessions.keys() - {at}
        move(connection, sessions[at], at)
    return at


def test_a_connection_moves_only_so_often(fresh: Fresh) -> None:
    one, other, session, here, there = fresh
    sessions = {there: session, here: one.start()}
    at = to_and_fro(one, sessions)
    [away] = sessions.keys() - {at}
    for asked in range(3 * SETTLED_AFTER):  # never so many in a row that it would have settled, at either worker
        for _ in range(1 + asked % 4):
            one.step(sessions[away])
        for _ in range(1 + asked % 5):
            one.step(sessions[at])
    assert one.at() == at
    for _ in range(SETTLED_AFTER - 1):
        one.step(sessions[away])
    assert one.at() == at
    assert other.at() == there


def test_a_connection_that_settles_where_it_goes_moves_as_often_as_its_sessions_change(fresh: Fresh) -> None:
    one, _, session, here, there = fresh
    sessions = {there: session, here: one.start()}
    for moves in range(2 * MAX_MOVES + 1):
        to = there if moves % 2 == 0 else here
        move(one, sessions[to], to)
        for _ in range(SETTLED_AFTER):
            one.step(sessions[to])


def test_a_connection_that_has_moved_too_often_goes_where_it_is_going_to_stay(fresh: Fresh) -> None:
    one, _, session, here, there = fresh
    sessions = {there: session, here: one.start()}
    at = to_and_fro(one, sessions)
    [away] = sessions.keys() - {at}
    for _ in range(MOST_TRIES):
        for _ in range(SETTLED_AFTER):
            one.step(sessions[away])
        if one.at() == away:
            break
    else:
        raise AssertionError("the connection never moved")
    # It has not settled by that alone: it has to stay as long before it moves readily again.
    for _ in range(2):
        one.step(sessions[at])
        one.step(sessions[at])
        assert one.at() == away


def test_a_moved_connection_starts_and_ends_sessions_where_it_is(fresh: Fresh) -> None:
    one, other, session, _, there = fresh
    move(one, session, there)
    mine = one.start()
    assert other.step(mine) == 1
    assert one.step(mine) == 2
    assert json.loads(one.ask("DELETE", f"/sessions/{mine}"))["pid"] == there


def test_a_body_of_any_size_goes_through_a_moved_connection(fresh: Fresh) -> None:
    one, _, session, _, there = fresh
    move(one, session, there)
    reply = json.loads(one.ask("POST", f"/sessions/{session}/step", b"x" * 3_000_000))
    assert reply["pid"] == there


def test_requests_sent_at_once_are_answered_in_order_whenever_the_connection_moves(fresh: Fresh) -> None:
    one, _, session, _, there = fresh
    total = 0
    for burst in (1, 2, 3, 1, 5, 2, 8, 1, 1, 1):
        counts = steps(one, session, burst)
        assert counts == list(range(total + 1, total + burst + 1))
        total += burst
    move(one, session, there)


def test_a_connection_whose_client_sends_its_requests_in_batches_moves_as_well(fresh: Fresh) -> None:
    one, _, session, _, there = fresh
    for _ in range(MOST_TRIES):
        steps(one, session, 5)
        if one.at() == there:
            return
    raise AssertionError("the connection never moved")


def steps(connection: Connection, session: str, batch: int) -> list[int]:
    """What so many steps, sent at once, count."""
    connection.socket.sendall(
        f"POST /sessions/{session}/step HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n".encode() * batch
    )
    received = b""
    while received.count(b'"count"') < batch:
        data = connection.socket.recv(65536)
        assert data, "the connection was closed"
        received += data
    return [int(part.split(b",")[0].strip(b': "}')) for part in received.split(b'"count":')[1:]]


def test_an_upgrade_after_a_forwarded_request_is_the_sessions_and_moves_nothing(fresh: Fresh) -> None:
    one, _, session, _, _ = fresh
    assert one.step(session) == 1
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    head = (
        f"GET /sessions/{session}/socket HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n{key}\r\n"
    )
    one.socket.sendall(head.encode())
    received = b""
    while (
        b"\r\n\r\n" not in received or len(received.partition(b"\r\n\r\n")[2]) < 18
    ):  # its first message, of 16 letters
        data = one.socket.recv(65536)
        assert data, received
        received += data
    assert received.startswith(b"HTTP/1.1 101 ")
    for letter in (b"a", b"b", b"c"):  # masked with zeros
        one.socket.sendall(b"\x81\x81\0\0\0\0" + letter)
        assert one.socket.recv(65536) == b"\x81\x01" + letter


def test_requests_that_name_their_session_in_the_body_move_nothing() -> None:
    """A body may come late, and in the end belong to another session: only what the head says moves a connection."""
    with two_workers("--session", "body:session@/start", "--start", "POST /start") as (_, one, other):
        here, session = one.at(), "named-in-the-body"
        body, name = json.dumps({"session": session}).encode(), {"x-session": session}
        made = json.loads(other.ask("POST", "/start", body, name))
        for _ in range(40):
            again = json.loads(one.ask("POST", "/start", body, name))
            assert (again["incarnation"], again["pid"]) == (made["incarnation"], made["pid"])
        assert made["pid"] != here
        assert one.at() == here


def test_half_a_request_keeps_the_connection_where_it_is(fresh: Fresh) -> None:
    one, _, session, here, _ = fresh
    head, rest = f"POST /sessions/{session}/step HTTP/1.1\r\nhost: a\r\n".encode(), b"content-length: 0\r\n\r\n"
    one.socket.sendall(head)
    for _ in range(6):
        # The next request's beginning is always there before the reply has left.
        one.socket.sendall(rest + head)
        assert b'"count"' in one.socket.recv(65536)
    one.socket.sendall(rest)
    assert b'"count"' in one.socket.recv(65536)
    assert one.step(session) == 8
    assert here > 0


def test_descriptors_are_given_back_at_both_ends(pair: Pair) -> None:
    server, _, _ = pair
    workers = server.workers()
    with contextlib.ExitStack() as stack:
        one = Connection(server.port)
        stack.callback(one.close)
        elsewhere(server.port, one, stack)
    moved_between_workers(server, 6)
    before = [open_files(pid) for pid in workers]
    moved_between_workers(server, 120)
    until_given_back(server, dict(zip(workers, before, strict=True)))


def moved_between_workers(server: Running, connections: int) -> int:
    """Move so many connections to and fro, as often as one may move; how many moves that were."""
    with contextlib.ExitStack() as stack:
        one = Connection(server.port)
        stack.callback(one.close)
        other = elsewhere(server.port, one, stack)
        sessions = {one.at(): one.start(), other.at(): other.start()}
        for _ in range(connections):
            with contextlib.closing(Connection(server.port)) as connection:
                to_and_fro(connection, sessions)
    return connections * MAX_MOVES


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def until_given_back(server: Running, before: dict[int, int]) -> None:
    """Wait until each worker has about as many descriptors as before: what is closed here is closed there a moment later."""
    until(lambda: all(open_files(pid) <= then + 2 for pid, then in before.items()), server)


@pytest.mark.long
@pytest.mark.timeout(1100)
def test_a_hundred_thousand_moves_leave_no_descriptor_behind() -> None:
    with two_workers() as (server, _, _):
        workers = server.workers()
        moved_between_workers(server, 50)
        before = [open_files(pid) for pid in workers]
        assert moved_between_workers(server, 50_000) == 100_000
        until_given_back(server, dict(zip(workers, before, strict=True)))


def test_a_worker_to_which_nothing_can_move_serves_all_the_same() -> None:
    """As where the run directory is full when it starts: here, somebody has the name of its socket already."""
    with two_workers(app="tests.processes.apps:nothing_moves") as (server, one, other):
        session = other.start()
        assert [one.step(session) for _ in range(4)] == [1, 2, 3, 4]
        here, there = one.at(), other.at()
        assert here != there
        assert len(server.find("no connection moves to this worker")) == 2
        for taken in Path(server.run_directory).glob("*.conn"):
            taken.unlink()
        server.wait_for("connections move to this worker and from it from now on", 2)
        with contextlib.ExitStack() as stack:
            move(elsewhere(server.port, other, stack), session, there)
        assert server.stop() in (0, -signal.SIGTERM)
        assert "Traceback" not in server.log


def test_a_moved_connection_counts_towards_the_limit_of_its_new_worker_and_not_of_the_old() -> None:
    limit = 16
    options = ("--limit-concurrency", str(limit), "--timeout-keep-alive", "300")
    with two_workers(*options) as (server, one, other), contextlib.ExitStack() as stack:
        here, there = one.at(), other.at()
        move(one, other.start(), there)
        # The old worker closes its copy in the turn after it has given the connection away.
        until(lambda: one.address[1] in accepted_by(there, server.port) - accepted_by(here, server.port), server)
        held = {pid: len(accepted_by(pid, server.port)) for pid in (here, there)}
        answered: Counter[int] = Counter()
        for _ in range(100):
            connection = Connection(server.port)
            stack.callback(connection.close)
            status, data = connection.answer("GET", "/")
            assert status in (200, 503)
            if status == 200:
                answered[int(data.split()[-1])] += 1
        # uvicorn refuses the one that makes it as many as the limit.
        assert answered == {pid: limit - 1 - count for pid, count in held.items()}


def test_a_connection_that_would_be_one_too_many_where_it_goes_stays_where_it_is() -> None:
    with two_workers("--limit-concurrency", "8", "--timeout-keep-alive", "300") as (server, one, other):
        session, there = other.start(), other.at()
        with contextlib.ExitStack() as stack:
            connections = [one, other]
            while len(connections) < 10:  # one worker may hold seven
                connection = Connection(server.port)
                stack.callback(connection.close)
                if connection.answer("GET", "/")[0] == 200:
                    connections.append(connection)
            for _ in range(3 * SETTLED_AFTER):
                for connection in connections:
                    connection.step(session)
            # One that is given back is held there for a moment.
            until(lambda: len(accepted_by(there, server.port)) == 7, server)


def test_requests_on_a_moved_connection_count_towards_its_new_workers_end() -> None:
    with two_workers("--limit-max-requests", "60", "--timeout-graceful-shutdown", "5") as (server, one, other):
        here, there = one.at(), other.at()
        session = other.start()
        move(one, session, there)
        served = 0
        while (status := one.answer("POST", f"/sessions/{session}/step")[0]) == 200:
            served += 1
            assert served < 20_000  # it looks how many there were ten times a second
        assert status in (410, 503)
        wait_until_gone(there, 60)
        assert here in server.workers()


def test_each_request_on_a_moved_connection_is_one_line_of_the_access_log_with_its_clients_address(
    tmp_path: Path,
) -> None:
    to_stderr = {"handlers": ["stderr"], "level": "INFO", "propagate": False}
    config = {
        "version": 1,
        "handlers": {"stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}},
        "loggers": dict.fromkeys(("uvicorn", "uvicorn.access", "homing"), to_stderr),
    }
    (tmp_path / "log.json").write_text(json.dumps(config))
    with two_workers("--access-log", "--log-config", str(tmp_path / "log.json")) as (server, one, other):
        session = other.start()
        move(one, session, other.at())
        steps = [one.step(session) for _ in range(5)][-1]
        line = rf'{one.address[0]}:{one.address[1]} - "POST /sessions/{session}/step HTTP/1.1" 200'
        assert len(server.wait_for(line, steps)) == steps
        assert server.stop() in (0, -signal.SIGTERM)
        assert len(server.find(f"/sessions/{session}/step")) == steps


def test_an_idle_moved_connection_is_closed_in_time() -> None:
    with two_workers("--timeout-keep-alive", "1") as (_, one, other):
        there = other.at()
        move(one, other.start(), there)
        one.socket.settimeout(20)
        assert one.socket.recv(1) == b""


def test_a_connection_that_is_not_used_after_its_move_is_closed_in_time() -> None:
    """The request before the move was the other worker's, so here nothing but the move itself can start the clock."""
    with two_workers("--timeout-keep-alive", "3") as (server, one, other):
        session = other.start()
        assert [one.step(session), one.step(session)] == [1, 2]
        one.socket.settimeout(20)
        assert one.socket.recv(1) == b""
        shown = look_at(server.run_directory)
        assert shown is not None
        assert sum(figures.adopted for figures in shown.alive) == 1


def test_a_stop_closes_idle_moved_connections_and_ends_at_once() -> None:
    with two_workers() as (server, one, other):
        there = other.at()
        move(one, other.start(), there)
        assert server.stop() in (0, -signal.SIGTERM)
        assert one.socket.recv(1) == b""


def test_a_client_of_a_killed_worker_sees_its_moved_connection_closed() -> None:
    with two_workers() as (server, one, other):
        there = other.at()
        move(one, other.start(), there)
        os.kill(there, signal.SIGKILL)
        with contextlib.suppress(ConnectionResetError):
            assert one.socket.recv(1) == b""
        server.wait_for("serves", 3)


@pytest.mark.parametrize("options", [("--no-handoff",), ("--http", "h11")], ids=["switched-off", "h11"])
def test_connections_stay_where(options: tuple[str, ...]) -> None:
    with two_workers(*options) as (server, one, other):
        here, session = one.at(), other.start()
        for count in range(1, 12):
            assert one.step(session) == count
        assert one.at() == here
        said = server.find("connections stay where they were accepted")
        assert len(said) == (1 if "h11" in options else 0)


def test_a_connection_over_a_unix_socket_moves_as_any_other(tmp_path: Path) -> None:
    with two_workers("--drain-timeout", "1", uds=tmp_path / "public") as (server, one, other):
        there = other.at()
        session = other.start()
        move(one, session, there)
        counted = one.step(session)
        assert [one.step(session) for _ in range(3)] == [counted + 1, counted + 2, counted + 3]
        # Those of a worker that leaves move, too.
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for("all 2 workers were restarted", timeout_seconds=40)
        assert one.at() in server.workers()
        assert server.find("lost a connection") == []


def test_a_connection_behind_tls_stays_where_it_is(tmp_path: Path) -> None:
    certificate = ["-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *certificate],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=30,
    )
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    trust.check_hostname = False
    files = ("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    with two_workers(*files, tls=trust) as (_, one, other):
        here, session = one.at(), other.start()
        for count in range(1, 8):
            assert one.step(session) == count
        assert one.at() == here


def test_a_datagram_that_is_no_connection_is_dropped_with_what_it_carries(pair: Pair) -> None:
    server, _, _ = pair
    directory = server.run_directory
    doors = [name for name in os.listdir(directory) if name.endswith(".conn")]
    assert len(doors) == 2
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for door in doors:
            path = os.path.join(directory, door)
            assert os.stat(path).st_mode & 0o777 == 0o600
            for content in (b"", b"junk", b"homing connection 2 \x01", b"homing connection 2 " + b"." * 32 + b"\x01"):
                sender.sendto(content, path)
                for descriptors in ([writing], [writing, writing], [sender.fileno()]):
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    sender.sendmsg([content], [rights], 0, path)
    os.close(writing)
    # Its last writer has gone, once the workers have closed what they were sent.
    assert os.read(reading, 1) == b""
    os.close(reading)
    with contextlib.closing(Connection(server.port)) as one:
        assert one.at() in server.workers()
