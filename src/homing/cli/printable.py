"""What is shown of a text that may hold anything: what a terminal would act on, or cannot show, stands there escaped."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text, with each control character, and each other that is not printable, as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
