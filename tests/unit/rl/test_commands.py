"""`homing rl` without its extra: what there is is always shown, and what needs more says so."""

from __future__ import annotations

import pytest
from tests.support.without import homing_without

from homing.rl.commands import _COMMANDS, rl

EXTRA = ("aiohttp", "fastapi", "gymnasium", "mcp", "numpy", "openai", "pydantic", "starlette")


def test_the_list_of_commands_is_shown_where_nothing_that_they_need_is_installed() -> None:
    done = homing_without(EXTRA, "rl", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, (_, help_text) in _COMMANDS.items():
        assert any(line.split() == [name, *help_text.split()] for line in done.stdout.splitlines()), done.stdout


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_running_one_is_refused_in_a_line_that_says_what_to_install(name: str) -> None:
    done = homing_without(EXTRA, "rl", name)
    assert done.returncode == 2
    assert done.stderr.startswith(f"homing: homing rl {name} needs more than is installed (")
    assert done.stderr.endswith("pip install 'homing[rl]'\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_what_the_list_says_is_what_the_command_says(name: str) -> None:
    command = rl.get_command(None, name)  # type: ignore[arg-type]  # no context is needed for one that is there
    assert command is not None
    assert command.get_short_help_str(200) == _COMMANDS[name][1]
