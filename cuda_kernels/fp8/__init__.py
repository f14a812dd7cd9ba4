"""fp8 with block scales (lossy, fixed rate): e4m3 or e5m2 codes and one power-of-two scale per 64 elements.

The scale 2^s puts the largest finite magnitude of the block just inside the format's range, so scaling is exact and
the only errors are rounding to 3 (e4m3) or 2 (e5m2) mantissa bits and underflow. NaN stays NaN; infinities stay in
e5m2 and become NaN in e4m3. The element formats and power-of-two block scales are those of the OCP 8-bit and
Microscaling specifications.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.floats import BLOCK_ELEMENTS, FLOAT_NAMES, TILE_ELEMENTS, output_rounding
from fxhome.cuda_kernels.fp8 import reference
from fxhome.cuda_kernels.fp8.format import FP8_FORMATS, Fp8Format
from fxhome.cuda_kernels.layout import Layout, ceil_div, flat_layout


@dataclass(frozen=True)
class Fp8(FlatCodec):
    fp8_format: Fp8Format

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        return flat_layout(numel, TILE_ELEMENTS, 8 * ceil_div(numel, 8), ceil_div(numel, BLOCK_ELEMENTS))

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (self.fp8_format.name, FLOAT_NAMES[dtype])

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        reference.encode(source, dtype, self.fp8_format, self.layout(source.size // dtype.itemsize, dtype), head)

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        reference.decode(head, dtype, self.fp8_format, self.layout(target.size // dtype.itemsize, dtype), target)

    def error_bound(self, source: torch.Tensor) -> torch.Tensor:
        values = source.detach().double().cpu().reshape(-1).numpy()
        finite = np.where(np.isfinite(values), np.abs(values), 0.0)
        exponents = reference.block_exponents(finite.astype(np.float32), self.fp8_format)
        scale = np.repeat(2.0 ** exponents.astype(np.float64), BLOCK_ELEMENTS)[: values.size]
        relative = finite * 2.0 ** -(self.fp8_format.mantissa_bits + 1)
        bound = np.maximum(relative, scale * self.fp8_format.smallest_step / 2)
        return torch.from_numpy(bound + output_rounding(finite + bound, source.dtype))


def _fp8(fp8_format: Fp8Format) -> Fp8:
    relative, step = -(fp8_format.mantissa_bits + 1), fp8_format.smallest_step_exponent - 1
    return Fp8(
        name=f"fp8_{fp8_format.name}",
        lossless=False,
        fixed_rate=True,
        dtypes=tuple(FLOAT_NAMES),
        error_bound_text=f"max(|x| 2^{relative}, 2^(s{step:+d})), 2^s <= 2 max|block| / {fp8_format.largest:g}",
        kernel_module="fp8.kernel",
        max_threads=256,
        fp8_format=fp8_format,
    )


CODECS: dict[str, Codec] = {codec.name: codec for codec in map(_fp8, FP8_FORMATS.values())}
