"""`docs/reference/commands.md` has every option of every command beside `homing run`, as the command declares it."""

from __future__ import annotations

import re

import click
import pytest
from tests.support.running import ROOT

from homing.cli.commands import homing_command
from homing.cli.run import run
from homing.web.serve_command import SETTINGS

REFERENCE = ROOT / "docs" / "reference"
PAGE = (REFERENCE / "commands.md").read_text("utf-8")
SECTIONS = {
    heading.partition("`")[0]: text
    for heading, text in re.findall(r"^## `(homing [^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}


def commands(group: click.Group, name: str) -> dict[str, click.Command]:
    """Every command that can be run, by all of its name."""
    ctx = click.Context(group)
    found: dict[str, click.Command] = {}
    for each in group.list_commands(ctx):
        command = group.get_command(ctx, each)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands(command, f"{name} {each}")
        else:
            found[f"{name} {each}"] = command
    return found


COMMANDS = {name: command for name, command in commands(homing_command, "homing").items() if command is not run}


def options(command: click.Command) -> list[click.Option]:
    """Its own, uvicorn's left out."""
    serves = any(parameter.name == "timeout_worker_healthcheck" for parameter in command.params)
    return [
        each
        for each in command.params
        if isinstance(each, click.Option) and (not serves or not getattr(each, "allow_from_autoenv", True))
    ]


RUNS = {each.opts[0]: each.help for each in options(run)}


def is_of_run(option: click.Option) -> bool:
    return RUNS.get(option.opts[0]) == option.help


def row(option: click.Option) -> str:
    """The line of the table for one option, made from its declaration."""
    text, _, default = (option.help or "").removesuffix("]").partition(" [default: ")
    if option.required:
        default = "needed"
    elif not default:
        has_one = isinstance(option.default, int | float | str) and not isinstance(option.default, bool)
        default = f"{option.default:.10g}" if isinstance(option.default, float) else str(option.default) * has_one
    # The names of settings have a table of their own.
    text = text.replace(f": {SETTINGS}.", ".")
    metavar = option.metavar or ("" if option.is_flag else "N" if isinstance(option.default, int) else "TEXT")
    return f"| `{option.opts[0]} {metavar}".strip() + f"` | {text.strip()} | {default or '–'} |"


def rows(command: click.Command) -> list[str]:
    return [row(each) for each in options(command) if not is_of_run(each)]


def test_every_command_has_a_section_and_no_section_is_of_no_command() -> None:
    sections = {name: [each for each in SECTIONS if each == name or each.startswith(f"{name} ")] for name in COMMANDS}
    assert all(len(found) == 1 for found in sections.values()), sections
    assert len(SECTIONS) == len(COMMANDS)


def section_of(name: str) -> str:
    return next(text for heading, text in SECTIONS.items() if heading == name or heading.startswith(f"{name} "))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_of_a_command_is_named(name: str) -> None:
    named = set(re.findall(r"`(--[\w-]+)", section_of(name)))
    assert named == {each.opts[0] for each in options(COMMANDS[name])}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_a_table_says_of_an_option_is_its_declaration(name: str) -> None:
    shown = [line for line in section_of(name).splitlines() if line.startswith("| `--")]
    assert shown == rows(COMMANDS[name]), "\n" + "\n".join(rows(COMMANDS[name]))


@pytest.mark.parametrize(
    ("page", "name"), [("gymnasium-server", "homing rl serve"), ("web-server", "homing web serve")]
)
def test_the_page_of_a_server_names_each_option_of_the_command_that_serves_it(page: str, name: str) -> None:
    text = (REFERENCE / f"{page}.md").read_text("utf-8")
    assert not [each.opts[0] for each in options(COMMANDS[name]) if f"`{each.opts[0]}" not in text]
