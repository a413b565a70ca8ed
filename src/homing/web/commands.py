"""`homing web`: the sub-commands of this room. Each is imported when it is named.

Not here: what they do.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Final

import click

COMMANDS_GROUP: Final = "homing.web.commands"
"""The entry-point group of further sub-commands: those that join this room with others."""

_COMMANDS: Final[dict[str, str]] = {
    "demo": "homing.web.demo_command:demo",
    "replay": "homing.web.replay_command:replay",
    "serve": "homing.web.serve_command:serve",
}
"""Each sub-command, and where its `click.Command` is."""


class _WebCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *_added()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS.get(cmd_name) or _added().get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        try:
            found: click.Command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise click.ClickException(
                f"homing web {cmd_name} needs more than is installed ({error}): pip install 'homing[web]'"
            ) from error
        return found


def _added() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=COMMANDS_GROUP)}


@click.group(cls=_WebCommands, context_settings={"help_option_names": ["-h", "--help"]})
def web() -> None:
    """Browser sessions for web agents: a server, and what its sessions left."""
