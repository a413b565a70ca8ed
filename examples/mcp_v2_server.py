"""An MCP server on the official SDK 2.x that keeps one book for each session, in its own memory.

    homing run examples.mcp_v2_server:mcp --workers 3 --preset mcp

Clients of the session era (every 1.x client, and a 2.x client with `mode="legacy"`) get a session
from `initialize`. A 2.x client in its default mode speaks the sessionless protocol of 2026-07-28
and has no session here: see mcp_handles_server.py.
"""

import os

from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

mcp = MCPServer("book per session")
books: dict[str, list[str]] = {}


class Page(BaseModel):
    """What a call did: how many lines the session's book has now, and which process holds it."""

    lines: int
    pid: int


class Answer(BaseModel):
    """What the client answered to a question of the server's."""

    text: str
    pid: int


class Reply(BaseModel):
    """The form that the client fills in."""

    text: str


def book_of(ctx: Context) -> list[str]:
    """The book of the session that this call belongs to."""
    session_id = (ctx.headers or {}).get("mcp-session-id")
    if session_id is None:
        raise ValueError("this server keeps a book for each session: connect with mode='legacy'")
    return books.setdefault(session_id, [])


@mcp.tool()
async def write(line: str, ctx: Context) -> Page:
    """Write one line into this session's book."""
    book = book_of(ctx)
    book.append(line)
    return Page(lines=len(book), pid=os.getpid())


@mcp.tool()
async def announce(ctx: Context) -> Page:
    """Tell the client, on its GET stream, that the server's resources have changed."""
    await ctx.session.send_resource_list_changed()
    return Page(lines=len(book_of(ctx)), pid=os.getpid())


@mcp.tool()
async def ask(question: str, ctx: Context) -> Answer:
    """Ask the client's user (elicitation): a request from server to client, inside a call from client to server."""
    reply = await ctx.elicit(question, Reply)
    return Answer(text=reply.data.text if reply.action == "accept" else "", pid=os.getpid())


app = mcp.streamable_http_app()
