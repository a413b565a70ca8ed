"""`homing rl demo`: four servers of several workers each, on this machine, and rollouts through them.

A model (a script), a resources server, an agent and an environment server, each by `homing run` on a port of its own; then
the collector of `homing rl rollouts`, with a new connection for every call. The measure: verdicts that are right.

Not here: the servers (`servers.py`).
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
from rich.console import Console

from homing.rl.demo.servers import URLS
from homing.rl.demo.task import demo_task, demo_task_line
from homing.rl.rollouts.collector import Collector
from homing.rl.rollouts.command import INTERRUPTED_EXIT_CODE, Shown, print_summary, run_until_interrupted
from homing.rl.rollouts.results import ResultsFile
from homing.rl.rollouts.tasks import read_tasks
from homing.runtime.child_server import ChildServer, clean_environment


@click.command(short_help="See episodes run through four servers of several workers each.")
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Workers of each server.")
@click.option("--episodes", type=click.IntRange(min=1), default=200, show_default=True, help="Rollouts.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, show_default=True, help="Rollouts under way.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def demo(workers: int, episodes: int, concurrency: int, as_json: bool) -> None:
    """Run a scripted model, a resources server, an agent and an environment server, and roll out tasks through them.

    Needs no network and no GPU. Exit code 1 unless every verdict is right.
    """
    with tempfile.TemporaryDirectory(prefix="homing-demo-") as directory, contextlib.ExitStack() as stack:
        tasks, out = Path(directory, "demo.jsonl"), Path(directory, "results.jsonl")
        click.echo(
            f"starting a model, a resources server, an agent and an environment, {workers} workers each", err=True
        )
        tasks.write_text("".join(demo_task_line(number) for number in range(episodes)))
        environment = stack.enter_context(demo_servers(workers))["environment"]
        results = stack.enter_context(ResultsFile(out))
        show = stack.enter_context(contextlib.closing(_Closed(Shown(Console(stderr=True)))))
        collector = Collector(
            environment,
            read_tasks(tasks),
            results,
            concurrency=concurrency,
            changed=lambda: show.shown.update(collector),
            new_connection_per_call=True,
        )
        summary, interrupted = run_until_interrupted(collector)
        show.close()
        right = _count_right(results, episodes)
    title = f"{episodes} rollouts, 4 servers, {workers} workers each"
    print_summary(summary, title, as_json=as_json, more={"verdicts_right": right})
    if interrupted:
        sys.exit(INTERRUPTED_EXIT_CODE)
    if right != episodes:
        sys.exit(1)


class _Closed:
    """A progress bar that is taken down before the table is printed."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        shown.__enter__()

    def close(self) -> None:
        self.shown.__exit__()


def _count_right(results: ResultsFile, episodes: int) -> int:
    finals = {
        progress.final.task_id.task_id: progress.final.reward
        for progress in results.rollouts.values()
        if progress.final is not None
    }
    expected = (demo_task(number) for number in range(episodes))
    return sum(finals.get(task_id) == reward for task_id, _, reward in expected)


@contextlib.contextmanager
def demo_servers(
    workers: int,
    *,
    options: Mapping[str, tuple[str, ...]] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[dict[str, str]]:
    """The demo's servers, each by `homing run` on a free port; their addresses by name. They are gone at the end.

    Args:
        options: Further options of `homing run` for a server, by its name.
        env: Further variables for all of them.

    Raises:
        StartupError: one did not start; with what it said.
    """
    environment = clean_environment() | dict(env or {})
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # The agent is told of the model and the resources server, the environment server of the agent: in this order.
        for names in (("model", "resources"), ("agent",), ("environment",)):
            started = []
            for name in names:
                more = ("--no-sessions",) if name == "model" and workers > 1 else ()
                server = _server(name, workers, (*more, *(options or {}).get(name, ())), environment)
                stack.callback(server.close)
                started.append(server)
            for server in started:
                urls[server.name] = server.wait_until_ready()
                if server.name in URLS:
                    environment[URLS[server.name]] = urls[server.name]
        yield urls


def _server(name: str, workers: int, options: tuple[str, ...], environment: Mapping[str, str]) -> ChildServer:
    command = (
        *(sys.executable, "-m", "homing", "run", f"homing.rl.demo.servers:{name}", "--factory"),
        *("--workers", str(workers), "--host", "127.0.0.1", "--port", "0"),
        *("--no-access-log", "--no-use-colors", *options),
    )
    ready = f"all {workers} workers are ready" if workers > 1 else None
    return ChildServer(name, command, environment, ready=ready)
