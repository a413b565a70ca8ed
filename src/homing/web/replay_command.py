"""`homing web replay`: what a session left, as a page; what a run left, as one picture.

Not here: making them (`replay.py`).
"""

from __future__ import annotations

from pathlib import Path

import click

from homing.errors import ConfigurationError
from homing.web.replay import Recorded, contact_sheet, find_recording, recordings_below, replay_page


@click.command(
    "replay",
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Show what a session left, as a page.",
)
@click.argument("session", required=False)
@click.option(
    "--recordings",
    metavar="DIR",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the server keeps recordings (its --recordings).",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the page or the picture goes. [default: beside the recordings]",
)
@click.option(
    "--sheet", is_flag=True, help="All sessions of the folder as one picture, in place of one session's page."
)
def replay(session: str | None, recordings: Path, out: Path | None, sheet: bool) -> None:
    """Write SESSION's page: steps, actions, pictures, rewards, errors, times. SESSION is its ID, or its folder's name.

    \b
    homing web replay 4f1c0a9d2b7e --recordings runs
    homing web replay --sheet --recordings runs
    """
    if sheet == (session is not None):
        raise click.UsageError("name a session, or give --sheet")
    if session is None:
        out = out or recordings / "contact-sheet.png"
        _write(out, contact_sheet(_recorded(recordings)))
    else:
        recorded = find_recording(recordings, session)
        out = out or recordings / f"{recorded.tag}.html"
        _write(out, replay_page(recorded).encode())
    click.echo(str(out))


def _recorded(folder: Path) -> list[Recorded]:
    found = list(recordings_below(folder))
    if not found:
        raise ConfigurationError(f"no recordings in {folder}")
    return found


def _write(out: Path, content: bytes) -> None:
    try:
        out.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error.strerror}") from error
