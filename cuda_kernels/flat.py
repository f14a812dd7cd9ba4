"""Base of the fixed-rate codecs: launch arguments over (codes, scales) planes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxhome.cuda_kernels.codec import Codec
from fxhome.cuda_kernels.dispatch import ENCODED, FIXED, PLAIN, KernelCall, KernelLaunch
from fxhome.cuda_kernels.launch import KernelKey


@dataclass(frozen=True)
class FlatCodec(Codec):
    """A codec whose encoded form is one plane of codes and, for the lossy ones, one plane of block scales.

    Its kernels take (plain, numel, codes, scales, tiles, status, seed) in both directions; seed is -1 for none.
    """

    kernel_module: str
    max_threads: int

    def constants(self, dtype: torch.dtype) -> tuple[object, ...]:
        """Compile-time constants of the kernels."""
        return ()

    def kernel_key(self, direction: str, dtype: torch.dtype) -> KernelKey:
        return KernelKey(self.kernel_module, f"make_{direction}", self.constants(dtype))

    def encode_launch(self, call: KernelCall, status: int, seed: int | None) -> KernelLaunch:
        return self._prepared("encode", call, status, -1 if seed is None else seed & 0x7FFFFFFF)

    def decode_launch(self, call: KernelCall, status: int) -> KernelLaunch:
        return self._prepared("decode", call, status, -1)

    def _prepared(self, direction: str, call: KernelCall, status: int, seed: int) -> KernelLaunch:
        layout = call.layout
        arguments = (
            (PLAIN, 0), (FIXED, call.numel), (ENCODED, 0), (ENCODED, layout.planes_offset), (FIXED, layout.tiles),
            (FIXED, status), (FIXED, seed),
        )  # fmt: skip
        return KernelLaunch(self.kernel_key(direction, call.dtype), arguments, layout.tiles, self.max_threads)
