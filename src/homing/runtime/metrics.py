"""Serves a server's metrics, from its supervisor: whichever workers live, and however often they are replaced.

Not here: what the metrics are (`homing.watch.metrics`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from homing.errors import StartupError
from homing.rundir import RunDirectory
from homing.types import WorkerId
from homing.watch.metrics import metrics_registry

logger = logging.getLogger(__name__)

METRICS_HOST: Final = "127.0.0.1"


@contextlib.contextmanager
def serve_metrics(path: str, port: int) -> Iterator[int]:
    """Serve `/metrics` of the server with this run directory, in a thread; gives the port.

    Raises:
        ConfigurationError: prometheus-client is not installed.
        StartupError: the port cannot be had.
    """
    with RunDirectory.open(path) as directory:
        registry = metrics_registry(path, lambda worker: directory.is_dead(WorkerId(worker)))
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, METRICS_HOST, registry)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on port {port} of {METRICS_HOST}: {error.strerror}; choose another "
                "--metrics-port (0: any)"
            ) from error
        logger.info("metrics on http://%s:%d/metrics", METRICS_HOST, server.server_port)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
