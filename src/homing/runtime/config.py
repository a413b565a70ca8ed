"""uvicorn's configuration, with an app that is loaded through homing's router; picklable, for spawned workers.

From the outside in: uvicorn's proxy headers (so the client's address is resolved where the request was accepted), the
router, and the app as ASGI 3, whatever it was written as.

Not here: how the app is found (`application.py`), and processes (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import copy
import enum
import errno
import logging
import os
import socket
import stat
from typing import Any, Literal

from uvicorn.config import HTTP_PROTOCOLS, LOG_LEVELS, LOGGING_CONFIG, Config
from uvicorn.importer import ImportFromStringError, import_from_string
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from homing.errors import ConfigurationError, HomingError, StartupError
from homing.routing import build
from homing.routing.options import RoutingOptions
from homing.runtime.application import LoadedApp, load, tell_routing
from homing.runtime.handoff import Handoffs
from homing.runtime.listeners import keep_alive
from homing.runtime.metrics_route import check_not_the_apps, with_metrics_route
from homing.runtime.proxy_headers import ProxyHeadersWhereGiven
from homing.runtime.underneath import connections_can_move

_PROTOCOL = "homing.runtime.protocol:HomingHttpToolsProtocol"


class RoutedBy(enum.Enum):
    """Who says how the sessions of an app are told and treated."""

    HOMING_RUN = "the options of the command"
    APP = "the app itself, which has homing's router in it"
    APP_AS_TOLD = "the app itself, which takes the command's limits and test mode"


class RunConfig(Config):
    """What `homing run` serves, and how.

    Attributes:
        routing: How sessions are told and treated; None leaves the app as it is (`--no-sessions`).
        routed_by: Who says how sessions are told, once the app is loaded.
        handoff: Connections may move to the worker whose sessions they ask for.
        handoffs: How they do, once the worker serves.
        drain_seconds: How long the sessions of a worker that is to leave go on.
        metrics_route: The path of the server's metrics on the public port.
    """

    def __init__(self, app: Any, *, routing: RoutingOptions | None, log_format: str = "text", **options: Any) -> None:
        if options.get("log_config", LOGGING_CONFIG) is LOGGING_CONFIG:
            options["log_config"] = _logging_config(log_format)
        super().__init__(app, **options)
        self.routing = routing
        self.routed_by = RoutedBy.HOMING_RUN
        self.handoff = False
        self.handoffs: Handoffs | None = None
        self.drain_seconds = 0.0
        self.metrics_route: str | None = None
        self._bound_at_uds: tuple[int, int] | None = None
        self._interface_of_app: Literal["auto", "asgi3", "asgi2", "wsgi"] | None = None
        if isinstance(self.http, str) and not self.http2 and _uses_httptools(self.http):
            self.http = _PROTOCOL

    @property
    def moves_connections(self) -> bool:
        """Whether connections can move under the HTTP protocol that was chosen."""
        return self.http == _PROTOCOL and connections_can_move()

    @property
    def starts_wait(self) -> bool:
        """Whether declared starts may wait in the queue."""
        routing = self.routing
        if routing is None or routing.socket_dir is None or self.routed_by is RoutedBy.APP:
            return False
        return routing.queue_seconds > 0

    @property
    def asgi_version(self) -> Literal["2.0", "3.0"]:
        """What the app's own interface is, as it would be without the router."""
        return "2.0" if self._interface_of_app == "asgi2" else "3.0"

    def configure_logging(self) -> None:
        """uvicorn's, with homing's loggers at the same level."""
        super().configure_logging()
        if self.log_level is not None:
            level = LOG_LEVELS[self.log_level.lower()] if isinstance(self.log_level, str) else self.log_level
            logging.getLogger("homing").setLevel(level)

    def load(self) -> None:
        """Load the app and everything that serves it.

        Raises:
            ConfigurationError: the app cannot be routed as configured.
            StartupError: anything else that was named cannot be loaded.
        """
        try:
            super().load()
        except HomingError:
            raise
        except (OSError, AssertionError) as error:
            if not self.is_ssl:
                raise
            raise StartupError(
                f"cannot use the TLS files {self.ssl_certfile}, {self.ssl_keyfile or 'no key file'}: {error}; "
                "see --ssl-certfile and --ssl-keyfile"
            ) from error
        except Exception as error:
            # Protocol classes that are not installed and the like: they name what is wrong themselves.
            raise StartupError(f"cannot start: {type(error).__name__}: {error}") from error
        if type(self.loaded_app) is ProxyHeadersMiddleware:
            self.loaded_app = ProxyHeadersWhereGiven(self.loaded_app.app, self.forwarded_allow_ips)

    def load_app(self) -> Any:
        """The app, imported, made ASGI 3 and routed. uvicorn wraps what this returns further (proxy headers).

        Raises:
            ConfigurationError: several workers, and no way to tell sessions; or routing options that cannot work.
            StartupError: APP cannot be loaded.
        """
        loaded = load(self.app, factory=self.factory, interface=self.interface, host=self.host)
        self._interface_of_app = loaded.interface
        if loaded.interface == "wsgi":
            self.ws_protocol_class = None
        # uvicorn goes on with what it would have found for an ASGI 3 app that is no factory.
        self.interface = "asgi3"
        self.factory = False
        routed = self._route(loaded)
        if self.metrics_route is None:
            return routed
        check_not_the_apps(self.metrics_route, loaded.app)
        return with_metrics_route(routed, self.root_path + self.metrics_route)

    def _route(self, loaded: LoadedApp) -> Any:
        if loaded.routed and self.routing is None and self.workers > 1:
            raise ConfigurationError(
                "--no-sessions: the app routes itself (such as by homing.sticky), and its workers have to meet for that; leave "
                "out --no-sessions, or take the router out of the app"
            )
        if loaded.routed:
            told = self.routing is not None and tell_routing(loaded.app, self.routing)
            self.routed_by = RoutedBy.APP_AS_TOLD if told else RoutedBy.APP
        if self.routing is None or loaded.routed:
            return loaded.app
        if self.routing.tells_sessions:
            return build(loaded.app, self.routing)
        if self.workers > 1:
            raise ConfigurationError(_no_sessions_line(self.workers, loaded.mcp))
        return loaded.app

    def check_loop(self) -> None:
        """See that the event loop is of asyncio's kind: the router needs one.

        Raises:
            ConfigurationError: the loop cannot be loaded, or is of another kind.
        """
        try:
            factory: Any = import_from_string(self.loop) if ":" in self.loop else self.get_loop_factory()
        except (ImportFromStringError, ImportError) as error:
            raise ConfigurationError(f"--loop {self.loop}: {error}; install it, or use --loop auto") from error
        if factory is None:
            return
        loop = factory()
        if not isinstance(loop, asyncio.AbstractEventLoop):
            raise ConfigurationError(
                f"--loop {self.loop} makes a {type(loop).__name__}, which is no asyncio event loop; use --loop auto"
            )
        loop.close()

    def bind_socket(self) -> socket.socket:
        """The public socket, bound and not yet listening: each worker listens once its app has started.

        Raises:
            StartupError: the address cannot be had; the message names it.
        """
        if self.uds is not None:
            listener = _bind_unix(self.uds)
            self.note_unix_socket()
            return listener
        return _bind_tcp(self.host, self.port)

    def note_unix_socket(self) -> None:
        """Remember what was just bound at `uds`: nothing else that may lie there is ours to remove."""
        if self.uds is not None:
            self._bound_at_uds = _file_at(self.uds)

    def remove_unix_socket(self) -> None:
        """Remove the socket that was bound at `uds`, unless another lies there by now. Safe to call twice."""
        bound, self._bound_at_uds = self._bound_at_uds, None
        if self.uds is not None and bound is not None and _file_at(self.uds) == bound:
            os.remove(self.uds)

    def announce_address(self, listener: socket.socket) -> None:
        """Log where a bound socket is reached, in uvicorn's words: people and tools look for them."""
        log = logging.getLogger("uvicorn.error")
        if self.uds is not None:
            log.info("Uvicorn running on unix socket %s (Press CTRL+C to quit)", self.uds)
            return
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "https" if self.is_ssl else "http"
        log.info("Uvicorn running on %s://%s:%d (Press CTRL+C to quit)", scheme, host, listener.getsockname()[1])

    def check_address(self) -> None:
        """Say early that the address cannot be had, where uvicorn itself binds it only after the app has started.

        Raises:
            StartupError: as `bind_socket`.
        """
        if self.uds is not None:
            _check_unix(self.uds)
        elif self.fd is None:
            _bind_tcp(self.host, self.port).close()


def _bind_tcp(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in (host or "") else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keep_alive(listener)
    try:
        listener.bind((host or "", port))
    except (OSError, OverflowError, UnicodeError, TypeError) as error:
        listener.close()
        raise StartupError(address_line(error, host, port)) from error
    listener.set_inheritable(True)
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o666)  # noqa: S103  # uvicorn's own mode for --uds, so that a proxy of another user reaches it
    except OSError as error:
        listener.close()
        raise StartupError(unix_line(error, path)) from error
    listener.set_inheritable(True)
    return listener


def _check_unix(path: str) -> None:
    """See that a Unix socket can be bound here. uvicorn removes any that lies there first, whoever listens at it."""
    if not _is_left_over(path):
        _bind_unix(path).close()
        os.remove(path)


def _is_left_over(path: str) -> bool:
    """Whether a socket lies there at which nobody listens: of a server that was killed."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            client.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # nothing is there; or a full backlog, say
    return False


def _file_at(path: str) -> tuple[int, int] | None:
    """What tells the file at a path from any other that lies there later; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def unix_line(error: OSError, path: str) -> str:
    """The line for a Unix socket that cannot be had."""
    what = (
        "remove it if no server uses it, or name another"
        if error.errno == errno.EADDRINUSE
        else "name a path of at most 107 bytes in a directory of yours"
    )
    return f"cannot serve on --uds {path}: {error.strerror or error}; {what}"


def address_line(error: Exception, host: str, port: int) -> str:
    """The line for an address that cannot be had."""
    reason = getattr(error, "strerror", None) or str(error)
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror | UnicodeError | TypeError):
        return f"cannot serve on --host {host}: it cannot be resolved ({reason}); {_HOSTS}"
    if number == errno.EADDRNOTAVAIL:
        return f"cannot serve on --host {host}: it is no address of this machine ({reason}); {_HOSTS}"
    if number in (errno.EACCES, errno.EPERM):
        return f"cannot serve on port {port} of {host}: {reason}; choose a --port from 1024 on (0: any)"
    return f"cannot serve on port {port} of {host}: {reason}; stop what uses it, or choose another --port (0: any)"


_HOSTS = "use an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"


def _uses_httptools(http: str) -> bool:
    try:
        found = import_from_string(HTTP_PROTOCOLS.get(http, http))
    except (ImportFromStringError, ImportError):
        return False  # load() says so
    return found is HttpToolsProtocol


def _logging_config(log_format: str) -> dict[str, Any]:
    """uvicorn's, with a place for homing's own lines: the same handler. All of them as JSON if that is asked for."""
    config = copy.deepcopy(LOGGING_CONFIG)
    if log_format == "json":
        config["formatters"] = {name: {"()": "homing.runtime.logs.JsonFormatter"} for name in config["formatters"]}
    config["loggers"]["homing"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config


def _no_sessions_line(workers: int, mcp: bool) -> str:
    if mcp:
        return (
            f"{workers} workers need to know which session a request names: an MCP server needs --preset mcp (and "
            "--session mcp-handle:NAME for each tool argument that names something kept); --no-sessions runs without"
        )
    return (
        f"{workers} workers need to know which session a request names: add --session header:NAME, cookie:NAME, "
        "signed-cookie:NAME:KEY (with --secret-env), query:NAME, path:/sessions/{session}, body:FIELD@/route or "
        "mcp-handle:NAME, or --preset mcp for an MCP server, engineio for Socket.IO, gradio for Gradio; --no-sessions runs without"
    )
