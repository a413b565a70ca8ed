"""`homing web`: the sub-commands of this room. Each is imported when it is named; those of this room are
listed without that.

Not here: what they do.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Final

import click

from homing.errors import ConfigurationError

COMMANDS_GROUP: Final = "homing.web.commands"
"""The entry-point group of further sub-commands: those that join this room with others."""

_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "demo": ("homing.web.demo_command:demo", "Play MiniWoB in real browsers, on several workers."),
    "replay": ("homing.web.replay_command:replay", "Show what a session left, as a page."),
    "serve": ("homing.web.serve_command:serve", "Serve browser sessions."),
}
"""Each sub-command: where its `click.Command` is, and its short help, which is shown where it cannot be imported too."""

_NEEDS: Final = "needs more than is installed"
_INSTALL: Final = "pip install 'homing[web]'"


class _WebCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *_added()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS[cmd_name][0] if cmd_name in _COMMANDS else _added().get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        try:
            found: click.Command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise ConfigurationError(f"homing web {cmd_name} {_NEEDS} ({error}): {_INSTALL}") from error
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)])

    def _short_help(self, ctx: click.Context, name: str) -> str:
        if name in _COMMANDS:
            return _COMMANDS[name][1]
        try:
            command = self.get_command(ctx, name)
        except ConfigurationError:
            return f"({_NEEDS}: {_INSTALL})"
        return "" if command is None else command.get_short_help_str(100)


def _added() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=COMMANDS_GROUP)}


@click.group(cls=_WebCommands, context_settings={"help_option_names": ["-h", "--help"]})
def web() -> None:
    """Browser sessions for web agents: a server, and what its sessions left."""
