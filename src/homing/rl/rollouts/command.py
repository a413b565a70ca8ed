"""`homing rl rollouts`: collect the rollouts of a file of tasks into a file of results.

Not here: collecting (`collector.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from homing.rl.rollouts.collector import Collector, Counts
from homing.rl.rollouts.results import ResultsFile
from homing.rl.rollouts.summary import Summary, table_of
from homing.rl.rollouts.tasks import read_tasks

INTERRUPTED_EXIT_CODE = 130


@click.command(short_help="Collect rollouts from an environment server.")
@click.option("--environment", metavar="URL", required=True, help="The environment server.")
@click.option(
    "--tasks", "tasks_path", metavar="FILE", required=True, type=click.Path(path_type=Path), help="Tasks, one a line."
)
@click.option(
    "--out",
    "out_path",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="Results, one line per episode; what is in it already is not done again.",
)
@click.option("--concurrency", type=click.IntRange(min=1), default=64, show_default=True, help="Rollouts under way.")
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Episodes of one rollout at most; another attempt follows one that failed for a reason of its own.",
)
@click.option(
    "--episode-timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="How long one episode may take.",
)
@click.option("--new-connections", is_flag=True, help="Open a new connection for each episode.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def rollouts(
    environment: str,
    tasks_path: Path,
    out_path: Path,
    concurrency: int,
    attempts: int,
    episode_timeout: float,
    new_connections: bool,
    as_json: bool,
) -> None:
    """Collect a rollout of every task, a bounded number at a time, and say what they come to.

    A task is a line {"task_id": …, "task_input": {…}}. A fault is never a reward: its sample is masked, and its rollout
    tried again as the next attempt. Run it again after Ctrl-C, with the same files, and it goes on where it was.

    Exit code 0: every rollout is done; 130: it was interrupted.
    """
    with ResultsFile(out_path) as results:
        console = Console(stderr=True)
        collector, show = None, Shown(console)
        collector = Collector(
            environment,
            read_tasks(tasks_path),
            results,
            concurrency=concurrency,
            attempts=attempts,
            episode_timeout_seconds=episode_timeout,
            changed=lambda: show.update(collector),
            new_connection_per_call=new_connections,
        )
        with show:
            summary, interrupted = run_until_interrupted(collector)
    print_summary(summary, str(tasks_path), as_json=as_json)
    if interrupted:
        click.echo("interrupted: run the same command again to go on", err=True)
        sys.exit(INTERRUPTED_EXIT_CODE)


class Shown:
    """A progress bar on a terminal; a log gets a line at the start and every tenth of the way. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        text = "{task.fields[running]} running, {task.fields[failed]} failed, {task.fields[masked]} masked, reward {task.fields[reward]}"
        self._progress = Progress(
            TextColumn("rollouts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(text),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, running=0, failed=0, masked=0, reward="–")
        self._tenth = -1

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, collector: Collector | None) -> None:
        if collector is None:
            return
        counts, total = collector.counts, collector.total
        if self._console.is_terminal:
            self._progress.update(
                self._task,
                completed=counts.done,
                total=total,
                running=counts.running,
                failed=counts.failed,
                masked=counts.masked,
                reward=_reward(counts),
            )
        elif total and (tenth := 10 * counts.done // total) > self._tenth:
            self._tenth = tenth
            click.echo(
                f"rollouts: {counts.done} of {total} done, {counts.running} running, {counts.failed} failed, "
                f"{counts.masked} masked, reward {_reward(counts)}",
                err=True,
            )


def run_until_interrupted(collector: Collector) -> tuple[Summary, bool]:
    """Collect; SIGINT and SIGTERM end it early, with everything that is under way given up and closed.

    Returns:
        The figures, and whether it was interrupted.
    """

    async def run() -> bool:
        collecting = asyncio.create_task(collector.collect())
        loop = asyncio.get_running_loop()
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            collecting.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await collecting
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return interrupted

    interrupted = asyncio.run(run())
    return collector.summary(), interrupted


def print_summary(summary: Summary, title: str, *, as_json: bool, more: dict[str, Any] | None = None) -> None:
    """The figures on stdout."""
    if as_json:
        click.echo(json.dumps(summary.as_dict() | (more or {}), indent=2))
        return
    table = table_of(summary, title)
    for name, value in (more or {}).items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def _reward(counts: Counts) -> str:
    return "–" if counts.mean_reward is None else f"{counts.mean_reward:.3f}"
