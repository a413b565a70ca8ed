"""No text of a client, a peer or a record is ever part of a path that leads out of the run directory."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FEW, MANY = 150, 5_000


def watched(count: int) -> dict[str, Any]:
    seed = os.environ.get("HOMING_SEED", str(secrets.randbits(32)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.path_watch", str(count), seed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110 if count == FEW else 900,
    )
    assert done.returncode == 0, f"HOMING_SEED={seed}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["outside"], f"HOMING_SEED={seed}: {found}"
    return found


def test_no_fuzzed_id_header_or_worker_name_leads_out_of_the_run_directory() -> None:
    found = watched(FEW)
    # It was seen at all: records looked up and made, and a worker that is not there connected to.
    for what in ("readlink", "os.symlink", "os.rename", "socket.connect"):
        assert found["seen"].get(what, 0) > 0, found
    assert found["statuses"].get("200", 0) > FEW, found
    assert found["statuses"].get("503", 0) > FEW / 4, found  # records that name nobody
    assert set(found["statuses"]) <= {"200", "400", "404", "410", "422", "503"}, found


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_five_thousand_fuzzed_texts_lead_nowhere_else() -> None:
    watched(MANY)


def test_a_path_that_leads_out_is_seen() -> None:
    """The watch itself: a planted call with a client's text as a path."""
    code = (
        "import sys, os; from tests.support.path_watch import Calls\n"
        "calls = Calls('/run/x'); sys.addaudithook(calls.audit); os.readlink = calls.wrapped('readlink'); calls.on = True\n"
        "for path in ('/etc/passwd', '../x', '/run/x/../y', '/run/x/session-owners/../../z'):\n"
        "    for look in (open, os.readlink, os.listdir):\n"
        "        try: look(path)\n"
        "        except OSError: pass\n"
        "calls.on = False\n"
        "print(len(calls.outside))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "12", done
