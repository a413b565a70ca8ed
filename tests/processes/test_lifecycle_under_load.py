"""Workers killed, paused, restarted and stopped while clients work: the table of answers holds, new sessions always work.

Shown elsewhere: that a dead or hanging worker is replaced, rolling restarts and their failures, Ctrl-C twice, streams at the
graceful limit, workers that do not outlive a killed supervisor (F32), and one start and stop of the app per worker
(SCENARIOS 18): `test_run_lifecycle.py`. Forked children that own and release nothing (F19): `test_owners_deaths.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.raw import Address, Reply, WebSocketWire, Wire, WireError, connect, request
from tests.support.recorder import body, note, read_body, receive, respond, send, start, wait
from tests.support.staged import SESSION, Staged, asked, call, open_staged

from homing.rundir import RunDirectory

COUNTERS = "tests.support.counter_app:app"
COUNTING = ("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions", "--start", "POST /sessions")


async def made(wire: Wire) -> dict[str, Any]:
    reply = await posted(wire, "/sessions")
    assert reply.status == 200, reply
    value: dict[str, Any] = json.loads(reply.body)
    return value


async def posted(wire: Wire, path: str) -> Reply:
    await wire.send(request("POST", path, body=b""))
    return await wire.reply("POST")


# --- a child that a worker forked ---


def test_a_forked_child_keeps_no_dead_worker_alive_and_no_request_waiting() -> None:
    async def test() -> None:
        options = (*COUNTING, "--no-handoff")  # the front's connection is to stay there
        async with open_staged(*options, app=COUNTERS, workers=2) as server, server.wires() as wires:
            owner, front = wires
            session = (await made(wires[owner]))["session"]
            steps = f"/sessions/{session}/step"
            # The hop's connections exist when the child is made, in the pool and in use, and so does the listener.
            assert (await posted(wires[front], steps)).status == 200
            async with server.connection(front) as stream:
                await stream.send(request("GET", f"/sessions/{session}/events"))
                await stream.until(b"data: 1\n\n")
                child = json.loads((await posted(wires[front], f"/sessions/{session}/fork")).body)["child"]
                try:
                    await server.kill(owner)
                    began = time.monotonic()
                    await stream.to_end(timeout_seconds=5)
                    assert stream.end == "reset"
                    assert (await posted(wires[front], steps)).status == 410
                    assert time.monotonic() - began < 0.9
                    # The port is free as soon as the server has stopped: the child let go of that too.
                    held = {os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()}
                    assert held, "the child lives"
                    assert held.isdisjoint(listening(server.server.address[1]))
                finally:
                    os.kill(child, signal.SIGKILL)

    asyncio.run(test())


def listening(port: int) -> set[str]:
    """The sockets that listen on a port, as `/proc/PID/fd` names them. Source: proc(5), `/proc/net/tcp`."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    assert found
    return found


# --- told to stop ---


def test_an_owner_that_stops_finishes_what_it_serves_for_others_and_takes_nothing_more() -> None:
    async def test() -> None:
        async with open_staged(*SESSION, workers=2) as server, server.wires() as wires:
            owner, front = wires
            session = await server.start_session(wires[owner])
            slow = server.script(read_body(), note("in"), wait("go"), *respond(data=b"slow"))
            late = server.script(read_body(), note("in"), wait("go"), *respond(data=b"late"))
            async with server.connection(front) as second:
                await second.send(asked(session, slow))
                served = await server.performance(slow)
                await served.noted("in")
                ending = asyncio.create_task(server.kill(owner, signal.SIGTERM))
                await server.server.log.until("Waiting for application shutdown")
                reply = await call(wires[front], session, late)
                assert (reply.status, reply.all(b"homing-error")) == (503, [b"session_moving"]), server.server.log
                served.open("go")
                reply = await second.reply()
                assert (reply.status, reply.body) == (200, b"slow")
                await ending
                assert (await call(wires[front], session, late)).status == 410
                assert server.stage.performances(late) == []
                # And what the front serves itself went on throughout.
                await server.start_session(wires[front])

    asyncio.run(test())


def test_an_owner_that_stops_lives_until_its_last_handler_has_ended() -> None:
    async def test() -> None:
        async with open_staged(*SESSION, workers=2) as server, server.wires() as wires:
            owner, front = wires
            session = await server.start_session(wires[owner])
            slow = server.script(read_body(), note("in"), wait("go"), *respond(data=b"slow"))
            with RunDirectory.open(str(server.run_directory)) as run:
                alive = set(run.live_workers())
                async with server.connection(front) as second:
                    await second.send(asked(session, slow))
                    served = await server.performance(slow)
                    await served.noted("in")
                    ending = asyncio.create_task(server.kill(owner, signal.SIGTERM))
                    await server.server.log.until("Waiting for application shutdown")
                    while not run.marks("drained"):
                        await asyncio.sleep(0.01)
                    assert alive <= set(run.live_workers())
                    served.open("go")
                    assert (await second.reply()).status == 200
                    await ending
                assert len(alive & set(run.live_workers())) == 1

    asyncio.run(test())


LIMIT_SECONDS = 3

STOPS = {
    "SIGTERM": (signal.SIGTERM, ("--timeout-graceful-shutdown", str(LIMIT_SECONDS))),
    "Ctrl-C twice": (signal.SIGINT, ()),
}


def told(server: Staged, number: int) -> None:
    """Send the signal as it is sent: a terminal's Ctrl-C goes to every process, `kill` to one."""
    if number == signal.SIGINT:
        for pid in server.server.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    server.server.signal(number)


@pytest.mark.parametrize("how", list(STOPS))
def test_scenario_15_stop_with_live_streams(how: str) -> None:
    """Streams and WebSockets, where they arrived and forwarded both ways: two workers drain that forward to each other."""
    number, options = STOPS[how]

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(open_staged(*SESSION, *options, workers=2))
            wires = await stack.enter_async_context(server.wires())
            one, other = wires
            sessions = {pid: await server.start_session(wires[pid]) for pid in wires}
            sides = [(one, one), (one, other), (other, one)]

            events = server.script(
                read_body(),
                start(headers=[(b"content-type", b"text/event-stream")]),
                body(b"data: 1\n\n", more=True),
                note("open"),
                wait("for ever"),
            )
            streams: list[Wire] = []
            for at, owner in sides:
                wire = await stack.enter_async_context(server.connection(at))
                await wire.send(asked(sessions[owner], events))
                await wire.until(b"data: 1\n\n")
                streams.append(wire)
            sockets: list[WebSocketWire] = []
            open_socket = server.script(receive(), send({"type": "websocket.accept"}), note("open"), wait("for ever"))
            for at, owner in sides[:2]:
                socket = WebSocketWire(await stack.enter_async_context(server.connection(at)))
                headers = [("x-session", sessions[owner]), ("x-case", open_socket)]
                assert (await socket.open("/", headers)).status == 101
                sockets.append(socket)
            ordinary = server.script(read_body(), note("in"), wait("go"), *respond(data=b"whole"))
            for at, owner in sides[1:]:
                await wires[at].send(asked(sessions[owner], ordinary))
            for nth in range(2):
                await (await server.stage.performance(ordinary, nth)).noted("in")

            began = time.monotonic()
            told(server, number)
            await server.server.log.until(r"^INFO:\s+Shutting down", 2)
            for nth in range(2):
                (await server.stage.performance(ordinary, nth)).open("go")
            for wire in wires.values():
                reply = await wire.reply()
                assert (reply.status, reply.body, reply.complete) == (200, b"whole", True)
            if number == signal.SIGINT:
                began = time.monotonic()
                told(server, number)
            assert await server.server.wait() == 0
            # The limit, the last half second for the others, and the end of three processes on a busy machine.
            assert time.monotonic() - began < LIMIT_SECONDS + 4
            for wire in streams:
                await wire.to_end()
                assert b"0\r\n\r\n" not in await wire.to_end()
            # Whoever asks twice, as with uvicorn alone, does not wait for the app's shutdown either.
            stops = [stage for _, _, stage in server.stage.lifespans].count("shutdown")
            assert stops == (2 if number == signal.SIGTERM else 0)
            # uvicorn shows what it cancels at its limit, as it does without homing; nothing else.
            cancelled = server.server.log.find("CancelledError: Task cancelled, timeout graceful shutdown exceeded")
            assert len(server.server.log.find("Traceback")) == len(cancelled), server.server.log
            assert not server.run_directory.exists()

    asyncio.run(test())


# --- under load ---


@dataclass
class Load:
    """Clients of the counter app, each on sessions of its own, and what they found.

    Attributes:
        lost: Workers that a test has ended, whose sessions may be gone. A session of any other worker is never gone.
        answers: How often each answer came, by status, or by how the connection ended.
        wrong: What no answer may be: state of another session, a count that skips or repeats, an answer that is not in
            the table. Empty, if homing is right.
    """

    address: Address
    lost: set[int] = field(default_factory=set)
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: int = 0
    ending: bool = False
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._client()) for _ in range(clients)]
            try:
                yield
            finally:
                self.ending = True
                if self.wrong:
                    for task in tasks:
                        task.cancel()

    async def progress(self, sessions: int = 8, *, timeout_seconds: float = 30) -> None:
        """Wait until so many more sessions were begun and used."""
        aim = self.begun + sessions
        async with asyncio.timeout(timeout_seconds):
            while self.begun < aim:
                self._more.clear()
                await self._more.wait()
        assert self.wrong == []

    async def _client(self) -> None:
        while not self.ending:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    wire = await stack.enter_async_context(connect(self.address))
                    first = await stack.enter_async_context(connect(self.address))
                except (OSError, TimeoutError):
                    self.answers["no connection"] += 1
                    if self.ending:
                        return
                    continue
                await self._session([first, wire])

    async def _session(self, wires: list[Wire]) -> None:
        """Begin a session and use it, from one connection and from another, until either ends."""
        answer, value = await self._ask(wires[0], "/sessions")
        if answer != "200":
            if answer not in ("503", "unanswered"):
                self.wrong.append(f"a start was answered {answer}")
            return
        session, incarnation, pid = value["session"], value["incarnation"], value["pid"]
        count = unknown = 0
        for turn in range(12):
            answer, value = await self._ask(wires[turn % 2], f"/sessions/{session}/step")
            if answer == "200":
                right = value["incarnation"] == incarnation and not value["hollow"] and value["pid"] == pid
                if not right or not count + 1 <= value["count"] <= count + 1 + unknown:
                    self.wrong.append(f"after {count} (and {unknown} unknown) of {incarnation} at {pid}: {value}")
                unknown -= value["count"] - count - 1
                count = value["count"]
            elif answer == "410":
                if pid not in self.lost:
                    self.wrong.append(f"a session of the live worker {pid} is gone")
                again, _ = await self._ask(wires[turn % 2], f"/sessions/{session}/step")
                if again not in ("410", "unanswered"):
                    self.wrong.append(f"a session that was gone was answered {again}")
                break
            elif answer in ("502", "504", "unanswered"):
                unknown += 1
                if answer == "unanswered":
                    break
            elif answer != "503":
                self.wrong.append(f"a step was answered {answer}")
        self.begun += 1
        self._more.set()

    async def _ask(self, wire: Wire, path: str) -> tuple[str, Any]:
        try:
            await wire.send(request("POST", path, body=b""))
            reply = await wire.reply("POST", timeout_seconds=3)
        except (WireError, OSError):
            self.answers["unanswered"] += 1
            return "unanswered", None
        if not reply.head:
            self.answers["unanswered"] += 1
            return "unanswered", None
        answer = str(reply.status) if reply.complete else "cut"
        self.answers[answer] += 1
        return answer, json.loads(reply.body) if answer == "200" else None


@pytest.mark.timeout(300)
def test_workers_are_killed_paused_and_restarted_under_load_and_the_server_is_stopped() -> None:
    async def test() -> None:
        options = (*COUNTING, "--owner-timeout", "2", "--no-access-log", "--drain-timeout", "1")
        async with open_staged(*options, app=COUNTERS, workers=3) as server:
            load = Load(server.server.address)
            async with load.running(clients=6):
                await load.progress()
                workers = server.server.log.find(r"app startup (\d+)")
                killed, stopped, told = (int(match[1]) for match in workers)

                load.lost.add(killed)
                await server.kill(killed)
                await load.progress()
                await server.replaced()

                with server.stopped(stopped):
                    await load.progress()
                await load.progress()

                # From here on nothing is lost but what those workers held: whatever was accepted is answered.
                before = Counter(load.answers)
                load.lost.add(told)
                await server.kill(told, signal.SIGTERM)
                await load.progress()
                await server.replaced()

                load.lost |= {int(match[1]) for match in server.server.log.find(r"app startup (\d+)")}
                server.server.signal(signal.SIGHUP)
                await server.server.log.until("all 3 workers were restarted", timeout_seconds=200)
                await server.server.log.until(r"worker \[\d+\] has stopped", 3)
                await load.progress()
                late = load.answers - before
                assert not {"502", "504", "cut"} & late.keys(), (late, str(server.server.log))

                before = Counter(load.answers)
                load.ending = True
                server.server.signal(signal.SIGTERM)
                assert await server.server.wait() == 0
            assert load.wrong == []
            assert not {"410", "502", "504", "cut"} & (load.answers - before).keys()
            assert not server.server.log.find("Traceback")
            assert not server.run_directory.exists()

    asyncio.run(test())


def test_recycled_workers_end_their_sessions_and_inherit_none() -> None:
    """SCENARIOS 14: `--limit-max-requests` counts what a worker accepted, and what it forwarded, not what it served."""

    async def test() -> None:
        options = (*COUNTING, "--limit-max-requests", "60", "--no-access-log")
        async with open_staged(*options, app=COUNTERS, workers=2) as server:
            load = Load(server.server.address)
            async with load.running(clients=4):
                # Any of them is recycled sooner or later, by itself.
                load.lost = AnyWorker()
                await server.server.log.until(r"worker \[\d+\] exited \(exit code 0\)", 3)
                await load.progress()
            assert load.wrong == []
            assert not {"502", "504", "cut"} & load.answers.keys(), load.answers
            assert not server.server.log.find("Traceback")

    asyncio.run(test())


class AnyWorker(set[int]):
    def __contains__(self, pid: object) -> bool:
        return True
