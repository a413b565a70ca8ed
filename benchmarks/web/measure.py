"""CPU time and memory of a process and all below it."""

from __future__ import annotations

import os
import time
from typing import Final

from homing.web.base import ProcessMark
from homing.web.processes import command_line, mark, memory_of

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def below(*roots: int) -> set[int]:
    """The processes and all that they started, as far as they live."""
    parents = {pid: parent for pid, (parent, _) in _stats().items()}
    wanted = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    return wanted


def cpu_seconds(*roots: int) -> float:
    """What they have used, with what their children that have ended had used."""
    stats = _stats()
    return sum(stats[pid][1] for pid in below(*roots) if pid in stats) / _TICKS


def own_cpu_seconds(pid: int) -> float:
    """What the process itself has used, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # CLOCK_PROCESS_CPUTIME_ID of another


def browsers_memory(*roots: int) -> int:
    """Bytes that the Chromium processes below them hold, what they share counted in proportion."""
    return memory_of(each for each in _chromium(*roots))


def browser_processes(*roots: int) -> int:
    """How many Chromium processes there are below them."""
    return len(_chromium(*roots))


def own_memory(pid: int) -> int:
    """Bytes that the process itself holds."""
    found = mark(pid)
    return 0 if found is None else memory_of([found])


def _chromium(*roots: int) -> list[ProcessMark]:
    marks = [found for pid in below(*roots) if (found := mark(pid)) is not None]
    return [each for each in marks if any("chrom" in part for part in command_line(each)[:1])]


def _stats() -> dict[int, tuple[int, int]]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(name)] = (int(fields[1]), sum(int(each) for each in fields[11:15]))
    return found
