from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable

import pytest

from homing.errors import SessionNotRecordedError
from homing.identity import Named
from homing.routing.middleware import ReplyWatch
from homing.routing.request import RoutedRequest
from homing.types import Message


async def discard(message: Message) -> None:
    pass


async def wait_for(sending: Awaitable[None]) -> None:
    await sending


def watch(request: RoutedRequest) -> ReplyWatch:
    return ReplyWatch(request, {"type": "http"}, None, discard, False)


def test_its_send_passes_for_a_coroutine_function() -> None:
    """asgiref's AsyncToSync warns of any other."""
    send = watch(RoutedRequest(None, Named(), None)).send
    assert asyncio.iscoroutinefunction(send) or inspect.iscoroutinefunction(send)


def test_what_cannot_leave_is_an_error_where_it_is_awaited() -> None:
    request = RoutedRequest(None, Named(), None)
    request.unrecorded = SessionNotRecordedError("no room")
    sending = watch(request).send({"type": "http.response.body"})
    with pytest.raises(SessionNotRecordedError):
        asyncio.run(wait_for(sending))


def test_a_reply_is_complete_with_its_last_event() -> None:
    watching = watch(RoutedRequest(None, Named(), None))
    asyncio.run(wait_for(watching.send({"type": "http.response.start", "status": 200})))
    assert (watching.begun, watching.complete) == (True, False)
    asyncio.run(wait_for(watching.send({"type": "http.response.body", "more_body": True})))
    assert not watching.complete
    asyncio.run(wait_for(watching.send({"type": "http.response.body"})))
    assert watching.complete
