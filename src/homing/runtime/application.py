"""What APP on the command line stands for: an ASGI app, a factory of one, a WSGI app, or an MCP server object.

Every way in which that can fail is one line (`StartupError`), with the place in the user's own code where it failed.

Not here: routing the app (`config.py`).
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from uvicorn._compat import iscoroutinefunction
from uvicorn.importer import ImportFromStringError, import_from_string
from uvicorn.middleware.asgi2 import ASGI2Middleware
from uvicorn.middleware.wsgi import WSGIMiddleware  # type: ignore[attr-defined]  # chosen there at import, so not re-exported

from homing.errors import ConfigurationError, StartupError
from homing.routing.options import RoutingOptions
from homing.types import ASGIApp

logger = logging.getLogger(__name__)

Interface = Literal["auto", "asgi3", "asgi2", "wsgi"]
_MCP_METHODS = ("http_app", "streamable_http_app")
_MAX_WRAPPERS = 32


@dataclass(frozen=True, slots=True)
class LoadedApp:
    """APP, ready to be routed.

    Attributes:
        app: An ASGI 3 app, whatever APP was.
        interface: What APP was (`"asgi3"`, `"asgi2"` or `"wsgi"`).
        routed: The app already has homing's router in it.
        mcp: APP was an MCP server object.
    """

    app: ASGIApp
    interface: Interface
    routed: bool
    mcp: bool


@dataclass(frozen=True, slots=True, repr=False)
class NamedFactory:
    """A factory of a command's own app: `ps`, logs and errors call it by its name. Picklable if `make` is.

    What it cannot make by the options it was given it says as a `ConfigurationError`, which is passed on as it is.
    """

    name: str
    make: Callable[[], object]

    def __call__(self) -> object:
        return self.make()

    def __repr__(self) -> str:
        return self.name


def load(app: object, *, factory: bool, interface: Interface, host: str) -> LoadedApp:
    """Import APP and make an ASGI 3 app of it.

    Args:
        app: `"module:attribute"`, or the object itself.
        factory: APP is a factory; if not set, an object that can be called without arguments is one too, as in uvicorn.
        interface: What APP is, or `"auto"` to find out.
        host: The address served; an MCP server object decides by it which `Host` headers it admits.

    Raises:
        StartupError: APP cannot be imported, made or served.
        ConfigurationError: a command's own factory cannot make its app by the options that were given.
    """
    name = app if isinstance(app, str) else repr(app)
    found = _import(app) if isinstance(app, str) else app
    if not _is_mcp_server(found) and (factory or _takes_no_arguments(found)):
        found = _call_factory(name, found, declared=factory)
    mcp = _is_mcp_server(found)
    if mcp:
        found = _mcp_app(name, found, host)
    if not callable(found):
        raise StartupError(
            f"{name} is of type {type(found).__name__}: name an ASGI app, a function that makes one, or an MCP server"
        )
    if interface == "auto":
        interface = "asgi3" if _is_asgi3(found) else "asgi2"
    routed = is_routed(found)
    served: object = found
    if interface == "wsgi":
        served = WSGIMiddleware(cast("Any", found))
    elif interface == "asgi2":
        served = ASGI2Middleware(cast("Any", found))
    return LoadedApp(cast("ASGIApp", served), interface, routed, mcp)


def is_routed(app: object) -> bool:
    """Whether homing's router is the app, or is wrapped by it where the wrapper keeps what it wraps in `.app`; or is installed
    in it (`install_session_routing`), which its middleware shows only once it serves."""
    return _routed_part(app) is not None


def tell_routing(app: object, options: RoutingOptions) -> bool:
    """Tell an app that routes itself how its server runs: the run directory, the number of workers, and its limits.

    Only an app that asks for it, by a method `use_routing_options`, is told; called once, before the app starts. Returns
    whether it did.
    """
    routed = _routed_part(app)
    use = getattr(routed, "use_routing_options", None)
    if not callable(use):
        return False
    use(options)
    return True


def _routed_part(app: object) -> object | None:
    for _ in range(_MAX_WRAPPERS):
        installed = getattr(getattr(app, "state", None), "homing_router", None)
        if getattr(app, "homing_routed", False) is True or getattr(installed, "homing_routed", False) is True:
            return app
        inner = getattr(app, "app", None)
        if inner is None:
            return None
        app = inner
    return None


def _import(name: str) -> object:
    module, _, rest = name.partition(":")
    try:
        return import_from_string(name)
    except SystemExit as error:
        raise StartupError(f"cannot load {name}: importing it ended the process (exit code {error.code!r})") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ImportError | ImportFromStringError) and (module.endswith(".py") or "/" in module):
            meant = module.removesuffix(".py").strip("./").replace("/", ".")
            raise StartupError(f"cannot load {name}: it is named as a file is; write {meant}:{rest}") from error
        if isinstance(error, ImportFromStringError):
            where = sys.path[0] or os.getcwd()
            hint = (
                f"it was looked for from {where}, which --app-dir changes"
                if module not in sys.modules
                else "check its name"
            )
            raise StartupError(f"cannot load {name}: {str(error).rstrip('.')}; {hint}") from error
        logger.debug("importing %s failed", name, exc_info=True)
        raise StartupError(
            f'cannot load {name}: {_describe(error)}; python -c "import {module}" shows the whole traceback'
        ) from error


def _call_factory(name: str, factory: object, *, declared: bool) -> object:
    if not callable(factory):
        raise StartupError(f"{name} is of type {type(factory).__name__}, so it is no factory: leave --factory out")
    try:
        made: object = factory()
    except SystemExit as error:
        raise StartupError(f"cannot load {name}: the factory ended the process (exit code {error.code!r})") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(factory, NamedFactory) and isinstance(error, ConfigurationError):
            raise
        logger.debug("the factory %s failed", name, exc_info=True)
        raise StartupError(f"cannot load {name}: the factory failed with {_describe(error)}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise StartupError(f"cannot load {name}: the factory is async; make it a plain function that returns the app")
    if not declared:
        logger.warning("%s is taken for a factory, since it can be called without arguments; --factory says so", name)
    return made


def _takes_no_arguments(candidate: object) -> bool:
    # uvicorn calls it and takes a TypeError for "no factory", which hides a TypeError of the factory itself.
    if not callable(candidate):
        return False
    try:
        inspect.signature(candidate).bind()
    except (TypeError, ValueError):
        return False
    return True


def _is_mcp_server(candidate: object) -> bool:
    return not callable(candidate) and any(callable(getattr(candidate, method, None)) for method in _MCP_METHODS)


def _mcp_app(name: str, server: object, host: str) -> object:
    """The server's Streamable HTTP app: by `http_app` in fastmcp, by `streamable_http_app` in the official SDK."""
    method = next(m for m in _MCP_METHODS if callable(getattr(server, m, None)))
    make = cast("Callable[..., object]", getattr(server, method))
    arguments: dict[str, Any] = {}
    # SDK 2.x admits only local Host headers unless told that it serves another address; 1.x has that in its settings.
    if "host" in inspect.signature(make).parameters:
        arguments["host"] = host
    try:
        return make(**arguments)
    except Exception as error:
        logger.debug("%s of %s failed", method, name, exc_info=True)
        raise StartupError(f"cannot serve {name}: its {method}() failed with {_describe(error)}") from error


def _is_asgi3(app: object) -> bool:
    if inspect.isclass(app):
        return hasattr(app, "__await__")
    if inspect.isfunction(app):
        return iscoroutinefunction(app)
    return iscoroutinefunction(getattr(app, "__call__", None))  # noqa: B004  # a plain callable test would not say async


def _describe(error: BaseException) -> str:
    """One line: the error, and where in the user's code it came from."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({_short(error.filename)}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and os.path.dirname(frame.filename) not in _OUR_DIRECTORIES
    ]
    own = [frame for frame in frames if "importlib" not in frame.filename]
    return f"{text} ({_short(own[-1].filename)}:{own[-1].lineno})" if own else text


def _short(file_path: str) -> str:
    relative = os.path.relpath(file_path)
    return file_path if relative.startswith("..") else relative


_OUR_DIRECTORIES = frozenset(
    {os.path.dirname(os.path.abspath(__file__)), os.path.dirname(cast("str", sys.modules["uvicorn"].__file__))}
)
