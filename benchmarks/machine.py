"""What the figures depend on: the machine, the versions, the commit, the date. Kept with the raw rounds."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("homing", "uvicorn", "uvloop", "httptools", "starlette", "itsdangerous", "msgspec", "aiohttp")


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run(
        [git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or None


def described(**versions: str | None) -> dict[str, Any]:
    """The date and the machine, as JSON; `versions` are of programs that are no Python packages."""
    known: dict[str, str | None] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
            "kernel": platform.release(),
            "python": platform.python_version(),
            "versions": {**known, **versions},
            "commit": commit(),
        },
    }


def text(result: dict[str, Any]) -> str:
    """One paragraph of what `described` gave."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{result['date']}, commit {machine['commit'] or 'unknown'}. {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_mib']} MiB, Linux {machine['kernel']}, Python {machine['python']}; {versions}."
    )
