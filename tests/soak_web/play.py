"""One client's session, from its seed to a close that succeeded: what is sent again, sent twice, and given up."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any, Final

import httpx
from tests.soak_web.oracle import TRANSPORT, Oracle

OVER: Final = frozenset(
    {
        "session_lost",
        "session_gone",
        "browser_lost",
        "backend_failure",
        "operation_timeout",
        "page_crashed",
        "page_unresponsive",
        "session_conflict",
    }
)
"""Kinds after which a session is over for its client."""

SEED_SECONDS: Final = 4.0 + 2.0 + 4.0 + 2.0
"""Site, browser, turn, reset."""
OPERATION_SECONDS: Final = 4.0 + 4.0 + 2.0
"""Its turn in the session, its turn at a core, itself."""
CLOSE_SECONDS: Final = 2 * 1.0 + 1.0 + 1.0 + 1.0 + 2.0 + 2.0
"""Operations that are told to stop, the interrupt, backend, runner, browser, site."""
_GIVE_UP_SECONDS: Final = 60.0

STAGES: Final = ("site", "acquire", "reset", "step", "evaluate", "observe")
RELEASES: Final = ("close backend", "close runner", "release", "release site", "finish")


@dataclass(frozen=True, slots=True)
class Reply:
    outcome: str
    body: dict[str, Any]


class Player:
    """Plays sessions one after another until told to stop. `faults`: how many it has asked the server's fakes for."""

    def __init__(self, name: str, url: str, seed: int, oracle: Oracle, fault_rate: float) -> None:
        self.name = name
        self.faults = 0
        self.sessions = 0
        self._url = url
        self._random = random.Random(seed)
        self._oracle = oracle
        self._fault_rate = fault_rate

    async def play(self, until: asyncio.Event) -> None:
        while not until.is_set():
            await self._session()

    async def _session(self) -> None:
        self.sessions += 1
        draw = self._random
        name = f"soak-{self.name}-{self.sessions:06}-{draw.getrandbits(32):08x}"
        identity = {"_ng_session_id": name, "_ng_session_close_token": "t" * 32}
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=_GIVE_UP_SECONDS, limits=limits) as client:
            task = {"benchmark": "fake", "task_id": "count", "task_kwargs": {"faults": self._draw_faults()}}
            if draw.random() < 0.3:
                task |= {"sites": [draw.choice(["shop", "wiki"])]}
                if draw.random() < 0.7:
                    task["mutation_class"] = "read_only"
            seed = await self._call(client, "seed", "/seed_session", {**identity, "task": task}, SEED_SECONDS)
            if seed.outcome == "ok":
                await self._steps(client, name, draw.randint(0, 6))
            await self._close(client, identity)

    async def _steps(self, client: httpx.AsyncClient, name: str, count: int) -> None:
        draw = self._random
        for number in range(1, count + 1):
            body = {"operation_id": str(number), "action": {"action": "noop"}}
            if draw.random() < 0.1:
                # It hangs up, and sends the step again: it is done once.
                self.faults += 1
                impatient = asyncio.create_task(client.post("/step", json=body))
                await asyncio.wait((impatient,), timeout=draw.random() * 0.02)
                impatient.cancel()
                await asyncio.wait((impatient,))
            times = 2 if draw.random() < 0.2 else 1
            replies = await asyncio.gather(
                *(self._call(client, "step", "/step", body, OPERATION_SECONDS) for _ in range(times))
            )
            for reply in replies:
                if reply.outcome == "ok":
                    self._oracle.stepped(name, number, reply.body)
            if any(reply.outcome != "ok" for reply in replies):
                return
        await self._judge(client, name, count)

    async def _judge(self, client: httpx.AsyncClient, name: str, count: int) -> None:
        if self._random.random() < 0.5:
            reply = await self._call(client, "verify", "/verify", {}, OPERATION_SECONDS + CLOSE_SECONDS)
            if reply.outcome == "ok":
                self._oracle.verified(name, count, reply.body)
            return
        first, second = await asyncio.gather(
            *(self._call(client, "evaluate", "/evaluate", {}, OPERATION_SECONDS) for _ in range(2))
        )
        verdicts = [reply.body["result"] for reply in (first, second) if reply.outcome == "ok"]
        for verdict in verdicts:
            self._oracle.judged(name, count, verdict)
        if len(verdicts) == 2:
            self._oracle.judged_again(name, *verdicts)

    async def _close(self, client: httpx.AsyncClient, identity: dict[str, str]) -> None:
        until = time.monotonic() + _GIVE_UP_SECONDS
        while time.monotonic() < until:
            # The seed may still be under way, and is waited for.
            reply = await self._call(client, "close", "/close", identity, SEED_SECONDS + 2 * CLOSE_SECONDS)
            if reply.outcome in ("ok", "session_gone"):
                return
            await asyncio.sleep(0.1)
        self._oracle.violated(f"session {identity['_ng_session_id']} could not be closed: {reply}")

    async def _call(
        self, client: httpx.AsyncClient, call: str, path: str, body: dict[str, Any], limit_seconds: float
    ) -> Reply:
        began = time.monotonic()
        try:
            answer = await client.post(path, json=body)
        except httpx.TimeoutException:
            reply = Reply("no answer", {})
        except httpx.TransportError:
            reply = Reply(TRANSPORT, {})
        else:
            try:
                found = json.loads(answer.content)
                reply = Reply("ok" if answer.status_code == 200 else found["error_kind"], found)
            except (ValueError, KeyError):
                reply = Reply(f"status {answer.status_code} with {answer.content[:200]!r}", {})
        self._oracle.returned(call, time.monotonic() - began, limit_seconds, reply.outcome)
        return reply

    def _draw_faults(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        while self._random.random() < self._fault_rate:
            at = self._random.choice(STAGES + RELEASES)
            # A browser that never comes keeps its place for ever, and rightly: late is the worst that ends.
            kinds = ["raise", "late", "stubborn"] + ["hang"] * (at != "acquire")
            found.setdefault(at, []).append(self._random.choice(kinds))
            self.faults += 1
        return found
