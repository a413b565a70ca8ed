"""The command line: `homing run`, `homing demo`, and what other parts of homing add to it."""

from __future__ import annotations

from homing.cli.commands import main

__all__ = ["main"]
