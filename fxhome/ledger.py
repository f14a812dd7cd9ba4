"""One ledger per process: which graphs fxhome runs, in the order they were made, and what the device holds.

Every graph plans against the same device; what another graph holds when this one starts is resident for it. The ledger
knows the graphs weakly: they live as long as torch.compile keeps them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fxhome.device import allocatable_bytes
from fxhome.placement import Plan
from fxhome.runtime import codec_sites

if TYPE_CHECKING:
    from fxhome.managed_graph import ManagedGraph


@dataclass(frozen=True)
class Share:
    """What one graph of a step needs, seen in its metered step. Bytes.

    entry: held at its forward's entry. saved: what its plan keeps for the backward. wanted: what the baseline would
    keep.
    least: the smallest peak of any plan, above entry. outside: held during its backward by no part of its graph.
    """

    entry_bytes: int
    saved_bytes: int
    wanted_bytes: int
    least_bytes: int
    outside_bytes: int
    budget_bytes: int


_lock = threading.RLock()
_graphs: list[weakref.ref[ManagedGraph]] = []
_chains: list[list[weakref.ref[ManagedGraph]]] = []
log = logging.getLogger("fxhome")


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
    found = [plan for graph in graphs() if (plan := graph.plan) is not None]
    return [replace(plan, notes=(*plan.notes, *codec_sites.notes(plan.graph_fingerprint))) for plan in found]


def pending_before(graph: ManagedGraph) -> list[ManagedGraph]:
    """The other graphs on the device whose backward is outstanding: they are part of the same step."""
    return [other for other in graphs() if other is not graph and other.device == graph.device and other.is_pending]


def note_forward(graph: ManagedGraph) -> None:
    """Tell that `graph` starts a forward: it belongs to one step with the graphs that are pending before it."""
    ahead = pending_before(graph)
    if not ahead:
        return
    with _lock:
        for chain in _chains:
            members = [member() for member in chain]
            if members[0] is ahead[0]:
                if graph not in members:
                    chain.append(weakref.ref(graph))
                return
        _chains.append([weakref.ref(other) for other in [*ahead, graph]])


def note_backward_done(graph: ManagedGraph) -> bool:
    """Tell that a metered backward of `graph` is over; the last one of a step plans all its graphs jointly, once.

    Returns whether other graphs took part in this step.
    """
    with _lock:
        is_one_of_several = any(member() is graph for chain in _chains for member in chain)
        for chain in list(_chains):
            members = [member() for member in chain]
            if members[0] is not graph:
                continue
            _chains.remove(chain)
            alive = [member for member in members if member is not None]
            if any(member.was_joined or not member.shares_budget for member in alive):
                continue
            shares = [member.share for member in alive]
            if len(alive) > 1 and all(share is not None for share in shares):
                log.warning("fxhome: %d graphs share one step and one budget: planning them jointly", len(alive))
                for member, between in zip(alive, joint_between([s for s in shares if s is not None]), strict=True):
                    member.join(between)
        return is_one_of_several


def joint_between(shares: list[Share]) -> list[int]:
    """Bytes to keep free between each graph's forward and its backward, in the order of the forwards.

    What all graphs may save together is the budget less what was held before the step and less the largest least need
    of any
    of them; each gets a part of it in proportion to what it would keep if it could.
    """
    budget, held = shares[0].budget_bytes, shares[0].entry_bytes
    largest_need = max(share.least_bytes + share.outside_bytes for share in shares)
    room = max(0, budget - held - largest_need)
    wanted = sum(share.wanted_bytes for share in shares[:-1])
    between = []
    before = 0
    for i, share in enumerate(shares):
        if i == len(shares) - 1 or not wanted:
            between.append(0)
            continue
        may_save = min(share.wanted_bytes, room * share.wanted_bytes // wanted)
        between.append(max(0, budget - held - before - may_save))
        before += may_save
    return between


def forget_all() -> None:
    """Drop every graph; called by torch._dynamo.reset()."""
    with _lock:
        _graphs.clear()
        _chains.clear()


def held_bytes(device: torch.device) -> int:
    """Bytes allocated on `device` right now: the caching allocator's on CUDA, live tensor storages on CPU."""
    if device.type == "cuda":
        # As torch.cuda.memory_allocated, which flattens and sorts every counter there is: 0.2 ms in each step.
        counters = torch.cuda.memory_stats_as_nested_dict(device)
        return int(counters["allocated_bytes"]["all"]["current"]) if counters else 0
    from fxhome.runtime.meter import live_storage_bytes

    return live_storage_bytes(granule_bytes=1)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on `device`, its allocator's cached blocks included."""
    if device.type == "cuda":
        return allocatable_bytes(device)
    from fxhome.runtime.host_memory import read_host_limits

    return read_host_limits().available_bytes
