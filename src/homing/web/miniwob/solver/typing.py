"""Tasks that are done by writing into fields."""

from __future__ import annotations

import re

from homing.web.miniwob.solver.agent import Agent, GaveUpError, ordinal, solves


@solves("enter-text", "enter-text-dynamic")
async def enter_text(agent: Agent) -> None:
    await agent.fill(agent.scene.one("textbox"), agent.quoted()[0])
    await agent.press_button()


@solves("enter-text-2")
async def enter_text_in_case(agent: Agent) -> None:
    text = agent.quoted()[0]
    await agent.fill(agent.scene.one("textbox"), text.upper() if "upper" in agent.goal else text.lower())
    await agent.press_button()


@solves("enter-password")
async def enter_password(agent: Agent) -> None:
    for index in (0, 1):
        await agent.fill(agent.scene.all("textbox")[index], agent.quoted()[0])
    await agent.press_button()


@solves("login-user", "login-user-popup")
async def log_in(agent: Agent) -> None:
    user, password = agent.quoted()
    for index, text in enumerate((user, password)):
        # Something may come up in front meanwhile, and is to be sent away.
        for _ in range(3):
            await agent.click(agent.scene.all("textbox")[index])
            if not await _send_away_popup(agent):
                break
        await agent.fill(agent.scene.all("textbox")[index], text)
        await _send_away_popup(agent)
    for name in ("Login", "OK", "Log in"):
        if agent.scene.all("button", name):
            await agent.press_button(name)
            if await _send_away_popup(agent):
                await agent.press_button(name)


async def _send_away_popup(agent: Agent) -> bool:
    cancel = agent.scene.all("button|generic", where=lambda node: node.name.lower() in ("cancel", "no", "later", "×"))
    if cancel:
        await agent.click(cancel[0])
        return True
    return False


@solves("enter-date")
async def enter_date(agent: Agent) -> None:
    month, day, year = agent.match(r"(\d+)/(\d+)/(\d+)")
    await agent.fill(agent.scene.one("textbox"), f"{year}-{month}-{day}")
    await agent.press_button()


@solves("enter-time")
async def enter_time(agent: Agent) -> None:
    hour, minute, half = agent.match(r"(\d+):(\d+) ([AP]M)")
    hours = int(hour) % 12 + (12 if half == "PM" else 0)
    await agent.fill(agent.scene.one("textbox"), f"{hours:02d}:{minute}")
    await agent.press_button()


@solves("copy-paste", "copy-paste-2")
async def copy_and_paste(agent: Agent) -> None:
    found = re.search(r"(\d+)(?:st|nd|rd|th)", agent.goal)
    fields = agent.scene.all("textbox")
    areas = [node for node in fields if node.value]
    await agent.click(areas[ordinal(found[0]) if found else 0])
    await agent.act("keyboard_press", key="Control+a")
    await agent.act("keyboard_press", key="Control+c")
    await agent.click(next(node for node in fields if not node.value))
    await agent.act("keyboard_press", key="Control+v")
    await agent.press_button()


@solves("find-word")
async def find_word(agent: Agent) -> None:
    index = ordinal(agent.match(r"(\d+\w\w) word")[0])
    text = agent.scene.one("text", where=lambda node: len(node.name.split()) > index)
    await agent.fill(agent.scene.one("textbox"), re.sub(r"[^\w]", "", text.name.split()[index]))
    await agent.press_button()


@solves("scroll-text")
async def last_word(agent: Agent) -> None:
    area, field = agent.scene.all("textbox")
    await agent.fill(field, re.sub(r"[^\w]", "", area.value.split()[-1]))
    await agent.press_button()


@solves("scroll-text-2")
async def scroll_text(agent: Agent) -> None:
    area = agent.scene.one("textbox")
    await agent.act("scroll", ref=area.ref, delta_y=-100_000 if "top" in agent.goal else 100_000)
    await agent.press_button()


@solves("read-table")
async def read_table(agent: Agent) -> None:
    wanted = agent.match(r"value of (.*) into the text field")[0]
    await agent.fill(agent.scene.one("textbox"), _in_table(agent, wanted))
    await agent.press_button()


@solves("read-table-2")
async def read_table_into_form(agent: Agent) -> None:
    for index in (0, 1):
        label = agent.scene.all("label")[index]
        await agent.fill(agent.scene.all("textbox")[index], _in_table(agent, label.name.rstrip(":")))
    await agent.press_button()


def _in_table(agent: Agent, label: str) -> str:
    cells = agent.scene.all("cell|columnheader")
    return next(cells[index + 1].name for index, cell in enumerate(cells) if cell.name == label)


@solves("simple-arithmetic")
async def arithmetic(agent: Agent) -> None:
    text = agent.scene.one("text", where=lambda node: "=" in node.name).name
    left, sign, right = re.findall(r"(-?\d+) ([+\-x*/÷]) (-?\d+)", text)[0]
    await agent.fill(agent.scene.one("textbox"), str(_result(int(left), sign, int(right))))
    await agent.press_button()


def _result(left: int, sign: str, right: int) -> int:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "/" | "÷":
            return left // right
        case _:
            return left * right


@solves("simple-algebra")
async def algebra(agent: Agent) -> None:
    text = agent.scene.one("text", where=lambda node: "=" in node.name and len(node.name) > 5).name
    left, sign, right, total = re.findall(r"(\w+) ([+\-x*]) (\w+) = (-?\d+)", text)[0]
    result = int(total)
    if not left.isdigit() and left != "":
        number = int(right)
        x = {"+": result - number, "-": result + number}.get(sign, result // number if number else 0)
    else:
        number = int(left)
        x = {"+": result - number, "-": number - result}.get(sign, result // number if number else 0)
    await agent.fill(agent.scene.one("textbox"), str(x))
    await agent.press_button()


@solves("visual-addition")
async def visual_addition(agent: Agent) -> None:
    blocks = agent.scene.all(
        "generic", where=lambda node: node.box is not None and node.box.width < 20 and not node.name
    )
    await agent.fill(agent.scene.one("textbox"), str(len(blocks)))
    await agent.press_button()


@solves("guess-number")
async def guess_number(agent: Agent) -> None:
    low, high = 0, 9
    while low <= high:
        guess = (low + high) // 2
        await agent.fill(agent.scene.one("spinbutton|textbox"), str(guess))
        await agent.press_button()
        said = " ".join(node.name.lower() for node in agent.scene.all("text"))
        if "lower" in said:
            high = guess - 1
        else:
            low = guess + 1


@solves("text-transform")
async def text_transform(agent: Agent) -> None:
    letters = agent.scene.all("text", where=lambda node: len(node.name) == 1)
    await agent.fill(agent.scene.one("textbox"), "".join(node.name for node in letters))
    await agent.press_button()


@solves("multi-layouts", "multi-orderings")
async def search_movies(agent: Agent) -> None:
    genre, director, year = agent.match(r"[Ss]earch for (.*?) movies directed by (.*?) from year (\d+)")
    # Each field has a label beside, above or below it, always on the same side: so the order tells which is whose.
    fields = agent.scene.all("textbox|searchbox")
    labels = sorted((_label_place(agent, words), text) for words, text in (
        (("genre",), genre), (("year", "date"), year), (("director",), director)
    ))  # fmt: skip
    for (_, text), field in zip(labels, fields, strict=True):
        await agent.fill(field, text)
    button = agent.scene.all("button|generic|link|text", where=lambda node: _is_go(node.name))
    await agent.click(button[-1])


def _is_go(name: str) -> bool:
    return name.lower().strip(" !→»>") in ("search", "submit", "go", "find")


def _label_place(agent: Agent, words: tuple[str, ...]) -> int:
    """Where a label stands among the nodes."""
    for index, node in enumerate(agent.scene.nodes):
        if any(word in node.name.lower() for word in words):
            return index
    raise GaveUpError(f"no label says {words[0]}")


@solves("terminal")
async def terminal(agent: Agent) -> None:
    screen = agent.scene.one("text", "terminal")
    await agent.point(*screen.middle)
    await agent.act("keyboard_type", text="ls")
    await agent.act("keyboard_press", key="Enter")
    lines = [node.name for node in agent.scene.all("text")]
    listing = lines[lines.index("ls") + 1] if "ls" in lines else lines[-3]
    files = listing.split()
    found = re.search(r"ends? with the extension (\S+?)\.?$|extension \.?(\w+(?:\.\w+)?)", agent.goal)
    if "no file extension" in agent.goal:
        wanted = next(name for name in files if "." not in name)
    elif found is not None:
        extension = (found[1] or found[2]).lstrip(".")
        wanted = next(name for name in files if name.endswith(f".{extension}"))
    else:
        raise GaveUpError("which file?")
    await agent.act("keyboard_type", text=f"rm {wanted}")
    await agent.act("keyboard_press", key="Enter")


@solves("use-autocomplete", "use-autocomplete-nodelay")
async def autocomplete(agent: Agent) -> None:
    start, *rest = agent.quoted()
    field = agent.scene.one("textbox")
    await agent.click(field)
    await agent.act("keyboard_type", text=start)
    entry = await agent.wait_until(
        lambda scene: scene.one(
            "option|listitem|menuitem|generic|text",
            where=lambda node: (
                node.name.startswith(start) and node.name.endswith(rest[0] if rest else "") and node.name != start
            ),
        )
    )
    await agent.click(entry)
    await agent.press_button()


@solves("use-spinner")
async def spinner(agent: Agent) -> None:
    wanted = agent.match(r"Select (-?\d+)")[0]
    await agent.fill(agent.scene.one("spinbutton"), wanted)
    await agent.press_button()
