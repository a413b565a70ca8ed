"""Gymnasium spaces on the wire: their descriptions, and values of them as JSON or, compactly, as msgpack.

The invariant: what is decoded is what was encoded, in its space's dtype and shape, bit for bit; infinities and NaN too. In
JSON, which has none of those, they are the strings `"Infinity"`, `"-Infinity"` and `"NaN"`.

    space                              JSON                      msgpack
    Box, MultiDiscrete, MultiBinary    nested lists of numbers   the array's bytes, little-endian, in C order
    Discrete                           a number                  a number
    Text                               a string                  a string
    Tuple, Dict                        a list, an object         a list, a map

Not here: the replies that hold them (`gymnasium.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from homing.errors import ConfigurationError
from homing.rl.errors import InvalidRequestError

ARRAY_CODE: Final = 1
"""The msgpack extension type of an array in an info: `[dtype, shape, bytes]`, packed."""

_NUMBERS: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_MAX_DEPTH: Final = 32


class Codec(Protocol):
    """How values of one space cross the wire.

    Attributes:
        space: Whose values.
        description: The space itself, as JSON; `space_from` makes it again.
    """

    space: Space[Any]
    description: dict[str, Any]

    def encode(self, value: Any, *, binary: bool) -> Any:
        """A value of the space, of plain types.

        Raises:
            ValueError: it is none of the space's shape or type.
        """
        ...

    def decode(self, content: Any, *, inside: str) -> Any:
        """A value from plain types: its shape and types are checked, not whether the space contains it.

        Raises:
            InvalidRequestError: it is none; the message names the field, which is `inside` or in it.
        """
        ...


def codec_for(space: Space[Any], *, name: str = "the space") -> Codec:
    """How values of `space` cross the wire.

    Raises:
        ConfigurationError: spaces of that type do not; the message names it, and where in the space it is.
    """
    match space:
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return _ArrayCodec(space)
        case spaces.Discrete():
            return _DiscreteCodec(space)
        case spaces.Text():
            return _TextCodec(space)
        case spaces.Tuple():
            return _TupleCodec(space, name)
        case spaces.Dict():
            return _DictCodec(space, name)
    raise ConfigurationError(
        f"{name} is a {type(space).__name__}, which cannot be served: only Box, Discrete, MultiDiscrete, MultiBinary, Text, "
        "Tuple and Dict can; wrap the environment to change it"
    )


def decode_member(codec: Codec, content: Any, *, inside: str) -> Any:
    """A value that the space contains.

    Raises:
        InvalidRequestError: it does not; the message names the field.
    """
    value = codec.decode(content, inside=inside)
    if not codec.space.contains(value):
        _blame(codec, value, inside)
    return value


def _blame(codec: Codec, value: Any, inside: str) -> None:
    """Raise for the part of a value that its space does not contain."""
    if isinstance(codec, _DictCodec):
        for key, each in codec.parts.items():
            if not each.space.contains(value[key]):
                _blame(each, value[key], f"{inside}.{key}")
    elif isinstance(codec, _TupleCodec):
        for place, each in enumerate(codec.parts):
            if not each.space.contains(value[place]):
                _blame(each, value[place], f"{inside}.{place}")
    raise _problem(inside, f"outside the space {_short(codec.space)}")


def _short(space: Space[Any]) -> str:
    text = repr(space)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _problem(inside: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError.about(inside, problem)


class _ArrayCodec:
    def __init__(self, space: spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) -> None:
        self.space: Space[Any] = space
        self._dtype = np.dtype(space.dtype)
        self._wire = self._dtype.newbyteorder("<")
        self._shape = space.shape
        self._size = int(np.prod(space.shape, dtype=np.int64)) * self._dtype.itemsize
        self._floats = self._dtype.kind == "f"
        self.description = self._describe(space)

    def _describe(self, space: Space[Any]) -> dict[str, Any]:
        described: dict[str, Any] = {
            "type": type(space).__name__,
            "dtype": self._dtype.name,
            "shape": list(self._shape),
        }
        match space:
            case spaces.Box():
                described |= {"low": _bound(space.low), "high": _bound(space.high)}
            case spaces.MultiDiscrete():
                described |= {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return described

    def encode(self, value: Any, *, binary: bool) -> Any:
        array = np.asarray(value)
        if array.shape != self._shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise ValueError(
                f"a value of shape {array.shape} and dtype {array.dtype} is none of {_short(self.space)}: "
                f"it has to be of shape {self._shape} and dtype {self._dtype}"
            )
        if binary:
            return array.astype(self._wire, copy=False).tobytes()
        listed = array.astype(self._dtype, copy=False).tolist()
        return _with_words(listed) if self._floats and not np.isfinite(array).all() else listed

    def decode(self, content: Any, *, inside: str) -> NDArray[Any]:
        if isinstance(content, bytes):
            if len(content) != self._size:
                raise _problem(inside, f"{self._size} bytes are expected, not {len(content)}")
            found: NDArray[Any] = np.frombuffer(content, self._wire).reshape(self._shape).astype(self._dtype)
            return found
        try:
            given = np.asarray(content)
            if given.dtype.kind not in "biuf":
                given = np.asarray(_without_words(content, 0), dtype=np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise _problem(inside, f"no array of numbers of shape {_text(self._shape)}") from error
        if given.shape != self._shape:
            # An empty list has no inner dimensions to show.
            raise _problem(inside, f"shape {_text(self._shape)} is expected, not {_text(given.shape)}")
        if given.dtype == self._dtype:
            return given
        if given.size and not np.can_cast(given.dtype, self._dtype, "same_kind") and given.dtype.kind not in "iu":
            raise _problem(inside, f"numbers of dtype {self._dtype} are expected")
        with np.errstate(all="ignore"):
            cast = given.astype(self._dtype)
        kept = np.isfinite(cast) == np.isfinite(given) if self._floats else cast == given
        if not np.all(kept):
            raise _problem(inside, f"a number that dtype {self._dtype} cannot hold")
        return cast


class _DiscreteCodec:
    def __init__(self, space: spaces.Discrete) -> None:
        self.space: Space[Any] = space
        self.description = {
            "type": "Discrete",
            "dtype": np.dtype(space.dtype).name,
            "n": int(space.n),
            "start": int(space.start),
        }

    def encode(self, value: Any, *, binary: bool) -> int:
        whole = isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu"
        if not whole and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise ValueError(f"{type(value).__name__} is no value of {self.space}: an integer is expected")
        return int(value)

    def decode(self, content: Any, *, inside: str) -> int:
        if isinstance(content, bool) or not isinstance(content, int):
            raise _problem(inside, f"an integer of {self.space} is expected")
        return content


class _TextCodec:
    def __init__(self, space: spaces.Text) -> None:
        self.space: Space[Any] = space
        self.description = {
            "type": "Text",
            "min_length": space.min_length,
            "max_length": space.max_length,
            "characters": space.characters,
        }

    def encode(self, value: Any, *, binary: bool) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{type(value).__name__} is no value of {self.space}: a string is expected")  # noqa: TRY004
        return value

    def decode(self, content: Any, *, inside: str) -> str:
        if not isinstance(content, str):
            raise _problem(inside, "a string is expected")
        return content


class _TupleCodec:
    def __init__(self, space: spaces.Tuple[Any], name: str) -> None:
        self.space: Space[Any] = space
        self.parts = [codec_for(each, name=f"{name}[{place}]") for place, each in enumerate(space.spaces)]
        self.description = {"type": "Tuple", "spaces": [each.description for each in self.parts]}

    def encode(self, value: Any, *, binary: bool) -> list[Any]:
        if not isinstance(value, tuple | list) or len(value) != len(self.parts):
            raise ValueError(f"a tuple of {len(self.parts)} values is expected, not {_short_value(value)}")
        return [codec.encode(each, binary=binary) for codec, each in zip(self.parts, value, strict=True)]

    def decode(self, content: Any, *, inside: str) -> tuple[Any, ...]:
        if not isinstance(content, list) or len(content) != len(self.parts):
            raise _problem(inside, f"a list of {len(self.parts)} values is expected")
        return tuple(
            codec.decode(each, inside=f"{inside}.{place}")
            for place, (codec, each) in enumerate(zip(self.parts, content, strict=True))
        )


class _DictCodec:
    def __init__(self, space: spaces.Dict, name: str) -> None:
        self.space: Space[Any] = space
        keys = list(space.spaces)
        if wrong := [key for key in keys if not isinstance(key, str)]:
            raise ConfigurationError(f"{name} has the key {wrong[0]!r}, which is no string, and cannot be served")
        self.parts = {key: codec_for(each, name=f"{name}[{key!r}]") for key, each in space.spaces.items()}
        # As a list, since the order of a Dict space's keys is part of it.
        self.description = {"type": "Dict", "spaces": [[key, each.description] for key, each in self.parts.items()]}

    def encode(self, value: Any, *, binary: bool) -> dict[str, Any]:
        if not isinstance(value, Mapping) or value.keys() != self.parts.keys():
            raise ValueError(f"a dict with the keys {sorted(self.parts)} is expected, not {_short_value(value)}")
        return {key: codec.encode(value[key], binary=binary) for key, codec in self.parts.items()}

    def decode(self, content: Any, *, inside: str) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise _problem(inside, f"an object with the fields {sorted(self.parts)} is expected")
        for key in self.parts.keys() - content.keys():
            raise _problem(f"{inside}.{key}", "missing")
        for key in content.keys() - self.parts.keys():
            raise _problem(f"{inside}.{key}", "no such field in the space")
        return {key: codec.decode(content[key], inside=f"{inside}.{key}") for key, codec in self.parts.items()}


def space_from(description: Mapping[str, Any]) -> Space[Any]:
    """The space that a description stands for.

    Raises:
        ValueError: it is none.
    """
    kind = description.get("type")
    try:
        match kind:
            case "Box":
                dtype, shape = np.dtype(description["dtype"]), tuple(description["shape"])
                low, high = (_bound_from(description[each], shape, dtype) for each in ("low", "high"))
                return spaces.Box(low, high, shape, dtype.type)
            case "Discrete":
                return spaces.Discrete(
                    description["n"], start=description["start"], dtype=np.dtype(description["dtype"]).type
                )
            case "MultiDiscrete":
                dtype = np.dtype(description["dtype"])
                nvec, start = np.asarray(description["nvec"], dtype), np.asarray(description["start"], dtype)
                return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
            case "MultiBinary":
                shape = tuple(description["shape"])
                return spaces.MultiBinary(shape[0] if len(shape) == 1 else list(shape))
            case "Text":
                return spaces.Text(
                    description["max_length"],
                    min_length=description["min_length"],
                    charset=description["characters"],
                )
            case "Tuple":
                return spaces.Tuple([space_from(each) for each in description["spaces"]])
            case "Dict":
                return spaces.Dict([(key, space_from(each)) for key, each in description["spaces"]], sort_keys=False)
    except (KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"no description of a space of type {kind}: {error}") from error
    raise ValueError(f"spaces of type {kind!r} are unknown here")


# --- infos: what an environment says beside its observation ---


def plain_info(info: Mapping[Any, Any], *, binary: bool) -> dict[str, Any]:
    """An info of plain types. Arrays are lists in JSON; in msgpack they stay arrays. What cannot cross is named."""
    return {str(key): _plain(value, binary, 0) for key, value in info.items()} if info else {}


def _plain(value: Any, binary: bool, depth: int) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case float():
            return value if binary or math.isfinite(value) else _word(value)
        case np.ndarray() if value.dtype.kind in "biuf":
            if binary:
                return msgspec.msgpack.Ext(ARRAY_CODE, _packed_array(value))
            listed = value.tolist()
            return _with_words(listed) if value.dtype.kind == "f" and not np.isfinite(value).all() else listed
        case np.generic():
            return _plain(value.item(), binary, depth + 1) if depth < _MAX_DEPTH else _absent(value)
        case bytes() if binary:
            return value
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(key): _plain(each, binary, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset | np.ndarray):
            return [_plain(each, binary, depth + 1) for each in value]
    return _absent(value)


def _absent(value: Any) -> str:
    return f"<{type(value).__name__}: not carried>"


def _packed_array(array: NDArray[Any]) -> bytes:
    wire = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return msgspec.msgpack.encode((array.dtype.name, array.shape, wire.tobytes()))


def extension(code: int, data: memoryview) -> Any:
    """An array of an info, as it was; for a msgpack decoder's `ext_hook`."""
    if code != ARRAY_CODE:
        return None
    name, shape, content = msgspec.msgpack.decode(data)
    dtype = np.dtype(name)
    return np.frombuffer(content, dtype.newbyteorder("<")).reshape(shape).astype(dtype)


# --- numbers that JSON has not ---


def _word(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _with_words(listed: Any) -> Any:
    if isinstance(listed, list):
        return [_with_words(each) for each in listed]
    return _word(listed) if isinstance(listed, float) and not math.isfinite(listed) else listed


def _without_words(content: Any, depth: int) -> Any:
    if isinstance(content, list):
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        return [_without_words(each, depth + 1) for each in content]
    if isinstance(content, str):
        if content not in _NUMBERS:
            raise ValueError("no number")
        return _NUMBERS[content]
    if isinstance(content, bool) or not isinstance(content, int | float):
        raise TypeError("no number")
    return content


def _bound(bound: NDArray[Any]) -> Any:
    """A bound, once if it is the same everywhere: an image has millions."""
    if bound.size and (bound == bound.flat[0]).all():
        return _with_words(bound.flat[0].item())
    return _with_words(bound.tolist())


def _bound_from(content: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    plain = _without_words(content, 0)
    return np.full(shape, plain, dtype) if not isinstance(plain, list) else np.asarray(plain, dtype).reshape(shape)


def _text(shape: Iterable[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _short_value(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list | dict) else "")
