"""How the records of dead workers are kept within a limit: the oldest dead worker's go first.

Everything here reads every record, so it runs in a thread; the lock is held for a batch at a time.
"""

from __future__ import annotations

from typing import Final

from homing.directory import failpoints
from homing.directory.base import Counters, Records
from homing.directory.waiting import locked_in_thread
from homing.errors import ForeignRecordError, MalformedRecordError

BATCH: Final = 256


def compact_records(records: Records, counters: Counters, limit: int) -> int:
    """Remove what dead workers own beyond `limit` records of dead workers; return how many went.

    Raises:
        DirectoryBusyError: the lock was not free. DirectoryError: the records cannot be read.
    """
    counts = records.survey(limit)
    if counts is None:
        return 0
    # Proved dead here, before the lock; under it, only records that still say the same go (rule 4).
    dead = sorted((age, text) for text in counts if (age := _dead_since(records, text)) is not None)
    excess = sum(counts[text] for _, text in dead) - limit
    removed = 0
    for _, text in dead:
        if removed >= excess:
            break
        batch: list[str] = []
        for name in records.names_of(text):
            batch.append(name)
            if len(batch) == min(BATCH, excess - removed):
                removed += _remove(records, counters, batch, text)
                batch = []
                if removed >= excess:
                    break
        if batch:
            removed += _remove(records, counters, batch, text)
    return removed


def _dead_since(records: Records, text: str) -> float | None:
    """When the worker in a record started, if it is dead; None if it is alive, or there is no such worker."""
    try:
        owner = records.owner_in(text, "of a survey")
    except ForeignRecordError:
        return -1.0  # of another boot: older than any of this one
    except MalformedRecordError:
        return None
    return records.started_at(owner) if records.is_dead(owner) else None


def _remove(records: Records, counters: Counters, names: list[str], text: str) -> int:
    def act() -> int:
        removed = 0
        for name in names:
            if records.read(name) == text:
                if failpoints.on is not None:
                    failpoints.hit("compact.before_unlink")
                records.remove(name)
                removed += 1
        return removed

    return locked_in_thread(records, counters, act)
