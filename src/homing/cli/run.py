"""`homing run APP`.

Not here: its options (`homing.runtime.parameters`), and serving (`homing.runtime.command`).
"""

from __future__ import annotations

from typing import Any

import click

from homing.runtime.command import ServerCommand, run_server
from homing.runtime.parameters import own_options, uvicorn_parameters


def _run(**given: Any) -> None:
    """Serve APP on several workers; every request reaches the worker that holds its session.

    One worker, the default of --workers, routes nothing.

    APP is package.module:name: an ASGI app, a function that makes one, or an MCP server object.

    \b
    homing run shop:app --workers 4 --session cookie:cart
    homing run server:mcp --workers 4 --preset mcp
    homing run chat:app --workers 4 --preset engineio

    SPEC, a place where a session is named, is one of

    \b
    header:NAME                that header
    cookie:NAME                the text of that cookie
    signed-cookie:NAME:KEY     KEY in Starlette's signed session cookie
    query:NAME                 that query parameter
    path:/sessions/{session}   that segment of the path
    body:a.b@/route            that field of the JSON body on that route
    mcp-handle:NAME[@/route]   that argument of an MCP tool call
    """
    run_server(click.get_current_context(), given)


run = ServerCommand(
    "run",
    callback=_run,
    params=[*own_options(), *uvicorn_parameters()],
    help=_run.__doc__,
    short_help="Serve an app on several workers, each session at one of them.",
)
