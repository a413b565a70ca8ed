"""`homing ps`, `homing top` and `homing drain` as their user has them: names as the log prints them, terminals, and pipes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import socket
import struct
import subprocess
import termios

import pytest
from tests.processes.test_watch import APP, ask, documents, homing, place, start, two_workers, until
from tests.support.running import HOMING, ROOT, environment, running, until_its_end

from homing.types import session_tag

__all__ = ["place"]

Place = dict[str, str | None]


def test_a_server_is_named_by_its_address_as_its_log_prints_it(place: Place) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with running(*APP, "--workers", "2", "--host", "::1", cwd=ROOT, env=place) as server:
        server.wait_for("all 2 workers are ready")
        [printed] = server.wait_for(r"Uvicorn running on (http://(\[::1\]:(\d+))) ")
        commands = (("ps",), ("ps", "--sessions"), ("top", "--seconds", "0"))
        for name, command in zip((printed[1], f"{printed[1]}/", printed[2]), commands, strict=True):
            shown = homing(command[0], name, *command[1:], env=place)
            assert shown.returncode == 0, shown.stderr
            assert printed[2] in shown.stdout
        assert "no worker of" in homing("drain", printed[2], "nobody", env=place).stderr
        for other in (f"[::2]:{printed[3]}", f"http://[::1]:{printed[3]}/app"):
            assert "no running server is called" in homing("ps", other, env=place).stderr


def test_whoever_asks_for_a_server_with_one_worker_is_told_that_those_are_not_listed(place: Place) -> None:
    with running(*APP, "--workers", "1", cwd=ROOT, env=place) as server:
        server.wait_for("Application startup complete")
        for command in (("ps",), ("ps", "--sessions"), ("top", "--seconds", "0"), ("drain",)):
            shown = homing(
                command[0], str(server.port), *command[1:], *(["any"] if command == ("drain",) else []), env=place
            )
            assert shown.returncode == 2
            assert f"no running server is called {server.port}; running: " in shown.stderr
            assert "a server with one worker routes nothing, and is not listed" in shown.stderr


def in_a_terminal(columns: int, *arguments: str, env: Place) -> tuple[int, str]:
    """The exit code of a command in a terminal of so many columns, and what is seen there, without its colours."""
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {"TERM": "xterm", "COLUMNS": None, "LINES": None, **env}
    with subprocess.Popen(
        [*HOMING, *arguments], cwd=ROOT, env=environment(settings), stdin=its, stdout=its, stderr=its
    ) as command:
        os.close(its)
        seen = until_its_end(terminal)
        return command.wait(60), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())


def rows(seen: str) -> list[list[str]]:
    """The cells of each worker's or session's row."""
    return [line.split() for line in seen.splitlines() if re.match("[0-9a-f]{8}", line)]


def test_a_terminal_shows_which_worker_and_session_is_which_however_narrow_it_is(place: Place) -> None:
    with two_workers(place) as server:
        port = str(server.port)
        made = [start(server.port) for _ in range(4)]
        assert ask(server.port, "DELETE", f"/sessions/{made[0]}")[0] == 200
        [found] = until(lambda: documents(place, port), lambda found: found[0]["open_sessions"] == 3)
        workers = {(each["worker"][:8], str(each["pid"])) for each in found["workers"]}
        for columns in (40, 80, 200):
            for command in (("ps", port), ("top", port, "--seconds", "0")):
                code, seen = in_a_terminal(columns, *command, env=place)
                assert code == 0, seen
                assert {tuple(row[:2]) for row in rows(seen)} == workers, seen
                assert ("left out for want of room: adopted" in " ".join(seen.split())) is (columns < 200), seen
            code, seen = in_a_terminal(columns, "ps", port, "--sessions", env=place)
            assert code == 0, seen
            assert {row[0] for row in rows(seen)} == {session_tag(each) for each in made}, seen
            assert {tuple(row[1:3]) for row in rows(seen)} <= workers, seen
            assert f"127.0.0.1:{port} " in in_a_terminal(columns, "ps", env=place)[1]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_top_into_a_pipe_says_what_it_sees_at_once_and_ends_when_its_reader_has_gone(
    options: tuple[str, ...], place: Place
) -> None:
    with (
        two_workers(place) as server,
        subprocess.Popen(
            [*HOMING, "top", str(server.port), *options],
            cwd=ROOT,
            env=environment({**place, "PYTHONUNBUFFERED": None}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as top,
    ):
        assert top.stdout is not None
        assert top.stderr is not None
        try:
            for _ in range(2):
                while f"127.0.0.1:{server.port}" not in (line := top.stdout.readline()):
                    assert line, top.stderr.read()
            top.stdout.close()
            # As `homing ps` and every other command of which nobody reads what it prints.
            assert (top.wait(30), top.stderr.read()) == (1, "")
        finally:
            top.kill()


@pytest.mark.parametrize(
    "encoding",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["of the streams", "of the locale"],
)
def test_a_terminal_without_utf_8_shows_the_rest(encoding: Place, place: Place) -> None:
    with two_workers(place, "--run-dir", f"{place['XDG_RUNTIME_DIR']}/zoë") as server:
        port = str(server.port)
        made = start(server.port)
        until(lambda: documents(place, port), lambda found: found[0]["open_sessions"] == 1)
        # What is cut has dots in its place.
        code, seen = in_a_terminal(40, "ps", port, "--sessions", env={**place, **encoding})
        assert (code, [row[0] for row in rows(seen)]) == (0, [session_tag(made)]), seen
        for command in (("ps", port), ("top", port, "--seconds", "0")):
            code, seen = in_a_terminal(200, *command, env={**place, **encoding})
            assert (code, len({row[0] for row in rows(seen)})) == (0, 2), seen
            assert re.search(r"/zo(\?|\\udcc3\\udcab)", "".join(seen.split())), seen
