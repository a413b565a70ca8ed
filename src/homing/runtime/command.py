"""The command line of whatever serves: what was given, checked, and served by one process or many.

The invariant: an option that cannot work is refused in one line; none is silently ignored.

Not here: the parameters (`parameters.py`), the commands themselves (`homing run`, and others that serve an app of their own), and
errors on their way to stderr (`homing.cli`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import click
import uvicorn
from click.core import ParameterSource
from uvicorn.config import LOGGING_CONFIG, LOOP_FACTORIES, STARTUP_FAILURE, Config
from uvicorn.supervisors import ChangeReload

import homing
from homing.clock import boot_seconds
from homing.errors import ConfigurationError, HomingError, StartupError
from homing.routing.options import RoutingOptions
from homing.runtime.announce import announce
from homing.runtime.config import RunConfig
from homing.runtime.control import Control
from homing.runtime.dashboard import serve_dashboard
from homing.runtime.link import FromWorker, Loaded
from homing.runtime.listeners import Listeners
from homing.runtime.metrics import METRICS_HOST, serve_metrics
from homing.runtime.metrics_route import check_metrics_route
from homing.runtime.parameters import OwnOption, own_options
from homing.runtime.secret import keep_server_secret, make_server_secret
from homing.runtime.server_directory import open_server_directory
from homing.runtime.supervisor import raise_open_files_limit, serve
from homing.runtime.underneath import check_uvicorn
from homing.runtime.worker import HomingServer
from homing.watch import Description, describe
from homing.watch.metrics import check_prometheus

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 2**31 - 1
"""What `listen(2)` takes; the kernel makes less of it (`net.core.somaxconn`)."""


class ServerCommand(click.Command):
    """A command that serves. Its help has two groups: homing's options, then uvicorn's."""

    def __init__(self, name: str, *, own_heading: str = "Sessions", **settings: Any) -> None:
        # uvicorn's own: UVICORN_PORT and the like set its options here as well.
        context_settings = {"auto_envvar_prefix": "UVICORN", "max_content_width": 110}
        super().__init__(name, context_settings=context_settings, **settings)
        self._own_heading = own_heading

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {self._own_heading: [], "Server (as for uvicorn)": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups[self._own_heading if isinstance(parameter, OwnOption) else "Server (as for uvicorn)"].append(
                    record
                )
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def run_server(ctx: click.Context, given: dict[str, Any], app: object = None) -> None:
    """Serve until a signal says to stop.

    Args:
        ctx: Of the command, whose parameters were made here.
        given: What its callback was called with, less the command's own arguments.
        app: What to serve, if that is not among `given`: a picklable `NamedFactory` of an app which declares its own
            sessions, or such an app's `module:name`.

    Raises:
        ConfigurationError: an option cannot work; the message says which and what to do.
        StartupError: the app or the address cannot be had.
    """
    check_uvicorn()
    # What the command does not offer is as if it had not been given.
    own = {option.name: _unless_given(option) for option in own_options() if option.name}
    own |= {
        p.name: given.pop(p.name)
        for p in ctx.command.params
        if isinstance(p, OwnOption) and p.name in own.keys() & given.keys()
    }
    workers = _count_workers(given["workers"])
    _refuse_what_cannot_work(ctx, given, own, workers)
    config = _config(ctx, given, workers, app, log_format=own["log_format"])
    config.routing = _routing(own, config)
    config.metrics_route = own["metrics_route"]
    if config.routing is not None:
        config.routing.checked()
        if config.metrics_route is not None:
            check_prometheus()
            check_metrics_route(config.metrics_route, config.routing)
        # The test mode sends each request astray on purpose; a connection that moved would not go astray again.
        config.handoff = workers > 1 and not (own["no_handoff"] or own["scatter"])
    config.drain_seconds = own["drain_seconds"]
    make_server_secret()
    try:
        if workers > 1:
            _serve_many(config, own["run_dir"], own["metrics_port"], own["dashboard_port"])
        else:
            _serve_one(config)
    finally:
        config.remove_unix_socket()


def _unless_given(option: click.Parameter) -> Any:
    if option.multiple:
        return ()
    return option.default if isinstance(option.default, bool | int | float | str) else None


# --- what was given ---


def _count_workers(given: int | None) -> int:
    if given is None:
        text = os.environ.get("WEB_CONCURRENCY")
        if text is None:
            return 1
        try:
            given = int(text)
        except ValueError as error:
            raise ConfigurationError(
                f"WEB_CONCURRENCY is {text!r}: set it to a number of workers, or unset it"
            ) from error
    if given < 1:
        raise ConfigurationError(f"{given} workers cannot serve anything: use --workers 1 or more")
    return given


_OPTIONS: Final = {"sessions": "session", "starts": "start", "ends": "end"}
"""What the command line calls the options about sessions, where that is not their name here."""


def _refuse_what_cannot_work(
    ctx: click.Context, server: Mapping[str, Any], own: Mapping[str, Any], workers: int
) -> None:
    app = server.get("app")
    if app is not None and ":" not in app.strip(":"):
        module = app.removesuffix(".py").replace("/", ".").strip(":.")
        raise ConfigurationError(f"{app} names no app: write package.module:name, such as {module or 'server'}:app")
    if server["loop"] not in LOOP_FACTORIES and ":" not in server["loop"]:
        raise ConfigurationError(
            f"--loop {server['loop']}: homing needs an asyncio event loop; use one of {', '.join(LOOP_FACTORIES)}, "
            "or module:factory"
        )
    if server["http2"] and server["http"] != "zttp":
        raise ConfigurationError("--http2 needs --http zttp (and the package zttp)")
    if not 0 <= server["port"] <= 65535:
        raise ConfigurationError(f"--port {server['port']}: use a number from 1 to 65535, or 0 for any free port")
    if not 0 <= server["backlog"] <= _MOST_WAITING:
        raise ConfigurationError(
            f"--backlog {server['backlog']}: use a number of connections from 0 to {_MOST_WAITING}"
        )
    if server["ssl_keyfile"] and not server["ssl_certfile"]:
        raise ConfigurationError("--ssl-keyfile needs --ssl-certfile too")
    if own["run_dir"] == "":
        raise ConfigurationError("--run-dir is empty: name a directory, or leave it out")
    if not own["drain_seconds"] < float("inf"):
        raise ConfigurationError(f"--drain-timeout {own['drain_seconds']}: use a number of seconds, 0 for none")
    if own["no_sessions"]:
        unwanted = [name for name in ("sessions", "learn", "starts", "ends", "preset", "scatter") if own[name]]
        if unwanted:
            given = ", ".join(f"--{_OPTIONS.get(name, name)}" for name in unwanted)
            raise ConfigurationError(f"--no-sessions leaves nothing to route: use either --no-sessions or {given}")
    for name in ("metrics_port", "metrics_route", "dashboard_port"):
        if own[name] is not None and (workers == 1 or own["no_sessions"]):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} shows how requests find their workers: use it with --workers 2 or more, routed"
            )
    _refuse_one_port_for_two(server, own)
    if own["log_format"] != "text" and server["log_config"] is not None:
        raise ConfigurationError("--log-config says how lines look: leave out --log-format")
    if workers == 1:
        return
    if server["timeout_worker_healthcheck"] < 1:
        raise ConfigurationError(
            f"--timeout-worker-healthcheck {server['timeout_worker_healthcheck']}: no worker answers in no time, so all would "
            "be killed over and over; use 1 or more"
        )
    if server.get("reload"):
        raise ConfigurationError("--reload ends every session on each change: use it with --workers 1, or leave it out")
    if server["fd"] is not None:
        raise ConfigurationError("--fd works with --workers 1 only: use --host and --port, or --uds")
    if server["lifespan"] == "off":
        raise ConfigurationError("--lifespan off: homing opens a worker's private socket in it; use auto or on")


_LOOPBACK_TOO: Final = ("", "0.0.0.0", "::", "localhost")  # noqa: S104 - addresses that are looked for
"""Hosts at which a server also has a port of 127.0.0.1, which some of homing's own options take; `::` where it is for IPv4 too."""


def _refuse_one_port_for_two(server: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """See that no two of a server's listeners want one port. 0 is any, so it is nobody else's."""
    ports = {f"--{name.replace('_', '-')}": own[name] for name in ("metrics_port", "dashboard_port") if own[name]}
    host = server["host"] or ""
    by_port = server["uds"] is None and server["fd"] is None
    if by_port and (host in _LOOPBACK_TOO or host == METRICS_HOST):
        ports["--port"] = server["port"]
    for first, second in itertools.combinations(ports, 2):
        if ports[first] == ports[second]:
            raise ConfigurationError(
                f"{second} and {first} are both {ports[first]}: each needs a port of its own; choose another {first} (0: any)"
            )


def _config(ctx: click.Context, given: Mapping[str, Any], workers: int, app: object, *, log_format: str) -> RunConfig:
    """uvicorn's own mapping from its command to its configuration, for the options that it has today."""
    options = dict(given)
    if "app" in options:
        app = options.pop("app")
    else:
        options["factory"] = not isinstance(app, str)
    app_dir = options.pop("app_dir")
    options["workers"] = workers
    options["headers"] = [header.split(":", 1) for header in options["headers"]]
    if malformed := [header[0] for header in options["headers"] if len(header) != 2]:
        raise ConfigurationError(f"--header {malformed[0]}: write it as Name:Value")
    options["log_format"] = log_format
    options["log_config"] = LOGGING_CONFIG if options["log_config"] is None else options["log_config"]
    for name in ("reload_dirs", "reload_includes", "reload_excludes"):
        options[name] = options.get(name) or None
    known = {*inspect.signature(Config).parameters, "log_format"}
    for name in [name for name in options if name not in known]:
        if ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise ConfigurationError(
                f"this homing cannot pass on --{name.replace('_', '-')} of uvicorn {uvicorn.__version__}"
            )
        options.pop(name)
    sys.path.insert(0, app_dir)
    try:
        return RunConfig(app, routing=None, **options)
    except Exception as error:
        # A log configuration or environment file that cannot be read, a package that either of them needs.
        raise ConfigurationError(f"the server's options cannot be used: {type(error).__name__}: {error}") from error


def _routing(own: Mapping[str, Any], config: RunConfig) -> RoutingOptions | None:
    if own["no_sessions"]:
        return None
    return RoutingOptions(
        sessions=own["sessions"],
        learn=own["learn"],
        starts=own["starts"],
        ends=own["ends"],
        preset=own["preset"],
        idle_seconds=own["idle_seconds"],
        unowned=own["unowned"],
        gone_status=own["gone_status"],
        max_body_bytes=own["max_body_bytes"],
        owner_timeout_seconds=own["owner_timeout_seconds"],
        place=own["place"],
        max_sessions=own["sessions_at_once"],
        max_sessions_per_worker=own["max_sessions_per_worker"],
        queue_seconds=own["queue_seconds"],
        scatter=own["scatter"],
        secret=_secret(own["secret_env"]),
        workers=config.workers,
        graceful_seconds=config.timeout_graceful_shutdown,
        backlog=config.backlog,
        lifespan_required=config.lifespan == "on",
    )


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    secret = os.environ.get(variable)
    if not secret:
        state = "is empty" if secret == "" else "is not set"
        raise ConfigurationError(
            f"--secret-env {variable}: that environment variable {state}; set it to what signs the app's cookie"
        )
    return secret


# --- serving ---


def _serve_many(config: RunConfig, run_dir: str | None, metrics_port: int | None, dashboard_port: int | None) -> None:
    with contextlib.ExitStack() as stack:
        path = None
        if config.routing is not None:
            path = stack.enter_context(open_server_directory(run_dir))
            config.routing = replace(config.routing, socket_dir=path)
        listeners = stack.enter_context(Listeners(config.bind_socket()))
        control = None
        if path is not None:
            control = stack.enter_context(Control(path))
            stack.enter_context(describe(path, _description(config, listeners.bound)))
            if metrics_port is not None:
                stack.enter_context(serve_metrics(path, metrics_port))
            if dashboard_port is not None:
                stack.enter_context(serve_dashboard(path, dashboard_port))

        def announce_both(loaded: Loaded) -> None:
            config.announce_address(listeners.bound)
            announce(config, path, loaded.routing)

        # Between here and the supervisor's own handlers, Ctrl-C still ends the process; the stack closes what is open.
        with contextlib.suppress(KeyboardInterrupt):
            serve(config, listeners, announce_both, control)


def _description(config: RunConfig, listener: socket.socket) -> Description:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return Description(
        pid=os.getpid(),
        address=_as_text(config.uds or f"{host}:{listener.getsockname()[1]}"),
        app=_as_text(str(config.app)),
        workers=config.workers,
        began=boot_seconds(),
        version=homing.__version__,
    )


def _as_text(given: str) -> str:
    """What was given on the command line, where bytes that are no text stand as escapes."""
    return given.encode("utf-8", "backslashreplace").decode("utf-8")


def _serve_one(config: RunConfig) -> None:
    raise_open_files_limit()
    if config.should_reload:
        with contextlib.suppress(KeyboardInterrupt), config.bind_socket() as listener:
            config.announce_address(listener)
            ChangeReload(config, target=partial(_serve_reloaded, config), sockets=[listener]).run()
        return
    keep_server_secret()
    server = HomingServer(config, partial(_told, config))
    try:
        config.check_address()
        server.run()
    except KeyboardInterrupt:
        pass
    except SystemExit as error:
        # uvicorn's way to say that the app's start-up failed, after it has logged why.
        if error.code == STARTUP_FAILURE:
            raise StartupError("the app's start-up failed; its own message is above") from error
        raise
    if not server.started:
        raise StartupError("the server stopped before it could serve")


def _serve_reloaded(config: RunConfig, sockets: list[socket.socket]) -> None:
    """One life of the app between two changes, in a process of its own; an app that fails waits for the next change."""
    try:
        HomingServer(config, partial(_told, config)).run(sockets)
    except HomingError as error:
        logger.error("%s", error)  # noqa: TRY400  # the line says it all; a traceback would show homing's own code
        sys.exit(STARTUP_FAILURE)


def _told(config: RunConfig, what: FromWorker) -> None:
    if isinstance(what, Loaded):
        announce(config, None, what.routing)
