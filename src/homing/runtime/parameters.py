"""The parameters of whatever serves: homing's own options, and what uvicorn's command has.

uvicorn's are copies of its own click declarations, so an option that a newer uvicorn adds is there without a change here.

Not here: what becomes of what was given (`command.py`).
"""

from __future__ import annotations

import copy
from typing import Any, Final

import click
import uvicorn
from uvicorn.main import main as uvicorn_command

import homing
from homing.placement import POLICIES
from homing.routing.options import DAY_SECONDS

WORKER_HEALTHCHECK_SECONDS: Final = 30
"""uvicorn's 5 s would kill a worker, and all its sessions, for one long step that holds the interpreter's lock."""


class OwnOption(click.Option):
    """An option of homing's own: shown first, and not read from uvicorn's environment variables."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.allow_from_autoenv = False


OWN_APPS_OPTIONS: Final = (
    "owner_timeout_seconds",
    "place",
    "sessions_at_once",
    "max_sessions_per_worker",
    "queue_seconds",
    "scatter",
    "no_handoff",
    "drain_seconds",
    "metrics_port",
    "metrics_route",
    "dashboard_port",
    "log_format",
    "run_dir",
)
"""What of homing's own options is left to choose for an app that declares its sessions itself."""

_OF_THE_APP: Final = (
    "app",
    "factory",
    "interface",
    "reload",
    "reload_dirs",
    "reload_includes",
    "reload_excludes",
    "reload_delay",
)
"""uvicorn's parameters that make no sense where the command itself says what is served."""


_LIMITS: Final = ("sessions_at_once", "max_sessions_per_worker", "queue_seconds")


def server_parameters(*, limits: bool = True) -> list[click.Parameter]:
    """Parameters of a command that serves an app which declares its own sessions: homing's, then uvicorn's.

    Args:
        limits: With those that limit sessions; not where the app has limits of its own.
    """
    names = OWN_APPS_OPTIONS if limits else tuple(name for name in OWN_APPS_OPTIONS if name not in _LIMITS)
    own = [each for each in own_options() if each.name in names]
    return [*own, *(each for each in uvicorn_parameters() if each.name not in _OF_THE_APP)]


def own_options() -> list[OwnOption]:
    """homing's own options, as `homing run` has them."""
    return [
        OwnOption(
            ["--session", "sessions"],
            metavar="SPEC",
            multiple=True,
            help="Where requests name their session, as a SPEC; the first of several that names one decides.",
        ),
        OwnOption(
            ["--learn"],
            metavar="SPEC",
            multiple=True,
            help="Where replies first name a session that the app has made, if that is nowhere in --session: "
            "a path or query is in requests only.",
        ),
        OwnOption(
            ["--start", "starts"],
            metavar="'METHOD /route'",
            multiple=True,
            help="A route that starts a session, such as 'POST /sessions'; '/sessions' alone: with any method.",
        ),
        OwnOption(
            ["--end", "ends"],
            metavar="'METHOD /route'",
            multiple=True,
            help="A route that ends the session it names, such as 'DELETE /sessions/{id}'; without METHOD as above.",
        ),
        OwnOption(
            ["--preset"], metavar="NAME", help="A protocol's bundle of all that: engineio (Socket.IO), gradio or mcp."
        ),
        OwnOption(
            ["--idle", "idle_seconds"],
            metavar="SECONDS",
            type=float,
            default=DAY_SECONDS,
            show_default=True,
            help="A session without a request for so long loses its owner.",
        ),
        OwnOption(
            ["--unowned"],
            type=click.Choice(["adopt", "refuse"]),
            help="A request whose session nobody owns is served where it lands (adopt) or answered 'gone' (refuse). "
            "[default: refuse if something says where sessions begin, else adopt]",
        ),
        OwnOption(
            ["--gone", "gone_status"],
            metavar="STATUS",
            type=int,
            help="The status for a session whose state is lost. [default: 410, or the preset's]",
        ),
        OwnOption(
            ["--secret-env"],
            metavar="VAR",
            help="The environment variable that holds the secret which signs the session cookie.",
        ),
        OwnOption(
            ["--max-body", "max_body_bytes"],
            metavar="BYTES",
            type=int,
            default=2**20,
            show_default=True,
            help="The longest JSON body that is read to find a session in it.",
        ),
        OwnOption(
            ["--owner-timeout", "owner_timeout_seconds"],
            metavar="SECONDS",
            type=float,
            default=30.0,
            show_default=True,
            help="How long a session's worker may take to say that a forwarded request is its own.",
        ),
        OwnOption(
            ["--place"],
            type=click.Choice(POLICIES),
            default="balanced",
            help="Where a declared start runs: where it arrived unless that worker has more than its share of sessions "
            "(balanced), at the worker with the fewest (fewest), always where it arrived (accepting), or anywhere (random). "
            "[default: balanced]",
        ),
        OwnOption(
            ["--max-sessions", "sessions_at_once"],
            metavar="N",
            type=int,
            help="How many live sessions the whole server may have: a declared start beyond them is answered 503. "
            "[default: no limit]",
        ),
        OwnOption(
            ["--max-sessions-per-worker"],
            metavar="N",
            type=int,
            help="A declared start of a session beyond so many is answered 503. [default: no limit]",
        ),
        OwnOption(
            ["--queue", "queue_seconds"],
            metavar="SECONDS",
            type=float,
            default=0.0,
            show_default=True,
            help="A declared start beyond a limit of sessions waits so long for room, first come, first served over all workers, "
            "before it is answered 503.",
        ),
        OwnOption(
            ["--scatter"],
            is_flag=True,
            help="Test mode: every request first lands on a wrong worker, to see that the app works when forwarded.",
        ),
        OwnOption(
            ["--no-handoff"],
            is_flag=True,
            help="A client's connection stays at the worker that accepted it. By default a clear-text HTTP/1.1 connection "
            "that keeps asking for sessions of one other worker moves there.",
        ),
        OwnOption(
            ["--drain-timeout", "drain_seconds"],
            metavar="SECONDS",
            type=click.FloatRange(min=0),
            default=300.0,
            show_default=True,
            help="How long the sessions of a worker go on that is to leave (homing drain, SIGHUP, SIGTTOU) before they end "
            "with it; 0: at once.",
        ),
        OwnOption(
            ["--no-sessions"], is_flag=True, help="Several workers without routing: any worker serves any request."
        ),
        OwnOption(
            ["--metrics-port"],
            metavar="PORT",
            type=click.IntRange(0, 65535),
            help="Serve Prometheus metrics of the whole server on this port of 127.0.0.1; 0: any free port. "
            "[default: none]",
        ),
        OwnOption(
            ["--metrics-route"],
            metavar="PATH",
            help="Answer with the same metrics on this path of the public port, such as /metrics, at whichever worker. "
            "[default: none]",
        ),
        OwnOption(
            ["--dashboard-port"],
            metavar="PORT",
            type=click.IntRange(0, 65535),
            help="Serve a live page about this server on this port of 127.0.0.1; 0: any free port. [default: none]",
        ),
        OwnOption(
            ["--log-format"],
            type=click.Choice(("text", "json")),
            default="text",
            show_default=True,
            help="Log lines for people (text), or one JSON object per line with fields of their own (json).",
        ),
        OwnOption(
            ["--run-dir"],
            metavar="DIR",
            help="Where the workers' private sockets live; made if missing, else it has to be yours and 0700. "
            "[default: $HOMING_SESSION_SOCKET_DIR, or a new one in memory]",
        ),
    ]


def uvicorn_parameters() -> list[click.Parameter]:
    """uvicorn's own parameters, with APP first."""
    parameters = []
    for declared in uvicorn_command.params:
        parameter = copy.copy(declared)
        if parameter.name == "timeout_worker_healthcheck":
            parameter.default = WORKER_HEALTHCHECK_SECONDS
        elif parameter.name == "version" and isinstance(parameter, click.Option):
            parameter.callback = _print_versions
            parameter.help = "Show the versions of homing and uvicorn and exit."
        parameters.append(parameter)
    return parameters


def _print_versions(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        click.echo(f"homing {homing.__version__}, uvicorn {uvicorn.__version__}")
        ctx.exit()
