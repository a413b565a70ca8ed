"""`homing run` that cannot serve: one line on stderr, an exit code, and nothing left behind."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.running import ROOT, refused, running

APP = "tests.processes.apps:app"
LineOf = Callable[..., str]
TWO = ("--workers", "2", "--session", "cookie:visit")


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where run directories are made: seen to be empty again at the end."""
    place = tmp_path_factory.mktemp("p")
    place.chmod(0o700)
    yield place
    assert list(place.iterdir()) == []


@pytest.fixture
def line_of(place: Path) -> LineOf:
    def run(*arguments: str, code: int, cwd: Path = ROOT) -> str:
        exit_code, lines = refused("run", "--port", "0", *arguments, cwd=cwd, env={"XDG_RUNTIME_DIR": str(place)})
        assert len(lines) == 1, "\n".join(lines)
        assert lines[0].startswith("homing: ")
        assert exit_code == code
        return lines[0]

    return run


@pytest.mark.parametrize("workers", [("--workers", "1"), TWO])
def test_an_app_that_cannot_be_imported(line_of: LineOf, workers: tuple[str, ...]) -> None:
    assert 'Could not import module "nowhere_at_all"' in line_of("nowhere_at_all:app", *workers, code=3)


def test_an_app_or_a_host_whose_name_is_no_text(line_of: LineOf) -> None:
    assert "cannot load \\udcff:app" in line_of("\udcff:app", *TWO, code=3)
    assert "--host \\udcff: it cannot be resolved" in line_of(APP, *TWO, "--host", "\udcff", code=3)


def test_an_app_whose_import_fails(line_of: LineOf, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import os\nKEY = os.environ['HOMING_NO_SUCH']\n")
    line = line_of("shop:app", *TWO, code=3, cwd=tmp_path)
    assert "KeyError: 'HOMING_NO_SUCH' (shop.py:2)" in line
    assert 'python -c "import shop"' in line


@pytest.mark.parametrize("workers", [("--workers", "1"), TWO])
def test_an_app_whose_import_fails_after_it_has_begun_a_thread(
    line_of: LineOf, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """A scheduler, say: Python waits for such a thread, and nobody would hear of the failure."""
    (tmp_path / "shop.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise ValueError('closed today')\n"
    )
    assert "ValueError: closed today (shop.py:3)" in line_of("shop:app", *workers, code=3, cwd=tmp_path)


@pytest.mark.parametrize("workers", [("--workers", "1"), TWO])
def test_an_app_whose_import_raises_what_is_no_exception(
    line_of: LineOf, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "shop.py").write_text("import asyncio\nraise asyncio.CancelledError('half-way')\n")
    assert "CancelledError: half-way (shop.py:2)" in line_of("shop:app", *workers, code=3, cwd=tmp_path)


def test_several_workers_and_no_way_to_tell_sessions(line_of: LineOf) -> None:
    line = line_of(APP, "--workers", "2", code=2)
    for choice in ("cookie:NAME", "signed-cookie:NAME:KEY", "--preset mcp", "--no-sessions"):
        assert choice in line


def test_an_app_that_routes_itself_and_no_sessions(line_of: LineOf) -> None:
    line = line_of("tests.processes.apps:routed", "--workers", "2", "--no-sessions", code=2)
    assert "--no-sessions: the app routes itself" in line
    assert "leave out --no-sessions" in line


def test_several_workers_and_an_mcp_server_without_its_preset(line_of: LineOf, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "async def app(scope, receive, send): ...\n"
        "class Server:\n    def streamable_http_app(self):\n        return app\n\nmcp = Server()\n"
    )
    assert "an MCP server needs --preset mcp" in line_of("server:mcp", "--workers", "2", code=2, cwd=tmp_path)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_app_whose_start_up_fails_is_uvicorns_exit_code(place: Path, tmp_path: Path, workers: str) -> None:
    (tmp_path / "fail").touch()
    code, lines = refused(
        *("run", "--port", "0", APP, "--workers", workers, "--session", "cookie:visit"),
        cwd=ROOT,
        env={"TEST_FAIL_IF": str(tmp_path / "fail"), "XDG_RUNTIME_DIR": str(place)},
    )
    assert code == 3
    assert lines[-1] == "homing: the app's start-up failed; its own message is above"
    assert "RuntimeError: the test wants this start-up to fail" in lines


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_is_named(line_of: LineOf, workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = line_of(APP, "--workers", workers, "--session", "cookie:visit", "--port", str(port), code=3)
    assert f"port {port}" in line
    assert "Address already in use" in line


def test_a_run_directory_in_use_by_another_server(line_of: LineOf, tmp_path: Path) -> None:
    with running(APP, *TWO, "--run-dir", str(tmp_path / "run"), cwd=ROOT) as server:
        server.wait_for("all 2 workers are ready")
        assert "is in use by another server" in line_of(APP, *TWO, "--run-dir", str(tmp_path / "run"), code=2)
        assert server.stop() == 0
    assert not (tmp_path / "run").exists()
