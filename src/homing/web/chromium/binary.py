"""Which Chromium is there?

Looked for in this order: Debian's headless shell (a third of the memory of the whole browser for each session more),
Chromium, and what Playwright brings itself. A path that is given is taken alone.

Not here: starting it (`browser.py`).
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from homing.errors import ConfigurationError
from homing.web.errors import BrowserStartError, NoBrowserError

CHROMIUM_ENV: Final = "HOMING_CHROMIUM"
"""Names the Chromium to take, in place of looking for one."""

_INSTALL: Final = "install one (Debian: apt-get install chromium-headless-shell; elsewhere: playwright install chromium-headless-shell)"
MISSING: Final = f"no Chromium was found: {_INSTALL}, or name it in {CHROMIUM_ENV}"
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
        NoBrowserError: there is none, or none that could ever start; says what to install.
        BrowserStartError: there is one that does not start now; says which, and why.
    """
    named = _named(given)
    if named is not None:
        path, by = named
        wrong = _unusable(path)
        if wrong is not None:
            raise NoBrowserError(_named_line(path, by, wrong), shown=_shown_line(by))
        try:
            return Binary("given", path, _version(path))
        except _NoVersionError as error:
            kind = BrowserStartError if error.may_pass else NoBrowserError
            raise kind(_named_line(path, by, f"does not start: {error}"), shown=_shown_line(by)) from error
    failed: list[_NoVersionError] = []
    told: list[str] = []
    for kind_name, path in candidates():
        try:
            return Binary(kind_name, path, _version(path))
        except _NoVersionError as error:
            failed.append(error)
            told.append(f"{path}: {error}")
    if not failed:
        raise NoBrowserError(MISSING)
    kind = BrowserStartError if any(error.may_pass for error in failed) else NoBrowserError
    raise kind(
        f"no Chromium starts ({'; '.join(told)}): {_INSTALL}, or name another in {CHROMIUM_ENV}",
        shown="no Chromium of the server's machine starts; its log says which were tried",
    )


def check_binary(given: str | os.PathLike[str] | None = None) -> None:
    """See that there is a Chromium, without running it: whether it starts is seen with the first session.

    Args:
        given: As of `find_binary`.

    Raises:
        ConfigurationError: there is none, or what is named is no program; says what to install.
    """
    named = _named(given)
    if named is None:
        if next(candidates(), None) is None:
            raise ConfigurationError(f"web: {MISSING}")
        return
    path, by = named
    wrong = _unusable(path)
    if wrong is not None:
        raise ConfigurationError(f"web: {_named_line(path, by, wrong)}")


def _named(given: str | os.PathLike[str] | None) -> tuple[Path, str] | None:
    """The one that is named, and by what; None: none is."""
    named, by = (given, "the provider's executable") if given else (os.environ.get(CHROMIUM_ENV), CHROMIUM_ENV)
    if not named:
        return None
    # A name alone is one of the path's programs, as in a shell.
    return Path(shutil.which(named) or named), by


def _unusable(path: Path) -> str | None:
    if not os.path.exists(path):
        return "does not exist"
    return None if os.path.isfile(path) and os.access(path, os.X_OK) else "is no executable file"


def _named_line(path: Path, by: str, wrong: str) -> str:
    return f"the Chromium that {by} names, {path}, {wrong}; name another, or leave it out and {_INSTALL}"


def _shown_line(by: str) -> str:
    """For clients, which are told no paths."""
    return f"the Chromium that {by} names on the server does not start; the server's log says which it is, and why"


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


class _NoVersionError(Exception):
    """A program does not tell its version.

    Attributes:
        may_pass: It may another time: what stopped it was not its own.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


_SHORTAGES: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY, errno.EINTR})


def _version(path: Path) -> str:
    """What it says of itself.

    Raises:
        _NoVersionError: nothing.
    """
    try:
        run = subprocess.run(  # noqa: S603 - a path that the operator, or the system, names
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except OSError as error:
        raise _NoVersionError(error.strerror or str(error), may_pass=error.errno in _SHORTAGES) from error
    except subprocess.TimeoutExpired as error:
        raise _NoVersionError(f"it gave no version in {_VERSION_SECONDS:g} s", may_pass=True) from error
    if run.returncode < 0:
        # Out of memory, or whoever sent it.
        raise _NoVersionError(f"signal {-run.returncode} ended it", may_pass=True)
    if run.returncode:
        raise _NoVersionError(f"it ended with code {run.returncode}")
    version = run.stdout.decode("utf-8", "replace").strip()
    if not version:
        raise _NoVersionError("it tells no version")
    return version
