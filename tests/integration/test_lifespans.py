"""Apps whose lifespan is not like Starlette's: a server serves them, so homing does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.raw import connect, request
from tests.support.servers import serving

import homing


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_an_app_whose_lifespan_ends_once_it_has_started_is_served_until_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("HOMING_SESSION_SOCKET_DIR", str(run))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            if end == "raises":
                raise RuntimeError("the test wants this")
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def test() -> None:
        routed = homing.sticky(app, sessions=[homing.header("x-session")])
        async with serving(routed) as address, connect(address) as wire:
            for _ in range(3):
                await wire.send(request("GET", "/", [("x-session", "one")]))
                assert (await wire.reply()).status == 200
            assert [name for name in os.listdir(run) if name.endswith(".sock")] == [f"{routed.worker_id}.sock"]
        assert routed.worker is None
        assert not [name for name in os.listdir(run) if name.endswith(".sock")]

    asyncio.run(test())
