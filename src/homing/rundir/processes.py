"""Which process is it? A number alone is given to another process sooner or later; in a container, to each first one.

A *process name* is a line of text: the boot, the namespaces of PIDs and of times, the process's ID there, and when it started.

Not here: which process a server belongs to (`siblings.py`).
"""

from __future__ import annotations

import os

from homing.rundir.names import boot_id


def process_name(pid: int, seen: str) -> str:
    """The name of a process; it ends in a space where there is no `/proc`.

    Args:
        seen: What it is called in `/proc`, which may show another PID namespace.
    """
    return f"{boot_id()} {namespaces()} {pid} {started(seen)}"


def own_name() -> str:
    return process_name(os.getpid(), "self")


def has_ended(name: str) -> bool | None:
    """Whether the process of that name has ended; None if that cannot be told from here."""
    fields = name.split(" ")
    if len(fields) != 4 or not fields[2].isdecimal():
        return None
    boot, namespace, pid, since = fields
    if boot != boot_id():
        return True
    if namespace != namespaces() or not since or not _proc_is_of_this_namespace():
        return None
    now_since = started(pid)
    # With `hidepid` another user's process is not in `/proc`, though it lives.
    return now_since != since if now_since else not exists(int(pid))


def exists(pid: int) -> bool:
    """Whether there is a process of that number in this PID namespace."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return pid > 0


def parent_in_proc() -> str:
    """The parent's PID in `/proc`, which may show another PID namespace than this process's own."""
    fields = stat_fields("self")
    return fields[1] if fields else str(os.getppid())


def started(pid: str) -> str:
    """When a process started, in clock ticks since boot (field 22 of proc(5)); empty where there is no /proc."""
    return "".join(stat_fields(pid)[19:20])


def stat_fields(pid: str) -> list[str]:
    """Fields 3 and later of `/proc/<pid>/stat`, so field n is at n - 3; none where there is no such file."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def namespaces() -> str:
    """This process's namespaces of PIDs and of times, as `4026531836-4026531834`; empty where that is not told.

    Numbers of processes compare within the first only, and times at which they started within the second: each reader of `/proc`
    sees them by its own.
    """
    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    try:
        times = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel that has none, before Linux 5.6
        times = ""
    return "-".join(each.strip("pidtme:[]") for each in (pids, times))


def _proc_is_of_this_namespace() -> bool:
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False
