"""What a manager says about itself: counts, and what could not be released yet, with when it is tried again.

Sessions are shown by their tags: an ID opens a session.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from homing.web.ledger import Kind, Ledger
from homing.web.models import SessionStatus
from homing.web.table import SessionTable


def health_of_sessions(sessions: SessionTable) -> dict[str, Any]:
    """How many there are in each state, and which have something left."""
    ending = [each for each in sessions if each.fenced]
    return {
        "sessions": sum(1 for each in sessions if each.status is SessionStatus.LIVE),
        "creating": sum(1 for each in sessions if each.status is SessionStatus.SEEDING),
        "cleanup_pending": len(ending),
        "late_acquires": sum(1 for each in ending if each.is_acquiring),
        "pending": [
            {"session": each.tag, "left": each.pending(), "next_try_seconds": each.next_try_seconds()}
            for each in ending
        ],
    }


def health_of_ledger(ledger: Ledger) -> dict[str, Any]:
    """acquired = live + pending + released, per kind."""
    return {kind.value: asdict(ledger.counts(kind)) for kind in Kind}


def health_of_browsers(ledger: Ledger) -> dict[str, Any]:
    """The same under the names that clients of such servers know."""
    counts = ledger.counts(Kind.BROWSER)
    return {
        "active_leases": counts.live,
        "acquired": counts.acquired,
        "released": counts.released,
        "release_failures": ledger.failed_releases,
    }
