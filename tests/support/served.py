"""Real servers for tests: `homing run` or plain uvicorn as a process of its own, and programs that drive it.

A server is ready when each of its workers has logged that its application has started; nothing
polls. Its log is kept, and the end of it printed if a test fails.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAIN = Path(sys.executable).parent
"""The programs of the environment that runs the tests: MCP SDK 2.x."""
MCP1 = ROOT / ".venv-mcp1" / "bin"
"""The programs of the environment with MCP SDK 1.x; `make setup-mcp1` makes it."""
ECOSYSTEM = ROOT / ".venv-ecosystem" / "bin"
"""The programs of the environment with Gradio and NiceGUI; `make setup-ecosystem` makes it."""

STARTED = "Application startup complete"
ADDRESS = re.compile(r"running on (http://[\w.:\[\]-]+)")


class Served:
    """A server process and its log. `served` opens and closes it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self.lines.append("")  # the end: whoever waits for more must learn that there is none
            self._changed.notify_all()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, times: int = 1, *, timeout_seconds: float = 60) -> None:
        """Return once `text` is in the log that often.

        Raises:
            AssertionError: The server ended, or the time passed; with the log.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self.log.count(text) < times:
                ended = bool(self.lines) and self.lines[-1] == ""
                left = deadline - time.monotonic()
                if ended or left <= 0 or not self._changed.wait(left):
                    raise AssertionError(f"no {times} times {text!r} in the server's log:\n{self.log}")

    @property
    def url(self) -> str:
        found = ADDRESS.search(self.log)
        assert found is not None, self.log
        return found[1]

    def close(self) -> None:
        """Ask it to stop, wait, and leave no process of it behind."""
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"the server did not stop on SIGTERM:\n{self.log}") from error
        finally:
            # Its own session, so this reaches workers that outlived it, and nothing else.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextmanager
def served(
    app: str,
    *options: str,
    workers: int = 3,
    programs: Path = MAIN,
    plain: bool = False,
    env: Mapping[str, str] = {},
    start_seconds: float = 60,
) -> Iterator[Served]:
    """Serve an app on an ephemeral port with `homing run`, or with plain uvicorn, until the block ends."""
    program = programs / ("uvicorn" if plain else "homing")
    if not program.exists():
        raise AssertionError(f"no {program}: run `make setup setup-mcp1` (or `setup-ecosystem`)")
    command = [program, *(() if plain else ("run",)), app, "--port", "0", "--workers", str(workers), *options]
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    server = Served(process)
    try:
        server.wait_for(STARTED, workers, timeout_seconds=start_seconds)
        server.wait_for("running on http://")
        yield server
    except BaseException:
        print(*server.lines[-200:], sep="")  # pytest shows it with the failure
        raise
    finally:
        server.close()


def drive(module: str, url: str, *options: str, programs: Path = MAIN, timeout_seconds: float = 60) -> dict[str, Any]:
    """Run a driver against a server: what its last line says, as JSON."""
    done = subprocess.run(
        [str(programs / "python"), "-m", module, url, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return tally
