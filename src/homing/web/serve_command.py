"""`homing web serve`: browser sessions over HTTP, with `homing run`'s server options.

Not here: the server (`server.py`), and its options (`homing.runtime.command`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Final

import click

from homing.errors import ConfigurationError
from homing.runtime.application import NamedFactory
from homing.runtime.command import ServerCommand, run_server
from homing.runtime.parameters import OwnOption, server_parameters
from homing.web.assembly import Assemble, SiteRule
from homing.web.registry import assembly, checked, parse_settings
from homing.web.server import WebServer
from homing.web.settings import WebSettings, settings_from

GRACEFUL_SECONDS: Final = 15

SETTINGS: Final = ", ".join(each.name for each in fields(WebSettings))
"""The names of all settings, as the help shows them."""


def _serve(
    tasks: tuple[str, ...],
    provider: str,
    provider_options: tuple[str, ...],
    recordings: str | None,
    trace: bool,
    sites: str,
    token_env: str | None,
    name: str,
    max_sessions: int,
    settings: tuple[str, ...],
    max_body_bytes: int,
    **given: Any,
) -> None:
    """Serve browser sessions, each at one worker.

    \b
    homing web serve --tasks miniwob --workers 2
    homing web serve --tasks miniwob --recordings runs --setting idle_seconds=600

    A task is {"benchmark": "miniwob", "task_id": "click-button", "seed": 0}; POST it to /seed_session as {"task": …}.
    """
    ctx = click.get_current_context()
    if given["timeout_graceful_shutdown"] is None:
        # A call may wait for minutes, for a site or a browser; a server that stops does not.
        given["timeout_graceful_shutdown"] = GRACEFUL_SECONDS
    made = settings_of(max_sessions, settings)
    assemble = assembly_of(tasks, provider, provider_options, recordings, trace=trace)
    make = partial(
        WebServer,
        assemble,
        made,
        sites=SiteRule.parse(sites),
        name=name,
        bearer_token=_token(token_env),
        max_body_bytes=max_body_bytes,
    )
    run_server(ctx, given, NamedFactory(f"web serve {','.join(task_set_names(tasks))}", make))


def assembly_of(
    tasks: Sequence[str], provider: str, provider_options: Sequence[str], recordings: str | None, *, trace: bool
) -> Assemble:
    """What opens a worker's backends, browsers and recordings, seen to be possible here.

    Raises:
        ConfigurationError: something of it is unknown, cannot be as it is set, or is not installed.
    """
    made = assembly(
        task_set_names(tasks),
        provider=provider,
        provider_options=parse_settings(provider_options),
        recordings=recordings,
        trace=trace,
    )
    return checked(made)


def task_set_names(tasks: Sequence[str]) -> tuple[str, ...]:
    """The names given, each once.

    Raises:
        ConfigurationError: there are none.
    """
    names = [name for given in tasks for name in given.split(",") if name]
    if not names:
        raise ConfigurationError("--tasks is missing: name at least one task set, such as --tasks miniwob")
    return tuple(dict.fromkeys(names))


def settings_of(max_sessions: int, given: Sequence[str]) -> WebSettings:
    """Settings from the command line.

    Raises:
        ConfigurationError: one that there is not, or that cannot be.
    """
    found = parse_settings(given)
    return settings_from({"max_sessions": max_sessions, **found})


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        state = "is empty" if token == "" else "is not set"
        raise ConfigurationError(f"--token-env {variable}: that environment variable {state}; set it to the token")
    return token


def assembly_parameters() -> list[click.Parameter]:
    """Options of whatever serves web tasks: which tasks, which browsers, how many, how long."""
    return [
        OwnOption(["--tasks"], metavar="NAME", multiple=True, help="A task set, such as miniwob; several: once each."),
        OwnOption(
            ["--provider"],
            metavar="NAME",
            default="local_process",
            show_default=True,
            help="Where browsers come from.",
        ),
        OwnOption(
            ["--provider-option", "provider_options"],
            metavar="NAME=VALUE",
            multiple=True,
            help="One of the provider's own settings; VALUE is JSON, or a text.",
        ),
        OwnOption(
            ["--recordings"],
            metavar="DIR",
            help="Where sessions' recordings are kept. [default: nowhere, none are made]",
        ),
        OwnOption(
            ["--trace"],
            is_flag=True,
            help="Keep a trace of every session beside its recording, for Playwright's viewer.",
        ),
        OwnOption(
            ["--sites"],
            metavar="MODE",
            default="unmanaged",
            show_default=True,
            help="How sessions share stateful sites: unmanaged, locked (one writer or many readers), or limited:N.",
        ),
        OwnOption(["--name"], default="server", show_default=True, help="Tells this server's cookie from others'."),
        OwnOption(
            ["--max-sessions-per-worker", "max_sessions"],
            metavar="N",
            type=click.IntRange(1),
            default=WebSettings().max_sessions,
            show_default=True,
            help="Sessions at once in each worker: a seed beyond so many is answered 503.",
        ),
        OwnOption(
            ["--setting", "settings"],
            metavar="NAME=VALUE",
            multiple=True,
            help=f"How long anything may take, and the like: {SETTINGS}.",
        ),
    ]


serve = ServerCommand(
    "serve",
    own_heading="Browser sessions",
    callback=_serve,
    params=[
        *assembly_parameters(),
        OwnOption(
            ["--token-env"],
            metavar="VAR",
            help="The environment variable that holds the bearer token that clients must send. [default: none]",
        ),
        OwnOption(
            ["--max-body", "max_body_bytes"],
            metavar="BYTES",
            type=click.IntRange(1),
            default=2**20,
            show_default=True,
            help="The longest body of a request.",
        ),
        *server_parameters(limits=False),  # its own limit is each worker's browsers
    ],
    help=_serve.__doc__,
    short_help="Serve browser sessions.",
)
