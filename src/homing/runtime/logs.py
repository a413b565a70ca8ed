"""Log lines as JSON, one object per line: what the text says, and beside it the fields that a line brings.

Not here: which lines there are, and what they say. Their fields are attributes of the log record, so any other formatter
has them too.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "color_message",
    "taskName",
}


class JsonFormatter(logging.Formatter):
    """`time` (RFC 3339, UTC), `level`, `logger` and `message`, then the line's own fields, then `traceback` if there is one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value
            for name, value in vars(record).items()
            if name not in _OF_EVERY_RECORD and name not in line and value is not None
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
