from __future__ import annotations

import asyncio
import zipfile
from pathlib import Path

import pytest
from tests.support.chromium import ChromiumWorld, play

from homing.errors import ConfigurationError
from homing.web.chromium.assembly import ChromiumAssembly
from homing.web.chromium.trace import Trace
from homing.web.errors import BenchmarkPreconditionError, WebError
from homing.web.recording import TRACE_FILE
from homing.web.replay import find_recording, replay_page

PAGE = "<title>Traced</title><button onclick='document.title = \"clicked\"'>Go</button>"


def test_a_session_that_asks_for_a_trace_has_one_once_it_is_closed_and_another_has_none(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("traced", "/page", runtime_profile="trace")
        await world.seed("plain", "/page")
        await world.click("traced", "Go")
        assert await world.manager.recording_artifacts("traced") == ()
        assert await world.manager.close_session("traced")
        assert await world.manager.close_session("plain")
        (trace,) = [each for each in await world.manager.recording_artifacts("traced") if each.uri.endswith(TRACE_FILE)]
        assert (trace.status, trace.mime_type) == ("complete", "application/zip")
        path = tmp_path / trace.uri
        assert path.resolve().is_relative_to(tmp_path.resolve())
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            assert "trace.trace" in names
            assert b"Traced" in archive.read("trace.trace")
        assert not [each for each in await world.manager.recording_artifacts("plain") if TRACE_FILE in each.uri]

    play({"/page": PAGE}, script, recordings=tmp_path)
    assert "playwright show-trace" in replay_page(find_recording(tmp_path, "traced"))
    assert "playwright show-trace" not in replay_page(find_recording(tmp_path, "plain"))


def test_a_trace_whose_browser_died_is_told_as_failed_and_the_pictures_are_there(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/page", runtime_profile="trace")
        await world.click("s", "Go")
        # The first picture is written, whenever the browser sends it.
        while not list(tmp_path.glob("*/step-*.jpg")):
            await asyncio.sleep(0.02)
        await world.provider._browsers[0].kill()
        with pytest.raises(WebError):
            await world.step("s", "noop()")
        assert await world.manager.close_session("s")
        artifacts = {each.uri.rpartition("/")[2]: each for each in await world.manager.recording_artifacts("s")}
        assert (artifacts[TRACE_FILE].status, artifacts[TRACE_FILE].size_bytes) == ("failed", 0)
        assert any(name.startswith("step-") for name in artifacts)

    play({"/page": PAGE}, script, recordings=tmp_path)


def test_a_trace_that_cannot_be_written_holds_up_no_close(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/page", runtime_profile="trace")
        await world.click("s", "Go")
        folder = world.manager._get("s").recording.folder
        assert folder is not None
        folder.rename(tmp_path / "moved away")
        folder.write_text("in the way")
        assert await world.manager.close_session("s")
        assert any(each.status == "failed" for each in await world.manager.recording_artifacts("s"))

    play({"/page": PAGE}, script, recordings=tmp_path)


def test_a_trace_ends_after_its_last_step_and_one_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("a", "/page")
        await world.seed("b", "/page")
        short = Trace(world.held("a").context.raw, tmp_path / "short", max_steps=2)
        await short.start()
        for _ in range(2):
            await world.step("a", "noop()")
            await short.count_step()
        assert zipfile.is_zipfile(tmp_path / "short" / TRACE_FILE)  # written, though nobody has closed it
        await short.start()  # a reset goes on without one
        await short.aclose()
        large = Trace(world.held("b").context.raw, tmp_path / "large", max_bytes=10)
        await large.start()
        await world.step("b", "noop()")
        await large.aclose()
        await large.aclose()
        assert (tmp_path / "large" / TRACE_FILE).stat().st_size == 0

    play({"/page": PAGE}, script)


def test_a_trace_that_nobody_would_keep_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--recordings"):
        ChromiumAssembly(("miniwob",), trace=True)

    async def script(world: ChromiumWorld) -> None:
        with pytest.raises(BenchmarkPreconditionError, match="keeps no recordings"):
            await world.seed("s", "/page", runtime_profile="trace")

    play({"/page": PAGE}, script)
