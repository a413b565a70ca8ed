"""The secret that one server's workers share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from homing.errors import ConfigurationError
from homing.runtime import secret
from homing.runtime.secret import SERVER_SECRET_ENV, keep_server_secret, make_server_secret, server_secret


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what is set here, or was kept before."""
    monkeypatch.delenv(SERVER_SECRET_ENV, raising=False)
    monkeypatch.setattr(secret, "_kept", None)
    yield
    os.environ.pop(SERVER_SECRET_ENV, None)


def test_a_server_has_a_secret_of_256_random_bits_that_all_its_workers_share() -> None:
    made = set()
    for _ in range(2):
        os.environ.pop(SERVER_SECRET_ENV, None)
        make_server_secret()
        assert server_secret(None) == server_secret("/nowhere") == os.environ[SERVER_SECRET_ENV]
        made.add(server_secret(None))
    assert len(made) == 2
    assert all(len(each) >= 43 for each in made)  # base64 of 32 bytes


@pytest.mark.parametrize("weak", ["secret", "0" * 31, "é" * 15])
def test_a_secret_that_is_too_short_is_refused_at_start(weak: str) -> None:
    os.environ[SERVER_SECRET_ENV] = weak
    with pytest.raises(ConfigurationError, match="at least 32 random"):
        make_server_secret()


def test_one_that_was_set_is_used_as_it_is() -> None:
    os.environ[SERVER_SECRET_ENV] = "x" * 32
    make_server_secret()
    assert server_secret(None) == "x" * 32


def test_a_worker_keeps_its_secret_and_hands_it_on_to_nobody() -> None:
    make_server_secret()
    made = os.environ[SERVER_SECRET_ENV]
    keep_server_secret()
    assert SERVER_SECRET_ENV not in os.environ
    assert server_secret(None) == made
    keep_server_secret()  # twice is fine
    assert server_secret(None) == made


def test_without_a_supervisor_the_workers_of_one_run_directory_have_one(tmp_path: object) -> None:
    assert server_secret(str(tmp_path)) == server_secret(str(tmp_path))
    assert server_secret(None) != server_secret(None)
