"""What a tile of the zvc_exponent codec holds.

The mask of a tile's non-zero elements lies in the head. The non-zero elements, in order, are cut into units of eight;
each float is an exponent and the rest of its bits, mantissa << 1 | sign. For n units the tile's part of the tail has,
in order,
    rest2   16 n bytes  (fp32 only: the low 16 bits of the rests)
    rest1    8 n bytes  (eight bits of the rests: fp32 the upper ones, bf16 all, fp16 the low ones)
    extra2   2 n bytes  (fp16 only: bits 8 and 9 of the rests)
    code2    2 n bytes  (the low two bits of the exponents' codes)
    extra1     n bytes  (fp16 only: bit 10 of the rests)
    code1      n bytes  (the codes' top bits, if a sign bit of the tile is set; else they lie in bit 0 of the rests)
and from the next multiple of 16 bytes on the escaped exponents, a byte each. A tile that would be no smaller than its
elements as they are holds those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

TILE_BYTES = 4096
CODEC_ID = 5
UNIT = 8

COUNT_BITS, ESCAPE_SHIFT, BASE_SHIFT, SIGNED_SHIFT, RAW_SHIFT = 12, 12, 20, 28, 29
"""A tile's word: non-zero elements, 16-byte vectors of escapes (8 bits), lowest exponent of the window (8 bits),
whether code1 is there, whether the elements are stored as they are."""


@dataclass(frozen=True)
class PackedFormat:
    """One float format; plane offsets are in bytes per unit of the tile."""

    name: str
    width: int
    mantissa_bits: int
    exponent_bits: int
    has_rest2: bool
    has_extra: bool

    @property
    def tile_elements(self) -> int:
        return TILE_BYTES // self.width

    @property
    def rest1(self) -> int:
        return 16 if self.has_rest2 else 0

    @property
    def extra2(self) -> int:
        return self.rest1 + 8

    @property
    def code2(self) -> int:
        return self.extra2 + (2 if self.has_extra else 0)

    @property
    def extra1(self) -> int:
        return self.code2 + 2

    @property
    def code1(self) -> int:
        return self.extra1 + (1 if self.has_extra else 0)

    def main_bytes(self, units: Any, signed: Any) -> Any:
        """Bytes before the escapes; integers or arrays of them."""
        return (units * (self.code1 + signed) + 15) // 16 * 16


FORMATS = {
    torch.float32: PackedFormat("fp32", 4, 23, 8, True, False),
    torch.bfloat16: PackedFormat("bf16", 2, 7, 8, False, False),
    torch.float16: PackedFormat("fp16", 2, 10, 5, False, True),
}
FORMATS_BY_NAME = {packed.name: packed for packed in FORMATS.values()}


def expected_share(packed: PackedFormat, nonzero: float, escaped: float) -> float:
    """Estimated tail bytes per plain byte of a rectified tensor. nonzero: share of its elements that are not zero;
    escaped: share of those that are escaped."""
    bits = 8 * packed.code1 / UNIT + 8 * escaped
    padding = 16 / TILE_BYTES * math.ceil(nonzero)
    return nonzero * min(1.0, bits / (8 * packed.width)) + padding
