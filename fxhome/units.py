"""Byte counts and durations as people read and write them."""

from __future__ import annotations

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")

BYTE_UNITS: dict[str, int] = {
    "b": 1,
    **{unit.lower(): 1024 ** (power + 1) for power, unit in enumerate(_BINARY_UNITS)},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("kb", "mb", "gb", "tb"))},
}
"""Bytes per unit, keyed by the lower-case name: GiB is 2**30, GB is 10**9."""


def format_bytes(size_bytes: int) -> str:
    """Write a byte count with two decimals in the largest binary unit that fits: 8589934592 -> '8.00 GiB'."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in _BINARY_UNITS:
        value /= 1024.0
        # Half a hundredth below 1024 would round to "1024.00".
        if abs(value) < 1023.995 or unit == _BINARY_UNITS[-1]:
            return f"{value:.2f} {unit}"
    raise AssertionError("the last unit always returns")


def format_seconds(seconds: float) -> str:
    """Write a duration in us, ms or s: 0.0123 -> '12.30 ms'."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.2f} us"
    if abs(seconds) < 1.0:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"
