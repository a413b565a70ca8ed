from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.web.actions import ACTIONS, Command, observation_named, read_action
from homing.web.errors import InvalidActionError


@pytest.mark.parametrize(
    ("call", "json"),
    [
        ("click('e12')", {"action": "click", "ref": "e12"}),
        ("click('e12')", {"action": "click", "bid": "e12"}),
        ("click('e12', button='middle')", {"action": "click", "ref": "e12", "button": "middle"}),
        ("click(bid='e12', modifiers=['Shift'])", {"action": "click", "ref": "e12", "modifiers": ["Shift"]}),
        ("fill('e3', 'a (b) \\'c\\'')", {"action": "fill", "ref": "e3", "value": "a (b) 'c'"}),
        ("noop()", {"action": "noop"}),
        ("noop(500)", {"action": "noop", "wait_ms": 500}),
        ("mouse_click(-1.5, 20)", {"action": "mouse_click", "x": -1.5, "y": 20}),
        ("select_option('e1', 'red')", {"action": "select_option", "ref": "e1", "options": ["red"]}),
        (
            "select_option('e1', ['red', 'green'])",
            {"action": "select_option", "ref": "e1", "options": ["red", "green"]},
        ),
        ("drag_and_drop('e1', 'e2')", {"action": "drag_and_drop", "from_bid": "e1", "to_bid": "e2"}),
        ("scroll(0, 200)", {"action": "scroll", "delta_x": 0, "delta_y": 200}),
        ("press('e1', 'Control+a')", {"action": "press", "ref": "e1", "key_comb": "Control+a"}),
        ("goto('http://a.example')", {"action": "goto", "url": "http://a.example"}),
        ("send_msg_to_user('done')", {"action": "send_msg_to_user", "text": "done"}),
        ("handle_dialog(True)", {"action": "handle_dialog", "accept": True}),
    ],
)
def test_a_call_and_its_json_are_the_same_command(call: str, json: dict[str, object]) -> None:
    assert read_action(call) == read_action({"action": call}) == read_action(json)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "click",
        "click('e1'); click('e2')",
        "click('e1')\nclick('e2')",
        "__import__('os').system('true')",
        "click(open('/etc/passwd').read())",
        "click(f'{1}')",
        "click('e1' + 'e2')",
        "click([x for x in 'ab'])",
        "click(**{'ref': 'e1'})",
        "click(*['e1'])",
        "click('e1', ref='e2')",
        "click('e1', 'left', [], 1, 2, 3)",
        "lambda: 0",
        "(" * 5_000,
        "click(" + "-" * 5_000 + "1)",
        "click(" + "[" * 60 + "]" * 60 + ")",
        "fill('e1', '" + "a" * 300_000 + "')",
        {"action": "click", "ref": "e1", "x": 1, "y": 2},
        {"action": "click", "x": 1},
        {"action": "click", "ref": "e1", "bid": "e1"},
        {"action": "click", "ref": True},
        {"action": "mouse_click", "x": float("nan"), "y": 0},
        {"action": "mouse_click", "x": float("inf"), "y": 0},
        {"action": "mouse_click", "x": True, "y": 0},
        {"action": "noop", "milliseconds": 10**9},
        {"action": "press", "ref": "e1"},
        {"action": "click", "ref": "e1", "button": "fourth"},
        {"action": "click", "ref": "e1", "script": "alert(1)"},
        {"action": "upload_file", "ref": "e1", "files": [{"name": "a", "path": "/etc/passwd"}]},
        {"action": "evaluate", "script": "1"},
        {"action": ["click"]},
        {},
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_is_no_action_is_refused_with_a_short_line(given: object) -> None:
    with pytest.raises(InvalidActionError) as refusal:
        read_action(given)  # type: ignore[arg-type]
    assert len(str(refusal.value)) < 1_000


@given(st.text(max_size=300))
def test_any_text_is_a_command_or_refused(text: str) -> None:
    try:
        command = read_action(text)
    except InvalidActionError:
        return
    assert isinstance(command, Command)
    assert command.name in ACTIONS


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(ACTIONS)),
    st.dictionaries(
        st.sampled_from(["ref", "x", "y", "text", "value", "key", "url", "index", "options", "files"]), values
    ),
)
def test_any_json_is_a_command_or_refused(name: str, arguments: dict[str, object]) -> None:
    try:
        command = read_action({"action": name, **arguments})
    except InvalidActionError:
        return
    assert command.name == name
    assert {parameter.name for parameter in ACTIONS[name] if parameter.required} <= command.arguments.keys()


def test_the_hands_do_every_action_there_is() -> None:
    from homing.web.chromium.hands import Hands

    assert {name.removeprefix("_do_") for name in dir(Hands) if name.startswith("_do_")} == set(ACTIONS)


def test_an_action_may_name_the_observation_it_goes_by() -> None:
    assert observation_named({"action": "noop", "observation_id": "o3"}) == "o3"
    assert observation_named("noop()") is None
    with pytest.raises(InvalidActionError):
        observation_named({"action": "noop", "observation_id": 3})
