"""What was acquired and is still to be released.

The invariant, at every await of everything here: acquired = live + pending release + released, for each kind. An entry
leaves the books only once its release has returned, so a release that fails, hangs or is cancelled leaves it pending.

Not here: when to release what (`session.py`), and how (the closer that an entry is made with).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final


class Kind(enum.StrEnum):
    """The layers of a session, in the order in which they are acquired."""

    SITE = "site"
    BROWSER = "browser"
    BACKEND = "backend"
    RUNNER = "runner"


class Books(enum.Enum):
    LIVE = "live"
    PENDING = "pending release"
    RELEASED = "released"


@dataclass(slots=True, eq=False)
class Entry:
    """One thing that was acquired.

    Attributes:
        release: Gives it back; raises if it may still be there. Called again until it returns.
        needs: What has to be released first: a runner's thread stays as long as its backend is not closed.
        last_error: Of the last try, for `health`; never what a client sent.
    """

    kind: Kind
    release: Callable[[], Awaitable[None]]
    needs: tuple[Entry, ...] = ()
    books: Books = Books.LIVE
    tries: int = 0
    last_error: str = field(default="")

    @property
    def is_released(self) -> bool:
        return self.books is Books.RELEASED

    @property
    def may_be_released(self) -> bool:
        return all(each.is_released for each in self.needs)


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of all that was ever acquired of one kind."""

    acquired: int
    live: int
    pending: int
    released: int


class Ledger:
    """Every entry that is not released, and how many there have been. One per manager."""

    def __init__(self) -> None:
        self._entries: set[Entry] = set()
        self._acquired: Final = Counter[Kind]()
        self._released: Final = Counter[Kind]()
        self.failed_releases = 0

    def hold(self, kind: Kind, release: Callable[[], Awaitable[None]], needs: tuple[Entry, ...] = ()) -> Entry:
        """Enter what has just been acquired: in the same step, without an await in between."""
        entry = Entry(kind, release, needs)
        self._entries.add(entry)
        self._acquired[kind] += 1
        return entry

    def give_up(self, entry: Entry) -> None:
        """Its session ends: it is to be released, and no longer used."""
        if entry.books is Books.LIVE:
            entry.books = Books.PENDING

    def settle(self, entry: Entry) -> None:
        """Its release has returned."""
        if not entry.is_released:
            entry.books = Books.RELEASED
            self._entries.discard(entry)
            self._released[entry.kind] += 1

    def fail(self, entry: Entry, why: str) -> None:
        """Its release did not return as it should; it stays in the books."""
        entry.last_error = why
        self.failed_releases += 1

    def counts(self, kind: Kind) -> Counts:
        live = sum(1 for entry in self._entries if entry.kind is kind and entry.books is Books.LIVE)
        pending = sum(1 for entry in self._entries if entry.kind is kind and entry.books is Books.PENDING)
        return Counts(self._acquired[kind], live, pending, self._released[kind])

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        """Entries that are not released, so an empty one is falsy."""
        return len(self._entries)

    def __repr__(self) -> str:
        pending = sum(1 for entry in self._entries if entry.books is Books.PENDING)
        return f"<Ledger: {len(self) - pending} live, {pending} pending release>"
