"""The session example of the MCP SDK 1.x over the older SSE transport."""

from examples.mcp_v1_server import mcp

app = mcp.sse_app()
