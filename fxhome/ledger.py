"""One ledger per process: which graphs fxhome runs, in the order they were made, and what the device holds.

Every graph plans against the same device; what another graph holds when this one starts is resident for it. The ledger
knows the graphs weakly: they live as long as torch.compile keeps them.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from fxhome.placement import Plan

if TYPE_CHECKING:
    from fxhome.managed_graph import ManagedGraph

_lock = threading.RLock()
_graphs: list[weakref.ref[ManagedGraph]] = []


def register(graph: ManagedGraph) -> None:
    """Enter a graph; it leaves by dying."""
    with _lock:
        _graphs.append(weakref.ref(graph))


def graphs() -> list[ManagedGraph]:
    """The graphs alive in this process, oldest first."""
    with _lock:
        alive = [graph for reference in _graphs if (graph := reference()) is not None]
        _graphs[:] = [weakref.ref(graph) for graph in alive]
        return alive


def plans() -> list[Plan]:
    """Fresh snapshots of the plans in force, oldest graph first; a graph without a plan (inference) has none."""
    return [plan for graph in graphs() if (plan := graph.plan) is not None]


def forget_all() -> None:
    """Drop every graph; called by torch._dynamo.reset()."""
    with _lock:
        _graphs.clear()


def held_bytes(device: torch.device) -> int:
    """Bytes allocated on `device` right now: the caching allocator's on CUDA, live tensor storages on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    from fxhome.runtime.meter import live_storage_bytes

    return live_storage_bytes(granule_bytes=1)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on `device`, its allocator's cached blocks included."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        fraction = torch.cuda.get_per_process_memory_fraction(device)
        capped = int(total * fraction) - torch.cuda.memory_allocated(device)
        return max(0, min(free + cached, capped))
    from fxhome.runtime.host_memory import read_host_limits

    return read_host_limits().available_bytes
