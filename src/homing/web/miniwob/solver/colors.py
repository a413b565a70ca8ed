"""What a colour or a shape is called."""

from __future__ import annotations

import colorsys
from typing import Final

from homing.web.miniwob.solver.scene import Node

Color = tuple[int, int, int]

NAMES: Final[dict[str, Color]] = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "red": (255, 0, 0),
    "lime": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "aqua": (0, 255, 255),
    "magenta": (255, 0, 255),
    "fuchsia": (255, 0, 255),
    "silver": (192, 192, 192),
    "gray": (128, 128, 128),
    "grey": (128, 128, 128),
    "maroon": (128, 0, 0),
    "olive": (128, 128, 0),
    "green": (0, 128, 0),
    "purple": (128, 0, 128),
    "teal": (0, 128, 128),
    "navy": (0, 0, 128),
    "orange": (255, 165, 0),
    "pink": (255, 192, 203),
    "brown": (165, 42, 42),
}


def is_color(color: Color | None, name: str) -> bool:
    """Whether the colour is the one of this name."""
    return color is not None and NAMES.get(name.lower()) == color


def hue(color: Color) -> float:
    """In degrees, from 0 to 360."""
    return colorsys.rgb_to_hsv(*(part / 255 for part in color))[0] * 360


def kind_of(node: Node) -> str:
    """`circle`, `rectangle`, `triangle`, `letter`, `number` or `shape`."""
    if node.role in ("circle", "ellipse"):
        return "circle"
    if node.role == "rect":
        return "rectangle"
    if node.role in ("polygon", "polyline"):
        return "triangle" if node.get("points").count(";") == 2 else "shape"
    if len(node.name) == 1:
        return "number" if node.name.isdigit() else "letter"
    return "shape"
