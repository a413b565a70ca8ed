"""Gradio's own requests by hand, each on a connection of its own, as a page makes them."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from tests.support.plain_http import Reply, request

JSON = {"content-type": "application/json"}


@dataclass
class Page:
    """One page: its `session_hash`, and where the app is mounted."""

    url: str
    session: str = field(default_factory=lambda: secrets.token_hex(6))

    async def post(self, path: str, document: object) -> Reply:
        return await request(f"{self.url}/gradio_api/{path}", "POST", body=json.dumps(document).encode(), headers=JSON)

    async def get(self, path: str) -> Reply:
        return await request(f"{self.url}/gradio_api/{path}")

    async def run(self, function: int, *data: object) -> list[dict[str, Any]]:
        """Join the queue and read the stream: the messages about this event, to its end."""
        joined = await self.post("queue/join", {"data": data, "fn_index": function, "session_hash": self.session})
        assert joined.status == 200, joined
        event = joined.json()["event_id"]
        stream = await self.get(f"queue/data?session_hash={self.session}")
        assert stream.status == 200, stream
        return [message for message in events(stream) if message.get("event_id") == event]

    async def call(self, name: str, *data: object) -> Any:
        """The results of a call that has no session: what its last event says."""
        called = await self.post(f"call/{name}", {"data": data})
        assert called.status == 200, called
        results = await self.get(f"call/{name}/{called.json()['event_id']}")
        assert results.status == 200, results
        kinds = [
            line.removeprefix("event: ") for line in results.body.decode().splitlines() if line.startswith("event")
        ]
        assert kinds[-1] == "complete", results
        return events(results)[-1]

    async def upload(self, name: str, content: bytes) -> tuple[str, list[dict[str, Any]]]:
        """The path of an uploaded file, and what the stream beside the upload said of it."""
        upload, edge = secrets.token_hex(6), secrets.token_hex(8)
        head = f'--{edge}\r\ncontent-disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        sent, progress = await asyncio.gather(
            request(
                f"{self.url}/gradio_api/upload?upload_id={upload}",
                "POST",
                body=head.encode() + content + f"\r\n--{edge}--\r\n".encode(),
                headers={"content-type": f"multipart/form-data; boundary={edge}"},
            ),
            self.get(f"upload_progress?upload_id={upload}"),
        )
        assert (sent.status, progress.status) == (200, 200), (sent, progress)
        return sent.json()[0], events(progress)


def events(stream: Reply) -> list[Any]:
    """The data of each server-sent event."""
    lines = stream.body.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
