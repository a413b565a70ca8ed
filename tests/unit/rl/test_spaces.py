"""Spaces and their values cross the wire and come back as they were, in both forms."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from pydantic_core import from_json
from tests.support.rl_envs import every_space

from homing.errors import ConfigurationError
from homing.rl.errors import InvalidRequestError
from homing.rl.packing import pack, unpack
from homing.rl.spaces import codec_for, decode_member, plain_info, space_from

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int16, np.int64, np.uint64]


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(array_shapes(min_dims=0, max_dims=3, max_side=3))
    if dtype.kind == "f":
        low, high = draw(st.sampled_from([(-np.inf, np.inf), (-1.0, 1.0), (0.1, np.inf)]))
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return spaces.Box(low, high, shape, dtype.type)


leaves = st.one_of(
    boxes(),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 10**6), st.integers(-(10**6), 10**6)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 1000), min_size=1, max_size=4)),
    st.builds(spaces.MultiBinary, st.integers(1, 5)),
    st.builds(spaces.MultiBinary, st.lists(st.integers(1, 3), min_size=2, max_size=3)),
    # Without NUL: numpy drops it at a text's end, so a Text with it gives samples that it takes for none of its own.
    st.builds(
        lambda n, chars: spaces.Text(n, charset=chars),
        st.integers(1, 9),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9),
    ),
)
nested: st.SearchStrategy[Space[Any]] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=3)),
        st.builds(spaces.Dict, st.dictionaries(st.text(min_size=1, max_size=5), inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


def decoded_form(space: Space[Any], value: Any) -> Any:
    """A sample as it is decoded: whole numbers of a Discrete space are Python's, a number of a Box an array of no dimensions."""
    match space:
        case spaces.Dict():
            return {key: decoded_form(each, value[key]) for key, each in space.spaces.items()}
        case spaces.Tuple():
            return tuple(decoded_form(each, part) for each, part in zip(space.spaces, value, strict=True))
        case spaces.Discrete():
            return int(value)
        case spaces.Box():
            return np.asarray(value)
    return value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(space=nested, binary=st.booleans())
def test_a_space_and_its_samples_come_back_as_they_were(space: Space[Any], binary: bool) -> None:
    codec = codec_for(space)
    described = unpack(pack({"space": codec.description}, binary=binary), binary=binary)["space"]
    assert space_from(described) == space
    value = space.sample()
    content = unpack(pack({"value": codec.encode(value, binary=binary)}, binary=binary), binary=binary)["value"]
    decoded = decode_member(codec, content, inside="value")
    assert data_equivalence(decoded, decoded_form(space, value), exact=True)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dtype=st.sampled_from([np.float32, np.float64]), binary=st.booleans())
def test_every_float_comes_back_bit_for_bit(data: st.DataObject, dtype: Any, binary: bool) -> None:
    space = spaces.Box(-np.inf, np.inf, (3,), dtype)
    codec = codec_for(space)
    value = data.draw(arrays(dtype, (3,), elements=st.floats(width=32 if dtype is np.float32 else 64)))
    content = unpack(pack({"value": codec.encode(value, binary=binary)}, binary=binary), binary=binary)["value"]
    decoded = codec.decode(content, inside="value")
    assert decoded.dtype == value.dtype
    assert np.array_equal(decoded, value, equal_nan=True)
    assert np.array_equal(np.signbit(decoded[~np.isnan(value)]), np.signbit(value[~np.isnan(value)]))


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    space = spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Discrete(3)}, sort_keys=False)
    assert list(space_from(codec_for(space).description).spaces) == ["z", "a"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Sequence(spaces.Discrete(2)), "the space is a Sequence"),
        (spaces.Tuple((spaces.Discrete(2), spaces.OneOf([spaces.Discrete(2)]))), "the space[1] is a OneOf"),
        (spaces.Dict({"a": spaces.Graph(spaces.Discrete(2), None)}), "the space['a'] is a Graph"),
    ],
)
def test_other_spaces_are_refused_by_name(space: Space[Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("[", r"\[").replace("]", r"\]")):
        codec_for(space)


BAD = [
    ("box", [[0, 0, 0]], "value.box"),
    ("box", [[0, 0, 0], [0, 0]], "value.box"),
    ("box", [[0, 0, 0], [0, 0, "1.5"]], "value.box"),
    ("box", [[0, 0, 0], [0, 0, None]], "value.box"),
    ("box", [[0, 0, 0], [0, 0, {}]], "value.box"),
    ("box", [[0, 0, 0], [0, 0, 1e39]], "value.box"),
    ("box", [[0, 0, 0], [0, 0, "NaN"]], "value.box"),
    ("box", 5, "value.box"),
    ("box", [[[[0]]]], "value.box"),
    ("bounded", [0, 0], "value.bounded"),
    ("image", [[[256] * 3] * 4] * 4, "value.image"),
    ("image", [[[-1] * 3] * 4] * 4, "value.image"),
    ("image", [[[0.5] * 3] * 4] * 4, "value.image"),
    ("long", [2**63, 0], "value.long"),
    ("scalar", [0.5], "value.scalar"),
    ("scalar", 2, "value.scalar"),
    ("bits", [0, 1, 2, 0, 0], "value.bits"),
    ("many", [0, 1], "value.many"),
    ("one", 3, "value.one"),
    ("one", 1.0, "value.one"),
    ("one", True, "value.one"),
    ("one", None, "value.one"),
    ("text", "d", "value.text"),
    ("text", "a" * 9, "value.text"),
    ("text", 5, "value.text"),
    ("pair", [0], "value.pair"),
    ("pair", [2, {"inner": [0.5]}], "value.pair.0"),
    ("pair", [0, {"inner": [2]}], "value.pair.1.inner"),
    ("pair", [0, {"inner": ["x"]}], "value.pair.1.inner"),
    ("pair", [0, {}], "value.pair.1.inner"),
    ("pair", [0, {"inner": [0], "more": 1}], "value.pair.1.more"),
]


@pytest.mark.parametrize(("key", "content", "named"), BAD, ids=[f"{key}={content!r:.20}" for key, content, _ in BAD])
@pytest.mark.filterwarnings("error")
def test_what_is_no_value_is_refused_and_named(key: str, content: Any, named: str) -> None:
    codec = codec_for(every_space())
    good = codec.encode(codec.space.sample(), binary=False)
    with pytest.raises(InvalidRequestError) as refused:
        decode_member(codec, {**good, key: content}, inside="value")
    assert refused.value.fields[0].field == named
    assert refused.value.detail.startswith(f"{named}: ")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    content=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9)),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=12,
    ),
    key=st.sampled_from(sorted(every_space().spaces)),
)
def test_nothing_that_a_caller_sends_gets_past(content: Any, key: str) -> None:
    codec = codec_for(every_space().spaces[key])
    try:
        value = decode_member(codec, content, inside="value")
    except InvalidRequestError:
        return
    assert codec.space.contains(value)


def test_an_observation_of_another_shape_or_kind_is_no_observation() -> None:
    codec = codec_for(spaces.Box(0, 1, (2,), np.uint8))
    for wrong in (np.zeros(3, np.uint8), np.zeros(2, np.float64), np.zeros((2, 1), np.uint8), "xx", None):
        with pytest.raises((ValueError, TypeError)):
            codec.encode(wrong, binary=True)


def test_an_info_arrives_and_what_cannot_is_named() -> None:
    info = {
        "array": np.arange(4, dtype=np.int16).reshape(2, 2),
        "number": np.float32(0.5),
        "nested": {"list": [1, (2, {"x": np.int8(3)})]},
        "odd": float("inf"),
        "huge": 2**70,
        "object": object(),
        5: "key",
    }
    binary = msgspec.msgpack.encode(plain_info(info, binary=True))
    found = unpack(binary, binary=True)
    assert found["array"].dtype == np.int16
    assert found["array"].tolist() == [[0, 1], [2, 3]]
    assert found["odd"] == float("inf")
    as_json = from_json(pack(plain_info(info, binary=False), binary=False))
    for each in (found, as_json):
        assert each["number"] == 0.5
        assert each["nested"] == {"list": [1, [2, {"x": 3}]]}
        assert each["huge"] == str(2**70)
        assert each["object"] == "<object: not carried>"
        assert each["5"] == "key"
    assert as_json["array"] == [[0, 1], [2, 3]]
    assert as_json["odd"] == "Infinity"
