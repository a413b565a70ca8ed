"""One server, one run directory: made, held, refused to others, and removed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.small_disk import fill, small_memory_disk

from homing.errors import RunDirectoryError
from homing.rundir import SERVER_LOCK, RunDirectory, new_worker_id, siblings_directory
from homing.runtime.control import Control
from homing.runtime.server_directory import open_server_directory
from homing.watch import Description, describe


def test_a_new_directory_is_ours_alone_and_removed_with_all_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOMING_SESSION_SOCKET_DIR", raising=False)
    with open_server_directory(None) as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        (Path(path) / "session-owners").mkdir()
        (Path(path) / "session-owners" / "record").symlink_to("nowhere")
    assert not os.path.lexists(path)


def test_it_is_removed_though_the_server_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_server_directory(str(tmp_path / "run")):
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()


def test_a_second_server_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    with open_server_directory(path):
        kept = Path(path) / f"{new_worker_id()}.sock"
        kept.touch()
        with pytest.raises(RunDirectoryError, match="is in use by another server"), open_server_directory(path):
            pass
        assert kept.exists()


def test_workers_that_outlived_their_server_are_not_joined(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with RunDirectory.open(str(tmp_path)) as directory:
        worker = new_worker_id()
        life = directory.hold_life(worker)
        with (
            pytest.raises(RunDirectoryError, match="is in use by 1 running workers"),
            open_server_directory(str(tmp_path)),
        ):
            pass
        assert directory.live_workers() == [worker]
        life.close()
    with open_server_directory(str(tmp_path)):
        assert {entry.name for entry in tmp_path.iterdir()} == {SERVER_LOCK}


def test_what_a_crashed_server_left_in_a_users_own_directory_is_not_believed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "session-owners").mkdir()
    (tmp_path / "session-owners" / "old").symlink_to("record")
    (tmp_path / f"{new_worker_id()}.life").touch()
    (tmp_path / "users.own").touch()
    with open_server_directory(str(tmp_path)):
        assert {entry.name for entry in tmp_path.iterdir()} == {SERVER_LOCK, "users.own"}
    assert (tmp_path / "users.own").exists()


def test_workers_of_any_launcher_leave_a_users_file_that_is_called_as_one_of_homings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "mine").touch()
    monkeypatch.setenv("HOMING_SESSION_SOCKET_DIR", str(tmp_path))
    with pytest.raises(RunDirectoryError, match="has 'sites' in it, which may be yours"):
        siblings_directory("an app")
    assert (tmp_path / "sites" / "mine").exists()


def test_what_a_killed_server_left_goes_though_it_is_called_as_everyones(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in (SERVER_LOCK, f"{new_worker_id()}.life", "page", "board"):
        (tmp_path / name).touch()
    with open_server_directory(str(tmp_path)):
        assert os.listdir(tmp_path) == [SERVER_LOCK]


@pytest.mark.parametrize("what", ["a directory", "a link"])
def test_what_is_no_file_is_no_lock_of_a_server(tmp_path: Path, what: str) -> None:
    tmp_path.chmod(0o700)
    lock = tmp_path / SERVER_LOCK
    if what == "a link":
        lock.symlink_to(tmp_path / "elsewhere")
    else:
        lock.mkdir()
    with pytest.raises(RunDirectoryError, match=f"{lock} cannot be made: .*; name another"), _server(tmp_path):
        pass
    assert os.listdir(tmp_path) == [SERVER_LOCK]


@pytest.mark.parametrize("what", ["a directory", "a link", "a file"])
def test_a_description_is_written_to_a_new_file_whatever_had_its_name(tmp_path: Path, what: str) -> None:
    path, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    path.mkdir(mode=0o700)
    new = path / "server.json.new"
    match what:
        case "a directory":
            new.mkdir()
        case "a link":
            new.symlink_to(elsewhere)
        case "a file":
            new.touch()
    with _server(path):
        assert (path / "server.json").read_bytes().startswith(b'{"pid":')
    assert os.listdir(path) == [SERVER_LOCK]
    assert not elsewhere.exists()


def test_a_named_directory_without_room_is_refused_by_its_name(tmp_path: Path) -> None:
    with small_memory_disk(tmp_path / "small", 16) as small:
        fill(small)
        path = small / "run"
        with pytest.raises(RunDirectoryError, match=f"{path}.* cannot be made: No space left on device"), _server(path):
            pass
        assert os.listdir(small) == ["filling"]


def test_a_read_only_directory_is_refused_by_its_name(tmp_path: Path) -> None:
    with small_memory_disk(tmp_path / "small", 16) as small:
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        for path in (small, small / "run"):
            with pytest.raises(RunDirectoryError, match=f"{path}.* cannot be made: Read-only"), _server(path):
                pass


@contextmanager
def _server(path: Path) -> Iterator[None]:
    """All that a supervisor makes in a run directory."""
    description = Description(os.getpid(), "127.0.0.1:8000", "app:app", workers=2, began=0, version="1")
    with open_server_directory(str(path)), Control(str(path)), describe(str(path), description):
        yield


@pytest.mark.parametrize("users_own", [True, False])
def test_a_server_that_stops_takes_nothing_from_one_whose_directory_is_now_at_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users_own: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    path = tmp_path / "run"
    if users_own:
        path.mkdir(mode=0o700)
    with ExitStack() as first:
        first.enter_context(_server(path))
        shutil.rmtree(path)
        with _server(path):
            (path / "session-owners").mkdir()
            first.close()
            assert set(os.listdir(path)) == {SERVER_LOCK, "control.sock", "server.json", "session-owners"}
            with (
                pytest.raises(RunDirectoryError, match="is in use by another server"),
                open_server_directory(str(path)),
            ):
                pass
    assert os.listdir(tmp_path) == []
