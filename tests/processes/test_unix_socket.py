"""`homing run --uds`: the socket is this server's alone to make and to remove."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from tests.support.running import ROOT, refused, running

APP = "tests.processes.apps:app"
SESSIONS = ("--session", "cookie:visit")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_unix_socket_is_served_and_removed(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "public"
    with running(APP, "--workers", str(workers), *SESSIONS, "--uds", str(path), cwd=ROOT) as server:
        server.wait_for("Application startup complete", workers)
        server.wait_for("Uvicorn running on unix socket")
        assert b"200 OK" in get_from(path)
        # One worker's process ends by the signal that stopped it, as uvicorn's does.
        assert server.stop() == (-signal.SIGTERM if workers == 1 else 0)
    assert not path.exists()


def test_a_unix_socket_may_lie_where_a_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    with running(APP, "--workers", "2", *SESSIONS, "--uds", str(path), cwd=ROOT) as server:
        server.wait_for("all 2 workers are ready")
        assert b"200 OK" in get_from(path)
        assert server.stop() == 0


def get_from(path: Path) -> bytes:
    """What a server at a Unix socket answers."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(b"GET /who HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return client.makefile("rb").read()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_unix_socket_of_another_server_stays_that_servers(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "public"
    with running(APP, "--workers", "2", *SESSIONS, "--uds", str(path), cwd=ROOT) as server:
        server.wait_for("all 2 workers are ready")
        code, lines = refused("run", APP, "--workers", str(workers), *SESSIONS, "--uds", str(path), cwd=ROOT)
        assert (code, len(lines)) == (3, 1)
        assert f"cannot serve on --uds {path}: Address already in use" in lines[0]
        assert b"200 OK" in get_from(path)


def test_one_worker_takes_the_place_of_a_unix_socket_that_a_killed_server_left(tmp_path: Path) -> None:
    path = tmp_path / "public"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with running(APP, *SESSIONS, "--uds", str(path), cwd=ROOT) as server:
        server.wait_for("Uvicorn running on unix socket")
        assert b"200 OK" in get_from(path)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_has_taken_the_place_of_the_socket_meanwhile_stays(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "public"
    with running(APP, "--workers", str(workers), *SESSIONS, "--uds", str(path), cwd=ROOT) as server:
        server.wait_for("Application startup complete", workers)
        another = tmp_path / "another"
        another.write_text("not the server's")
        another.rename(path)
        server.stop()
    assert path.read_text() == "not the server's"
