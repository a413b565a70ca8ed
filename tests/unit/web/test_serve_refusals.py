"""`homing web serve` and `homing web episodes`: what no worker could serve with is refused in one line, before any starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.without import homing_without

from homing.web.chromium.binary import CHROMIUM_ENV

COMMANDS = ("serve", "episodes")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A program that could be a Chromium: nothing here starts one."""
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def refusal(command: str, *arguments: str, chromium: Path | str, without: tuple[str, ...] = ()) -> str:
    """The one line that it says."""
    serve = ("web", command, "--tasks", "miniwob", "--workers", "2", "--port", "0")
    done = homing_without(without, *serve, *arguments, env={CHROMIUM_ENV: str(chromium)})
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_task_set_without_its_package_names_the_extra(command: str, there: Path) -> None:
    said = refusal(command, chromium=there, without=("miniwob",))
    assert said == "homing: the task set miniwob needs its pages: pip install 'homing[web]'\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_driver_that_is_not_installed_names_the_extra(command: str, there: Path) -> None:
    said = refusal(command, chromium=there, without=("playwright",))
    assert said == "homing: web: browsers need their driver, Playwright: pip install 'homing[web]'\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_chromium_that_is_not_there_is_said_with_its_path_and_who_names_it(
    command: str, tmp_path: Path
) -> None:
    said = refusal(command, chromium="/nope")
    assert said.startswith(f"homing: web: the Chromium that {CHROMIUM_ENV} names, /nope, does not exist; ")
    assert "apt-get install chromium-headless-shell" in said


def test_a_named_chromium_that_is_no_program_is_said(tmp_path: Path, there: Path) -> None:
    there.chmod(0o644)
    assert f"{CHROMIUM_ENV} names, {there}, is no executable file" in refusal("serve", chromium=there)
    assert f"{CHROMIUM_ENV} names, {tmp_path}, is no executable file" in refusal("serve", chromium=tmp_path)
    option = ("--provider-option", "executable=/nope")
    assert "the Chromium that the provider's executable names, /nope, " in refusal("serve", *option, chromium=there)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("warm=x", "web: warm is 'x'"),
        ("sessions_per_browser=0.5", "web: sessions_per_browser is 0.5"),
        ("memory_bytes=none", "web: memory_bytes is 'none'"),
        ("viewport=5", "web: viewport is 5"),
        ("viewport=[500]", "web: viewport is [500]"),
        ("flags=--mute", "web: flags is '--mute'"),
        ("executable=1", "web: executable is 1"),
    ],
)
def test_a_providers_setting_that_cannot_be_is_refused(option: str, said: str, there: Path) -> None:
    assert refusal("serve", "--provider-option", option, chromium=there).startswith(f"homing: {said}")


def test_a_remote_browser_needs_the_driver_too_and_settings_that_can_be(there: Path) -> None:
    remote = ("--provider", "remote_cdp", "--provider-option")
    assert "Playwright" in refusal("serve", *remote, "endpoint=http://x:1", chromium=there, without=("playwright",))
    assert "endpoint of remote_cdp" in refusal("serve", *remote, "endpoint=5", chromium=there)
    more = ("endpoint=http://x:1", "--provider-option", "viewport=5")
    assert "viewport is 5" in refusal("serve", *remote, *more, chromium=there)


def test_a_recordings_folder_that_cannot_be_is_refused(there: Path) -> None:
    said = refusal("serve", "--recordings", str(there / "runs"), chromium=there)
    assert said == f"homing: the recordings' folder {there / 'runs'} cannot be made: Not a directory\n"


def test_tools_over_mcp_without_its_sdk_name_the_extra(there: Path) -> None:
    said = refusal("episodes", "--mcp", chromium=there, without=("mcp",))
    assert said == "homing: --mcp needs the MCP SDK: pip install 'homing[mcp]'\n"
