"""`homing run` that cannot have its run directory, files or address: refused before any worker starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from homing.cli import main

APP = "nowhere_at_all:app"
TWO = ("--workers", "2", "--session", "cookie:visit", "--port", "0")

LineOf = Callable[..., str]


@pytest.fixture
def line_of(capsys: pytest.CaptureFixture[str]) -> LineOf:
    def run(*arguments: str, code: int) -> str:
        with pytest.raises(SystemExit) as exited:
            main(["run", *arguments])
        err = capsys.readouterr().err
        assert exited.value.code == code
        assert err.startswith("homing: ")
        assert err.count("\n") == 1
        return err

    return run


def test_a_run_directory_that_is_too_open(line_of: LineOf, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    line = line_of(APP, *TWO, "--run-dir", str(open_to_all), code=2)
    assert str(open_to_all) in line
    assert "0700" in line
    assert list(open_to_all.iterdir()) == []


def test_a_run_directory_that_is_a_link(line_of: LineOf, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    assert "symbolic link" in line_of(APP, *TWO, "--run-dir", str(tmp_path / "link"), code=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory that belongs to another user")
def test_a_run_directory_that_is_not_ours(line_of: LineOf, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)
    assert "belongs to user 65534" in line_of(APP, *TWO, "--run-dir", str(theirs), code=2)


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_socket_path_that_is_too_long_is_named_with_its_limit(
    line_of: LineOf, tmp_path: Path, character: str
) -> None:
    deep = tmp_path / (character * (120 // len(character.encode())))
    deep.mkdir(mode=0o700)
    line = line_of(APP, *TWO, "--run-dir", str(deep), code=2)
    assert str(deep) in line
    assert "107" in line


def test_a_run_directory_that_is_too_long_is_not_made(line_of: LineOf, tmp_path: Path) -> None:
    assert "107" in line_of(APP, *TWO, "--run-dir", str(tmp_path / ("x" * 110)), code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sites", "episodes", "page", "board", "permits-2026"])
def test_a_users_file_that_is_called_as_one_of_homings_stays(line_of: LineOf, tmp_path: Path, name: str) -> None:
    """`--run-dir .`, say, in a directory with everything else of a user's; a server that has stopped had left its lock."""
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (own / "server.lock").touch()
    if name in ("sites", "episodes"):
        (own / name).mkdir()
        (own / name / "mine").touch()
    else:
        (own / name).touch()
    before = sorted(own.rglob("*"))
    assert f"has {name!r} in it, which may be yours" in line_of(APP, *TWO, "--run-dir", str(own), code=2)
    assert sorted(own.rglob("*")) == before


@pytest.mark.parametrize("place", ["file", "file/below", "none/below"])
def test_a_run_directory_that_cannot_be_says_what_to_do(line_of: LineOf, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    line = line_of(APP, *TWO, "--run-dir", str(tmp_path / place), code=2)
    assert str(tmp_path / place) in line
    assert "name another directory of yours with --run-dir or HOMING_SESSION_SOCKET_DIR, or leave it out" in line


def test_a_host_that_is_not_known_or_not_this_machines_is_not_taken_for_a_port_in_use(line_of: LineOf) -> None:
    hosts = {
        "no-such-host.invalid": "it cannot be resolved",
        "192.0.2.1": "it is no address of this",
        "é" * 70: "it cannot be resolved",
    }
    for host, said in hosts.items():
        for workers in (TWO, ("--port", "8123"), ("--port", "0")):
            line = line_of(APP, *workers, "--host", host, code=3)
            assert f"--host {host}: {said}" in line
            assert "such as 127.0.0.1" in line
            assert "stop what uses it" not in line


def test_an_environment_file_that_is_missing(line_of: LineOf, tmp_path: Path) -> None:
    assert "does not exist" in line_of(APP, *TWO, "--env-file", str(tmp_path / "none"), code=2)


def test_a_log_configuration_that_cannot_be_used(line_of: LineOf, tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("{")
    assert "the server's options cannot be used" in line_of(
        APP, *TWO, "--log-config", str(tmp_path / "log.json"), code=2
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_file_at_the_path_of_a_unix_socket_is_named_and_stays(line_of: LineOf, tmp_path: Path, workers: str) -> None:
    (tmp_path / "s").write_text("a user's")
    options = ("--workers", workers, "--session", "cookie:visit", "--uds", str(tmp_path / "s"))
    assert f"--uds {tmp_path / 's'}: Address already in use" in line_of(APP, *options, code=3)
    assert (tmp_path / "s").read_text() == "a user's"


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("place", ["none/s", "x" * 120])
def test_a_unix_socket_that_cannot_be_made_is_named(line_of: LineOf, tmp_path: Path, place: str, workers: str) -> None:
    line = line_of(APP, "--workers", workers, "--session", "cookie:visit", "--uds", str(tmp_path / place), code=3)
    assert f"cannot serve on --uds {tmp_path / place}" in line
    assert "at most 107 bytes" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--port 8714 --metrics-port 8714", "--port and --metrics-port are both 8714"),
        ("--port 8714 --dashboard-port 8714 --host 0.0.0.0", "--port and --dashboard-port are both 8714"),
        ("--port 8714 --metrics-port 8715 --dashboard-port 8715", "--dashboard-port and --metrics-port are both 8715"),
        ("--uds {tmp_path}/s --metrics-port 8715 --dashboard-port 8715", "--dashboard-port and --metrics-port"),
        ("--metrics-port 8000", "--port and --metrics-port are both 8000"),
    ],
)
def test_one_port_for_two_listeners_is_refused(line_of: LineOf, tmp_path: Path, options: str, said: str) -> None:
    line = line_of(APP, "--workers", "2", "--session", "cookie:a", *options.format(tmp_path=tmp_path).split(), code=2)
    assert said in line
    assert "(0: any)" in line


@pytest.mark.parametrize(
    "options",
    [
        "--port 0 --metrics-port 0 --dashboard-port 0",
        "--uds {tmp_path}/s --port 8714 --metrics-port 8714",
        "--host 192.0.2.1 --port 8714 --metrics-port 8714",
    ],
)
def test_ports_that_are_not_one_and_the_same_are_not_refused(line_of: LineOf, tmp_path: Path, options: str) -> None:
    """What is refused here comes after that: a run directory that cannot be."""
    (tmp_path / "file").touch()
    words = options.format(tmp_path=tmp_path).split()
    line = line_of(APP, "--workers", "2", "--session", "cookie:a", "--run-dir", str(tmp_path / "file"), *words, code=2)
    assert str(tmp_path / "file") in line
