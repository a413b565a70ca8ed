"""Descriptors on their way between two workers, and what becomes of them when the other end is not there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from homing.rundir import new_worker_id, worker_handoff_path
from homing.runtime.handoff import MAX_MOVES, Handoffs
from homing.types import WorkerId


class Adopted:
    """What came, in order; the sockets are closed by `close`."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[tuple[socket.socket, int]] = asyncio.Queue()

    async def __call__(self, connection: socket.socket, moves: int) -> None:
        self.came.put_nowait((connection, moves))


def connected() -> tuple[socket.socket, socket.socket]:
    """A client and the server's end of its TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=10)
        served, _ = listener.accept()
    return client, served


def test_a_given_connection_is_served_elsewhere_with_what_the_client_has_sent_meanwhile(tmp_path: Path) -> None:
    async def play() -> None:
        adopted, one, two = Adopted(), new_worker_id(), new_worker_id()
        giving, taking = Handoffs(str(tmp_path), one, adopted), Handoffs(str(tmp_path), two, adopted)
        client, served = connected()
        assert giving.give(two, served.fileno(), 3)
        served.close()
        client.sendall(b"next")
        connection, moves = await adopted.came.get()
        assert (connection.recv(9), moves, connection.getpeername()) == (b"next", 3, client.getsockname())
        assert not os.get_inheritable(connection.fileno())
        assert (giving.counters.given, taking.counters.adopted) == (1, 1)
        for each in (client, connection):
            each.close()
        await giving.aclose()
        await taking.aclose()

    asyncio.run(play())


def test_a_connection_that_two_full_workers_have_no_room_for_stays_at_the_first(tmp_path: Path) -> None:
    async def play() -> None:
        here, there, one, two = Adopted(), Adopted(), new_worker_id(), new_worker_id()
        giving = Handoffs(str(tmp_path), one, here, lambda _: False)
        taking = Handoffs(str(tmp_path), two, there, lambda _: False)
        client, served = connected()
        assert giving.give(two, served.fileno(), 1)
        served.close()
        async with asyncio.timeout(10):
            connection, moves = await here.came.get()
        assert (moves, connection.getpeername()) == (MAX_MOVES, client.getsockname())
        assert there.came.empty()
        for counters in (giving.counters, taking.counters):
            assert (counters.given, counters.adopted) == (1, 1)
        for each in (client, connection):
            each.close()
        await giving.aclose()
        await taking.aclose()

    asyncio.run(play())


@pytest.mark.parametrize("how", ["never-there", "stopped", "died"])
def test_a_connection_stays_where_it_is_if_the_other_worker_is_not_there(tmp_path: Path, how: str) -> None:
    async def play() -> None:
        adopted, owner = Adopted(), new_worker_id()
        giving = Handoffs(str(tmp_path), new_worker_id(), adopted)
        if how == "stopped":
            await Handoffs(str(tmp_path), owner, adopted).aclose()
        elif how == "died":  # its socket's file stays
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
                dead.bind(worker_handoff_path(str(tmp_path), owner))
        client, served = connected()
        assert not giving.give(owner, served.fileno(), 1)
        served.sendall(b"still here")
        assert client.recv(99) == b"still here"
        assert giving.counters.stayed == 1
        for each in (client, served):
            each.close()
        await giving.aclose()

    asyncio.run(play())


def test_a_worker_that_dies_before_it_adopts_closes_the_connection_and_no_reply_begins(tmp_path: Path) -> None:
    async def play() -> None:
        owner = new_worker_id()
        giving = Handoffs(str(tmp_path), new_worker_id(), Adopted())
        client, served = connected()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dying:
            dying.bind(worker_handoff_path(str(tmp_path), owner))
            assert giving.give(owner, served.fileno(), 1)
            served.close()
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(9) == b""
        client.close()
        await giving.aclose()

    asyncio.run(play())


GIVES_AND_DIES = """
import asyncio, os, signal, sys
from homing.rundir import new_worker_id
from homing.runtime.handoff import MAX_MOVES, Handoffs

async def give(directory, owner, descriptor):
    if Handoffs(directory, new_worker_id(), None).give(owner, int(descriptor), 1):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(give(*sys.argv[1:]))
"""


def test_a_connection_whose_giver_dies_before_it_is_adopted_is_served_where_it_was_given_to(tmp_path: Path) -> None:
    async def play() -> None:
        adopted, owner = Adopted(), new_worker_id()
        taking = Handoffs(str(tmp_path), owner, adopted)
        client, served = connected()
        command = [sys.executable, "-c", GIVES_AND_DIES, str(tmp_path), owner, str(served.fileno())]
        # It waits, and with it this loop: nothing is adopted before the giver is dead.
        died = subprocess.run(command, pass_fds=[served.fileno()], check=False, timeout=60)
        assert died.returncode == -signal.SIGKILL
        served.close()
        client.sendall(b"next")
        connection, moves = await adopted.came.get()
        assert (connection.recv(9), moves) == (b"next", 1)
        connection.sendall(b"answered")
        assert client.recv(99) == b"answered"
        for each in (client, connection):
            each.close()
        await taking.aclose()

    asyncio.run(play())


def test_a_full_queue_leaves_the_connection_where_it_is(tmp_path: Path) -> None:
    async def play() -> None:
        owner = new_worker_id()
        giving = Handoffs(str(tmp_path), new_worker_id(), Adopted())
        client, served = connected()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as busy:
            busy.bind(worker_handoff_path(str(tmp_path), owner))
            given = 0
            while giving.give(owner, served.fileno(), 1):
                given += 1
                assert given < 100_000
        assert given > 0
        served.sendall(b"still here")
        assert client.recv(99) == b"still here"
        for each in (client, served):
            each.close()
        await giving.aclose()

    asyncio.run(play())


def test_a_connection_that_cannot_be_served_is_closed(tmp_path: Path) -> None:
    async def fail(connection: socket.socket, moves: int) -> None:
        raise OSError("the client has left")

    async def play() -> None:
        owner = new_worker_id()
        giving, taking = Handoffs(str(tmp_path), new_worker_id(), fail), Handoffs(str(tmp_path), owner, fail)
        client, served = connected()
        assert giving.give(owner, served.fileno(), 1)
        served.close()
        await taking.aclose()
        assert client.recv(9) == b""
        assert taking.counters.lost == 1
        client.close()
        await giving.aclose()

    asyncio.run(play())


def test_closing_adopts_what_has_come_and_takes_nothing_after(tmp_path: Path) -> None:
    async def play() -> None:
        adopted, owner = Adopted(), new_worker_id()
        giving, taking = Handoffs(str(tmp_path), new_worker_id(), adopted), Handoffs(str(tmp_path), owner, adopted)
        pairs = [connected() for _ in range(40)]
        given = sum(giving.give(owner, served.fileno(), 1) for _, served in pairs)
        assert given > 0
        await taking.aclose()
        await taking.aclose()
        assert adopted.came.qsize() == given
        assert not giving.give(owner, pairs[0][1].fileno(), 1)
        assert not os.path.lexists(worker_handoff_path(str(tmp_path), owner))
        while not adopted.came.empty():
            adopted.came.get_nowait()[0].close()
        for pair in pairs:
            for each in pair:
                each.close()
        await giving.aclose()

    asyncio.run(play())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what comes in this moment is lost")
def test_a_connection_that_comes_behind_the_last_look_of_one_that_stops_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        adopted, owner = Adopted(), new_worker_id()
        giving, taking = Handoffs(str(tmp_path), new_worker_id(), adopted), Handoffs(str(tmp_path), owner, adopted)
        path = worker_handoff_path(str(tmp_path), owner)
        client, served = connected()
        given = []
        look = taking._take

        def looks_and_then_one_comes() -> bool:
            more = look()
            if not more:
                given.append(giving.give(owner, served.fileno(), 1))
            return more

        monkeypatch.setattr(taking, "_take", looks_and_then_one_comes)
        # Its giver has found the socket before its name went.
        monkeypatch.setattr(os, "unlink", lambda _: None)
        await taking.aclose()
        monkeypatch.undo()
        os.unlink(path)
        assert given == [False]
        assert giving.counters.stayed == 1
        for each in (client, served):
            each.close()
        await giving.aclose()

    asyncio.run(play())


def test_what_came_to_one_that_takes_no_more_can_be_given_further(tmp_path: Path) -> None:
    async def play() -> None:
        adopted, one, two = Adopted(), new_worker_id(), new_worker_id()
        giving, stopping = Handoffs(str(tmp_path), new_worker_id(), adopted), Handoffs(str(tmp_path), one, adopted)
        taking = Handoffs(str(tmp_path), two, adopted)
        client, served = connected()
        assert giving.give(one, served.fileno(), 1)
        served.close()
        await stopping.taken()
        connection, _ = adopted.came.get_nowait()
        assert stopping.give(two, connection.fileno(), 1)
        connection.close()
        again, _ = await adopted.came.get()
        assert again.getpeername() == client.getsockname()
        for each in (client, again):
            each.close()
        for end in (giving, stopping, taking):
            await end.aclose()

    asyncio.run(play())


def test_a_forked_child_has_no_copy_of_the_sockets(tmp_path: Path) -> None:
    async def play() -> None:
        handoffs = Handoffs(str(tmp_path), WorkerId("a" * 32), Adopted())
        mine = open_sockets()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"%d" % open_sockets())
            os._exit(0)
        os.waitpid(child, 0)
        inherited = int(os.read(reading, 9))
        os.close(reading)
        os.close(writing)
        assert inherited == mine - 2
        await handoffs.aclose()

    asyncio.run(play())


def open_sockets() -> int:
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return found
