"""What the system says of a process: its memory and its open descriptors. Read by whoever asks, so that it costs the process nothing.

Only where there is a `/proc` (Linux); elsewhere nothing is known.
"""

from __future__ import annotations

import os


def resident_bytes(pid: int) -> int | None:
    """The memory that a process has in RAM; None if that cannot be told."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def open_descriptors(pid: int) -> int | None:
    """How many descriptors a process of this user has open; None if that cannot be told."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
