"""Constants of the two 8-bit float formats."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_EXPONENT, SCALE_BIAS = -110, 127
"""Scales below 2^-110 are not used: a block of smaller values keeps an absolute error below 2^-119."""


@dataclass(frozen=True)
class Fp8Format:
    name: str
    mantissa_bits: int
    bias: int
    largest_exponent: int
    """Exponent of the largest finite value, which is 1.75 * 2^largest_exponent in both formats."""
    nan_code: int
    has_infinity: bool

    @property
    def shift(self) -> int:
        """fp32 mantissa bits that are dropped."""
        return 23 - self.mantissa_bits

    @property
    def largest(self) -> float:
        return 1.75 * 2.0**self.largest_exponent

    @property
    def smallest_step_exponent(self) -> int:
        """The spacing of subnormals is 2 to this power."""
        return 1 - self.bias - self.mantissa_bits

    @property
    def smallest_step(self) -> float:
        return 2.0**self.smallest_step_exponent

    @property
    def infinity_code(self) -> int:
        return 0x7C if self.has_infinity else self.nan_code


FP8_FORMATS = {
    "e4m3": Fp8Format("e4m3", 3, 7, 8, 0x7F, False),
    "e5m2": Fp8Format("e5m2", 2, 15, 15, 0x7E, True),
}
