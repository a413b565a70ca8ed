"""What servers of browser sessions are called by `homing ps`; none of them starts a browser for that."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.support.running import HOMING, ROOT, environment, running

from homing.web.chromium.binary import CHROMIUM_ENV


@pytest.mark.parametrize("command", ["serve", "episodes"])
def test_ps_calls_the_server_as_it_was_started(command: str, tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    options = ("--tasks", "miniwob", "--workers", "2")
    env = {CHROMIUM_ENV: str(program)}
    with running(*options, cwd=ROOT, env=env, command=(*HOMING, "web", command)) as server:
        server.wait_for("all 2 workers are ready")
        shown = subprocess.run(
            [*HOMING, "ps", server.run_directory, "--json"],
            env=environment(), capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert [each["app"] for each in json.loads(shown.stdout)] == [f"web {command} miniwob"]
