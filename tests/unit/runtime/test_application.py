"""What APP stands for, with apps that are written to a temporary directory and imported for real."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from homing import RESOURCES, install_session_routing
from homing.errors import ConfigurationError, StartupError
from homing.runtime.application import LoadedApp, NamedFactory, is_routed, load

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes `shop.py`, importable as `shop`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write_module(source: str) -> None:
        (tmp_path / "shop.py").write_text(source)
        importlib.invalidate_caches()

    yield write_module
    sys.modules.pop("shop", None)


def loaded(app: object = "shop:app", **settings: Any) -> LoadedApp:
    return load(app, **{"factory": False, "interface": "auto", "host": "127.0.0.1", **settings})


def reply_of(app: Any, scope_type: str = "http") -> bytes:
    """The body that an ASGI 3 app replies to a GET with."""
    scope = {"type": scope_type, "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1)}
    body = bytearray()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        body.extend(message.get("body", b""))

    asyncio.run(app(scope, receive, send))
    return bytes(body)


ASGI3 = """
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"three"})
"""


def test_an_asgi_app_is_taken_as_it_is(write: Write) -> None:
    write(ASGI3)
    found = loaded()
    assert (found.interface, found.routed, found.mcp) == ("asgi3", False, False)
    assert found.app is sys.modules["shop"].app
    assert reply_of(found.app) == b"three"


def test_a_function_without_arguments_is_a_factory_without_being_told(write: Write) -> None:
    write(ASGI3 + "def make():\n    return app\n")
    assert loaded("shop:make").app is sys.modules["shop"].app
    assert loaded("shop:make", factory=True).app is sys.modules["shop"].app


def test_whoever_names_a_file_is_told_what_to_write(write: Write) -> None:
    write(ASGI3)
    for name, meant in {
        "shop.py:app": "shop:app",
        "src/shop.py:app": "src.shop:app",
        "src/shop:app": "src.shop:app",
    }.items():
        with pytest.raises(StartupError, match=rf"cannot load {name}: .*; write {meant}$"):
            loaded(name)


def test_a_factory_may_make_an_mcp_server(write: Write) -> None:
    write(
        ASGI3
        + "class Server:\n    def streamable_http_app(self):\n        return app\n\ndef make():\n    return Server()\n"
    )
    found = loaded("shop:make", factory=True)
    assert found.mcp
    assert found.app is sys.modules["shop"].app


def test_an_asgi_2_app_becomes_asgi_3(write: Write) -> None:
    write(
        """
class app:
    def __init__(self, scope):
        self.scope = scope

    async def __call__(self, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"two"})
"""
    )
    found = loaded()
    assert found.interface == "asgi2"
    assert reply_of(found.app) == b"two"


def test_an_mcp_server_object_gives_its_http_app_and_hears_the_host(write: Write) -> None:
    write(
        ASGI3 + "class Server:\n    def streamable_http_app(self, *, host='127.0.0.1'):\n        self.host = host\n"
        "        return app\n\nserver = Server()\n"
    )
    found = loaded("shop:server", host="0.0.0.0")
    assert found.mcp
    assert found.app is sys.modules["shop"].app
    assert sys.modules["shop"].server.host == "0.0.0.0"


def test_fastmcps_own_method_is_preferred(write: Write) -> None:
    write(
        ASGI3 + "class Server:\n    def http_app(self, path=None):\n        return app\n"
        "    def streamable_http_app(self):\n        raise RuntimeError('deprecated')\n\nserver = Server()\n"
    )
    assert loaded("shop:server").app is sys.modules["shop"].app


def test_an_app_that_is_routed_is_seen_under_wrappers(write: Write) -> None:
    write(
        ASGI3 + "class Router:\n    homing_routed = True\n    async def __call__(self, scope, receive, send): ...\n"
        "class Wrapper:\n    def __init__(self, app):\n        self.app = app\n"
        "    async def __call__(self, scope, receive, send): ...\n"
        "wrapped = Wrapper(Wrapper(Router()))\n"
    )
    assert loaded("shop:wrapped").routed
    assert not is_routed(sys.modules["shop"].app)


def test_an_app_with_the_seeds_router_in_it_is_seen_to_be_routed_before_its_middleware_is_built() -> None:
    app, plain = FastAPI(), FastAPI()
    install_session_routing(app, RESOURCES, "/nowhere", "cookie", "secret")
    assert is_routed(app)
    assert not is_routed(plain)
    plain.state.homing_router = "somebody's own"
    assert not is_routed(plain)


def test_an_app_that_wraps_itself_ends_the_search() -> None:
    class Loop:
        @property
        def app(self) -> Loop:
            return self

    assert not is_routed(Loop())


@pytest.mark.parametrize(
    ("source", "app", "said"),
    [
        (
            "",
            "nowhere_at_all:app",
            r'cannot load nowhere_at_all:app: Could not import module "nowhere_at_all"; .*--app-dir',
        ),
        ("", "shop:app", r'cannot load shop:app: Attribute "app" not found in module "shop"; check its name'),
        (
            "import os\nos.environ['HOMING_NO_SUCH']\n",
            "shop:app",
            r"KeyError: 'HOMING_NO_SUCH' \(shop.py:2\); python -c",
        ),
        ("def (\n", "shop:app", r"SyntaxError: .*\(shop.py:1\)"),
        ("import nowhere_at_all\n", "shop:app", r"ModuleNotFoundError: No module named 'nowhere_at_all' \(shop.py:1\)"),
        ("raise SystemExit(5)\n", "shop:app", r"importing it ended the process \(exit code 5\)"),
        ("app = {}\n", "shop:app", r"shop:app is of type dict: name an ASGI app"),
        ("def app():\n    return 1 / 0\n", "shop:app", r"the factory failed with ZeroDivisionError: .*\(shop.py:2\)"),
        ("async def app():\n    pass\n", "shop:app", r"the factory is async"),
        ("def app():\n    raise SystemExit('no')\n", "shop:app", r"the factory ended the process \(exit code 'no'\)"),
        (
            "class Server:\n    def http_app(self):\n        raise ValueError('bad')\napp = Server()\n",
            "shop:app",
            r"its http_app\(\) failed with ValueError: bad \(shop.py:3\)",
        ),
    ],
)
def test_an_app_that_cannot_be_loaded_is_one_line(write: Write, source: str, app: str, said: str) -> None:
    write(source)
    with pytest.raises(StartupError, match=said) as raised:
        loaded(app)
    assert "\n" not in str(raised.value)


def test_a_factory_that_is_none_is_refused(write: Write) -> None:
    write("app = 5\n")
    with pytest.raises(StartupError, match=r"is of type int, so it is no factory: leave --factory out"):
        loaded(factory=True)


def test_a_commands_own_factory_goes_by_its_name_and_says_itself_what_cannot_be() -> None:
    def refuse() -> object:
        raise ConfigurationError("cannot make the thing")

    named = NamedFactory("rl serve Thing-v0", refuse)
    assert str(named) == "rl serve Thing-v0"
    with pytest.raises(ConfigurationError, match=r"^cannot make the thing$"):
        load(named, factory=True, interface="auto", host="127.0.0.1")
    with pytest.raises(StartupError, match="cannot load rl serve Thing-v0: the factory failed with ZeroDivisionError"):
        load(NamedFactory("rl serve Thing-v0", lambda: 1 // 0), factory=True, interface="auto", host="127.0.0.1")
    # An app's own factory has a place in somebody's code, which the line shows.
    with pytest.raises(StartupError, match=r"the factory failed with .*ConfigurationError: cannot make the thing"):
        load(refuse, factory=True, interface="auto", host="127.0.0.1")
