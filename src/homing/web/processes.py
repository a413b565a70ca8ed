"""Which processes are whose, and are they gone?

Every process that a worker starts for a session carries a mark in its environment, `HOMING_WEB_OWNER`, that names the
worker by PID, start time, and the namespaces that these are of. So evidence needs no memory: a marked process whose worker
is gone is an orphan, whoever looks, and a process without the mark is not ours, whatever it is called.

A browser's children may clear their environment, so a mark also counts for a process's descendants and for its
process group's and session's members that it leads, and for the sessions that its worker has noted (`worker_folder.py`).
Linux only: elsewhere nothing is found and nothing is ended.

Not here: how a browser is closed (its provider).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from homing.rundir import SESSION_SOCKET_DIR_ENV, namespaces
from homing.web.base import Footprint, ProcessMark
from homing.web.worker_folder import leaders_in, worker_folders

logger = logging.getLogger(__name__)

OWNER_ENV: Final = "HOMING_WEB_OWNER"
_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int


def mark(pid: int) -> ProcessMark | None:
    """This very start of the process; None if there is none, or only its remains (a zombie)."""
    stat = _stat(pid)
    return None if stat is None or stat.state in "ZX" else ProcessMark(pid, stat.started)


def is_running(process: ProcessMark) -> bool:
    """Whether that very process runs; a zombie does not, a stopped one does."""
    return mark(process.pid) == process


def owner_mark() -> str:
    """What this worker writes into the environment of what it starts."""
    stat = _stat(os.getpid())
    return f"{namespaces()}.{os.getpid()}.{0 if stat is None else stat.started}"


def browser_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a browser or its driver: ours with the mark, and without what leads to the run directory."""
    environment = dict(os.environ if given is None else given)
    environment.pop(SESSION_SOCKET_DIR_ENV, None)
    environment[OWNER_ENV] = owner_mark()
    return environment


def left_of(footprint: Footprint) -> list[str]:
    """What is still there of a lease, in words; empty if it is gone. A few reads of /proc: microseconds each."""
    running = [f"process {process.pid}" for process in footprint.processes if is_running(process)]
    return running + [f"folder {folder}" for folder in footprint.folders if os.path.lexists(folder)]


def children(pid: int) -> list[ProcessMark]:
    """The processes that this one started and that run."""
    return [
        ProcessMark(stat.pid, stat.started) for stat in _all_stats() if stat.parent == pid and stat.state not in "ZX"
    ]


def led_by(leader: ProcessMark) -> list[ProcessMark]:
    """The processes of the session that this one leads or led, itself among them: a browser's are all in its own."""
    return [
        ProcessMark(stat.pid, stat.started)
        for stat in _all_stats()
        if stat.session == leader.pid and stat.started >= leader.started and stat.state not in "ZX"
    ]


def memory_of(processes: Iterable[ProcessMark]) -> int:
    """Their memory in bytes, what they share counted in proportion. Some milliseconds for each: call it in a thread."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii", "replace").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def is_stopped(process: ProcessMark) -> bool:
    """Whether it is held by a signal, so that it answers nothing."""
    stat = _stat(process.pid)
    return stat is not None and stat.started == process.started and stat.state in "tT"


def command_line(process: ProcessMark) -> list[str]:
    """What it was started with; empty if it is gone."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def orphans() -> list[ProcessMark]:
    """Processes that a worker of this user, in these namespaces, started, and that outlived it."""
    stats = {stat.pid: stat for stat in _all_stats()}
    roots = {pid for pid in stats if _is_orphan_root(pid)}
    led = {
        leader.pid: leader.started
        for folder, worker in worker_folders(namespaces())
        if not is_running(worker)
        for leader in leaders_in(folder)
        # A number that somebody else has by now leads another session.
        if leader.pid not in stats or stats[leader.pid].started == leader.started
    }
    return [
        ProcessMark(stat.pid, stat.started)
        for stat in stats.values()
        if stat.state not in "ZX"
        and (_belongs(stat, roots, stats) or (stat.session in led and stat.started >= led[stat.session]))
    ]


def end(processes: Iterable[ProcessMark], seconds: float) -> list[ProcessMark]:
    """Kill processes, stopped ones too, and wait; those that are still there. Blocks: call it in a thread."""
    left = [process for process in processes if _kill(process)]
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        left = [process for process in left if is_running(process)]
    return left


def end_orphans(seconds: float = 2.0) -> int:
    """End what dead workers left, whoever's server they were of; how many there were. Blocks: call it in a thread.

    Looked for until none is found: a process may have started another between the look and its end.
    """
    ended: set[ProcessMark] = set()
    until = time.monotonic() + seconds
    while (found := orphans()) and time.monotonic() < until:
        end(found, until - time.monotonic())
        ended.update(found)
    if found:
        logger.error("%d processes of dead workers could not be ended", len(found))
    elif ended:
        logger.warning("ended %d processes that dead workers had left", len(ended))
    return len(ended)


def remove_folder(folder: Path) -> None:
    """Delete a folder and all in it; nothing if it is gone. Others may delete parts of it meanwhile. Blocks.

    Raises:
        OSError: something of it is still there.
    """
    while os.path.lexists(folder):
        # Missing is also what it reports of a file within that somebody else was quicker to delete.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def remove_folders_of_the_dead() -> None:
    """Delete what workers that are gone have left in the temp directory, once nothing that they started runs. Blocks."""
    for folder, worker in worker_folders(namespaces()):
        if not is_running(worker) and not any(led_by(leader) for leader in leaders_in(folder)):
            with contextlib.suppress(OSError):
                remove_folder(folder)


def _kill(process: ProcessMark) -> bool:
    """Kill that very process. A PID file descriptor, so that a PID that was reused meanwhile is left alone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_running(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except PermissionError:
        return True
    finally:
        os.close(descriptor)
    return True


def _is_orphan_root(pid: int) -> bool:
    """Whether the process carries the mark of a worker of this namespace that is gone."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's, or gone
        return False
    prefix = f"{OWNER_ENV}=".encode()
    for variable in environment.split(b"\0"):
        if variable.startswith(prefix):
            parts = variable.removeprefix(prefix).decode("ascii", "replace").split(".")
            if len(parts) != 3 or parts[0] != namespaces() or not (parts[1].isdigit() and parts[2].isdigit()):
                return False
            return not is_running(ProcessMark(int(parts[1]), int(parts[2])))
    return False


def _belongs(stat: _Stat, roots: set[int], stats: Mapping[int, _Stat]) -> bool:
    """Whether a process is a root, below one, or in a group or session that a root leads."""
    if stat.group in roots or stat.session in roots:
        return True
    seen: set[int] = set()
    here: _Stat | None = stat
    while here is not None and here.pid not in seen:
        if here.pid in roots:
            return True
        seen.add(here.pid)
        here = stats.get(here.parent)
    return False


def _all_stats() -> Iterator[_Stat]:
    try:
        entries = os.listdir("/proc")
    except OSError:
        return
    for name in entries:
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            yield stat


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses: what follows the last one is fields.
    fields = text.rpartition(")")[2].split()
    return _Stat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
