"""Frozen dataclasses to JSON and back, strictly: every value is checked against its type hint on the way in.

encode: dataclass -> {field: value}, enum -> its value, tuple -> list, mapping and scalars as they are.
decode: the inverse; anything missing, additional or of another type is a `DecodeError` that names the place.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any


class DecodeError(ValueError):
    """A JSON value does not fit the type hint; the message names the place in the document."""


def encode(value: object) -> Any:
    """Turn dataclasses, enums and tuples into what `json.dumps` writes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(hint: Any, value: Any, where: str) -> Any:
    """Build what `hint` describes from a JSON value; `where` names the place for the error message."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, value, where)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(typing.get_args(hint), value, where)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _decode_enum(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise DecodeError(f"{where} should be {hint.__name__}, got {_short(value)}")


def _decode_dataclass(hint: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise DecodeError(f"{where} should be an object, got {_short(value)}")
    hints = _field_hints(hint)
    names = [field.name for field in dataclasses.fields(hint)]
    if missing := [name for name in names if name not in value]:
        raise DecodeError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(value.keys() - set(names)):
        raise DecodeError(f"{where} has unknown keys {', '.join(unknown)}")
    decoded = {name: decode(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return hint(**decoded)
    except ValueError as error:
        raise DecodeError(f"{where}: {error}") from error


@functools.cache
def _field_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_optional(hints: Sequence[Any], value: Any, where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    (hint,) = [hint for hint in hints if hint is not type(None)]
    return decode(hint, value, where)


def _decode_tuple(hints: Sequence[Any], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise DecodeError(f"{where} should be a list, got {_short(value)}")
    if len(hints) == 2 and hints[1] is ...:
        return tuple(decode(hints[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if len(value) != len(hints):
        raise DecodeError(f"{where} should have {len(hints)} entries, got {len(value)}")
    pairs = zip(hints, value, strict=True)
    return tuple(decode(hint, item, f"{where}[{index}]") for index, (hint, item) in enumerate(pairs))


def _decode_enum(hint: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    choices = {member.value: member for member in hint}
    if not isinstance(value, str) or value not in choices:
        raise DecodeError(f"{where} should be one of {', '.join(map(str, choices))}, got {_short(value)}")
    return choices[value]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
