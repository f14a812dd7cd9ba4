"""Bit patterns of the float formats that a rectifier's mask is taken of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_ELEMENTS = 4096
"""Elements that one warp packs into 512 bytes at a time."""


@dataclass(frozen=True)
class MaskedFormat:
    """One float format: its width in bytes and the patterns of 1, 6, infinity, and of all bits but the sign."""

    name: str
    width: int
    one: int
    six: int
    infinity: int
    magnitude: int


FORMATS = {
    torch.float32: MaskedFormat("fp32", 4, 0x3F800000, 0x40C00000, 0x7F800000, 0x7FFFFFFF),
    torch.bfloat16: MaskedFormat("bf16", 2, 0x3F80, 0x40C0, 0x7F80, 0x7FFF),
    torch.float16: MaskedFormat("fp16", 2, 0x3C00, 0x4600, 0x7C00, 0x7FFF),
}
FORMATS_BY_NAME = {form.name: form for form in FORMATS.values()}
