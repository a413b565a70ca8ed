"""What was taken is given again, in order and once, until it is released."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from homing.forwarding.forwarder import replayable
from homing.types import Message


@settings(deadline=None)
@given(st.lists(st.sampled_from(["take", "rewind", "release"]), max_size=30))
def test_agrees_with_a_list_and_a_position(steps: list[str]) -> None:
    produced: list[int] = []

    async def receive() -> Message:
        produced.append(len(produced))
        return {"n": produced[-1]}

    async def test() -> None:
        events = replayable(receive)
        position, released_at, released = 0, 0, False
        for step in steps:
            if step == "take":
                assert (await events())["n"] == position
                position += 1
            elif step == "rewind":
                events.rewind()
                position = position if released else released_at
            else:
                events.release()
                released, released_at = True, position
        assert replayable(events) is events

    asyncio.run(test())
