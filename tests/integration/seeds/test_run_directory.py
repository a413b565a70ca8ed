"""The run directory in the seeds' way: the main process makes it, and its workers are given its path."""

from __future__ import annotations

import os
import stat

import pytest
from tests.support.seed_servers import seed_server

from homing import SESSION_SOCKET_DIR_ENV, create_session_socket_dir, worker_socket_path
from homing.rundir import remove_run_directory

pytestmark = pytest.mark.anyio


async def test_workers_meet_in_the_directory_that_the_main_process_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SESSION_SOCKET_DIR_ENV, raising=False)
    directory = create_session_socket_dir()
    try:
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        async with seed_server("resources", directory=directory) as served:
            first, second = served.workers
            sockets = [worker_socket_path(directory, each.id) for each in served.workers]
            assert [stat.S_IMODE(os.stat(each).st_mode) for each in sockets] == [0o600] * 2
            await first.post("/seed_session", {"resources_session_id": "s1"})
            reply = await second.post("/seed_session", {"resources_session_id": "s1"})
            assert reply.json()["worker"] == first.id
        assert not any(os.path.exists(each) for each in sockets)
        assert served.records() == 1  # it keeps naming the worker that exited
    finally:
        remove_run_directory(directory)
    assert not os.path.exists(directory)


def test_two_servers_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SESSION_SOCKET_DIR_ENV, raising=False)
    directories = [create_session_socket_dir() for _ in range(2)]
    for each in directories:
        remove_run_directory(each)
    assert len(set(directories)) == 2


def test_the_environment_names_the_directory(run_directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SESSION_SOCKET_DIR_ENV, run_directory)
    assert create_session_socket_dir() == run_directory
