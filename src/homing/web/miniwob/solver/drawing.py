"""Tasks that are done by pointing at places: drawing, dragging, sliding, following."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from typing import Final

from homing.web.miniwob.solver.agent import Agent, GaveUpError, ordinal, solves
from homing.web.miniwob.solver.colors import is_color, kind_of
from homing.web.miniwob.solver.scene import Box, Node

Point = tuple[float, float]

_PADDING: Final = 3.0


@solves("circle-center")
async def circle_center(agent: Agent) -> None:
    circle = max(agent.scene.all("circle"), key=lambda node: node.box.width if node.box else 0)
    await agent.point(*circle.middle)
    await agent.press_button()


@solves("find-midpoint")
async def find_midpoint(agent: Agent) -> None:
    one, two = (node.middle for node in agent.scene.all("circle")[:2])
    await agent.point((one[0] + two[0]) / 2, (one[1] + two[1]) / 2)
    await agent.press_button()


def _drawing(agent: Agent) -> Box:
    box = agent.scene.one("graphic").box
    assert box is not None
    return box


def _inside(box: Box, start: Point, direction: Point, longest: float = 60.0) -> Point:
    """The farthest point of this direction that is still in the drawing."""
    length = math.hypot(*direction) or 1.0
    step = (direction[0] / length, direction[1] / length)
    best = start
    for distance in range(1, int(longest) + 1):
        at = (start[0] + step[0] * distance, start[1] + step[1] * distance)
        if not (box.x + 4 < at[0] < box.right - 4 and box.y + 4 < at[1] < box.bottom - 4):
            break
        best = at
    return best


@solves("bisect-angle")
async def bisect_angle(agent: Agent) -> None:
    corner = agent.scene.one("circle", where=lambda node: is_color(node.color("fill"), "blue")).middle
    one, two = (node.middle for node in agent.scene.all("circle") if is_color(node.color("fill"), "black"))
    direction = _unit(corner, one), _unit(corner, two)
    middle = (direction[0][0] + direction[1][0], direction[0][1] + direction[1][1])
    await agent.point(*_inside(_drawing(agent), corner, middle))
    await agent.press_button()


def _unit(start: Point, end: Point) -> Point:
    length = math.hypot(end[0] - start[0], end[1] - start[1]) or 1.0
    return (end[0] - start[0]) / length, (end[1] - start[1]) / length


@solves("right-angle")
async def right_angle(agent: Agent) -> None:
    corner = agent.scene.one("circle", where=lambda node: is_color(node.color("fill"), "blue")).middle
    other = agent.scene.one("circle", where=lambda node: is_color(node.color("fill"), "black")).middle
    along = _unit(corner, other)
    box = _drawing(agent)
    sides = [_inside(box, corner, direction) for direction in ((-along[1], along[0]), (along[1], -along[0]))]
    await agent.point(*max(sides, key=lambda side: math.dist(side, corner)))
    await agent.press_button()


@solves("draw-line")
async def draw_line(agent: Agent) -> None:
    x, y = agent.scene.one("circle").middle
    box = _drawing(agent)
    if "vertical" in agent.goal:
        start, end = (x, max(box.y + 5, y - 35)), (x, min(box.bottom - 5, y + 35))
    else:
        start, end = (max(box.x + 5, x - 35), y), (min(box.right - 5, x + 35), y)
    await _trace(agent, [start, (x, y), end])
    await agent.press_button()


async def _trace(agent: Agent, points: list[Point]) -> None:
    await agent.act("mouse_down", x=points[0][0], y=points[0][1])
    for x, y in points[1:]:
        await agent.act("mouse_move", x=x, y=y)
    await agent.act("mouse_up", x=points[-1][0], y=points[-1][1])


@solves("draw-circle")
async def draw_circle(agent: Agent) -> None:
    x, y = agent.scene.one("circle").middle
    box = _drawing(agent)
    radius = min(30.0, x - box.x - 4, box.right - x - 4, y - box.y - 4, box.bottom - y - 4)
    turns = [2 * math.pi * step / 40 for step in range(42)]
    await _trace(agent, [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns])
    await agent.press_button()


@solves("grid-coordinate")
async def grid_coordinate(agent: Agent) -> None:
    x, y = (int(part) for part in agent.match(r"\((-?\d+),(-?\d+)\)"))
    circles = agent.scene.all("circle")
    columns = sorted({node.middle[0] for node in circles})
    rows = sorted({node.middle[1] for node in circles}, reverse=True)
    await agent.point(columns[x + 2], rows[y + 2])


# --- dragging ---


@solves("drag-box")
async def drag_box(agent: Agent) -> None:
    small, large = agent.scene.one(name="s"), agent.scene.one(name="L")
    await agent.drag(_free_point(small, large), _with_offset(small, large))
    await agent.press_button()


def _free_point(node: Node, above: Node) -> Point:
    """A point of a node that another does not cover."""
    box, cover = node.box, above.box
    assert box is not None
    assert cover is not None
    for fx, fy in itertools.product((0.5, 0.1, 0.9, 0.3, 0.7), repeat=2):
        point = (box.x + box.width * fx, box.y + box.height * fy)
        if not (cover.x - 1 <= point[0] <= cover.right + 1 and cover.y - 1 <= point[1] <= cover.bottom + 1):
            return point
    return box.middle


def _with_offset(node: Node, target: Node) -> Point:
    """Where to let go so that the node's middle is the target's."""
    grabbed = _free_point(node, target)
    middle, aim = node.middle, target.middle
    return aim[0] + grabbed[0] - middle[0], aim[1] + grabbed[1] - middle[1]


_DIRECTIONS: Final = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}


@solves("drag-circle", "drag-single-shape")
async def drag_in_direction(agent: Agent) -> None:
    dx, dy = _DIRECTIONS[agent.match(r"(right|left|up|down)")[0]]
    shape = agent.scene.one("circle|rect|polygon|ellipse")
    x, y = shape.middle
    distance = 25 if agent.scene.one("circle|rect|polygon|ellipse").box else 20
    await agent.drag((x, y), (x + dx * distance, y + dy * distance))
    await agent.press_button()


@solves("drag-items")
async def drag_item(agent: Agent) -> None:
    items = agent.scene.all("listitem")
    names = [_said(item) for item in items]
    name = agent.match(r"Drag (\S+)")[0]
    here = names.index(name)
    there = _position(agent.goal, here, len(items))
    await _move_row(agent, items, here, there)


def _position(goal: str, here: int, count: int) -> int:
    numbers = {"one": 1, "two": 2, "three": 3, "four": 4}
    if found := re.search(r"(up|down) by (\w+) position", goal):
        steps = int(found[2]) if found[2].isdigit() else numbers[found[2]]
        return here + (steps if found[1] == "down" else -steps)
    if found := re.search(r"(\d+)(?:st|nd|rd|th) position", goal):
        return int(found[1]) - 1
    return count - 1 if "bottom" in goal or "last" in goal else 0


def _said(item: Node) -> str:
    return item.name or next(node.name for node in item.below() if node.name)


async def _move_row(agent: Agent, items: list[Node], here: int, there: int) -> None:
    """Move a row of a sortable list; it is put where the pointer passes the middle of the row that is there."""
    start, target = items[here].middle, items[there].middle
    beyond = 8 if there > here else -8
    await agent.act("mouse_down", x=start[0], y=start[1])
    await agent.act("mouse_move", x=start[0], y=start[1] + beyond)
    await agent.act("mouse_move", x=target[0], y=target[1])
    await agent.act("mouse_move", x=target[0], y=target[1] + beyond)
    await agent.act("mouse_up", x=target[0], y=target[1] + beyond)


@solves("drag-sort-numbers")
async def sort_numbers(agent: Agent) -> None:
    for position in range(len(agent.scene.all("listitem")) - 1):
        items = agent.scene.all("listitem")
        numbers = [int(_said(item)) for item in items]
        ordered = sorted(numbers, reverse="decreasing" in agent.goal or "descending" in agent.goal)
        here = numbers.index(ordered[position])
        if here != position:
            await _move_row(agent, items, here, position)
            await agent.act("noop", milliseconds=250)
    await agent.press_button()


@solves("drag-items-grid")
async def drag_in_grid(agent: Agent) -> None:
    name = agent.match(r"Drag (\S+)")[0]
    items = agent.scene.all("listitem")
    names = [_said(item) for item in items]
    here = names.index(name)
    goal = agent.goal
    row, column = divmod(here, 3)
    if found := re.search(r"(up|down|left|right) by (\w+)", goal):
        steps = int(found[2]) if found[2].isdigit() else {"one": 1, "two": 2}[found[2]]
        dx, dy = _DIRECTIONS[found[1]]
        row, column = row + dy * steps, column + dx * steps
    else:
        if "center" in goal:
            row, column = 1, 1
        for word, value in (("top", 0), ("bottom", 2)):
            if word in goal:
                row = value
                column = 1
        for word, value in (("left", 0), ("right", 2)):
            if word in goal:
                column = value
                row = row if "top" in goal or "bottom" in goal else 1
    target = items[row * 3 + column].middle
    start = items[here].middle
    beyond = 6 if row * 3 + column > here else -6
    await agent.act("mouse_down", x=start[0], y=start[1])
    await agent.act("mouse_move", x=start[0] + beyond, y=start[1] + beyond)
    await agent.act("mouse_move", x=target[0] - beyond, y=target[1])
    await agent.act("mouse_move", x=target[0], y=target[1])
    await agent.act("mouse_move", x=target[0] + beyond, y=target[1])
    await agent.act("mouse_up", x=target[0] + beyond, y=target[1])


@solves("drag-shapes", "drag-shapes-2")
async def drag_shapes(agent: Agent) -> None:
    boxes = agent.scene.all("rect", where=lambda node: node.box is not None and node.box.width > 40)
    shapes = [node for node in agent.scene.all("rect|circle|polygon") if node not in boxes]
    boxes.sort(key=lambda node: node.middle[0])
    wanted = agent.match(r"Drag all (.*?) (?:shapes )?into the")[0].rstrip("s")
    places: dict[str, int] = {}
    for shape in shapes:
        fits = kind_of(shape) == wanted or is_color(shape.color("fill"), wanted) or wanted == "shape"
        if len(boxes) == 1:
            if not fits:
                continue
            box = boxes[0]
        else:
            is_left = "into the left box" in agent.goal
            box = boxes[0 if fits == is_left else 1]
        await agent.drag(shape.middle, _free_place(box, places))
    await agent.press_button()


def _free_place(box: Node, places: dict[str, int]) -> Point:
    """Each shape at a place of its own, so that none covers another."""
    assert box.box is not None
    index = places[box.ref] = places.get(box.ref, -1) + 1
    area = box.box
    columns = max(1, int((area.width - 4) // 20))
    return area.x + 12 + 20 * (index % columns), area.y + 12 + 20 * (index // columns)


@solves("resize-textarea")
async def resize_textarea(agent: Agent) -> None:
    handle = agent.scene.one("generic", where=lambda node: "ui-icons" in node.get("image"))
    x, y = handle.middle
    sign = 1 if "larger" in agent.goal or "greater" in agent.goal else -1
    width, height = ("width" in agent.goal), ("height" in agent.goal)
    await agent.drag((x, y), (x + (20 * sign if width else 0), y + (20 * sign if height else 0)))
    await agent.press_button()


@solves("drag-cube")
async def drag_cube(agent: Agent) -> None:
    wanted = agent.match(r'"(\d)"')[0]
    for _ in range(30):
        faces = {node.name: node for node in agent.scene.all("text", where=lambda node: node.name in "123456")}
        front = next((name for name, node in faces.items() if is_color(node.color("color"), "red")), None)
        if front == wanted:
            await agent.press_button()
        middle = (80.0, 120.0)
        target = faces[wanted].middle
        dx, dy = middle[0] - target[0], middle[1] - target[1]
        if abs(dx) + abs(dy) < 12:
            dx, dy = 40.0, 0.0
        await agent.drag(middle, (middle[0] + dx * 0.8, middle[1] + dy * 0.8))
        await agent.act("noop", milliseconds=100)


# --- sliding ---


def _handles(agent: Agent) -> list[tuple[Node, Node]]:
    """The sliders' tracks and handles."""
    found = []
    for node in agent.scene.all("generic|slider"):
        box = node.box
        if box is not None and box.width == box.height == 14 and node.parent is not None:
            found.append((node.parent, node))
    return found


def _shown(agent: Agent, track: Node) -> int:
    """The number beside a slider."""
    numbers = agent.scene.all("text", where=lambda node: re.fullmatch(r"-?\d+", node.name) is not None)
    if track.box is None or not numbers:
        raise GaveUpError("the slider shows no number")
    after = [node for node in numbers if agent.scene.nodes.index(node) > agent.scene.nodes.index(track)]
    return int((after or numbers)[0].name)


async def _slide(agent: Agent, index: int, wanted: int) -> None:
    """Set a slider by its keys: to both ends, to know its scale, to about where it is wanted, then step by step."""

    def value() -> int:
        return _shown(agent, _handles(agent)[index][0])

    async def press(key: str) -> None:
        await agent.act("press", ref=_handles(agent)[index][1].ref, key=key)

    track = _handles(agent)[index][0].box
    assert track is not None
    await press("Home")
    low = value()
    await press("End")
    high = value()
    share = (wanted - low) / ((high - low) or 1)
    if track.width >= track.height:
        await agent.point(track.x + track.width * share, track.y + track.height / 2)
    else:
        await agent.point(track.x + track.width / 2, track.bottom - track.height * share)
    for _ in range(40):
        now = value()
        if now == wanted:
            return
        await press("ArrowRight" if now < wanted else "ArrowLeft")
    raise GaveUpError("the slider does not get there")


@solves("use-slider")
async def use_slider(agent: Agent) -> None:
    await _slide(agent, 0, int(agent.match(r"Select (-?\d+)")[0]))
    await agent.press_button()


@solves("use-slider-2")
async def use_sliders(agent: Agent) -> None:
    wanted = [int(each) for each in agent.match(r"\[(.*)\]")[0].split(",")]
    for index, number in enumerate(wanted):
        await _slide(agent, index, number)
    await agent.press_button()


@solves("form-sequence")
async def form_sequence(agent: Agent) -> None:
    number, which = agent.match(r"Select (-?\d+) with the slider, click the (\d)\w\w checkbox")
    await _slide(agent, 0, int(number))
    await agent.click(agent.scene.all("checkbox")[int(which) - 1])
    await agent.press_button()


@solves("form-sequence-2")
async def form_sequence_2(agent: Agent) -> None:
    radio, number, box = agent.match(
        r'the (\d)\w\w radio button and enter the number "(-?\d+)" into the (\d)\w\w textbox'
    )
    await agent.click(agent.scene.all("radio")[int(radio) - 1])
    await agent.fill(agent.scene.all("textbox|spinbutton")[int(box) - 1], number)
    await agent.press_button()


@solves("form-sequence-3")
async def form_sequence_3(agent: Agent) -> None:
    option, button = agent.match(r'Choose (.*) from the dropdown, then click the button labeled "(.*)"')
    # The page draws its own list over the browser's.
    await agent.click(agent.scene.after(agent.scene.one("combobox"), "generic"))
    entry = await agent.wait_until(lambda scene: scene.one("listitem|text|generic", option))
    await agent.click(entry)
    await agent.press_button(button)


# --- text and pointer ---


@solves("highlight-text", "highlight-text-2")
async def highlight_text(agent: Agent) -> None:
    found = re.search(r"(\d+)(?:st|nd|rd|th)", agent.goal)
    texts = agent.scene.all("text")
    await agent.act("select_text", ref=texts[ordinal(found[0]) if found else 0].ref)
    await agent.press_button()


@solves("hot-cold")
async def hot_cold(agent: Agent) -> None:
    area = agent.scene.one("generic").box
    assert area is not None

    async def feel(x: float, y: float) -> str:
        await agent.act("mouse_move", x=x, y=y)
        return agent.scene.all("text")[-1].name if agent.scene.all("text") else ""

    cold: list[Point] = []
    for y, x in itertools.product(_range(area.y + 15, area.bottom, 28), _range(area.x + 15, area.right, 28)):
        said = await feel(x, y)
        if said in ("HOT", "WARM"):
            cold = [(x, y)]
            break
        if said == "COLD":
            cold.append((x, y))
    middle = (sum(x for x, _ in cold) / len(cold), sum(y for _, y in cold) / len(cold))
    for radius in range(0, 40, 4):
        steps = max(1, int(2 * math.pi * radius / 6))
        for step in range(steps):
            turn = 2 * math.pi * step / steps
            x, y = middle[0] + radius * math.cos(turn), middle[1] + radius * math.sin(turn)
            if not (area.x < x < area.right and area.y < y < area.bottom):
                continue
            if await feel(x, y) == "HOT":
                await agent.point(x, y)


def _range(start: float, end: float, step: float) -> list[float]:
    return [start + step * index for index in range(int((end - start) / step) + 1)]


@solves("chase-circle")
async def chase_circle(agent: Agent) -> None:
    for _ in range(100):
        x, y = agent.scene.one("circle").middle
        await agent.act("mouse_move", x=x, y=y)
        await asyncio.sleep(0.08)


@solves("moving-items")
async def moving_items(agent: Agent) -> None:
    box = _drawing(agent)
    for _ in range(100):
        visible = [node for node in agent.scene.all("circle") if box.x + 10 < node.middle[0] < box.right - 10]
        if visible:
            await agent.point(*visible[0].middle)
        else:
            await agent.act("noop", milliseconds=120)
