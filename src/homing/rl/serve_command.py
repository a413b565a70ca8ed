"""`homing rl serve ENV`: a Gymnasium environment as a server, with `homing run`'s server options.

Not here: the server (`gymnasium.py`), and its options (`homing.runtime.command`).
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from homing.errors import ConfigurationError
from homing.rl.gymnasium import (
    DEFAULT_IDLE_SECONDS,
    DEFAULT_STEP_TIMEOUT_SECONDS,
    DEFAULT_THREADS,
    GymnasiumServer,
)
from homing.runtime.application import NamedFactory
from homing.runtime.command import ServerCommand, run_server
from homing.runtime.parameters import OwnOption, server_parameters


def _serve(
    environment: str,
    env_kwargs: str | None,
    threads: int,
    idle_seconds: float,
    step_timeout_seconds: float,
    **given: Any,
) -> None:
    """Serve a Gymnasium environment, each session's at one worker.

    ENV is a registered ID, such as CartPole-v1, or package.module:ID: then that module is imported first.

    \b
    homing rl serve CartPole-v1 --workers 4
    homing rl serve my_envs:Maze-v0 --env-kwargs '{"size": 9}'

    `homing.rl.RemoteEnv(url)` is its client, a gymnasium.Env; `RemoteVectorEnv(url, num_envs=N)` has many.
    """
    ctx = click.get_current_context()
    make = partial(
        GymnasiumServer,
        environment,
        _kwargs(env_kwargs),
        threads=threads,
        idle_seconds=idle_seconds,
        step_timeout_seconds=step_timeout_seconds,
    )
    run_server(ctx, given, NamedFactory(f"rl serve {environment}", make))


def _kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--env-kwargs {text}: no valid JSON ({error}); write it as '{{\"name\": value}}'"
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"--env-kwargs {text}: write a JSON object, such as '{{\"name\": value}}'")
    return found


serve = ServerCommand(
    "serve",
    own_heading="Environment and sessions",
    callback=_serve,
    params=[
        click.Argument(["environment"], metavar="ENV"),
        OwnOption(["--env-kwargs"], metavar="JSON", help="Arguments of the environment, as a JSON object."),
        OwnOption(
            ["--threads"],
            metavar="N",
            type=click.IntRange(1),
            default=DEFAULT_THREADS,
            show_default=True,
            help="Threads that environments run on, in each worker.",
        ),
        OwnOption(
            ["--idle", "idle_seconds"],
            metavar="SECONDS",
            type=click.FloatRange(0, min_open=True),
            default=DEFAULT_IDLE_SECONDS,
            show_default=True,
            help="An environment that nobody uses for so long is closed.",
        ),
        OwnOption(
            ["--step-timeout", "step_timeout_seconds"],
            metavar="SECONDS",
            type=click.FloatRange(0, min_open=True),
            default=DEFAULT_STEP_TIMEOUT_SECONDS,
            show_default=True,
            help="A step that takes longer hangs: its thread is given up, with the sessions on it.",
        ),
        *server_parameters(),
    ],
    help=_serve.__doc__,
    short_help="Serve a Gymnasium environment.",
)
