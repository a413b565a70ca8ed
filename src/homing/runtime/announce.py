"""What `homing run` says as it starts to serve: one line on how sessions are told and treated, and what to think of.

Not here: what is refused (`run.py`, `homing.routing.options`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import homing
from homing.identity import SignedCookieSource
from homing.routing.options import RoutingOptions
from homing.runtime.config import RoutedBy, RunConfig

logger = logging.getLogger(__name__)

_THE_APPS: Final = "sessions as the app itself declares them"

_OPTIONS: Final = {
    "sessions": "--session",
    "learn": "--learn",
    "starts": "--start",
    "ends": "--end",
    "preset": "--preset",
    "idle_seconds": "--idle",
    "unowned": "--unowned",
    "gone_status": "--gone",
    "secret": "--secret-env",
    "max_body_bytes": "--max-body",
    "owner_timeout_seconds": "--owner-timeout",
    "place": "--place",
    "max_sessions": "--max-sessions",
    "max_sessions_per_worker": "--max-sessions-per-worker",
    "queue_seconds": "--queue",
    "scatter": "--scatter",
}

_OF_STARTS: Final = frozenset({"place", "max_sessions", "max_sessions_per_worker", "queue_seconds"})
"""What is about declared starts only."""

_HEEDED: Final = _OF_STARTS | {"owner_timeout_seconds", "scatter"}
"""What an app that asks how its server runs makes use of."""


def announce(config: RunConfig, run_dir: str | None, routed_by: RoutedBy) -> None:
    """Say how this server runs, and what in its options ends sessions or has no effect."""
    told = how_sessions_are_named(config.routing)
    if routed_by is RoutedBy.APP or (routed_by is RoutedBy.APP_AS_TOLD and config.workers > 1):
        told = _THE_APPS
    workers = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    where = f", run directory {run_dir}" if run_dir else ""
    logger.info("homing %s: %s, %s%s", homing.__version__, workers, told, where)
    if config.limit_max_requests is not None:
        logger.warning(
            "--limit-max-requests %d: a worker ends after it has accepted so many requests (a forwarded one counts "
            "where it was accepted), and its sessions end with it",
            config.limit_max_requests,
        )
    if config.handoff and not config.moves_connections:
        logger.info(
            "connections stay where they were accepted, and requests are forwarded: only --http httptools of a uvicorn that homing was tested with moves them"
        )
    if routed_by is not RoutedBy.HOMING_RUN:
        if options := _options_without_effect(config.routing, routed_by):
            logger.warning(
                "%s: the app routes itself (such as by homing.sticky), and what it says there counts",
                _have_no_effect(options),
            )
    elif config.routing is not None:
        for line in _doubts(config.routing):
            logger.warning("%s", line)


def how_sessions_are_named(routing: RoutingOptions | None) -> str:
    """How sessions are told and treated, in a few words."""
    if routing is None:
        return "requests are not routed (--no-sessions)"
    checked = routing.checked()
    named = [source.spec for source in checked.sessions]
    if checked.preset is not None:
        named.append(f"preset {checked.preset.name}")
    if not named:
        return "which holds every session" if routing.workers == 1 else _THE_APPS
    words = [f"sessions named by {', '.join(named)}"]
    words += [f"learned from {source.spec}" for source in checked.learn]
    words += [f"started by {route}" for route in checked.starts.routes]
    words += [f"ended by {route}" for route in checked.ends.routes]
    if routing.workers != 1:
        words.append(f"unowned: {'adopt' if checked.adopts else 'refuse'}")
    return ", ".join(words)


def _options_without_effect(routing: RoutingOptions | None, routed_by: RoutedBy) -> list[str]:
    """The options about sessions that were given, as the command line has them, and that the app does not heed."""
    if routing is None:
        return ["--no-sessions"]
    heeded = _HEEDED if routed_by is RoutedBy.APP_AS_TOLD else frozenset()
    return [_OPTIONS[name] for name in _given(routing) if name not in heeded]


def _given(routing: RoutingOptions) -> list[str]:
    """The options about sessions that ask for something, in the order of the table."""
    default = RoutingOptions()
    # "balanced" is what the command line has by itself.
    return [name for name in _OPTIONS if getattr(routing, name) not in (getattr(default, name), "balanced")]


def _have_no_effect(options: list[str]) -> str:
    return f"{', '.join(options)} {'has' if len(options) == 1 else 'have'} no effect"


def _doubts(routing: RoutingOptions) -> Iterator[str]:
    checked = routing.checked()
    if routing.workers != 1 and (spec := routing.learns_nothing) is not None:
        yield (
            f"{spec} is in requests only, and nothing says where sessions begin: if the app makes their IDs, add --learn "
            "body:FIELD@/route and --start 'METHOD /route'; if clients choose them, --unowned adopt says so"
        )
    if routing.secret is not None and not any(
        isinstance(source, SignedCookieSource) for source in (*checked.sessions, *checked.learn)
    ):
        yield "--secret-env has no effect: nothing is signed; --session signed-cookie:NAME:KEY is what needs a secret"
    declares_starts = checked.starts or (checked.preset is not None and checked.preset.starts)
    if routing.workers != 1 and not declares_starts and (given := [n for n in _given(routing) if n in _OF_STARTS]):
        yield (
            f"{_have_no_effect([_OPTIONS[each] for each in given])}: declared starts alone are placed and limited, and "
            "nothing declares one; add --start 'METHOD /route'"
        )
    limits = ("max_sessions", "max_sessions_per_worker")
    if routing.workers == 1 and (given := [_OPTIONS[each] for each in limits if getattr(routing, each) is not None]):
        yield f"{' and '.join(given)}: no effect with one worker, where nothing is routed; use --workers 2 or more"
    if routing.scatter and routing.workers == 1:
        yield "--scatter has no effect with one worker: use --workers 2 or more"
    elif routing.scatter:
        yield "--scatter is a test mode: every request takes a detour through a wrong worker"
