"""What a planted bug is: a change to the source, the promise it breaks, and the tests that must then fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Change:
    """In `path`, below the root of the tree, `old` becomes `new`."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Make the change in the tree at `root`.

        Raises:
            LookupError: the file does not have `old` exactly once.
        """
        file = root / self.path
        text = file.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise LookupError(f"{self.path} has {count} times, not once:\n{self.old}")
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug.

    Attributes:
        name: What is wrong once it is planted.
        promise: P1 to P6 of `docs/design/protocol.md`, or `answers` for its table of answers.
        tests: Node IDs; at least one of them has to fail.
        rule: The rule of a model that it leaves out, as `model.RULE`; empty: none.
    """

    name: str
    promise: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    rule: str = ""
