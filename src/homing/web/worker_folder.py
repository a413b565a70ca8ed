"""A worker's folder in the temp directory: its browsers' files are in it, and it says which processes they led.

    homing-web-<namespaces>.<pid>.<started>.<random>/   the worker's mark (`processes.py`) names it
        led-<pid>.<started>                            a browser: every process of its session is its own

A browser's children show no mark, and one that is stopped outlives both its browser and its worker. The session that it is
in is then all that tells whose it was, and this is where that is written down: a number that leads a session is given to
nobody else while a member of it is left.

The invariant: only folders of this user count, and only those whose worker is gone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from homing.web.base import ProcessMark

_PREFIX: Final = "homing-web-"
_LED: Final = "led-"


def make_worker_folder(mark: str) -> Path:
    """A folder for the worker that has this mark."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{mark}."))


def note_leader(folder: Path, leader: ProcessMark) -> None:
    """A browser leads a session of processes from now on."""
    (folder / f"{_LED}{leader.pid}.{leader.started}").touch()


def forget_leader(folder: Path, leader: ProcessMark) -> None:
    """Nothing of its session is left."""
    (folder / f"{_LED}{leader.pid}.{leader.started}").unlink(missing_ok=True)


def worker_folders(namespaces: str) -> Iterator[tuple[Path, ProcessMark]]:
    """This user's folders of workers in those namespaces (`homing.rundir.namespaces`), and whose each is."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{namespaces}.*"):
        _, _, numbers = folder.name.removeprefix(_PREFIX).partition(".")
        worker = _marked(".".join(numbers.split(".")[:2]))
        with contextlib.suppress(OSError):
            if worker is not None and folder.lstat().st_uid == os.geteuid():
                yield folder, worker


def leaders_in(folder: Path) -> Iterator[ProcessMark]:
    """The browsers of a worker."""
    for path in folder.glob(f"{_LED}*"):
        leader = _marked(path.name.removeprefix(_LED))
        if leader is not None:
            yield leader


def _marked(text: str) -> ProcessMark | None:
    pid, _, started = text.partition(".")
    return ProcessMark(int(pid), int(started)) if pid.isdigit() and started.isdigit() else None
