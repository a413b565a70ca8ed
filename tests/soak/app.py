"""The app of the soak: each session counts its steps, and what runs is written down as it runs.

A session has an *incarnation*, random, made by the start that made its state, and a *chain*, a hash over the tokens of
all steps so far: its append-only log, in a few bytes. Every reply says incarnation, sequence, chain, worker and pid.

The journal is one file per process. Each line is one `write(2)`, so it is there however the process ends. Lines are JSON
lists: time (CLOCK_MONOTONIC, which all processes of a host share), what, number of the handler's run, session, token,
incarnation, sequence. What: `ready` to serve, `begin` and `end` of a handler, `made` state, a `step` that took effect, state `closed`, and
`hollow`: a request of a session of which there is no state here.

Some faults can only come from inside a worker: `/block` holds up its event loop, `/fork` forks it, `/clock` sets its wall
clock, and a step may raise.

Not here: judging any of that (`oracle`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import secrets
import signal
import sys
import time
import traceback
import uuid
from types import FrameType
from typing import Any, Final
from urllib.parse import parse_qsl

import homing
from homing.clock import SystemClock

JOURNAL_ENV: Final = "HOMING_SOAK_JOURNAL"
SESSION_HEADER: Final = b"x-session"
TOKEN_HEADER: Final = b"x-token"
FILLER: Final = b"0123456789abcdef" * 4096

Scope = dict[str, Any]


class SoakError(Exception):
    """What a step raises that was asked to: the soak's log may hold it."""


class Journal:
    """This process's journal. A worker opens it at start-up, and keeps it for the process's life."""

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, f"{os.getpid()}-{secrets.token_hex(4)}.journal")
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._numbers = itertools.count()

    def close(self) -> None:
        """Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def write(self, what: str, *fields: object) -> None:
        os.write(self._fd, json.dumps([time.monotonic(), what, *fields]).encode() + b"\n")

    def next_number(self) -> int:
        return next(self._numbers)


class State:
    """One session's state."""

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self.sequence = 0
        self.chain = ""

    def step(self, token: str) -> None:
        self.sequence += 1
        self.chain = chained(self.chain, token)


def chained(chain: str, token: str) -> str:
    """The chain once a step with this token has followed."""
    return hashlib.sha256(f"{chain} {token}".encode()).hexdigest()[:16]


class Run:
    """One run of a handler: its interval in the journal, and what it does to its session."""

    def __init__(self, app: SoakApp, what: str, session: str, token: str) -> None:
        self._app = app
        self._journal = app.journal
        self._session = session
        self._token = token
        self._number = self._journal.next_number()
        self._journal.write("begin", self._number, session, token, what)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.write("end", self._number, self._session, self._token)

    def _note(self, what: str, state: State | None, token: str | None = None) -> None:
        fields = ("", 0) if state is None else (state.incarnation, state.sequence)
        self._journal.write(what, self._number, self._session, self._token if token is None else token, *fields)

    def make(self) -> State:
        state = self._app.sessions[self._session] = State()
        self._app.closed.discard(self._session)
        self._note("made", state)
        return state

    def step(self, token: str | None = None) -> State | None:
        """The session's state after one step; None if it is closed, or was never here."""
        state = self._app.sessions.get(self._session)
        if state is None:
            if self._session not in self._app.closed:
                self._note("hollow", None, token)
            return None
        state.step(self._token if token is None else token)
        self._note("step", state, token)
        return state

    def close(self) -> bool:
        state = self._app.sessions.pop(self._session, None)
        if state is None:
            return False
        self._app.closed.add(self._session)
        self._note("closed", state)
        return True


class SoakApp:
    """An ASGI app. Its sessions are named by a header, made by `POST /start` (the client's ID) and `POST /new` (its own)."""

    def __init__(self) -> None:
        self.sessions: dict[str, State] = {}
        self.closed: set[str] = set()
        self._journal: Journal | None = None

    @property
    def journal(self) -> Journal:
        if self._journal is None:
            raise RuntimeError("a request came before start-up")
        return self._journal

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        headers = dict(scope["headers"])
        session = headers.get(SESSION_HEADER, b"").decode()
        token = headers.get(TOKEN_HEADER, b"").decode()
        if scope["type"] == "websocket":
            await self._talk(session, token, receive, send)
            return
        query = dict(parse_qsl(scope["query_string"].decode()))
        slow = float(query.get("slow", 0.0))
        match scope["path"]:
            case "/vitals":
                try:
                    await reply(send, 200, vitals())
                except OSError as error:  # no descriptor to look with
                    await reply(send, 503, str(error))
            case "/pid":
                await reply(send, 200, os.getpid())
            case "/block":
                # The event loop stands still, as it does for a handler that computes.
                time.sleep(float(query["seconds"]))
                await reply(send, 200, os.getpid())
            case "/fork":
                fork(float(query["seconds"]))
                await reply(send, 200, os.getpid())
            case "/clock":
                set_wall_clock(float(query["shift"]))
                await reply(send, 200, os.getpid())
            case "/start":
                await self._start(session, token, slow, receive, send)
            case "/new":
                await self._start(uuid.uuid4().hex, token, slow, receive, send, named=True)
            case "/step":
                await self._step(session, token, slow, receive, send, raises="raises" in query)
            case "/download":
                await self._download(session, token, int(query["bytes"]), receive, send)
            case "/events":
                await self._events(session, token, int(query["count"]), float(query["gap"]), receive, send)
            case "/close":
                await self._close(session, token, receive, send)
            case _:
                await reply(send, 404, {"error": "no such path"})

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        self._journal = Journal(os.environ[JOURNAL_ENV])
        say_what_is_under_way_when_asked()
        self._journal.write("ready", 0, "", "")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def _answer(self, state: State | None, token: str, **more: object) -> dict[str, object]:
        answer: dict[str, object] = {"token": token, "worker": homing.worker_id(), "pid": os.getpid(), **more}
        if state is not None:
            answer |= {"incarnation": state.incarnation, "sequence": state.sequence, "chain": state.chain}
        return answer

    async def _start(
        self, session: str, token: str, slow: float, receive: Any, send: Any, *, named: bool = False
    ) -> None:
        with Run(self, "start", session, token) as run:
            if await read_body(receive) is None:
                return
            if slow:
                await asyncio.sleep(slow)
            answer = self._answer(run.make(), token, session=session)
            await reply(send, 200, answer, [(SESSION_HEADER, session.encode())] if named else [])

    async def _step(
        self, session: str, token: str, slow: float, receive: Any, send: Any, *, raises: bool = False
    ) -> None:
        with Run(self, "step", session, token) as run:
            body = await read_body(receive)
            if body is None:
                return
            if slow:
                await asyncio.sleep(slow / 2)
            state = run.step()
            answer = self._answer(state, token, bytes=len(body), digest=hashlib.sha256(body).hexdigest())
            if slow:
                await asyncio.sleep(slow / 2)
            if raises and state is not None:
                raise SoakError("asked to")
            await reply(send, 200 if state is not None else 404, answer)

    async def _download(self, session: str, token: str, count: int, receive: Any, send: Any) -> None:
        """A step whose answer is followed by so many bytes, as fast as they are taken."""
        with Run(self, "download", session, token) as run:
            if await read_body(receive) is None:
                return
            state = run.step()
            if state is None:
                await reply(send, 404, self._answer(None, token))
                return
            first = json.dumps(self._answer(state, token)).encode() + b"\n"
            length = str(len(first) + count).encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            while count > 0:
                part = min(count, len(FILLER))
                await send({"type": "http.response.body", "body": FILLER[:part], "more_body": True})
                count -= part
            await send({"type": "http.response.body", "body": b""})

    async def _close(self, session: str, token: str, receive: Any, send: Any) -> None:
        with Run(self, "close", session, token) as run:
            if await read_body(receive) is None:
                return
            await reply(send, 200, self._answer(None, token, closed=run.close()))

    async def _events(self, session: str, token: str, count: int, gap: float, receive: Any, send: Any) -> None:
        with Run(self, "events", session, token) as run:
            state = run.step()
            if state is None:
                await reply(send, 404, self._answer(None, token))
                return
            answer = self._answer(state, token)
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            leaving = asyncio.create_task(left(receive))
            try:
                for number in range(count):
                    event = f"data: {json.dumps({**answer, 'event': number})}\n\n".encode()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    await asyncio.wait({leaving}, timeout=gap)
                    if leaving.done():
                        return
                await send({"type": "http.response.body", "body": b""})
            finally:
                leaving.cancel()
                await asyncio.wait({leaving})

    async def _talk(self, session: str, token: str, receive: Any, send: Any) -> None:
        """A WebSocket: every text message is the token of a step."""
        with Run(self, "socket", session, token) as run:
            await receive()
            await send({"type": "websocket.accept"})
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    return
                step = message["text"]
                answer = self._answer(run.step(step), step)
                await send({"type": "websocket.send", "text": json.dumps(answer)})


async def left(receive: Any) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Any) -> bytes | None:
    """The whole body; None if the client left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def reply(send: Any, status: int, answer: object, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps(answer).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


_wall_clock = time.time


def set_wall_clock(shift_seconds: float) -> None:
    """From now on, and until it is set again, this process takes the wall clock to be so far off."""

    def shifted() -> float:
        return _wall_clock() + shift_seconds

    time.time = shifted
    SystemClock.wall = staticmethod(shifted)


def say_what_is_under_way_when_asked() -> None:
    """On SIGUSR1: where the main thread is, and what each task waits for, on stderr. For a worker that does not end."""
    loop = asyncio.get_running_loop()

    def say(_: int, frame: FrameType | None) -> None:
        print(f"worker [{os.getpid()}] is asked what is under way\n", *traceback.format_stack(frame), file=sys.stderr)
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=sys.stderr)
        sys.stderr.flush()

    signal.signal(signal.SIGUSR1, say)


def fork(seconds: float) -> None:
    """Leave a copy of this process behind for so long, as an app does that starts helpers by a fork. It only sleeps."""
    pid = os.fork()
    if pid == 0:
        if os.fork():
            os._exit(0)  # so the copy is nobody's child here, and needs no waiting for
        time.sleep(seconds)
        os._exit(0)
    os.waitpid(pid, 0)


def vitals() -> dict[str, object]:
    """What this process has open."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the one that lists the directory
    return {
        "pid": os.getpid(),
        "worker": homing.worker_id(),
        "tasks": len(asyncio.all_tasks()),
        "task_names": sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks()),  # type: ignore[union-attr]
        "fds": len(names),
        "fd_names": sorted(names),
        "resident_bytes": resident,
    }


app = SoakApp()
