"""Browser sessions for web agents: which browser does a session have, and what becomes of it?

Needs the extra: `pip install homing[web]`. Nothing below this room knows that it exists. What a name needs is imported when it
is first used: a client imports no browser, a server no Gymnasium.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from homing.web.client import WebCallError, WebSession
    from homing.web.environment import Env
    from homing.web.manager import WebSessionManager
    from homing.web.models import Task
    from homing.web.server import WebServer
    from homing.web.settings import WebSettings

_MODULES: Final = {
    "Env": "environment",
    "Task": "models",
    "WebCallError": "client",
    "WebServer": "server",
    "WebSession": "client",
    "WebSessionManager": "manager",
    "WebSettings": "settings",
}
"""Each public name, and the module of this room that it is in."""

__all__ = ["Env", "Task", "WebCallError", "WebServer", "WebSession", "WebSessionManager", "WebSettings"]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
