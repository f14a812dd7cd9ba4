"""Where the bits of each float format go in the exponent codec.

Beside its exponent an element has a rest, mantissa << 1 | sign. Planes of one tile, in order, for its E elements:
    rest2   2 bytes per element   (fp32 only: the low 16 of the rest's 24 bits)
    rest1   1 byte per element    (bf16: the rest; fp16: its low 8 of 11 bits; fp32: its upper 8 bits)
    code2   2 bits per element, code1  1 bit per element       the exponent code, low two bits and top bit
    extra2, extra1                                             (fp16 only: the rest's upper three bits)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_BYTES = 4096
WINDOW = 7
"""Exponents that have a code of their own; the code WINDOW marks an escape."""
SAMPLES = 128
"""Elements per tile from which the window is chosen."""
HISTOGRAM_BINS = 32


@dataclass(frozen=True)
class FloatFormat:
    name: str
    width: int
    """Bytes per element."""
    has_rest2: bool
    has_extra: bool

    @property
    def tile_elements(self) -> int:
        return TILE_BYTES // self.width

    @property
    def rest1_offset(self) -> int:
        return 2 * self.tile_elements if self.has_rest2 else 0

    @property
    def code2_offset(self) -> int:
        return self.rest1_offset + self.tile_elements

    @property
    def code1_offset(self) -> int:
        return self.code2_offset + self.tile_elements // 4

    @property
    def extra2_offset(self) -> int:
        return self.code1_offset + self.tile_elements // 8

    @property
    def extra1_offset(self) -> int:
        return self.extra2_offset + self.tile_elements // 4

    @property
    def plane_bytes(self) -> int:
        return self.extra1_offset + self.tile_elements // 8 if self.has_extra else self.extra2_offset


FORMATS = {
    torch.bfloat16: FloatFormat("bf16", 2, False, False),
    torch.float16: FloatFormat("fp16", 2, False, True),
    torch.float32: FloatFormat("fp32", 4, True, False),
}
FORMATS_BY_NAME = {float_format.name: float_format for float_format in FORMATS.values()}


def sample_offset(sample: int, stride: int) -> int:
    """Element of the tile that sample number `sample` reads: one per stretch of `stride`, its place in the stretch
    rotating so that the samples do not follow the channels of the tensor."""
    return sample * stride + (sample * 7) % stride
