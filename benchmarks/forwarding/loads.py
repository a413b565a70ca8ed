"""The loads that every setup gets, as far as it can: what is exchanged, over how many connections, and how fast.

Not here: whose session each request names (a mode of `benchmarks.load.Load`), which setup gets what (`setups.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WARM_SECONDS: Final = 0.15
INTERLEAVED_SESSIONS: Final = 64
MOVES_WARM_SECONDS: Final = 1.0
"""A connection that may move has done so by then: after two requests, and twice at most."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One load.

    Attributes:
        unit: What one reply is, of which the figures are told.
        kind, body_bytes, every_seconds, requests_per_second: As in `benchmarks.load.Load`.
    """

    name: str
    title: str
    unit: str = "request"
    kind: str = "step"
    connections: int = 32
    requests_per_second: float = 0
    body_bytes: int = 0
    every_seconds: float = 0


LOADS: Final = {
    load.name: load
    for load in (
        Traffic("sat", "32 connections, closed loop"),
        Traffic("paced", "1500 requests per second over 32 connections", requests_per_second=1500),
        Traffic("c1", "one connection, closed loop", connections=1),
        Traffic("fresh", "a new connection for each request, 32 at once", kind="fresh"),
        Traffic("1KiB", "bodies of 1 KiB both ways, 32 connections", kind="echo", body_bytes=1 << 10),
        Traffic("1MiB", "bodies of 1 MiB both ways, 8 connections", kind="echo", connections=8, body_bytes=1 << 20),
        Traffic("sse", "32 streams of Server-Sent Events, as fast as they go", unit="event", kind="events"),
        Traffic(
            "sse-paced",
            "32 streams of 50 Server-Sent Events per second each",
            unit="event",
            kind="events",
            every_seconds=0.02,
        ),
        Traffic("ws", "WebSocket echo of 64 bytes, 32 connections", unit="message", kind="websocket", body_bytes=64),
    )
}
