"""Prometheus metrics of a whole server, made from its page: a dead worker's counters stay, whoever is asked.

Names follow Prometheus's conventions; `docs/reference/metrics.md` lists them. Needs `prometheus-client` (`homing[metrics]`).

Not here: who serves them (`homing.runtime`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from homing.errors import ConfigurationError
from homing.watch.figures import Figures, decode_figures
from homing.watch.page import read_rows

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_GAUGES: Final[tuple[tuple[str, str, Callable[[Figures], float]], ...]] = (
    ("homing_requests_in_progress", "Requests whose handler is running.", lambda f: f.serving),
    ("homing_event_loop_lag_seconds", "By how much the event loop was late.", lambda f: f.lag_seconds),
    ("homing_worker_start_time_seconds", "When the worker started, since the epoch.", lambda f: f.started),
)


class ServerCollector:
    """Reads the page whenever Prometheus asks. Given to a registry.

    Args:
        socket_dir: The server's run directory.
        is_dead: Whether a worker has exited: only living workers have gauges.
    """

    def __init__(self, socket_dir: str, is_dead: Callable[[str], bool]) -> None:
        self._socket_dir = socket_dir
        self._is_dead = is_dead

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        rows = [figures for row in read_rows(self._socket_dir) if (figures := decode_figures(row)) is not None]
        alive = [figures for figures in rows if not self._is_dead(figures.worker)]

        workers = GaugeMetricFamily("homing_workers", "Workers that serve.")
        workers.add_metric([], len(alive))
        yield workers
        sessions = GaugeMetricFamily("homing_sessions", "Sessions by state.", labels=["worker", "state"])
        for figures in alive:
            sessions.add_metric([figures.worker, "open"], figures.open_sessions)
            sessions.add_metric([figures.worker, "ended"], figures.ended)
        yield sessions
        for name, says, read in _GAUGES:
            gauge = GaugeMetricFamily(name, says, labels=["worker"])
            for figures in alive:
                gauge.add_metric([figures.worker], read(figures))
            yield gauge

        requests = CounterMetricFamily(
            "homing_requests", "Requests by what became of them.", labels=["worker", "outcome"]
        )
        answers = CounterMetricFamily("homing_answers", "Replies of homing's own.", labels=["worker", "code"])
        moved = CounterMetricFamily(
            "homing_connections_moved", "Connections that moved between workers.", labels=["worker", "direction"]
        )
        for figures in rows:
            requests.add_metric([figures.worker, "local"], figures.served - figures.received)
            requests.add_metric([figures.worker, "received"], figures.received)
            requests.add_metric([figures.worker, "forwarded"], figures.forwarded)
            moved.add_metric([figures.worker, "given"], figures.given)
            moved.add_metric([figures.worker, "adopted"], figures.adopted)
            for code, count in figures.answers.items():
                answers.add_metric([figures.worker, code], count)
        yield requests
        yield answers
        yield moved


def metrics_registry(socket_dir: str, is_dead: Callable[[str], bool]) -> CollectorRegistry:
    """A registry with this server's metrics and nothing else.

    Raises:
        ConfigurationError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ConfigurationError("metrics need prometheus-client: pip install 'homing[metrics]'") from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(socket_dir, is_dead))
    return registry
