"""Where new sessions begin on whole servers: how they spread, and that each is at one worker whatever happens on the way.

Not here: how well they spread (`test_placement_spread.py`), the choice itself (`tests/unit/placement`), and the limit of sessions and its queue (`test_session_limit.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.raw import WebSocketWire, Wire
from tests.support.raw import request as raw_request
from tests.support.recorder import note, read_body, respond, wait
from tests.support.staged import SESSION, Staged, call, open_staged

from homing.placement.board import BEAT, BEAT_SECONDS, ROW_BYTES, STUCK_SECONDS
from homing.rundir import BOARD_NAME

COUNTER = "tests.support.counter_app:app"
MADE_BY_THE_APP = (
    *("--session", "path:/sessions/{session}", "--learn", "body:session@/sessions"),
    *("--start", "POST /sessions", "--end", "DELETE /sessions/{session}", "--no-access-log"),
)
CHOSEN_BY_THE_CLIENT = (*SESSION, "--start", "POST /start", "--no-access-log")


async def ask(wire: Wire, method: str, path: str, headers: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    await wire.send(raw_request(method, path, headers, b"" if method == "POST" else None))
    reply = await wire.reply(method)
    assert reply.status == 200, reply
    return dict(json.loads(reply.body))


def is_spread(counts: Counter[int], workers: int) -> bool:
    """Each worker within two sessions of the mean."""
    had = [*counts.values(), *[0] * (workers - len(counts))]
    mean = sum(had) / workers
    return max(had) <= mean + 2 and min(had) >= mean - 2


def test_accepting_leaves_every_session_where_its_connection_is() -> None:
    async def test() -> None:
        async with (
            open_staged(*MADE_BY_THE_APP, "--place", "accepting", app=COUNTER, workers=2) as server,
            server.wires() as wires,
        ):
            for pid, wire in wires.items():
                assert {(await ask(wire, "POST", "/sessions"))["pid"] for _ in range(12)} == {pid}

    asyncio.run(test())


def test_sessions_whose_ids_clients_choose_or_the_app_makes_go_on_where_they_were_placed() -> None:
    async def test() -> None:
        both = (*MADE_BY_THE_APP, *SESSION, "--start", "POST /start", "--place", "balanced", "--no-handoff")
        async with open_staged(*both, app=COUNTER, workers=2) as server, server.wires() as wires:
            first, second = wires.values()
            began: dict[str, dict[str, Any]] = {}
            chosen: dict[str, dict[str, Any]] = {}
            for number in range(8):
                made = await ask(first, "POST", "/sessions")
                began[made["session"]] = made
                name = [("x-session", f"chosen-{number}")]
                chosen[f"chosen-{number}"] = await ask(first, "POST", "/start", name)
            everything = Counter(each["pid"] for each in (*began.values(), *chosen.values()))
            assert is_spread(everything, 2), everything
            for wire in (first, second):
                for session, made in began.items():
                    step = await ask(wire, "POST", f"/sessions/{session}/step")
                    assert (step["hollow"], step["incarnation"], step["pid"]) == (
                        False,
                        made["incarnation"],
                        made["pid"],
                    )
                for session, made in chosen.items():
                    again = await ask(wire, "POST", "/start", [("x-session", session)])
                    assert (again["made"], again["incarnation"]) == (False, made["incarnation"])

    asyncio.run(test())


def test_a_websocket_that_starts_a_session_is_placed_too() -> None:
    async def test() -> None:
        options = ("--session", "path:/sessions/{session}", "--start", "/sessions/{session}/socket", "--no-handoff")
        async with (
            open_staged(*options, "--place", "fewest", app=COUNTER, workers=2) as server,
            server.wires() as wires,
        ):
            (pid, wire), _ = wires.items()
            at: Counter[int] = Counter()
            for number in range(6):
                async with server.connection(pid) as accepted:
                    socket = WebSocketWire(accepted)
                    assert (await socket.open(f"/sessions/socket-{number}/socket")).status == 101
                    told = (await socket.frame()).data.decode()
                    step = await ask(wire, "POST", f"/sessions/socket-{number}/step")
                    assert (step["incarnation"], step["hollow"]) == (told, False)
                    at[step["pid"]] += 1
            assert is_spread(at, 2), at

    asyncio.run(test())


def test_in_the_test_mode_placed_starts_take_their_detour_and_spread_all_the_same() -> None:
    async def test() -> None:
        options = (*MADE_BY_THE_APP, "--scatter", "--place", "balanced")
        async with open_staged(*options, app=COUNTER, workers=3) as server, server.wires() as wires:
            wire = next(iter(wires.values()))
            made = [await ask(wire, "POST", "/sessions") for _ in range(18)]
            assert is_spread(Counter(each["pid"] for each in made), 3)
            for each in made:
                step = await ask(wire, "POST", f"/sessions/{each['session']}/step")
                assert (step["hollow"], step["incarnation"]) == (False, each["incarnation"])

    asyncio.run(test())


async def until_one_is_silent(board: Path) -> None:
    """Wait until one of two workers has shown no beat for so long that it counts as stuck: there is no event for that."""

    def silent() -> list[float]:
        data, now = board.read_bytes(), time.monotonic_ns()
        beats = [struct.unpack_from("=Q", data, slot * ROW_BYTES + BEAT * 8)[0] for slot in range(2)]
        return [(now - beat) / 1e9 for beat in beats]

    while max(silent()) <= STUCK_SECONDS + 2 * BEAT_SECONDS:
        await asyncio.sleep(0.02)


async def filled_so_that_the_next_start_moves(server: Staged, here: Wire, case: str) -> None:
    """Three starts from `here` under `fewest` with two workers: one stays, one moves, one stays."""
    for _ in range(3):
        assert (await start(here, server.new_session(), case)) == 200


async def start(wire: Wire, session: str, case: str) -> int:
    return (await call(wire, session, case, method="POST", path="/start", body=b"{}")).status


def test_a_start_that_is_placed_at_a_worker_which_was_killed_runs_where_it_arrived() -> None:
    async def test() -> None:
        options = (*CHOSEN_BY_THE_CLIENT, "--place", "fewest", "--no-handoff")
        async with open_staged(*options, workers=2) as server, server.wires() as wires:
            here, target = wires
            case = server.script(read_body(), *respond())
            await filled_so_that_the_next_start_moves(server, wires[here], case)
            await server.kill(target)
            # At once: the board still shows the killed one, with the fewest sessions.
            for _ in range(4):
                assert await start(wires[here], server.new_session(), case) == 200
            assert [each.pid for each in server.stage.performances(case)][-4:] == [here] * 4

    asyncio.run(test())


def test_a_start_whose_target_is_killed_while_it_runs_there_is_not_run_again() -> None:
    async def test() -> None:
        options = (*CHOSEN_BY_THE_CLIENT, "--place", "fewest", "--no-handoff")
        async with open_staged(*options, workers=2) as server, server.wires() as wires:
            here, target = wires
            plain = server.script(read_body(), *respond())
            await filled_so_that_the_next_start_moves(server, wires[here], plain)
            slow = server.script(read_body(), note("in"), wait("never"), *respond())
            lost = server.new_session()
            asking = asyncio.create_task(start(wires[here], lost, slow))
            performance = await server.performance(slow)
            await performance.noted("in")
            await server.kill(target)
            assert await asking == 502
            assert len(server.stage.performances(slow)) == 1
            # Its session was that worker's, and is gone with it.
            assert (await call(wires[here], lost, plain, path="/step")).status == 410

    asyncio.run(test())


def test_a_worker_that_stands_still_is_no_target() -> None:
    async def test() -> None:
        options = (*CHOSEN_BY_THE_CLIENT, "--place", "fewest", "--no-handoff")
        async with open_staged(*options, workers=2) as server, server.wires() as wires:
            here, target = wires
            case = server.script(read_body(), *respond())
            await filled_so_that_the_next_start_moves(server, wires[here], case)
            with server.stopped(target):
                await until_one_is_silent(server.run_directory / BOARD_NAME)
                for _ in range(5):
                    assert await start(wires[here], server.new_session(), case) == 200
            assert [each.pid for each in server.stage.performances(case)][-5:] == [here] * 5

    asyncio.run(test())


def test_a_worker_that_is_told_to_stop_gets_no_new_sessions() -> None:
    async def test() -> None:
        options = (*CHOSEN_BY_THE_CLIENT, "--place", "fewest", "--no-handoff", "--timeout-graceful-shutdown", "20")
        async with open_staged(*options, workers=2) as server, server.wires() as wires:
            here, leaving = wires
            case = server.script(read_body(), *respond())
            await filled_so_that_the_next_start_moves(server, wires[here], case)
            # A request that is served there keeps it from ending.
            slow = server.script(read_body(), note("in"), wait("go"), *respond())
            asking = asyncio.create_task(call(wires[leaving], None, slow, method="POST", path="/other", body=b""))
            performance = await server.performance(slow)
            await performance.noted("in")
            os.kill(leaving, signal.SIGTERM)
            # A mark is a file: no event tells of it.
            while not list(server.run_directory.glob("*.stopping")):
                await asyncio.sleep(0.01)
            for _ in range(4):
                assert await start(wires[here], server.new_session(), case) == 200
            assert [each.pid for each in server.stage.performances(case)][-4:] == [here] * 4
            performance.open("go")
            assert (await asking).status == 200

    asyncio.run(test())
