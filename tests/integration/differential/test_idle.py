"""tests/scenarios.md 34: a pooled connection between two workers is closed at the wrong moment. No client notices; nothing runs twice.

Played at the hop itself, `Forwarder` and `serve_private_socket` over a real Unix socket, with idle times of milliseconds:
each request waits for about as long as idle connections live, so many of them meet a connection that is just being closed,
by either end. 400 tries in the default run, 10,000 in the long one. The waits are the case: an idle connection is one on
which nothing happens for a while.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from homing.errors import OwnerBusyError, OwnerRefusedError, OwnerUnreachableError
from homing.forwarding.forwarder import Forwarder
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.receiver import Receiver
from homing.forwarding.replay import replayable
from homing.rundir import new_worker_id, worker_socket_path
from homing.types import Message, Reason, Receive, Scope, Send, WorkerId

IDLE_SECONDS = 0.008


class Counting:
    """An owner's app: counts how often each request ran."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["homing.hop"].mine()
        self.ran[scope["path"]] += 1
        data = b""
        while True:
            event = await receive()
            data += event.get("body", b"")
            if not event.get("more_body"):
                break
        headers = [(b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})


@asynccontextmanager
async def hop(
    forwarder_idle: float, receiver_idle: float
) -> AsyncIterator[tuple[Forwarder, WorkerId, Counting, Receiver]]:
    with tempfile.TemporaryDirectory(prefix="homing-idle-") as directory:
        app, owner = Counting(), new_worker_id()
        path = worker_socket_path(directory, owner)
        async with (
            serve_private_socket(app, path, idle_seconds=receiver_idle) as receiver,
            Forwarder(directory, idle_seconds=forwarder_idle) as forwarder,
        ):
            yield forwarder, owner, app, receiver


async def post(forwarder: Forwarder, owner: WorkerId, path: str, body: bytes) -> bytes:
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-length", b"%d" % len(body))],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    events: list[Message] = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    got: list[Message] = []

    async def receive() -> Message:
        return events.pop(0)

    async def send(message: Message) -> None:
        got.append(message)

    assert await forwarder.forward(owner, Reason.OWNED, (), scope, replayable(receive), send)
    assert got[0]["status"] == 200
    return b"".join(message.get("body", b"") for message in got[1:])


async def many_tries(tries: int, *, forwarder_idle: float, receiver_idle: float, wait_for: float) -> tuple[int, int]:
    """POST again and again after a pause of `wait_for`, give or take a fifth; returns how often a connection was opened,
    and how often a request had to be sent on a second one."""
    source = random.Random(34)
    async with hop(forwarder_idle, receiver_idle) as (forwarder, owner, app, _):

        async def lane(number: int) -> None:
            for n in range(tries // 8):
                path = f"/{number}/{n}"
                assert await post(forwarder, owner, path, path.encode()) == path.encode()
                await asyncio.sleep(wait_for * source.uniform(0.8, 1.2))

        await asyncio.gather(*(lane(number) for number in range(8)))
        assert len(app.ran) == tries
        assert set(app.ran.values()) == {1}, app.ran.most_common(3)
        return forwarder.counters.opened, forwarder.counters.retried


@pytest.mark.parametrize(
    ("forwarder_idle", "receiver_idle"),
    [(IDLE_SECONDS, 2 * IDLE_SECONDS), (100 * IDLE_SECONDS, IDLE_SECONDS), (IDLE_SECONDS, IDLE_SECONDS)],
    ids=["forwarder-lets-go", "receiver-lets-go", "both-at-once"],
)
def test_scenario_34_idle_connection_closed_at_the_wrong_moment(forwarder_idle: float, receiver_idle: float) -> None:
    """In ordinary running the forwarder lets go first. The other two are configured wrong on purpose."""
    opened, _ = asyncio.run(
        many_tries(400, forwarder_idle=forwarder_idle, receiver_idle=receiver_idle, wait_for=IDLE_SECONDS)
    )
    assert opened > 8, "no idle connection was ever closed: this has shown nothing"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("receiver_idle", [2 * IDLE_SECONDS, IDLE_SECONDS])
def test_scenario_34_ten_thousand_tries(receiver_idle: float) -> None:
    asyncio.run(many_tries(10_000, forwarder_idle=IDLE_SECONDS, receiver_idle=receiver_idle, wait_for=IDLE_SECONDS))


class ClosesAfterAccept:
    """A scripted owner: accepts, and closes at once, with or without having read."""

    def __init__(self, path: str, *, reads: bool) -> None:
        self.path = path
        self.reads = reads
        self.accepted = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.reads:
            await reader.read(65536)
        writer.transport.abort()


@pytest.mark.parametrize("reads", [False, True])
def test_scenario_34_an_owner_that_closes_right_after_accept_gets_each_request_once(reads: bool) -> None:
    """What was read may have run: the outcome is unknown, and it is never sent again. What was provably not read is as if
    refused. Which of the two a close before reading is depends on who was first; either way nothing is doubled."""

    async def play() -> None:
        with tempfile.TemporaryDirectory(prefix="homing-idle-") as directory:
            owner = new_worker_id()
            scripted = ClosesAfterAccept(worker_socket_path(directory, owner), reads=reads)
            async with await asyncio.start_unix_server(scripted, scripted.path), Forwarder(directory) as forwarder:
                for n in range(50):
                    errors: Any = (
                        OwnerUnreachableError if reads else (OwnerUnreachableError, OwnerRefusedError, OwnerBusyError)
                    )
                    with pytest.raises(errors):
                        await post(forwarder, owner, f"/{n}", b"x" * 1000)
                    assert scripted.accepted <= n + 1
                assert forwarder.counters.retried == 0

    asyncio.run(play())
