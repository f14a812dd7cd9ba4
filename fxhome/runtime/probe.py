"""Measure a device: medians of a few timed repetitions, large blocks, memory of the host pool.

On CUDA, times come from events; on CPU, where the "link" is memcpy, from the clock. Values are deterministic, no random
numbers are drawn, and any tracing mode around the caller is switched off: inside a partitioner fake tensors are active,
and timing those would measure nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fxhome.device import DeviceProfile, allocatable_bytes, device_identity
from fxhome.errors import DeviceError
from fxhome.runtime.host_pool import HostPool

_MIB = 1024 * 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALL_COPY_BYTES = 64 * 1024
_SMALL_COPIES = 32
_LAUNCHES = 200
_BUSY_CYCLES = 20_000_000
_MATRIX_ROOM_BYTES = 2048 * _MIB
_DEVICE_SUMS = 16
_PRODUCTS = 200

Timer = Callable[[Callable[[], object], int], float]  # (work, repetitions) -> median seconds of one


def measure(device: torch.device) -> DeviceProfile:
    """Profile a resolved device (see fxhome.device.resolve_device). Raises DeviceError where it has no memory free."""
    with _disable_current_modes(), torch.no_grad():
        pool = HostPool()  # of its own: what measuring needs is not charged to the steps that follow
        try:
            profile = _measure_cuda(pool, device) if device.type == "cuda" else _measure_cpu(pool)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"device {device}: too little of its memory is free to measure it once ({str(error).splitlines()[0]}); "
                "run `fxhome profile` before the model is built: what it finds is kept for later processes"
            ) from None
        pool.close()
        return profile


def _measure_cpu(pool: HostPool) -> DeviceProfile:
    kind, name, versions = device_identity(torch.device("cpu"))
    block_bytes = 32 * _MIB
    host, _ = pool.empty(block_bytes, pinned=False)
    near = torch.ones(block_bytes, dtype=torch.uint8)
    out_seconds = _median_by_clock(lambda: host.copy_(near), 5)
    back_seconds = _median_by_clock(lambda: near.copy_(host), 5)
    small_seconds = _median_by_clock(lambda: host[:_SMALL_COPY_BYTES].copy_(near[:_SMALL_COPY_BYTES]), 50)
    one_way = block_bytes / min(out_seconds, back_seconds)
    return DeviceProfile(
        name=name,
        kind=kind,
        d2h_bytes_per_s=block_bytes / out_seconds,
        h2d_bytes_per_s=block_bytes / back_seconds,
        duplex_bytes_per_s=one_way,  # both "directions" are the same cores copying
        copy_latency_us=_fixed_part_us(small_seconds, one_way),
        memory_bytes_per_s=2 * one_way,
        launch_us=_launch_us(torch.device("cpu"), _median_by_clock),
        flops_per_s=_matrix_rates(torch.device("cpu"), 192, _median_by_clock),
        total_memory_bytes=int(psutil.virtual_memory().total),
        host_memory_bytes=int(psutil.virtual_memory().total),
        versions=versions,
    )


def _measure_cuda(pool: HostPool, device: torch.device) -> DeviceProfile:
    kind, name, versions = device_identity(device)
    with torch.cuda.device(device):
        # Little may be left: an allocator that has failed once may fail again, so nothing too large is tried.
        room_bytes = allocatable_bytes(device)
        total_bytes = torch.cuda.mem_get_info(device)[1]
        block_bytes = max(_MIB, min(128 * _MIB, room_bytes // 16 // _MIB * _MIB))
        matrix_size = 4096 if room_bytes >= _MATRIX_ROOM_BYTES else 1024
        host_out, _ = pool.empty(block_bytes, pinned=True)
        host_back, _ = pool.empty(block_bytes, pinned=True)
        near_out = torch.ones(block_bytes, dtype=torch.uint8, device=device)
        near_back = torch.empty_like(near_out)

        def out() -> object:
            return host_out.copy_(near_out, non_blocking=True)

        def back() -> object:
            return near_back.copy_(host_back, non_blocking=True)

        def small_copies() -> None:  # in a row: alone, the time between its events is mostly the host's
            for _ in range(_SMALL_COPIES):
                host_out[:_SMALL_COPY_BYTES].copy_(near_out[:_SMALL_COPY_BYTES], non_blocking=True)

        out_seconds, back_seconds = _median_by_events(out, 7), _median_by_events(back, 7)
        duplex = 2 * block_bytes / _both_ways_seconds(out, back, 4)
        small_seconds = _median_by_events(small_copies, 5) / _SMALL_COPIES

        # What generated kernels do most: read two tensors, write one. In a row: the start of a single one would be a
        # good part of its time.
        left, right = near_out.view(torch.bfloat16), near_back.view(torch.bfloat16)
        target = torch.empty_like(left)

        def sums() -> None:
            for _ in range(_DEVICE_SUMS):
                torch.add(left, right, out=target)

        sum_seconds = _median_by_events(sums, 5) / _DEVICE_SUMS
        return DeviceProfile(
            name=name,
            kind=kind,
            d2h_bytes_per_s=block_bytes / out_seconds,
            h2d_bytes_per_s=block_bytes / back_seconds,
            duplex_bytes_per_s=duplex,
            copy_latency_us=_fixed_part_us(small_seconds, block_bytes / out_seconds),
            memory_bytes_per_s=3 * block_bytes / sum_seconds,
            launch_us=_launch_us(device, _median_by_events),
            flops_per_s=_matrix_rates(device, matrix_size, _median_by_events),
            total_memory_bytes=total_bytes,
            host_memory_bytes=int(psutil.virtual_memory().total),
            versions=versions,
            copy_slowdown=_copy_slowdown(out, back, device, matrix_size),
            kernel_us=_kernel_us(device),
        )


def _copy_slowdown(out: Callable[[], object], back: Callable[[], object], device: torch.device, size: int) -> float:
    """Time of matrix products beside copies, over their time alone; in runs long enough for the clock to settle."""
    left = (torch.arange(size * size, device=device).remainder_(251).sub_(125).view(size, size) / 125).bfloat16()
    target = torch.empty_like(left)
    copies = torch.cuda.Stream()

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(left, left, out=target)

    def seconds_beside(copy: Callable[[], object], count: int) -> float:
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            for _ in range(count):
                copy()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        products()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    products()
    ratios = []
    for copy in (out, back) * 2:  # in turns with runs alone: the clock drifts
        alone = seconds_beside(copy, 0)
        one = _median_by_events(copy, 1)
        beside = seconds_beside(copy, 1 + int(1.2 * alone / one))
        ratios.append(2 * beside / (alone + seconds_beside(copy, 0)))
    return max(1.0, float(statistics.mean(ratios)))


def _median_by_clock(work: Callable[[], object], repetitions: int) -> float:
    work()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return max(statistics.median(seconds), 1e-9)


def _median_by_events(work: Callable[[], object], repetitions: int) -> float:
    work()
    torch.cuda.synchronize()
    milliseconds = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return max(float(statistics.median(milliseconds)) * 1e-3, 1e-9)


def _both_ways_seconds(out: Callable[[], object], back: Callable[[], object], copies: int) -> float:
    """Seconds for one copy of each direction while both engines are busy."""
    streams = (torch.cuda.Stream(), torch.cuda.Stream())

    def both() -> None:
        here = torch.cuda.current_stream()
        for stream, work in zip(streams, (out, back), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(copies):
                    work()
        for stream in streams:
            here.wait_stream(stream)

    return _median_by_events(both, 5) / copies


def _fixed_part_us(small_seconds: float, bytes_per_s: float) -> float:
    return max(small_seconds - _SMALL_COPY_BYTES / bytes_per_s, 1e-7) * 1e6


def _kernel_us(device: torch.device) -> float:
    """One small kernel in a row that is queued behind a busy device: the host is not what it waits for."""
    one = torch.zeros(1, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        torch.cuda._sleep(_BUSY_CYCLES)
        begin.record()
        for _ in range(_LAUNCHES):
            one.add_(1)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _LAUNCHES)
    return float(statistics.median(times))


def _launch_us(device: torch.device, median: Timer) -> float:
    """One small operator in a row of many: what an operator costs even when it has nothing to do."""
    one = torch.zeros(1, device=device)

    def row() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1)

    return median(row, 5) / _LAUNCHES * 1e6


def _matrix_rates(device: torch.device, size: int, median: Timer) -> tuple[tuple[str, float], ...]:
    # Varied values: a GPU multiplying zeros draws less power and runs faster than it ever does in training.
    values = torch.arange(size * size, device=device, dtype=torch.float32).remainder_(251).sub_(125).view(size, size)
    rates = []
    for dtype in _DTYPES:
        left = (values / 125).to(dtype)
        target = torch.empty_like(left)
        seconds = median(lambda left=left, target=target: torch.mm(left, left, out=target), 7)  # type: ignore[misc]
        rates.append((str(dtype).removeprefix("torch."), 2 * size**3 / seconds))
    return tuple(rates)
