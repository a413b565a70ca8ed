"""What decodes bytes from outside never takes them for what they are not: `tests/fuzz` for a few seconds, without Atheris."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz.targets import Target, cookie, frames, records, seeds, shared_frames, token

some = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
fewer = settings(some, max_examples=60)


def changed(name: str) -> st.SearchStrategy[bytes]:
    """Any bytes, and good examples of which a part was replaced."""
    good = seeds(name)

    @st.composite
    def spoiled(draw: st.DrawFn) -> bytes:
        data = draw(st.sampled_from(good))
        for _ in range(draw(st.integers(0, 3))):
            at, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
            data = data[:at] + draw(st.binary(max_size=8)) + data[end if draw(st.booleans()) else at :]
        return data

    return st.binary(max_size=200) | spoiled()


@some
@given(changed("cookie"))
def test_no_cookie_is_judged_otherwise_than_by_the_middleware(data: bytes) -> None:
    cookie(data)


@some
@given(changed("token"))
def test_no_token_names_a_session_that_it_was_not_signed_for(data: bytes) -> None:
    token(data)


@pytest.fixture(scope="module")
def hop() -> Iterator[Target]:
    with frames() as target:
        yield target


@fewer
@given(data=changed("frames"))
def test_no_bytes_on_the_hop_end_otherwise_than_in_a_frame_or_a_refusal(hop: Target, data: bytes) -> None:
    hop(data)


@pytest.fixture(scope="module")
def sharing_hop() -> Iterator[Target]:
    with shared_frames() as target:
        yield target


@fewer
@given(data=changed("shared_frames"))
def test_no_bytes_on_a_shared_connection_end_otherwise_than_in_a_frame_or_a_refusal(
    sharing_hop: Target, data: bytes
) -> None:
    sharing_hop(data)


@pytest.fixture(scope="module")
def record() -> Iterator[Target]:
    with records() as target:
        yield target


@some
@given(data=changed("records"))
def test_no_text_of_a_record_is_taken_for_a_worker_that_it_does_not_name(record: Target, data: bytes) -> None:
    record(data)


@pytest.mark.parametrize("name", ["cookie", "token", "frames", "shared_frames", "records"])
def test_the_examples_to_start_from_are_good(name: str, hop: Target, sharing_hop: Target, record: Target) -> None:
    targets = {"cookie": cookie, "token": token, "frames": hop, "shared_frames": sharing_hop, "records": record}
    for data in seeds(name):
        targets[name](data)
