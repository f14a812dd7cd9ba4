"""Byte sizes and memory budgets as users write them."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass, field

from fxhome.errors import OptionError
from fxhome.units import BYTE_UNITS, format_bytes

SMALLEST_BUDGET_BYTES = 1024**2
"""An integer below this is taken for a slip: 1 is one byte, 1.0 is 100 %."""

_SIZE_FORMS = "an int of bytes or a text such as '8GiB', '8GB' or '512MiB' (GiB = 2**30, GB = 10**9)"
_BUDGET_FORMS = f"{_SIZE_FORMS}, a float in (0, 1] or a text such as '60%' for a share of the baseline's peak"
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True)
class Budget:
    """Bytes, or a share in (0, 1] of the baseline's peak; exactly one of the two is set."""

    bytes: int | None
    share: float | None
    text: str = field(default="", compare=False)
    """What the user typed."""

    def __str__(self) -> str:
        """What the user typed, else the value in a readable form."""
        if self.text:
            return self.text
        if self.bytes is not None:
            return format_bytes(self.bytes)
        return f"{(self.share or 0.0) * 100:g}%"

    def resolve(self, baseline_peak_bytes: int) -> int:
        """The budget in bytes, given the peak of the baseline."""
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return int(self.share * baseline_peak_bytes)


def parse_bytes(value: object, *, name: str) -> int:
    """Read a size in bytes (0 is allowed) from an int or a text with a unit; raise `OptionError` naming `name`."""
    if isinstance(value, str):
        return _parse_size_text(value, name=name, forms=_SIZE_FORMS)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise OptionError(f"{name}={value!r} is not a size; give {_SIZE_FORMS}")
    if value < 0:
        raise OptionError(f"{name}={value!r} is negative; give {_SIZE_FORMS}")
    return int(value)


def parse_budget(value: object, *, name: str = "memory_budget") -> Budget:
    """Read a memory budget: bytes (int, '8GiB') or a share (float in (0, 1], '60%'); raise `OptionError` otherwise."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return _parse_budget_text(value, name=name)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionError(f"{name}={value!r} is not a budget; give {_BUDGET_FORMS}")
    if isinstance(value, numbers.Integral):
        return _byte_budget(int(value), text=format_bytes(int(value)), given=repr(value), name=name)
    return _share_budget(float(value), text=f"{float(value) * 100:g}%", given=repr(value), name=name)


def _parse_budget_text(text: str, *, name: str) -> Budget:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise OptionError(f"{name}={text!r} is not a budget; give {_BUDGET_FORMS}")
    number, unit = match.groups()
    if unit == "%":
        return _share_budget(float(number) / 100.0, text=text.strip(), given=repr(text), name=name)
    if not unit and not number.lstrip("+-").isdigit():
        return _share_budget(float(number), text=text.strip(), given=repr(text), name=name)
    size_bytes = _parse_size_text(text, name=name, forms=_BUDGET_FORMS)
    return _byte_budget(size_bytes, text=text.strip(), given=repr(text), name=name)


def _share_budget(share: float, *, text: str, given: str, name: str) -> Budget:
    if not math.isfinite(share) or not 0.0 < share <= 1.0:
        raise OptionError(
            f"{name}={given} is a share outside (0 %, 100 %]; "
            "give a float in (0, 1] or '1%' to '100%', or bytes such as '8GiB'"
        )
    return Budget(bytes=None, share=share, text=text)


def _byte_budget(size_bytes: int, *, text: str, given: str, name: str) -> Budget:
    if size_bytes < SMALLEST_BUDGET_BYTES:
        raise OptionError(
            f"{name}={given} is {size_bytes} bytes, below the least budget of 1 MiB; an int counts bytes "
            f"(1 is one byte, 1.0 is 100 %); give {_BUDGET_FORMS}"
        )
    return Budget(bytes=size_bytes, share=None, text=text)


def _parse_size_text(text: str, *, name: str, forms: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise OptionError(f"{name}={text!r} is not a size; give {forms}")
    number, unit = match.groups()
    if unit and unit.lower() not in BYTE_UNITS:
        raise OptionError(
            f"{name}={text!r} has the unknown unit {unit!r}; allowed: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB; "
            f"give {forms}"
        )
    if not unit and not number.lstrip("+-").isdigit():
        raise OptionError(f"{name}={text!r} has no unit; give {forms}")
    if float(number) < 0:
        raise OptionError(f"{name}={text!r} is negative; give {forms}")
    scale = BYTE_UNITS[unit.lower()] if unit else 1
    # Integers stay exact beyond 2**53; only a fraction goes through a float.
    size = int(number) * scale if number.lstrip("+").isdigit() else float(number) * scale
    if not math.isfinite(size):
        raise OptionError(f"{name}={text!r} is too large; give {forms}")
    return int(size)
