"""RL servers do what their OpenAPI schemas say, whatever they are sent: Schemathesis generates it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.running import HOMING, ROOT, running
from tests.support.served import ECOSYSTEM

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]

RUN, SERVE = (*HOMING, "run"), (*HOMING, "rl", "serve")
SERVERS = {
    "resources": (RUN, ("tests.support.rl_servers:counter_mcp",)),
    "every space": (SERVE, ("tests.support.rl_envs:Every-v0",)),
    "counting": (SERVE, ("tests.support.rl_envs:Count-v0",)),
    "agent": (RUN, ("tests.support.rl_agents:sandboxed", "--factory")),
    "environment": (RUN, ("tests.support.rl_agents:alone", "--factory")),
}


# A schema cannot say that the names in a list differ.
NAMES_MAY_REPEAT = """
[[operations]]
include-path = "/v1/agent_sessions"
[operations.checks.positive_data_acceptance]
enabled = false
"""


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_does_what_its_schema_says(name: str, tmp_path: Path) -> None:
    command, app = SERVERS[name]
    if name == "agent":
        (tmp_path / "schemathesis.toml").write_text(NAMES_MAY_REPEAT)
    with running(*app, "--workers", "2", "--no-access-log", cwd=ROOT, command=command) as server:
        server.wait_for("all 2 workers are ready")
        done = subprocess.run(
            [
                str(ECOSYSTEM / "schemathesis"),
                "run",
                f"http://127.0.0.1:{server.port}/openapi.json",
                "--max-examples=30",
                "--seed=1",
                "--continue-on-failure",
                "--suppress-health-check=all",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert "Operations:" in done.stdout
        assert server.stop() == 0
        assert "Traceback" not in server.log
