"""uvicorn's configuration with homing's router inside, as it is handed to workers."""

from __future__ import annotations

import copy
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.logs import logging_restored
from uvicorn.config import LOGGING_CONFIG
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from homing.errors import ConfigurationError, StartupError
from homing.routing import RoutingOptions, SessionRoutingMiddleware
from homing.runtime.config import RunConfig
from homing.runtime.listeners import Listeners
from homing.runtime.protocol import HomingHttpToolsProtocol
from homing.runtime.proxy_headers import PROXY_HEADERS

OPTIONS = RoutingOptions(sessions=("cookie:visit",), workers=2, socket_dir="/nowhere")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "shop.py").write_text("async def app(scope, receive, send): ...\ndef make():\n    return app\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "shop:app"
    sys.modules.pop("shop", None)


def config(app: str, routing: RoutingOptions | None = OPTIONS, **options: Any) -> RunConfig:
    return RunConfig(app, routing=routing, **{"workers": 2, "log_config": None, **options})


def test_it_reaches_a_worker_whole(shop: str) -> None:
    arrived = pickle.loads(pickle.dumps(config(shop, port=0, root_path="/below")))
    assert (arrived.routing, arrived.root_path) == (OPTIONS, "/below")
    arrived.load()
    assert isinstance(arrived.loaded_app, ProxyHeadersMiddleware)


def test_the_clients_address_is_resolved_outside_the_router(shop: str) -> None:
    made = config(shop)
    made.load()
    outer = made.loaded_app
    assert isinstance(outer, ProxyHeadersMiddleware)
    assert isinstance(outer.app, SessionRoutingMiddleware)
    assert outer.app.app is sys.modules["shop"].app


def test_a_factory_is_called_once_and_not_the_router(shop: str) -> None:
    made = config("shop:make", factory=True)
    made.load()
    assert made.loaded_app.app.app is sys.modules["shop"].app


def test_several_workers_need_to_know_sessions(shop: str) -> None:
    with pytest.raises(ConfigurationError, match="2 workers need to know which session a request names"):
        config(shop, RoutingOptions(workers=2)).load()
    alone = config(shop, RoutingOptions(workers=1), workers=1)
    alone.load()
    assert alone.loaded_app.app is sys.modules["shop"].app


def test_only_the_httptools_protocol_is_replaced(shop: str) -> None:
    for http, protocol in (
        ("auto", HomingHttpToolsProtocol),
        ("httptools", HomingHttpToolsProtocol),
        ("h11", H11Protocol),
    ):
        made = config(shop, http=http)
        made.load()
        assert made.http_protocol_class is protocol


def test_a_package_that_is_missing_is_one_line(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zttp", None)
    for name in [name for name in sys.modules if "zttp_" in name]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(StartupError, match=r"cannot start: ModuleNotFoundError: .*zttp"):
        config(shop, http="zttp").load()
    with pytest.raises(ConfigurationError, match=r"--loop zuvloop: No module named 'zuvloop'; install it"):
        config(shop, loop="zuvloop").check_loop()


def test_an_event_loop_of_another_kind_is_one_line(shop: str) -> None:
    config(shop, loop="uvloop").check_loop()
    config(shop, loop="asyncio:new_event_loop").check_loop()
    with pytest.raises(ConfigurationError, match="--loop builtins:dict makes a dict, which is no asyncio event loop"):
        config(shop, loop="builtins:dict").check_loop()
    with pytest.raises(ConfigurationError, match="--loop nowhere_at_all:loop: "):
        config(shop, loop="nowhere_at_all:loop").check_loop()


def test_certificates_that_cannot_be_read_are_named(shop: str) -> None:
    with pytest.raises(
        StartupError, match=r"cannot use the TLS files /nowhere/cert\.pem, /nowhere/key\.pem: .*No such file"
    ):
        config(shop, ssl_certfile="/nowhere/cert.pem", ssl_keyfile="/nowhere/key.pem").load()


def test_uvicorns_own_logging_configuration_is_not_changed() -> None:
    before = copy.deepcopy(LOGGING_CONFIG)
    with logging_restored():
        made = RunConfig("shop:app", routing=None)
    assert made.log_config is not LOGGING_CONFIG
    assert before == LOGGING_CONFIG


def test_every_header_that_uvicorn_reads_of_a_proxy_has_it_called() -> None:
    code = ProxyHeadersMiddleware.__call__.__code__
    read = {each for each in code.co_consts if isinstance(each, bytes) and each.islower()}
    assert b"x-forwarded-for" in read
    assert read <= PROXY_HEADERS


def test_whoever_accepts_a_connection_has_the_kernel_look_after_it(shop: str) -> None:
    with Listeners(config(shop, port=0).bind_socket()) as listeners:
        first, second = (listeners.take().socket for _ in range(2))
        assert second.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        first.listen()
        with socket.create_connection(first.getsockname(), timeout=10):
            accepted, _ = first.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
