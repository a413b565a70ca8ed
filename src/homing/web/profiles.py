"""What a task's profiles ask for: how much of the page an observation shows, and how large the page is.

A profile is words with commas between: `layout,screenshot=jpeg`, `viewport=500x320,after_crash=new_page`.

Not here: doing it (a backend).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from homing.web.errors import InvalidTaskError

_MIN_SIDE: Final = 50
_MAX_SIDE: Final = 4096


@dataclass(frozen=True, slots=True)
class ObservationProfile:
    """What an observation shows.

    Attributes:
        layout: The text gives each node's box (`x,y,width,height`, CSS pixels in the window) and its colours.
        screenshot: Its format; None: none is taken.
        dom: The page's HTML too.
        characters, nodes, milliseconds: Where the text is cut.
        dom_characters: Where the HTML is cut.
    """

    layout: bool = False
    screenshot: Literal["png", "jpeg"] | None = None
    dom: bool = False
    characters: int = 60_000
    nodes: int = 30_000
    milliseconds: int = 2_000
    dom_characters: int = 200_000


def observation_profile(text: str | None) -> ObservationProfile:
    """The profile that the words ask for.

    Raises:
        InvalidTaskError: a word is none.
    """
    profile = ObservationProfile()
    for word in _words(text):
        name, _, value = word.partition("=")
        match name, value:
            case "axtree" | "text", "":
                pass
            case "layout", "":
                profile = replace(profile, layout=True)
            case "dom", "":
                profile = replace(profile, dom=True)
            case "screenshot", "" | "png":
                profile = replace(profile, screenshot="png")
            case "screenshot", "jpeg":
                profile = replace(profile, screenshot="jpeg")
            case "characters", digits if digits.isascii() and digits.isdigit() and 0 < int(digits[:9]) <= 1_000_000:
                profile = replace(profile, characters=int(digits))
            case _:
                raise InvalidTaskError(
                    "observation_profile has a word that is none: there are axtree, layout, dom, screenshot, "
                    "screenshot=jpeg, characters=N"
                )
    return profile


@dataclass(frozen=True, slots=True)
class RuntimeProfile:
    """How a session's pages are.

    Attributes:
        viewport: Their width and height in CSS pixels; None: the browser's own.
        new_page_after_crash: A page that crashes is replaced by an empty one and the session goes on; else it ends.
        trace: A trace is kept beside the session's recording.
    """

    viewport: tuple[int, int] | None = None
    new_page_after_crash: bool = False
    trace: bool = False


def runtime_profile(text: str | None) -> RuntimeProfile:
    """The profile that the words ask for.

    Raises:
        InvalidTaskError: a word is none.
    """
    profile = RuntimeProfile()
    for word in _words(text):
        name, _, value = word.partition("=")
        if name == "viewport":
            profile = replace(profile, viewport=_viewport(value))
        elif (name, value) in (("after_crash", "new_page"), ("after_crash", "end")):
            profile = replace(profile, new_page_after_crash=value == "new_page")
        elif word == "trace":
            profile = replace(profile, trace=True)
        else:
            raise InvalidTaskError(
                "runtime_profile has a word that is none: there are viewport=WIDTHxHEIGHT, after_crash=end, "
                "after_crash=new_page, trace"
            )
    return profile


def _viewport(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    sides = [int(side) if side.isascii() and side.isdigit() and len(side) < 6 else 0 for side in (width, height)]
    if not all(_MIN_SIDE <= side <= _MAX_SIDE for side in sides):
        raise InvalidTaskError(f"a viewport is WIDTHxHEIGHT; its sides have {_MIN_SIDE} to {_MAX_SIDE} pixels")
    return sides[0], sides[1]


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
