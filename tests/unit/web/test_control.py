"""What is remembered of identities, and for how long, on virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.virtual_time import VirtualLoop, run_virtual
from tests.support.web_world import World, task, world

from homing.web.control import SessionControl
from homing.web.errors import AuthenticationError, CapacityError, SessionConflictError, SessionLostError

TOKEN = "t" * 32
LIFETIME = 3600.0


def play(script: Callable[[World, SessionControl], Awaitable[None]], *, records: int = 100, **settings: Any) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with world(loop, **settings) as here:
            control = SessionControl(here.manager, loop, LIFETIME, max_records=records)
            control.start()
            try:
                await script(here, control)
            finally:
                await control.aclose()

    run_virtual(main)


def test_a_fence_is_kept_for_the_lifetime_after_the_close_and_no_longer() -> None:
    async def script(here: World, control: SessionControl) -> None:
        await control.close("early", TOKEN)
        await control.seed("used", TOKEN, task())
        await control.close("used", TOKEN)
        await here.settle(LIFETIME - 100.0)
        for session in ("early", "used"):
            with pytest.raises(SessionConflictError, match="closed"):
                await control.seed(session, TOKEN, task())
            with pytest.raises(AuthenticationError):
                await control.close(session, "x" * 32)
        await here.settle(200.0)
        assert len(control) == 0
        assert (await control.seed("early", TOKEN, task())).status == "ready"
        await control.close("early", TOKEN)

    play(script)


def test_a_session_that_lives_is_never_cut_and_one_that_ended_by_itself_is_told_and_forgotten() -> None:
    async def script(here: World, control: SessionControl) -> None:
        await control.seed("lives", TOKEN, task())
        await control.seed("ends", TOKEN, task())
        for _ in range(30):
            await here.settle(LIFETIME / 10)
            await here.manager.step("lives", None, "noop()")
        assert not here.manager.is_live("ends")
        assert len(control) == 1
        assert (await control.seed("lives", TOKEN, task())).status == "ready"
        # Within the lifetime its identity is remembered, and says so.
        await control.seed("again", TOKEN, task())
        await here.manager.close_session("again")
        with pytest.raises(SessionLostError):
            await control.seed("again", TOKEN, task())
        with pytest.raises(SessionConflictError):
            await control.seed("again", TOKEN, task())

    play(script, max_age_seconds=1e6)


def test_one_whose_release_hangs_is_tried_three_times_and_holds_up_no_other() -> None:
    async def script(here: World, control: SessionControl) -> None:
        began = here.loop.now
        for each in ("stuck", "other", "third"):
            await control.seed(each, TOKEN, task())
        for each in ("other", "third"):
            await here.manager.close_session(each)
        here.faults.add("release", *["hang"] * 100)
        assert not await here.manager.close_session("stuck")
        await here.settle(began + LIFETIME + 70.0 - here.loop.now)
        assert len(control) == 1  # those behind it are gone
        await here.settle(4000.0)
        assert len(control) == 0

    play(script, release_seconds=1000.0)


def test_there_are_only_so_many_records() -> None:
    async def script(here: World, control: SessionControl) -> None:
        await control.close("a", TOKEN)
        await control.seed("b", TOKEN, task())
        with pytest.raises(CapacityError):
            await control.seed("c", TOKEN, task())
        with pytest.raises(CapacityError):
            await control.close("c", TOKEN)
        assert (await control.seed("b", TOKEN, task())).status == "ready"
        await control.close("a", TOKEN)
        await here.settle(LIFETIME + 100.0)
        await control.close("c", TOKEN)

    play(script, records=2)
