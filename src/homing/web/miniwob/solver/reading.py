"""Tasks that are done by seeing what is there: colours, shapes, counts, prices."""

from __future__ import annotations

import re
from typing import Final

from homing.web.miniwob.solver.agent import Agent, GaveUpError, solves
from homing.web.miniwob.solver.colors import NAMES, hue, is_color, kind_of
from homing.web.miniwob.solver.scene import Node


@solves("click-color")
async def click_color(agent: Agent) -> None:
    name = agent.match(r"Click on the (\w*) ?colored box")[0]
    wanted = NAMES.get(name)
    if wanted is None:
        shown = next(node.color() for node in agent.scene.query if node.role == "generic" and node.color())
        wanted = shown
    boxes = agent.scene.all("generic", where=lambda node: node.box is not None and 30 < node.box.width < 80)
    await agent.click(next(node for node in boxes if node.color() == wanted))


@solves("click-shades")
async def click_shades(agent: Agent) -> None:
    wanted = {"red": 0.0, "green": 120.0, "blue": 240.0}[agent.match(r"shades of (\w+)")[0]]
    for node in agent.scene.all("generic", where=lambda node: node.box is not None and node.box.width < 20):
        color = node.color()
        if color is not None and min(abs(hue(color) - wanted), 360 - abs(hue(color) - wanted)) < 30:
            await agent.point(*node.middle)
    await agent.press_button()


def _items(agent: Agent) -> list[Node]:
    return agent.scene.all("rect|circle|polygon|generic|text", where=lambda node: "fill" in node)


def _fits(node: Node, description: str) -> bool:
    """Whether an item is what the words say: size, colour, and kind, a letter or a digit."""
    for word in description.split():
        singular = word.rstrip("s") if len(word) > 1 else word
        if word in ("item", "items"):
            continue
        if word in ("small", "large"):
            # Small things are ten pixels large; letters are told by their type.
            size = float(node.get("size").removesuffix("px") or 0) or (node.box.width if node.box else 0)
            if (size < 15) != (word == "small"):
                return False
        elif word in NAMES:
            if not is_color(node.color("fill"), word):
                return False
        elif singular in ("shape", "letter", "digit", "number", "triangle", "rectangle", "circle"):
            kind = kind_of(node)
            wanted = "number" if singular == "digit" else singular
            if wanted == "shape":
                if kind in ("letter", "number"):
                    return False
            elif kind != wanted:
                return False
        elif len(word) == 1:
            if node.name != word:
                return False
        else:
            raise GaveUpError(f"what is {word}?")
    return True


@solves("click-shape")
async def click_shape(agent: Agent) -> None:
    description = agent.match(r"Click on an? (.*)$")[0]
    found = [node for node in _items(agent) if _fits(node, description)]
    await agent.point(*found[0].middle)


@solves("count-shape")
async def count_shape(agent: Agent) -> None:
    description = agent.match(r"How many (.*?) are there")[0]
    count = sum(_fits(node, description) for node in _items(agent))
    await agent.press_button(str(count))


@solves("identify-shape")
async def identify_shape(agent: Agent) -> None:
    await agent.press_button(kind_of(_items(agent)[0]))


_DIGITS: Final = {
    "0": ["0110", "1001", "1001", "1001", "1001", "1001", "0110"],
    "1": ["0010", "0110", "0010", "0010", "0010", "0010", "0010"],
    "2": ["0110", "1001", "1001", "0010", "0100", "1000", "1111"],
    "3": ["0110", "1001", "0001", "0110", "0001", "1001", "0110"],
    "4": ["1000", "1010", "1010", "1111", "0010", "0010", "0010"],
    "5": ["1111", "1000", "1000", "1110", "0001", "1001", "0110"],
    "6": ["0110", "1001", "1000", "1110", "1001", "1001", "0110"],
    "7": ["1111", "1001", "0001", "0010", "0010", "0100", "0100"],
    "8": ["0110", "1001", "1001", "0110", "1001", "1001", "0110"],
    "9": ["0110", "1001", "1001", "0111", "0001", "1001", "0110"],
}
"""How the pictures beside the checkboxes draw each digit, from top to bottom."""


@solves("number-checkboxes")
async def draw_number(agent: Agent) -> None:
    digit = agent.quoted()[0]
    boxes = agent.scene.all("checkbox")
    for row, pattern in enumerate(_DIGITS[digit]):
        for column, mark in enumerate(pattern):
            if mark == "1":
                await agent.click(boxes[row * 4 + column])
    await agent.press_button()


@solves("use-colorwheel", "use-colorwheel-2")
async def use_colorwheel(agent: Agent) -> None:
    found = re.search(r"Select (\w+) with", agent.goal)
    if found is not None:
        wanted = NAMES[found[1]]
    else:
        wanted = next(
            color for node in agent.scene.everything if node.box and node.box.width == 12 and (color := node.color())
        )
    field = agent.scene.one("textbox")
    await agent.fill(field, "".join(f"{part:02X}" for part in wanted))
    await agent.act("press", ref=agent.scene.one("textbox").ref, key="Tab")
    await agent.press_button()


@solves("stock-market")
async def stock_market(agent: Agent) -> None:
    limit = float(agent.match(r"less than \$([\d.]+\d)")[0])
    for _ in range(110):
        price = next(
            (float(node.name.lstrip("$")) for node in agent.scene.all("text") if re.fullmatch(r"\$[\d.]+", node.name)),
            None,
        )
        if price is not None and price <= limit:
            await agent.press_button("Buy")
        await agent.act("noop", milliseconds=70)


@solves("text-editor")
async def text_editor(agent: Agent) -> None:
    everything = "everything" in agent.goal
    style = re.search(r"(?:style|color) (\w+)", agent.goal)
    word = re.search(r"give the text (.*?) the (?:style|color)", agent.goal)
    if style is None:
        raise GaveUpError("which style?")
    editor = next(node for node in agent.scene.all("textbox") if node.value and node.box and node.box.height > 40)
    text = editor.value
    start, end = (
        (0, len(text)) if everything or word is None else (text.index(word[1]), text.index(word[1]) + len(word[1]))
    )
    await agent.act("select_text", ref=editor.ref, start=start, end=end)
    keys = {"bold": "Control+b", "italics": "Control+i", "underlined": "Control+u"}
    if style[1] in keys:
        await agent.act("keyboard_press", key=keys[style[1]])
    else:
        await agent.point(18, 66)
        swatch = min(
            agent.scene.all("generic|button", where=lambda node: node.box is not None and node.box.width == 16),
            key=lambda node: _distance(node.color() or (999, 999, 999), _EDITOR[style[1]]),
        )
        await agent.point(*swatch.middle)
    await agent.press_button()


_EDITOR: Final = {
    "red": (230, 0, 0),
    "orange": (255, 153, 0),
    "yellow": (255, 255, 0),
    "green": (0, 138, 0),
    "blue": (0, 102, 204),
    "purple": (153, 51, 255),
}


def _distance(one: tuple[int, int, int], two: tuple[int, int, int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, two, strict=True))
