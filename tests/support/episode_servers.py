"""The demo's four servers as processes whose logs, workers and run directories a test can see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.support.running import ROOT, Running, running

from homing.errors import DirectoryError
from homing.rl.demo.servers import SETTINGS, URLS
from homing.rundir import SESSION_OWNERS_DIR, RunDirectory
from homing.types import WorkerId

WINDOW_SECONDS: Final = 2.0


@contextmanager
def episode_servers(
    workers: Mapping[str, int], *, options: Mapping[str, tuple[str, ...]] | None = None, **settings: str
) -> Iterator[dict[str, Running]]:
    """The servers by name, each once all its workers serve.

    Args:
        workers: Of each server.
        options: More options of `homing run`, by server.
        settings: Of the demo's servers: `mcp="1"`, `slots="8"`, `window="2"`.
    """
    env: dict[str, str | None] = {SETTINGS + "WINDOW": str(WINDOW_SECONDS)}
    env |= {SETTINGS + name.upper(): text for name, text in settings.items()}
    servers: dict[str, Running] = {}
    with ExitStack() as stack:
        for names in (("model", "resources"), ("agent",), ("environment",)):
            for name in names:
                count = workers[name]
                more = ("--no-sessions",) if name == "model" and count > 1 else ()
                servers[name] = stack.enter_context(
                    running(
                        *(f"homing.rl.demo.servers:{name}", "--factory", "--workers", str(count)),
                        *("--no-access-log", *more, *(options or {}).get(name, ())),
                        cwd=ROOT,
                        env=env,
                    )
                )
            for name in names:
                servers[name].wait_for(r"Application startup complete", count=workers[name])
                if name in URLS:
                    env[URLS[name]] = url_of(servers[name])
        yield servers


def url_of(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def live_records(server: Running) -> list[str]:
    """The owner records of a server that name a worker which lives: a dead one's stay for as long as the server."""
    path = server.run_directory
    found = []
    with RunDirectory.open(path) as directory:
        for name in os.listdir(Path(path, SESSION_OWNERS_DIR)):
            try:
                owner = os.readlink(Path(path, SESSION_OWNERS_DIR, name)).rpartition(".")[2]
                if not directory.is_dead(WorkerId(owner)):
                    found.append(name)
            except (FileNotFoundError, DirectoryError):
                continue  # released meanwhile
    return found
