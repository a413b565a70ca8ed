"""Which Chromium is taken where there are several."""

from __future__ import annotations

from pathlib import Path

import pytest

from homing.web.chromium import binary
from homing.web.errors import BrowserStartError

HEADLESS = "system/chromium-headless-shell"
WHOLE = "system/chromium"
OLD = "playwright/chromium_headless_shell-1100/chrome-linux/headless_shell"
NEW = "playwright/chromium_headless_shell-1200/chrome-linux/headless_shell"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(binary, "_DEBIAN", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "playwright"))
    monkeypatch.delenv(binary.CHROMIUM_ENV, raising=False)
    return tmp_path


def put(place: Path, name: str, *, version: str | None = "Chromium 1") -> None:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + ("exit 1\n" if version is None else f"echo {version}\n"))
    path.chmod(0o755)


def test_the_headless_shell_comes_before_chromium_and_that_before_playwrights_own(place: Path) -> None:
    with pytest.raises(BrowserStartError, match="apt-get install chromium-headless-shell"):
        binary.find_binary()
    for name, kind in ((OLD, "playwright"), (NEW, "playwright"), (WHOLE, "chromium"), (HEADLESS, "headless-shell")):
        put(place, name)
        found = binary.find_binary()
        assert (found.kind, found.path, found.version) == (kind, place / name, "Chromium 1")


def test_one_that_does_not_start_is_passed_over_and_one_that_is_named_is_taken_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, HEADLESS, version=None)
    put(place, WHOLE)
    assert binary.find_binary().path == place / WHOLE
    monkeypatch.setenv(binary.CHROMIUM_ENV, str(place / HEADLESS))
    with pytest.raises(BrowserStartError, match="does not start"):
        binary.find_binary()
    assert binary.find_binary(place / WHOLE).kind == "given"
