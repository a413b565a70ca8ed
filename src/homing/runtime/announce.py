"""What `homing run` says as it starts to serve: one line on how sessions are told and treated, and what to think of.

Not here: what is refused (`run.py`, `homing.routing.options`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import homing
from homing.identity import SignedCookieSource
from homing.routing.options import RoutingOptions
from homing.runtime.config import RunConfig

logger = logging.getLogger(__name__)


def announce(config: RunConfig, run_dir: str | None) -> None:
    """Say how this server runs, and what in its options ends sessions or has no effect."""
    workers = "1 worker" if config.workers == 1 else f"{config.workers} workers"
    where = f", run directory {run_dir}" if run_dir else ""
    logger.info("homing %s: %s, %s%s", homing.__version__, workers, how_sessions_are_named(config.routing), where)
    if config.limit_max_requests is not None:
        logger.warning(
            "--limit-max-requests %d: a worker ends after it has accepted so many requests (a forwarded one counts "
            "where it was accepted), and its sessions end with it",
            config.limit_max_requests,
        )
    if config.routing is not None:
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
        return "which holds every session" if routing.workers == 1 else "sessions as the app itself declares them"
    words = [f"sessions named by {', '.join(named)}"]
    words += [f"learned from {source.spec}" for source in checked.learn]
    words += [f"started by {route}" for route in checked.starts.routes]
    words += [f"ended by {route}" for route in checked.ends.routes]
    if routing.workers != 1:
        words.append(f"unowned: {'adopt' if checked.adopts else 'refuse'}")
    return ", ".join(words)


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
    if routing.scatter and routing.workers == 1:
        yield "--scatter has no effect with one worker: use --workers 2 or more"
    elif routing.scatter:
        yield "--scatter is a test mode: every request takes a detour through a wrong worker"
