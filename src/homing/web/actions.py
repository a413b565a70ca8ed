"""Which action does a step ask for? JSON, or a call as text, read into one form.

One table of actions (`ACTIONS`) is what both readers, the documentation and the tests go by. The names are the field's
common ones (BrowserGym's); an element is named by `ref`, or by `bid`, its other name.

A call as text (`click('e12', button='middle')`) is parsed, and its arguments have to be literals: nothing of it is ever
evaluated. Both readers give the same `Command`, or an `InvalidActionError` that says what is wrong.

Not here: doing it (a backend's).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from homing.web.errors import InvalidActionError
from homing.web.models import Action

MAX_CALL_CHARACTERS: Final = 200_000
_MAX_DEPTH: Final = 20
_SHOWN: Final = 80

Kind: TypeAlias = Literal[
    "ref", "text", "number", "integer", "flag", "texts", "button", "modifiers", "files", "milliseconds"
]

_BUTTONS: Final = ("left", "middle", "right")
_MODIFIERS: Final = ("Alt", "Control", "ControlOrMeta", "Meta", "Shift")
MAX_WAIT_MILLISECONDS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an action.

    Attributes:
        kind: What it may be.
        required: Without it the action cannot be read.
        other_names: As other programs call it.
    """

    name: str
    kind: Kind
    required: bool = True
    other_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """An action that has been read: its arguments by name, those left out absent."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        """As a call, for people; long texts are cut."""
        shown = (f"{name}={_shown(value)}" for name, value in self.arguments.items())
        return f"{self.name}({', '.join(shown)})"


def _ref(name: str = "ref", *others: str, required: bool = True) -> Parameter:
    return Parameter(name, "ref", required, others or ("bid",))


_X: Final = Parameter("x", "number")
_Y: Final = Parameter("y", "number")
_BUTTON: Final = Parameter("button", "button", required=False)
_CLICK: Final = (
    _ref(required=False),
    _BUTTON,
    Parameter("modifiers", "modifiers", required=False),
    Parameter("x", "number", required=False),
    Parameter("y", "number", required=False),
)

ACTIONS: Final[Mapping[str, tuple[Parameter, ...]]] = {
    "noop": (Parameter("milliseconds", "milliseconds", False, ("wait_ms",)),),
    "wait_for": (
        Parameter("text", "text", required=False),
        _ref(required=False),
        Parameter("milliseconds", "milliseconds", False, ("wait_ms", "timeout")),
    ),
    "click": _CLICK,
    "dblclick": _CLICK,
    "hover": (_ref(),),
    "focus": (_ref(),),
    "fill": (
        _ref(),
        Parameter("value", "text", other_names=("text",)),
        Parameter("enable_autocomplete_menu", "flag", required=False),
    ),
    "clear": (_ref(),),
    "press": (_ref(), Parameter("key", "text", other_names=("key_comb",))),
    "keyboard_type": (Parameter("text", "text"),),
    "keyboard_insert_text": (Parameter("text", "text"),),
    "keyboard_press": (Parameter("key", "text", other_names=("key_comb",)),),
    "keyboard_down": (Parameter("key", "text"),),
    "keyboard_up": (Parameter("key", "text"),),
    "select_option": (_ref(), Parameter("options", "texts", other_names=("option", "values", "value"))),
    "check": (_ref(),),
    "uncheck": (_ref(),),
    "select_text": (
        _ref(),
        Parameter("start", "integer", required=False),
        Parameter("end", "integer", required=False),
    ),
    "drag_and_drop": (_ref("from_ref", "from_bid"), _ref("to_ref", "to_bid")),
    "scroll": (
        Parameter("delta_x", "number", False, ("dx",)),
        Parameter("delta_y", "number", False, ("dy",)),
        _ref(required=False),
    ),
    "upload_file": (_ref(), Parameter("files", "files", other_names=("file",))),
    "mouse_move": (_X, _Y),
    "mouse_down": (_X, _Y, _BUTTON),
    "mouse_up": (_X, _Y, _BUTTON),
    "mouse_click": (_X, _Y, _BUTTON),
    "mouse_dblclick": (_X, _Y, _BUTTON),
    "mouse_drag_and_drop": (
        Parameter("from_x", "number"),
        Parameter("from_y", "number"),
        Parameter("to_x", "number"),
        Parameter("to_y", "number"),
    ),
    "goto": (Parameter("url", "text"),),
    "go_back": (),
    "go_forward": (),
    "new_tab": (),
    "tab_focus": (Parameter("index", "integer"),),
    "tab_close": (),
    "handle_dialog": (
        Parameter("accept", "flag"),
        Parameter("prompt_text", "text", required=False),
    ),
    "send_msg_to_user": (Parameter("text", "text", other_names=("message",)),),
    "report_infeasible": (Parameter("reason", "text", other_names=("text",)),),
    "stop": (Parameter("answer", "text", required=False),),
}
"""Every action: its name and its arguments, in the order in which a call gives them."""

_ENVELOPE: Final = frozenset({"action", "observation_id", "raw_model_output"})


def read_action(given: Action) -> Command:
    """The command that an action stands for.

    Args:
        given: `{"action": "click", "ref": "e12"}`, `{"action": "click('e12')"}`, or the call alone.

    Raises:
        InvalidActionError: it cannot be read; says why, and shows what was sent cut short.
    """
    if isinstance(given, str):
        return _read_call(given)
    name = given.get("action")
    if not isinstance(name, str):
        raise InvalidActionError('an action has a name: {"action": "click", "ref": "e12"}')
    if "(" in name:
        if given.keys() - _ENVELOPE:
            raise InvalidActionError("a call as text has its arguments in it; none may stand beside it")
        return _read_call(name)
    return _bound(name, {key: value for key, value in given.items() if key not in _ENVELOPE})


def observation_named(given: Action) -> str | None:
    """The observation that the action says it goes by; None: the last one.

    Raises:
        InvalidActionError: it is no text.
    """
    named = given.get("observation_id") if isinstance(given, dict) else None
    if named is not None and not isinstance(named, str):
        raise InvalidActionError("observation_id has to be the text that the observation has")
    return named


def _read_call(text: str) -> Command:
    if len(text) > MAX_CALL_CHARACTERS:
        raise InvalidActionError(f"the action is longer than {MAX_CALL_CHARACTERS} characters")
    # Deep nesting would use up the parser's stack.
    if _depth(text) > _MAX_DEPTH:
        raise InvalidActionError("the action's brackets are nested too deeply")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidActionError(f"the action is no call such as click('e12'): {_shown(text)}") from error
    if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
        raise InvalidActionError(f"the action is no call such as click('e12'): {_shown(text)}")
    name = parsed.func.id
    parameters = _parameters(name)
    if len(parsed.args) > len(parameters):
        raise InvalidActionError(f"{name} takes {len(parameters)} arguments at most, {len(parsed.args)} were given")
    given: dict[str, Any] = {}
    for parameter, node in zip(parameters, parsed.args, strict=False):
        given[parameter.name] = _literal(name, node)
    for keyword in parsed.keywords:
        if keyword.arg is None:
            raise InvalidActionError(f"{name}: arguments cannot be unpacked")
        if keyword.arg in given:
            raise InvalidActionError(f"{name}: {_shown(keyword.arg)} is given twice")
        given[keyword.arg] = _literal(name, keyword.value)
    return _bound(name, given)


def _depth(text: str) -> int:
    """How deep brackets and runs of signs nest, outside of quotes."""
    deepest = depth = signs = 0
    quote = ""
    escaped = False
    for character in text:
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
            continue
        if character in "'\"":
            quote = character
        signs = signs + 1 if character in "-+~ " else 0
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth + signs)
    return deepest


def _literal(name: str, node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(name, each) for each in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Dict):
        return {
            str(_literal(name, key)): _literal(name, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    raise InvalidActionError(f"{name}: arguments have to be plain values: text, numbers, True, False, lists")


def _parameters(name: str) -> tuple[Parameter, ...]:
    parameters = ACTIONS.get(name)
    if parameters is None:
        raise InvalidActionError(f"there is no action {_shown(name)}; there are {', '.join(sorted(ACTIONS))}")
    return parameters


def _bound(name: str, given: Mapping[str, Any]) -> Command:
    left = dict(given)
    arguments: dict[str, Any] = {}
    for parameter in _parameters(name):
        names = [each for each in (parameter.name, *parameter.other_names) if each in left]
        if len(names) > 1:
            raise InvalidActionError(f"{name}: {' and '.join(names)} are the same argument")
        if not names or left[names[0]] is None:
            if names:
                del left[names[0]]
            if parameter.required:
                raise InvalidActionError(f"{name} needs {parameter.name}")
            continue
        arguments[parameter.name] = _checked(name, parameter, left.pop(names[0]))
    if left:
        raise InvalidActionError(f"{name} has no argument {_shown(min(left))}")
    if name in ("click", "dblclick"):
        has_point = "x" in arguments and "y" in arguments
        if ("ref" in arguments) == has_point or ("x" in arguments) != ("y" in arguments):
            raise InvalidActionError(f"{name} needs a ref, or x and y")
    return Command(name, arguments)


def _checked(name: str, parameter: Parameter, value: Any) -> Any:
    match parameter.kind:
        case "ref" | "text":
            # A number is how some write a ref.
            if parameter.kind == "ref" and isinstance(value, int) and not isinstance(value, bool):
                return str(value)
            if isinstance(value, str) and (value or parameter.kind == "text"):
                return value
            wanted = "a ref such as 'e12'" if parameter.kind == "ref" else "text"
        case "number" | "integer" | "milliseconds":
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                if parameter.kind == "number" and abs(value) <= 1e6:
                    return value
                if parameter.kind == "integer" and float(value).is_integer() and abs(value) < 1e9:
                    return int(value)
                if parameter.kind == "milliseconds" and 0 <= value <= MAX_WAIT_MILLISECONDS:
                    return value
            wanted = {
                "number": "a number of pixels",
                "integer": "a whole number",
                "milliseconds": f"milliseconds, {MAX_WAIT_MILLISECONDS} at most",
            }[parameter.kind]
        case "flag":
            if isinstance(value, bool):
                return value
            wanted = "true or false"
        case "texts":
            values = [value] if isinstance(value, str) else value
            if isinstance(values, list) and all(isinstance(each, str) for each in values):
                return values
            wanted = "a text or a list of texts"
        case "button":
            if value in _BUTTONS:
                return value
            wanted = f"one of {', '.join(_BUTTONS)}"
        case "modifiers":
            if isinstance(value, list) and all(each in _MODIFIERS for each in value):
                return value
            wanted = f"a list of {', '.join(_MODIFIERS)}"
        case "files":
            files = value if isinstance(value, list) else [value]
            if all(_is_file(each) for each in files):
                return files
            wanted = 'files as {"name": …, "text": …}; the server\'s own files cannot be sent'
    raise InvalidActionError(f"{name}: {parameter.name} has to be {wanted}")


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"name", "text", "base64", "mime_type"}
        and all(isinstance(each, str) for each in value.values())
        and bool(value.get("name"))
        and len(value.keys() & {"text", "base64"}) == 1
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
