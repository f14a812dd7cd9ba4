"""Timing and transfer helpers for the codec benchmark: a registered huge-page host buffer, medians by CUDA events,
the runtime's staged transfers."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels import Codec
from fxhome.runtime.codec_ops import used_tail_bytes
from fxhome.runtime.codec_sites import MARGIN_BYTES
from fxhome.runtime.staging import chunk_kernels, staging_of


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


class StagedTransfer:
    """A tensor's way to the host and back as the runtime does it: chunk by chunk through the staging buffers, the copy
    engine told the last size seen and a margin on the way out, the exact sizes on the way back."""

    def __init__(self, codec: Codec, source: torch.Tensor, host: torch.Tensor) -> None:
        index = source.device.index
        assert index is not None
        size_bytes = source.numel() * source.dtype.itemsize
        self.source, self.host, self.codec = source, host, codec
        self.staging = staging_of(index)
        self.staging.reserve(size_bytes)
        self.encode = chunk_kernels(codec.name, "encode", size_bytes, source.dtype, index)
        self.decode = chunk_kernels(codec.name, "decode", size_bytes, source.dtype, index)
        self.copies, self.start = torch.cuda.Stream(), torch.cuda.Event()
        self.notes = [0] * len(self.encode)
        self.bounds = [chunk.worst_case_bytes for chunk, _ in self.encode]
        self.exact = list(self.bounds)
        self.to_host()
        torch.cuda.synchronize()
        self.learn()

    def learn(self) -> None:
        """Read the sizes of the last transfer."""
        for number, (chunk, _) in enumerate(self.encode):
            if self.codec.fixed_rate:
                continue
            used = used_tail_bytes(self.host.data_ptr() + chunk.slot_offset)
            self.exact[number] = chunk.head_bytes + used
            bound = self.exact[number] + MARGIN_BYTES + used // 64 // 16 * 16
            self.bounds[number] = min(bound, chunk.worst_case_bytes)

    @property
    def encoded_bytes(self) -> int:
        """What is in use of the encoded form."""
        return sum(self.exact)

    def to_host(self) -> None:
        """Queue it; the current stream waits for the end."""
        current = torch.cuda.current_stream()
        self.start.record(current)
        self.copies.wait_event(self.start)
        addresses = self.source.data_ptr(), self.host.data_ptr()
        self.staging.to_host(self.encode, self.bounds, self.notes, *addresses, self.copies, self.start)
        current.wait_stream(self.copies)

    def from_host(self, target: torch.Tensor) -> None:
        """Queue the way back into `target`; the current stream waits for the end."""
        current = torch.cuda.current_stream()
        self.copies.wait_stream(current)
        addresses = self.host.data_ptr(), target.data_ptr()
        current.wait_stream(self.staging.from_host(self.decode, self.exact, True, *addresses, self.copies))
