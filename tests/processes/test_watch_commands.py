"""`homing ps`, `homing top` and `homing drain` as their user has them: names as the log prints them, terminals, and pipes."""

from __future__ import annotations

import socket

import pytest
from tests.processes.test_watch import APP, homing, place
from tests.support.running import ROOT, running

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
        for name in (printed[1], f"{printed[1]}/", printed[2], f"::1:{printed[3]}"):
            for command in (("ps", name), ("ps", name, "--sessions"), ("top", name, "--seconds", "0")):
                shown = homing(*command, env=place)
                assert shown.returncode == 0, shown.stderr
                assert f"::1:{printed[3]}" in shown.stdout
            assert "no worker of" in homing("drain", name, "nobody", env=place).stderr
        for other in (f"[::2]:{printed[3]}", f"http://[::1]:{printed[3]}/app", "[::1]"):
            assert "no running server is called" in homing("ps", other, env=place).stderr
