"""How a web server holds its sessions: how many, how long, and how long anything may take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from homing.errors import ConfigurationError


def _at_once() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


_WHOLE: Final = frozenset(
    {"max_sessions", "waiting_calls", "remembered_operations", "heartbeat_limit", "operations_at_once"}
)


@dataclass(frozen=True, slots=True)
class WebSettings:
    """One worker's settings. Every duration is in seconds.

    Attributes:
        max_sessions: Sessions at once in this worker: live, being seeded, and those with something still to release.
        allowed_benchmarks: None: every one that there is.
        idle_seconds: A session without an operation for so long is closed; status and health are none.
        max_age_seconds: A session is closed so long after its seed, however busy.
        sweep_seconds: How often idle and aged sessions are looked for.
        operation_seconds: What one observe, step or evaluate may take, its turn apart.
        reset_seconds: What the first load of a task may take.
        wait_seconds: How long a call may wait for its turn: behind others of its session, and for a free core.
        waiting_calls: How many calls of one session may wait.
        remembered_operations: How many replies are kept for a step that is sent again.
        site_wait_seconds: How long a seed waits for its sites.
        acquire_seconds: How long a seed waits for a browser. One that comes later is released.
        close_seconds: What a backend, or a runner, may take to close.
        release_seconds: What a browser's or a site's release may take.
        recording_seconds: What the writing of a recording may take at the close.
        retry_seconds, max_retry_seconds: When a failed release is tried again: so long after, doubled each time.
        lease_seconds: How long a renewable lease lives without a heartbeat.
        heartbeat_every_seconds, heartbeat_seconds, heartbeat_limit: How often leases are renewed, what that may take,
            and after how many failures in a row the session is taken for lost.
        stop_seconds: How long `stop` waits for all of that.
        operations_at_once: How many operations of async backends run at once in this worker. More than there are
            cores makes each of them slower and none of them sooner.
    """

    max_sessions: int = 32
    allowed_benchmarks: frozenset[str] | None = None
    idle_seconds: float = 3600.0
    max_age_seconds: float = 14_400.0
    sweep_seconds: float = 60.0
    operation_seconds: float = 30.0
    reset_seconds: float = 120.0
    wait_seconds: float = 60.0
    waiting_calls: int = 8
    remembered_operations: int = 128
    site_wait_seconds: float = 300.0
    acquire_seconds: float = 300.0
    close_seconds: float = 5.0
    release_seconds: float = 60.0
    recording_seconds: float = 30.0
    retry_seconds: float = 1.0
    max_retry_seconds: float = 30.0
    lease_seconds: float = 900.0
    heartbeat_every_seconds: float = 60.0
    heartbeat_seconds: float = 30.0
    heartbeat_limit: int = 3
    stop_seconds: float = 30.0
    operations_at_once: int = field(default_factory=_at_once)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "allowed_benchmarks":
                if value is not None and not (
                    isinstance(value, frozenset) and value and all(isinstance(name, str) for name in value)
                ):
                    raise ConfigurationError(f"web: allowed_benchmarks is {value!r}; it has to be names of benchmarks")
                continue
            whole = each.name in _WHOLE
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ConfigurationError(f"web: {each.name} is {value!r}; it has to be a {'whole ' * whole}number")
            # `not value > 0` is also true of a NaN.
            if not value > 0 or value == float("inf"):
                raise ConfigurationError(f"web: {each.name} is {value!r}; it has to be a number above 0")
        for name in ("heartbeat_every_seconds", "heartbeat_seconds"):
            if getattr(self, name) >= self.lease_seconds:
                raise ConfigurationError(f"web: {name} has to be below lease_seconds ({self.lease_seconds:g} s)")


_NAMES: Final = frozenset(each.name for each in fields(WebSettings))


def settings_from(given: Mapping[str, Any]) -> WebSettings:
    """Settings from a mapping, such as a file's. `allowed_benchmarks` may be a list, or a text with commas between.

    Raises:
        ConfigurationError: a name that is none, or a value that cannot be.
    """
    unknown = sorted(given.keys() - _NAMES)
    if unknown:
        raise ConfigurationError(f"web: no such setting: {', '.join(unknown)}; there are {', '.join(sorted(_NAMES))}")
    allowed = given.get("allowed_benchmarks")
    if isinstance(allowed, str):
        allowed = [name.strip() for name in allowed.split(",") if name.strip()]
    if isinstance(allowed, list) and all(isinstance(name, str) for name in allowed):
        allowed = frozenset(allowed)
    return WebSettings(**{**given, "allowed_benchmarks": allowed})
