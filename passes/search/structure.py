"""What the search reads off the graph once: who is demanded, what a recomputation drags in, who is alive where.

All of this guides the search and none of it is trusted: every figure that decides is the simulator's.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxhome.passes.compiled import compiled
from fxhome.passes.search.result import Placements
from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, Problem, SimArrays, SimResult
from fxhome.passes.simulate_kernels import BACKWARD, FORWARD, liveness

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@compiled()
def _direct_readers(g, first, last):  # type: ignore[no-untyped-def]
    """First and last backward node that reads each storage, directly or through views of it; -1 where none."""
    n = g.node_phase.shape[0]
    stack = np.empty(n + 1, np.int32)
    stamp = np.full(n, -1, np.int32)
    for reader in range(n):
        if g.node_phase[reader] != BACKWARD:
            continue
        top = 0
        stack[0] = reader
        while top >= 0:
            node = stack[top]
            top -= 1
            for edge in range(g.read_start[node], g.read_start[node + 1]):
                source = g.backward_alias[g.read_node[edge]]
                if g.node_phase[source] != FORWARD or stamp[source] == reader:
                    continue
                stamp[source] = reader
                storage = g.root_storage[source]
                if storage >= 0:
                    if first[storage] < 0:
                        first[storage] = reader
                    last[storage] = reader
                else:
                    top += 1
                    stack[top] = source


@compiled()
def recompute_price(g, placement, saved, rebuilt, recomputable, storages, cost, extra, closure, closure_start):  # type: ignore[no-untyped-def]
    """For each asked storage: us of what recomputing it adds, bytes newly saved by it, and the storages it drags in.

    A node already rebuilt in the present program costs nothing more. The walk stops at what is saved; what is not saved
    is walked through where it may be recomputed. `closure[closure_start[i]:closure_start[i + 1]]` are those dragged in.
    Returns the length of the closure, or -1 where it does not fit.
    """
    n = g.node_phase.shape[0]
    stack = np.empty(n + 1, np.int32)
    stamp = np.full(n, -1, np.int32)
    used = 0
    closure_start[0] = 0
    for i in range(storages.shape[0]):
        target = storages[i]
        total = 0.0
        more = 0
        top = 0
        stack[0] = g.storage_root[target]
        stamp[stack[0]] = i
        while top >= 0:
            node = stack[top]
            top -= 1
            if rebuilt[node] == 0:
                total += g.node_time_us[node]
            for edge in range(g.read_start[node], g.read_start[node + 1]):
                source = g.backward_alias[g.read_node[edge]]
                if g.node_phase[source] != FORWARD or stamp[source] == i:
                    continue
                stamp[source] = i
                storage = g.root_storage[source]
                if storage >= 0:
                    if saved[storage]:
                        continue
                    choice = placement[storage]
                    if choice != RECOMPUTE and choice != RECOMPUTE_EACH:
                        if not recomputable[storage]:
                            more += g.storage_bytes[storage]
                            continue
                        if used >= closure.shape[0]:
                            return -1
                        closure[used] = storage
                        used += 1
                top += 1
                stack[top] = source
        cost[i] = total
        extra[i] = more
        closure_start[i + 1] = used
    return used


@dataclass(frozen=True, eq=False)
class Structure:
    """Static facts. first_reader / last_reader: node ids of direct backward readers per storage, -1 where none.

    units: lists of storages that stand for the same tensor of identical layers (singletons left out).
    reachable, reachable_node: what some placement makes the backward demand, per storage and per node.
    swap_us: both copies of a storage, alone on the link.
    """

    problem: Problem
    decisions: Int64
    first_reader: Int32
    last_reader: Int32
    swap_us: Float64
    units: tuple[Int64, ...]
    reachable: Bool
    reachable_node: Bool

    @property
    def demanded(self) -> Bool:
        """Storages that a backward node reads whatever the placement."""
        demanded: Bool = self.first_reader >= 0
        return demanded


def read_structure(problem: Problem) -> Structure:
    """Compute `Structure` for a problem: O(nodes + view edges)."""
    g = problem.arrays
    storages = problem.num_storages
    first = np.full(storages, -1, np.int32)
    last = np.full(storages, -1, np.int32)
    _direct_readers(g, first, last)
    decisions = problem.decisions()
    reachable, reachable_node = _reachable(problem)
    decisions = decisions[reachable[decisions]]
    link = problem.link
    rate = link.d2h_us_per_byte + link.h2d_us_per_byte
    swap_us = (2 * link.latency_us + g.storage_copy_bytes * rate).astype(np.float64)
    units: list[Int64] = []
    if problem.group.shape[0] == storages:
        labels = problem.group[decisions]
        for label in np.unique(labels[labels >= 0]):
            members = decisions[labels == label]
            if members.shape[0] > 1:
                units.append(members)
    return Structure(problem, decisions, first, last, swap_us, tuple(units), reachable, reachable_node)


def _reachable(problem: Problem) -> tuple[Bool, Bool]:
    """Storages and nodes that some placement makes the backward demand: reachable from it against the data flow.

    Pruning rule 1: any other storage has one effect whatever its placement (`build` never asks for it), so it is no
    decision. Nothing is lost.
    """
    g = problem.arrays
    reached: Bool = (g.node_phase == BACKWARD).copy()
    _mark_sources(g, reached)
    roots = g.storage_root
    storages: Bool = (roots >= 0) & reached[roots] & (g.node_phase[roots] == FORWARD)
    return storages, reached


@compiled()
def _mark_sources(g, reached):  # type: ignore[no-untyped-def]
    changed = True
    while changed:  # a second round only where a mutated input's clone stands after its reader
        changed = False
        for node in range(g.node_phase.shape[0] - 1, -1, -1):
            if not reached[node]:
                continue
            for edge in range(g.read_start[node], g.read_start[node + 1]):
                source = g.backward_alias[g.read_node[edge]]
                if not reached[source]:
                    reached[source] = True
                    if source > node:
                        changed = True


def read_storages(g: SimArrays, node: int) -> list[int]:
    """Storages a node reads, directly or through views."""
    found: list[int] = []
    stack = [node]
    while stack:
        v = stack.pop()
        for u in g.read_node[g.read_start[v] : g.read_start[v + 1]]:
            storage = int(g.root_storage[u])
            if storage >= 0:
                found.append(storage)
            elif g.node_phase[u] == FORWARD:
                stack.append(int(u))
    return found


def instruction_times(g: SimArrays, program: Int32) -> Float64:
    """Compute us of every program entry: nodes, then encodes, then decodes by storage."""
    times: Float64 = np.concatenate([g.node_time_us, g.storage_encode_us, g.storage_decode_us])[program]
    return times


def own_runs(g: SimArrays, result: SimResult) -> Int64:
    """Where in the program each node runs for the first time, int64[nodes]; -1 for a node that only runs again."""
    nodes = g.node_phase.shape[0]
    own = np.flatnonzero((result.recomputed == 0) & (result.program < nodes))
    places = np.full(nodes, -1, np.int64)
    places[result.program[own]] = own
    return places


@dataclass(frozen=True, eq=False)
class Holders:
    """Storages alive at one position and what moving each elsewhere would free."""

    storage: Int64
    size_bytes: Int64
    rebuilt: Bool


def holders_at(structure: Structure, placement: Placements, result: SimResult, position: int) -> Holders:
    """Deciding storages alive at `position` that the instruction there does not itself read or write."""
    g = structure.problem.arrays
    storages = structure.problem.num_storages
    total, forward = result.program.shape[0], result.forward_length
    held = np.zeros(storages, np.int8)
    a, b, c, d = (np.empty(storages, np.int32) for _ in range(4))
    curve = np.zeros(total + 2, np.int64)
    liveness(g, placement, result.saved, result.program, forward, total, curve, a, b, c, d, position, held)
    free = np.zeros(storages, np.bool_)
    free[structure.decisions] = True
    node = int(result.nodes[position]) if position < total else g.node_phase.shape[0]
    if node < g.node_phase.shape[0]:
        touched = g.root_storage[g.backward_alias[g.read_node[g.read_start[node] : g.read_start[node + 1]]]]
        free[touched[touched >= 0]] = False
        free[g.own_storage[g.own_start[node] : g.own_start[node + 1]]] = False
    saved = result.saved == 1
    kept = free & (held == 1) & saved & (placement == KEEP)
    rebuilt = free & (held == 1) & ~saved & (position >= forward)
    # A swapped storage back on the device early, or still waiting for its copy, is alive too.
    back = (result.issue_in >= 0) & (result.issue_in <= position) & (result.last_backward >= position)
    leaving = (result.produced <= position) & (result.wait_out > position) & (result.last_forward < position)
    moved = free & saved & (placement != KEEP) & (back | leaving)
    storage = np.flatnonzero(kept | rebuilt | moved).astype(np.int64)
    return Holders(storage, g.storage_bytes[storage], rebuilt[storage])
