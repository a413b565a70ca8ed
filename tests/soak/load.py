"""The clients of a soak, and what each of their calls came to.

A *player* has one session at a time: starts it, uses it in every way there is, closes it or walks away. A *crowd* of
clients shares a few sessions: several start one, step it and close it at once. What each does comes from a generator of
its own, seeded; the order in which the server meets them is the machine's.

Every wait is bounded by `ANSWER_SECONDS`: a call that takes longer is a violation.

Not here: judging (`oracle`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

from tests.soak.app import FILLER
from tests.soak.oracle import Call, Outcome
from tests.support.raw import (
    CLOSE,
    TEXT,
    Address,
    CutError,
    Reply,
    WebSocketWire,
    Wire,
    WireError,
    connect,
    handshake,
    request,
)

ANSWER_SECONDS: Final = 30.0
LONGEST_SLOW_SECONDS: Final = 0.6
STREAMS: Final = frozenset({"events", "socket", "message", "download"})


class Load:
    """What the clients share: where the server is, what they called so far, and what is under way."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.calls: list[Call] = []
        self.under_way: set[Call] = set()
        self.stopping = asyncio.Event()
        self.peak_under_way = 0
        self.worker_ids: dict[int, str] = {}
        """The ID of each worker that has answered, by pid."""
        self.faults: Counter[str] = Counter()
        """What the clients did that no client should, by kind."""

    @asynccontextmanager
    async def call(
        self, what: str, session: str, *, alone: bool = True, acts: bool = True, owner: int | None = None
    ) -> AsyncIterator[Call]:
        """One call, recorded from here to the end of the block."""
        call = Call(uuid.uuid4().hex, session, what, time.monotonic(), alone=alone, acts=acts, owner=owner)
        self.calls.append(call)
        self.under_way.add(call)
        self.peak_under_way = max(self.peak_under_way, len(self.under_way))
        try:
            yield call
        except TimeoutError as error:
            call.outcome, call.why = Outcome.WRONG, f"no answer: {error}"
        except OSError as error:
            # Nobody listens for a moment, or the connection was reset while something was sent.
            call.outcome, call.why = Outcome.UNKNOWN, repr(error)
        except CutError as error:
            call.outcome, call.why = Outcome.UNKNOWN, f"cut ({error.end})"
        except WireError as error:
            call.outcome, call.why = Outcome.WRONG, str(error)[:200]
        finally:
            self.under_way.discard(call)
            call.done = time.monotonic()

    def hit(self, pid: int, *, streams: bool = False) -> int:
        """How many requests are under way for sessions that this worker holds; of them, how many are streams."""
        return sum(call.owner == pid and (call.what in STREAMS or not streams) for call in self.under_way)

    def busiest(self, pids: list[int]) -> list[int]:
        """These workers, the one with the most requests under way first."""
        return sorted(pids, key=lambda pid: -self.hit(pid))


def read_answer(call: Call, answer: Any) -> None:
    """What the app's answer says, into the call."""
    call.reply_token = answer["token"]
    call.pid = answer["pid"]
    call.worker = answer["worker"]
    call.incarnation = answer.get("incarnation")
    call.sequence = answer.get("sequence", 0)
    call.chain = answer.get("chain")


def read_reply(call: Call, reply: Reply, *, body: bytes | None = None) -> None:
    """What one reply means for its call."""
    if not reply.head.endswith(b"\r\n\r\n"):
        call.outcome, call.why = Outcome.UNKNOWN, f"no reply ({reply.end})"
        return
    codes = reply.all(b"homing-error")
    if codes:
        call.status, call.code = reply.status, codes[0].decode()
        call.outcome = Outcome.UNKNOWN if reply.status in (502, 504) else Outcome.REFUSED
        if call.code == "session_not_recorded":
            call.outcome = Outcome.UNRECORDED
        if not reply.complete:
            call.outcome, call.why = Outcome.UNKNOWN, f"a cut refusal ({reply.end})"
        return
    if not reply.complete:
        call.outcome, call.why = Outcome.UNKNOWN, f"a cut reply ({reply.end})"
        return
    if reply.status == 500 and call.what == "raises":
        call.outcome, call.status = Outcome.RAISED, 500
        return
    if reply.status not in (200, 404):
        call.status, call.why = reply.status, repr(reply.body[:200])
        return
    answer = json.loads(reply.body)
    read_answer(call, answer)
    call.outcome = Outcome.ANSWERED if reply.status == 200 else Outcome.CLOSED
    call.status = reply.status if reply.status == 200 else None
    if (
        reply.status == 200
        and body is not None
        and answer.get("digest") not in (None, hashlib.sha256(body).hexdigest())
    ):
        call.outcome, call.why = Outcome.WRONG, "the body that arrived is not the one that was sent"


def message(call: Call, method: str, target: str, body: bytes | None = None) -> bytes:
    headers = [("x-token", call.token)]
    if call.session:
        headers.append(("x-session", call.session))
    return request(method, target, headers, body)


class Client:
    """One client: perhaps a connection that is kept, and the calls it makes. `aclose` when done."""

    def __init__(self, load: Load, random: Random) -> None:
        self.load = load
        self.random = random
        self.owner: int | None = None
        self._kept: tuple[Wire, contextlib.AsyncExitStack] | None = None

    async def aclose(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept[1].aclose()

    @asynccontextmanager
    async def _wire(self) -> AsyncIterator[Wire]:
        """The kept connection, or one of its own; it is kept afterwards if it was, and can be."""
        if self.random.random() < 0.5:
            async with connect(self.load.address) as wire:
                yield wire
            return
        kept, self._kept = self._kept, None
        if kept is not None and kept[0].end != "open":
            await kept[1].aclose()
            kept = None
        if kept is None:
            stack = contextlib.AsyncExitStack()
            kept = await stack.enter_async_context(connect(self.load.address)), stack
        try:
            yield kept[0]
        except BaseException:
            await kept[1].aclose()
            raise
        if kept[0].end == "open" and self._kept is None:
            self._kept = kept
        else:
            await kept[1].aclose()

    async def post(
        self,
        what: str,
        session: str,
        *,
        query: str = "",
        body: bytes = b"",
        alone: bool = True,
        leave: bool = False,
    ) -> Call:
        """A POST and its reply. `leave`: the client goes away in the middle."""
        acts = what != "close"
        async with self.load.call(what, session, alone=alone, acts=acts, owner=self.owner) as call:
            sent = message(call, "POST", "/step?raises=1" if what == "raises" else f"/{what}{query}", body)
            if leave:
                await self._leave(call, sent)
                return call
            async with self._wire() as wire:
                await wire.send(sent, timeout_seconds=ANSWER_SECONDS)
                reply = await wire.reply("POST", timeout_seconds=ANSWER_SECONDS)
                if not reply.complete or not reply.keeps_alive:
                    wire.close()
            read_reply(call, reply, body=body)
            if what == "new" and call.outcome is Outcome.ANSWERED:
                call.session = reply.one(b"x-session").decode()
        self._note(call)
        return call

    async def over(self, wire: Wire, what: str, session: str) -> Call:
        """A POST over this very connection."""
        async with self.load.call(what, session, owner=self.owner) as call:
            await wire.send(message(call, "POST", f"/{what}", b""), timeout_seconds=ANSWER_SECONDS)
            read_reply(call, await wire.reply("POST", timeout_seconds=ANSWER_SECONDS))
        self._note(call)
        return call

    async def _leave(self, call: Call, sent: bytes) -> None:
        """Go away in the middle of the request, or while it is served."""
        call.outcome = Outcome.LEFT
        async with connect(self.load.address) as wire:
            inside = self.random.random() < 0.3
            self.load.faults["left inside the request" if inside else "left while it was served"] += 1
            if inside:
                await wire.send(sent[: self.random.randrange(1, len(sent))], timeout_seconds=ANSWER_SECONDS)
            else:
                await wire.send(sent, timeout_seconds=ANSWER_SECONDS)
            await asyncio.sleep(self.random.uniform(0.0, 0.2))
            if self.random.random() < 0.5:
                wire.abort()
            else:
                wire.close()

    async def events(
        self, session: str, *, seconds: float | None = None, alone: bool = True, leave: bool = False
    ) -> Call:
        """An event stream, of so many seconds or a short one, read to its end or left after some events."""
        count = self.random.randint(2, 8)
        gap = self.random.uniform(0.0, 0.08) if seconds is None else seconds / count
        async with self.load.call("events", session, alone=alone, owner=self.owner) as call:
            async with connect(self.load.address) as wire:
                await wire.send(message(call, "GET", f"/events?count={count}&gap={gap:.4f}"))
                if leave:
                    call.outcome = Outcome.LEFT
                    self.load.faults["left inside a stream"] += 1
                    with contextlib.suppress(WireError):
                        await wire.until(b"\n\n", timeout_seconds=self.random.uniform(0.05, 0.5))
                    wire.abort()
                    return call
                reply = await wire.reply(timeout_seconds=ANSWER_SECONDS)
            if not reply.complete or b"homing-error" in reply.head or reply.status != 200:
                read_reply(call, reply)
            else:
                self._read_events(call, reply.body, count)
        self._note(call)
        return call

    @staticmethod
    def _read_events(call: Call, body: bytes, count: int) -> None:
        events = [json.loads(text.removeprefix(b"data: ")) for text in body.split(b"\n\n")[:-1]]
        if [event["event"] for event in events] != list(range(count)):
            call.outcome, call.why = Outcome.WRONG, f"a cut stream looked complete: {len(events)} of {count} events"
            return
        if any(event["token"] != call.token for event in events):
            call.outcome, call.why = Outcome.WRONG, "a stream with another request's events"
            return
        read_answer(call, events[-1])
        call.outcome, call.status = Outcome.ANSWERED, 200

    async def talk(self, session: str, *, alone: bool = True, leave: bool = False) -> None:
        """A WebSocket: some steps as messages, then a close, or nothing."""
        async with connect(self.load.address) as wire:
            socket = WebSocketWire(wire)
            async with self.load.call("socket", session, alone=alone, acts=False, owner=self.owner) as call:
                await wire.send(handshake("/socket", [("x-session", session), ("x-token", call.token)]))
                reply = await wire.reply(timeout_seconds=ANSWER_SECONDS)
                if reply.head.endswith(b"\r\n\r\n") and reply.status == 101:
                    call.outcome, call.status, call.reply_token = Outcome.ANSWERED, 101, call.token
                elif b" 500 " in reply.head and b"homing-error" not in reply.head:
                    # What uvicorn answers a handshake that it has not finished when its worker is told to stop.
                    call.outcome, call.why = Outcome.UNKNOWN, "500 for a handshake"
                else:
                    read_reply(call, reply)
            if call.outcome is not Outcome.ANSWERED:
                return
            for _ in range(self.random.randint(1, 5)):
                async with self.load.call("message", session, alone=alone, owner=self.owner) as step:
                    await socket.send_text(step.token)
                    await self._hear(socket, step)
                self._note(step)
                if step.outcome is not Outcome.ANSWERED:
                    return
            if leave:
                self.load.faults["left inside a stream"] += 1
                wire.abort()
            else:
                await socket.send(_CLOSE_FRAME)
                with contextlib.suppress(WireError):
                    await socket.to_end()

    @staticmethod
    async def _hear(socket: WebSocketWire, step: Call) -> None:
        frame = await socket.frame(timeout_seconds=ANSWER_SECONDS)
        if frame.opcode == TEXT:
            answer = json.loads(frame.data)
            read_answer(step, answer)
            step.outcome = Outcome.ANSWERED if "incarnation" in answer else Outcome.CLOSED
        elif frame.opcode == CLOSE and frame.close_code in (1001, 1011, 1012):
            step.outcome, step.why = Outcome.UNKNOWN, f"closed {frame.close_code}"
        else:
            step.why = f"frame {frame.opcode}, close code {frame.close_code}"

    async def trickle(self, session: str) -> Call:
        """A step whose body comes a few bytes at a time."""
        body = self.random.randbytes(self.random.randint(2_000, 20_000))
        self.load.faults["wrote slowly"] += 1
        async with self.load.call("step", session, owner=self.owner) as call:
            async with connect(self.load.address) as wire:
                sent = message(call, "POST", "/step", body)
                part = len(sent) // self.random.randint(4, 8) + 1
                for at in range(0, len(sent), part):
                    await wire.send(sent[at : at + part], timeout_seconds=ANSWER_SECONDS)
                    await asyncio.sleep(self.random.uniform(0.05, 0.15))
                reply = await wire.reply("POST", timeout_seconds=ANSWER_SECONDS)
            read_reply(call, reply, body=body)
        self._note(call)
        return call

    async def download(self, session: str) -> Call:
        """A step whose answer is large, and is taken a little at a time."""
        count = self.random.randint(1_000_000, 3_000_000)
        self.load.faults["read slowly"] += 1
        async with self.load.call("download", session, owner=self.owner) as call:
            async with connect(self.load.address, receive_buffer_bytes=4096, limit_bytes=1 << 16) as wire:
                await wire.send(message(call, "POST", f"/download?bytes={count}", b""))
                await asyncio.sleep(self.random.uniform(0.2, 0.8))
                reply = await wire.reply("POST", timeout_seconds=ANSWER_SECONDS)
            if not reply.complete or b"homing-error" in reply.head or reply.status != 200:
                read_reply(call, reply)
            else:
                first, _, rest = reply.body.partition(b"\n")
                read_answer(call, json.loads(first))
                call.outcome, call.status = Outcome.ANSWERED, 200
                if rest != (FILLER * (count // len(FILLER) + 1))[:count]:
                    call.outcome, call.why = Outcome.WRONG, "what was downloaded is not what was sent"
        self._note(call)
        return call

    def _note(self, call: Call) -> None:
        if call.pid is not None:
            self.owner = call.pid
            if call.worker is not None:
                self.load.worker_ids[call.pid] = call.worker


_CLOSE_FRAME: Final = b"\x88\x82\x11\x22\x33\x44" + bytes([0x03 ^ 0x11, 0xE8 ^ 0x22])  # 1000, masked


USES: Final = {
    "step": 90,
    "slow": 20,
    "big": 8,
    "trickle": 2,
    "download": 2,
    "events": 14,
    "talk": 14,
    "burst": 16,
    "raises": 4,
    "leave": 12,
    "leave events": 6,
    "leave talk": 4,
    "sleep": 2,
    "long": 1,
}
"""What a player does with its session, and how often each comes, relative to the others."""


async def play(load: Load, random: Random, *, idle_seconds: float) -> None:
    """One session after another, until the load stops."""
    client = Client(load, random)
    try:
        while not load.stopping.is_set():
            client.owner = None
            made = await _begin(client)
            if made is not None:
                await _use(client, made, idle_seconds)
            await _pause(load, random.uniform(0.0, 0.05))
    finally:
        await client.aclose()


async def _begin(client: Client) -> str | None:
    """A session that a reply said has started."""
    if client.random.random() < 0.5:
        call = await client.post("new", "")
        return call.session if call.outcome is Outcome.ANSWERED else None
    session = uuid.UUID(int=client.random.getrandbits(128)).hex + uuid.uuid4().hex
    if client.random.random() < 0.4:
        client.load.faults["started by several at once"] += 1
        racers = client.random.randint(2, 4)
        raced = await asyncio.gather(*(_one_of_a_race(client, session) for _ in range(racers)))
        return session if any(call.outcome is Outcome.ANSWERED for call in raced) else None
    for _ in range(3):
        call = await client.post("start", session)
        if call.outcome is Outcome.ANSWERED:
            return session
        if call.status == 410:
            return None
    return None


async def _one_of_a_race(client: Client, session: str) -> Call:
    """A start beside others of the same session; some go away in the middle."""
    random = Random(client.random.getrandbits(64))
    other = Client(client.load, random)
    await _pause(client.load, random.uniform(0.0, 0.05))
    try:
        return await other.post(
            "start",
            session,
            query=f"?slow={random.uniform(0.0, 0.1):.3f}",
            body=random.randbytes(random.choice((0, 1000))),
            leave=random.random() < 0.3,
        )
    finally:
        await other.aclose()


async def _use(client: Client, session: str, idle_seconds: float) -> None:
    """Steps of all kinds; ends when the session is no more, or is closed, or the client walks away."""
    load, random = client.load, client.random
    for _ in range(random.randint(2, 16)):
        if load.stopping.is_set():
            return
        match random.choices(
            list(USES),
            list(USES.values()),
        )[0]:
            case "step":
                call = await client.post("step", session)
            case "raises":
                load.faults["the app raised"] += 1
                call = await client.post("raises", session)
            case "trickle":
                call = await client.trickle(session)
            case "download":
                call = await client.download(session)
            case "slow":
                call = await client.post(
                    "step", session, query=f"?slow={random.uniform(0.05, LONGEST_SLOW_SECONDS):.3f}"
                )
            case "big":
                call = await client.post("step", session, body=random.randbytes(random.randint(70_000, 400_000)))
            case "events":
                call = await client.events(session)
            case "long":
                call = await client.events(session, seconds=idle_seconds * 1.15)
            case "burst":
                call = (await asyncio.gather(*(_one_of_a_burst(client, session) for _ in range(random.randint(2, 4)))))[
                    0
                ]
            case "leave":
                slow = f"?slow={random.uniform(0.0, LONGEST_SLOW_SECONDS):.3f}"
                call = await client.post(
                    "step", session, query=slow, body=random.randbytes(random.choice((0, 100, 100_000))), leave=True
                )
            case "leave events":
                call = await client.events(session, leave=True)
            case "sleep":
                load.faults["used again as its idle time ended"] += 1
                await _pause(load, idle_seconds * random.uniform(0.9, 1.3))
                continue
            case kind:
                await client.talk(session, leave=kind == "leave talk")
                continue
        if call.status == 410:
            return
        await _pause(load, random.uniform(0.0, 0.04))
    if random.random() < 0.7:
        for _ in range(random.choice((1, 1, 2))):  # some close twice
            await client.post("close", session)
        if random.random() < 0.3:
            await client.post("step", session)  # too late


async def _one_of_a_burst(client: Client, session: str) -> Call:
    """A step beside others of the same session, over a connection of its own."""
    other = Client(client.load, Random(client.random.getrandbits(64)))
    other.owner = client.owner
    try:
        return await other.post("step", session, query=f"?slow={other.random.uniform(0.0, 0.1):.3f}")
    finally:
        await other.aclose()


class Crowd:
    """Sessions that several clients share. One whose worker died is gone for good, so the next takes its place."""

    def __init__(self, load: Load, sessions: int) -> None:
        self.load = load
        self._generations = [0] * sessions

    async def join(self, random: Random) -> None:
        client = Client(self.load, random)
        try:
            while not self.load.stopping.is_set():
                number = random.randrange(len(self._generations))
                generation = self._generations[number]
                session = f"crowd-{number}-{generation}"
                what = random.choices(("start", "step", "close", "leave", "events", "talk"), (3, 12, 1, 1, 2, 1))[0]
                client.owner = None
                if what == "close":
                    self.load.faults["closed while others use and start it"] += 1
                if what == "events":
                    await client.events(session, alone=False)
                elif what == "talk":
                    await client.talk(session, alone=False)
                else:
                    slow = f"?slow={random.uniform(0.0, 0.2):.3f}" if what in ("step", "leave") else ""
                    leave = what == "leave"
                    call = await client.post("step" if leave else what, session, query=slow, alone=False, leave=leave)
                    if what == "start" and call.status == 410 and self._generations[number] == generation:
                        self._generations[number] += 1
                await _pause(self.load, random.uniform(0.0, 0.1))
        finally:
            await client.aclose()


async def _pause(load: Load, seconds: float) -> None:
    """A client's own pace: so long, or until the load stops."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await load.stopping.wait()
