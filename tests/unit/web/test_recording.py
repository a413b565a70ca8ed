"""Recordings stay where they belong, whatever a session is called and whatever it leaves."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest

from homing.types import session_tag
from homing.web.base import RecordedEvent
from homing.web.models import ArtifactRef, Task
from homing.web.recording import EVENTS_FILE, FolderRecordings, write_whole

TASK = Task(benchmark="b", task_id="../../t")


def finished(root: Path, session_id: str, leave: dict[str, bytes], link: Path | None = None) -> Sequence[ArtifactRef]:
    async def main() -> Sequence[ArtifactRef]:
        recording = FolderRecordings(root).open(session_id, TASK)
        recording.note(RecordedEvent("seed", 0.0))
        folder = recording.folder
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in leave.items():
            (folder / name).write_bytes(content)
        if link is not None:
            (folder / "video.webm").symlink_to(link)
        return await recording.finish()

    return asyncio.run(main())


@pytest.mark.parametrize(
    "session_id", ["../../outside", "/etc/cron.d/x", "a\0b", "x" * 300, "..", "ü" * 100, "a/b\\c", "\udcff"]
)
def test_a_recording_is_in_a_folder_of_its_own_below_the_root_whatever_the_session_is_called(
    session_id: str, tmp_path: Path
) -> None:
    root = tmp_path / "recordings"
    found = finished(root, session_id, {"shot.png": b"png"})
    assert os.listdir(tmp_path) == ["recordings"]
    assert os.listdir(root) == [session_tag(session_id)]
    assert found
    for artifact in found:
        assert artifact.uri.startswith(session_tag(session_id) + "/")
        assert ".." not in artifact.uri.split("/")
        assert (root / artifact.uri).is_file()


def test_a_link_in_a_recording_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("what nobody may read")
    found = finished(tmp_path / "recordings", "s", {}, link=secret)
    assert secret.read_text() == "what nobody may read"
    sizes = {artifact.uri.rpartition("/")[2]: artifact.size_bytes for artifact in found}
    assert sizes.get("video.webm", 0) == 0


def test_the_index_of_a_recording_has_a_limit(tmp_path: Path) -> None:
    found = finished(tmp_path / "recordings", "s", {f"{number}.png": b"x" for number in range(2_100)})
    assert 1_900 <= len(found) <= 2_001


def test_a_file_that_cannot_be_written_to_its_end_is_empty_and_told_as_failed(tmp_path: Path) -> None:
    """The kernel ends each write at a size here, as a full disk does at whatever size."""

    async def main() -> Sequence[ArtifactRef]:
        recording = FolderRecordings(tmp_path).open("s", TASK)
        folder = recording.folder
        assert folder is not None
        folder.mkdir(parents=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                write_whole(folder / "step-0001.jpg", b"x" * 70_000)
            write_whole(folder / "step-0002.jpg", b"x" * 60_000)
            for _ in range(2):
                recording.note(RecordedEvent("failure", 0.0, error_kind="page_crashed", error="x" * 70_000))
                found = await recording.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return found

    found = {artifact.uri.rpartition("/")[2]: artifact for artifact in asyncio.run(main())}
    assert (found["step-0001.jpg"].status, found["step-0001.jpg"].size_bytes) == ("failed", 0)
    assert (found["step-0002.jpg"].status, found["step-0002.jpg"].size_bytes) == ("complete", 60_000)
    assert (found[EVENTS_FILE].status, found[EVENTS_FILE].size_bytes) == ("failed", 0)
