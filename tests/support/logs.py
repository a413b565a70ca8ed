"""Logging as it was: a server's configuration changes the loggers of the process that reads it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_CONFIGURED = ("homing", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _CONFIGURED]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            logger.handlers = handlers
