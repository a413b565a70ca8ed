"""What did the app see? An ASGI app that records its scope and events, and does what a script tells it to.

Two halves, joined by a Unix stream socket (`HOMING_TEST_STAGE` names it):

* `Recorder`, the app, runs in a worker process. A request names its case in the header `x-case`; the recorder asks the
  stage for that case's script, runs it step by step, and tells the stage the scope, each event and each outcome as it
  happens, types and all. A request without a case, or whose case has no script, gets a small 200.
* `Stage`, in the test's process, holds the scripts and collects the records. A test waits on a record
  (`Performance.until`) and opens gates (`Performance.open`), so nothing sleeps and nothing polls.

A script is a list of steps; see the functions under "steps". The records travel as pickles, because a tuple that became a
list, or bytes that became a bytearray, must show; both ends are this test's own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import os
import pickle
import random
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from homing.types import ASGIApp, Message, Receive, Scope, Send

STAGE_ENV: Final = "HOMING_TEST_STAGE"
NAME_ENV: Final = "HOMING_TEST_WORKER"
CASE_HEADER: Final = b"x-case"
WAIT_SECONDS: Final = 10.0
GATE_SECONDS: Final = 60.0

DEATH: Final = 70
"""The exit code of a worker whose script said `die`."""

Step: TypeAlias = tuple[Any, ...]
Script: TypeAlias = Sequence[Step]


# --- steps ---


def receive(count: int = 1) -> Step:
    """Call `receive` this often, and record each event."""
    return ("receive", count)


def read_body() -> Step:
    """Receive until the body ends or the client leaves."""
    return ("read_body",)


def read_until(kind: str) -> Step:
    """Receive until an event of this type, such as `http.disconnect`."""
    return ("read_until", kind)


def digest_body(bytes_per_second: float | None = None) -> Step:
    """Read the whole body without keeping it, at most this fast; records its length and SHA-256."""
    return ("digest_body", bytes_per_second)


def digest_messages(count: int) -> Step:
    """Receive this many WebSocket messages without keeping them; records the length and SHA-256 of each."""
    return ("digest_messages", count)


def send(message: Message) -> Step:
    """Send this event exactly as it is, and record how that ended."""
    return ("send", message)


def start(status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), **more: Any) -> Step:
    return send({"type": "http.response.start", "status": status, "headers": list(headers), **more})


def body(data: bytes = b"", *, more: bool = False) -> Step:
    return send({"type": "http.response.body", "body": data, "more_body": more})


def respond(status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), data: bytes = b"ok") -> list[Step]:
    """A whole reply with its length."""
    return [start(status, [*headers, (b"content-length", b"%d" % len(data))]), body(data)]


def send_pattern(total_bytes: int, chunk_bytes: int = 65536) -> Step:
    """A body of `total_bytes` of `pattern`, in events of `chunk_bytes`, the last one ending the reply."""
    return ("send_pattern", total_bytes, chunk_bytes)


def wait(gate: str) -> Step:
    """Go on once the test opens this gate."""
    return ("wait", gate)


def pause(seconds: float) -> Step:
    """Say nothing for so long: for cases about silence, never to wait for something."""
    return ("pause", seconds)


def note(text: str) -> Step:
    """Record that the script got here."""
    return ("note", text)


def watch() -> Step:
    """From here on a second task receives and records, as frameworks do that stream and listen at once."""
    return ("watch",)


def fail(text: str = "the script raises") -> Step:
    """Raise, as an app with a bug would."""
    return ("fail", text)


def die() -> Step:
    """End this worker's process at once, as a crash would."""
    return ("die",)


def see_scope() -> Step:
    """Record the scope once more: servers change it while the request runs (trailers)."""
    return ("see_scope",)


_PERIOD: Final = 1_048_573  # a prime: no two of its blocks of a round size are alike
_TABLE: Final = random.Random(0).randbytes(_PERIOD)


def pattern(offset: int, count: int) -> bytes:
    """`count` bytes, from `offset`, of an endless stream of bytes that is the same everywhere and quick to make."""
    first = offset % _PERIOD
    data = _TABLE[first : first + count]
    return data + pattern(offset + len(data), count - len(data)) if len(data) < count else data


# --- the app's half ---


class ScriptError(Exception):
    """What `fail` raises."""


class Recorder:
    """The app. One connection to the stage for all requests of this process, opened on the first."""

    def __init__(self, stage: str | None = None, name: str | None = None) -> None:
        self._path = stage or os.environ.get(STAGE_ENV)
        self.name = name or os.environ.get(NAME_ENV) or "worker"
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._requests: dict[int, _Request] = {}
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        case = next((value.decode("latin-1") for name, value in scope["headers"] if name == CASE_HEADER), None)
        if case is None or self._path is None:
            await self._greet(scope, receive, send)
            return
        await self._connect()
        self._count += 1
        request = _Request(self, self._count, scope, receive, send)
        self._requests[request.number] = request
        try:
            self.tell("request", request.number, case, seen_scope(scope))
            async with asyncio.timeout(GATE_SECONDS):
                script = await request.script
            if script is None:
                await self._greet(scope, receive, send)
            else:
                await request.perform(script)
        except BaseException as error:
            self.tell("record", request.number, Record("end", f"{type(error).__name__}", time.monotonic()))
            raise
        else:
            self.tell("record", request.number, Record("end", "returned", time.monotonic()))
        finally:
            del self._requests[request.number]

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        state = scope.get("state")
        if state is not None:
            state["made_by"] = "lifespan"
        await self._connect()
        self.tell("lifespan", 0, "startup")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.tell("lifespan", 0, "shutdown")
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _connect(self) -> None:
        if self._path is None:
            return
        async with self._opening:
            if self._writer is not None:
                return
            reader, self._writer = await asyncio.open_unix_connection(self._path)
            self.tell("hello", 0, os.getpid(), self.name)
            self._reading = asyncio.create_task(self._read(reader), name="recorder: stage")

    async def aclose(self) -> None:
        """Close the connection to the stage; every record told so far has been written."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                what, number, value = await _read_message(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if (request := self._requests.get(number)) is not None:
                request.told(what, value)

    def tell(self, what: str, number: int, *values: object) -> None:
        """Tell the stage, without waiting: records must not change the timing of what they record."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_message((what, number, *values)))

    async def _greet(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = f"{self.name} {os.getpid()}\n".encode()
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": text.decode()})
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


class _Request:
    """One request at the app: its script, its gates, and what it tells the stage."""

    def __init__(self, recorder: Recorder, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        self.recorder = recorder
        self.number = number
        self.scope = scope
        self.receive = receive
        self.send = send
        self.script: asyncio.Future[Script | None] = asyncio.get_running_loop().create_future()
        self.gates: dict[str, asyncio.Event] = {}
        self.watcher: asyncio.Task[None] | None = None

    def told(self, what: str, value: Any) -> None:
        if what == "script" and not self.script.done():
            self.script.set_result(value)
        elif what == "open":
            self._gate(value).set()

    def _gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def record(self, kind: str, value: object) -> None:
        self.recorder.tell("record", self.number, Record(kind, value, time.monotonic()))

    async def perform(self, script: Script) -> None:
        try:
            for step in script:
                await self._step(*step)
        finally:
            if self.watcher is not None:
                self.watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self.watcher

    async def _step(self, what: str, *values: Any) -> None:
        match what:
            case "receive":
                for _ in range(values[0]):
                    await self._receive()
            case "read_body":
                while (event := await self._receive()).get("more_body"):
                    pass
            case "read_until":
                while (await self._receive())["type"] != values[0]:
                    pass
            case "digest_body":
                await self._digest(values[0])
            case "digest_messages":
                for _ in range(values[0]):
                    event = await self.receive()
                    data = event.get("bytes") or (event.get("text") or "").encode()
                    self.record("message", (event["type"], len(data), hashlib.sha256(data).hexdigest()))
            case "send":
                await self._send(copy.deepcopy(values[0]))
            case "send_pattern":
                await self._send_pattern(*values)
            case "wait":
                async with asyncio.timeout(GATE_SECONDS):
                    await self._gate(values[0]).wait()
            case "pause":
                await asyncio.sleep(values[0])
            case "note":
                self.record("note", values[0])
            case "watch":
                self.watcher = asyncio.create_task(self._watch())
                await asyncio.sleep(0)  # let it ask for the first event, as the task of a framework would have
            case "fail":
                raise ScriptError(values[0])
            case "see_scope":
                self.record("scope", seen_scope(self.scope))
            case "die":
                os._exit(DEATH)
            case _:
                raise ValueError(f"no such step: {what!r}")

    async def _receive(self) -> Message:
        event = await self.receive()
        self.record("receive", copy.deepcopy(event))
        return event

    async def _watch(self) -> None:
        while not (await self._receive())["type"].endswith("disconnect"):
            pass

    async def _send(self, message: Message) -> None:
        try:
            await self.send(message)
        except Exception as error:
            # The class is the server's own; that it is an OSError is what the ASGI specification promises.
            self.record("send failed", "OSError" if isinstance(error, OSError) else type(error).__name__)
            if not isinstance(error, OSError):
                raise

    async def _digest(self, bytes_per_second: float | None) -> None:
        digest, length, began = hashlib.sha256(), 0, time.monotonic()
        while True:
            event = await self.receive()
            if event["type"] != "http.request":
                self.record("receive", event)
                return
            digest.update(event["body"])
            length += len(event["body"])
            if not event["more_body"]:
                self.record("body", (length, digest.hexdigest()))
                return
            if bytes_per_second is not None:
                # Not a test that waits: a slow reader is what the case is about.
                await asyncio.sleep(max(0.0, began + length / bytes_per_second - time.monotonic()))

    async def _send_pattern(self, total: int, chunk: int) -> None:
        for offset in range(0, total, chunk):
            count = min(chunk, total - offset)
            data = pattern(offset, count)
            await self._send({"type": "http.response.body", "body": data, "more_body": offset + count < total})


_VALUES: Final = frozenset(
    [
        "type",
        "asgi",
        "http_version",
        "server",
        "client",
        "scheme",
        "root_path",
        "method",
        "path",
        "raw_path",
        "query_string",
        "headers",
        "subprotocols",
        "extensions",
    ]
)


def seen_scope(scope: Scope) -> dict[str, object]:
    """A copy of the scope as a test may compare it: the values of the ASGI specification's keys, the text values of
    `state`, and only the type of anything else, which is a live object of this process.

    Keys of homing's own (`homing.…`) are left out.
    """
    seen: dict[str, object] = {}
    for key, value in scope.items():
        if key in _VALUES:
            seen[key] = copy.deepcopy(value)
        elif key == "state":
            seen[key] = {name: text for name, text in value.items() if not str(name).startswith("homing")}
        elif not key.startswith("homing."):
            seen[key] = type(value).__qualname__
    return seen


# --- the test's half ---


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that happened at the app: `kind` is receive, send failed, body, note, scope or end; `at` is monotonic."""

    kind: str
    value: Any
    at: float


@dataclass
class Performance:
    """One request at the app, as the test sees it.

    Attributes:
        worker: The name of the worker whose app handles it, and `pid` its process.
        scope: The scope when the app was called.
        records: What happened since, in order; grows while the request runs.
    """

    worker: str
    pid: int
    case: str
    scope: dict[str, Any]
    began_at: float
    records: list[Record] = field(default_factory=list)
    _open: Callable[[str], None] = lambda gate: None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, gate: str) -> None:
        """Let the script go on that waits (or will wait) for this gate."""
        self._open(gate)

    @property
    def events(self) -> list[Any]:
        """The events that the app received so far."""
        return [record.value for record in self.records if record.kind == "receive"]

    @property
    def ended(self) -> bool:
        return bool(self.records) and self.records[-1].kind == "end"

    def find(self, kind: str, value: object = None) -> Record | None:
        for record in self.records:
            if record.kind == kind and value in (None, record.value):
                return record
        return None

    async def until(
        self, enough: Callable[[Performance], bool], what: str = "it", *, timeout_seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait until this is true of the records.

        Raises:
            AssertionError: it did not become true in time; shows the records.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while not enough(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            shown = "\n  ".join(repr(record)[:300] for record in self.records)
            raise AssertionError(
                f"{self.worker}'s app, case {self.case}: waited {timeout_seconds} s for {what}; it saw\n  {shown}"
            ) from None

    async def received(self, count: int, *, timeout_seconds: float = WAIT_SECONDS) -> list[Any]:
        await self.until(lambda one: len(one.events) >= count, f"{count} events", timeout_seconds=timeout_seconds)
        return self.events

    async def noted(self, text: str, *, timeout_seconds: float = WAIT_SECONDS) -> Record:
        await self.until(
            lambda one: one.find("note", text) is not None, f"note {text!r}", timeout_seconds=timeout_seconds
        )
        found = self.find("note", text)
        assert found is not None
        return found

    async def disconnected(self, *, timeout_seconds: float = WAIT_SECONDS) -> Record:
        """The record of the disconnect event, once the app has it."""

        def of(one: Performance) -> Record | None:
            for record in one.records:
                if record.kind == "receive" and record.value["type"].endswith(".disconnect"):
                    return record
            return None

        await self.until(lambda one: of(one) is not None, "a disconnect event", timeout_seconds=timeout_seconds)
        found = of(self)
        assert found is not None
        return found

    async def done(self, *, timeout_seconds: float = WAIT_SECONDS) -> list[Record]:
        """All records, once the app has returned or raised."""
        await self.until(lambda one: one.ended, "its end", timeout_seconds=timeout_seconds)
        return self.records


class Stage:
    """Scripts out, records in. One per test process; any number of workers connect. Made by `open_stage`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._scripts: dict[str, Script] = {}
        self._performances: dict[str, list[Performance]] = {}
        self._arrived = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self.lifespans: list[tuple[str, int, str]] = []

    def script(self, case: str, steps: Script) -> None:
        """What the app does for each request of this case, from now on."""
        self._scripts[case] = list(steps)

    def performances(self, case: str) -> list[Performance]:
        """Every request of this case that has reached an app so far; more than one means that it ran twice."""
        return self._performances.get(case, [])

    async def performance(self, case: str, nth: int = 0, *, timeout_seconds: float = WAIT_SECONDS) -> Performance:
        """The nth request of this case, once it has reached an app."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while len(self.performances(case)) <= nth:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"no app saw request {nth} of case {case!r} within {timeout_seconds} s") from None
        return self._performances[case][nth]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        running: dict[int, Performance] = {}
        pid, worker = 0, ""
        try:
            while True:
                what, number, *values = await _read_message(reader)
                match what:
                    case "hello":
                        pid, worker = values
                    case "lifespan":
                        self.lifespans.append((worker, pid, values[0]))
                    case "request":
                        case, scope = values
                        performance = Performance(worker, pid, case, scope, time.monotonic())
                        performance._open = partial(self._open, writer, number)
                        running[number] = performance
                        self._performances.setdefault(case, []).append(performance)
                        self._arrived.set()
                        writer.write(_message(("script", number, self._scripts.get(case))))
                    case "record":
                        (record,) = values
                        running[number].records.append(record)
                        running[number]._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the worker is gone, as some cases want it
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()
            self._connections.discard(task)

    def _open(self, writer: asyncio.StreamWriter, number: int, gate: str) -> None:
        writer.write(_message(("open", number, gate)))

    async def aclose(self) -> None:
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


@asynccontextmanager
async def open_stage(path: str) -> AsyncIterator[Stage]:
    """A stage that listens on this socket path; give workers the path as `HOMING_TEST_STAGE`."""
    stage = Stage(path)
    server = await asyncio.start_unix_server(stage._serve, path)
    try:
        yield stage
    finally:
        server.close()
        await stage.aclose()
        await server.wait_closed()


# --- the socket between them ---


def _message(value: object) -> bytes:
    data = pickle.dumps(value)
    return struct.pack("!I", len(data)) + data


async def _read_message(reader: asyncio.StreamReader) -> Any:
    (length,) = struct.unpack("!I", await reader.readexactly(4))
    return pickle.loads(await reader.readexactly(length))


def recorder() -> ASGIApp:
    """An app factory for a server's command line: `tests.support.recorder:recorder --factory`."""
    return Recorder()


app = Recorder()
