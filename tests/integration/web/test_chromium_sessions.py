"""Real Chromium, local pages: what a session sees and does, and what pages may do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chromium import LONG_TEST_SECONDS, ChromiumWorld, SharedWorld, Site, play, ref_of, shared_world

from homing.web.base import ProcessMark
from homing.web.chromium.browser import kind_of
from homing.web.chromium.rules import NavigationRules
from homing.web.errors import (
    BrowserLostError,
    InvalidActionError,
    NoBrowserError,
    PageCrashedError,
    PageUnresponsiveError,
    SessionConflictError,
    SessionLostError,
    StaleRefError,
    WebError,
)
from homing.web.processes import end, is_running, is_stopped
from homing.web.replay import find_recording, replay_page

FORM = """<title>Form</title><h1>Sign up</h1><label>Name <input id=name></label>
<select aria-label=Size><option>small<option>large</select><input type=checkbox aria-label=Agree>
<button onclick="window.reward = (document.getElementById('name').value === 'Ann'
  && document.querySelector('select').value === 'large' && document.querySelector('[type=checkbox]').checked) ? 1 : 0">
Send</button>"""


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedWorld]:
    # A busy machine needs its time to lay a huge page out.
    with shared_world(reset_seconds=80.0) as found:
        yield found


def test_a_session_looks_acts_and_is_rewarded(shared: SharedWorld) -> None:
    async def script(world: ChromiumWorld) -> None:
        seen = await world.seed("s", "/form")
        assert seen.title == "Form"
        assert seen.url == world.url("/form")
        assert 'heading "Sign up"' in seen.axtree
        assert seen.tabs[0].active
        await world.step("s", {"action": "fill", "ref": ref_of(seen, "Name"), "value": "Ann"})
        await world.step("s", f"select_option('{ref_of(seen, 'Size')}', 'large')")
        result = await world.step("s", {"action": "check", "bid": ref_of(seen, "Agree")})
        assert "checked" in result.observation.axtree
        assert not result.terminated
        result = await world.click("s", "Send")
        assert (result.reward, result.terminated) == (1.0, True)
        assert (await world.manager.evaluate("s")).reward == 1.0
        with pytest.raises(SessionConflictError):
            await world.step("s", "noop()")

    shared.play({"/form": FORM}, script)


def test_a_ref_is_good_for_the_last_observation_only(shared: SharedWorld) -> None:
    async def script(world: ChromiumWorld) -> None:
        seen = await world.seed("s", "/form")
        old = ref_of(seen, "Send")
        result = await world.step("s", {"action": "goto", "url": world.url("/other")})
        assert result.execution_ok
        with pytest.raises(StaleRefError):
            await world.step("s", {"action": "click", "ref": old})
        with pytest.raises(StaleRefError):
            await world.step("s", {"action": "noop", "observation_id": seen.observation_id})
        # The session is as it was.
        latest = (await world.manager.observe("s")).observation_id
        assert (await world.step("s", {"action": "noop", "observation_id": latest})).execution_ok

    # As many nodes as the page before: a number that were given again would name one of them.
    shared.play({"/form": FORM, "/other": "<h1>Other</h1>" + "<button>Send</button>" * 30}, script)


def test_what_the_last_observation_does_not_show_has_no_ref(shared: SharedWorld) -> None:
    pages = {
        "/": "<button onclick='b.hidden = !b.hidden'>Toggle</button><button id=b onclick='reward = 1'>Other</button>"
    }

    async def script(world: ChromiumWorld) -> None:
        seen = await world.seed("s", "/")
        other = ref_of(seen, "Other")
        await world.click("s", "Toggle")
        with pytest.raises(StaleRefError):
            await world.step("s", {"action": "click", "ref": other})
        # Shown again it has the number it had.
        result = await world.click("s", "Toggle")
        assert ref_of(result.observation, "Other") == other
        assert (await world.step("s", {"action": "click", "ref": other})).reward == 1.0

    shared.play(pages, script)


@pytest.mark.parametrize(
    "action",
    [
        {"action": "click"},
        {"action": "click", "ref": "nonsense"},
        {"action": "fly"},
        {"action": "tab_focus", "index": 7},
        {"ref": "e1"},
        "click('e1'",
        "__import__('os').system('true')",
        {"action": "upload_file", "ref": "e1", "files": "/etc/passwd"},
        {"action": "click", "ref": "e" + "9" * 500},
        "x" * 300_000,
    ],
    ids=str,
)
def test_an_action_that_cannot_be_read_is_refused_before_the_page_is_touched(action: object) -> None:
    from homing.web.actions import read_action
    from homing.web.chromium.hands import number_of

    with pytest.raises(InvalidActionError):
        command = read_action(action)  # type: ignore[arg-type]
        # What only the page can tell: which tabs there are.
        number_of(command.arguments.get("ref", "?"))


def test_dialogs_are_answered_and_shown_and_hold_nothing_up(shared: SharedWorld) -> None:
    pages = {
        "/": "<button onclick=\"alert('hello')\">Alert</button>"
        "<button onclick=\"this.textContent = 'said ' + prompt('who?')\">Ask</button>",
        "/loud": "<script>alert('at once')</script><h1>Loaded</h1>",
        "/leaving": "<button>Stay</button><script>onbeforeunload = (e) => { e.preventDefault(); return 'x' }</script>",
    }

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/")
        result = await world.click("s", "Alert")
        assert (result.observation.dialog.kind, result.observation.dialog.message) == ("alert", "hello")
        assert result.observation.dialog.handled == "dismissed"
        await world.step("s", {"action": "handle_dialog", "accept": True, "prompt_text": "Ann"})
        result = await world.click("s", "Ask")
        assert result.observation.dialog.handled == "accepted"
        assert "said Ann" in result.observation.axtree
        # An alert while the page loads does not use up the navigation's time.
        result = await world.step("s", {"action": "goto", "url": world.url("/loud")})
        assert (result.execution_ok, result.observation.dialog.message) == (True, "at once")
        assert "Loaded" in result.observation.axtree
        await world.step("s", {"action": "goto", "url": world.url("/leaving")})
        await world.click("s", "Stay")
        result = await world.step("s", {"action": "goto", "url": world.url("/")})
        assert result.execution_ok
        assert result.observation.url == world.url("/")

    shared.play(pages, script)


def test_new_tabs_are_known_active_and_closed_with_the_session(shared: SharedWorld) -> None:
    pages = {
        "/": "<a href=/two target=_blank>Open</a>",
        "/two": "<title>Two</title><h1>Two</h1>",
    }

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/")
        await world.click("s", "Open")
        seen = (await world.step("s", {"action": "wait_for", "text": "Two"})).observation
        assert [tab.active for tab in seen.tabs] == [False, True]
        assert seen.title == "Two"
        back = (await world.step("s", {"action": "tab_focus", "index": 0})).observation
        assert back.url == world.url("/")
        closed = (await world.step("s", {"action": "tab_close"})).observation
        assert [tab.title for tab in closed.tabs] == ["Two"]
        with pytest.raises(InvalidActionError):
            await world.step("s", {"action": "tab_focus", "index": 5})
        last = (await world.step("s", {"action": "tab_close"})).observation
        assert [tab.url for tab in last.tabs] == ["about:blank"]

    shared.play(pages, script)


def test_a_page_that_closes_itself_leaves_a_session_with_an_empty_page(shared: SharedWorld) -> None:
    pages = {
        "/": "<a href=/self target=_blank>Open</a> <a href=/opener target=_blank>Open the opener</a>",
        "/self": "<button onclick='window.close()'>Close me</button>",
        "/opener": "<button onclick=\"window.open('/two'); window.close()\">Open and leave</button>",
        "/two": "<h1>Two</h1>",
    }

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/")
        await world.click("s", "Open")
        await world.step("s", {"action": "wait_for", "text": "Close me"})
        result = await world.click("s", "Close me")
        seen = result.observation if len(result.observation.tabs) == 1 else await world.manager.observe("s")
        assert seen.url == world.url("/")
        # One that opens another and closes itself at once leaves that other one active.
        await world.click("s", "Open the opener")
        await world.step("s", {"action": "wait_for", "text": "Open and leave"})
        await world.click("s", "Open and leave")
        result = await world.step("s", {"action": "wait_for", "text": "Two"})
        assert result.execution_ok
        assert [tab.url for tab in result.observation.tabs] == [world.url("/"), world.url("/two")]

    shared.play(pages, script)


def test_downloads_are_shown_and_leave_with_the_session(shared: SharedWorld) -> None:
    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
            b"content-disposition: attachment; filename=report.bin\r\nconnection: close\r\n\r\n"
        )
        while True:
            writer.write(b"x" * 1024)
            await writer.drain()
            await asyncio.sleep(0.05)

    async def short(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 3\r\n"
            b"content-disposition: attachment; filename=report.bin\r\nconnection: close\r\n\r\nabc"
        )

    pages = {"/": "<a href=/endless>Long</a> <a href=/short>Short</a>", "/endless": endless, "/short": short}

    async def script(world: ChromiumWorld) -> None:
        await world.seed("a", "/")
        await world.seed("b", "/")
        for session in ("a", "b"):
            await world.click(session, "Short")
            while not (seen := await world.manager.observe(session)).downloads or seen.downloads[0].status == "started":
                await asyncio.sleep(0.02)
            assert (seen.downloads[0].name, seen.downloads[0].status, seen.downloads[0].size_bytes) == (
                "report.bin", "complete", 3,
            )  # fmt: skip
        await world.click("a", "Long")
        while len((seen := await world.manager.observe("a")).downloads) < 2:
            await asyncio.sleep(0.02)
        assert seen.downloads[1].status == "started"
        folder = world.provider._browsers[0].folder
        context = world.held("a").context
        assert await world.manager.close_session("a")
        assert [each.status for each in context.downloads()] == ["complete", "cancelled"]
        assert await world.manager.close_session("b")
        assert list(folder.iterdir()) == []

    shared.play(pages, script)


def test_a_file_chooser_is_shown_and_blocks_nothing_and_files_come_from_the_request(shared: SharedWorld) -> None:
    pages = {
        "/": "<input type=file id=f aria-label=File><button onclick=document.getElementById('f').click()>Pick</button>"
        "<p id=p></p><script>f.onchange = async () => { p.textContent = f.files[0].name + ' ' + await f.files[0].text() }"
        "</script>"
    }

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/")
        await world.click("s", "Pick")
        while not (seen := await world.manager.observe("s")).file_chooser:
            await asyncio.sleep(0.02)
        assert (await world.step("s", "noop()")).execution_ok
        result = await world.step(
            "s",
            {
                "action": "upload_file",
                "ref": ref_of(seen, "Pick"),
                "files": [{"name": "../../a.txt", "text": "hello"}],
            },
        )
        assert result.execution_ok, result.observation.last_action_error
        result = await world.step("s", {"action": "wait_for", "text": "a.txt hello"})
        assert result.execution_ok
        assert not result.observation.file_chooser

    shared.play(pages, script)


def test_what_covers_an_element_is_named_and_a_moving_one_is_hit(shared: SharedWorld) -> None:
    pages = {
        "/": "<button onclick='reward=1' style='position:absolute;left:20px;top:20px'>Under</button>"
        "<div id=glass style='position:absolute;inset:0;background:#0003'>Please wait</div>",
        "/moving": """<button id=b onclick='reward=1' style='position:absolute;top:20px'>Catch</button><script>
            let x = 0; setInterval(() => { x = (x + 3) % 400; b.style.left = x + 'px' }, 16)</script>""",
    }

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/")
        result = await world.click("s", "Under")
        assert not result.execution_ok
        assert result.observation.last_action_error == 'the element is covered by <div id="glass"> "Please wait"'
        await world.seed("m", "/moving")
        for _ in range(10):
            result = await world.click("m", "Catch")
            if result.terminated:
                break
        assert result.reward == 1.0

    shared.play(pages, script)


def test_a_huge_page_is_cut_at_a_stated_size_with_a_mark(shared: SharedWorld) -> None:
    pages = {
        "/": "<style>button { display: block }</style><body><script>for (let i = 0; i < 100; i++) {"
        "const f = document.createElement('iframe'); f.srcdoc = '<p>inner ' + i; document.body.append(f) }"
        "onload = () => document.body.insertAdjacentHTML('afterbegin', Array.from({ length: 50000 },"
        "(_, i) => `<button>node ${i}</button>`).join(''))</script>"
    }

    async def script(world: ChromiumWorld) -> None:
        seen = await world.seed("s", "/", observation_profile="characters=20000")
        assert len(seen.axtree) < 20_100
        assert seen.axtree.splitlines()[-1].startswith("(cut here: ")
        assert "axtree" in seen.truncated

    shared.play(pages, script)


# --- faults ---

SPIN = "<button onclick='while (true) {}'>Spin</button>"


def test_an_endless_loop_ends_the_step_at_its_deadline_and_disturbs_no_neighbour() -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("spinning", "/spin")
        await world.seed("neighbour", "/ok")
        renderers = world.renderers("spinning")
        loop = asyncio.get_running_loop()
        began = loop.time()
        stuck = asyncio.create_task(world.click("spinning", "Spin"))
        answered = 0
        while not stuck.done():
            assert (await world.step("neighbour", "noop()")).execution_ok
            answered += 1
        with pytest.raises(PageUnresponsiveError):
            await stuck
        assert loop.time() - began < 30.0
        assert answered > 1
        assert await world.manager.close_session("spinning")
        assert not [each for each in renderers if is_running(each)]
        assert (await world.step("neighbour", "noop()")).execution_ok

    play({"/spin": SPIN, "/ok": "<p>fine</p>"}, script, operation_seconds=3.0)


def test_more_hung_pages_than_there_are_cores_hold_up_no_neighbour_for_long() -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("neighbour", "/ok")
        for number in range(3):
            await world.seed(f"s{number}", "/spin")
        stuck = [asyncio.create_task(world.click(f"s{number}", "Spin")) for number in range(3)]
        answered = 0
        while not all(task.done() for task in stuck):
            answered += (await world.step("neighbour", "noop()")).execution_ok
        assert answered >= 1
        outcomes = await asyncio.gather(*stuck, return_exceptions=True)
        assert all(isinstance(outcome, PageUnresponsiveError) for outcome in outcomes), outcomes

    play({"/spin": SPIN, "/ok": "<p>fine</p>"}, script, operation_seconds=8.0, operations_at_once=2)


def test_a_killed_renderer_fails_the_step_at_once_and_is_no_reward(shared: SharedWorld) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("a", "/form", observation_profile="screenshot")
        await world.seed("b", "/form")
        end(world.renderers("a"), 2.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(PageCrashedError):
            await world.step("a", "noop()")
        assert loop.time() - began < 2.0
        with pytest.raises(WebError) as failure:
            await world.manager.evaluate("a")
        assert isinstance(failure.value, SessionLostError | SessionConflictError | PageCrashedError)
        assert world.tasks.evaluated == 0
        assert (await world.step("b", "noop()")).execution_ok

    shared.play({"/form": FORM}, script)


def test_a_page_that_crashed_is_replaced_where_the_task_says_so(shared: SharedWorld) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form", runtime_profile="after_crash=new_page")
        end(world.renderers("s"), 2.0)
        result = await world.step("s", "noop()")
        assert (result.execution_ok, result.reward, result.terminated) == (False, None, False)
        assert "ended" in result.observation.last_action_error
        assert [tab.url for tab in result.observation.tabs] == ["about:blank"]
        assert (await world.step("s", {"action": "goto", "url": world.url("/form")})).observation.title == "Form"
        with pytest.raises(WebError) as failure:
            await world.manager.evaluate("s")
        assert failure.value.error_kind == "evaluator_infrastructure"

    shared.play({"/form": FORM}, script)


def test_a_killed_browser_fails_each_session_definitely_and_the_next_one_gets_another() -> None:
    async def script(world: ChromiumWorld) -> None:
        for name in ("stepping", "stepping too", "evaluating", "evaluating too", "idle", "closing", "closing too"):
            await world.seed(name, "/form")
        browser = world.provider._browsers[0]
        under_way = [
            asyncio.create_task(world.step("stepping", "noop(3000)")),
            asyncio.create_task(world.step("stepping too", "noop(3000)")),
            asyncio.create_task(world.manager.evaluate("evaluating")),
            asyncio.create_task(world.manager.evaluate("evaluating too")),
            asyncio.create_task(world.manager.close_session("closing")),
            asyncio.create_task(world.manager.close_session("closing too")),
            asyncio.create_task(world.seed("seeding", "/form")),
        ]
        await browser.kill()
        outcomes = await asyncio.gather(*under_way, return_exceptions=True)
        assert isinstance(outcomes[0], BrowserLostError)
        for outcome in outcomes[1:]:
            assert not isinstance(outcome, BaseException) or isinstance(outcome, WebError), outcome
        # A verdict is one that the page gave, and there is none for a browser that went before it could.
        given = [outcome for outcome in outcomes[2:4] if not isinstance(outcome, BaseException)]
        assert len(given) <= world.tasks.evaluated
        with pytest.raises(WebError):
            await world.step("idle", "noop()")
        assert (await world.seed("after", "/form")).title == "Form"
        assert world.provider.launched >= 2
        while not world.provider._warm:
            await asyncio.sleep(0.02)  # what is kept ready is ready again

    play({"/form": FORM}, script, local={"warm": 1}, operations_at_once=8)


def test_a_stopped_renderer_is_gone_when_its_session_is_closed(shared: SharedWorld) -> None:
    import os
    import signal

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        (renderer,) = world.renderers("s")
        os.kill(renderer.pid, signal.SIGSTOP)
        assert await world.manager.close_session("s")
        assert not is_running(renderer)

    shared.play({"/form": FORM}, script)


def test_a_stopped_browser_is_ended_within_its_deadline() -> None:
    import os
    import signal

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        browser = world.provider._browsers[0]
        assert browser.process is not None
        processes = world.browser_processes()
        os.kill(browser.process.pid, signal.SIGSTOP)
        began = asyncio.get_running_loop().time()
        assert await world.manager.close_session("s")
        assert asyncio.get_running_loop().time() - began < 10.0
        assert not [each for each in processes if is_running(each)]
        assert (await world.seed("t", "/form")).title == "Form"

    play({"/form": FORM}, script)


def test_where_there_is_no_browser_a_seed_says_so_and_leaves_nothing() -> None:
    async def script(world: ChromiumWorld) -> None:
        for _ in range(2):
            with pytest.raises(NoBrowserError, match="/nowhere/chromium, does not exist") as refusal:
                await world.seed("s", "/form")
            assert (refusal.value.status, refusal.value.error_kind) == (503, "capacity_unavailable")
            assert not refusal.value.retryable
            assert "/nowhere" not in refusal.value.shown
            while not await world.manager.can_retry_seed("s"):
                await asyncio.sleep(0.01)
        assert not world.manager.ledger
        assert "/nowhere/chromium, does not exist" in (await world.manager.health())["browser_provider"]["last_error"]

    play({"/form": FORM}, script, local={"executable": "/nowhere/chromium"})


def test_a_killed_driver_loses_its_sessions_and_is_replaced() -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        driver = world.provider._driver
        assert driver is not None
        assert driver.process is not None
        end([driver.process], 2.0)
        with pytest.raises(WebError):
            await world.step("s", "noop()")
        assert (await world.seed("t", "/form")).title == "Form"

    play({"/form": FORM}, script)


def test_a_stopped_driver_is_ended_and_replaced_for_the_next_session() -> None:
    import os
    import signal

    async def stop_driver(world: ChromiumWorld) -> list[ProcessMark]:
        driver = world.provider._driver
        assert driver is not None
        assert driver.process is not None
        processes = [driver.process, *world.browser_processes()]
        os.kill(driver.process.pid, signal.SIGSTOP)
        while not driver.is_held:
            await asyncio.sleep(0.005)  # the signal has reached it
        return processes

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        stopped = await stop_driver(world)
        assert (await world.seed("t", "/form")).title == "Form"
        # And one that is seen to be held only after it was asked for a page.
        seeding = asyncio.create_task(world.seed("u", "/form"))
        (browser,) = [each for each in world.provider._browsers if each.is_running]
        while not browser._making.locked():
            await asyncio.sleep(0)
        stopped += await stop_driver(world)
        assert (await seeding).title == "Form"
        for session in ("s", "t"):
            assert await world.manager.close_session(session)
        assert not [each for each in stopped if is_running(each)]
        assert world.provider.launched == 3

    # Less than a context may take: it is not the end of that time that tells.
    play({"/form": FORM}, script, acquire_seconds=19.0)


def test_a_browser_with_a_stopped_part_gets_no_session_and_those_behind_do_not_wait_for_it_in_turn() -> None:
    import os
    import signal

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        zygotes = [each for each in world.browser_processes() if kind_of(each) == "zygote"]
        assert zygotes
        for zygote in zygotes:
            os.kill(zygote.pid, signal.SIGSTOP)
        while not all(is_stopped(zygote) for zygote in zygotes):
            await asyncio.sleep(0.005)  # the signal has reached them
        seeds = await asyncio.gather(*(world.seed(f"t{n}", "/form") for n in range(3)))
        assert [seed.title for seed in seeds] == ["Form"] * 3
        assert await world.manager.close_session("s")
        assert world.provider.launched == 2

    play({"/form": FORM}, script, acquire_seconds=20.0)


def test_a_session_with_a_browser_of_its_own_takes_it_along() -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("a", "/form")
        await world.seed("b", "/form")
        assert len(world.provider._browsers) == 2
        footprint = world.held("a").footprint
        assert await world.manager.close_session("a")
        assert not [each for each in footprint.processes if is_running(each)]
        assert not [folder for folder in footprint.folders if folder.exists()]
        assert (await world.step("b", "noop()")).execution_ok

    play({"/form": FORM}, script, local={"isolation": "browser"})


def test_an_endless_load_ends_at_the_navigations_time(shared: SharedWorld) -> None:
    async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<h1>Half")
        await writer.drain()
        await asyncio.sleep(60)

    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        result = await world.step("s", {"action": "goto", "url": world.url("/never")})
        assert not result.execution_ok
        assert "had not loaded" in result.observation.last_action_error
        assert (await world.step("s", {"action": "goto", "url": world.url("/form")})).observation.title == "Form"

    shared.play({"/form": FORM, "/never": never}, script)


def test_a_browser_that_has_served_enough_is_replaced_without_touching_a_live_session() -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("stays", "/form")
        first = world.provider._browsers[0]
        for number in range(4):
            await world.seed(f"s{number}", "/form")
            assert await world.manager.close_session(f"s{number}")
        assert world.provider.launched >= 2
        assert first.is_retired
        assert (await world.step("stays", "noop()")).execution_ok
        assert await world.manager.close_session("stays")
        assert first not in world.provider._browsers

    play({"/form": FORM}, script, local={"sessions_per_browser": 3})


def test_a_browser_that_has_grown_too_large_takes_no_more_sessions() -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("stays", "/form")
        first = world.provider._browsers[0]
        for number in range(10):
            await world.seed(f"s{number}", "/form")
            assert await world.manager.close_session(f"s{number}")
        assert first.is_retired
        assert (await world.step("stays", "noop()")).execution_ok

    play({"/form": FORM}, script, local={"memory_bytes": 1})


@pytest.mark.long
@pytest.mark.timeout(900)
def test_five_hundred_sessions_leave_a_browser_as_large_as_it_was() -> None:
    async def script(world: ChromiumWorld) -> None:
        async def some(count: int) -> tuple[int, int]:
            for number in range(count):
                await world.seed(f"s{number}", "/form")
                assert await world.manager.close_session(f"s{number}")
            browser = world.provider._browsers[0]
            return await browser.memory_bytes(), len(world.browser_processes())

        after_few = await some(20)
        after_many = await some(500)
        assert world.provider.launched == 1
        assert after_many[1] <= after_few[1] + 1
        assert after_many[0] <= after_few[0] * 1.5

    play({"/form": FORM}, script, local={"sessions_per_browser": 10_000}, seconds=LONG_TEST_SECONDS)


# --- recordings ---


def test_a_crashed_session_has_a_recording_and_its_page(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        await world.click("s", "Agree")
        await world.step("s", "noop(300)")
        end(world.renderers("s"), 2.0)
        with pytest.raises(PageCrashedError):
            await world.step("s", "noop()")
        await world.manager.close_session("s")
        artifacts = await world.manager.recording_artifacts("s")
        names = {artifact.uri.rpartition("/")[2] for artifact in artifacts}
        assert {"events.jsonl", "session.json"} <= names
        # A picture is what the browser has shown by then: a quick step may have none of its own.
        assert any(re.fullmatch(r"step-000[123]\.jpg", name) for name in names)
        assert all(artifact.status == "complete" and artifact.size_bytes > 0 for artifact in artifacts)

    play({"/form": FORM}, script, recordings=tmp_path)
    recorded = find_recording(tmp_path, "s")
    page = replay_page(recorded)
    assert "page_crashed" in page
    assert "data:image/jpeg;base64," in page
    assert "<script" not in page
    assert recorded.reward is None


def test_a_recording_that_cannot_be_written_fails_no_session(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/form")
        folder = world.manager._get("s").recording.folder
        # Whether or not it is there yet: it is made when the first steps are written, in a thread.
        while not folder.is_file():
            with contextlib.suppress(FileNotFoundError):
                folder.rename(tmp_path / "moved away")
            with contextlib.suppress(IsADirectoryError):
                folder.write_text("in the way")
        assert (await world.step("s", "noop()")).execution_ok
        assert await world.manager.close_session("s")
        assert any(artifact.status == "failed" for artifact in await world.manager.recording_artifacts("s"))

    play({"/form": FORM}, script, recordings=tmp_path)


def test_what_a_page_says_is_text_in_the_replay(tmp_path: Path) -> None:
    async def script(world: ChromiumWorld) -> None:
        await world.seed("s", "/evil")
        await world.step("s", {"action": "send_msg_to_user", "text": "<script>alert(1)</script>"})
        await world.manager.close_session("s")

    play(
        {"/evil": "<title>&lt;script&gt;alert(1)&lt;/script&gt;</title><h1>&lt;img src=x&gt;</h1>"},
        script,
        recordings=tmp_path,
    )
    page = replay_page(find_recording(tmp_path, "s"))
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;img src=x&gt;" in page
    assert (
        json.loads((tmp_path / find_recording(tmp_path, "s").tag / "session.json").read_text())["task"]["task_id"]
        == "/evil"
    )


def test_a_frame_of_another_origin_is_named_not_read_and_is_reached_by_coordinates() -> None:
    inside = "<title>In</title><body style='margin:0'><button style='width:200px;height:100px' onclick='parent.postMessage(1,\"*\")'>Pay</button>"
    other = Site({"/inside": inside})

    async def script(world: ChromiumWorld) -> None:
        world.site.pages["/page"] = (
            "<title>Out</title><body style='margin:0'><script>onmessage = () => { document.title = 'paid'; }</script>"
            f"<iframe title='pay here' src='{other.origin}/inside' width=300 height=150></iframe>"
        )
        seen = await world.seed("s", "/page", observation_profile="layout,screenshot=jpeg")
        lines = seen.axtree.splitlines()
        (frame,) = [line for line in lines if "] iframe" in line or "pay here" in line]
        assert f"{other.origin}/inside" in frame
        assert any("another origin's frame: not shown" in line for line in lines)
        assert "Pay" not in seen.axtree.replace("pay here", "")
        assert seen.screenshot is not None  # which shows it
        x, y = (int(each) for each in re.search(r"(\d+),(\d+),\d+,\d+", frame).groups())  # type: ignore[union-attr]
        result = await world.step("s", {"action": "mouse_click", "x": x + 100, "y": y + 50})
        for _ in range(100):
            if result.observation.title == "paid":
                break
            result = await world.step("s", {"action": "noop", "milliseconds": 50})
        assert result.observation.title == "paid"

    async def around(world: ChromiumWorld) -> None:
        await other.start()
        try:
            await script(world)
        finally:
            await other.aclose()

    rules = NavigationRules(private=True)
    play({"/page": ""}, around, rules=rules)
