"""The caching allocator below tensors: raw blocks, what it holds, and its own history, as placed_blocks.py needs them.

Nothing here is public in torch; all of it is there from 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fxhome.allocator_trace import Snapshot, snapshot_of


class Allocator(Protocol):
    """What laying needs of an allocator."""

    def take(self, size_bytes: int) -> int:
        """Allocate raw memory on the current stream. Raises torch.OutOfMemoryError."""

    def give(self, address: int) -> None:
        """Free it."""

    def map(self, size_bytes: int) -> int:
        """Take one block and give it back, so that its pages stay mapped; its address. No counter of a peak shows it.
        Raises torch.OutOfMemoryError.
        """

    def stream(self) -> int:
        """The current stream, or -1 where another device is the current one."""

    def large_bytes(self) -> tuple[int, int]:
        """(allocated, reserved) for large blocks of all streams."""

    def pressure(self) -> tuple[int, int]:
        """(bytes reserved for large blocks of all streams, how often memory was given back to go on)."""

    def limit_bytes(self) -> int:
        """What may be reserved in all: the cap on this process, or what is reserved and what the device has free."""

    def snapshot(self, stream: int) -> Snapshot:
        """What is mapped and in use. Raises UnsteadyError."""

    def empty_cache(self) -> None:
        """Give back every page that holds nothing."""

    def is_recorded(self) -> bool:
        """Whether anyone records the history."""

    def record(self) -> None:
        """Record the history from here on."""

    def history(self) -> Sequence[Mapping[str, Any]]:
        """What was recorded so far."""

    def stop(self) -> None:
        """Record no longer, and forget."""


class CudaAllocator:
    """torch's caching allocator on one CUDA device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.give: Callable[[int], None] = torch._C._cuda_cudaCachingAllocator_raw_delete

    def take(self, size_bytes: int) -> int:
        return int(
            torch._C._cuda_cudaCachingAllocator_raw_alloc(size_bytes, torch._C._cuda_getCurrentRawStream(self.device))
        )

    def map(self, size_bytes: int) -> int:
        before_bytes = torch.cuda.max_memory_allocated(self.device)
        address = self.take(size_bytes)
        self.give(address)
        if torch.cuda.max_memory_allocated(self.device) > before_bytes:
            # The step that follows takes as much as the ones before, so a peak that is read later is that of a step.
            torch.cuda.reset_peak_memory_stats(self.device)
        return address

    def stream(self) -> int:
        if torch._C._cuda_getDevice() != self.device:
            return -1
        return int(torch._C._cuda_getCurrentRawStream(self.device))

    def large_bytes(self) -> tuple[int, int]:
        stats: Any = torch._C._cuda_memoryStats(self.device)
        allocated, reserved = (stats[name]["large_pool"]["current"] for name in ("allocated_bytes", "reserved_bytes"))
        return int(allocated), int(reserved)

    def pressure(self) -> tuple[int, int]:
        stats: Any = torch._C._cuda_memoryStats(self.device)
        return int(stats["reserved_bytes"]["large_pool"]["current"]), int(stats["num_alloc_retries"])

    def limit_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        return min(int(share * total_bytes), torch.cuda.memory_reserved(self.device) + free_bytes)

    def snapshot(self, stream: int) -> Snapshot:
        return snapshot_of(torch.cuda.memory._snapshot()["segments"], self.device, stream)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def is_recorded(self) -> bool:
        return bool(torch._C._cuda_isHistoryEnabled())

    def record(self) -> None:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", clear_history=True)

    def history(self) -> Sequence[Mapping[str, Any]]:
        entries: Sequence[Mapping[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][self.device]
        return entries

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None, stacks="python", clear_history=True)
