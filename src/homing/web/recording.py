"""What is kept of sessions for people to look at: a folder each, with what happened and the pictures of it.

    <root>/<session's tag>/events.jsonl   one line per event, written within a fifth of a second
                           session.json   which task it was
                           step-0001.jpg  the page after that step, written by the browser's side
                           trace.zip      what Playwright's viewer opens, where it was asked for; empty until the close

The invariant: every session that began has its folder, however it ended; files are indexed once the browser is gone.
What cannot be written, on a full disk for one, is said in the index, and is never a session's failure: a file is whole, or
empty, which the index tells as failed. Only the events stay as far as they could be written. Names are ours; nothing of a
request is part of a path.

Not here: taking the pictures (a backend), showing them (`replay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import mimetypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from homing.types import session_tag
from homing.web.base import RecordedEvent, Recording
from homing.web.errors import WebError
from homing.web.models import ArtifactRef, Observation, Task
from homing.web.tasks import Tasks

logger = logging.getLogger(__name__)

EVENTS_FILE: Final = "events.jsonl"
SESSION_FILE: Final = "session.json"
TRACE_FILE: Final = "trace.zip"
_TREE_CHARACTERS: Final = 20_000
_CHUNK_BYTES: Final = 2**20
_MAX_FILES: Final = 2_000
_MAX_EVENTS: Final = 20_000
_WRITE_SECONDS: Final = 10.0
_ATTEMPTS: Final = 1_000
_BATCH_SECONDS: Final = 0.2
"""What happens within so long is written at once: a write for each step would cost as much as the step's own reply."""


class NoRecording:
    """A session of which nothing is kept."""

    folder = None

    def note(self, event: RecordedEvent) -> None:
        """See `Recording.note`."""

    async def finish(self) -> Sequence[ArtifactRef]:
        """See `Recording.finish`."""
        return ()


class NoRecordings:
    """Keeps nothing."""

    def open(self, session_id: str, task: Task) -> Recording:
        """See `Recordings.open`."""
        return NoRecording()


class RecordingError(WebError):
    """Recordings are asked for, and their folder cannot be written to."""

    status = 503
    error_kind = "capacity_unavailable"
    retryable = True
    detail = "Recordings are asked for, and cannot be kept now."


class FolderRecordings:
    """Keeps recordings below one folder; several workers may share it.

    Args:
        root: Made if it is not there.

    Raises:
        RecordingError: it can be neither made nor written to.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root: Final = Path(root).absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(f"the recordings' folder {self.root} cannot be made: {error.strerror}") from error
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise RecordingError(f"the recordings' folder {self.root} cannot be written to")

    def open(self, session_id: str, task: Task) -> Recording:
        """See `Recordings.open`."""
        return FolderRecording(self.root, session_tag(session_id), task)

    def __repr__(self) -> str:
        return f"<FolderRecordings {self.root}>"


class FolderRecording:
    """One session's recording. Owns the writing of its events."""

    def __init__(self, root: Path, tag: str, task: Task) -> None:
        self._root = root
        self._tag = tag
        self._task = task
        self.folder: Path = _unused(root, tag)
        self._lines: list[str] = []
        self._count = 0
        self._failed = False
        self._tasks = Tasks()
        self._writing: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()
        self._index: Sequence[ArtifactRef] | None = None

    def note(self, event: RecordedEvent) -> None:
        """See `Recording.note`: the event is written soon, in a thread."""
        if self._index is not None or self._count >= _MAX_EVENTS:
            return
        self._count += 1
        self._lines.append(json.dumps(_event_json(event), ensure_ascii=False) + "\n")
        if self._writing is None or self._writing.done():
            self._writing = self._tasks.spawn(self._write_soon(), "write recording")

    async def finish(self) -> Sequence[ArtifactRef]:
        """See `Recording.finish`."""
        if self._index is None:
            self._ends.set()
            await self._tasks.wait(_WRITE_SECONDS)
            await self._write()
            self._index = await asyncio.to_thread(self._indexed)
        return self._index

    async def _write_soon(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BATCH_SECONDS):
                await self._ends.wait()
        await self._write()

    async def _write(self) -> None:
        while self._lines and not self._failed:
            lines, self._lines = self._lines, []
            try:
                await asyncio.to_thread(self._append, lines)
            except OSError as error:
                self._failed = True
                logger.warning("the recording of session %s cannot be written: %s", self._tag, error.strerror)

    def _append(self, lines: list[str]) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o755)
        if not (self.folder / SESSION_FILE).exists():
            task = self._task.model_dump(mode="json", exclude_defaults=True)
            write_whole(
                self.folder / SESSION_FILE, (json.dumps({"tag": self._tag, "task": task}, indent=1) + "\n").encode()
            )
        with (self.folder / EVENTS_FILE).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _indexed(self) -> list[ArtifactRef]:
        found: list[ArtifactRef] = []
        try:
            paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        except OSError:
            paths = []
        for path in paths[:_MAX_FILES]:
            kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            uri = path.relative_to(self._root).as_posix()
            try:
                size, digest = _digest(path)
            except OSError:
                found.append(_failed(uri, kind))
                continue
            if size:
                found.append(ArtifactRef(uri=uri, mime_type=kind, size_bytes=size, sha256=digest))
            else:
                found.append(_failed(uri, kind))  # it was begun, and could not be written
        if self._failed:
            uri = f"{self.folder.name}/{EVENTS_FILE}"
            found = [each for each in found if each.uri != uri]
            found.append(_failed(uri, "application/jsonl"))
        return found

    def __repr__(self) -> str:
        return f"<FolderRecording {self._tag}: {self._count} events>"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of a recording. Blocks.

    Raises:
        OSError: it could not be written; what there is of it is empty.
    """
    try:
        path.write_bytes(content)
    except OSError:
        make_empty(path)
        raise


def make_empty(path: Path) -> None:
    """Leave a file of which only a part could be written empty, if it is there: even a full disk lets it be cut. Blocks."""
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def _unused(root: Path, tag: str) -> Path:
    """A folder of this session's own: an ID may be seeded again after its close."""
    for number in range(1, _ATTEMPTS):
        folder = root / (tag if number == 1 else f"{tag}-{number}")
        if not os.path.lexists(folder):
            return folder
    raise RecordingError("the session has been recorded too often")


def _failed(uri: str, kind: str) -> ArtifactRef:
    return ArtifactRef(uri=uri, mime_type=kind, size_bytes=0, sha256="", status="failed")


def _digest(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _event_json(event: RecordedEvent) -> dict[str, Any]:
    told: dict[str, Any] = {
        "kind": event.kind,
        "at": round(event.at_seconds, 3),
        "waited": round(event.waited_seconds, 4),
        "ran": round(event.ran_seconds, 4),
    }
    if event.action is not None:
        told["action"] = event.action
    if event.observation is not None:
        told["observation"] = _observation_json(event.observation)
    if event.reward is not None:
        told["reward"] = event.reward
    if event.terminated or event.truncated:
        told["terminated"], told["truncated"] = event.terminated, event.truncated
    if event.verdict is not None:
        told["verdict"] = event.verdict.model_dump(mode="json")
    if event.error_kind is not None:
        told["error_kind"], told["error"] = event.error_kind, event.error
    return told


def _observation_json(observation: Observation) -> dict[str, Any]:
    told = observation.model_dump(mode="json", exclude_defaults=True, exclude={"screenshot", "dom", "metadata"})
    tree = told.get("axtree", "")
    if len(tree) > _TREE_CHARACTERS:
        told["axtree"] = tree[:_TREE_CHARACTERS] + "\n(cut here in the recording)"
    return told
