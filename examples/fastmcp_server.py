"""The session example on PrefectHQ's fastmcp: one list of notes for each session, in this process's memory.

    homing run examples.fastmcp_server:mcp --workers 3 --preset mcp

`ctx.session_id` is one session's for a client with `mode="legacy"`; in the sessionless era (a
client's default) it is new with every request, so pass a handle there, as mcp_handles_server.py
does.
"""

import os

from fastmcp import Context, FastMCP

mcp = FastMCP("notes per session")
notes: dict[str, list[str]] = {}


@mcp.tool
async def write(line: str, ctx: Context) -> dict[str, int]:
    """Write one line into this session's notes."""
    mine = notes.setdefault(ctx.session_id, [])
    mine.append(line)
    return {"lines": len(mine), "pid": os.getpid()}


app = mcp.http_app()
