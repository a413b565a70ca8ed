"""Tasks that are done by clicking on what the goal names."""

from __future__ import annotations

import itertools
import re
from typing import Final

from homing.web.miniwob.solver.agent import Agent, GaveUpError, ordinal, solves
from homing.web.miniwob.solver.scene import Node, Scene


@solves("click-test", "click-test-2", "click-test-transfer", "click-button-sequence")
async def click_named_buttons(agent: Agent) -> None:
    names = re.findall(r"button ([A-Z]+)", agent.goal) or [agent.scene.one("button").name]
    for name in names:
        await agent.press_button(name)


@solves("click-button", "unicode-test")
async def click_quoted_button(agent: Agent) -> None:
    wanted = agent.quoted()[0]
    await agent.click(agent.scene.one("button", wanted))


@solves("button-delay")
async def click_with_a_pause(agent: Agent) -> None:
    seconds = int(agent.match(r"wait (\d+) second")[0])
    await agent.press_button("ONE")
    await agent.act("noop", milliseconds=seconds * 1000 + 100)
    await agent.press_button("TWO")


@solves("click-widget")
async def click_widget(agent: Agent) -> None:
    kind = agent.quoted()[0]
    fields = agent.scene.all("textbox")
    # A text area is higher than a line of text.
    by_kind = {
        "text": lambda: min(fields, key=_height),
        "textarea": lambda: max(fields, key=_height),
        "button": lambda: agent.scene.one("button"),
        "checkbox": lambda: agent.scene.one("checkbox"),
        "radio": lambda: agent.scene.one("radio"),
    }
    await agent.click(by_kind[kind]())


def _height(node: Node) -> float:
    return node.box.height if node.box else 0.0


@solves("click-checkboxes", "click-checkboxes-large", "click-checkboxes-transfer", "click-option")
async def check_named(agent: Agent) -> None:
    text = agent.match(r"Select (.*) and click Submit")[0]
    for name in [] if text == "nothing" else text.split(", "):
        await agent.act("check", ref=agent.scene.one("checkbox|radio", name).ref)
    await agent.press_button()


_SIMILAR: Final = [
    ("big", "large", "huge", "enormous", "gigantic"),
    ("small", "tiny", "little", "mini", "petite"),
    ("happy", "cheerful", "joyful", "gleeful", "delighted"),
    ("sad", "unhappy", "sorrowful", "miserable", "tragic"),
    ("angry", "mad", "furious", "irritated"),
    ("evil", "wicked", "immoral", "sinful", "corrupt", "depraved"),
    ("wrong", "incorrect", "mistaken", "erroneous"),
    ("real", "genuine", "actual"),
    ("strange", "odd", "peculiar", "unusual", "weird"),
    ("stop", "cease", "halt", "end", "finish"),
    ("scared", "afraid", "terrified", "fearful", "panicked"),
    ("quiet", "silent", "calm", "peaceful"),
    ("panic", "fear", "terror"),
    ("answer", "response", "reply"),
    ("fire", "flame", "blaze"),
    ("hot", "warm", "boiling", "fiery"),
    ("cold", "chilly", "freezing", "icy", "cool"),
    ("house", "home", "dwelling"),
    ("car", "automobile", "vehicle"),
    ("pig", "pigs", "hog", "swine", "hogs"),
    ("keep", "hold", "retain"),
    ("kids", "children", "child"),
    ("automobile", "vehicle", "car", "cars"),
    ("tv", "television", "televisions"),
    ("mouth", "jaws", "lips"),
    ("sea", "ocean", "waters"),
    ("archer", "bowman"),
    ("love", "adore", "like"),
    ("television", "tv"),
    ("begin", "start", "commence"),
    ("fast", "quick", "rapid", "speedy"),
]


@solves("click-checkboxes-soft")
async def check_similar(agent: Agent) -> None:
    words = agent.match(r"similar to (.*) and click")[0].split(", ")
    meanings = [set(group) for group in _SIMILAR if any(word.lower() in group for word in words)]
    for box in agent.scene.all("checkbox"):
        if any(box.name.lower() in group for group in meanings):
            await agent.act("check", ref=box.ref)
    await agent.press_button()


@solves("click-collapsible", "click-collapsible-nodelay")
async def expand_and_submit(agent: Agent) -> None:
    await agent.click(agent.scene.one("tab"))
    button = await agent.wait_until(
        lambda scene: scene.one("button", where=lambda node: node.name == "Submit" and _is_still(node, agent))
    )
    await agent.click(button)


def _is_still(node: Node, agent: Agent) -> bool:
    """Whether it is where it was at the last look: a panel that opens moves what is in it."""
    before, agent.places[node.ref] = agent.places.get(node.ref), node.box
    return before == node.box


@solves("click-collapsible-2", "click-collapsible-2-nodelay")
async def find_link_in_sections(agent: Agent) -> None:
    wanted = agent.quoted()[0]
    sections = len(agent.scene.all("tab"))
    for index in range(sections):
        await agent.click(agent.scene.all("tab")[index])
        await agent.act("noop", milliseconds=400)
        link = _link(agent.scene, wanted)
        if link is not None:
            await agent.click(link)
            return


@solves("click-tab-2", "click-tab-2-easy", "click-tab-2-hard", "click-tab-2-medium")
async def find_link_in_tabs(agent: Agent) -> None:
    wanted = agent.quoted()[0]
    tabs = len(agent.scene.all("tab"))
    for index in range(tabs):
        await agent.click(agent.scene.all("tab")[index])
        link = _link(agent.scene, wanted)
        if link is not None:
            await agent.click(link)
            return


def _link(scene: Scene, name: str) -> Node | None:
    found = scene.all("link|generic", name) or scene.all("text", name)
    return found[0] if found else None


@solves("click-link")
async def click_link(agent: Agent) -> None:
    link = _link(agent.scene, agent.quoted()[0])
    if link is None:
        raise GaveUpError("no such link")
    await agent.click(link)


@solves("click-tab")
async def click_tab(agent: Agent) -> None:
    await agent.click(agent.scene.one("tab", agent.match(r"(Tab #\d+)")[0]))


@solves("click-dialog")
async def close_dialog(agent: Agent) -> None:
    await agent.press_button("Close")


@solves("click-dialog-2")
async def click_in_dialog(agent: Agent) -> None:
    wanted = agent.quoted()[0]
    await agent.press_button("Close" if wanted == "x" else wanted)


@solves("click-menu")
async def click_menu_path(agent: Agent) -> None:
    path = agent.match(r"Select (.*)$")[0].split(">")
    for name, below in itertools.pairwise(path):
        item = await agent.appears("menuitem", name)
        await agent.act("hover", ref=item.ref)
        await agent.appears("menuitem", below)
    await agent.click(await agent.appears("menuitem", path[-1]))


_MENU_ICONS: Final = {
    "disk": "Save",
    "seek-start": "Prev",
    "stop": "Stop",
    "play": "Play",
    "seek-end": "Next",
    "zoomin": "Zoom In",
    "zoomout": "Zoom Out",
}


@solves("click-menu-2")
async def click_menu_item(agent: Agent) -> None:
    names = agent.quoted()
    if len(names) < 2:
        raise GaveUpError("the goal shows an icon, whose picture the text does not tell")
    await agent.press_button("Menu")
    wanted = names[1]
    if wanted in ("Zoom In", "Zoom Out", "Prev", "Stop", "Play", "Next"):
        # Those below an entry open when it is pointed at.
        for parent in ("Playback", "Zoom"):
            if agent.scene.all("menuitem", wanted):
                break
            for item in agent.scene.all("menuitem"):
                if not item.name.startswith(parent):
                    continue
                await agent.act("hover", ref=item.ref)
                await agent.act("noop", milliseconds=500)
    await agent.click(await agent.appears("menuitem", wanted))


@solves("click-scroll-list", "choose-list")
async def select_options(agent: Agent) -> None:
    text = agent.match(r"Select (.*) from the (?:scroll )?list")[0]
    box = agent.scene.one("listbox|combobox")
    names = text.split(", ") if box.role == "listbox" else [text]
    await agent.act("select_option", ref=box.ref, options=names)
    await agent.press_button()


@solves("click-pie", "click-pie-nodelay")
async def click_pie(agent: Agent) -> None:
    wanted = agent.quoted()[0]
    middle = agent.scene.all("text", "+")[-1]
    await agent.point(*middle.middle)
    label = await agent.wait_until(lambda scene: _opened_slice(scene, wanted, agent), seconds=4)
    await agent.point(*label.middle)


def _opened_slice(scene: Scene, wanted: str, agent: Agent) -> Node | None:
    labels = [each for each in scene.all("text", wanted) if each.box and each.box.height > 5 and _is_still(each, agent)]
    return labels[-1] if labels else None


@solves("navigate-tree")
async def navigate_tree(agent: Agent) -> None:
    wanted = agent.quoted()[0]
    opened: set[str] = set()
    for _ in range(30):
        found = agent.scene.all("text|generic", wanted)
        if found:
            await agent.click(found[0])
            continue
        closed = [
            node
            for node in agent.scene.all("text|generic")
            if "folder-closed" in node.get("image") and node.ref not in opened
        ]
        if not closed:
            raise GaveUpError("not in the tree")
        opened.add(closed[0].ref)
        await agent.click(closed[0])


@solves("focus-text", "focus-text-2")
async def focus_field(agent: Agent) -> None:
    found = re.search(r"(\d+)(?:st|nd|rd|th)", agent.goal)
    await agent.click(agent.scene.all("textbox")[ordinal(found[0]) if found else 0])


@solves("odd-or-even")
async def odd_or_even(agent: Agent) -> None:
    for number in agent.scene.all("text", where=lambda node: re.fullmatch(r"-?\d+", node.name) is not None):
        wanted = "Even" if int(number.name) % 2 == 0 else "Odd"
        assert number.box is not None
        top = number.box.y
        buttons = agent.scene.all("button", wanted)
        await agent.click(next(node for node in buttons if node.box is not None and abs(node.box.y - top) < 12))
    await agent.press_button()


@solves("ascending-numbers")
async def click_in_order(agent: Agent) -> None:
    numbers = agent.scene.all("text|generic", where=lambda node: node.name.isdigit())
    for node in sorted(numbers, key=lambda node: int(node.name)):
        await agent.point(*node.middle)


@solves("buy-ticket")
async def buy_ticket(agent: Agent) -> None:
    wanted = agent.match(r"the (cheapest|shortest|longest|most expensive)")[0]
    tickets = []
    for button in agent.scene.all("button"):
        price = int(button.name.rpartition("$")[2])
        assert button.parent is not None
        time = next(node.name for node in button.parent.below() if re.fullmatch(r"\d+h \d+m", node.name))
        hours, minutes = re.findall(r"\d+", time)
        tickets.append((price, int(hours) * 60 + int(minutes), button))
    by_price = wanted in ("cheapest", "most expensive")
    chosen = sorted(tickets, key=lambda ticket: ticket[0] if by_price else ticket[1])
    await agent.click(chosen[0 if wanted in ("cheapest", "shortest") else -1][2])


@solves("phone-book")
async def phone_book(agent: Agent) -> None:
    name, what = agent.match(r"Find (\S+) in the contact book and click on their (.*)\.")
    label = {"phone number": "Phone:", "email": "Email:", "address": "Address:"}[what.strip()]
    for _ in range(20):
        if agent.scene.one("heading").name == name:
            await agent.click(agent.scene.after(agent.scene.one("text", label), "generic|link"))
        await agent.click(agent.scene.one("link", ">"))


@solves("generate-number")
async def generate_number(agent: Agent) -> None:
    for _ in range(60):
        await agent.press_button("Generate")
        shown = int(agent.scene.one("text", where=lambda node: re.fullmatch(r"-?\d+", node.name) is not None).name)
        if _fits(agent.goal, shown):
            await agent.press_button()


def _fits(goal: str, number: int) -> bool:
    if found := re.search(r"(?:greater|larger|more) than (-?\d+)", goal):
        return number > int(found[1])
    if found := re.search(r"(?:less|smaller|lower) than (-?\d+)", goal):
        return number < int(found[1])
    if "even" in goal:
        return number % 2 == 0
    return number % 2 == 1


@solves("find-greatest")
async def find_greatest(agent: Agent) -> None:
    cards = agent.scene.all("generic", where=lambda node: node.box is not None and node.box.height > 50)
    seen: list[tuple[int, int]] = []
    for index, card in enumerate(cards):
        await agent.point(*card.middle)
        number = agent.scene.one("text|generic", where=lambda node: node.name.isdigit())
        seen.append((int(number.name), index))
    await agent.point(*cards[max(seen)[1]].middle)
    await agent.press_button()


@solves("order-food")
async def order_food(agent: Agent) -> None:
    if "one of each item" in agent.goal:
        wanted = [(name.strip(), 1) for name in agent.match(r"item: (.*)$")[0].split(",")]
    else:
        wanted = _by_kind(agent)
    for name, count in wanted:
        for _ in range(count):
            row = next(node for node in agent.scene.all("text") if node.name.strip() == name)
            assert row.parent is not None
            plus = next(node for node in row.parent.below() if node.name == "+")
            await agent.click(plus)
    await agent.click(agent.scene.all("button")[-1])


def _by_kind(agent: Agent) -> list[tuple[str, int]]:
    count, kind = agent.match(r"(\d+) items? that (?:is|are) (.*?)\.?$")
    kind = kind.strip().lower().replace(" ", "-")
    rows: list[str] = []
    for image in agent.scene.all("img", where=lambda node: node.name == kind):
        assert image.parent is not None
        rows.append(next(node.name for node in image.parent.below() if node.role == "text" and len(node.name) > 2))
    return [(rows[0], int(count))]


@solves("search-engine")
async def search_engine(agent: Agent) -> None:
    words, wanted = agent.quoted()[0], ordinal(agent.match(r"the (\d+)\w\w search result")[0])
    await agent.fill(agent.scene.one("textbox"), words)
    await agent.press_button("Search")
    for _ in range(10):
        links = _results(agent.scene)
        if wanted < len(links):
            await agent.click(links[wanted])
        wanted -= len(links)
        await agent.click(agent.scene.one("link|generic", ">"))


def _results(scene: Scene) -> list[Node]:
    return scene.all(
        "link|generic", where=lambda node: bool(node.name) and node.name not in "<>" and not node.name.isdigit()
    )


@solves("tic-tac-toe")
async def tic_tac_toe(agent: Agent) -> None:
    fields = agent.scene.all("generic|text", where=lambda node: node.box is not None and 30 < node.box.width < 60)[:9]
    places = [field.middle for field in fields]
    for _ in range(5):
        marks = tuple(_mark(agent.scene, place) for place in places)
        free = max((index for index, mark in enumerate(marks) if not mark), key=lambda index: _worth(marks, index))
        await agent.point(*places[free])


_LINES: Final = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def _has_won(marks: tuple[str, ...], mark: str) -> bool:
    return any(all(marks[each] == mark for each in line) for line in _LINES)


def _worth(marks: tuple[str, ...], index: int) -> float:
    """How good it is to put an X there, against one who plays at random half of the time and well otherwise."""
    after = (*marks[:index], "X", *marks[index + 1 :])
    if _has_won(after, "X"):
        return 1.0
    answers = []
    for answer in (place for place, mark in enumerate(after) if not mark):
        answered = (*after[:answer], "O", *after[answer + 1 :])
        if _has_won(answered, "O"):
            answers.append(-1.0)
        else:
            answers.append(max((_worth(answered, mine) for mine, mark in enumerate(answered) if not mark), default=0.0))
    if not answers:
        return 0.0
    return 0.5 * sum(answers) / len(answers) + 0.5 * min(answers)


def _mark(scene: Scene, place: tuple[float, float]) -> str:
    for node in scene.all("generic|text"):
        box = node.box
        if box and box.x <= place[0] <= box.right and box.y <= place[1] <= box.bottom and box.width < 60:
            said = node.name.upper() or node.get("image").upper()
            if "X" in said:
                return "X"
            if "O" in said:
                return "O"
    return ""


@solves("sign-agreement")
async def sign_agreement(agent: Agent) -> None:
    names = agent.quoted()
    if len(names) < 2:
        await agent.press_button("Cancel")
        return
    name, button = names
    text = agent.scene.all("textbox")[0]
    await agent.act("scroll", ref=text.ref, delta_y=100_000)
    field = await agent.wait_until(
        lambda scene: scene.one("textbox", where=lambda node: node.ref != text.ref and "disabled" not in node)
    )
    await agent.fill(field, name)
    await agent.press_button(button)


@solves("social-media", "social-media-all", "social-media-some")
async def social_media(agent: Agent) -> None:
    user = agent.match(r"(@\w+)")[0]
    wanted = agent.quoted()[0]
    posts = [node.parent for node in agent.scene.all("text|generic", user) if node.parent is not None]
    if "For the user" in agent.goal:
        await _press_in_post(agent, posts[0], user, wanted)
        return
    count = len(posts) if " all " in agent.goal else int(agent.match(r"on (\d+) posts?")[0])
    for post in posts[:count]:
        await _press_in_post(agent, post, user, wanted)
    await agent.press_button()


_MORE: Final = ("Share via DM", "Copy link to Tweet", "Embed Tweet", "Mute", "Block", "Report")


async def _press_in_post(agent: Agent, post: Node, user: str, wanted: str) -> None:
    image = {"Reply": "reply", "Retweet": "retweet", "Like": "like", "Share": "share"}.get(wanted)
    inside = list(post.below())
    if image is not None:
        await agent.hover_and_click(next(node for node in inside if node.get("image").startswith(image)))
        return
    await agent.hover_and_click(next(node for node in inside if node.get("image").startswith("more")))
    entries = agent.scene.all("text|generic|listitem", where=lambda node: node.name in (wanted, f"{wanted} {user}"))
    await agent.click(entries[0])
