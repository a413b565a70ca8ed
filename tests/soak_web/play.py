"""One client's session, from its seed to a close that succeeded: what is sent again, sent twice, and given up."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass
from typing import Any, Final

import httpx
from tests.soak_web.control import Control
from tests.soak_web.oracle import TRANSPORT, Oracle
from tests.support.web_chromium_app import CALLS, SETTINGS

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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may take, seconds: the sums of the waits that it can have.

    Attributes:
        seed: Site, browser, turn at a core, reset.
        operation: Its turn in the session, its turn at a core, itself.
        close: Operations that are told to stop, the interrupt, backend twice, runner, browser, recording, site.
        close_call: A close that comes while the session is being seeded, or closed already.
    """

    seed: float
    operation: float
    close: float
    close_call: float


_GIVE_UP_SECONDS: Final = 60.0

_BUTTON: Final = re.compile(r"\[(e?\d+)\] button|button .*?\[(?:ref=)?(e?\d+)\]")

STAGES: Final = ("site", "acquire", "reset", "step", "evaluate", "observe")
RELEASES: Final = ("close backend", "close runner", "release", "release site", "finish")


@dataclass(frozen=True, slots=True)
class Reply:
    outcome: str
    body: dict[str, Any]


_FAKE_CLOSE: Final = 3.0 + 3.0 + 1.0 + 2.0 + 2.0


_CHROMIUM_CLOSE: Final = (
    3.0  # operations that are told to stop, the interrupt, and again
    + 2 * SETTINGS["close_seconds"] + 1.0  # the backend, an interrupt, the backend again
    + SETTINGS["close_seconds"] + SETTINGS["release_seconds"] + SETTINGS["recording_seconds"] + SETTINGS["release_seconds"]
)  # fmt: skip


class Player:
    """Plays sessions one after another until told to stop. `faults`: how many it has asked the server's fakes for."""

    limits = Limits(4.0 + 2.0 + 4.0 + 2.0, 4.0 + 4.0 + 2.0, _FAKE_CLOSE, 4.0 + 2.0 + 4.0 + 2.0 + 2 * _FAKE_CLOSE)

    def __init__(self, name: str, url: str, seed: int, oracle: Oracle, fault_rate: float, control: Control) -> None:
        self.name = name
        self.faults = 0
        self.sessions = 0
        self._url = url
        self._random = random.Random(seed)
        self._oracle = oracle
        self._fault_rate = fault_rate
        self._control = control

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
            seed = await self._call(
                client, "seed", "/seed_session", {**identity, "task": self._task()}, self.limits.seed
            )
            if seed.outcome == "ok":
                await self._play(client, name, seed.body)
            await self._close(client, identity)

    def _task(self) -> dict[str, Any]:
        draw = self._random
        task: dict[str, Any] = {
            "benchmark": "fake",
            "task_id": "count",
            "task_kwargs": {"faults": self._draw_faults()},
        }
        if draw.random() < 0.3:
            task |= {"sites": [draw.choice(["shop", "wiki"])]}
            if draw.random() < 0.7:
                task["mutation_class"] = "read_only"
        return task

    async def _play(self, client: httpx.AsyncClient, name: str, seeded: dict[str, Any]) -> None:
        count = self._random.randint(0, 6)
        for number in range(1, count + 1):
            reply = await self._step(client, number, {"action": "noop"})
            if reply.outcome != "ok":
                return
            self._oracle.stepped(name, number, reply.body)
        await self._judge(client, name, float(count))

    async def _step(self, client: httpx.AsyncClient, number: int, action: dict[str, Any]) -> Reply:
        """One step, perhaps sent again after hanging up, perhaps sent twice at once: it is done once."""
        draw = self._random
        body = {"operation_id": str(number), "action": action}
        if draw.random() < 0.1:
            self.faults += 1
            impatient = asyncio.create_task(client.post("/step", json=body))
            await asyncio.wait((impatient,), timeout=draw.random() * 0.02)
            impatient.cancel()
            await asyncio.wait((impatient,))
        times = 2 if draw.random() < 0.2 else 1
        replies = await asyncio.gather(
            *(self._call(client, "step", "/step", body, self.limits.operation) for _ in range(times))
        )
        bodies = [reply.body for reply in replies if reply.outcome == "ok"]
        if len(bodies) == 2:
            self._oracle.answered_again(bodies[0], bodies[1])
        return next((reply for reply in replies if reply.outcome != "ok"), replies[0])

    async def _judge(self, client: httpx.AsyncClient, name: str, expected: float) -> None:
        if self._random.random() < 0.5:
            reply = await self._call(client, "verify", "/verify", {}, self.limits.operation + self.limits.close)
            if reply.outcome == "ok":
                self._oracle.verified(name, expected, reply.body)
            return
        first, second = await asyncio.gather(
            *(self._call(client, "evaluate", "/evaluate", {}, self.limits.operation) for _ in range(2))
        )
        verdicts = [reply.body["result"] for reply in (first, second) if reply.outcome == "ok"]
        for verdict in verdicts:
            self._oracle.judged(name, expected, verdict)
        if len(verdicts) == 2:
            self._oracle.judged_again(name, *verdicts)

    async def _close(self, client: httpx.AsyncClient, identity: dict[str, str]) -> None:
        until = time.monotonic() + _GIVE_UP_SECONDS
        while time.monotonic() < until:
            # The seed may still be under way, and is waited for.
            reply = await self._call(client, "close", "/close", identity, self.limits.close_call)
            if reply.outcome in ("ok", "session_gone"):
                return
            await asyncio.sleep(0.1)
        self._oracle.violated(f"session {identity['_ng_session_id']} could not be closed: {reply}")

    async def _call(
        self, client: httpx.AsyncClient, call: str, path: str, body: dict[str, Any], limit_seconds: float
    ) -> Reply:
        began = self._control.now()
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
                shown = f"status {answer.status_code}, {dict(answer.headers)}, body {answer.content[:200]!r}"
                reply = Reply(f"{shown} after {time.monotonic() - began.at:.2f} s", {})
        seconds = time.monotonic() - began.at
        late = self._control.late_since(began) if seconds > limit_seconds else 0.0
        self._oracle.returned(call, seconds, limit_seconds, reply.outcome, late)
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


class ChromiumPlayer(Player):
    """Plays one MiniWoB task in real browsers: some looking about, then the click that ends it.

    The verdict has to be the reward that the click's reply showed: a fault in between may lose it, and never change it.
    """

    limits = Limits(
        # The runtime, a site, a browser, a turn at a core, and the moment that an earlier operation is given to stop.
        2 * SETTINGS["acquire_seconds"] + SETTINGS["site_wait_seconds"] + SETTINGS["wait_seconds"] + 0.2
        + SETTINGS["reset_seconds"],
        2 * SETTINGS["wait_seconds"] + 0.2 + SETTINGS["operation_seconds"],
        _CHROMIUM_CLOSE,
        2 * _CHROMIUM_CLOSE,
    )  # fmt: skip

    async def _session(self) -> None:
        if self._random.random() < 0.1:
            await self._leave_while_seeding()
        else:
            await super()._session()

    async def _leave_while_seeding(self) -> None:
        """A client that would know its session by the cookie alone hangs up: whenever it does, nothing may stay."""
        self.sessions += 1
        self.faults += 1
        async with httpx.AsyncClient(base_url=self._url, timeout=_GIVE_UP_SECONDS) as client:
            seed = asyncio.create_task(
                self._call(client, "seed", "/seed_session", {"task": self._task()}, self.limits.seed)
            )
            await asyncio.wait((seed,), timeout=self._random.random() * 2.0)
            if not seed.done():
                seed.cancel()
                await asyncio.wait((seed,))
            elif seed.result().outcome == "ok":
                await self._call(client, "close", "/close", {}, self.limits.close_call)

    def _task(self) -> dict[str, Any]:
        draw = self._random
        task: dict[str, Any] = {
            "benchmark": "miniwob",
            "task_id": "click-test",
            "seed": draw.randrange(1000),
            "original_metadata": {"faults": self._draw_faults()},
        }
        if draw.random() < 0.2:
            task |= {"sites": [draw.choice(["shop", "wiki"])]}
            if draw.random() < 0.8:
                task["mutation_class"] = "read_only"
        return task

    def _draw_faults(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        while self._random.random() < self._fault_rate:
            at = self._random.choice(CALLS)
            kinds = ["raise", "late"] + ["hang"] * (at != "acquire")
            found.setdefault(at, []).append(self._random.choice(kinds))
            self.faults += 1
        return found

    async def _play(self, client: httpx.AsyncClient, name: str, seeded: dict[str, Any]) -> None:
        observation = seeded["observation"]
        looks = self._random.randint(0, 4)
        for number in range(1, looks + 1):
            reply = await self._step(client, number, {"action": "noop"})
            if reply.outcome != "ok":
                return
            observation = reply.body["observation"]
        found = _BUTTON.search(observation["axtree"])
        if found is None:
            self._oracle.violated(f"session {name}: no button in {observation['axtree'][:300]!r}")
            return
        reply = await self._step(client, looks + 1, {"action": "click", "ref": found[1]})
        if reply.outcome == "ok" and reply.body["terminated"]:
            await self._judge(client, name, reply.body["reward"])
