"""Hypothesis without its deadline: a test's time depends on what else the machine does."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
