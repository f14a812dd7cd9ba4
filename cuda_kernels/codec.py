"""The codec protocol: names, sizes, error bounds, and encode/decode entry points that pick kernel or reference by
device.

Importing this module imports torch, but neither Numba nor CUDA: sizes and rates are plain arithmetic, usable by a
planner on any machine. Kernels are compiled at the first encode or decode of a CUDA tensor.

    codec = codec_by_name("zvc")
    encoded = torch.empty(codec.worst_case_bytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
    codec.encode(x, encoded)            # asynchronous on x's current stream; no size is read back
    codec.decode(encoded, y)            # y has x's dtype, shape and strides
    raise_if_corrupt()                  # after a synchronisation the caller already has

An encoded tensor is a head, whose size never depends on the data, and (variable rate only) a tail, whose part in use
does; both are one prefix of one buffer, on the tensor's own device.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fxhome.cuda_kernels.dispatch import KernelCall, KernelLaunch, PreparedKernel, prepare
from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.launch import status_address, unavailable
from fxhome.cuda_kernels.layout import Layout
from fxhome.cuda_kernels.rates import rate_share

Bytes = NDArray[np.uint8]

_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_CODECS = {
    "zvc": "fxhome.cuda_kernels.zvc",
    "csr": "fxhome.cuda_kernels.listed",
    "rle": "fxhome.cuda_kernels.listed",
    "bitpack": "fxhome.cuda_kernels.bitpack",
    "relu_mask": "fxhome.cuda_kernels.relu_mask",
    "relu6_mask": "fxhome.cuda_kernels.relu_mask",
    "narrow8": "fxhome.cuda_kernels.narrow",
    "narrow16": "fxhome.cuda_kernels.narrow",
    "narrow32": "fxhome.cuda_kernels.narrow",
    "exponent": "fxhome.cuda_kernels.exponent",
    "zvc_exponent": "fxhome.cuda_kernels.zvc_exponent",
    "fp8_e4m3": "fxhome.cuda_kernels.fp8",
    "fp8_e5m2": "fxhome.cuda_kernels.fp8",
    "int8": "fxhome.cuda_kernels.blockint",
    "int4": "fxhome.cuda_kernels.blockint",
}
"""Codec name -> the module whose CODECS holds it."""


@dataclass(frozen=True)
class Codec(ABC):
    """One way to encode a tensor. Subclasses add layout, reference and kernels."""

    name: str
    lossless: bool
    fixed_rate: bool
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the tensors it encodes."""
    error_bound_text: str
    """What |decoded - source| never exceeds, in words; "0" for lossless codecs."""

    @abstractmethod
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Sizes of the encoded form; raises CodecError for a dtype it does not encode."""

    @abstractmethod
    def encode_reference(self, source: Bytes, dtype: torch.dtype, head: Bytes, tail: Bytes, seed: int | None) -> None:
        """Encode contiguous raw bytes into zero-filled head and tail, on the CPU."""

    @abstractmethod
    def decode_reference(self, head: Bytes, tail: Bytes, dtype: torch.dtype, target: Bytes) -> None:
        """Decode into contiguous raw bytes, on the CPU."""

    @abstractmethod
    def encode_launch(self, call: KernelCall, status: int, seed: int | None) -> KernelLaunch:
        """The encode kernel and its arguments; `status` is the address of the flag that reports a bad value."""

    @abstractmethod
    def decode_launch(self, call: KernelCall, status: int) -> KernelLaunch:
        """The decode kernel and its arguments; `status` is the address of the flag that reports a bad buffer."""

    def error_bound(self, source: torch.Tensor) -> torch.Tensor:
        """Elementwise bound on |decoded - source| for finite source elements, float64, shaped like the flat source."""
        return torch.zeros(source.numel(), dtype=torch.float64)

    def head_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.layout(numel, dtype).head_bytes

    def tail_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Worst-case bytes of the data-dependent part; 0 for fixed-rate codecs."""
        return self.layout(numel, dtype).tail_bytes

    def worst_case_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that an encoded buffer must have, whatever the data."""
        return self.layout(numel, dtype).worst_case_bytes

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact encoded bytes; only a fixed-rate codec can promise any."""
        if not self.fixed_rate:
            raise CodecError(
                f"codec {self.name!r}: encoded_bytes was asked of a variable-rate codec; its size depends on the data: "
                "use worst_case_bytes for buffers and expected_bytes for estimates"
            )
        return self.layout(numel, dtype).head_bytes

    def expected_bytes(self, numel: int, dtype: torch.dtype, tail_share: float) -> int:
        """Estimate of the bytes moved when `tail_share` of the tail's slots is in use (zvc: the share of non-zeros)."""
        layout = self.layout(numel, dtype)
        return layout.head_bytes + round(layout.tail_bytes * tail_share)

    def observed_bytes(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> int:
        """Bytes in use in an encoded buffer (or its head) that lies in host memory; reads only its per-tile counts."""
        layout = self.layout(numel, dtype)
        return layout.head_bytes + self._observed_tail_bytes(encoded.numpy(), layout, dtype)

    def _observed_tail_bytes(self, head: Bytes, layout: Layout, dtype: torch.dtype) -> int:
        return 0

    def kernel_seconds(
        self, direction: str, numel: int, dtype: torch.dtype, copy_bytes_per_s: float, encoded_bytes: int
    ) -> float:
        """Estimated seconds of one "encode" or "decode" where a device-to-device copy moves `copy_bytes_per_s` (bytes
        read + written) and `encoded_bytes` are in use."""
        moved = numel * dtype.itemsize + encoded_bytes
        return moved / (copy_bytes_per_s * rate_share(self.name, direction, dtype.itemsize))

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in self.dtypes

    def require_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self.dtypes:
            allowed = ", ".join(str(allowed) for allowed in self.dtypes)
            raise CodecError(f"codec {self.name!r}: cannot encode {dtype}; it encodes {allowed}")

    def encode(self, source: torch.Tensor, encoded: torch.Tensor, *, seed: int | None = None) -> None:
        """Encode `source` (dense storage, any strides) into uint8 `encoded`.

        CUDA sources: asynchronous on the current stream, into memory of the same device. CPU sources: NumPy, at once.
        `seed` asks for stochastic rounding where the codec has it.
        """
        layout = _cached_layout(self.name, source.numel(), source.dtype)
        _check_buffers(self, "encode", source, encoded, layout)
        if source.is_cuda:
            if source.numel():
                index = _device_index(source)
                if seed is None:
                    kernel = prepared_kernel(self.name, "encode", source.numel(), source.dtype, index)
                else:
                    kernel = _prepare(self, "encode", source.numel(), source.dtype, index, seed)
                kernel(_stream(source), source.data_ptr(), encoded.data_ptr())
            return
        whole = encoded.numpy()
        head = whole[: layout.head_bytes]
        head.fill(0)
        tail = whole[layout.head_bytes : layout.worst_case_bytes]
        self.encode_reference(_raw_bytes(source), source.dtype, head, tail, seed)

    def decode(self, encoded: torch.Tensor, target: torch.Tensor) -> None:
        """Decode into `target`, which has the source's dtype, shape and strides.

        CPU targets: a corrupted buffer raises CodecError. CUDA targets: asynchronous; a corrupted buffer gives any
        values and is reported by `raise_if_corrupt`.
        """
        layout = _cached_layout(self.name, target.numel(), target.dtype)
        _check_buffers(self, "decode", target, encoded, layout)
        if target.is_cuda:
            if target.numel():
                kernel = prepared_kernel(self.name, "decode", target.numel(), target.dtype, _device_index(target))
                kernel(_stream(target), target.data_ptr(), encoded.data_ptr())
            return
        if target.numel() == 0:
            return
        whole = encoded.numpy()
        tail = whole[layout.head_bytes : layout.worst_case_bytes]
        self.decode_reference(whole[: layout.head_bytes], tail, target.dtype, _raw_bytes(target))


def _device_index(plain: torch.Tensor) -> int:
    index = plain.device.index
    assert index is not None
    return index


def _stream(plain: torch.Tensor) -> int:
    return int(torch.cuda.current_stream(plain.device).cuda_stream)


@functools.lru_cache(maxsize=8192)
def prepared_kernel(name: str, direction: str, numel: int, dtype: torch.dtype, device_index: int) -> PreparedKernel:
    """The encode or decode of tensors of that size, ready to be called with a stream and two addresses.

    `numel` is at least 1; the caller has made sure that the encoded buffer has `worst_case_bytes`.
    """
    return _prepare(codec_by_name(name), direction, numel, dtype, device_index, None)


def _prepare(
    codec: Codec, direction: str, numel: int, dtype: torch.dtype, device_index: int, seed: int | None
) -> PreparedKernel:
    call = KernelCall(numel, dtype, _cached_layout(codec.name, numel, dtype))
    if direction == "encode":
        launch = codec.encode_launch(call, status_address(), seed)
    else:
        launch = codec.decode_launch(call, status_address())
    return prepare(codec.name, direction, call, launch, device_index)


def _check_buffers(codec: Codec, action: str, plain: torch.Tensor, encoded: torch.Tensor, layout: Layout) -> None:
    require_dense(codec.name, action, plain)
    problem = _buffer_problem(encoded, layout.worst_case_bytes, plain)
    if problem is not None:
        raise CodecError(f"codec {codec.name!r} {action}: the encoded buffer {problem}")


def _buffer_problem(buffer: torch.Tensor, needed_bytes: int, plain: torch.Tensor) -> str | None:
    """What is wrong with an encoded buffer, as the end of a sentence, or None."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        return f"must be a contiguous 1-D uint8 tensor, got {buffer.dtype} {tuple(buffer.shape)}"
    if buffer.numel() < needed_bytes:
        return (
            f"has {buffer.numel()} bytes, {plain.numel()} elements of {plain.dtype} need {needed_bytes}: "
            "it is truncated or was sized for another tensor"
        )
    if needed_bytes == 0:
        return None
    if buffer.data_ptr() % 16:
        return "starts at an address that is not a multiple of 16; allocate it on its own"
    if buffer.device != plain.device:
        where = "the encoded form is copied from device to host by a copy engine, not by the kernel"
        return f"is on {buffer.device}, the tensor on {plain.device}; {where}"
    return None


def require_dense(codec: str, action: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements do not fill one stretch of storage exactly (gaps, overlaps)."""
    if tensor.is_contiguous():
        return
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            raise CodecError(
                f"codec {codec!r} {action}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has "
                "gaps or overlaps in storage; encode its base instead"
            )
        expected *= size


def _raw_bytes(tensor: torch.Tensor) -> Bytes:
    """The tensor's elements in storage order, as a writable uint8 view."""
    require_dense("cpu", "access", tensor)
    if tensor.numel() == 0:
        return np.zeros(0, np.uint8)
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(_UNSIGNED[tensor.dtype.itemsize]).numpy().view(np.uint8)


def as_unsigned(raw: Bytes, itemsize: int) -> NDArray[Any]:
    """Raw bytes as unsigned integers of `itemsize` bytes, sharing memory."""
    return raw.view(_NUMPY_UNSIGNED[itemsize])


@functools.lru_cache(maxsize=4096)
def _cached_layout(name: str, numel: int, dtype: torch.dtype) -> Layout:
    return codec_by_name(name).layout(numel, dtype)


def kernels_problem() -> str | None:
    """Why the CUDA kernels cannot run in this process, with what to install; None when they can. Imports Numba."""
    try:
        importlib.import_module("fxhome.cuda_kernels.simt")
        importlib.import_module("cuda.bindings.driver")
    except (ImportError, AttributeError, OSError) as error:
        return unavailable(error)
    return None


def codec_names() -> tuple[str, ...]:
    return tuple(_CODECS)


@functools.cache
def codec_by_name(name: str) -> Codec:
    """The codec of that name; CodecError lists the names there are."""
    if name not in _CODECS:
        raise CodecError(f"unknown codec {name!r}; allowed: {', '.join(_CODECS)}")
    codec: Codec = importlib.import_module(_CODECS[name]).CODECS[name]
    return codec
