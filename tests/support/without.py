"""The command line as it is where some packages are not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support.running import ROOT, environment

_BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({packages!r}))  # importing any of them raises ImportError
from homing.cli import main
main({arguments!r})
"""


def homing_without(
    packages: Sequence[str], *arguments: str, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`homing ARGUMENTS`, to its end, in a process in which these packages cannot be imported."""
    code = _BLOCKED.format(packages=tuple(packages), arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(env), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
