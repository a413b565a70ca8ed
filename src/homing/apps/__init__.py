"""Servers that join the rooms `rl` and `web`. Nothing imports this room."""

from __future__ import annotations
