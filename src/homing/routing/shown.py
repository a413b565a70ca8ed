"""What a worker says of its sessions when it is asked: those that are here, and why the last ones are not any more.

Made when somebody asks, from what the worker keeps anyway, so no request pays for it. Sessions are shown by their tags.

Not here: who asks (`homing.watch`), and how the question comes (`homing.forwarding`).
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Final

import msgspec

from homing.lifetime import Seen
from homing.types import SESSION, session_tag

if TYPE_CHECKING:
    from homing.directory.ownership import Entry
    from homing.routing.worker import Worker

_AT_ONCE: Final = 250
"""Sessions described in one turn of the event loop: about half a millisecond."""

_MOST_COMPARED: Final = 20_000
"""Sessions of which the most wanted are chosen; of more, those that came last: a page that is looked at asks every second."""


class ShownSession(msgspec.Struct, frozen=True, array_like=True):
    """A session that is here.

    Attributes:
        tag: What logs call it.
        ended: It has ended, and is in its close retry window.
        age_seconds: Since when this worker owns it.
        unused_seconds: Since its last request; 0 while one is being served, None if the worker cannot tell.
        serving: Requests of it that are being served.
    """

    tag: str
    ended: bool
    age_seconds: float
    unused_seconds: float | None
    serving: int


class EndedSession(msgspec.Struct, frozen=True, array_like=True):
    """A session that was here.

    Attributes:
        why: `closed`, `idle` or `moved`.
        age_seconds: How long it was here; None if that is not known.
        ago_seconds: How long it has been gone; None if that is not known.
    """

    tag: str
    why: str
    age_seconds: float | None
    ago_seconds: float | None


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """A part of the answer; the parts of one answer are added up.

    Attributes:
        left_out: Sessions beyond the limit; in the last part.
    """

    sessions: list[ShownSession] = []
    ended: list[EndedSession] = []
    left_out: int = 0


_encode = msgspec.msgpack.Encoder().encode


async def shown(worker: Worker, limit: int) -> AsyncGenerator[bytes, None]:
    """The worker's sessions, and its last endings, the latest first; encoded `Shown`s.

    Open sessions come before ended ones, and of either those that were used last: what is over the limit is the rest.
    """
    seen: Callable[[str], Seen | None] | None = getattr(worker.lifetimes, "seen", None)
    chosen = await _most_wanted(list(worker.owners.owned()), limit, seen)
    # Where one app has the directory to itself, a record's name begins with the tag: no digest has to be made again.
    plain = worker.owners.kind == SESSION
    left_out = max(0, len(worker.owners) - len(chosen))
    for first in range(0, len(chosen), _AT_ONCE):
        now = time.monotonic()
        sessions = []
        for entry in chosen[first : first + _AT_ONCE]:
            if not entry.owned:
                continue  # it has ended while others were described
            ended, unused = _state(entry, seen)
            tag = entry.name[:12] if plain else session_tag(entry.key)
            sessions.append(ShownSession(tag, ended, now - entry.since, unused, entry.serving))
        yield _encode(Shown(sessions=sessions))
        await asyncio.sleep(0)
    endings = list(worker.owners.endings)[::-1]
    for first in range(0, len(endings), _AT_ONCE):
        now = time.monotonic()
        part = [
            EndedSession(session_tag(each.key), each.why.value, each.at - each.since, now - each.at)
            for each in endings[first : first + _AT_ONCE]
        ]
        yield _encode(Shown(ended=part))
        await asyncio.sleep(0)
    yield _encode(Shown(left_out=left_out))


async def _most_wanted(owned: list[Entry], limit: int, seen: Callable[[str], Seen | None] | None) -> list[Entry]:
    """So many of the sessions at most: open before ended, then by their last use, then by when they came, the latest first."""
    best: list[tuple[bool, float, int, Entry]] = []
    compared = owned[-max(_MOST_COMPARED, limit) :]
    for first in range(0, len(compared), _AT_ONCE):
        now = time.monotonic()
        for number, entry in enumerate(compared[first : first + _AT_ONCE], first):
            ended, unused = _state(entry, seen)
            best.append((ended, now - entry.since if unused is None else unused, -number, entry))
        if len(best) > 2 * limit:
            best = heapq.nsmallest(limit, best)
        await asyncio.sleep(0)
    return [entry for *_, entry in heapq.nsmallest(limit, best)]


def _state(entry: Entry, seen: Callable[[str], Seen | None] | None) -> tuple[bool, float | None]:
    """Whether the session has ended, and how long it has not been used; None if the worker cannot tell."""
    known = None if seen is None else seen(entry.key)
    unused = 0.0 if entry.serving else None if known is None else known.unused_seconds
    return known is not None and known.ended, unused
