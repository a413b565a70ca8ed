"""`homing run` that cannot serve: one line on stderr, an exit code, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.running import ROOT, refused, running

APP = "tests.processes.apps:app"
TWO = ("--workers", "2", "--session", "cookie:visit")


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No run directory more than before, wherever they are made."""

    def places() -> set[str]:
        bases = [
            base for base in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm", "/tmp") if base and os.path.isdir(base)
        ]
        return {
            os.path.join(base, name)
            for base in bases
            for name in os.listdir(base)
            if name.startswith("homing-") and _is_live_or_old(name)
        }

    before = places()
    yield
    assert places() <= before


def _is_live_or_old(name: str) -> bool:
    # Other tests run servers beside this one: only directories of processes that are gone count as left behind.
    number = name.split("-")[1]
    return number.isdigit() and not os.path.exists(f"/proc/{number}")


def line_of(*arguments: str, code: int, env: dict[str, str | None] | None = None, cwd: Path = ROOT) -> str:
    with nothing_left():
        exit_code, lines = refused("run", "--port", "0", *arguments, cwd=cwd, env=env)
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("homing: ")
    assert exit_code == code
    return lines[0]


@pytest.mark.parametrize("workers", [("--workers", "1"), TWO])
def test_an_app_that_cannot_be_imported(workers: tuple[str, ...]) -> None:
    assert 'Could not import module "nowhere_at_all"' in line_of("nowhere_at_all:app", *workers, code=3)
    assert 'Attribute "nothing" not found' in line_of("tests.processes.apps:nothing", *workers, code=3)


def test_an_app_whose_import_fails(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import os\nKEY = os.environ['HOMING_NO_SUCH']\n")
    line = line_of("shop:app", *TWO, code=3, cwd=tmp_path)
    assert "KeyError: 'HOMING_NO_SUCH' (shop.py:2)" in line
    assert 'python -c "import shop"' in line


def test_several_workers_and_no_way_to_tell_sessions() -> None:
    line = line_of(APP, "--workers", "2", code=2)
    for choice in ("cookie:NAME", "signed-cookie:NAME:KEY", "--preset mcp", "--no-sessions"):
        assert choice in line


def test_several_workers_and_an_mcp_server_without_its_preset(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "async def app(scope, receive, send): ...\n"
        "class Server:\n    def streamable_http_app(self):\n        return app\n\nmcp = Server()\n"
    )
    assert "an MCP server needs --preset mcp" in line_of("server:mcp", "--workers", "2", code=2, cwd=tmp_path)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_app_whose_start_up_fails_is_uvicorns_exit_code(tmp_path: Path, workers: str) -> None:
    (tmp_path / "fail").touch()
    with nothing_left():
        code, lines = refused(
            "run", "--port", "0", APP, "--workers", workers, "--session", "cookie:visit",
            cwd=ROOT, env={"TEST_FAIL_IF": str(tmp_path / "fail")},
        )  # fmt: skip
    assert code == 3
    assert lines[-1] == "homing: the app's start-up failed; its own message is above"
    assert "RuntimeError: the test wants this start-up to fail" in lines


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_is_named(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = line_of(APP, "--workers", workers, "--session", "cookie:visit", "--port", str(port), code=3)
    assert f"port {port}" in line
    assert "Address already in use" in line


def test_a_unix_socket_path_in_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    assert f"--uds {tmp_path / 's'}" in line_of(APP, *TWO, "--uds", str(tmp_path / "s"), code=3)


def test_a_run_directory_that_is_too_open(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    line = line_of(APP, *TWO, "--run-dir", str(open_to_all), code=2)
    assert str(open_to_all) in line
    assert "0700" in line
    assert list(open_to_all.iterdir()) == []


def test_a_run_directory_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert "symbolic link" in line_of(APP, *TWO, "--run-dir", str(tmp_path / "link"), code=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory that belongs to another user")
def test_a_run_directory_that_is_not_ours(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    assert "belongs to user 65534" in line_of(APP, *TWO, "--run-dir", str(theirs), code=2)


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_socket_path_that_is_too_long_is_named_with_its_limit(tmp_path: Path, character: str) -> None:
    deep = tmp_path / (character * (120 // len(character.encode())))
    deep.mkdir(mode=0o700)
    line = line_of(APP, *TWO, "--run-dir", str(deep), code=2)
    assert str(deep) in line
    assert "107" in line


def test_a_run_directory_in_use_by_another_server(tmp_path: Path) -> None:
    with running(APP, *TWO, "--run-dir", str(tmp_path / "run"), cwd=ROOT) as server:
        server.wait_for("all 2 workers are ready")
        assert "is in use by another server" in line_of(APP, *TWO, "--run-dir", str(tmp_path / "run"), code=2)
        assert server.stop() == 0
    assert not (tmp_path / "run").exists()


def test_certificates_that_cannot_be_read() -> None:
    line = line_of(APP, *TWO, "--ssl-certfile", "/nowhere/cert.pem", "--ssl-keyfile", "/nowhere/key.pem", code=3)
    assert "/nowhere/cert.pem" in line


def test_an_event_loop_that_is_not_installed_or_not_asyncios() -> None:
    assert "--loop nowhere_at_all:loop" in line_of(APP, *TWO, "--loop", "nowhere_at_all:loop", code=2)
    assert "no asyncio event loop" in line_of(APP, *TWO, "--loop", "builtins:dict", code=2)


def test_an_environment_file_that_is_missing(tmp_path: Path) -> None:
    assert "does not exist" in line_of(APP, *TWO, "--env-file", str(tmp_path / "none"), code=2)


def test_a_log_configuration_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("{")
    assert "the server's options cannot be used" in line_of(
        APP, *TWO, "--log-config", str(tmp_path / "log.json"), code=2
    )
