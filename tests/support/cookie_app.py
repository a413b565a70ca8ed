"""An app on Starlette's signed-cookie session: who wrote what into it, and in which order.

A request's case has its script as for any recorder; around it this app reads the session and, where the query says
`write=KEY`, writes it before the script's reply starts.
"""

from __future__ import annotations

from urllib.parse import parse_qs

from homing.types import ASGIApp, Message, Receive, Scope, Send


class CookieApp:
    """`?write=KEY` sets `session[KEY]` as the reply starts; `?read=KEY` puts what it is into the header `x-read`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = parse_qs(scope["query_string"].decode())
        session = scope["session"]
        scope = {key: value for key, value in scope.items() if key != "session"}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                for key in asked.get("write", []):
                    session[key] = asked.get("value", ["1"])[0]
                for key in asked.get("read", []):
                    message["headers"] = [*message["headers"], (b"x-read", str(session.get(key)).encode())]
            await send(message)

        await self._app(scope, receive, sending)
