"""One ledger per process: which graphs fxhome runs, in the order they were made, and what the device holds.

Every graph plans against the same device; what another graph holds when this one starts is resident for it. The ledger
knows the graphs weakly: they live as long as torch.compile keeps them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxhome.device import allocatable_bytes
from fxhome.joint import Calls, Share, Step, joint_parts, step_budget
from fxhome.placement import Plan
from fxhome.runtime import codec_sites

if TYPE_CHECKING:
    from fxhome.managed_graph import ManagedGraph
    from fxhome.session import Session


_lock = threading.RLock()
_graphs: list[weakref.ref[ManagedGraph]] = []
_steps: dict[torch.device, Step] = {}
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


def outstanding(device: torch.device) -> list[Session]:
    """The forwards on the device that wait for their backwards, graph by graph, oldest first."""
    return [session for graph in graphs() if graph.device == device for session in graph.outstanding]


def first_outstanding(device: torch.device) -> Session | None:
    """The forward that began the step, where it waits for its backward."""
    step = _steps.get(device)
    first = step.graphs[0]() if step is not None and step.graphs else None  # type: ignore[operator]
    return next(iter(first.outstanding), None) if first is not None else None


def num_forwards(device: torch.device) -> int:
    """How many forwards of the step on the device have begun."""
    step = _steps.get(device)
    return step.num_forwards if step is not None else 0


def note_forward(graph: ManagedGraph) -> None:
    """Tell that `graph` starts a forward: it belongs to one step with the forwards that are pending before it."""
    with _lock:
        if not graph.is_pending and not pending_before(graph):
            _steps[graph.device] = Step()
        if (step := _steps.get(graph.device)) is not None:
            step.note(weakref.ref(graph))


def note_backward_done(graph: ManagedGraph) -> bool:
    """Tell that a metered backward of `graph` is over; the last one of a step plans all its graphs jointly, once.

    Returns whether other forwards, of other graphs or of this one, took part in this step.
    """
    with _lock:
        step = _steps.get(graph.device)
        if step is None or step.num_forwards < 2:
            return False
        members = [reference() for reference in step.graphs]  # type: ignore[operator]
        if members[0] is graph:
            del _steps[graph.device]
            joint = Joint(step.graphs, step.calls())
            if all(member is not None and not member.was_joined for member in members):
                log.warning(
                    "fxhome: %d forwards of one step (graphs: %d) share one budget: planning them jointly",
                    step.num_forwards,
                    len(members),
                )
                joint.plan(None)
        return graph in members


class Joint:
    """The graphs of one step, planned jointly from what their metered steps showed."""

    def __init__(self, graphs: Sequence[Any], calls: Sequence[Calls]) -> None:
        self._graphs = graphs
        self._calls = calls
        self._shares: list[Share] = []

    def plan(self, held_bytes: int | None) -> None:
        """Give each graph its part, where `held_bytes` are held before the step; None: as it was seen. Nothing where a
        graph was gone, or not metered, before anything was known of it.
        """
        members = [graph() for graph in self._graphs]
        shares = self._shares or [member.share for member in members if member is not None]
        if len(shares) < len(members) or any(share is None for share in shares):
            return
        self._shares = shares
        parts = joint_parts(shares, self._calls, shares[0].entry_bytes if held_bytes is None else held_bytes)
        for member, part in zip(members, parts, strict=True):
            if member is not None:
                member.join(part, self, step_budget(shares))

    def begins_with(self, graph: ManagedGraph) -> bool:
        """Whether the step's first forward is one of `graph`."""
        return self._graphs[0]() is graph


def forget_all() -> None:
    """Drop every graph; called by torch._dynamo.reset()."""
    with _lock:
        _graphs.clear()
        _steps.clear()


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
