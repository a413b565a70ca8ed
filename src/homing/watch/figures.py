"""The figures of one worker: what its row says, and how they are read off it.

Not here: where they are kept (`page.py`), and who looks (`servers.py`, `metrics.py`).
"""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

from homing.clock import boot_seconds
from homing.histogram import Histogram, summed
from homing.routing.worker import Worker

STALE_SECONDS: Final = 5.0
"""A living worker writes its row every second; one that has not for so long is stuck, or starved of CPU time."""


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """A `Histogram` as a row has it: how often, by the steps of `homing.histogram`, and the sum of all."""

    counts: list[int]
    total_seconds: float


def spread(histogram: Histogram) -> Spread:
    return Spread(list(histogram.counts), histogram.total_seconds)


class Figures(msgspec.Struct, frozen=True):
    """What one worker says about itself.

    Attributes:
        worker, pid: Which it is.
        started: Seconds since the epoch.
        began, written: When it started, and when it wrote this, as `homing.clock.boot_seconds` tells.
        sessions: Those it owns, open or in their close retry window. `ended`: how many of them have ended.
        serving: Requests whose handler is running, other workers' included.
        served: Requests that it has served, `received` from other workers among them.
        forwarded: Requests that it has sent to another worker.
        given, adopted: Connections that moved away, and that came.
        handed_off: Of the requests sent to another worker, those that their connection has followed there.
        failed: Of the requests sent to another worker, those whose reply was cut, or whose app raised there.
        not_mine: Requests from other workers that were sent back, since the session was not here.
        answers: Replies of homing's own, by their code (`session_gone`, …). `peer_answers`: of these, those to requests
            that other workers sent, which count there.
        endings: Sessions that have ended here, by why (`closed`, `idle`, `moved`).
        placed: New sessions, by where they were placed.
        lock_timeouts: Waits for the lock on dead workers' records that ended without it.
        cpu_seconds: CPU time of the process so far.
        lag_seconds: By how much the event loop was late when this was written.
        draining: No session begins there any more: it is to leave.
        hops, queued, lock_waits, lags: How long owners took to say *mine*, starts waited for a place, the lock on dead
            workers' records took, and how late the event loop was each time it was looked at.
    """

    worker: str
    pid: int
    started: float
    began: float
    written: float
    sessions: int = 0
    ended: int = 0
    serving: int = 0
    served: int = 0
    received: int = 0
    forwarded: int = 0
    given: int = 0
    adopted: int = 0
    handed_off: int = 0
    failed: int = 0
    not_mine: int = 0
    answers: dict[str, int] = {}
    peer_answers: dict[str, int] = {}
    endings: dict[str, int] = {}
    placed: dict[str, int] = {}
    lock_timeouts: int = 0
    cpu_seconds: float = 0.0
    lag_seconds: float = 0.0
    draining: bool = False
    hops: Spread | None = None
    queued: Spread | None = None
    lock_waits: Spread | None = None
    lags: Spread | None = None

    @property
    def open_sessions(self) -> int:
        """Sessions that have not ended."""
        return max(0, self.sessions - self.ended)

    @property
    def ended_sessions(self) -> int:
        """Sessions in their window."""
        return self.sessions - self.open_sessions


def figures_of(
    worker: Worker,
    *,
    started: float,
    began: float,
    given: int = 0,
    adopted: int = 0,
    handed_off: int = 0,
    undecided: int = 0,
    lag_seconds: float = 0.0,
    lags: Histogram | None = None,
) -> Figures:
    """The figures of a worker now. About 20 µs, whatever the number of sessions.

    Args:
        undecided: Requests sent to another worker of which it is not known yet whether their connection follows. They count
            from then on: what is read off as a counter never goes back.
    """
    placement = worker.placement
    sent, records = worker.forwarder.counters, (worker.owners.counters, worker.path_keys.owners.counters)
    return Figures(
        worker=worker.id,
        pid=os.getpid(),
        started=started,
        began=began,
        written=boot_seconds(),
        sessions=len(worker.owners),
        ended=worker.count_ended(),
        serving=worker.serving,
        served=worker.served,
        received=worker.received,
        forwarded=sent.forwarded - undecided,
        given=given,
        adopted=adopted,
        handed_off=handed_off,
        failed=sent.cut + sent.raised,
        not_mine=worker.not_mine,
        answers=dict(worker.answers),
        peer_answers=dict(worker.peer_answers),
        endings=dict(worker.owners.counters.ended),
        placed={} if placement is None else dict(placement.placed),
        lock_timeouts=sum(each.lock_timeouts for each in records),
        cpu_seconds=time.process_time(),
        lag_seconds=lag_seconds,
        draining=worker.draining,
        hops=spread(sent.hops),
        queued=spread(Histogram() if placement is None else placement.queue.waits),
        lock_waits=spread(summed(each.lock_waits for each in records)),
        lags=None if lags is None else spread(lags),
    )


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Figures)


def encode_figures(figures: Figures) -> bytes:
    return _encode(figures)


def decode_figures(row: bytes) -> Figures | None:
    """What a row says; None if it is no figures (of another version, or damaged)."""
    try:
        return _decoder.decode(row)
    except msgspec.MsgspecError:
        return None
