"""Measured memory: what really is allocated, independent of anything the simulator believes.

On CPU every tensor storage is seen when an operator returns it and forgotten when it dies. On CUDA the caching
allocator keeps the numbers. Neither looks at FX metadata. Storages in the host pool stand for host memory that a GPU
would not hold, so they are left out.

What CPU metering cannot see: temporaries inside one operator, and tensors that C++ creates and keeps without any
operator returning them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxhome.runtime.host_pool import host_pool

DEVICE_GRANULE_BYTES = 512  # what the CUDA caching allocator rounds to; CPU runs are counted the same way


class StorageMeter(TorchDispatchMode):
    """Counts real CPU tensor storages inside a `with` block, through forward, backward and compiled callables.

    `granule_bytes` is what each storage is rounded up to (1: exact bytes). Tensors that exist before the block count
    once they are given to `track`, or once an operator reads them. A callable from torch.compile should have been
    compiled before: compiling allocates too, and is not metered.
    """

    supports_higher_order_operators = True

    def __init__(self, *, granule_bytes: int = DEVICE_GRANULE_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self.peak_operator = "(start)"
        self._granule_bytes = granule_bytes
        self._sizes: dict[int, int] = {}  # by the identity of the storage object, which lives as long as the storage
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled callables compiled: off while Dynamo traces, on while the compiled graph runs."""
        return True

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already. Those on other devices, fake ones and host-pool slots are passed over."""
        for tensor in tensors:
            self._see(tensor, "(tracked)")

    def track_resident(self) -> None:
        """Count every CPU tensor that is alive now (see `resident_tensors`)."""
        self.track(resident_tensors())

    def reset_peak(self) -> None:
        """Start a new measurement of the peak at the current level."""
        self.peak_bytes, self.peak_operator = self.current_bytes, "(start)"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and count its storages: inputs first, since they existed before."""
        name = str(func)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, name)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, name)
        return result

    def _see(self, tensor: torch.Tensor, operator: str) -> None:
        storage = _cpu_storage(tensor)
        if storage is None:
            return
        key = id(storage)
        size_bytes = -(-storage.nbytes() // self._granule_bytes) * self._granule_bytes
        known_bytes = self._sizes.get(key)
        if known_bytes is None:
            if host_pool().owns(storage.data_ptr()):
                return
            self._deaths[key] = weakref.ref(storage, functools.partial(self._forget, key))
        if size_bytes != known_bytes:  # new, or resized in place
            self._sizes[key] = size_bytes
            self.current_bytes += size_bytes - (known_bytes or 0)
            if self.current_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_operator = self.current_bytes, operator

    def _forget(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._deaths[key]
        self.current_bytes -= self._sizes.pop(key)


def resident_tensors() -> list[torch.Tensor]:
    """Every live CPU tensor that Python knows, gradients of live leaves included, one per storage, host pool left out.

    Keeping the list keeps the tensors: to measure what is freed later, use `StorageMeter.track_resident`.
    """
    by_storage: dict[int, torch.Tensor] = {}
    for tensor in _live_tensors():
        for candidate in (*_parts(tensor), *_parts(_gradient(tensor))):
            storage = _cpu_storage(candidate)
            if storage is not None and not host_pool().owns(storage.data_ptr()):
                by_storage.setdefault(storage._cdata, candidate)
    return list(by_storage.values())


def live_storage_bytes(*, granule_bytes: int = DEVICE_GRANULE_BYTES) -> int:
    """Bytes of all storages of `resident_tensors()`, each rounded up to `granule_bytes`."""
    sizes = (tensor.untyped_storage().nbytes() for tensor in resident_tensors())
    return sum(-(-size // granule_bytes) * granule_bytes for size in sizes)


@dataclasses.dataclass
class CudaPeak:
    """Allocator statistics in bytes. `start_*` is the level at entry; the peaks are absolute, set at the end."""

    start_allocated_bytes: int
    start_reserved_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0


@contextlib.contextmanager
def measure_cuda(device: torch.device | int | None = None) -> Iterator[CudaPeak]:
    """Peak allocated and reserved bytes of a block. Resets the user's peak counters: announced metered steps only."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    peak = CudaPeak(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    try:
        yield peak
    finally:
        torch.cuda.synchronize(device)
        peak.allocated_bytes = torch.cuda.max_memory_allocated(device)
        peak.reserved_bytes = torch.cuda.max_memory_reserved(device)


def _cpu_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None where it has none (sparse, wrappers) or it is not real CPU memory (fake, meta).

    A functional tensor of a trace says "cpu" and holds nothing: only its pointer, which cannot be asked for, tells.
    """
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":
            return None
        storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return storage


def _parts(tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The tensors in which the bytes of `tensor` lie: itself, or the indices and values of a sparse one."""
    if tensor is None:
        return ()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf and tensor.requires_grad else None


def _live_tensors() -> Iterator[torch.Tensor]:
    # type() and a set, looped in C: isinstance would wake lazy proxies of other libraries and takes three times longer.
    classes = _subclasses(torch.Tensor)
    things = gc.get_objects()
    return itertools.compress(things, map(classes.__contains__, map(type, things)))


def _subclasses(base: type) -> set[type]:
    children: list[type] = base.__subclasses__()
    return {base}.union(*map(_subclasses, children))
