"""Workers that leave while their server goes on: `homing drain`, SIGHUP and SIGTTOU, and whatever comes in between."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support import raw
from tests.support.running import HOMING, ROOT, Running, environment, running, until, wait_until_gone

from homing.watch.servers import look_at

APP = (
    "tests.support.counter_app:app",
    *("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions", "--start", "POST /sessions"),
    *("--end", "DELETE /sessions/{session}", "--no-access-log", "--timeout-keep-alive", "3600"),
)
STARTS = 8
"""So many starts over connections of their own: the draining worker would get one with all but one chance in 250."""


class Connection:
    """One keep-alive connection of a client."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._http.connect()
        self.socket = self._http.sock
        self.said: http.client.HTTPResponse | None = None

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        self._http.request(method, path)
        with self._http.getresponse() as reply:
            self.said = reply
            return reply.status, reply.read()

    def document(self, method: str, path: str) -> dict[str, Any]:
        status, body = self.ask(method, path)
        assert status == 200, (status, body)
        found: dict[str, Any] = json.loads(body)
        return found

    def start(self) -> tuple[str, int]:
        """A new session, and the worker that has it."""
        made = self.document("POST", "/sessions")
        return made["session"], made["pid"]

    @property
    def is_kept(self) -> bool:
        return self._http.sock is self.socket

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def connected(port: int) -> Iterator[Connection]:
    with contextlib.closing(Connection(port)) as connection:
        yield connection


def start(port: int) -> tuple[str, int]:
    with connected(port) as connection:
        return connection.start()


def step(port: int, session: str) -> tuple[int, dict[str, Any]]:
    """One step over a connection of its own, which may reach any worker."""
    with connected(port) as connection:
        status, body = connection.ask("POST", f"/sessions/{session}/step")
        return status, json.loads(body)


def end(port: int, session: str) -> None:
    with connected(port) as connection:
        connection.document("DELETE", f"/sessions/{session}")


@contextlib.contextmanager
def serving(
    *options: str, workers: int = 2, app: str = APP[0], env: Mapping[str, str | None] | None = None
) -> Iterator[Running]:
    with running(app, *APP[1:], *options, "--workers", str(workers), cwd=ROOT, env=env) as server:
        server.wait_for(f"all {workers} workers are ready")
        yield server


class Drain:
    """`homing drain --json` as a process, and the steps that it has shown."""

    def __init__(self, server: Running, worker: str | int) -> None:
        self.process = subprocess.Popen(
            [*HOMING, "drain", server.run_directory, str(worker), "--json"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.steps: list[dict[str, Any]] = []

    def until(self, state: str) -> dict[str, Any]:
        """The first step that shows this state."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.steps.append(json.loads(line))
            if self.steps[-1]["state"] == state:
                return self.steps[-1]
        raise AssertionError((self.steps, self.process.communicate()))

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        said, trouble = self.process.communicate(timeout=90)
        self.steps += map(json.loads, said.splitlines())
        return self.process.returncode, trouble


@contextlib.contextmanager
def drained(server: Running, worker: str | int) -> Iterator[Drain]:
    """A drain that has begun: the replacement serves, and no more sessions begin at the worker."""
    with contextlib.ExitStack() as stack:
        drain = Drain(server, worker)
        stack.callback(drain.process.communicate)
        stack.callback(drain.process.kill)
        drain.until("draining")
        server.wait_for(rf"worker \[{worker}\] drains")
        until(lambda: list(Path(server.run_directory).glob("*.draining")), server)
        yield drain


def seen_by_ps(server: Running, pid: int) -> bool:
    shown = look_at(server.run_directory)
    return shown is not None and any(worker.pid == pid for worker in shown.alive)


def test_a_drained_worker_keeps_its_sessions_takes_no_new_ones_and_leaves_when_they_have_ended() -> None:
    with serving("--drain-timeout", "300") as server, connected(server.port) as mine:
        session, old = mine.start()
        until(lambda: seen_by_ps(server, old), server)
        with drained(server, old) as drain:
            for count in (1, 2):
                status, found = step(server.port, session)
                assert (status, found["pid"], found["count"]) == (200, old, count)
            # A start that arrives there, over a connection that is there, begins elsewhere; so do those that are sent anywhere.
            assert mine.start()[1] != old
            assert old not in {start(server.port)[1] for _ in range(STARTS)}
            found = mine.document("POST", f"/sessions/{session}/step")
            assert (found["pid"], found["count"]) == (old, 3)
            end(server.port, session)
            code, trouble = drain.end()
            assert (code, trouble) == (0, "")
        last = drain.steps[-1]
        assert (last["state"], last["sessions"], last["pid"]) == ("drained", 0, old)
        wait_until_gone(old, 30)
        assert last["replacement"] in server.workers()
        assert len(server.workers()) == 2
        # The connection was at the worker that has left: it has moved, and its client has not noticed.
        assert mine.ask("GET", "/")[0] == 200
        assert mine.is_kept
        assert server.stop() == 0


def test_all_idle_connections_of_a_worker_that_leaves_move_however_many_they_are() -> None:
    with serving("--timeout-keep-alive", "60") as server, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(server.port)) for _ in range(300)]
        at = Counter(int(each.ask("GET", "/")[1].split()[-1]) for each in connections)
        leaver, held = at.most_common(1)[0]
        assert held > 100  # many times what a worker's queue of them holds
        assert Drain(server, leaver).end() == (0, "")
        wait_until_gone(leaver, 30)
        assert [each.ask("GET", "/")[0] for each in connections] == [200] * 300
        assert all(each.is_kept for each in connections)


def test_a_drain_says_how_many_sessions_are_left_once_the_worker_has_counted_them() -> None:
    """What a worker has published is up to a second old, and lacks what has begun meanwhile."""
    with serving("--drain-timeout", "300") as server, connected(server.port) as mine:
        session, old = mine.start()
        until(lambda: seen_by_ps(server, old), server)
        with drained(server, old) as drain:
            assert drain.steps[-1]["sessions"] is None
            assert drain.until("draining")["sessions"] == 1
            end(server.port, session)
            assert drain.end() == (0, "")
        assert drain.steps[-1]["sessions"] == 0


def test_sessions_that_outlast_the_time_to_drain_end_with_their_worker_and_are_gone() -> None:
    with serving("--drain-timeout", "1.5") as server:
        session, old = start(server.port)
        until(lambda: seen_by_ps(server, old), server)
        with drained(server, old) as drain:
            assert drain.end() == (0, "")
        assert (drain.steps[-1]["state"], drain.steps[-1]["sessions"]) == ("drained", 1)
        wait_until_gone(old, 30)
        assert step(server.port, session)[0] == 410
        assert len(server.find("the time to drain is over; 1 session ends with it")) == 1


@pytest.mark.parametrize("forwarded", [False, True])
def test_what_is_served_of_no_open_session_has_the_time_to_drain_wherever_it_arrived(forwarded: bool) -> None:
    with (
        serving("--drain-timeout", "60", "--timeout-graceful-shutdown", "1") as server,
        contextlib.ExitStack() as stack,
    ):
        session, old = start(server.port)
        until(lambda: seen_by_ps(server, old), server)
        stream = stack.enter_context(connected(server.port))
        while (int(stream.ask("GET", "/")[1].split()[-1]) != old) is not forwarded:
            stream = stack.enter_context(connected(server.port))
        stream.socket.sendall(f"GET /sessions/{session}/events HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        assert stream.socket.recv(12) == b"HTTP/1.1 200"
        end(server.port, session)
        with drained(server, old) as drain:
            came = b""
            while b"data: 80" not in came:  # four seconds of them
                part = stream.socket.recv(4096)
                assert part, (came[-20:], server.log)
                came += part
            assert drain.process.poll() is None
            stream.socket.close()
            assert drain.end() == (0, "")
        assert (drain.steps[-1]["state"], drain.steps[-1]["sessions"]) == ("drained", 0)


def test_a_worker_that_is_killed_while_it_drains_is_said_to_have_failed_and_its_replacement_serves() -> None:
    with serving() as server:
        session, old = start(server.port)
        until(lambda: seen_by_ps(server, old), server)
        with drained(server, old) as drain:
            second = Drain(server, old)
            code, trouble = second.end()
            assert (code, trouble.count("\n")) == (3, 1)
            assert "drains already" in trouble
            os.kill(old, signal.SIGKILL)
            code, trouble = drain.end()
        assert code == 3
        assert f"worker [{old}] exited before it had drained (signal SIGKILL)" in trouble
        assert step(server.port, session)[0] == 410
        assert len(server.workers()) == 2
        assert start(server.port)[1] in server.workers()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_ends_while_its_drain_waits_has_not_drained_and_its_replacement_is_left_alone(
    number: signal.Signals,
) -> None:
    with serving() as server:
        session, first = start(server.port)
        [second] = set(server.workers()) - {first}
        until(lambda: all(seen_by_ps(server, pid) for pid in (first, second)), server)
        with drained(server, first) as drain:
            other = drain.steps[-1]["replacement"]
            waiting = Drain(server, second)
            waiting.until("waiting")
            os.kill(second, number)
            code, trouble = waiting.end()
            assert code == 3
            assert f"worker [{second}] exited before it had drained (signal {number.name})" in trouble
            new = int(server.wait_for(rf"worker \[{second}\] is replaced by worker \[(\d+)\]")[0][1])
            end(server.port, session)
            assert drain.end() == (0, "")
        # One after the other: if the new worker were to drain, it would do so before this one.
        until(lambda: seen_by_ps(server, other), server)
        with drained(server, other) as drain:
            assert drain.end() == (0, "")
        assert not server.find(rf"worker \[{new}\] drains")
        assert new in server.workers()


def test_a_worker_that_is_killed_while_its_replacement_starts_is_replaced_by_that_one() -> None:
    with serving() as server:
        old, other = server.workers()
        until(lambda: seen_by_ps(server, old), server)
        drain = Drain(server, old)
        new = drain.until("starting")["replacement"]
        os.kill(old, signal.SIGKILL)
        code, trouble = drain.end()
        assert code == 3
        assert f"worker [{old}] exited before it had drained (signal SIGKILL)" in trouble
        server.wait_for(rf"worker \[{old}\] is replaced by worker \[{new}\]")
        server.wait_for(rf"worker [0-9a-f]+ \[{new}\] serves")
        assert server.workers() == sorted([other, new])


def test_a_restart_passes_over_a_worker_that_has_died_and_is_replaced_already() -> None:
    with serving() as server:
        first, second = server.workers()
        while start(server.port)[1] != first:
            pass
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(rf"worker \[{first}\] drains")
        os.kill(second, signal.SIGKILL)
        new = int(server.wait_for(rf"worker \[{second}\] is replaced by worker \[(\d+)\]")[0][1])
        os.kill(first, signal.SIGTERM)
        server.wait_for("all 2 workers were restarted")
        wait_until_gone(first, 60)
        assert not server.find(rf"worker \[{new}\] drains")
        assert new in server.workers()
        assert len(server.workers()) == 2


def test_a_stop_during_a_drain_ends_within_its_limit_and_the_dead_are_replaced_meanwhile() -> None:
    with serving("--timeout-graceful-shutdown", "1") as server:
        session, old = start(server.port)
        until(lambda: seen_by_ps(server, old), server)
        with drained(server, old) as drain:
            [other] = set(server.workers()) - {old, drain.steps[-1]["replacement"]}
            os.kill(other, signal.SIGKILL)
            server.wait_for(rf"worker \[{other}\] exited \(signal SIGKILL\)")
            server.wait_for(r"\[\d+\] serves", 4)
            assert step(server.port, session)[0] == 200
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as watching:
                watching.sendall(f"GET /sessions/{session}/events HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                assert watching.recv(100)
                server.process.send_signal(signal.SIGTERM)
                # The limit, and the end of four processes on a busy machine; the drain would go on for five minutes.
                assert server.wait(30) == 0
            code, trouble = drain.end()
        assert code == 3
        assert "the server has stopped" in trouble


def test_a_second_restart_replaces_what_the_first_has_replaced_already() -> None:
    with serving() as server:
        session, at = start(server.port)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(rf"worker \[{at}\] drains")
        assert step(server.port, session)[0] == 200
        between = set(server.workers()) - {at}
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("Received SIGHUP", 2)
        end(server.port, session)
        for pid in (at, *between):
            wait_until_gone(pid, 60)
        server.wait_for("all 2 workers were restarted")
        assert len(server.workers()) >= 2
        assert start(server.port)[1] not in between


def test_a_worker_that_is_taken_away_drains_too_also_while_another_drains() -> None:
    with serving() as server:
        first, second = server.workers()
        sessions: dict[int, str] = {}
        while len(sessions) < 2:
            session, at = start(server.port)
            sessions.setdefault(at, session)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(rf"worker \[{first}\] drains")
        server.process.send_signal(signal.SIGTTOU)
        server.wait_for(rf"worker \[{second}\] drains")
        for pid in (first, second):
            status, found = step(server.port, sessions[pid])
            assert (status, found["pid"]) == (200, pid)
        for session in [sessions[first], sessions[second]]:
            end(server.port, session)
        # Others were started there, to find one at each.
        for pid in (first, second):
            os.kill(pid, signal.SIGTERM)
            wait_until_gone(pid, 60)
        server.wait_for("all 1 workers were restarted")
        assert len(server.workers()) == 1


def test_a_connection_that_cannot_move_is_told_to_be_made_anew() -> None:
    with serving("--no-handoff") as server, connected(server.port) as mine:
        _, old = mine.start()
        until(lambda: seen_by_ps(server, old), server)
        with drained(server, old) as drain:
            deadline = time.monotonic() + 30
            while mine.is_kept and mine.said is not None and not mine.said.will_close:
                assert time.monotonic() < deadline
                assert mine.ask("GET", "/")[0] == 200
            assert drain.process.poll() is None, "its session is open"
            assert start(server.port)[1] != old


def half_asked(connection: Connection) -> socket.socket:
    """Send half a request's head, over a connection that stays."""
    assert connection.socket is not None
    connection.socket.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
    return connection.socket


def ends_asking(half: list[socket.socket]) -> list[bytes]:
    """Send what is missing of these heads, a while after their worker would have closed them; what is answered."""
    ended, _, _ = select.select(half, [], [], 0.3)
    assert not ended, "closed without an answer"
    for each in half:
        each.sendall(b"\r\n")
    return [http_reply(each) for each in half]


def http_reply(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    connection.settimeout(20)
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("handoff", [(), ("--no-handoff",)], ids=["moves", "stays"])
@pytest.mark.parametrize("session", [False, True], ids=["at once", "as the time to drain is over"])
def test_a_client_that_has_sent_half_a_head_as_its_worker_leaves_is_heard_out(
    handoff: tuple[str, ...], session: bool
) -> None:
    with serving("--drain-timeout", "2", *handoff) as server, contextlib.ExitStack() as stack:
        mine = stack.enter_context(connected(server.port))
        old = mine.start()[1] if session else int(mine.ask("GET", "/")[1].split()[-1])
        half = [half_asked(each) for each in (mine, *(stack.enter_context(connected(server.port)) for _ in range(6)))]
        half = [each for each in half if is_at(each, old)]  # what is elsewhere is kept after its reply
        assert mine.socket in half
        drain = Drain(server, old)
        server.wait_for(rf"worker \[{old}\] has drained|worker \[{old}\]: the time to drain is over")
        replies = ends_asking(half)
        assert all(each.startswith(b"HTTP/1.1 200") for each in replies)
        assert all(b"connection: close" in each.lower() for each in replies)
        assert drain.end()[0] == 0


def is_at(connection: socket.socket, pid: int) -> bool:
    """Whether this process serves a connection of ours."""
    here, there = (f"{address[1]:04X}" for address in (connection.getpeername(), connection.getsockname()))
    inodes = {
        fields[9]
        for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines())
        if fields[1].endswith(f":{here}") and fields[2].endswith(f":{there}")
    }
    held = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(os.readlink(each))
    return bool(held & {f"socket:[{inode}]" for inode in inodes})


def test_websockets_of_a_worker_that_leaves_are_closed_alike_wherever_they_arrived() -> None:
    async def test(server: Running) -> None:
        session, old = start(server.port)
        # With all but one chance in 2,000 at each worker at least one.
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for _ in range(12):
                wire = await stack.enter_async_context(raw.connect(("127.0.0.1", server.port)))
                clients.append(raw.WebSocketWire(wire))
                assert (await clients[-1].open(f"/sessions/{session}/socket")).status == 101
                assert (await clients[-1].frame()).opcode == raw.TEXT
            with drained(server, old) as drain:
                ends = [await each.frame(timeout_seconds=20) for each in clients]
                assert {(each.opcode, each.close_code) for each in ends} == {(raw.CLOSE, 1012)}
                assert drain.end()[0] == 0
        assert "Traceback" not in server.log

    # The sessions outlast the drain; what is being served could go on for longer than the test.
    with serving("--drain-timeout", "1", "--timeout-graceful-shutdown", "60") as server:
        asyncio.run(test(server))


@pytest.fixture(scope="module")
def two() -> Iterator[Running]:
    with serving() as server:
        until(lambda: all(seen_by_ps(server, pid) for pid in server.workers()), server)
        yield server


@pytest.mark.parametrize(
    ("server", "worker", "says"),
    [("nowhere", "1", "no running server is called nowhere"), ("", "1", "no worker of"), ("", "ab", "no worker of")],
)
def test_a_server_or_worker_that_is_not_there_is_one_line(two: Running, server: str, worker: str, says: str) -> None:
    done = subprocess.run(
        [*HOMING, "drain", server or two.run_directory, worker],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_control_socket_is_the_users_alone_and_refuses_what_it_does_not_know(two: Running) -> None:
    path = os.path.join(two.run_directory, "control.sock")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for junk in (b"drain\n", b'{"drain": 1}\n', b'{"drain": "x"}\n', b"[" * 2000 + b"\n"):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(30)
            asking.connect(path)
            asking.sendall(junk)
            with contextlib.suppress(ConnectionResetError):
                said = asking.recv(4096)
                assert not said or json.loads(said)["state"] == "refused"
                assert asking.recv(4096) == b""
    # Some that ask for nothing hinder nobody.
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        assert start(two.port)[1] in two.workers()
