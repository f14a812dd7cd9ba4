"""Index narrowing: int64 indices stored in 1, 2 or 4 bytes (lossless, fixed rate: 8x, 4x, 2x).

Choose the width whose range the producing op guarantees (narrow8: 0..255, narrow16: 0..65535, narrow32:
-2^31..2^31-1). A value outside it is an error: raised at once on the CPU, reported by `raise_if_corrupt` on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels.codec import Bytes, Codec
from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.layout import Layout, flat_layout

TILE_ELEMENTS = 512


@dataclass(frozen=True)
class Narrow(FlatCodec):
    width: int
    """Bytes per stored index."""

    @property
    def stored_dtype(self) -> np.dtype[np.integer]:
        types: dict[int, np.dtype[np.integer]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.int32)}
        return types[self.width]

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        self.require_dtype(dtype)
        return flat_layout(numel, TILE_ELEMENTS, numel * self.width, 0)

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        return (self.width,)

    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        values = source.view(np.int64)
        bounds = np.iinfo(self.stored_dtype)
        if values.size and (values.min() < bounds.min or values.max() > bounds.max):
            raise CodecError(
                f"codec {self.name!r} encode: indices span {values.min()} to {values.max()}, allowed are "
                f"{bounds.min} to {bounds.max}; use a wider narrow codec or none"
            )
        head[: values.size * self.width].view(self.stored_dtype)[:] = values

    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        values = target.view(np.int64)
        values[:] = head[: values.size * self.width].view(self.stored_dtype)


def _narrow(bits: int) -> Narrow:
    return Narrow(
        name=f"narrow{bits}",
        lossless=True,
        fixed_rate=True,
        dtypes=(torch.int64,),
        error_bound_text="0",
        kernel_module="narrow.kernel",
        max_threads=256,
        width=bits // 8,
    )


CODECS: dict[str, Codec] = {codec.name: codec for codec in (_narrow(8), _narrow(16), _narrow(32))}
