"""Names in a run directory, and the IDs they are made of."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import secrets
import sys
from typing import Final

from homing.errors import RunDirectoryError
from homing.types import WorkerId

SESSION_SOCKET_DIR_ENV: Final = "HOMING_SESSION_SOCKET_DIR"
"""Names the run directory to use, in place of a new one."""

SESSION_OWNERS_DIR: Final = "session-owners"
"""The directory of the owner records, in the run directory."""

SITES_DIR: Final = "sites"
"""The directory, in a run directory, of the lock files of sites that browser sessions share."""

SERVER_DESCRIPTION: Final = "server.json"
"""What the supervisor says of its server (`homing.watch`)."""

NEW_DESCRIPTION: Final = f"{SERVER_DESCRIPTION}.new"
"""That, while it is written."""

LINK_PREFIX: Final = "homing-at-"
"""Before the supervisor's process ID: a link to a run directory elsewhere, where `homing ps` looks (`homing.watch`)."""

PAGE_NAME: Final = "page"
"""What the workers say of themselves (`homing.watch`)."""

CONTROL_SOCKET: Final = "control.sock"
"""Where the supervisor is asked to drain a worker (`homing.runtime.control`)."""
BOARD_NAME: Final = "board"
"""What the workers tell each other, to place new sessions (`homing.placement`)."""

PERMITS_NAME: Final = "permits"
"""Locked byte by byte: a server's limit of sessions (`homing.placement`)."""

EPISODES_DIR: Final = "episodes"
"""The directory, in a run directory, of who runs an episode and who waits to."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""What `sun_path` holds on Linux (108) less its NUL; Python refuses more when it binds."""

_WORKER_ID = re.compile("[0-9a-f]{32}")


def new_worker_id() -> WorkerId:
    """An ID for this start of this process: 128 random bits. Make another after a fork."""
    return WorkerId(secrets.token_hex(16))


def is_worker_id(text: object) -> bool:
    """Whether `text` is a worker ID: 32 lowercase hexadecimal digits and nothing else."""
    return isinstance(text, str) and _WORKER_ID.fullmatch(text) is not None


def worker_socket_path(socket_dir: str, routing_id: str) -> str:
    """The path of a worker's private socket.

    Raises:
        RunDirectoryError: the path has more than 107 bytes, which no Unix socket can be bound to.
    """
    return _checked(os.path.join(socket_dir, f"{routing_id}.sock"))


def worker_handoff_path(socket_dir: str, routing_id: str) -> str:
    """The path of the socket through which a worker is given connections; as long as the private socket's."""
    return _checked(os.path.join(socket_dir, f"{routing_id}.conn"))


def _checked(path: str) -> str:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise RunDirectoryError(
            f"the private socket {path} would have a path of {size} bytes, and the limit is {MAX_SOCKET_PATH_BYTES}; "
            f"use a shorter run directory (--run-dir, or {SESSION_SOCKET_DIR_ENV})"
        )
    return path


@functools.cache
def boot_id() -> str:
    """This boot of this machine, as 32 lowercase hexadecimal digits.

    Source: `/proc/sys/kernel/random/boot_id` on Linux, `kern.bootsessionuuid` on macOS.
    """
    if sys.platform == "darwin":
        text = _sysctl("kern.bootsessionuuid")
    else:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            text = file.read()
    found = text.strip().replace("-", "").lower()
    if not is_worker_id(found):  # the same shape: 128 bits in hexadecimal
        raise RunDirectoryError(f"the system's boot ID cannot be read: {text!r}")
    return found


def _sysctl(name: str) -> str:
    size = ctypes.c_size_t(128)
    buffer = ctypes.create_string_buffer(size.value)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise RunDirectoryError(f"the system does not say {name}")
    return buffer.value.decode("ascii", "replace")
