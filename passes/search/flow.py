"""What the relaxation reads off the graph once per problem: who reads whom, what runs and is alive whatever is placed.

Views that take no time are looked through: they are replayed for each reader, so their readers read what they view.
"""

from dataclasses import dataclass

import numpy as np

from fxhome.passes.compiled import compiled
from fxhome.passes.search.structure import Bool, Float64, Int64, Structure
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, ENTER_BACKWARD, FORWARD, OWNER, VIRTUAL, SimArrays


@dataclass(frozen=True, eq=False)
class Flow:
    """Static facts for `relaxation`; node and storage ids as in `SimArrays`.

    certain: forward nodes that every program runs. certain_until[v]: us of those up to and including v.
    backward_from[v]: us of the backward's own nodes from v on. launched[v]: host us, from when it enters the forward,
    until every program has launched what is certain up to and including v. backward_alive[v]: bytes of the backward's
    own storages at v.
    last_forward: last certain forward reader of each storage. is_output: it is returned by the forward, and is real.
    reader, source: edges of what the backward demands; once_reader, once_source: edges of the forward as it runs first.
    seen_through: views left out of both.
    """

    certain: Bool
    certain_until: Float64
    backward_from: Float64
    launched: Float64
    backward_alive: Int64
    last_forward: Int64
    is_output: Bool
    reader: Int64
    source: Int64
    once_reader: Int64
    once_source: Int64
    seen_through: Bool


def read_flow(s: Structure) -> Flow:
    """Compute `Flow`: O(nodes + edges)."""
    g = s.problem.arrays
    n = g.node_phase.shape[0]
    forward, backward = g.node_phase == FORWARD, g.node_phase == BACKWARD
    certain = forward & (g.node_must_forward != 0)
    reach = np.full(n, -1, np.int64)
    last = np.full(n, -1, np.int64)
    last[g.backward_output] = n
    alive = np.zeros(n + 2, np.int64)
    _walk(
        g.node_phase,
        g.node_kind,
        g.read_start,
        g.read_node,
        g.storage_owner,
        g.storage_root,
        g.storage_bytes,
        certain,
        reach,
        last,
        alive,
    )
    of = g.root_storage[g.forward_output]
    is_output = np.zeros(s.problem.num_storages, np.bool_)
    is_output[of[of >= 0]] = True
    is_output &= g.node_kind[g.storage_root] != VIRTUAL
    stands_for = _views(s)
    seen_through = stands_for != np.arange(n)
    reader = np.repeat(np.arange(n), np.diff(g.read_start)).astype(np.int64)
    once_source = stands_for[g.read_node]
    source = stands_for[g.backward_alias[g.read_node]]
    live = ~seen_through[reader]
    demanded = live & forward[source] & (backward[reader] | (forward[reader] & s.reachable_node[reader]))
    once = live & forward[reader] & forward[once_source]
    return Flow(
        certain=certain,
        certain_until=np.cumsum(np.where(certain, g.node_time_us, 0.0)),
        backward_from=np.cumsum(np.where(backward, g.node_time_us, 0.0)[::-1])[::-1],
        launched=_launched(g, certain),
        backward_alive=np.cumsum(alive)[:n],
        last_forward=np.maximum(reach[g.storage_root], g.storage_owner),
        is_output=is_output,
        reader=reader[demanded],
        source=source[demanded],
        once_reader=reader[once],
        once_source=once_source[once],
        seen_through=seen_through,
    )


def _launched(g: SimArrays, certain: Bool) -> Float64:
    if g.node_host_us.shape[0] == 0:
        return np.zeros(g.node_phase.shape[0], np.float64)
    backward = g.node_phase == BACKWARD
    ahead = np.cumsum(np.where(certain, g.node_host_us, 0.0))
    # What updates an input may stand behind the backward, and runs in the forward all the same.
    entered = float(np.where(certain, g.node_host_us, 0.0).sum()) + float(g.host_us[ENTER_BACKWARD])
    behind = entered + np.cumsum(np.where(backward, g.node_host_us, 0.0))
    launched: Float64 = np.where(backward, behind, ahead)
    return launched


def _views(s: Structure) -> Int64:
    """Per node, what it stands for: the node behind a chain of views, or itself."""
    g = s.problem.arrays
    found = np.arange(g.node_phase.shape[0])
    one = np.diff(g.read_start) == 1
    view = (g.node_phase == FORWARD) & (g.node_kind == ALIAS) & (g.root_storage < 0) & (g.node_time_us == 0) & one
    view[g.backward_alias[g.backward_alias != found]] = False  # stands in for another node, perhaps an earlier one
    view &= g.node_must_forward == 0
    for v in np.flatnonzero(view).tolist():
        source = g.read_node[g.read_start[v]]
        # In the backward a view of a mutated input reads its clone: such a view means two things.
        if g.backward_alias[source] == source:
            found[v] = found[source]
    return found


@compiled()
def _walk(  # type: ignore[no-untyped-def]
    node_phase,
    node_kind,
    read_start,
    read_node,
    storage_owner,
    storage_root,
    storage_bytes,
    certain,
    reach,
    last,
    alive,
):
    """Fill, from the end: what certainly runs, its last certain readers, and the lifetimes of the backward's own."""
    n = node_phase.shape[0]
    for v in range(n - 1, -1, -1):
        if node_phase[v] == BACKWARD:
            until = max(v, last[v]) if node_kind[v] == ALIAS else v
            for edge in range(read_start[v], read_start[v + 1]):
                last[read_node[edge]] = max(last[read_node[edge]], until)
        elif certain[v]:
            through = max(v, reach[v]) if node_kind[v] == ALIAS else v
            for edge in range(read_start[v], read_start[v + 1]):
                source = read_node[edge]
                reach[source] = max(reach[source], through)
                if node_phase[source] == FORWARD:
                    certain[source] = True
    for s in range(storage_owner.shape[0]):
        owner, root = storage_owner[s], storage_root[s]
        if owner < 0 or node_phase[owner] != BACKWARD or node_kind[owner] != OWNER:
            continue
        stop = owner if root < 0 else max(owner, last[root])
        alive[owner] += storage_bytes[s]
        alive[min(stop, n) + 1] -= storage_bytes[s]


@compiled()
def needed_behind(node_phase, backward_alias, read_start, read_node, anchor, needed):  # type: ignore[no-untyped-def]
    """Mark forward nodes that some placement makes a backward node behind `anchor` demand."""
    changed = True
    while changed:  # again only where a mutated input's clone stands after its reader
        changed = False
        for v in range(node_phase.shape[0] - 1, -1, -1):
            if not (needed[v] or (node_phase[v] == BACKWARD and v > anchor)):
                continue
            for edge in range(read_start[v], read_start[v + 1]):
                source = backward_alias[read_node[edge]]
                if node_phase[source] == FORWARD and not needed[source]:
                    needed[source] = True
                    changed = changed or source > v


def read_at(s: Structure, node: int) -> Bool:
    """Storages that are on the device while `node` runs, whatever the placement: it reads them, or a view of them."""
    g = s.problem.arrays
    found = np.zeros(s.problem.num_storages, np.bool_)
    stack = [node]
    while stack:
        v = stack.pop()
        for u in g.backward_alias[g.read_node[g.read_start[v] : g.read_start[v + 1]]].tolist():
            if g.root_storage[u] >= 0:
                found[g.root_storage[u]] = True
            elif g.node_kind[u] == ALIAS:
                stack.append(u)
    return found
