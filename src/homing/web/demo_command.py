"""`homing web demo`: MiniWoB episodes on several workers, played by the scripted solver over HTTP.

The server is a process of its own with browsers of its own; the client knows only its address.

Not here: the solver (`miniwob/solver`), the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from homing.errors import HomingError
from homing.runtime.child_server import child_server, clean_environment
from homing.web.chromium.binary import CHROMIUM_ENV
from homing.web.chromium.fetching import ensure_binary
from homing.web.client import WebCallError, WebSession
from homing.web.miniwob.solver import OBSERVATION_PROFILE, solvable, solve
from homing.web.processes import OWNER_ENV
from homing.web.replay import contact_sheet, recordings_below

_LONG: Final = frozenset({"chase-circle", "moving-items", "stock-market"})
"""Tasks that take ten seconds by themselves."""


@dataclass
class Episode:
    """What became of one.

    Attributes:
        reward: The page's; None: there is none, since something failed.
        failure: What failed.
    """

    task_id: str
    seed: int
    steps: int = 0
    seconds: float = 0.0
    reward: float | None = None
    failure: str | None = None


@click.command(short_help="Play MiniWoB in real browsers, on several workers.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Workers of the server.")
@click.option("--episodes", type=click.IntRange(min=1), default=40, show_default=True, help="Episodes to play.")
@click.option("--at-once", type=click.IntRange(min=1), default=4, show_default=True, help="Episodes at the same time.")
@click.option(
    "--recordings",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where recordings and the contact sheet go. [default: a new folder in the temp directory]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def demo(workers: int, episodes: int, at_once: int, recordings: Path | None, as_json: bool) -> None:
    """Start a web server with its browsers, let the scripted solver play MiniWoB over HTTP, and show what came of it.

    Exit code 1 unless every episode got a reward. Uses the Chromium that is there; else
    it downloads Playwright's; else, as root on Debian, it installs the package.
    """
    try:
        ensure_binary(lambda line: click.echo(line, err=True))
        folder = recordings or Path(tempfile.mkdtemp(prefix="homing-web-demo-"))
        played, seconds = asyncio.run(_play(workers, episodes, at_once, folder))
        sheet = folder / "contact-sheet.png"
        sheet.write_bytes(contact_sheet(list(recordings_below(folder))))
    except HomingError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        told = {
            "episodes": [asdict(each) for each in played],
            "seconds": round(seconds, 1),
            "contact_sheet": str(sheet),
        }
        click.echo(json.dumps(told, indent=2))
    else:
        _print_table(played, seconds, workers)
        click.echo(f"Contact sheet: {sheet}")
        click.echo(f"A session's page: homing web replay {_example(folder)} --recordings {folder}")
    if any(each.reward is None for each in played):
        sys.exit(1)


def _example(folder: Path) -> str:
    return next((recorded.tag for recorded in recordings_below(folder)), "SESSION")


async def _play(workers: int, episodes: int, at_once: int, folder: Path) -> tuple[list[Episode], float]:
    tasks = [task_id for task_id in solvable() if task_id not in _LONG]
    chosen = [
        Episode(
            tasks[index * len(tasks) // episodes if episodes < len(tasks) else index % len(tasks)], index // len(tasks)
        )
        for index in range(episodes)
    ]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with contextlib.AsyncExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        if not console.is_terminal:
            click.echo(f"playing {episodes} episodes on {workers} workers", err=True)
        bar = progress.add_task("starting", total=episodes)
        url = await stack.enter_async_context(_serving(workers, at_once, folder))
        progress.update(bar, description="playing")
        waiting = iter(chosen)

        async def player() -> None:
            for episode in waiting:
                await _play_one(url, episode)
                progress.advance(bar)

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, episodes)):
                group.create_task(player())
        return chosen, time.monotonic() - began


async def _play_one(url: str, episode: Episode) -> None:
    began = time.monotonic()
    try:
        async with WebSession(url) as session:
            task = {
                "benchmark": "miniwob",
                "task_id": episode.task_id,
                "seed": episode.seed,
                "observation_profile": OBSERVATION_PROFILE,
            }
            observation = await session.seed(task)
            agent = await solve(session, episode.task_id, observation)
            episode.steps = agent.steps
            episode.reward = (await session.evaluate()).reward
    except WebCallError as error:
        episode.failure = error.error_kind
    except httpx.HTTPError as error:
        episode.failure = type(error).__name__
    episode.seconds = round(time.monotonic() - began, 2)


# --- the server ---


def _serving(workers: int, at_once: int, folder: Path) -> contextlib.AbstractAsyncContextManager[str]:
    """Start the server, give its address, and stop it."""
    command = (
        *(sys.executable, "-m", "homing", "web", "serve", "--tasks", "miniwob", "--workers", str(workers)),
        *("--host", "127.0.0.1", "--port", "0", "--no-access-log", "--no-use-colors", "--recordings", str(folder)),
        *("--max-sessions-per-worker", str(at_once)),
    )
    return child_server("demo's web", command, clean_environment(keep=(CHROMIUM_ENV, OWNER_ENV)))


# --- what is shown ---


def _print_table(played: Sequence[Episode], seconds: float, workers: int) -> None:
    table = Table(title=f"MiniWoB: {len(played)} episodes on {workers} workers in {seconds:.1f} s")
    for heading, side in (("task", "left"), ("steps", "right"), ("seconds", "right"), ("reward", "right")):
        table.add_column(heading, justify="right" if side == "right" else "left")
    for each in played:
        if each.reward is None:
            shown = f"[red]none: {each.failure}[/]"
        else:
            shown = f"[{'green' if each.reward > 0 else 'yellow'}]{each.reward:g}[/]"
        table.add_row(each.task_id, str(each.steps), f"{each.seconds:.2f}", shown)
    solved = sum((each.reward or 0) > 0 for each in played)
    failed = sum(each.reward is None for each in played)
    steps = sum(each.steps for each in played)
    table.add_section()
    table.add_row(
        f"solved {solved} of {len(played)}, failed {failed}",
        str(steps),
        f"{seconds:.1f}",
        f"{steps / seconds:.1f} steps/s",
    )
    Console().print(table)
