"""Serves the live page about a server, from its supervisor, on a port of loopback.

Whoever reaches the port sees the page, so a web page of somebody else must not: a request whose `Host` is no name of this
machine is refused (else a name that leads to 127.0.0.1 would make it the same origin), and no origin is allowed to read across.

Not here: what the page shows (`homing.watch.live`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

from homing.errors import ConfigurationError, StartupError
from homing.watch.live import SAMPLE_SECONDS, Live

logger = logging.getLogger(__name__)

DASHBOARD_HOST: Final = "127.0.0.1"

# Any port: the page may be looked at through a tunnel.
_LOCAL_HOST = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_SLOW_SECONDS: Final = 20.0


class _Handler(BaseHTTPRequestHandler):
    """`/` is the page, `/data` what it reads once a second."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "homing"
    sys_version = ""
    timeout = _SLOW_SECONDS

    def do_GET(self) -> None:
        hosts = self.headers.get_all("host", [])
        if len(hosts) != 1 or _LOCAL_HOST.fullmatch(hosts[0].strip()) is None:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"this page is at 127.0.0.1 or localhost\n")
            return
        path = urlsplit(self.path).path
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif path == "/data":
            try:
                document = self.server.live.document()
            except ConfigurationError as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())
                return
            self._answer(HTTPStatus.OK, "application/json", json.dumps(document, separators=(",", ":")).encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /data\n")

    do_HEAD = do_GET  # noqa: N815 - the base class's way of naming methods

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", content_type),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", self.server.policy),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug("dashboard: " + format, *arguments)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, live: Live) -> None:
        super().__init__((DASHBOARD_HOST, port), _Handler)
        self.live = live
        self.page = files("homing.runtime").joinpath("dashboard.html").read_bytes()
        self.policy = _policy(self.page.decode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("dashboard: a request failed", exc_info=True)


def _policy(page: str) -> str:
    """Nothing runs or styles the page but what is in it, it talks to nobody else, and nobody frames it."""

    def hashed(tag: str) -> str:
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@contextlib.contextmanager
def serve_dashboard(path: str, port: int) -> Iterator[int]:
    """Serve the live page of the server with this run directory, in threads; gives the port.

    Raises:
        StartupError: the port cannot be had.
    """
    live = Live(path)
    try:
        server = _Server(port, live)
    except OSError as error:
        raise StartupError(
            f"cannot serve the dashboard on port {port} of {DASHBOARD_HOST}: {error.strerror}; choose another "
            "--dashboard-port (0: any)"
        ) from error
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            try:
                live.sample()
            except Exception:
                logger.exception("the dashboard missed a second")

    threads = [
        threading.Thread(target=server.serve_forever, name="homing-dashboard", daemon=True),
        threading.Thread(target=sample, name="homing-samples", daemon=True),
    ]
    for thread in threads:
        thread.start()
    logger.info(
        "dashboard on http://%s:%d/",
        DASHBOARD_HOST,
        server.server_port,
        extra={"event": "dashboard", "port": server.server_port},
    )
    try:
        yield server.server_port
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()
