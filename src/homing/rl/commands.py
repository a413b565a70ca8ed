"""`homing rl`: the sub-commands of this room. Each is imported when it is named.

Not here: what they do.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

_COMMANDS: Final[dict[str, str]] = {
    "demo": "homing.rl.demo.command:demo",
    "rollouts": "homing.rl.rollouts.command:rollouts",
    "serve": "homing.rl.serve_command:serve",
}
"""Each sub-command, and where its `click.Command` is."""


class _RlCommands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        try:
            found: click.Command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise click.ClickException(
                f"homing rl {cmd_name} needs more than is installed ({error}): pip install 'homing[rl]'"
            ) from error
        return found


@click.group(cls=_RlCommands, context_settings={"help_option_names": ["-h", "--help"]})
def rl() -> None:
    """RL servers: Gymnasium environments, rollouts, and a demo."""
