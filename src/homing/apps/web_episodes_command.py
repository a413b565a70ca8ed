"""`homing web episodes`: web tasks as a resources server, for `homing rl rollouts`.

Not here: the server (`web_resources.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from homing.apps.web_resources import WebResources
from homing.rl.resources import check_mcp_sdk
from homing.runtime.application import NamedFactory
from homing.runtime.command import ServerCommand, run_server
from homing.runtime.parameters import OwnOption, server_parameters
from homing.web.assembly import SiteRule
from homing.web.serve_command import assembly_of, assembly_parameters, settings_of, task_set_names


def _episodes(
    tasks: tuple[str, ...],
    provider: str,
    provider_options: tuple[str, ...],
    recordings: str | None,
    trace: bool,
    sites: str,
    max_sessions: int,
    settings: tuple[str, ...],
    name: str,
    mcp: bool,
    **given: Any,
) -> None:
    """Serve web tasks as a resources server: an episode's session is a browser, its tools are step and observe.

    \b
    homing web episodes --tasks miniwob --workers 2 --port 8001

    A task's data are {"benchmark": "miniwob", "task_id": "click-button", "seed": 0}.
    """
    if mcp:
        check_mcp_sdk("--mcp")
    make = partial(
        WebResources,
        assembly_of(tasks, provider, provider_options, recordings, trace=trace),
        settings_of(max_sessions, settings),
        sites=SiteRule.parse(sites),
        name=name,
        expose_tools_over_mcp=mcp,
    )
    named = NamedFactory(f"web episodes {','.join(task_set_names(tasks))}", make)
    run_server(click.get_current_context(), given, named)


episodes = ServerCommand(
    "episodes",
    own_heading="Web tasks",
    callback=_episodes,
    params=[
        *assembly_parameters(),
        OwnOption(["--mcp"], is_flag=True, help="Also offer the tools over MCP, at /mcp."),
        *server_parameters(limits=False),  # its own limit is each worker's browsers
    ],
    help=_episodes.__doc__,
    short_help="Serve web tasks as a resources server, for rollouts.",
)
