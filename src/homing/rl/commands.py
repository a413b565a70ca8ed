"""`homing rl`: the sub-commands of this room. Each is imported when it is named, and none to list them.

Not here: what they do.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from homing.errors import ConfigurationError

_COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "demo": ("homing.rl.demo.command:demo", "See episodes run through four servers of several workers each."),
    "rollouts": ("homing.rl.rollouts.command:rollouts", "Collect rollouts from an environment server."),
    "serve": ("homing.rl.serve_command:serve", "Serve a Gymnasium environment."),
}
"""Each sub-command: where its `click.Command` is, and its short help, which is shown where it cannot be imported too."""


class _RlCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        try:
            found: click.Command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise ConfigurationError(
                f"homing rl {cmd_name} needs more than is installed ({error}): pip install 'homing[rl]'"
            ) from error
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_RlCommands, context_settings={"help_option_names": ["-h", "--help"]})
def rl() -> None:
    """RL servers: Gymnasium environments, rollouts, and a demo."""
