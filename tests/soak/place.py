"""Where the server keeps its records: looked into from here, and made too small; and how many descriptors a worker may open.

Not here: when (`faults`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.servers import ServerProcess

from homing.types import SESSION, key_digest

MANY_INODES: Final = 1_000_000


class Place:
    """Where the server's run directory lies: seen from here, and a file system that can be made too small.

    Args:
        path: The run directory, as the server calls it.
        mounted: The tmpfs of its own that the server has it on, in a mount namespace of its own; None: it has none.
    """

    def __init__(self, server: ServerProcess, path: str, mounted: str | None) -> None:
        self._server = server
        self._mounted = mounted
        self.path = Path(path)
        if mounted is not None:
            self.path = Path(f"/proc/{server.pid}/root{path}")

    @property
    def can_be_full(self) -> bool:
        return self._mounted is not None

    def socket_path(self, worker_id: str) -> str:
        return str(self.path / f"{worker_id}.sock")

    def record_path(self, session: str) -> Path:
        return self.path / "session-owners" / key_digest(SESSION, session)

    def used_inodes(self) -> int:
        status = os.statvfs(f"/proc/{self._server.pid}/root{self._mounted}")
        return status.f_files - status.f_ffree

    async def limit(self, inodes: int) -> bool:
        """Let the file system hold so many files and no more; False if it holds more already."""
        entering = [_program("nsenter"), "--preserve-credentials", "-t", str(self._server.pid), "-U", "-m"]
        remounting = [_program("mount"), "-o", f"remount,nr_inodes={inodes}", str(self._mounted)]
        process = await asyncio.create_subprocess_exec(*entering, *remounting, stderr=subprocess.DEVNULL)
        return await process.wait() == 0


def _program(name: str) -> str:
    return shutil.which(name) or name


def namespace(mounted: str) -> list[str]:
    """What stands before the server's command line so that it has a tmpfs of its own there; empty where that cannot be."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return []
    mount = f"mount -t tmpfs -o mode=0700,nr_inodes={MANY_INODES} tmpfs {mounted}"
    entering = [_program("unshare"), "-Urm", "sh", "-c"]
    if subprocess.run([*entering, mount], check=False, capture_output=True).returncode:
        return []
    return [*entering, f'{mount} && exec "$@"', "sh"]


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """The process may open no more descriptors than it has."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
