"""Getting a Chromium where there is none: for commands that are to work at once, never for a server.

In this order: the one that is found; Playwright's own download; Debian's package, as root. What is tried is told, and each
try is bounded; where nothing helps, one line says what to install.

Not here: finding one (`binary.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from homing.errors import StartupError
from homing.web.chromium.binary import CHROMIUM_ENV, MISSING, Binary, find_binary
from homing.web.errors import BrowserStartError

_DOWNLOAD_SECONDS: Final = 300.0
_INSTALL_SECONDS: Final = 600.0
_PACKAGE: Final = "chromium-headless-shell"


def ensure_binary(tell: Callable[[str], None]) -> Binary:
    """The Chromium there is, or that can be got now. Takes minutes where it has to be fetched.

    Args:
        tell: Told a line before each try that takes a while.

    Raises:
        StartupError: there is none, and none can be got; says what to install.
    """
    if os.environ.get(CHROMIUM_ENV):
        try:
            return find_binary()
        except BrowserStartError as error:
            # Who has named one is not given another.
            raise StartupError(f"{CHROMIUM_ENV} names no Chromium that starts: leave it out, or {_hint()}") from error
    for fetch in (None, _download, _install_package):
        if fetch is not None and not fetch(tell):
            continue
        try:
            return find_binary()
        except BrowserStartError:
            continue
    raise StartupError(MISSING)


def _download(tell: Callable[[str], None]) -> bool:
    """Playwright's own, into its folder in the home directory."""
    if importlib.util.find_spec("playwright") is None:
        return False
    tell("no Chromium was found; downloading Playwright's ...")
    return _run(
        [sys.executable, "-m", "playwright", "install", "--no-progress", "--only-shell", "chromium"], _DOWNLOAD_SECONDS
    )


def _install_package(tell: Callable[[str], None]) -> bool:
    """Debian's, where this is Debian and we are root."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        return False
    tell(f"installing Debian's {_PACKAGE} ...")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run([apt, "update", "-qq"], _INSTALL_SECONDS, environment)
    return _run([apt, "install", "-y", "-qq", "--no-install-recommends", _PACKAGE], _INSTALL_SECONDS, environment)


def _run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> bool:
    """Run it quietly; whether it came to its end in time. What it achieved is seen by looking for the Chromium."""
    try:
        subprocess.run(  # noqa: S603 - our own arguments
            command,
            timeout=seconds,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _hint() -> str:
    return f"install one (Debian: apt-get install {_PACKAGE})"
