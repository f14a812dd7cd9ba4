"""Timing and transfer helpers for the codec benchmark: a registered huge-page host buffer, medians by CUDA events,
round trips by the runtime's own operators. Without a GPU everything runs on the CPU, so that it can be tested there."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fxhome.cuda_kernels import Codec
from fxhome.runtime import codec_ops, codec_sites, ops

SITE = "benchmark"
STREAM = 6
"""Tensors in flight where a step's stream of swaps is measured."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def registered_buffer(size_bytes: int) -> torch.Tensor:
    """Host memory on huge pages, touched and registered with CUDA: the fastest kind for copies in both directions."""
    size_bytes = -(-size_bytes // (2 << 20)) * (2 << 20)
    area = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(area, np.uint8)[::4096] = 1
    buffer = torch.frombuffer(area, dtype=torch.uint8)
    if DEVICE.type != "cuda":
        return buffer
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size_bytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {size_bytes} bytes failed with {status}")
    return buffer


def median_ms(action: Callable[[], object], repeats: int = 5, warmups: int = 2) -> float:
    """Median milliseconds of `action` on the current stream, by events; whatever it forks it must join again."""
    for _ in range(warmups):
        action()
    times = []
    for _ in range(repeats if DEVICE.type != "cuda" else 0):
        begin = time.perf_counter()
        action()
        times.append((time.perf_counter() - begin) * 1e3)
    for _ in range(repeats if DEVICE.type == "cuda" else 0):
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
    device = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE).random_()
    other = torch.empty_like(device)
    part = host[:size_bytes]
    to_host = median_ms(lambda: part.copy_(device, non_blocking=True))
    from_host = median_ms(lambda: device.copy_(part, non_blocking=True))
    on_device = median_ms(lambda: other.copy_(device))
    return Rates(size_bytes / to_host / 1e6, size_bytes / from_host / 1e6, 2 * size_bytes / on_device / 1e6)


class RoundTrip:
    """A tensor's way to the host and back by the operators that a plan inserts: one encode of the whole storage, a copy
    of what is in use as far as the host knows, and back."""

    def __init__(self, codec: Codec, source: torch.Tensor) -> None:
        self.codec, self.source = codec, source
        self.size_bytes = source.untyped_storage().nbytes()
        self.place = self.size_bytes, list(source.shape), list(source.stride()), 0, source.dtype
        self.host = torch.empty(0)
        self.stream: list[torch.Tensor] = []
        codec_sites.clear()
        self.to_host()
        synchronize()

    @property
    def site(self) -> codec_sites.CodecSite:
        """What is known about a variable-rate codec's size."""
        found = codec_sites.site_of(SITE, self.codec.name, self.size_bytes)
        assert found is not None
        return found

    @property
    def encoded_bytes(self) -> int:
        """What is in use of the encoded form."""
        if self.codec.fixed_rate:
            return codec_ops.buffer_bytes(self.codec.name, self.size_bytes, self.source.dtype)
        self.site.look()
        return self.site.seen_bytes or self.size_bytes

    def to_host(self) -> None:
        """Queue it; the current stream waits for the end."""
        self.host = ops.swap_out_wait(*self._start_out())

    def from_host(self) -> torch.Tensor:
        """Queue the way back; the current stream waits for the end."""
        return self._decoded(self._start_in(self.host), self.host)

    def stream_to_host(self) -> None:
        """Queue it STREAM times: as in a step, one is encoded while the one before is copied."""
        started = [self._start_out() for _ in range(STREAM)]
        self.stream = [ops.swap_out_wait(*pair) for pair in started]

    def stream_from_host(self) -> None:
        """Queue the way back of what `stream_to_host` moved."""
        started = [self._start_in(host) for host in self.stream]
        for encoded, host in zip(started, self.stream, strict=True):
            self._decoded(encoded, host)

    def _start_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.codec.fixed_rate:
            encoded = codec_ops.encode_op(self.source, self.size_bytes, self.codec.name)
            return ops.swap_out(encoded), encoded
        encoded = codec_ops.encode_op(self.source, self.size_bytes, self.codec.name, self.size_bytes, SITE)
        return codec_ops.swap_out_encoded_op(encoded), encoded

    def _start_in(self, host: torch.Tensor) -> torch.Tensor:
        if self.codec.fixed_rate:
            moving: torch.Tensor = ops.swap_in(host, [host.numel()], [1], 0, torch.uint8, self.source.device)
        else:
            moving = codec_ops.swap_in_encoded_op(host, self.source.device)
        return moving

    def _decoded(self, moving: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = codec_ops.decode_op(ops.swap_in_wait(moving, host), *self.place, self.codec.name)
        return decoded

    def check(self) -> None:
        """What comes back is the source, or within the codec's error bound of it."""
        found = self.from_host()
        synchronize()
        name = f"{self.codec.name} {self.source.dtype}"
        if self.codec.lossless:
            assert torch.equal(found.view(torch.uint8), self.source.view(torch.uint8)), f"{name}: not lossless"
            return
        error = (found.double() - self.source.double()).abs().cpu()
        assert bool((error <= self.codec.error_bound(self.source.cpu())).all()), f"{name}: beyond the error bound"
