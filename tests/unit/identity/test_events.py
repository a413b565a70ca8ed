from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.identity.events import Event, EventSplitter, parse_events

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
lines = st.sampled_from([b"data: x", b"data", b"data:  y", b"event: endpoint", b": ping", b"id: 1", b"datax: z", b""])
streams = st.lists(st.tuples(lines, line_ends), max_size=20).map(lambda both: b"".join(a + b for a, b in both))


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(stream) + 1) for place in at} | {0, len(stream)})
    return [stream[a:b] for a, b in itertools.pairwise(places)]


@given(streams, st.lists(st.integers(0, 1_000), max_size=12), st.sampled_from([1, 5, 10_000]))
def test_the_bytes_pass_unchanged_however_they_are_cut(stream: bytes, at: list[int], limit: int) -> None:
    splitter = EventSplitter(limit)
    passed = b"".join(splitter.feed(piece)[0] for piece in cut(stream, at))
    assert passed + splitter.finish()[0] == stream


@given(streams, st.lists(st.integers(0, 1_000), max_size=12))
def test_the_same_events_are_found_however_the_stream_is_cut(stream: bytes, at: list[int]) -> None:
    splitter = EventSplitter(10_000)
    found = [event for piece in cut(stream, at) for event in splitter.feed(piece)[1]] + splitter.finish()[1]
    # One regular expression's view of the same standard: lines, and blank ones between events.
    expected: list[Event] = []
    for block in re.split(r"\n{2,}", re.sub(r"\r\n|\r", "\n", stream.decode())):
        data = [re.sub(r"^data:? ?", "", line) for line in block.split("\n") if re.match(r"data(:|$)", line)]
        kind = "endpoint" if "event: endpoint" in block.split("\n") else ""
        if data:
            expected.append(Event(kind, "\n".join(data).encode()))
    assert found == expected


@given(streams, st.lists(st.integers(0, 1_000), max_size=12))
def test_no_byte_of_an_event_with_data_passes_before_its_end_was_seen(stream: bytes, at: list[int]) -> None:
    splitter = EventSplitter(10_000)
    passed, known = b"", 0
    for piece in cut(stream, at):
        out, events = splitter.feed(piece)
        passed, known = passed + out, known + len(events)
        assert len(parse_events(passed)) <= known


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_passes_as_soon_as_its_blank_line_came(end: bytes) -> None:
    splitter = EventSplitter(1_000)
    assert splitter.feed(b"data: x" + end) == (b"", [])
    passed, events = splitter.feed(end)
    assert passed == b"data: x" + end + end
    assert events == [Event("", b"x")]


def test_a_crlf_that_is_cut_after_the_blank_line_s_cr_belongs_to_it() -> None:
    splitter = EventSplitter(1_000)
    assert splitter.feed(b"data: x\r\n\r") == (b"data: x\r\n\r", [Event("", b"x")])
    assert splitter.feed(b"\n") == (b"\n", [])
    assert splitter.feed(b"data: y\r\n\r\n") == (b"data: y\r\n\r\n", [Event("", b"y")])


def test_data_on_several_lines_is_one_text() -> None:
    assert parse_events(b'data: {"a":\r\ndata:  1}\r\n\r\n') == [Event("", b'{"a":\n 1}')]


def test_an_event_over_the_limit_passes_unread_and_the_next_one_is_read_again() -> None:
    splitter = EventSplitter(100)
    out = b""
    for _ in range(50):
        passed, events = splitter.feed(b"data: " + b"x" * 10)
        out += passed
        assert events == []
    assert len(out) > 600
    passed, events = splitter.feed(b"\n\ndata: y\n\n")
    assert events == [Event("", b"y")]
    assert out + passed == (b"data: " + b"x" * 10) * 50 + b"\n\ndata: y\n\n"


def test_blank_lines_that_keep_a_stream_alive_pass_at_once() -> None:
    splitter = EventSplitter(100)
    assert splitter.feed(b"\n") == (b"\n", [])
    assert splitter.feed(b"\r\n") == (b"\r\n", [])


def test_a_byte_order_mark_before_the_first_field_is_no_part_of_it() -> None:
    assert parse_events(b"\xef\xbb\xbfdata: x\n\n") == [Event("", b"x")]


def test_an_event_that_no_blank_line_ended_is_still_read_at_the_end() -> None:
    splitter = EventSplitter(100)
    assert splitter.feed(b"data: x") == (b"", [])
    assert splitter.finish() == (b"data: x", [Event("", b"x")])
