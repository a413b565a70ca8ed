"""How the sessions of a server are shown: as a table, and as a document for machines. IDs only as tags.

Not here: where they come from (`homing.watch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from homing.cli.tables import plain_table, widest
from homing.routing.shown import ShownSession
from homing.watch.servers import Server
from homing.watch.sessions import WorkerSessions

_TAG_WIDTH: Final = 12
_WORKER_WIDTH: Final = 8


def sessions_document(server: Server, found: Sequence[WorkerSessions]) -> dict[str, Any]:
    """A server's sessions as JSON. Ages and times are seconds; null where a time is not known."""
    return {
        "address": server.description.address,
        "pid": server.description.pid,
        "sessions": [
            {
                "session": session.tag,
                "worker": each.worker,
                "pid": each.pid,
                "state": "ended" if session.ended else "open",
                "age_seconds": _rounded(session.age_seconds),
                "unused_seconds": _rounded(session.unused_seconds),
                "serving": session.serving,
            }
            for each, session in _in_order(found)
        ],
        "ended": [
            {
                "session": session.tag,
                "worker": each.worker,
                "pid": each.pid,
                "reason": session.why,
                "age_seconds": _rounded(session.age_seconds),
                "ago_seconds": _rounded(session.ago_seconds),
            }
            for each in found
            for session in each.ended
        ],
        "left_out": sum(each.left_out for each in found),
        "silent": [each.worker for each in found if not each.answered],
    }


def _in_order(found: Sequence[WorkerSessions]) -> list[tuple[WorkerSessions, ShownSession]]:
    """The sessions of all workers as each of them gives its own: open ones first, and of either those used last."""

    def order(of: tuple[WorkerSessions, ShownSession]) -> tuple[bool, float]:
        session = of[1]
        return session.ended, session.age_seconds if session.unused_seconds is None else session.unused_seconds

    return sorted(((each, session) for each in found for session in each.sessions), key=order)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def sessions_table(server: Server, found: Sequence[WorkerSessions]) -> Table:
    """Those that are there, then those that are not any more."""
    description = server.description
    table = plain_table(f"{description.address}  {description.app}  [{description.pid}]")
    pids = widest(str(each.pid) for each in found)
    # What tells rows apart is never cut; where there is no room, the state goes on in further lines.
    table.add_column("session", no_wrap=True, min_width=_TAG_WIDTH)
    table.add_column("worker", no_wrap=True, min_width=_WORKER_WIDTH)
    table.add_column("pid", justify="right", no_wrap=True, min_width=pids)
    for name in ("age", "unused", "serving"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state")
    for each, session in _in_order(found):
        table.add_row(
            session.tag,
            each.worker[:_WORKER_WIDTH],
            str(each.pid),
            duration(session.age_seconds),
            "–" if session.unused_seconds is None else duration(session.unused_seconds),
            str(session.serving),
            "ended (closed), in its window" if session.ended else "open",
        )
    for each in found:
        for gone in each.ended:
            ago = "" if gone.ago_seconds is None else f", {duration(gone.ago_seconds)} ago"
            age = "–" if gone.age_seconds is None else duration(gone.age_seconds)
            pid = "–" if each.pid is None else str(each.pid)
            table.add_row(
                gone.tag, each.worker[:_WORKER_WIDTH], pid, age, "–", "–", f"gone ({gone.why}{ago})", style="dim"
            )
    said = []
    if silent := [each.worker[:_WORKER_WIDTH] for each in found if not each.answered]:
        said.append(f"no answer from {', '.join(silent)}")
    if left_out := sum(each.left_out for each in found):
        said.append(f"{left_out:,} more are not shown (--limit)")
    table.caption = "; ".join(said) or None
    return table


def duration(seconds: float) -> str:
    """`4 s`, `12 min`, `3 h 05`, `2 d 4 h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02}"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
