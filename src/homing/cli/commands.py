"""`homing`: its sub-commands, and the one place where an error becomes a line on stderr and an exit code.

The invariant: a mistake of the user's ends in one line that says what and what to do, never in a traceback.

Not here: the commands (`run.py`, `demo.py`; `homing rl` and `homing web` come through entry points).
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NoReturn

import click

import homing
from homing.cli.printable import printable
from homing.errors import ConfigurationError, HomingError, StartupError

COMMANDS_GROUP: Final = "homing.commands"
"""The entry-point group of further sub-commands: name → a `click.Command`."""

OUTPUT_EXIT_CODE: Final = 1
USAGE_EXIT_CODE: Final = 2
STARTUP_EXIT_CODE: Final = 3
INTERRUPTED_EXIT_CODE: Final = 130

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Commands(click.Group):
    """Sub-commands that are imported when they are named, so `homing --version` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["run", "ps", "top", "drain", "demo", *sorted(_added())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        match cmd_name:
            case "run":
                from homing.cli.run import run

                return run
            case "ps":
                from homing.cli.ps import ps

                return ps
            case "top":
                from homing.cli.ps import top

                return top
            case "drain":
                from homing.cli.drain import drain

                return drain
            case "demo":
                from homing.cli.demo import demo

                return demo
        added = _added().get(cmd_name)
        if added is None:
            return None
        try:
            found = added.load()
        except Exception as error:
            raise click.ClickException(f"homing {cmd_name} cannot be loaded from {added.value}: {error}") from error
        if not isinstance(found, click.Command):
            raise click.ClickException(f"homing {cmd_name}: {added.value} is no click command")
        return found


def _added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=COMMANDS_GROUP)}


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.version_option(homing.__version__, prog_name="homing", message="%(prog)s %(version)s")
@click.pass_context
def homing_command(ctx: click.Context) -> None:
    """Several workers of one stateful server behave like one: each request reaches the worker with its session."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the output cannot be written, 2 a mistake on the command line, 3 a server that
    cannot start, 130 interrupted (`docs/reference/options.md`).

    Args:
        arguments: Without the program's name; None: the process's own.
    """
    _open_standard_streams()
    try:
        code = homing_command.main(args=arguments, prog_name="homing", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.UsageError as error:
        _say(f"{error.format_message()} (see {error.ctx.command_path if error.ctx else 'homing'} --help)")
        code = error.exit_code
    except click.ClickException as error:
        _say(error.format_message())
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED_EXIT_CODE
    except HomingError as error:
        _say(str(error))
        code = USAGE_EXIT_CODE if isinstance(error, ConfigurationError) else STARTUP_EXIT_CODE
        # A thread that an app began before it failed to start would keep this process for as long as it runs.
        _exit(code, at_once=arguments is None and isinstance(error, ConfigurationError | StartupError))
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        code = _cannot_print(error)
    _exit(code if isinstance(code, int) else 0)


def _exit(code: int, *, at_once: bool = False) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _cannot_print(error)
    if at_once:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _cannot_print(error: OSError) -> int:
    # What is still to be written goes nowhere, or the interpreter would complain of it once more as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _say(f"the output cannot be written: {error.strerror}")
    return OUTPUT_EXIT_CODE


def _open_standard_streams() -> None:
    """See that nothing else takes the place of a standard stream that the caller has closed (`>&-`).

    The next file or socket would get its number, and everything that is printed, by workers too.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for the process's life


def _say(line: str) -> None:
    click.echo("homing: " + printable(" ".join(line.split())), err=True)
