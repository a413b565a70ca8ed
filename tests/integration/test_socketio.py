"""Socket.IO on several workers: a python-socketio server and its own client, over polling, WebSockets and both."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest
import socketio
from tests.support.fair_port import fair_port
from tests.support.plain_http import Reply, request
from tests.support.served import Served, served
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

CLIENTS = 50
EVENTS = 4
WORKERS = 4
APP = "examples.socketio_chat:app"
OPTIONS = ("--preset", "engineio", "--session", "cookie:visitor", "--no-access-log", "--timeout-graceful-shutdown", "2")
"""A stop does not wait for polls whose clients have left: the server ends them after 45 s, with one worker too."""

TRANSPORTS = {
    "polling-then-websocket": ["polling", "websocket"],
    "websocket-only": ["websocket"],
    "polling-only": ["polling"],
}


@pytest.fixture(scope="module", params=[(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Scattered, every request first lands on a wrong worker."""
    with served(APP, *OPTIONS, *request.param, workers=WORKERS) as server:
        yield server


class Chat:
    """One client: what it sent, what came back, and on which worker."""

    def __init__(
        self, server: Served, transports: list[str], *, events: int = EVENTS, cookie: str | None = None
    ) -> None:
        self.server = server
        self.transports = transports
        self.events = events
        self.headers = {} if cookie is None else {"cookie": cookie}
        self.sid = ""
        self.pids: set[int] = set()
        self.heard: list[dict[str, object]] = []
        self.transport = ""

    async def run(self) -> "Chat":
        async with new_connections() as http:
            client = socketio.AsyncClient(http_session=http, reconnection=False, request_timeout=30)
            all_heard = asyncio.Event()

            @client.on("heard")
            async def heard(event: dict[str, object]) -> None:
                self.heard.append(event)
                if len(self.heard) == self.events:
                    all_heard.set()

            async with asyncio.timeout(90):
                await client.connect(self.server.url, headers=self.headers, transports=self.transports, wait_timeout=30)
                self.sid = client.get_sid()
                for number in range(self.events):
                    answer = await client.call("say", f"word {number}", timeout=30)
                    self.pids.add(answer["pid"])
                    assert answer["said"] == [f"word {said}" for said in range(number + 1)]
                await all_heard.wait()
                self.transport = client.transport()
                leaving = await begin_to_leave(client)
                # It reached the worker of the connection, which knew how much had been said.
                left = f"connection {self.sid} left after {self.events} events"
                await asyncio.to_thread(self.server.wait_for, left)
        # The poll that was open has ended with its connection: this client would have waited 30 s for it.
        await leaving
        return self


async def begin_to_leave(client: socketio.AsyncClient) -> asyncio.Task[None]:
    # This client says good-bye only if no POST of its is under way, and an answer may be quicker than its POST's reply.
    await client.eio.queue.join()
    return asyncio.create_task(client.disconnect())


def new_connections() -> aiohttp.ClientSession:
    """A connection for every request, so that any worker may get any poll."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def chats(server: Served, transports: list[str], clients: int = CLIENTS) -> list[Chat]:
    return await asyncio.gather(*(Chat(server, transports).run() for _ in range(clients)))


@pytest.mark.parametrize("transports", TRANSPORTS.values(), ids=TRANSPORTS)
def test_fifty_clients_say_hear_and_leave_each_at_one_worker(server: Served, transports: list[str]) -> None:
    done = asyncio.run(chats(server, transports))
    for chat in done:
        assert len(chat.pids) == 1, "one connection was at several workers"
        assert chat.transport == transports[-1]
        assert chat.heard == [{"text": f"word {number}", "number": number + 1} for number in range(EVENTS)]
    seen = set.union(*(chat.pids for chat in done))
    while len(seen) < 2:  # which worker takes a connection is the kernel's choice
        seen |= asyncio.run(chats(server, transports, 1))[0].pids


def test_a_visitor_s_basket_and_connection_share_a_worker(server: Served) -> None:
    async def visit() -> set[int]:
        first = await request(f"{server.url}/")
        chat = await Chat(server, ["polling", "websocket"], events=2, cookie=first.cookie).run()
        body = json.dumps({"item": "tea"}).encode()
        headers = {"cookie": first.cookie, "content-type": "application/json"}
        basket = await request(f"{server.url}/basket", "POST", body=body, headers=headers)
        assert basket.json()["items"] == ["tea"]
        return {first.json()["pid"], basket.json()["pid"], *chat.pids}

    async def visits() -> list[set[int]]:
        return await asyncio.gather(*(visit() for _ in range(12)))

    assert [len(pids) for pids in asyncio.run(visits())] == [1] * 12


def test_a_server_mounted_in_another_app_is_found_wherever_it_is() -> None:
    async def talk(url: str) -> None:
        async with new_connections() as http, asyncio.timeout(60):
            client = socketio.AsyncClient(http_session=http, reconnection=False, request_timeout=30)
            await client.connect(url, socketio_path="live/socket.io", wait_timeout=30)
            answers = [await client.call("say", timeout=30) for _ in range(4)]
            await client.disconnect()
        assert [answer["said"] for answer in answers] == [1, 2, 3, 4]
        assert len({answer["pid"] for answer in answers}) == 1

    async def talks(url: str) -> None:
        assert (await request(f"{url}/")).status == 200
        await asyncio.gather(*(talk(url) for _ in range(12)))

    options = ("--preset", "engineio", "--scatter", "--no-access-log", "--timeout-graceful-shutdown", "2")
    with served("tests.support.mounted_socketio:app", *options) as server:
        asyncio.run(talks(server.url))


class Polling:
    """A connection by hand, each request on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/socket.io/?EIO=4&transport=polling"
        self.sid = ""

    async def open(self, cookie: str = "") -> None:
        reply = await request(self.url, headers={"cookie": cookie} if cookie else None)
        assert reply.status == 200, reply
        self.sid = json.loads(reply.body[1:])["sid"]
        assert (await self.send("40")).body == b"OK"
        assert re.fullmatch(rb'40\{"sid":"[^"]+"\}', (await self.poll()).body)

    async def send(self, packets: str, cookie: str = "") -> Reply:
        headers = {"content-type": "text/plain;charset=UTF-8"} | ({"cookie": cookie} if cookie else {})
        return await request(f"{self.url}&sid={self.sid}", "POST", body=packets.encode(), headers=headers)

    async def poll(self, cookie: str = "") -> Reply:
        return await request(f"{self.url}&sid={self.sid}", headers={"cookie": cookie} if cookie else None)

    async def say(self, text: str, cookie: str = "") -> dict[str, Any]:
        """The answer to one event."""
        sent = await self.send(f"421{json.dumps(['say', text])}", cookie)
        assert (sent.status, sent.body) == (200, b"OK")
        while True:
            for packet in (await self.poll(cookie)).body.decode().split("\x1e"):
                if packet.startswith("431"):
                    answer: dict[str, Any] = json.loads(packet[3:])[0]
                    return answer


def test_a_connection_stays_where_it_is_when_the_visitor_s_cookie_changes(server: Served) -> None:
    async def visit() -> None:
        connection = Polling(server.url)
        await connection.open(cookie=(await request(f"{server.url}/")).cookie)
        pids = set()
        for number in range(4):
            other = (await request(f"{server.url}/")).cookie
            answer = await connection.say(f"{number}", cookie=other)
            assert len(answer["said"]) == number + 1
            pids.add(answer["pid"])
        assert len(pids) == 1

    async def visits() -> None:
        await asyncio.gather(*(visit() for _ in range(8)))

    asyncio.run(visits())


def test_a_sid_that_nobody_gave_out_is_answered_by_the_app(server: Served) -> None:
    reply = asyncio.run(request(f"{server.url}/socket.io/?EIO=4&transport=polling&sid=never"))
    assert (reply.status, reply.body, reply.header("homing-error")) == (400, b'"Invalid session never"', None)


def test_a_killed_worker_s_connections_are_gone_and_its_clients_connect_again() -> None:
    with served(APP, *OPTIONS, workers=WORKERS) as server:
        asyncio.run(_lose_a_worker(server))


async def _lose_a_worker(server: Served) -> None:
    lost, again = asyncio.Event(), asyncio.Event()
    async with new_connections() as http, asyncio.timeout(60):
        client = socketio.AsyncClient(http_session=http, reconnection_delay=0.05, reconnection_delay_max=0.2)
        await client.connect(server.url, transports=["polling"], wait_timeout=30)
        pid = (await client.call("say", "one", timeout=30))["pid"]
        by_hand = Polling(server.url)
        await by_hand.open()
        while (await by_hand.say("here"))["pid"] != pid:
            await by_hand.open()
        client.on("disconnect", lambda *_: lost.set())
        client.on("connect", again.set)
        os.kill(pid, signal.SIGKILL)
        await lost.wait()
        await again.wait()
        answer = await client.call("say", "two", timeout=30)
        assert answer["said"] == ["two"]
        assert answer["pid"] != pid
        leaving = await begin_to_leave(client)
        await asyncio.to_thread(server.wait_for, f"connection {client.get_sid()} left after 1 events")
    await leaving
    gone = await by_hand.poll()
    assert (gone.status, gone.json()) == (400, {"code": 1, "message": "Session ID unknown"})
    assert gone.header("homing-error") == "session_gone"
    sent = await by_hand.send('421["say","x"]')
    assert (sent.status, sent.json()["code"]) == (400, 1)
    upgrade = f"{server.url.replace('http', 'ws')}/socket.io/?EIO=4&transport=websocket&sid={by_hand.sid}"
    with pytest.raises(InvalidStatus) as denied:
        await connect(upgrade)
    assert denied.value.response.status_code == 400
    assert json.loads(denied.value.response.body)["code"] == 1


@pytest.mark.long
def test_polling_is_lost_without_homing() -> None:
    """Shows that the tests above can fail: two processes that get connections in turn."""
    with ExitStack() as stack:
        options = ("--no-access-log", "--timeout-graceful-shutdown", "2")
        each = [stack.enter_context(served(APP, *options, workers=1, plain=True)) for _ in range(2)]
        url = stack.enter_context(fair_port([int(server.url.rpartition(":")[2]) for server in each]))
        fates = asyncio.run(_fates(url))
    assert [fate.status for fate in fates].count(400) > CLIENTS // 2, fates


async def _fates(url: str) -> list[Reply]:
    """What became of the first request after each handshake."""

    async def begin() -> Reply:
        connection = Polling(url)
        connection.sid = json.loads((await request(connection.url)).body[1:])["sid"]
        return await connection.send("40")

    return [await begin() for _ in range(CLIENTS)]
