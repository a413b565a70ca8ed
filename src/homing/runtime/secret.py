"""The secret that one server's workers share, for apps that sign something and were given no secret of their own.

The invariant: the workers of one server, whenever started, have one secret, and nobody else does. It is in the
environment that the supervisor gives its workers, which do not hand it on to what the app starts, or in a file of a run
directory that only its user can read; never on a command line, and never in a log.

Not here: what is signed with it (`homing.rl`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from typing import Final

from homing.errors import ConfigurationError, RunDirectoryError

SERVER_SECRET_ENV: Final = "HOMING_SERVER_SECRET"  # noqa: S105 - the variable's name
"""Set it to have the same secret after a restart, or on several machines. Else the supervisor makes one."""

_FILE_NAME: Final = "secret"
_SECRET_BYTES: Final = 32

_kept: str | None = None
"""This worker's, once it is no longer in the environment."""


def make_server_secret() -> None:
    """Make the secret, unless the user has set one. Called by the process whose children the workers are.

    Raises:
        ConfigurationError: the one that is set is too short to be a secret.
    """
    given = os.environ.get(SERVER_SECRET_ENV)
    if not given:
        os.environ[SERVER_SECRET_ENV] = secrets.token_urlsafe(_SECRET_BYTES)
    elif len(given.encode()) < _SECRET_BYTES:
        raise ConfigurationError(
            f"{SERVER_SECRET_ENV} has {len(given.encode())} bytes, and whoever guesses it can make any cookie: set at least "
            f"{_SECRET_BYTES} random ones, or leave it out to have one made"
        )


def keep_server_secret() -> None:
    """Take the secret out of this process's environment: the programs that the app starts need not know it.

    Called by a process that serves, before it loads the app.
    """
    global _kept  # noqa: PLW0603 - it is the process's, as its environment is
    _kept = os.environ.pop(SERVER_SECRET_ENV, None) or _kept


def server_secret(run_directory: str | None) -> str:
    """The secret of the server that this process is a worker of.

    Args:
        run_directory: Where this server's workers meet; None if this process is the only one.

    Raises:
        RunDirectoryError: the run directory cannot hold a secret.
    """
    found = os.environ.get(SERVER_SECRET_ENV) or _kept
    if found:
        return found
    made = secrets.token_urlsafe(_SECRET_BYTES)
    return made if run_directory is None else _first_in(run_directory, made)


def _first_in(run_directory: str, made: str) -> str:
    """The secret of the first worker that came here: a link is made whole or not at all, and once."""
    path = os.path.join(run_directory, _FILE_NAME)
    try:
        fd, own = tempfile.mkstemp(dir=run_directory, prefix=".secret-")  # 0600
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(made)
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            os.unlink(own)
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError as error:
        raise RunDirectoryError(
            f"the workers' secret cannot be kept in {run_directory}: {error.strerror}; "
            f"set {SERVER_SECRET_ENV}, or name another directory"
        ) from error
