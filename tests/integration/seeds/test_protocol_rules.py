"""Rules of the protocol that only show while something else happens: each test is the moment in which its rule counts."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pytest
from tests.support.seed_servers import SeedServer, SeedWorker, cookie

from homing.forwarding.replay import replayable
from homing.identity import Named
from homing.routing.notes import note_of
from homing.routing.sweeper import sweep_forever
from homing.types import Reason, SessionId, WorkerId

pytestmark = pytest.mark.anyio

COOKIE = cookie({"session_id": "s1"})
EPISODE = {"resources_session_id": "s1", "episode_id": "e"}
WINDOW_SECONDS = 300.0


async def let_go(server: SeedServer, worker: SeedWorker) -> None:
    """The worker closes the session, and releases it when its window is over."""
    await worker.post("/close_session", EPISODE)
    server.clock.advance(WINDOW_SECONDS + 1)
    server.sweep()
    assert worker.owner("s1") is None


async def send_as_owned(
    sender: SeedWorker,
    to: SeedWorker,
    named: Named | None = None,
    *,
    method: str = "GET",
    path: str = "/session",
    body: bytes = b"",
) -> tuple[bool, list[Any]]:
    """A request of the session goes to a worker that has been found to own it. Whether it was *mine*, and the reply."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"homing.test"), (b"cookie", COOKIE.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    mine = await sender.worker.forwarder.forward(
        WorkerId(to.id), Reason.OWNED, note_of(named or Named(SessionId("s1"))), scope, replayable(receive), send
    )
    return mine, sent


@pytest.mark.parametrize("acquired", [False, True], ids=["nobody owns it", "the sender owns it by now"])
async def test_a_request_sent_to_a_worker_that_let_the_session_go_is_not_mine_and_does_not_run(
    resources: SeedServer, acquired: bool
) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    assert (await send_as_owned(second, first))[0]
    await let_go(resources, first)
    if acquired:
        await second.post("/seed_session", EPISODE)
    handled = [list(each.resources.handled) for each in resources.workers]
    assert await send_as_owned(second, first) == (False, [])
    assert [list(each.resources.handled) for each in resources.workers] == handled


async def test_a_stop_sent_to_a_worker_that_let_the_key_go_is_not_mine(agents: SeedServer) -> None:
    owner, other = agents.workers
    named = Named(path_key="/rollouts/x")
    stop: Any = {"method": "POST", "path": "/rollouts/x/stop", "body": b"{}"}
    episode = {"episode_id": {"rollout_id": "x", "attempt": 0}}
    await owner.post("/v1/agent_sessions", {"agent_session_id": "a", **episode})
    assert (await send_as_owned(other, owner, named, **stop))[0]
    await owner.post("/v1/agent_sessions/close", {"agent_session_id": "a", **episode})
    await other.post("/v1/agent_sessions", {"agent_session_id": "b", **episode})
    assert await send_as_owned(other, owner, named, **stop) == (False, [])
    assert (await owner.post("/rollouts/x/stop", {})).json() == {"worker": other.id, "stopped": True}


async def test_a_session_served_where_its_request_arrives_costs_one_look(resources: SeedServer) -> None:
    first, _ = resources.workers
    await first.post("/seed_session", EPISODE)
    looks: list[object] = []

    def count(frame: object, event: str, called: object) -> None:
        if event == "c_call" and called is os.readlink:
            looks.append(called)

    sys.setprofile(count)
    try:
        reply = await first.get("/session", cookie=COOKIE)
    finally:
        sys.setprofile(None)
    assert reply.status_code == 200
    assert len(looks) == 1


async def test_a_request_of_a_session_nobody_owns_owns_it_before_its_handler(resources: SeedServer) -> None:
    first, second = resources.workers
    slow = asyncio.create_task(first.post("/slow", {}, cookie=COOKIE))
    await first.resources.entered.wait()
    owner = second.owner("s1")
    first.resources.proceed.set()
    await slow
    assert owner == first.id


async def test_a_session_released_before_its_worker_exited_is_not_gone(
    resources: SeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = resources.workers
    await first.post("/seed_session", EPISODE)
    # Its record named the first worker when it was looked up; by the time that worker refuses, it does not any more.
    stopping = first.worker
    look = second.worker.owners.owner

    def looked_up_just_before(session_id: str) -> WorkerId | None:
        found = look(session_id)
        monkeypatch.undo()
        first.router.lifetimes.forget("s1")  # type: ignore[attr-defined]
        stopping.owners.release("s1")
        assert stopping._receiver is not None
        stopping._receiver.listener.close()
        return found

    monkeypatch.setattr(second.worker.owners, "owner", looked_up_just_before)
    reply = await second.get("/session", cookie=COOKIE)
    assert reply.status_code == 200
    assert reply.json()["worker"] == second.id


async def test_after_a_lag_of_the_loop_a_sweep_releases_nothing_that_waited_for_it(resources: SeedServer) -> None:
    first, _ = resources.workers
    await first.post("/seed_session", EPISODE)
    await first.post("/close_session", EPISODE)
    swept = asyncio.Event()
    sweep = first.worker.lifetimes.sweep

    def sweeps() -> list[str]:
        swept.set()
        return sweep()

    first.worker.lifetimes.sweep = sweeps  # type: ignore[method-assign]
    sweeping = asyncio.create_task(sweep_forever(first.worker, interval_seconds=0.01, clock=resources.clock))
    await asyncio.sleep(0)  # it sleeps now, and the loop stands still for longer than the window
    resources.clock.advance(WINDOW_SECONDS + 1)
    async with asyncio.timeout(10):
        await swept.wait()
    sweeping.cancel()
    await asyncio.wait({sweeping})
    assert first.owner("s1") == first.id
