"""A limit of sessions over all workers, and the queue before it, on whole servers: never more than the limit, whoever is killed.

Not here: permits and the queue themselves (`tests/unit/placement`), and the limit of each worker alone (`test_answers.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

import pytest
from tests.support.raw import Reply, Wire
from tests.support.recorder import note, read_body, respond, wait
from tests.support.staged import SESSION, Staged, asked, call, open_staged

from homing.clock import boot_seconds
from homing.forwarding.frames import EARLY_BODY_BYTES
from homing.placement.board import BEAT_SECONDS, DRAINS, ROW_BYTES, SLOTS, TICKET, WAITING, Board
from homing.rundir import RunDirectory, new_worker_id
from homing.watch.servers import look_at

OPTIONS = (*SESSION, "--start", "POST /start", "--end", "POST /end", "--no-handoff", "--no-access-log")


@asynccontextmanager
async def limited(*options: str, workers: int = 2) -> AsyncIterator[tuple[Staged, dict[int, Wire], str]]:
    """A server, a connection to each worker, and the case of an app that answers at once."""
    async with open_staged(*OPTIONS, *options, workers=workers) as server, server.wires() as wires:
        yield server, wires, server.script(read_body(), *respond())


async def post(wire: Wire, session: str, case: str, path: str = "/start") -> Reply:
    return await call(wire, session, case, method="POST", path=path, body=b"{}", timeout_seconds=60.0)


async def post_until_taken(wire: Wire, session: str, case: str) -> Reply:
    """A start where there is room, or will be as soon as a worker has seen the end of what it has answered already."""
    async with asyncio.timeout(60):
        while is_refused(reply := await post(wire, session, case)):
            pass
    return reply


def is_refused(reply: Reply) -> bool:
    refused = reply.all(b"homing-error") == [b"session_limit"]
    assert refused == (reply.status == 503), reply
    if refused:
        assert reply.all(b"retry-after") == [b"1"]
    return refused


async def waits(server: Staged, count: int) -> None:
    """Return once so many starts have been read by the workers and not answered. Rows are memory: no event tells."""

    def waiting() -> int:
        data = (server.run_directory / "board").read_bytes()
        return sum(int.from_bytes(data[slot * ROW_BYTES + WAITING * 8 :][:8], "little") for slot in range(SLOTS))

    async with asyncio.timeout(60):
        while waiting() != count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["balanced", pytest.param("accepting", marks=pytest.mark.long)])
def test_there_are_never_more_sessions_than_the_limit_and_ended_and_dead_ones_do_not_count(place: str) -> None:
    limit = 10

    async def test() -> None:
        seed = random.randrange(2**32)
        print("seed", seed)
        chance = random.Random(seed)
        async with (
            limited("--max-sessions", str(limit), "--place", place, workers=3) as (server, wires, case),
            AsyncExitStack() as stack,
        ):
            lanes = [wires, *[await stack.enter_async_context(server.wires()) for _ in range(3)]]
            live: dict[str, int] = {}

            async def flood(times: int) -> None:
                """Starts on all connections at once; then as many are live as may be."""
                sessions = {server.new_session(): lane for lane in lanes for _ in range(times)}
                pids = list(lanes[0])

                async def one(session: str, wire: Wire) -> None:
                    reply = await post(wire, session, case)
                    if not is_refused(reply):
                        live[session] = int(reply.status)

                groups: dict[Wire, list[str]] = {}
                for session, lane in sessions.items():
                    groups.setdefault(lane[chance.choice(pids)], []).append(session)

                async def in_turn(wire: Wire, names: list[str]) -> None:
                    for name in names:
                        await one(name, wire)

                await asyncio.gather(*(in_turn(wire, names) for wire, names in groups.items()))

            await flood(6)
            assert len(live) == limit
            # One that has ended does not begin anew without room either, where its worker still knows it.
            again = min(live)
            assert (await post(wires[next(iter(wires))], again, case, "/end")).status == 200
            del live[again]
            await flood(2)
            assert len(live) == limit
            assert is_refused(await post(wires[next(iter(wires))], again, case))
            # A start of a session that is there, and any other request, is refused by no limit.
            for session in live:
                for path in ("/start", "/step"):
                    assert (await post(wires[chance.choice(list(wires))], session, case, path)).status == 200
            for session in chance.sample(sorted(live), 4):
                assert (await post(wires[chance.choice(list(wires))], session, case, "/end")).status == 200
                del live[session]
            await flood(6)
            assert len(live) == limit
            # Those of a killed worker are gone, and do not count.
            victim = chance.choice(list(wires))
            await server.kill(victim)
            for lane in lanes:
                del lane[victim]
            for session in sorted(live):
                reply = await post(next(iter(lanes[0].values())), session, case, "/step")
                assert reply.status in (200, 410)
                if reply.status == 410:
                    del live[session]
            await flood(6)
            assert len(live) == limit

    asyncio.run(test())


def test_starts_under_way_count_and_make_room_when_they_fail() -> None:
    async def test() -> None:
        async with limited("--max-sessions", "1", "--place", "accepting") as (server, wires, case):
            first, second = wires.values()
            slow = server.script(read_body(), note("in"), wait("go"), *respond(500))
            asking = asyncio.create_task(post(first, server.new_session(), slow))
            performance = await server.performance(slow)
            await performance.noted("in")
            assert is_refused(await post(second, server.new_session(), case))
            performance.open("go")
            assert (await asking).status == 500
            assert (await post_until_taken(second, server.new_session(), case)).status == 200
            assert is_refused(await post(first, server.new_session(), case))

    asyncio.run(test())


def test_who_waits_has_its_turn_in_the_order_of_arrival_over_all_workers() -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "60", "--place", "balanced")
        async with limited(*options, workers=3) as (server, wires, case), AsyncExitStack() as stack:
            holder = server.new_session()
            assert (await post(wires[next(iter(wires))], holder, case)).status == 200
            lanes = [await stack.enter_async_context(server.wires()) for _ in range(3)]
            queued: list[tuple[str, asyncio.Task[Reply]]] = []
            for lane in lanes:
                for wire in lane.values():
                    session = server.new_session()
                    queued.append((session, asyncio.create_task(post(wire, session, case))))
                    await waits(server, len(queued))
            order: list[str] = []
            for number in range(len(queued)):
                ended = holder if not order else order[-1]
                assert (await post(next(iter(wires.values())), ended, case, "/end")).status == 200
                done, _ = await asyncio.wait(
                    [task for name, task in queued if name not in order], return_when=asyncio.FIRST_COMPLETED
                )
                assert len(done) == 1
                assert done.pop().result().status == 200
                order += [name for name, task in queued if task.done() and name not in order]
                assert len(order) == number + 1
            assert order == [name for name, _ in queued]

    asyncio.run(test())


def test_who_waits_too_long_is_answered_503_and_a_client_that_leaves_takes_no_ones_turn() -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "2", "--place", "balanced")
        async with limited(*options) as (server, wires, case):
            (_, first), (other, second) = wires.items()
            holder = server.new_session()
            assert (await post(first, holder, case)).status == 200
            # Nobody makes room.
            assert is_refused(await post(second, server.new_session(), case))
            # Of two who wait, the one that came first leaves; its handler never runs.
            left = server.script(read_body(), *respond())
            async with server.connection(other) as leaving:
                await leaving.send(asked(server.new_session(), left, method="POST", path="/start", body=b"{}"))
                await waits(server, 1)
                leaving.abort()
            await waits(server, 0)
            stays = asyncio.create_task(post(second, server.new_session(), case))
            await waits(server, 1)
            assert (await post(first, holder, case, "/end")).status == 200
            assert (await stays).status == 200
            assert server.stage.performances(left) == []
            # Nobody was answered who had left.
            assert await answers_given(server) == {"session_limit": 1}

    asyncio.run(test())


async def answers_given(server: Staged) -> Counter[str]:
    """Homing's own answers up to now: workers write them down once a second, of which no event tells."""
    now = boot_seconds()
    async with asyncio.timeout(30):
        while True:
            found = look_at(str(server.run_directory))
            assert found is not None
            if all(each.written > now for each in found.alive):
                return sum((Counter(each.answers) for each in found.alive), Counter())
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_client_that_leaves_the_queue_is_missed_after_a_body_as_long_as_what_is_taken_early(http: str) -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "60", "--place", "balanced", "--http", http)
        async with limited(*options) as (server, wires, case):
            (_, first), (other, second) = wires.items()
            holder = server.new_session()
            assert (await post(first, holder, case)).status == 200
            left = server.script(read_body(), *respond())
            async with server.connection(other) as leaving:
                body = b" " * EARLY_BODY_BYTES
                await leaving.send(asked(server.new_session(), left, method="POST", path="/start", body=body))
                await waits(server, 1)
                await asyncio.sleep(0.2)  # its body has been taken
                leaving.abort()
            async with asyncio.timeout(10):
                await waits(server, 0)
            assert (await post(first, holder, case, "/end")).status == 200
            assert (await post_until_taken(second, server.new_session(), case)).status == 200
            assert server.stage.performances(left) == []

    asyncio.run(test())


@pytest.mark.parametrize(
    ("headers", "follows"),
    [
        pytest.param([("expect", "100-continue"), ("content-length", "2")], b"", id="expects"),
        pytest.param([("content-length", str(4 * EARLY_BODY_BYTES))], b" " * 4 * EARLY_BODY_BYTES, id="long body"),
        pytest.param([("content-length", "2")], b"{}" + asked(), id="next request"),
    ],
)
def test_a_client_that_leaves_the_queue_is_missed_though_nothing_is_read_from_it(
    headers: list[tuple[str, str]], follows: bytes
) -> None:
    async def test() -> None:
        async with limited("--max-sessions", "1", "--queue", "60", "--place", "balanced") as (server, wires, case):
            (_, first), (other, second) = wires.items()
            holder = server.new_session()
            assert (await post(first, holder, case)).status == 200
            left = server.script(read_body(), *respond())
            for leave in (Wire.abort, Wire.close):
                start = asked(server.new_session(), left, method="POST", path="/start", headers=headers)
                async with server.connection(other) as leaving:
                    received = leaving.received
                    await leaving.send(start + follows)
                    await waits(server, 1)
                    assert (await call(second, holder, case)).status == 200  # its worker has gone on meanwhile
                    assert leaving.received == received  # no `100 Continue`
                    leave(leaving)
                async with asyncio.timeout(10):
                    await waits(server, 0)
            assert (await post(first, holder, case, "/end")).status == 200
            assert (await post_until_taken(second, server.new_session(), case)).status == 200
            assert server.stage.performances(left) == []

    asyncio.run(test())


def test_a_killed_worker_in_the_queue_holds_up_nobody_and_its_session_makes_room() -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "60", "--place", "accepting")
        async with limited(*options, workers=3) as (server, wires, case):
            first, second, third = wires
            assert (await post(wires[first], server.new_session(), case)).status == 200
            never = server.script(read_body(), *respond())
            await wires[second].send(asked(server.new_session(), never, method="POST", path="/start", body=b"{}"))
            await waits(server, 1)
            behind = asyncio.create_task(post(wires[third], server.new_session(), case))
            await waits(server, 2)
            # First in the queue, then whose session fills the server: both killed.
            await server.kill(second)
            await server.kill(first)
            assert (await behind).status == 200
            assert server.stage.performances(never) == []

    asyncio.run(test())


def test_a_worker_that_stands_still_in_the_queue_holds_up_nobody() -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "60", "--place", "accepting")
        async with limited(*options, workers=3) as (server, wires, case):
            first, second, third = wires
            holder = server.new_session()
            assert (await post(wires[first], holder, case)).status == 200
            ahead = asyncio.create_task(post(wires[second], server.new_session(), case))
            await waits(server, 1)
            behind = server.new_session()
            later = asyncio.create_task(post(wires[third], behind, case))
            await waits(server, 2)
            with server.stopped(second):
                assert (await post(wires[first], holder, case, "/end")).status == 200
                assert (await later).status == 200
            # It goes on, and has its turn as soon as there is room.
            assert (await post(wires[first], behind, case, "/end")).status == 200
            assert (await ahead).status == 200

    asyncio.run(test())


async def began_and_ended(wire: Wire, session: str, case: str) -> None:
    for path in ("/start", "/end"):
        assert (await post(wire, session, case, path)).status == 200


def test_a_start_of_a_session_that_ended_at_another_worker_waits_as_any_other_and_begins_there() -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "60", "--place", "accepting")
        async with limited(*options) as (server, wires, case), server.wires() as more:
            (at, first), (other, second) = wires.items()
            again, holder, later = server.new_session(), server.new_session(), server.new_session()
            await began_and_ended(first, again, case)
            assert (await post(second, holder, case)).status == 200
            # It is known at the first worker, and arrives at the second, which holds the only place.
            waiting = asyncio.create_task(post(more[other], again, case))
            await waits(server, 1)
            behind = asyncio.create_task(post(more[at], later, case))
            await waits(server, 2)
            assert (await post(second, again, case, "/end")).status == 200  # which begins nothing
            assert (await post(first, holder, case, "/end")).status == 200
            assert (await waiting).status == 200
            assert server.stage.performances(case)[-1].pid == at
            assert not behind.done()
            # It counts now: the place is its own until it ends.
            assert (await post(second, again, case)).status == 200
            assert (await post(second, again, case, "/end")).status == 200
            assert (await behind).status == 200

    asyncio.run(test())


def test_without_a_queue_a_start_of_a_session_that_ended_elsewhere_is_refused_over_the_limit() -> None:
    async def test() -> None:
        async with limited("--max-sessions", "1", "--place", "accepting") as (server, wires, case):
            first, second = wires.values()
            again, holder = server.new_session(), server.new_session()
            await began_and_ended(first, again, case)
            assert (await post_until_taken(second, holder, case)).status == 200
            for wire in (first, second):
                assert is_refused(await post(wire, again, case))
                assert (await post(wire, holder, case)).status == 200
            assert (await post(first, holder, case, "/end")).status == 200
            assert (await post_until_taken(second, again, case)).status == 200
            assert is_refused(await post(second, server.new_session(), case))

    asyncio.run(test())


def test_a_start_of_a_session_that_ended_elsewhere_overtakes_nobody_though_there_is_room() -> None:
    async def test() -> None:
        options = ("--max-sessions", "3", "--queue", "60", "--place", "accepting")
        async with limited(*options) as (server, wires, case):
            first, second = wires.values()
            again = server.new_session()
            await began_and_ended(first, again, case)
            with somebody_waits(server) as let_go:
                waiting = [asyncio.create_task(post(wire, again, case)) for wire in (second, first)]
                await waits(server, 3)
                assert not any(each.done() for each in waiting)
                let_go()
                assert [(await each).status for each in waiting] == [200, 200]

    asyncio.run(test())


@contextmanager
def somebody_waits(server: Staged) -> Iterator[Callable[[], None]]:
    """As one more worker that takes no sessions, and at which a start has waited for longer than all others."""
    identifier = new_worker_id()
    with RunDirectory.open(str(server.run_directory)) as directory, ExitStack() as stack:
        stack.callback(directory.hold_life(identifier).close)
        board = Board(directory, identifier, "")
        stack.callback(board.close)
        board[DRAINS], board[TICKET], board[WAITING] = 1, 1, 1
        beat = asyncio.get_running_loop().create_task(_beat(board))
        stack.callback(beat.cancel)

        def let_go() -> None:
            board[TICKET] = board[WAITING] = 0

        yield let_go


async def _beat(board: Board) -> None:
    while True:
        board.beat(0.0)
        await asyncio.sleep(BEAT_SECONDS)


@pytest.mark.parametrize("place", ["accepting", "balanced"])
def test_adopted_and_learned_sessions_are_never_refused_and_count(place: str) -> None:
    async def test() -> None:
        options = ("--unowned", "adopt", "--max-sessions", "3", "--place", place)
        async with limited(*options) as (server, wires, case):
            first, second = wires.values()

            async def adopted(wire: Wire) -> str:
                session = server.new_session()
                assert (await post(wire, session, case, "/step")).status == 200
                return session

            async def learned(wire: Wire) -> str:
                """Made by the app for a request that is no declared start, and named in its reply."""
                session = server.new_session()
                makes = server.script(read_body(), *respond(200, [(b"x-session", session.encode())]))
                assert (await call(wire, None, makes, method="POST", path="/step", body=b"")).status == 200
                return session

            there = [await adopted(first), await adopted(second), await learned(first)]
            assert is_refused(await post(second, server.new_session(), case))
            # Over the limit by now, and still nobody is told so but who declares a start.
            there += [await adopted(second), await learned(second), await learned(first)]
            for wire in (first, second):
                assert is_refused(await post(wire, server.new_session(), case))
                for session in there:
                    assert (await post(wire, session, case, "/step")).status == 200
            for session in there[3:]:
                assert is_refused(await post(first, server.new_session(), case))
                assert (await post(first, session, case, "/end")).status == 200
            assert is_refused(await post(second, server.new_session(), case))
            assert (await post(second, there[0], case, "/end")).status == 200
            assert (await post_until_taken(first, server.new_session(), case)).status == 200
            assert is_refused(await post(second, server.new_session(), case))

    asyncio.run(test())


@pytest.mark.parametrize("place", ["accepting", "balanced"])
def test_a_worker_at_its_own_limit_begins_no_ended_session_anew_wherever_the_start_arrives(place: str) -> None:
    async def test() -> None:
        options = ("--max-sessions-per-worker", "1", "--place", place)
        async with limited(*options) as (server, wires, case):
            (at, first), (_, second) = wires.items()
            again, held = server.new_session(), server.new_session()
            await began_and_ended(first, again, case)
            assert (await post_until_taken(first, held, case)).status == 200
            assert server.stage.performances(case)[-1].pid == at
            for wire in (first, second):
                assert is_refused(await post(wire, again, case))
            # Others, which may begin anywhere, find the room that is left.
            assert (await post(second, server.new_session(), case)).status == 200

    asyncio.run(test())


def test_who_has_to_begin_at_a_full_worker_is_refused_at_once_and_holds_up_nobody() -> None:
    async def test() -> None:
        options = ("--max-sessions-per-worker", "1", "--queue", "60", "--place", "balanced")
        async with limited(*options) as (server, wires, case), server.wires() as more:
            first, second = wires.values()
            again = server.new_session()
            await began_and_ended(first, again, case)
            held = [server.new_session(), server.new_session()]
            assert [(await post(first, each, case)).status for each in held] == [200, 200]
            for wire in (first, second):
                assert is_refused(await post(wire, again, case))
            waiting = asyncio.create_task(post(next(iter(more.values())), server.new_session(), case))
            await waits(server, 1)
            for wire in (first, second):
                assert is_refused(await post(wire, again, case))
            assert (await post(first, held[1], case, "/end")).status == 200
            assert (await waiting).status == 200

    asyncio.run(test())


def test_a_queue_before_the_limit_of_each_worker_lets_in_whoever_finds_room_anywhere() -> None:
    async def test() -> None:
        options = ("--max-sessions-per-worker", "1", "--queue", "60", "--place", "balanced")
        async with limited(*options) as (server, wires, case):
            first, second = wires.values()
            held = [server.new_session(), server.new_session()]
            # Both from one worker: the second one finds room at the other.
            assert [(await post(first, each, case)).status for each in held] == [200, 200]
            waiting = asyncio.create_task(post(first, server.new_session(), case))
            await waits(server, 1)
            assert (await post(second, held[1], case, "/end")).status == 200
            assert (await waiting).status == 200

    asyncio.run(test())


def test_a_server_that_stops_does_not_wait_for_its_queue() -> None:
    async def test() -> None:
        options = ("--max-sessions", "1", "--queue", "600", "--place", "balanced")
        async with limited(*options) as (server, wires, case):
            first, second = wires.values()
            assert (await post(first, server.new_session(), case)).status == 200
            waiting = asyncio.create_task(post(second, server.new_session(), case))
            await waits(server, 1)
            os.kill(server.server.pid, signal.SIGTERM)
            assert is_refused(await waiting)
            assert await server.server.wait() == 0

    asyncio.run(test())
