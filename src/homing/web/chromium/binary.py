"""Which Chromium is there?

Looked for in this order: Debian's headless shell (a third of the memory of the whole browser for each session more),
Chromium, and what Playwright brings itself. A path that is given is taken alone.

Not here: starting it (`browser.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from homing.web.errors import BrowserStartError

CHROMIUM_ENV: Final = "HOMING_CHROMIUM"
"""Names the Chromium to take, in place of looking for one."""

MISSING: Final = (
    "no Chromium was found: install one (Debian: apt-get install chromium-headless-shell; elsewhere: playwright install "
    f"chromium-headless-shell), or name it in {CHROMIUM_ENV}"
)
_VERSION_SECONDS: Final = 20.0
_DEBIAN: Final = Path("/usr/lib/chromium")


@dataclass(frozen=True, slots=True)
class Binary:
    """A Chromium.

    Attributes:
        kind: `headless-shell`, `chromium`, `playwright`, or `given`.
        version: As it says itself.
    """

    kind: str
    path: Path
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.kind}, {self.path})"


def find_binary(given: str | os.PathLike[str] | None = None) -> Binary:
    """The Chromium to use. Runs it once for its version: call it in a thread.

    Args:
        given: The one to take; None: what the environment names, else the first that is found.

    Raises:
        BrowserStartError: there is none that answers; says what to install.
    """
    named = given or os.environ.get(CHROMIUM_ENV)
    if named:
        path = Path(named)
        version = _version(path)
        if version is None:
            raise BrowserStartError("the Chromium that the settings name does not start")
        return Binary("given", path, version)
    for kind, path in candidates():
        version = _version(path)
        if version is not None:
            return Binary(kind, path, version)
    raise BrowserStartError(MISSING)


def candidates() -> Iterator[tuple[str, Path]]:
    """Where one may be, best first; only paths that exist."""
    for kind, names in (
        ("headless-shell", ("chromium-headless-shell", "chrome-headless-shell")),
        ("chromium", ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")),
    ):
        for name in names:
            # Debian's command is a shell script that stays as the browser's parent; what it starts is better known.
            for path in (_DEBIAN / name, shutil.which(name)):
                if path is not None and os.access(path, os.X_OK):
                    yield kind, Path(path)
    for path in sorted(_playwrights_own(), reverse=True):
        yield "playwright", path


def _playwrights_own() -> Iterator[Path]:
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    root = Path(folder) if folder and folder != "0" else Path.home() / ".cache" / "ms-playwright"
    for pattern in (
        "chromium_headless_shell-*/chrome-*/headless_shell",
        "chromium_headless_shell-*/chrome-*/chrome-headless-shell",
        "chromium-*/chrome-*/chrome",
    ):
        for path in root.glob(pattern):
            if os.access(path, os.X_OK):
                yield path


def _version(path: Path) -> str | None:
    try:
        run = subprocess.run(  # noqa: S603 - a path that the operator, or the system, names
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_VERSION_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.decode("utf-8", "replace").strip() or None
