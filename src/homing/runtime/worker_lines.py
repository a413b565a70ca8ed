"""What the supervisor's log says of workers that are told to leave, exit, are replaced or cannot start.

Not here: when that is (`supervisor.py`, `restarts.py`).
"""

from __future__ import annotations

import logging
import signal

from uvicorn.config import STARTUP_FAILURE

from homing.runtime.process import Worker

logger = logging.getLogger(__name__)


def say_told(what: str, pid: int, says: str, *, level: int = logging.INFO) -> None:
    """A worker was told to do something."""
    logger.log(level, "worker [%d] %s", pid, says, extra={"event": "worker_told", "pid": pid, "to": what})


def say_exited(pid: int, exit_code: int | None) -> None:
    """A worker that nobody had told to stop."""
    fields = {"event": "worker_exited", "pid": pid, "exit_code": exit_code}
    logger.warning("worker [%d] exited (%s); its sessions are gone", pid, exit_text(exit_code), extra=fields)


def say_replaced(pid: int, by: int) -> None:
    fields = {"event": "worker_replaced", "pid": pid, "by": by}
    logger.info("worker [%d] is replaced by worker [%d]", pid, by, extra=fields)


def exit_text(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    # Of the real-time signals only the first and the last have a name.
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-exit_code, -exit_code)}"


def startup_line(pid: int, exit_code: int | None) -> str:
    if exit_code == STARTUP_FAILURE:
        return "the app's start-up failed; its own message is above"
    return f"worker [{pid}] exited before it could serve ({exit_text(exit_code)})"


def why_it_failed(start: Worker | OSError) -> tuple[str, dict[str, object]]:
    """Why a start came to nothing, and the fields of the line that says so: a process that has exited, or none at all."""
    if isinstance(start, OSError):
        return f"no process can be made for it: {start.strerror}", {"event": "worker_failed"}
    line = start.failed.line if start.failed else startup_line(start.pid, start.exit_code)
    return line, {"event": "worker_failed", "pid": start.pid, "exit_code": start.exit_code}
