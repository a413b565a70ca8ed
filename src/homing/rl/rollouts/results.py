"""The results of a collection: a file with one JSON line per episode, added to and never rewritten.

The invariants: a line is whole or, after a crash, the last and cut, and is then removed; a rollout with a final line is
done; the attempt of a new episode is higher than that of every line; two collectors never write to one file.

Not here: what an episode comes to (`collector.py`), and figures (`summary.py`).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from homing.errors import ConfigurationError
from homing.rl.protocol import TaskId

_BLOCK: Final = 2**20


class ResultLine(BaseModel):
    """What became of one episode.

    Attributes:
        final: No further attempt at the rollout follows.
        reward: Null where the sample is masked: a fault is no reward.
        mask_sample, mask_reason: The episode is no measurement of the policy, and the kind of why.
        stage: Of a failure.
        duration_seconds: Of the call, as the collector saw it.
        result: The whole verdict, if there is one.
    """

    model_config = ConfigDict(extra="ignore")

    rollout_id: str
    attempt: int
    task_id: TaskId
    final: bool
    reward: float | None
    mask_sample: bool
    mask_reason: str | None = None
    failure_reason: str | None = None
    stage: str | None = None
    duration_seconds: float = 0.0
    result: dict[str, Any] | None = None


_LINE: Final[TypeAdapter[ResultLine]] = TypeAdapter(ResultLine)


@dataclass(slots=True)
class Progress:
    """How far a rollout has come, by the lines of the file."""

    attempts: int = 0
    """One more than the highest attempt."""
    final: ResultLine | None = None
    """Without its result."""


class ResultsFile:
    """A file of results, locked for this process. A context manager.

    Attributes:
        rollouts: How far each rollout of the file has come.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts: dict[str, Progress] = {}
        self._fd = -1

    def __repr__(self) -> str:
        return f"<ResultsFile {self.path}: {len(self.rollouts)} rollouts>"

    def __enter__(self) -> Self:
        """Open it, made if it is missing.

        Raises:
            ConfigurationError: it cannot be opened, another collector writes to it, or it holds something else.
        """
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"the results {self.path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write to it. Safe to call twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def add(self, line: ResultLine) -> None:
        """Append a line. A few microseconds into the page cache: it is on the event loop on purpose, so that no episode
        is known as done before its line is there.

        Raises:
            OSError: it could not be written whole; what was written is removed.
        """
        data = (line.model_dump_json() + "\n").encode()
        end = os.lseek(self._fd, 0, os.SEEK_END)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._note(line)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"another collector writes to {self.path}: wait for it, or name another file"
            ) from error

    def _read(self) -> None:
        kept = 0
        for number, text in enumerate(self._lines(), 1):
            if not text.endswith(b"\n"):
                # Cut off with the collector that wrote it: that episode has no result.
                os.ftruncate(self._fd, kept)
                return
            kept += len(text)
            if text.strip():
                self._note(self._parsed(number, text))

    def _lines(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._fd), "rb", buffering=_BLOCK) as file:
            file.seek(0)
            yield from file

    def _parsed(self, number: int, text: bytes) -> ResultLine:
        try:
            return _LINE.validate_json(text)
        except ValidationError as error:
            raise ConfigurationError(
                f"{self.path}, line {number} is no result of a rollout: name another file for the results"
            ) from error

    def _note(self, line: ResultLine) -> None:
        progress = self.rollouts.setdefault(line.rollout_id, Progress())
        progress.attempts = max(progress.attempts, line.attempt + 1)
        if line.final:
            progress.final = line.model_copy(update={"result": None})


def whole_results(path: Path) -> list[dict[str, Any]]:
    """Every line of a results file, as it is."""
    return [json.loads(text) for text in path.read_text().splitlines() if text]
