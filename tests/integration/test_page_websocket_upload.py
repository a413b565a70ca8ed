"""Page first, then a WebSocket, then an upload (tests/scenarios.md, 5): three ways to name one session, one process."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.plain_http import request
from tests.support.served import served
from websockets.asyncio.client import connect

NOTEBOOKS = 12
OPTIONS = ("--session", "cookie:notebook", "--session", "path:/notebooks/{session}")


@dataclass
class Visit:
    """What one visitor saw: each `born` is a construction of its notebook."""

    page: str
    cells: list[dict[str, Any]]
    upload: dict[str, Any]
    last_cell: dict[str, Any]


async def visit(url: str) -> Visit:
    page = await request(f"{url}/")
    cells = []
    async with connect(url.replace("http", "ws") + "/kernel", additional_headers={"cookie": page.cookie}) as kernel:
        for cell in ("a = 1", "b = 2"):
            await kernel.send(cell)
            cells.append(json.loads(await kernel.recv()))
        notebook = page.cookie.removeprefix("notebook=")
        upload = await request(f"{url}/notebooks/{notebook}/files/data.csv", "PUT", body=b"1,2\n" * 75_000)
        await kernel.send("c = 3")  # the socket has been open all the while
        last_cell = json.loads(await kernel.recv())
    return Visit(page.body.decode(), cells, upload.json(), last_cell)


async def visits(url: str) -> list[Visit]:
    return await asyncio.gather(*(visit(url) for _ in range(NOTEBOOKS)))


@pytest.mark.parametrize("test_mode", [(), ("--scatter",)], ids=["as-it-comes", "scattered"])
def test_the_page_the_websocket_and_the_upload_share_one_notebook(test_mode: tuple[str, ...]) -> None:
    """Scattered, every request first lands on a wrong worker."""
    with served("examples.notebook:app", *OPTIONS, *test_mode) as server:
        seen = asyncio.run(visits(server.url))
    born = set()
    for one in seen:
        notebook = one.cells[0]["born"]
        assert notebook in one.page, "the page's notebook and the WebSocket's are two"
        assert one.cells == [{"born": notebook, "cells": n, "files": []} for n in (1, 2)]
        assert one.upload == {"born": notebook, "size": 300_000, "cells": 2}
        assert one.last_cell == {"born": notebook, "cells": 3, "files": ["data.csv"]}
        born.add(notebook)
    assert len(born) == NOTEBOOKS
