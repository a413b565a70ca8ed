"""Whole servers, whatever their clients do and whichever of their workers die: each reply is what one worker would give.

One `homing run` with three workers; clients start, use, touch and end sessions over connections to any of them, while
workers are killed, paused, replaced and restarted. The plain model is a dict: which worker has a session, and how often it
was used.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.support.machines import run_new, run_same
from tests.support.running import ROOT, Running, running

WORKERS = 3
LOST = (ConnectionError, http.client.RemoteDisconnected, http.client.BadStatusLine)
TRIES = 12
which = st.integers(0, 5)


class Client:
    """One connection. It moves to another worker after some requests for that one's sessions.

    Attributes:
        pid: The worker that had it when it was last asked.
    """

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            self.pid = self.where()
        except BaseException:
            self.close()
            raise

    def where(self) -> int:
        """The worker that has this connection; the question names no session, so it moves nothing."""
        _, text = self.call("GET", "/")
        self.pid = int(text.split()[-1])
        return self.pid

    def send(self, method: str, path: str) -> None:
        self._connection.request(method, path, headers={"content-length": "0"} if method == "POST" else {})

    def reply(self) -> tuple[int, Any]:
        with self._connection.getresponse() as response:
            body = response.read()
            if response.headers.get_content_type() == "application/json":
                return response.status, json.loads(body)
            return response.status, body.decode()

    def call(self, method: str, path: str) -> tuple[int, Any]:
        self.send(method, path)
        return self.reply()

    def close(self) -> None:
        self._connection.close()


@dataclass
class Session:
    """Attributes:
    pid: The worker that has it; 0: it has ended, or died with its worker.
    """

    id: str
    pid: int
    worker: str
    count: int = 0


class Server:
    """The server of all examples, and what may still happen to it: a death costs a second and more."""

    def __init__(self, process: Running, *, deaths: int, restarts: int) -> None:
        self.process = process
        self.deaths = self.deaths_inside = deaths
        self.restarts = restarts
        self.serving: list[int] = []
        self.wait(WORKERS)

    def wait(self, workers: int) -> None:
        """Wait until so many workers serve."""
        deadline = time.monotonic() + 90
        while True:
            said = [int(match[1]) for match in self.process.find(r"worker [0-9a-f]+ \[(\d+)\] serves")]
            live = set(self.process.workers())
            self.serving = [pid for pid in said if pid in live]
            if len(self.serving) >= workers:
                return
            assert time.monotonic() < deadline, self.process.log
            self.process.wait_for("serves", len(said) + 1)

    def kill(self, pid: int) -> None:
        """Kill a worker and wait for its death, not for the one that comes in its place."""
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while pid in self.process.workers():
                assert time.monotonic() < deadline, self.process.log
                os.sched_yield()
        finally:
            os.close(fd)
        self.serving.remove(pid)


class ServerHistories(RuleBasedStateMachine):
    server: ClassVar[Server]
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.sessions: list[Session] = []
        self.server.wait(1)
        for _ in range(TRIES):  # one to each worker, if the kernel gives one
            if len({client.pid for client in self.clients}) < len(self.server.serving):
                self.connect()

    def teardown(self) -> None:
        for session in self.sessions:  # each is where it was, or gone for good
            self._use(self._client(0), session)
        for client in self.clients:
            client.close()

    # --- clients ---

    def _client(self, number: int) -> Client:
        if not self.clients:
            self.connect()
        return self.clients[number % len(self.clients)]

    def _session(self, number: int) -> Session | None:
        return self.sessions[number % len(self.sessions)] if self.sessions else None

    def _count(self, what: str) -> None:
        type(self).seen[what] += 1

    def _lost(self, client: Client) -> None:
        """Its worker died: the client connects again when it needs to."""
        client.close()
        self.clients.remove(client)

    def _where(self, client: Client) -> int:
        before = client.pid
        if client.where() != before:
            self._count("moved")
        return client.pid

    def _use(self, client: Client, session: Session) -> None:
        if session.pid:
            self._count("used here" if session.pid == client.pid else "used elsewhere")
        self._judge(session, *client.call("GET", f"/sessions/{session.id}"))

    def _judge(self, session: Session, status: int, reply: Any) -> None:
        if not session.pid:
            assert (status, reply["error"]["code"]) == (410, "session_gone"), (status, reply)
            self._count("gone")
            return
        session.count += 1
        assert status == 200, (status, reply, self.server.process.log)
        assert reply == {"count": session.count, "worker": session.worker}
        self._count("used")

    @rule()
    def connect(self) -> None:
        self.server.wait(1)
        while len(self.clients) > 5:
            self.clients.pop(0).close()
        for _ in range(20):
            with contextlib.suppress(*LOST):
                self.clients.append(Client(self.server.process.port))
                return
        raise AssertionError(f"no worker accepts:\n{self.server.process.log}")

    @rule(number=which)
    def start(self, number: int) -> None:
        client = self._client(number)
        self._where(client)
        status, reply = client.call("POST", "/sessions")
        assert status == 200, reply
        # Wherever the server has put it.
        [said] = self.server.process.find(rf"worker {reply['worker']} \[(\d+)\] serves")
        self.sessions.append(Session(reply["session"], int(said[1]), reply["worker"]))
        self._count("started")

    @rule(number=which, session=which)
    def use(self, number: int, session: int) -> None:
        client = self._client(number)
        if (found := self._session(session)) is not None:
            self._use(client, found)

    @rule(number=which, session=which)
    def end(self, number: int, session: int) -> None:
        if (found := self._session(session)) is not None:
            status, reply = self._client(number).call("POST", f"/sessions/{found.id}/finish")
            if found.pid:
                assert (status, reply) == (200, {})
                found.pid = 0
                self._count("ended")
                # Its window is open: its owner's handler answers, as one worker's would; once more it is never served.
                self.sessions.remove(found)
                status, reply = self._client(number).call("GET", f"/sessions/{found.id}")
                assert status in {404, 410}, reply
            else:
                assert status == 410

    @rule(number=which, session=which, other=which)
    def touch(self, number: int, session: int, other: int) -> None:
        found, beside = self._session(session), self._session(other)
        if found is None or beside is None or found is beside or not found.pid:
            return
        status, reply = self._client(number).call("POST", f"/sessions/{found.id}/touch/{beside.id}")
        if beside.pid == found.pid:
            beside.count += 1
            assert (status, reply) == (200, {"here": True, "count": beside.count})
            self._count("touched")
        else:
            assert (status, reply) == (200, {"here": False})

    @rule(number=which)
    def ask_for_what_never_was(self, number: int) -> None:
        status, reply = self._client(number).call("GET", f"/sessions/{os.urandom(8).hex()}")
        assert (status, reply["error"]["code"]) == (410, "session_gone")

    # --- workers ---

    def _dies(self, pid: int, *, busy: Client | None = None) -> None:
        """Kill a worker; of `busy`, which waits for a reply, it is known where it is."""
        lost = [each for each in self.clients if (each.pid if each is busy else self._where(each)) == pid]
        self.server.kill(pid)
        for client in lost:
            self._lost(client)
        for session in self.sessions:
            if session.pid == pid:
                session.pid = 0

    @rule(number=which)
    def worker_dies(self, number: int) -> None:
        if self.server.deaths <= 0:
            return
        type(self).server.deaths -= 1
        self.server.wait(2)  # another has to be there to answer
        self._dies(self.server.serving[number % len(self.server.serving)])
        self._count("died")

    @rule(number=which, session=which)
    def worker_dies_in_its_handler(self, number: int, session: int) -> None:
        found = self._session(session)
        if self.server.deaths_inside <= 0 or found is None or not found.pid:
            return
        type(self).server.deaths_inside -= 1
        self.server.wait(2)
        client, pid = self._client(number), found.pid
        here = self._where(client) == pid
        client.send("GET", f"/sessions/{found.id}/hold")
        # Its next request is answered, so the one before has reached the handler, or will never run.
        if len(self.clients) == 1:
            self.connect()
        self._use(next(each for each in self.clients if each is not client), found)
        self._dies(pid, busy=client)
        if not here:
            status, reply = client.reply()
            assert (status, reply["error"]["code"]) in {(502, "owner_unreachable"), (410, "session_gone")}, reply
        self._count("died in a handler")

    @rule(number=which, session=which, other=which, paused=which)
    def worker_is_paused(self, number: int, session: int, other: int, paused: int) -> None:
        """What comes to a paused worker waits; what does not need it goes on."""
        client, found = self._client(number), self._session(session)
        if found is None:
            return
        pid = self.server.serving[paused % len(self.server.serving)]
        beside, by = self._session(other), self._client(number + 1)
        self._where(by)
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        try:
            client.send("GET", f"/sessions/{found.id}")
            if beside is not None and by is not client and pid not in (by.pid, beside.pid):
                self._use(by, beside) if beside is not found else None
                self._count("used beside a pause")
        finally:
            os.kill(pid, signal.SIGCONT)
        self._judge(found, *client.reply())
        self._count("paused")

    @rule()
    def workers_are_restarted(self) -> None:
        if self.server.restarts <= 0:
            return
        type(self).server.restarts -= 1
        self.server.wait(WORKERS)
        old = set(self.server.serving)
        said = len(self.server.process.find("serves"))
        self.server.process.process.send_signal(signal.SIGHUP)
        self.server.process.wait_for("serves", said + WORKERS)
        deadline = time.monotonic() + 60
        while old & set(self.server.process.workers()):
            assert time.monotonic() < deadline, self.server.process.log
            time.sleep(0.05)
        self.server.wait(WORKERS)
        for client in list(self.clients):
            self._lost(client)
        for session in self.sessions:
            session.pid = 0
        self._count("restarted")


@contextlib.contextmanager
def one_server(*, deaths: int, restarts: int) -> Iterator[Counter[str]]:
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    # No connection is closed for being idle: under load a step may take longer than the usual five seconds.
    options = ("--timeout-keep-alive", "3600", "--drain-timeout", "1")
    arguments = ("tests.support.sticky_app:app", "--workers", str(WORKERS), *options)
    with running(*arguments, cwd=ROOT, env=environment) as process:
        ServerHistories.server = Server(process, deaths=deaths, restarts=restarts)
        ServerHistories.seen = Counter()
        yield ServerHistories.seen
        assert process.stop() == 0, process.log
        assert "Traceback" not in process.log, process.log


@pytest.mark.timeout(600)
def test_any_history_of_a_server_is_that_of_one_worker() -> None:
    with one_server(deaths=3, restarts=1) as seen:
        run_same(ServerHistories, 40, 30)
    whats = (
        "used here",
        "used elsewhere",
        "ended",
        "gone",
        "died",
        "died in a handler",
        "paused",
        "restarted",
    )
    for what in whats:
        assert seen[what], f"{what!r} never happened: {seen}"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_longer_history_of_a_server_is_that_of_one_worker() -> None:
    with one_server(deaths=100, restarts=20):
        run_new(ServerHistories, 400, 60)
