"""Timing and transfer helpers for the codec benchmark: a registered huge-page host buffer, medians by CUDA events,
pipelines."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels import Codec

CHUNKS = 8
"""Pieces of a tensor whose encoding and copying overlap in the pipelined measurements."""


def registered_buffer(size_bytes: int) -> torch.Tensor:
    """Host memory on huge pages, touched and registered with CUDA: the fastest kind for copies in both directions."""
    size_bytes = -(-size_bytes // (2 << 20)) * (2 << 20)
    area = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(area, np.uint8)[::4096] = 1
    buffer = torch.frombuffer(area, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size_bytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {size_bytes} bytes failed with {status}")
    return buffer


def median_ms(action: Callable[[], object], repeats: int = 5, warmups: int = 2) -> float:
    """Median milliseconds of `action` on the current stream, by events; whatever it forks it must join again."""
    for _ in range(warmups):
        action()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


@dataclass(frozen=True)
class Rates:
    """Plain copies of this run, GB/s (1e9 bytes)."""

    to_host: float
    from_host: float
    on_device: float
    """Bytes read + written."""


def plain_rates(host: torch.Tensor, size_bytes: int) -> Rates:
    device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(device)
    part = host[:size_bytes]
    to_host = median_ms(lambda: part.copy_(device, non_blocking=True))
    from_host = median_ms(lambda: device.copy_(part, non_blocking=True))
    on_device = median_ms(lambda: other.copy_(device))
    return Rates(size_bytes / to_host / 1e6, size_bytes / from_host / 1e6, 2 * size_bytes / on_device / 1e6)


@dataclass(frozen=True)
class Buffers:
    """Encoded buffers of one tensor on both sides."""

    head_host: torch.Tensor
    tail_host: torch.Tensor
    head_device: torch.Tensor
    tail_device: torch.Tensor

    @property
    def host_bytes(self) -> int:
        """Host bytes from the start of the head to the end of the tail, rounded up to pages."""
        return -(-self.head_host.numel() // 4096) * 4096 + -(-self.tail_host.numel() // 4096) * 4096


def encoded_buffers(codec: Codec, source: torch.Tensor, host: torch.Tensor) -> Buffers:
    head_bytes = codec.head_bytes(source.numel(), source.dtype)
    tail_bytes = codec.tail_bytes(source.numel(), source.dtype)
    tail_start = -(-head_bytes // 4096) * 4096
    return Buffers(
        host[:head_bytes],
        host[tail_start : tail_start + tail_bytes],
        torch.empty(head_bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(tail_bytes, dtype=torch.uint8, device="cuda"),
    )


def split_like_storage(tensor: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Flat pieces whose sizes are multiples of 4096 elements, the last one excepted."""
    flat = tensor.view(-1)
    step = -(-flat.numel() // pieces // 4096) * 4096
    return [flat[start : start + step] for start in range(0, flat.numel(), step)]


class Pipeline:
    """Encodes pieces on the current stream while a copy stream moves the heads of earlier ones; tails go straight to
    the host."""

    def __init__(self, codec: Codec, source: torch.Tensor, host: torch.Tensor) -> None:
        self.codec = codec
        self.pieces = split_like_storage(source, CHUNKS)
        self.copy_stream = torch.cuda.Stream()
        self.buffers = []
        start = 0
        for piece in self.pieces:
            buffers = encoded_buffers(codec, piece, host[start:])
            self.buffers.append(buffers)
            start += buffers.host_bytes

    def to_host(self) -> None:
        compute = torch.cuda.current_stream()
        for piece, buffers in zip(self.pieces, self.buffers, strict=True):
            self.codec.encode(piece, buffers.head_device, tail=buffers.tail_host)
            self.copy_stream.wait_stream(compute)
            with torch.cuda.stream(self.copy_stream):
                buffers.head_host.copy_(buffers.head_device, non_blocking=True)
        compute.wait_stream(self.copy_stream)

    def from_host(self, targets: list[torch.Tensor]) -> None:
        compute = torch.cuda.current_stream()
        self.copy_stream.wait_stream(compute)
        for target, buffers in zip(targets, self.buffers, strict=True):
            with torch.cuda.stream(self.copy_stream):
                buffers.head_device.copy_(buffers.head_host, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record()
            compute.wait_event(arrived)
            self.codec.decode(buffers.head_device, target, tail=buffers.tail_host)
