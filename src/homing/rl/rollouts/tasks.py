"""The tasks of a collection, one JSON object a line, and the rollout that each stands for.

A line is `{"task_id": …, "task_input": {…}}`: `task_id` is `{"taskset": …, "task_id": …}`, or a text, which then belongs to
a task set named as the file is, or left out, which stands for the line's number. A line may name its rollout,
`"rollout_id"`; else the rollout's ID is made from the task's, so that the same task has the same rollout in every run.

Not here: running them (`collector.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from homing.errors import ConfigurationError
from homing.rl.episode_protocol import EpisodeTask
from homing.rl.protocol import RolloutId, SessionText, TaskId

_NOT_IN_IDS: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAMED: Final = 40


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    task_input: dict[str, JsonValue]
    task_id: TaskId | SessionText | None = None
    rollout_id: RolloutId | None = None


_LINE: Final[TypeAdapter[_Line]] = TypeAdapter(_Line)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One task to be rolled out."""

    rollout_id: str
    task: EpisodeTask


def read_tasks(path: Path) -> Iterator[Rollout]:
    """The rollouts of a file, one after the other; empty lines are skipped.

    Raises:
        ConfigurationError: it cannot be read, or a line is no task, or the second of its rollout; the message names the
            line and the field.
    """
    seen: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                rollout = _rollout(path, number, text)
                first = seen.setdefault(rollout.rollout_id, number)
                if first != number:
                    raise ConfigurationError(
                        f"{path}, line {number}: the same rollout as line {first}: give each line a task_id or rollout_id "
                        "of its own"
                    )
                yield rollout
    except OSError as error:
        raise ConfigurationError(f"the tasks {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the tasks {path} are not UTF-8: {error.reason}") from error


def _rollout(path: Path, number: int, text: str) -> Rollout:
    try:
        line = _LINE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the line"
        raise ConfigurationError(f"{path}, line {number}: {field}: {first['msg']}") from error
    task_id = line.task_id
    if not isinstance(task_id, TaskId):
        task_id = TaskId(taskset=path.stem or "tasks", task_id=str(number) if task_id is None else task_id)
    rollout_id = line.rollout_id or rollout_id_of(task_id)
    return Rollout(rollout_id, EpisodeTask(task_id=task_id, task_input=line.task_input))


def rollout_id_of(task_id: TaskId) -> str:
    """The ID of a task's rollout: its own name as far as IDs may hold it, and a digest that makes it its own."""
    digest = hashlib.sha256(json.dumps([task_id.taskset, task_id.task_id]).encode()).hexdigest()[:12]
    name = _NOT_IN_IDS.sub("-", f"{task_id.taskset}-{task_id.task_id}").strip("._-")[:_MAX_NAMED]
    # Not at its end, where `-a1` would mark an attempt.
    return f"{name}-x{digest}" if name else f"x{digest}"


def task_line(task_id: TaskId, task_input: dict[str, Any]) -> str:
    """A line of a task file."""
    return json.dumps({"task_id": task_id.model_dump(), "task_input": task_input}) + "\n"
