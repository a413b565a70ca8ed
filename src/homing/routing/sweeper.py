"""Releases ownership of the sessions that have ended, so that it ends even when no more requests arrive.

The invariant: requests that were already queued win over a sweep. If the event loop lagged, every deadline moves by the
lag first, and the loop gets a turn to serve what arrived meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from homing.clock import Clock
from homing.directory.base import Why

if TYPE_CHECKING:
    from homing.routing.worker import Worker

logger = logging.getLogger(__name__)

MIN_SWEEP_SECONDS: Final = 0.05
MAX_SWEEP_SECONDS: Final = 30.0
COMPACT_SECONDS: Final = 60.0

LAG_SECONDS: Final = 0.05
"""A wake-up this late is the scheduler's ordinary jitter; anything later is a lag."""


def sweep_interval(window_seconds: float) -> float:
    """How often to sweep: a tenth of the window, between 0.05 s and 30 s."""
    return min(max(window_seconds / 10, MIN_SWEEP_SECONDS), MAX_SWEEP_SECONDS)


def sweep(worker: Worker) -> None:
    """Release every session whose lifetime is over. Nothing is released while it is served or held."""
    for session_id in worker.lifetimes.sweep():
        worker.owners.release(session_id, why=Why.IDLE if session_id in worker.went_idle else Why.CLOSED)
    worker.went_idle.clear()
    worker.path_keys.settle(worker.owners.mine)
    worker.count_sessions()
    # What could not be removed when it was released (a full disk, no descriptors) is tried again.
    for owners in (worker.owners, worker.path_keys.owners):
        if pending := owners.release_pending():
            logger.warning("%d owner records could not be removed yet", pending)


async def sweep_forever(worker: Worker, *, interval_seconds: float, clock: Clock) -> None:
    """Sweep until cancelled; a sweep that fails is logged, and the next one tries again."""
    compact_at = clock.monotonic() + COMPACT_SECONDS
    while True:
        planned = clock.monotonic() + interval_seconds
        await asyncio.sleep(interval_seconds)
        lag = clock.monotonic() - planned
        if lag > LAG_SECONDS:
            worker.lifetimes.postpone(lag)
            await asyncio.sleep(0)
        try:
            sweep(worker)
            if clock.monotonic() >= compact_at:
                compact_at = clock.monotonic() + COMPACT_SECONDS
                await worker.owners.compact()
        except Exception:
            logger.exception("sweep failed; the next one is in %.2f s", interval_seconds)
