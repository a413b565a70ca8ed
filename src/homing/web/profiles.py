"""What a task's profiles ask for: how much of the page an observation shows, and how large the page is.

A profile is words with commas between: `layout,screenshot=jpeg`, `viewport=500x320`.

Not here: doing it (a backend).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from homing.web.errors import InvalidTaskError

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


def viewport_of(text: str | None) -> tuple[int, int] | None:
    """The page's width and height in CSS pixels that a runtime profile asks for; None: the browser's own.

    Raises:
        InvalidTaskError: a word is none.
    """
    viewport = None
    for word in _words(text):
        name, _, value = word.partition("=")
        width, _, height = value.partition("x")
        if name != "viewport" or not (width.isdigit() and height.isdigit()):
            raise InvalidTaskError("runtime_profile has a word that is none: there is viewport=WIDTHxHEIGHT")
        viewport = (int(width), int(height))
        if not all(50 <= side <= _MAX_SIDE for side in viewport):
            raise InvalidTaskError(f"a viewport's sides have 50 to {_MAX_SIDE} pixels")
    return viewport


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
