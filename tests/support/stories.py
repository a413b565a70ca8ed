"""A page of the docs as a story: its files are written, its commands run, and what it says they print is what they print.

Blocks, in the order of the page:

- with a title: a file of that name, in a directory of the page's own;
- `sh`: each line is run there. `homing run` and `uvicorn` start a server on a free port, in place of the one before, or,
  with a `--port`, beside those before; `export NAME=VALUE` is kept for the commands after it; `python`, `curl` and
  `homing rl` must succeed. Where files and commands name such a port, or 8000 for a server without one, it is the free one;
- `text`: what the command before it printed; `…` in a line stands for anything.

Not here: which pages there are, and blocks that stand for themselves (`tests/test_docs.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest
from tests.support.running import ROOT, Running, running

_FENCE: Final = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?[^\n]*\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
_PORT: Final = re.compile(r"\b(127\.0\.0\.1|localhost):(\d+)\b")
_DEFAULT_PORT: Final = "8000"
START_SECONDS: Final = 240.0
COMMAND_SECONDS: Final = 300


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its title if it has one, and its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order, without the indent of a list or a tab that they are in."""
    found = []
    for match in _FENCE.finditer(page.read_text()):
        text = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
        found.append(Block(match[2], match[3] or "", text))
    return found


class Story:
    """One page being run. A context manager: no server outlives it.

    Args:
        folder: An empty directory, for the page's files.
        programs: The folder of the `homing`, `uvicorn` and `python` that the page speaks of.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._programs = programs
        self._env: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._server: contextlib.AbstractContextManager[Running] | None = None
        self._beside: list[contextlib.AbstractContextManager[Running]] = []
        self._ports: dict[str, int] = {}  # as the page has them → as they are
        self._printed: str | None = None
        self.commands = 0

    def __enter__(self) -> Story:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        while self._beside:
            self._beside.pop().__exit__(None, None, None)

    def tell(self, block: Block) -> None:
        """What the next block says."""
        if block.title:
            self._files[block.title] = block.text
            (self._folder / block.title).write_text(block.text)
        elif block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    self._run(words)
        elif block.language == "text":
            assert self._printed is not None, f"no command printed this:\n{block.text}"
            pattern = "".join(".*?" if part == "…" else re.escape(part) for part in re.split("(…)", block.text.strip()))
            assert re.fullmatch(pattern, self._printed.strip()), f"printed:\n{self._printed}\nnot:\n{block.text}"

    def _run(self, words: list[str]) -> None:
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self._env[name] = value
            return
        self.commands += 1
        if words[:2] == ["homing", "run"] or words[0] == "uvicorn":
            self._serve(words)
        elif words[0] in ("python", "curl") or words[:2] == ["homing", "rl"]:
            self._do(words)
        else:
            raise AssertionError(f"{words}: add a way to run it")

    def _serve(self, words: list[str]) -> None:
        command, rest = (words[:2], words[2:]) if words[0] == "homing" else (words[:1], words[1:])
        command[0] = str(self._programs / command[0])
        port = None
        if "--port" in rest:
            at = rest.index("--port")
            port = rest[at + 1]
            rest = [*rest[:at], *rest[at + 2 :]]
        else:
            self._stop()
        self._write_files()
        env: Mapping[str, str | None] = {**self._env, "PYTHONPATH": f"{ROOT / 'src'}:{self._folder}"}
        started = running(*rest, cwd=self._folder, env=env, command=command)
        server = started.__enter__()
        if port is None:
            self._server = started
        else:
            self._beside.append(started)
        workers = int(rest[rest.index("--workers") + 1]) if "--workers" in rest else 1
        server.wait_for(r"Application startup complete", count=workers, timeout_seconds=START_SECONDS)
        self._ports[port or _DEFAULT_PORT] = server.port

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.__exit__(None, None, None)

    def _do(self, words: list[str]) -> None:
        if words[0] in ("python", "homing"):
            words = [str(self._programs / words[0]), *words[1:]]
        elif shutil.which("curl") is None:
            pytest.skip("the page uses curl, which is not installed")
        else:
            words = ["curl", "--silent", "--show-error", *words[1:]]
        self._write_files()
        done = subprocess.run(
            [self._on_port(word) for word in words],
            cwd=self._folder,
            env={**os.environ, **self._env},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{words}:\n{done.stdout}\n{done.stderr}"
        self._printed = done.stdout

    def _write_files(self) -> None:
        for name, text in self._files.items():
            if _PORT.search(text):
                (self._folder / name).write_text(self._on_port(text))

    def _on_port(self, text: str) -> str:
        return _PORT.sub(lambda found: f"{found[1]}:{self._ports.get(found[2], found[2])}", text)
