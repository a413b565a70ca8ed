"""MiniWoB: 130 small tasks, served from the `miniwob` package's own pages, and a scripted solver for most of them."""

from __future__ import annotations

from homing.web.miniwob.task_set import MiniwobTasks

__all__ = ["MiniwobTasks"]
