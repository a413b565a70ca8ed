"""`homing ps` and `homing top`: the running servers of this user, once or live.

Not here: how servers are found, and what they say (`homing.watch`).
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from homing.cli.naming import named_server
from homing.cli.printable import printable
from homing.cli.sessions import duration, sessions_document, sessions_table
from homing.cli.tables import FittingTable
from homing.clock import boot_seconds
from homing.errors import ConfigurationError
from homing.watch.figures import STALE_SECONDS, Figures
from homing.watch.servers import Server, running_servers
from homing.watch.sessions import LIMIT, sessions_of

REFRESH_SECONDS: Final = 1.0
_WIDE: Final = 240
_SPARE_OF_SERVERS: Final = ("handoffs", "forwarded", "served", "gone", "up")
_SPARE_OF_WORKERS: Final = (
    "adopted",
    "given",
    "received",
    "forwarded",
    "lag",
    "up",
    "served",
    "serving",
    "per s",
    "sessions",
)
"""What a terminal that is too narrow does not show, the first first."""
SERVER_COLUMNS: Final = (
    "address",
    "app",
    "workers",
    "sessions",
    "served",
    "forwarded",
    "handoffs",
    "gone",
    "up",
)
WORKER_COLUMNS: Final = (
    "worker",
    "pid",
    "sessions",
    "serving",
    "served",
    "per s",
    "received",
    "forwarded",
    "given",
    "adopted",
    "lag",
    "up",
)
"""What is shown of each worker; `per s` where rates are known, in `top`."""
_NONE: Final = "no server with several workers runs under this user"


@click.command()
@click.argument("server", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for machines.")
@click.option("--sessions", is_flag=True, help="SERVER's sessions, and why the last ones ended.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=LIMIT,
    show_default=True,
    help="With --sessions: of each worker's sessions, so many at most.",
)
def ps(server: str | None, as_json: bool, sessions: bool, limit: int) -> None:
    """The running servers of this user: address, workers, sessions, and what became of their requests.

    SERVER, an address, a port, a supervisor's process ID or a run directory, shows its workers one by one. Servers with one
    worker have nothing to route, and are not listed.
    """
    if sessions:
        show_sessions(server, as_json=as_json, limit=limit)
        return
    now = boot_seconds()
    if as_json:
        found = [named_server(server)] if server else running_servers()
        click.echo(json.dumps([as_document(each, now) for each in found], indent=2))
        return
    console = _console()
    if server is not None:
        console.print(workers_table(named_server(server), now))
        return
    servers = running_servers()
    if not servers:
        click.echo(_NONE, err=True)
        return
    console.print(servers_table(servers, now))


@click.command()
@click.argument("server", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document a second, one per line, for machines.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after so long. [default: until Ctrl-C]")
def top(server: str | None, as_json: bool, seconds: float | None) -> None:
    """As `homing ps`, live: every second, with requests per second.

    Into a pipe or a file it prints what it sees each second, one table after the other, until whoever reads has gone.
    """
    watched = _Watched(server)
    end = None if seconds is None else time.monotonic() + seconds
    if as_json:
        while True:
            click.echo(json.dumps(watched.documents()))
            if not _wait(end):
                return
    console = _console()
    if console.is_dumb_terminal or not console.is_terminal:
        # What cannot be written over is followed by what is seen next.
        while True:
            console.print(watched.table())
            if not _wait(end):
                return
    with Live(watched.table(), console=console, refresh_per_second=4, screen=False) as live:
        while _wait(end):
            live.update(watched.table())


def show_sessions(name: str | None, *, as_json: bool, limit: int) -> None:
    """What `homing ps SERVER --sessions` prints; of the only server, where none is named.

    Raises:
        ConfigurationError: no server, or more than one, is called so.
    """
    if name is None:
        servers = running_servers()
        if len(servers) != 1:
            listed = ", ".join(f"{each.description.address} [{each.description.pid}]" for each in servers) or "none"
            raise ConfigurationError(f"--sessions shows those of one server: name it; running: {listed}")
        [server] = servers
    else:
        server = named_server(name)
    found = sessions_of(server, limit=limit)
    if as_json:
        click.echo(json.dumps(sessions_document(server, found), indent=2))
        return
    _console().print(sessions_table(server, found))


class _Console(Console):
    """Shows what servers, and the file system, say as text: there is no markup in it, and nothing a terminal would act on."""

    def __init__(self, *, width: int | None = None) -> None:
        super().__init__(width=width, markup=False, emoji=False)

    def render_str(self, text: str, *arguments: Any, **settings: Any) -> Text:
        # Every cell, title and caption comes through here.
        return super().render_str(printable(text), *arguments, **settings)


def _console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding such as ASCII has no dots for what is cut, nor all letters of a path: they are shown as '?'.
        sys.stdout.reconfigure(errors="replace")
    # Into a pipe or a file nothing is cut to the width of a terminal that is not there.
    console = _Console()
    return console if console.is_terminal else _Console(width=_WIDE)


def _wait(end: float | None) -> bool:
    """Wait until the next look; False once it is over."""
    left = REFRESH_SECONDS if end is None else min(REFRESH_SECONDS, end - time.monotonic())
    if left <= 0:
        return False
    time.sleep(left)
    return True


class _Watched:
    """What `top` looks at, and what it saw the time before, for rates."""

    def __init__(self, name: str | None) -> None:
        self._path = named_server(name).path if name else None
        self._seen: dict[str, tuple[Figures, float | None]] = {}
        """Of each worker that lives, what it said last, and its rate up to then once it has said something twice."""

    def _look(self) -> list[Server]:
        servers = running_servers()
        return servers if self._path is None else [each for each in servers if each.path == self._path]

    def documents(self) -> list[dict[str, Any]]:
        return [as_document(each, boot_seconds()) for each in self._look()]

    def table(self) -> RenderableType:
        servers = self._look()
        if not servers:
            return Text(_NONE)
        now = boot_seconds()
        self._seen = {each.worker: self._noted(each) for server in servers for each in server.alive}
        rates = {worker: rate for worker, (_, rate) in self._seen.items() if rate is not None}
        return Group(*(workers_table(each, now, rates) for each in servers))

    def _noted(self, figures: Figures) -> tuple[Figures, float | None]:
        """A rate stays until its worker has said something new."""
        before, rate = self._seen.get(figures.worker, (figures, None))
        passed = figures.written - before.written
        return (before, rate) if passed <= 0 else (figures, (figures.served - before.served) / passed)


def as_document(server: Server, now: float) -> dict[str, Any]:
    """A server as JSON: its description, the sums over its workers, and each living worker."""
    description = server.description
    return {
        "address": description.address,
        "pid": description.pid,
        "app": description.app,
        "version": description.version,
        "run_directory": server.path,
        "uptime_seconds": round(now - description.began, 3),
        "workers_wanted": description.workers,
        **_sums(server),
        "workers": [
            {
                "worker": figures.worker,
                "pid": figures.pid,
                "uptime_seconds": round(now - figures.began, 3),
                "stale": is_stale(figures, now),
                "sessions": figures.sessions,
                "open_sessions": figures.open_sessions,
                "ended_sessions": figures.ended_sessions,
                "serving": figures.serving,
                "served": figures.served,
                "received": figures.received,
                "forwarded": figures.forwarded,
                "given": figures.given,
                "adopted": figures.adopted,
                "answers": dict(sorted(figures.answers.items())),
                "lag_seconds": round(figures.lag_seconds, 6),
                "draining": figures.draining,
            }
            for figures in server.alive
        ],
    }


def _sums(server: Server) -> dict[str, Any]:
    answers: dict[str, int] = {}
    for figures in server.all:
        for code, count in figures.answers.items():
            answers[code] = answers.get(code, 0) + count
    return {
        "sessions": sum(figures.sessions for figures in server.alive),
        "open_sessions": sum(figures.open_sessions for figures in server.alive),
        "ended_sessions": sum(figures.ended_sessions for figures in server.alive),
        "serving": sum(figures.serving for figures in server.alive),
        "served": sum(figures.served for figures in server.all),
        "forwarded": sum(figures.forwarded for figures in server.all),
        "handoffs": sum(figures.given for figures in server.all),
        "gone": answers.get("session_gone", 0),
        "answers": dict(sorted(answers.items())),
    }


def servers_table(servers: Sequence[Server], now: float) -> FittingTable:
    rows = []
    for server in servers:
        sums, description = _sums(server), server.description
        per_worker = "+".join(str(figures.open_sessions) for figures in server.alive)
        rows.append(
            {
                "address": description.address,
                "app": description.app,
                "workers": f"{len(server.alive)}/{description.workers}",
                "sessions": f"{sums['open_sessions']:,} ({per_worker})" if per_worker else "0",
                **{name: f"{sums[name]:,}" for name in ("served", "forwarded", "handoffs", "gone")},
                "up": duration(now - description.began),
            }
        )
    return FittingTable(SERVER_COLUMNS, rows, whole=("address",), texts=("address", "app"), spare=_SPARE_OF_SERVERS)


def workers_table(server: Server, now: float, rates: dict[str, float] | None = None) -> FittingTable:
    description = server.description
    names = [name for name in WORKER_COLUMNS if name != "per s" or rates is not None]
    rows = [
        {
            "worker": figures.worker[:8]
            + (" (silent)" if is_stale(figures, now) else " (drains)" if figures.draining else ""),
            "pid": str(figures.pid),
            "sessions": _open_and_ended(figures),
            "serving": f"{figures.serving:,}",
            "served": f"{figures.served:,}",
            "per s": f"{rates[figures.worker]:,.0f}" if rates is not None and figures.worker in rates else "",
            "received": f"{figures.received:,}",
            "forwarded": f"{figures.forwarded:,}",
            "given": f"{figures.given:,}",
            "adopted": f"{figures.adopted:,}",
            "lag": f"{figures.lag_seconds * 1000:.0f} ms",
            "up": duration(now - figures.began),
        }
        for figures in server.alive
    ]
    notes = []
    if answers := _sums(server)["answers"]:
        notes.append("answers: " + ", ".join(f"{code} {count:,}" for code, count in answers.items()))
    if server.dead:
        served = sum(figures.served for figures in server.dead)
        who = "1 worker has exited; it" if len(server.dead) == 1 else f"{len(server.dead)} workers have exited; they"
        notes.append(f"{who} had served {served:,} requests")
    return FittingTable(
        names,
        rows,
        whole=("worker", "pid"),
        texts=("worker",),
        spare=[name for name in _SPARE_OF_WORKERS if name in names],
        title=f"{description.address}  {description.app}  [{description.pid}]  {server.path}",
        notes=notes,
    )


def _open_and_ended(figures: Figures) -> str:
    ended = figures.ended_sessions
    return f"{figures.open_sessions:,}" + (f" +{ended:,} ended" if ended else "")


def is_stale(figures: Figures, now: float) -> bool:
    """Whether a worker that lives has not said anything for too long."""
    return now - figures.written > STALE_SECONDS
