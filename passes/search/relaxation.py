"""The linear relaxation behind the bound: what every placement that fits must obey, with fractions allowed.

Per forward storage s that the backward may demand: kept, swapped, encoded in [0, 1] ("saved and there"), and per
forward node v: again_v, "run at least once more in the backward". An anchor is an instruction that every program
contains; off is the part of a swapped storage that is off the device there. Every placement's program satisfies:

  demand   saved_s + again_root(s) >= again_v for each node v that reads s (again = 1 for a node of the backward)
  memory   at an anchor: what is certainly alive + kept + encoded bytes + (swapped - off) bytes <= budget
  copies   a storage off at an anchor was copied out before it began and is copied in after it ended; one copy per
           direction runs at a time and none faster than the link alone, so for every cut in production order
             start(anchor) >= end of the first producer in the cut + their outs
           and for every deadline d among first direct readers
             step >= start(anchor) + time(anchor) + ins of those due by d + the backward's own compute from d on
  compute  the forward that must run or that something saved needs (once_v), the whole backward, each `again`, each
           encode and decode run on one engine;
           every `again` comes after the forward ends.

What a KEEP storage does while nobody demands it costs nothing, so `kept` means kept and demanded. Recomputation
transients, waits that do not overlap and the duplex slowdown are left out: they only add. Hence the optimum of the
relaxation is never above the step of a placement that fits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from fxhome.passes.search.structure import Bool, Float64, Int32, Int64, Structure
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, FORWARD, OWNER, VIRTUAL

Part = tuple[Int64, Float64 | float]

MIB = float(1 << 20)
CHAIN_CUTS = 120
TIDY = 1e-5


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Minimise cost @ x with matrix @ x >= low and 0 <= x <= upper; x starts with kept, swapped, encoded per storage.

    again_root: column of `again` of each storage's root, or -1. slack: the optimum less this bounds the step.
    """

    cost: Float64
    matrix: sparse.csr_matrix
    low: Float64
    upper: Float64
    integral: npt.NDArray[np.uint8]
    storages: Int64
    again_root: Int64
    slack: float


@dataclass(frozen=True, eq=False)
class _Facts:
    certain: Bool
    last_forward: Int64
    forward_output: Bool
    reader_edges: tuple[Int64, Int64]


def _facts(s: Structure) -> _Facts:
    """Forward nodes that every program runs; last certain forward reader of each storage; storages that are outputs."""
    g = s.problem.arrays
    n = g.node_phase.shape[0]
    counts = np.diff(g.read_start)
    reader = np.repeat(np.arange(n), counts)
    source = g.read_node.astype(np.int64)
    forward = g.node_phase == FORWARD
    certain = forward & (g.node_must_forward != 0)
    for v in range(n - 1, -1, -1):
        if certain[v]:
            certain[g.read_node[g.read_start[v] : g.read_start[v + 1]]] = True
    certain &= forward
    reach = np.full(n, -1, np.int64)
    for v in range(n - 1, -1, -1):
        if not certain[v]:
            continue
        through = max(v, int(reach[v])) if g.node_kind[v] == ALIAS else v
        sources = g.read_node[g.read_start[v] : g.read_start[v + 1]]
        reach[sources] = np.maximum(reach[sources], through)
    owner = g.storage_owner.astype(np.int64)
    last = np.maximum(reach[g.storage_root], owner)
    output = np.zeros(s.problem.num_storages, np.bool_)
    of = g.root_storage[g.forward_output]
    output[of[of >= 0]] = True
    return _Facts(certain, last, output, (reader.astype(np.int64), source))


def choose_anchors(s: Structure, budget: int, curve: Int64, program: Int32, forward: int, most: int) -> list[int]:
    """Backward and forward node ids to hold the budget at: spread over where keep-all is over the budget.

    The place between forward and backward is always held and is not listed.
    """
    over = np.flatnonzero(curve[: program.shape[0]] > budget)
    if over.shape[0] == 0 or most == 0:
        return []
    inside = over[(over != forward)]
    behind, ahead = inside[inside > forward], inside[inside < forward]
    picked: list[int] = []
    for part, count in ((behind, most - most // 3), (ahead, most // 3)):
        if part.shape[0] and count:
            at = np.linspace(0, part.shape[0] - 1, count + 2)[1:-1].astype(int)
            picked += [int(program[p]) for p in part[at]]
    if inside.shape[0]:
        picked.append(int(program[inside[np.argmax(curve[inside])]]))
    return sorted(set(picked))


def relax_problem(s: Structure, budget: int, anchors: list[int], cuts: int = 12) -> Relaxation:
    """Build the relaxation for `budget` bytes at the boundary and at `anchors` (node ids)."""
    problem, g, link = s.problem, s.problem.arrays, s.problem.link
    facts = _facts(s)
    n = g.node_phase.shape[0]
    forward = g.node_phase == FORWARD
    backward = g.node_phase == BACKWARD
    storages = np.flatnonzero(s.reachable)
    count = storages.shape[0]
    index = np.full(problem.num_storages, -1, np.int64)
    index[storages] = np.arange(count)
    nodes = np.flatnonzero(s.reachable_node & forward)
    again = np.full(n, -1, np.int64)
    again[nodes] = 3 * count + np.arange(nodes.shape[0])
    places = 1 + len(anchors)
    # Forward nodes that run in the forward only where something saved needs them.
    optional = nodes[~facts.certain[nodes]]
    once = np.full(n, -1, np.int64)
    once[optional] = 3 * count + nodes.shape[0] + np.arange(optional.shape[0])
    off0 = 3 * count + nodes.shape[0] + optional.shape[0]
    start0 = off0 + places * count
    step = start0 + places
    total = step + 1
    kept, swapped, encoded = np.arange(count), count + np.arange(count), 2 * count + np.arange(count)

    allowed = problem.allowed[storages]
    upper = np.ones(step)
    upper[kept] = allowed[:, KEEP]
    upper[swapped] = allowed[:, SWAP] | allowed[:, COMPRESS_SWAP]
    upper[encoded] = allowed[:, COMPRESS]
    upper[start0:] = np.inf
    rebuildable = problem.allowed[:, RECOMPUTE] | problem.allowed[:, RECOMPUTE_EACH]
    rows: list[Int64] = []
    cols: list[Int64] = []
    values: list[Float64] = []
    low: list[Float64] = []
    used = 0

    def add(columns: Int64, coefficients: Float64, bound: Float64) -> None:
        """Append rows: columns and coefficients are [rows, terms], negative columns are dropped."""
        nonlocal used
        where = np.repeat(np.arange(columns.shape[0]) + used, columns.shape[1])
        flat, weight = columns.ravel(), np.broadcast_to(coefficients, columns.shape).ravel()
        good = flat >= 0
        rows.append(where[good])
        cols.append(flat[good])
        values.append(weight[good])
        low.append(bound)
        used += columns.shape[0]

    def add_one(parts: list[Part], bound: float) -> None:
        columns = np.concatenate([p[0] for p in parts])
        weights = np.concatenate([np.broadcast_to(np.asarray(p[1], float), p[0].shape) for p in parts])
        add(columns[None, :], weights[None, :], np.array([bound]))

    # saved <= 1
    add(np.stack([kept, swapped, encoded], 1), np.array([[-1.0, -1.0, -1.0]]), np.full(count, -1.0))
    # demand
    reader, source = facts.reader_edges
    source = g.backward_alias[source].astype(np.int64)
    mask = forward[source] & (backward[reader] | (forward[reader] & (again[reader] >= 0)))
    reader, source = reader[mask], source[mask]
    of = g.root_storage[source].astype(np.int64)
    saved_at = np.where(of >= 0, index[of], -1)
    columns = np.stack(
        [
            np.where(saved_at >= 0, saved_at, -1),
            np.where(saved_at >= 0, count + saved_at, -1),
            np.where(saved_at >= 0, 2 * count + saved_at, -1),
            again[source],
            np.where(backward[reader], -1, again[reader]),
        ],
        1,
    )
    add(columns, np.array([[1.0, 1.0, 1.0, 1.0, -1.0]]), np.where(backward[reader], 1.0, 0.0))
    # A storage that may not be rebuilt must be saved for every reader that demands it.
    stuck = (of >= 0) & ~rebuildable[of]
    if stuck.any():
        columns = columns[stuck].copy()
        columns[:, 3] = -1
        add(columns, np.array([[1.0, 1.0, 1.0, 1.0, -1.0]]), np.where(backward[reader[stuck]], 1.0, 0.0))

    # optional: saved_s <= once(root of s), and once passes on to what a node reads
    roots = g.storage_root[storages]
    mine = np.flatnonzero(once[roots] >= 0)
    columns = np.stack([once[roots[mine]], kept[mine], swapped[mine], encoded[mine]], 1)
    add(columns, np.array([[1.0, -1.0, -1.0, -1.0]]), np.zeros(mine.shape[0]))
    of_reader, of_source = facts.reader_edges
    both = (once[of_reader] >= 0) & (once[of_source] >= 0)
    columns = np.stack([once[of_source[both]], once[of_reader[both]]], 1)
    add(columns, np.array([[1.0, -1.0]]), np.zeros(columns.shape[0]))

    size = g.storage_bytes[storages].astype(float)
    squeezed = np.minimum(size, g.storage_encoded_bytes[storages])
    virtual = g.node_kind[g.storage_root[storages]] == VIRTUAL
    time = g.node_time_us
    out_us = link.latency_us + g.storage_copy_bytes[storages] * link.d2h_us_per_byte
    in_us = link.latency_us + g.storage_copy_bytes[storages] * link.h2d_us_per_byte
    # COMPRESS_SWAP may move fewer bytes, and hold fewer while it waits for its copy.
    small = allowed[:, COMPRESS_SWAP]
    staged = np.where(small, squeezed, size)
    moved = np.minimum(g.storage_copy_bytes[storages], g.storage_link_bytes[storages])
    out_us = np.where(small, link.latency_us + moved * link.d2h_us_per_byte, out_us)
    in_us = np.where(small, link.latency_us + moved * link.h2d_us_per_byte, in_us)
    decode_us = g.storage_decode_us[storages].astype(np.float64)
    node_us = time[nodes].astype(np.float64)
    codec_us = decode_us + g.storage_encode_us[storages]
    forward_us = float(time[facts.certain].sum())
    backward_us = float(time[backward].sum())
    certain_until = np.cumsum(np.where(facts.certain, time, 0.0))
    backward_from = np.cumsum(np.where(backward, time, 0.0)[::-1])[::-1]
    first = s.first_reader[storages].astype(np.int64)
    last = s.last_reader[storages].astype(np.int64)
    owner = g.storage_owner[storages].astype(np.int64)
    last_forward = facts.last_forward[storages]
    is_output = facts.forward_output[storages] & ~virtual
    outputs = np.flatnonzero(facts.forward_output)
    outputs = outputs[g.node_kind[g.storage_root[outputs]] != VIRTUAL]
    output_bytes = float(g.storage_bytes[outputs].sum())
    backward_alive = _backward_alive(s)

    for place, anchor in enumerate([-1, *anchors]):
        off = off0 + place * count + np.arange(count)
        start = np.array([start0 + place])
        fixed = 0.0
        if anchor < 0:
            # Between the graphs: everything saved, the forward's outputs, the tangents.
            here, can_leave = ~is_output, ~is_output
            fixed += output_bytes
            fixed += float(g.storage_bytes[g.tangent_storage].sum()) + float(g.outside_bytes.sum())
            compute_before, compute_at = forward_us, 0.0
            encoded_here = here
        elif forward[anchor]:
            working = (owner <= anchor) & (last_forward >= anchor) & facts.certain[owner] & ~virtual
            here = (owner < anchor) & ~working & ~is_output
            can_leave = here
            own = 0 if g.node_kind[anchor] != OWNER else int(g.storage_bytes[g.storage_owner == anchor].sum())
            fixed += float(size[working & (owner < anchor)].sum() + own + g.node_workspace[anchor])
            compute_before, compute_at = float(certain_until[anchor] - time[anchor]), float(time[anchor])
            encoded_here = here
        else:
            read = _read_now(s, anchor)[storages] & ~virtual
            here = (last > anchor) & ~read & ~is_output
            can_leave = here & (first > anchor)
            fixed += float(size[read & ~is_output].sum() + output_bytes)
            fixed += float(g.node_workspace[anchor] + backward_alive[anchor]) + float(g.outside_bytes[0])
            compute_before = forward_us + float(backward_from[np.flatnonzero(backward)[0]] - backward_from[anchor])
            compute_at = float(time[anchor])
            encoded_here = here & (first > anchor)
        upper[off[~can_leave]] = 0.0
        add(np.stack([off, swapped], 1), np.array([[-1.0, 1.0]]), np.zeros(count))
        held = np.flatnonzero(here)
        kept_encoded = np.where(encoded_here[held], squeezed[held], size[held])
        add_one(
            [
                (kept[held], -size[held] / MIB),
                (swapped[held], -staged[held] / MIB),
                (off[held], staged[held] / MIB),
                (encoded[held], -kept_encoded / MIB),
            ],
            (fixed - budget) / MIB,
        )
        # compute before the anchor
        parts: list[Part] = [(start, 1.0)]
        if anchor < 0 or backward[anchor]:
            parts.append((once[optional], -time[optional].astype(np.float64)))
        if anchor >= 0 and backward[anchor]:
            sure = s.first_reader[g.root_storage[nodes]] if nodes.shape[0] else nodes
            known = (g.root_storage[nodes] >= 0) & (sure >= 0) & (sure <= anchor)
            parts.append((again[nodes[known]], -time[nodes[known]]))
        add_one(parts, compute_before)
        # copies out before it, by cuts in production order; copies in after it, by deadlines
        leaving = np.flatnonzero(can_leave & (upper[swapped] > 0))
        if leaving.shape[0] == 0:
            continue
        deadline = np.where(first[leaving] >= 0, first[leaving], n)
        most = CHAIN_CUTS if anchor < 0 else cuts
        # Two queues, each a chain of ending times: a copy ends after the one before it and after its producer.
        for queue, key, copy_us in ((True, owner[leaving], out_us), (False, deadline, in_us)):
            ends_at = _spread(np.unique(key), most, last_of_each=not queue)
            chain = total + np.arange(len(ends_at))
            total += len(ends_at)
            slot = np.searchsorted(ends_at, key, side="right") - 1 if queue else np.searchsorted(ends_at, key)
            for j, cut in enumerate(ends_at):
                these = leaving[slot == j]
                copies: list[Part] = [(chain[j : j + 1], 1.0), (off[these], -copy_us[these])]
                if queue:
                    ready = float(certain_until[cut]) if facts.certain[cut] else 0.0
                    add_one(copies, ready)
                elif j == 0:
                    add_one([*copies, (start, -1.0)], compute_at)
                if j:
                    add_one([*copies, (chain[j - 1 : j], -1.0)], 0.0)
                if not queue:
                    after = float(backward_from[cut]) if cut < n else 0.0
                    add_one([(np.array([step]), 1.0), (chain[j : j + 1], -1.0)], after)
            if queue:
                add_one([(start, 1.0), (chain[-1:], -1.0)], 0.0)
    last_column = np.array([step])
    boundary = np.array([start0])
    add_one(
        [(last_column, 1.0), (boundary, -1.0), (again[nodes], -node_us), (encoded, -decode_us)],
        backward_us,
    )
    all_compute: list[Part] = [(last_column, 1.0), (again[nodes], -node_us), (encoded, -codec_us)]
    add_one([*all_compute, (once[optional], -time[optional].astype(np.float64))], forward_us + backward_us)
    for place, anchor in enumerate(anchors):
        rest = (
            float(backward_from[anchor])
            if backward[anchor]
            else backward_us + float(forward_us - certain_until[anchor] + time[anchor])
        )
        add_one([(last_column, 1.0), (np.array([start0 + 1 + place]), -1.0)], rest)
    matrix = sparse.csr_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))), shape=(used, total)
    )
    cost = np.zeros(total)
    upper = np.concatenate([upper, np.full(total - upper.shape[0], np.inf)])
    cost[step] = 1.0
    # A swap that frees nothing at an anchor costs nothing above; a little weight keeps such out of the solution.
    cost[swapped] = TIDY * (out_us + in_us) * upper[swapped]
    cost[again[nodes]] = TIDY * time[nodes]
    slack = float(cost[:step].sum())
    integral = np.zeros(total, np.uint8)
    integral[: off0 + places * count] = 1
    return Relaxation(
        cost, matrix, np.concatenate(low), upper, integral, storages, again[g.storage_root[storages]], slack
    )


def _spread(values: Int64, most: int, *, last_of_each: bool) -> list[int]:
    """At most `most` of the values, evenly spread: each stands for itself and those after (or before) it."""
    if values.shape[0] <= most:
        return [int(v) for v in values]
    return [int(part[-1 if last_of_each else 0]) for part in np.array_split(values, most)]


def _read_now(s: Structure, node: int) -> Bool:
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


def _backward_alive(s: Structure) -> Int64:
    """Per node: bytes of the backward's own storages alive while it runs; their order never changes."""
    g = s.problem.arrays
    n = g.node_phase.shape[0]
    last = np.full(n, -1, np.int64)
    last[g.backward_output] = n
    change = np.zeros(n + 2, np.int64)
    for v in range(n - 1, -1, -1):
        if g.node_phase[v] != BACKWARD:
            continue
        reach = max(v, int(last[v])) if g.node_kind[v] == ALIAS else v
        sources = g.read_node[g.read_start[v] : g.read_start[v + 1]]
        last[sources] = np.maximum(last[sources], reach)
    for storage, owner in enumerate(g.storage_owner.tolist()):
        root = int(g.storage_root[storage])
        if owner < 0 or g.node_phase[owner] != BACKWARD or g.node_kind[owner] != OWNER:
            continue
        until = owner if root < 0 else max(owner, int(last[root]))
        change[owner] += g.storage_bytes[storage]
        change[min(until, n) + 1] -= g.storage_bytes[storage]
    return np.cumsum(change)[:n]
