"""The installed uvicorn is one that `homing run` knows, and another one is refused by name."""

from __future__ import annotations

import pytest
import uvicorn.supervisors.multiprocess

from homing.errors import ConfigurationError
from homing.runtime.underneath import check_uvicorn, connections_can_move, replies_are_known


def test_the_installed_uvicorn_is_known() -> None:
    check_uvicorn()


def test_connections_move_under_the_installed_uvicorn_and_stay_under_one_that_lacks_what_that_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert connections_can_move()

    def other(self: object) -> None: ...

    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.RequestResponseCycle.__init__", other)
    assert not connections_can_move()


def test_replies_are_put_together_under_the_installed_uvicorn_and_left_to_one_that_sends_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert replies_are_known()

    async def other(self: object, message: object) -> None: ...

    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.RequestResponseCycle.send", other)
    assert not replies_are_known()


def test_a_uvicorn_without_a_name_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(uvicorn.supervisors.multiprocess.Multiprocess, "handle_signals")
    with pytest.raises(
        ConfigurationError, match=r"uvicorn [\d.]+: .*Multiprocess.handle_signals changed; install"
    ) as raised:
        check_uvicorn()
    assert "\n" not in str(raised.value)


def test_a_uvicorn_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn._subprocess.get_subprocess", lambda config, target: None)
    with pytest.raises(ConfigurationError, match=r"get_subprocess changed"):
        check_uvicorn()
