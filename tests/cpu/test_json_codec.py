"""The strict JSON codec: what the plan and profile files rely on beyond their own tests."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest

from fxhome.json_codec import DecodeError, decode, encode


class Colour(enum.StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    rate: float


@dataclass(frozen=True)
class Outer:
    inner: Inner
    colour: Colour
    pairs: tuple[tuple[str, int], ...]
    note: str | None


VALUE = Outer(Inner(1.0), Colour.RED, (("a", 1),), None)
DOCUMENT = {"inner": {"rate": 1.0}, "colour": "red", "pairs": [["a", 1]], "note": None}


def test_both_ways() -> None:
    assert encode(VALUE) == DOCUMENT
    assert decode(Outer, DOCUMENT, "outer") == VALUE


def test_an_int_is_a_float_but_not_the_reverse() -> None:
    decoded = decode(float, 3, "x")

    assert (decoded, type(decoded)) == (3.0, float)
    with pytest.raises(DecodeError, match=r"x should be int, got 3\.0"):
        decode(int, 3.0, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, r"outer\.inner should be an object, got 3"),
        ({"inner": {}}, r"outer\.inner lacks rate"),
        ({"inner": {"rate": True}}, r"outer\.inner\.rate should be float, got True"),
        ({"colour": "blue"}, r"outer\.colour should be one of red, got 'blue'"),
        ({"colour": []}, r"outer\.colour should be one of red, got \[\]"),
        ({"pairs": "ab"}, r"outer\.pairs should be a list, got 'ab'"),
        ({"pairs": [["a"]]}, r"outer\.pairs\[0\] should have 2 entries, got 1"),
        ({"pairs": [["a", "b"]]}, r"outer\.pairs\[0\]\[1\] should be int, got 'b'"),
        ({"note": 4}, r"outer\.note should be str, got 4"),
        ({"more": 1}, r"outer has unknown keys more"),
        ({"note": list(range(99))}, r"outer\.note should be str, got \[0, 1, .{40,60}\.\.\.$"),
    ],
)
def test_a_misfit_names_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        decode(Outer, DOCUMENT | change, "outer")
