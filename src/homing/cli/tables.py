"""Tables in a terminal, which may be narrow: what tells rows apart is never cut.

Not here: what stands in them (`ps.py`, `sessions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from homing.cli.printable import printable

_ANY_WIDTH: Final = 10_000


class FittingTable:
    """A table that leaves out columns, and says so, where its terminal is too narrow for all of them.

    Args:
        names: Its columns.
        rows: The texts of each row by their columns.
        whole: Columns that tell rows apart: always shown, and never cut.
        texts: Columns that begin on the left; the others are numbers.
        spare: Columns that may be left out, the least important first.
        notes: What is said beneath.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: Sequence[Mapping[str, str]],
        *,
        whole: Sequence[str],
        texts: Sequence[str],
        spare: Sequence[str],
        title: str | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self._names = names
        self._rows = rows
        self._whole = whole
        self._texts = texts
        self._spare = spare
        self._title = title
        self._notes = notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out: list[str] = []
        table = self._table(left_out)
        for name in self._spare:
            if console.measure(table, options=options.update_width(_ANY_WIDTH)).maximum <= options.max_width:
                break
            left_out.append(name)
            table = self._table(left_out)
        yield table

    def _table(self, left_out: Sequence[str]) -> Table:
        names = [name for name in self._names if name not in left_out]
        notes = [*self._notes, f"left out for want of room: {', '.join(left_out)}"] if left_out else self._notes
        table = plain_table(self._title, "; ".join(notes) or None)
        for name in names:
            whole, text = name in self._whole, name in self._texts
            table.add_column(
                name,
                justify="left" if text else "right",
                no_wrap=whole or not text,
                min_width=widest(row[name] for row in self._rows) if whole else None,
            )
        for row in self._rows:
            table.add_row(*(row[name] for name in names))
        return table


def plain_table(title: str | None, caption: str | None = None) -> Table:
    """A table without lines and, as yet, without columns."""
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None, pad_edge=False)


def widest(texts: Iterable[str]) -> int:
    """How many cells of a terminal the longest of them takes as it is shown."""
    return max((cell_len(printable(text)) for text in texts), default=0)
