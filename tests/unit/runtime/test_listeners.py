"""Who may listen on a port, and on which sockets."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.runtime.listeners import Listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="one socket for all slots elsewhere")


def bound(address: tuple[str, int] = ("127.0.0.1", 0), family: int = socket.AF_INET) -> socket.socket:
    """As `RunConfig.bind_socket` binds it."""
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


@pytest.fixture
def first() -> Iterator[Listeners]:
    with Listeners(bound()) as listeners:
        yield listeners


def address_of(listeners: Listeners) -> tuple[str, int]:
    host, port = listeners.bound.getsockname()[:2]
    return host, port


def test_each_slot_has_a_socket_of_its_own_at_one_address(first: Listeners) -> None:
    address = address_of(first)
    taken = [first.take() for _ in range(4)]
    assert not first.shared
    assert {each.socket.getsockname() for each in taken} == {address}
    assert len({each.number for each in taken}) == len({each.socket for each in taken}) == 4
    for each in taken:
        each.socket.listen()
    assert address_of(first) == address
    added = first.take()
    added.socket.listen()
    assert added.number not in {each.number for each in taken}


def test_connections_reach_all_queues(first: Listeners) -> None:
    taken = [first.take().socket for _ in range(2)]
    for each in taken:
        each.listen(100)
        each.setblocking(False)
    clients = [socket.create_connection(address_of(first), timeout=10) for _ in range(40)]
    reached = [sum(1 for _ in accepted(each)) for each in taken]
    for client in clients:
        client.close()
    assert sum(reached) == 40
    assert min(reached) > 0


def accepted(listening: socket.socket) -> Iterator[None]:
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return
        yield


def test_a_second_server_on_the_port_has_one_socket_that_cannot_listen_beside_the_first(first: Listeners) -> None:
    mine = [first.take().socket for _ in range(2)]
    with Listeners(bound(address_of(first))) as second:  # neither listens yet, so it may be bound
        assert second.shared
        assert second.take() is second.take()
        mine[0].listen()
        with pytest.raises(OSError, match="in use") as refused:
            second.take().socket.listen()
        assert refused.value.errno == errno.EADDRINUSE
        mine[1].listen()
    with pytest.raises(OSError, match="in use"):
        bound(address_of(first))


def test_if_the_second_is_quicker_it_is_the_first_that_cannot(first: Listeners) -> None:
    mine = first.take().socket
    with Listeners(bound(address_of(first))) as second:
        second.take().socket.listen()
        with pytest.raises(OSError, match="in use"):
            mine.listen()


def test_a_port_is_free_again_once_its_server_has_closed() -> None:
    with Listeners(bound()) as one:
        one.take().socket.listen()
        address = address_of(one)
    with Listeners(bound(address)) as other:
        other.take().socket.listen()
        assert not other.shared


def test_a_socket_that_was_given_back_is_the_next_new_slots(first: Listeners) -> None:
    taken = first.take()
    other = first.take()
    first.give_back(taken)
    assert first.spare == [taken]
    assert first.take() is taken
    assert first.spare == []
    assert first.take() not in (taken, other)


def test_a_unix_socket_is_shared(tmp_path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(tmp_path / "public"))
    with Listeners(made) as listeners:
        assert listeners.shared
        assert listeners.take().socket is made
        listeners.give_back(listeners.take())
        assert listeners.take().socket is made


def test_ipv6_has_sockets_of_its_own_too() -> None:
    try:
        made = bound(("::1", 0), socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with Listeners(made) as listeners:
        taken = [listeners.take().socket for _ in range(2)]
        for each in taken:
            each.listen()
        assert not listeners.shared
        assert taken[0].getsockname()[:2] == taken[1].getsockname()[:2] == address_of(listeners)
