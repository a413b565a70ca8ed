"""A real file system with little room, so that a test can fill it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_memory_disk(place: Path, kibibytes: int) -> Iterator[Path]:
    """A tmpfs of that size at `place`, which is made; the test is skipped where none can be mounted."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("only root mounts a small file system")
    place.mkdir(mode=0o700)
    options = f"size={kibibytes}k,mode=0700"
    done = subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run([umount, str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no room on the file system of `place`."""
    with open(place / "filling", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
