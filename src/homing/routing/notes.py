"""What a request says about its session, as it crosses the hop with it: the owner does not read it a second time.

Not here: the frame that carries it (`homing.forwarding.heads`), and what is done about it (`route.py`).
"""

from __future__ import annotations

from typing import Any, Final, cast

from homing.identity import Named, named_only

_FIELDS: Final = 7
"""Of a note that says more than the session's ID."""


def note_of(named: Named) -> tuple[object, ...]:
    """What a request says, as values that cross the hop."""
    session_id = named.session_id
    # A named tuple's equality is quicker than encoding six fields, and then decoding them.
    if named == (session_id, False, False, False, None, None, None, ()):
        return (session_id,)
    return (
        session_id,
        named.start,
        named.end,
        named.mints,
        named.path_key,
        named.start_path_key,
        named.also,
    )


def note_of_a_later_one(named: Named) -> tuple[object, ...]:
    """The same of a start before which others wait: it may not begin a session now."""
    note = note_of(named)
    return (*note, True) if len(note) == _FIELDS else note


def says_others_wait(note: tuple[object, ...]) -> bool:
    """Whether a note is of a start before which others wait."""
    return len(note) > _FIELDS


def named_from(note: tuple[object, ...]) -> Named:
    """The sender's `Named`. The private socket is this user's alone, so its word is taken."""
    if len(note) == 1:
        return named_only(note[0]) if isinstance(note[0], str) else Named()
    session_id, start, end, mints, path_key, start_path_key, also = cast("tuple[Any, ...]", note)[:_FIELDS]
    return Named(session_id, start, end, mints, path_key, start_path_key, also=tuple(also))
