"""One process that serves so many hits of sessions of its own, through the router and nothing else: what callgrind counts.

    python -m benchmarks.instructions.loop HITS PART…

No server and no socket of a client: an ASGI app, a scope, a `receive` and a `send`, called in turn. PART is what is switched on
(`PARTS`). What workers do once a second happens once per `HITS_PER_SECOND` hits here, since a second is long under callgrind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any, Final

from homing.routing import build
from homing.routing.options import RoutingOptions

PARTS: Final = ("row", "route", "spans", "look", "place")
"""row: the worker writes its figures. route: `--metrics-route`. spans: OpenTelemetry's API is installed. look: somebody looks at
the dashboard, or at `homing ps --sessions`. place: new sessions are placed, as by default."""

HITS_PER_SECOND: Final = 2000
"""About a third of what one worker serves, so what happens once a second weighs three times what it does under full load."""

SESSIONS: Final = 100
BODY: Final = b"one more"


# A revision that is compared with may be older.
_PLACES: Final = "place" in RoutingOptions.__dataclass_fields__


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": BODY})


def scope_of(session: bytes) -> dict[str, Any]:
    """As a server makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "scheme": "http",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1:8000"), (b"accept", b"*/*"), (b"x-session", session)],
        "state": {},
        "method": "GET",
        "path": "/step",
        "raw_path": b"/step",
        "query_string": b"",
    }


def _counting() -> Callable[[bool], object]:
    """Tells callgrind to count from here on, or no more; by what `run.py` has compiled."""
    path = os.environ.get("COUNT_LIBRARY")
    if path is None:
        return lambda on: None
    library = ctypes.CDLL(path)
    return lambda on: library.begin() if on else library.end()


async def serve(hits: int, parts: set[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="homing-bench-", dir="/dev/shm") as directory:
        placing: dict[str, Any] = {"place": "balanced" if "place" in parts else "accepting"} if _PLACES else {}
        options = RoutingOptions(
            sessions=("header:x-session",), unowned="adopt", socket_dir=directory, workers=2, **placing
        )
        router = build(app, options)
        asked, said = asyncio.Event(), asyncio.Queue[Any]()

        async def lifespan_events() -> Any:
            if not asked.is_set():
                asked.set()
                return {"type": "lifespan.startup"}
            await over.wait()
            return {"type": "lifespan.shutdown"}

        over = asyncio.Event()
        life = asyncio.create_task(router({"type": "lifespan", "state": {}}, lifespan_events, said.put))
        assert (await said.get())["type"] == "lifespan.startup.complete"
        worker = router.worker
        assert worker is not None

        served: Callable[..., Awaitable[None]] = router
        each_second: list[Callable[[], Awaitable[None]]] = []
        if "route" in parts:
            from homing.runtime.metrics_route import with_metrics_route

            served = with_metrics_route(router, "/metrics")
        if "row" in parts:
            from homing.runtime.config import RunConfig
            from homing.runtime.publisher import Publisher

            publisher = Publisher(worker, RunConfig(app, routing=None))
            publisher.start()
            while publisher._row is None:
                await asyncio.sleep(0.01)

            async def write() -> None:
                publisher._write(0.0)

            each_second.append(write)
        if "look" in parts:
            from homing.routing.shown import shown

            async def look() -> None:
                async for _ in shown(worker, 400):
                    pass

            each_second.append(look)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                assert message["body"] is BODY
                sent += 1

        sessions = [b"session-%d" % number for number in range(SESSIONS)]
        for session in sessions:  # they begin here
            await served(scope_of(session), receive, send)
        counting = _counting()
        counting(True)
        for number in range(hits):
            await served(scope_of(sessions[number % SESSIONS]), receive, send)
            if number % HITS_PER_SECOND == HITS_PER_SECOND - 1:
                for act in each_second:
                    await act()
        counting(False)
        assert sent == hits + SESSIONS
        assert worker.served == hits + SESSIONS
        assert not worker.forwarder.counters.forwarded
        over.set()
        if "row" in parts:
            await publisher.aclose()
        await life


if __name__ == "__main__":
    chosen = set(sys.argv[2:])
    if "spans" not in chosen:

        class _Hidden:
            """As if OpenTelemetry were not installed."""

            @staticmethod
            def find_spec(name: str, path: object = None, target: object = None) -> None:
                if name.partition(".")[0] == "opentelemetry":
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, _Hidden)  # type: ignore[arg-type]
    asyncio.run(serve(int(sys.argv[1]), chosen))
