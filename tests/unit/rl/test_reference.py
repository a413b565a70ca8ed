"""The reference pages say what the code says: the table of answers, the settings, the reserved names, the options."""

from __future__ import annotations

import inspect
import re

from tests.support.running import ROOT

from homing.rl import errors, hosted
from homing.rl.client import RemoteEnv, RemoteVectorEnv
from homing.rl.errors import RlError
from homing.rl.resources import ResourcesServer
from homing.rl.serve_command import serve
from homing.rl.server import RlServer
from homing.rl.tools import RESERVED

PAGE = (ROOT / "docs" / "reference" / "resources-server.md").read_text()
GYMNASIUM = (ROOT / "docs" / "reference" / "gymnasium-server.md").read_text()


def test_the_table_of_answers_has_each_code_with_its_status() -> None:
    shown = {code: int(status) for status, code in re.findall(r"^\| .* \| (\d{3}) \| `(\w+)` \|$", PAGE, re.MULTILINE)}
    classes = [each for module in (errors, hosted) for each in vars(module).values() if inspect.isclass(each)]
    raised = {each.code: each.status for each in classes if issubclass(each, RlError) and each is not RlError}
    assert shown == {**raised, "internal_error": 500}


def test_the_table_of_settings_is_the_servers() -> None:
    shown = set(re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE))
    settings = {*inspect.signature(RlServer).parameters, *inspect.signature(ResourcesServer).parameters}
    assert shown == settings - {"settings"}


def test_the_reserved_names_are_listed() -> None:
    listed = PAGE[PAGE.index("Tool names that are routes") :]
    assert all(name in listed for name in RESERVED if name.isidentifier())


def test_the_options_and_defaults_of_serve_and_of_the_clients_are_listed() -> None:
    defaults = {parameter.name: parameter.default for parameter in serve.params}
    assert f"`--threads N` ({defaults['threads']} in each worker)" in GYMNASIUM
    assert f"`--idle SECONDS` ({defaults['idle_seconds']:,.0f})" in GYMNASIUM
    for client in (RemoteEnv, RemoteVectorEnv):
        for name, parameter in inspect.signature(client).parameters.items():
            if parameter.default is parameter.empty:
                continue
            shown = f'"{parameter.default.value}"' if name == "autoreset_mode" else f"{parameter.default:g}"
            assert f"{name}={'True' if parameter.default is True else shown}" in GYMNASIUM
