"""`homing demo`: one app that keeps a dict in memory, under plain `uvicorn --workers` and under `homing run`.

Both servers are real processes on ports of their own, and the client opens a new connection for every call, as clients
behind proxies do. The measure: how many calls were answered with the session's own count.

Not here: the app (`demo_app.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from homing.errors import StartupError
from homing.runtime.child_server import child_server, clean_environment

APP: Final = "homing.cli.demo_app:app"
AT_ONCE: Final = 32
START_SECONDS: Final = 120.0
CALL_SECONDS: Final = 15.0


@dataclass
class Outcome:
    """What became of the calls to one server.

    Attributes:
        calls: All that were made.
        right: Answered with the session's own count.
        wrong: Answered 200 with another count.
        lost: Not answered, or not with 200.
        requests_per_second: Calls by the time they took together.
    """

    server: str
    calls: int = 0
    right: int = 0
    wrong: int = 0
    lost: int = 0
    requests_per_second: float = 0.0


@click.command(short_help="See what several workers do to sessions, without homing and with it.")
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Workers of each server.")
@click.option("--sessions", type=click.IntRange(min=1), default=200, show_default=True, help="Sessions.")
@click.option("--calls", type=click.IntRange(min=1), default=20, show_default=True, help="Calls of each session.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def demo(workers: int, sessions: int, calls: int, as_json: bool) -> None:
    """Run a small app that keeps its sessions in a dict, once under plain uvicorn and once under homing, and count.

    Exit code 1 unless every call to homing is answered right.
    """
    outcomes = asyncio.run(_compare(workers, sessions, calls))
    if as_json:
        click.echo(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        _print_table(outcomes, workers, sessions, calls)
    homing = outcomes[-1]
    if homing.right != homing.calls:
        sys.exit(1)


async def _compare(workers: int, sessions: int, calls: int) -> list[Outcome]:
    common = ["--workers", str(workers), "--host", "127.0.0.1", "--port", "0", "--no-access-log", "--no-use-colors"]
    servers = {
        "uvicorn": [sys.executable, "-m", "uvicorn", APP, *common],
        "homing": [sys.executable, "-m", "homing", "run", APP, *common, "--session", "cookie:visit"],
    }
    outcomes = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with contextlib.AsyncExitStack() as stack:
        # A bar is for a terminal; a log gets a line for each phase.
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))

        def begin(name: str, doing: str, total: int, of: str) -> TaskID:
            if not console.is_terminal:
                click.echo(f"{name}: {doing} {total:,} {of}", err=True)
            return progress.add_task(f"{name}: {doing}", total=total)

        ports = {}
        for name, command in servers.items():
            task = begin(name, "starting", workers, "workers")
            url = await stack.enter_async_context(child_server(f"demo's {name}", command, clean_environment()))
            port = ports[name] = int(url.rpartition(":")[2])
            await _all_answer(name, port, workers, lambda seen, task=task: progress.update(task, completed=seen))  # type: ignore[misc]
            progress.remove_task(task)
        for name, port in ports.items():
            task = begin(name, "making", sessions * calls, "calls")
            outcome = await _drive(name, port, sessions, calls, lambda task=task: progress.advance(task))  # type: ignore[misc]
            outcomes.append(outcome)
    return outcomes


# --- servers ---


async def _all_answer(name: str, port: int, workers: int, seen_so_far: Callable[[int], object]) -> None:
    """Wait until each worker has answered: an idle worker leaves new connections to others, so call in bursts."""
    seen: set[int] = set()

    async def ask() -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            _, answer, _ = await _call(port, "GET", "/worker", None)
            seen.add(answer["worker"])

    try:
        async with asyncio.timeout(START_SECONDS):
            while len(seen) < workers:
                await asyncio.gather(*(ask() for _ in range(8 * workers)))
                seen_so_far(len(seen))
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise StartupError(f"only {len(seen)} of {workers} workers of the demo's {name} server answered") from error


# --- calls ---


async def _drive(name: str, port: int, sessions: int, calls: int, done: Callable[[], object]) -> Outcome:
    outcome = Outcome(name)
    waiting = iter(range(sessions))

    async def client() -> None:
        for _ in waiting:
            await _one_session(port, calls, outcome, done)

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(AT_ONCE, sessions)):
            tasks.create_task(client())
    outcome.requests_per_second = round(outcome.calls / (time.monotonic() - began), 1)
    return outcome


async def _one_session(port: int, calls: int, outcome: Outcome, done: Callable[[], object]) -> None:
    cookie: str | None = None
    for expected in range(1, calls + 1):
        outcome.calls += 1
        try:
            status, answer, set_cookie = await _call(port, "POST", "/count", cookie)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            outcome.lost += 1
        else:
            cookie = set_cookie or cookie
            if status != 200:
                outcome.lost += 1
            elif answer.get("count") == expected:
                outcome.right += 1
            else:
                outcome.wrong += 1
        done()


async def _call(port: int, method: str, path: str, cookie: str | None) -> tuple[int, dict[str, int], str | None]:
    """One request on a connection of its own: status, JSON body, and the cookie that was set.

    Raises:
        OSError, ValueError, TimeoutError, asyncio.IncompleteReadError: it was not answered, or not in HTTP and JSON.
    """
    async with asyncio.timeout(CALL_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close", "Content-Length: 0"]
            if cookie is not None:
                lines.append(f"Cookie: {cookie}")
            writer.write("\r\n".join([*lines, "", ""]).encode())
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    status_line, *headers = head.decode("latin-1").split("\r\n")
    set_cookie = None
    for header in headers:
        key, _, value = header.partition(":")
        if key.lower() == "set-cookie":
            set_cookie = value.strip().partition(";")[0]
    status = int([*status_line.split(" ", 2), "", ""][1])
    return status, json.loads(body) if status == 200 else {}, set_cookie


# --- what is shown ---


def _print_table(outcomes: Sequence[Outcome], workers: int, sessions: int, calls: int) -> None:
    console = Console()
    # Rich draws its lines in ASCII where the terminal has no UTF-8; the title is ours.
    times = "x" if console.options.ascii_only else "×"
    table = Table(
        title=f"{sessions} sessions {times} {calls} calls, {workers} worker{'s' * (workers > 1)}, a new connection for every call"
    )
    table.add_column("")
    for heading in ("calls", "right", "wrong data", "lost", "req/s"):
        table.add_column(heading, justify="right")
    titles = {"uvicorn": f"uvicorn --workers {workers}", "homing": f"homing run --workers {workers}"}
    for outcome in outcomes:
        good = "green" if outcome.right == outcome.calls else "red"
        table.add_row(
            titles[outcome.server],
            f"{outcome.calls:,}",
            f"[{good}]{outcome.right:,}[/]",
            f"{outcome.wrong:,}",
            f"{outcome.lost:,}",
            f"{outcome.requests_per_second:,.0f}",
        )
    console.print(table)
