"""`homing rl demo`: four servers of several workers each, on this machine, and rollouts through them.

A model (a script), a resources server, an agent and an environment server, each by `homing run` on a port of its own; then
the collector of `homing rl rollouts`, with a new connection for every call. The measure: verdicts that are right.

Not here: the servers (`servers.py`).
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from homing.errors import StartupError
from homing.rl.demo.servers import URLS
from homing.rl.demo.task import demo_task, demo_task_line
from homing.rl.rollouts.collector import Collector
from homing.rl.rollouts.command import INTERRUPTED_EXIT_CODE, Shown, print_summary, run_until_interrupted
from homing.rl.rollouts.results import ResultsFile
from homing.rl.rollouts.tasks import read_tasks

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 15.0

_ADDRESS: Final = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


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
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UVICORN_", "HOMING_"))}
    environment.pop("WEB_CONCURRENCY", None)
    environment.update(env or {})
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # The agent is told of the model and the resources server, the environment server of the agent: in this order.
        for names in (("model", "resources"), ("agent",), ("environment",)):
            started = []
            for name in names:
                more = ("--no-sessions",) if name == "model" and workers > 1 else ()
                server = _Server(name, workers, (*more, *(options or {}).get(name, ())), environment)
                stack.callback(server.close)
                started.append(server)
            for server in started:
                urls[server.name] = server.wait_until_ready()
                if server.name in URLS:
                    environment[URLS[server.name]] = urls[server.name]
        yield urls


class _Server:
    """One server process. `close` stops it, and waits until all its processes are gone."""

    def __init__(self, name: str, workers: int, options: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.name = name
        self._workers = workers
        self._said: collections.deque[str] = collections.deque(maxlen=20)
        self._url: str | None = None
        self._ready = threading.Event()
        self._process = subprocess.Popen(  # noqa: S603 - this very Python, and nothing that a user typed
            [
                *(sys.executable, "-m", "homing", "run", f"homing.rl.demo.servers:{name}", "--factory"),
                *("--workers", str(workers), "--host", "127.0.0.1", "--port", "0"),
                *("--no-access-log", "--no-use-colors", *options),
            ],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C reaches this process alone, which then stops the servers in its own order.
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"homing demo {name}")
        self._reader.start()

    def wait_until_ready(self) -> str:
        """The server's address, once every worker serves.

        Raises:
            StartupError: it ended, or the time passed.
        """
        if not self._ready.wait(START_SECONDS) or self._url is None:
            raise StartupError(
                f"the demo's {self.name} server did not start: {' / '.join(self._said) or 'it said nothing'}"
            )
        return self._url

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.strip())
            if found := _ADDRESS.search(line):
                self._url = found[1]
            if f"all {self._workers} workers are ready" in line or (self._workers == 1 and self._url is not None):
                self._ready.set()
        self._ready.set()  # it ended: nobody needs to wait any longer

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                # The whole group at last: a supervisor that is killed cannot stop its workers.
                os.killpg(self._process.pid, number) if number == signal.SIGKILL else self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()
