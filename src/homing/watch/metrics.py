"""Prometheus metrics of a whole server, made from its page: a dead worker's counters stay, whoever is asked.

Names follow Prometheus's conventions; `docs/reference/metrics.md` lists them. Needs `prometheus-client` (`homing[metrics]`).

Not here: who serves them (`homing.runtime`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from homing.errors import ConfigurationError
from homing.histogram import BOUNDS_SECONDS
from homing.watch.figures import Figures, Spread, decode_figures
from homing.watch.page import read_rows
from homing.watch.processes import open_descriptors, resident_bytes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

IsDead = Callable[[str], bool]
"""Whether a worker has exited."""

_CODES: Final = {"session_gone": "gone", "owner_timeout": "stuck", "session_conflict": "conflict"}
"""Answers that are outcomes of their own; any other is `refused`."""


def outcomes(figures: Figures) -> dict[str, int]:
    """What became of the requests that clients sent to this worker, and how many of other workers' it sent back."""
    found = dict.fromkeys(("gone", "stuck", "conflict", "refused"), 0)
    for code, count in figures.answers.items():
        # What another worker sent counts there, as forwarded.
        found[_CODES.get(code, "refused")] += count - figures.peer_answers.get(code, 0)
    return {
        "local": figures.served - figures.received,
        "forwarded": figures.forwarded - figures.handed_off,
        "handed_off": figures.handed_off,
        "failed": figures.failed,
        **found,
        "not_mine": figures.not_mine,
    }


_GAUGES: Final[tuple[tuple[str, str, Callable[[Figures], float | None]], ...]] = (
    ("homing_requests_in_progress", "Requests whose handler is running.", lambda f: f.serving),
    ("homing_event_loop_lag_seconds", "By how much the event loop was late.", lambda f: f.lag_seconds),
    ("homing_worker_start_time_seconds", "When the worker started, since the epoch.", lambda f: f.started),
    ("homing_process_resident_memory_bytes", "Memory of the worker's process.", lambda f: resident_bytes(f.pid)),
    ("homing_process_open_fds", "Open file descriptors of the worker's process.", lambda f: open_descriptors(f.pid)),
)

_COUNTERS: Final[tuple[tuple[str, str, Callable[[Figures], float]], ...]] = (
    ("homing_requests_received", "Requests served for another worker.", lambda f: f.received),
    ("homing_lock_timeouts", "Waits for the lock on dead workers' records without success.", lambda f: f.lock_timeouts),
    ("homing_process_cpu_seconds", "CPU time of the worker's process.", lambda f: f.cpu_seconds),
)

_LABELLED: Final[tuple[tuple[str, str, str, Callable[[Figures], dict[str, int]]], ...]] = (
    ("homing_requests", "Requests by what became of them.", "outcome", outcomes),
    ("homing_answers", "Replies of homing's own.", "code", lambda f: f.answers),
    (
        "homing_connections_moved",
        "Connections that moved between workers.",
        "direction",
        lambda f: {"given": f.given, "adopted": f.adopted},
    ),
    ("homing_sessions_ended", "Sessions that have ended, by why.", "reason", lambda f: f.endings),
    ("homing_sessions_placed", "New sessions, by where they were placed.", "place", lambda f: f.placed),
)

_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Figures], Spread | None]], ...]] = (
    ("homing_hop_seconds", "From sending a request to its owner's first word.", lambda f: f.hops),
    ("homing_queue_wait_seconds", "How long starts of sessions waited for a place.", lambda f: f.queued),
    ("homing_lock_wait_seconds", "How long the lock on dead workers' records took.", lambda f: f.lock_waits),
    ("homing_event_loop_delay_seconds", "How late the event loop was, once a second.", lambda f: f.lags),
)


class ServerCollector:
    """Reads the page whenever Prometheus asks. Given to a registry.

    Args:
        socket_dir: The server's run directory.
        is_dead: Only living workers have gauges.
    """

    def __init__(self, socket_dir: str, is_dead: IsDead) -> None:
        self._socket_dir = socket_dir
        self._is_dead = is_dead

    def collect(self) -> Iterator[Metric]:
        rows = [figures for row in read_rows(self._socket_dir) if (figures := decode_figures(row)) is not None]
        alive = [figures for figures in rows if not self._is_dead(figures.worker)]
        yield from _gauges(alive)
        yield from _counters(rows)
        yield from _histograms(rows)


def _gauges(alive: Iterable[Figures]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily

    alive = list(alive)
    yield GaugeMetricFamily("homing_workers", "Workers that serve.", value=len(alive))
    sessions = GaugeMetricFamily("homing_sessions", "Sessions by state.", labels=["worker", "state"])
    for figures in alive:
        sessions.add_metric([figures.worker, "open"], figures.open_sessions)
        sessions.add_metric([figures.worker, "ended"], figures.ended)
    yield sessions
    for name, says, read in _GAUGES:
        gauge = GaugeMetricFamily(name, says, labels=["worker"])
        for figures in alive:
            value = read(figures)
            if value is not None:
                gauge.add_metric([figures.worker], value)
        yield gauge


def _counters(rows: Iterable[Figures]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily

    for name, says, label, counts in _LABELLED:
        counter = CounterMetricFamily(name, says, labels=["worker", label])
        for figures in rows:
            for value, count in counts(figures).items():
                counter.add_metric([figures.worker, value], count)
        yield counter
    for name, says, read in _COUNTERS:
        counter = CounterMetricFamily(name, says, labels=["worker"])
        for figures in rows:
            counter.add_metric([figures.worker], read(figures))
        yield counter


def _histograms(rows: Iterable[Figures]) -> Iterator[Metric]:
    from prometheus_client.metrics_core import HistogramMetricFamily

    bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
    for name, says, read in _HISTOGRAMS:
        histogram = HistogramMetricFamily(name, says, labels=["worker"])
        for figures in rows:
            found = read(figures)
            if found is None or len(found.counts) != len(bounds):
                continue
            so_far, buckets = 0, []
            for bound, count in zip(bounds, found.counts, strict=True):
                so_far += count
                buckets.append((bound, so_far))
            histogram.add_metric([figures.worker], buckets, found.total_seconds)
        yield histogram


def check_prometheus() -> None:
    """See that what makes the metrics is installed.

    Raises:
        ConfigurationError: prometheus-client is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("metrics need prometheus-client: pip install 'homing[metrics]'") from error


def metrics_registry(socket_dir: str, is_dead: IsDead) -> CollectorRegistry:
    """A registry with this server's metrics and nothing else.

    Raises:
        ConfigurationError: prometheus-client is not installed.
    """
    check_prometheus()
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(socket_dir, is_dead))
    return registry
