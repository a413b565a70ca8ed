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


def put(place: Path, name: str, script: str = "echo Chromium 1") -> None:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
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
    put(place, HEADLESS, "exit 1")
    put(place, WHOLE)
    assert binary.find_binary().path == place / WHOLE
    monkeypatch.setenv(binary.CHROMIUM_ENV, str(place / HEADLESS))
    with pytest.raises(BrowserStartError, match="does not start"):
        binary.find_binary()
    assert binary.find_binary(place / WHOLE).kind == "given"


@pytest.mark.parametrize(
    ("script", "said", "retryable"),
    [
        (None, "does not exist", False),
        ("exit 127", "does not start: it ended with code 127", False),
        (":", "does not start: it tells no version", False),
        ("kill -9 $$", "does not start: signal 9 ended it", True),
    ],
)
def test_one_that_does_not_start_is_told_with_its_path_and_who_names_it_and_whether_a_retry_may_help(
    script: str | None, said: str, retryable: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        put(place, HEADLESS, script)
    for given, by in ((None, binary.CHROMIUM_ENV), (str(place / HEADLESS), "the provider's executable")):
        if given is None:
            monkeypatch.setenv(binary.CHROMIUM_ENV, str(place / HEADLESS))
        with pytest.raises(BrowserStartError) as refused:
            binary.find_binary(given)
        assert f"the Chromium that {by} names, {place / HEADLESS}, {said}" in str(refused.value)
        assert refused.value.retryable is retryable
        # A client learns whose setting it is, and no path.
        assert by in refused.value.shown
        assert str(place) not in refused.value.shown


def test_where_none_is_found_that_starts_each_is_told_in_the_log_and_none_to_clients(place: Path) -> None:
    with pytest.raises(BrowserStartError) as refused:
        binary.find_binary()
    assert (str(refused.value), refused.value.retryable) == (binary.MISSING, False)
    put(place, HEADLESS, "exit 3")
    put(place, WHOLE, "kill -9 $$")
    with pytest.raises(BrowserStartError) as refused:
        binary.find_binary()
    assert f"{place / HEADLESS}: it ended with code 3" in str(refused.value)
    assert f"{place / WHOLE}: signal 9 ended it" in str(refused.value)
    assert refused.value.retryable
    assert str(place) not in refused.value.shown


def test_a_name_alone_is_looked_for_in_the_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(place, WHOLE)
    monkeypatch.setenv(binary.CHROMIUM_ENV, "chromium")
    assert binary.find_binary().path == place / WHOLE
