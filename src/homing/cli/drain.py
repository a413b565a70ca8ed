"""`homing drain`: a planned restart of one worker of a running server.

Not here: how it is asked for (`homing.runtime.control`), and what the server does about it (`homing.runtime.supervisor`).
"""

from __future__ import annotations

import json
from typing import Any, Final

import click

from homing.cli.naming import named_server
from homing.errors import ConfigurationError, StartupError
from homing.runtime.control import Progress, ask_to_drain
from homing.watch.figures import Figures
from homing.watch.servers import Server, look_at

LOOK_SECONDS: Final = 1.0
_SHORTEST_ID: Final = 4


@click.command()
@click.argument("server")
@click.argument("worker")
@click.option("--json", "as_json", is_flag=True, help="One JSON document for each step, one per line, for machines.")
def drain(server: str, worker: str, as_json: bool) -> None:
    """Let one worker of a running server end its sessions and leave, and another serve in its place.

    SERVER is an address, a port, a supervisor's process ID or a run directory, as homing ps shows them; WORKER a worker's ID, its
    beginning, or its process ID.

    The new worker serves before the old one drains. From then on no session begins at the old one; its sessions go on
    until they end, or for the server's --drain-timeout. Ctrl-C stops the looking on, not the drain.

    Exits with 0 once the worker has left, with 2 if there is no such server or worker, and with 3 if the worker did not drain: its
    replacement could not start, or it died, or the server has stopped.
    """
    found = named_server(server)
    leaving = find_worker(found, worker)
    at: Progress | None = None
    left: int | None = None
    shown: tuple[Progress, int | None] | None = None
    for progress in ask_to_drain(found.path, leaving.pid, look_seconds=LOOK_SECONDS):
        if progress is not None:
            at = progress
            if at.state in ("failed", "refused"):
                raise StartupError(f"worker {leaving.worker[:8]} [{leaving.pid}] does not drain: {at.why}")
            if at.sessions is not None:
                left = at.sessions
        else:
            now = look_at(found.path)
            told = next((f for f in now.alive if f.worker == leaving.worker), None) if now is not None else None
            # What it wrote before it drained lacks the sessions that had begun since.
            if told is not None and told.draining:
                left = told.open_sessions
        if at is not None and shown != (at, left):
            shown = at, left
            click.echo(json.dumps(document(leaving, at, left)) if as_json else line(leaving, at, left))


def find_worker(server: Server, name: str) -> Figures:
    """The worker of a server that a user names: by its ID, its beginning, or its process ID.

    Raises:
        ConfigurationError: none, or more than one, is called so; the message lists them.
    """
    by_id = [each for each in server.alive if len(name) >= _SHORTEST_ID and each.worker.startswith(name)]
    found = [each for each in server.alive if str(each.pid) == name] or by_id
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{each.worker[:8]} [{each.pid}]" for each in server.alive) or "none that says so"
    how_many = "more than one worker" if found else "no worker"
    raise ConfigurationError(f"{how_many} of {server.description.address} is called {name}; running: {listed}")


def document(worker: Figures, at: Progress, sessions: int | None) -> dict[str, Any]:
    """One step, for machines. `sessions`: those still open, None until the worker has said so; once `drained`, those that have
    ended with the worker."""
    shown = {"worker": worker.worker, "pid": worker.pid, "state": at.state, "sessions": sessions}
    return shown if at.replacement is None else {**shown, "replacement": at.replacement}


def line(worker: Figures, at: Progress, sessions: int | None) -> str:
    """One step, for people."""
    who = f"worker {worker.worker[:8]} [{worker.pid}]"
    them, have = ("1 session", "has") if sessions == 1 else (f"{sessions} sessions", "have")
    match at.state:
        case "waiting":
            return f"{who} is to drain"
        case "starting":
            return f"{who} is to drain: its replacement [{at.replacement}] starts"
        case "draining":
            return f"{who} drains" if sessions is None else f"{who} drains: {them} left"
        case _:
            ended = f"; {them} {have} ended with it" if sessions else ""
            return f"{who} has left{ended}"
