"""The names of uvicorn that are not its public API and that `homing run` builds on, checked before anything starts.

The invariant: a uvicorn that lacks one of them is refused in one line; nothing here fails later, in the middle of a
request, because a name moved.
"""

from __future__ import annotations

import importlib
import inspect

import uvicorn

from homing.errors import ConfigurationError

_NAMES = (
    # supervisor.py
    "uvicorn._subprocess:get_subprocess",
    "uvicorn.supervisors.multiprocess:Multiprocess.handle_signals",
    "uvicorn.supervisors.multiprocess:Multiprocess.handle_int",
    "uvicorn.supervisors.multiprocess:Multiprocess.handle_term",
    "uvicorn.supervisors.multiprocess:Multiprocess.handle_hup",
    # config.py
    "uvicorn.config:HTTP_PROTOCOLS",
    "uvicorn.config:LOGGING_CONFIG",
    "uvicorn.config:LOG_LEVELS",
    "uvicorn.config:LOOP_FACTORIES",
    "uvicorn.config:STARTUP_FAILURE",
    "uvicorn.config:Config.load",
    "uvicorn.config:Config.load_app",
    "uvicorn.config:Config.configure_logging",
    "uvicorn.config:Config.get_loop_factory",
    "uvicorn.config:Config.asgi_version",
    # application.py
    "uvicorn._compat:iscoroutinefunction",
    "uvicorn.importer:import_from_string",
    "uvicorn.importer:ImportFromStringError",
    "uvicorn.middleware.asgi2:ASGI2Middleware",
    "uvicorn.middleware.wsgi:WSGIMiddleware",
    # worker.py
    "uvicorn.server:Server.capture_signals",
    "uvicorn.server:Server.handle_exit",
    "uvicorn.server:Server.run",
    "uvicorn.server:Server.startup",
    "uvicorn.lifespan.on:LifespanOn.shutdown",
    # protocol.py
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_headers_complete",
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_response_complete",
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.timeout_keep_alive_handler",
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol._unset_keepalive_if_required",
    # replies.py
    "uvicorn.protocols.http.httptools_impl:HEADER_RE",
    "uvicorn.protocols.http.httptools_impl:HEADER_VALUE_RE",
    "uvicorn.protocols.http.httptools_impl:STATUS_LINE",
    # cli/run.py
    "uvicorn.main:main.params",
    "uvicorn.supervisors:ChangeReload",
)

_ATTRIBUTES_OF_A_CONNECTION = (
    "config",
    "cycle",
    "loop",
    "pipeline",
    "scheme",
    "scope",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
)
_ATTRIBUTES_OF_A_CYCLE = ("body", "keep_alive", "more_body", "response_complete", "scope")
"""What a connection needs to be seen idle, and to be given to another worker; and what says that a body is all there."""

_NAMES_IN_SEND = """
    HEADER_RE HEADER_VALUE_RE RuntimeError STATUS_LINE access_log access_logger append chunked_encoding close decode
    default_headers disconnected drain expected_content_length extend flow get get_client_addr get_path_with_query_string info
    int join keep_alive len list lower message_event on_response response_complete response_started scope search set split
    transport waiting_for_100_continue write write_paused
"""
"""What uvicorn's `send` of a reply looks at and calls. One that does more or less may do something else."""

_PARAMETERS = {
    "uvicorn._subprocess:get_subprocess": ("config", "target", "sockets"),
    "uvicorn.supervisors.multiprocess:Multiprocess": ("config", "sockets"),
    "uvicorn.server:Server.startup": ("self", "sockets"),
}


def _resolve(name: str) -> object:
    module, _, attributes = name.partition(":")
    found: object = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def connections_can_move() -> bool:
    """Whether uvicorn's HTTP protocol with httptools has what a connection needs to move to another worker."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    return set(_ATTRIBUTES_OF_A_CONNECTION) <= set(HttpToolsProtocol.__init__.__code__.co_names) and set(
        _ATTRIBUTES_OF_A_CYCLE
    ) <= set(RequestResponseCycle.__init__.__code__.co_names)


def replies_are_known() -> bool:
    """Whether uvicorn's `send` with httptools is one whose usual reply can be put together here (`replies.py`)."""
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    return frozenset(RequestResponseCycle.send.__code__.co_names) == frozenset(_NAMES_IN_SEND.split())


def check_uvicorn() -> None:
    """Check that the installed uvicorn has what `homing run` builds on.

    Raises:
        ConfigurationError: a name is missing or its parameters differ; the message names it and the version.
    """
    changed = []
    for name in _NAMES:
        try:
            _resolve(name)
        except (ImportError, AttributeError):
            changed.append(name)
    for name, expected in _PARAMETERS.items():
        try:
            found = tuple(inspect.signature(_resolve(name)).parameters)  # type: ignore[arg-type]  # checked just here
        except (ImportError, AttributeError, TypeError, ValueError):
            found = ()
        if found != expected and name not in changed:
            changed.append(name)
    if changed:
        raise ConfigurationError(
            f"homing run does not know uvicorn {uvicorn.__version__}: {', '.join(changed)} changed; "
            "install a version that this homing was tested with, such as 0.54"
        )
