"""The linear relaxation behind the bound: what every placement that fits must obey, with fractions allowed.

Per forward storage s that the backward may demand: kept, swapped, encoded, packed (swapped, encoded on its way) in
[0, 1] ("saved and there"), and per forward node v: again_v, "run at least once more in the backward". An anchor is an
instruction that every program contains; off is the part of a swapped or packed storage that is off the device there.
Every placement's program satisfies:

  demand   saved_s + again_root(s) >= again_v for each node v that reads s (again = 1 for a node of the backward)
  memory   at an anchor: what is certainly alive + kept + encoded bytes + (swapped - off) bytes + (packed - off) encoded
           bytes <= budget, and the largest operand that the anchor may be written over on top
  copies   a storage off at an anchor was copied out before it began and is copied in after it ended; one copy per
           direction runs at a time and none faster than the link alone, so for every cut in production order
             start(anchor) >= end of the first producer in the cut + their outs
           and for every deadline d among first direct readers
             step >= start(anchor) + time(anchor) + ins of those due by d + the backward's own compute from d on
  compute  the forward that must run or that something saved needs (once_v), the whole backward, each `again`, each
           encode and decode run on one engine;
           every encode comes before the forward ends, every `again` after it
  host     nothing starts before it is launched, and the host launches one instruction after the other: at an anchor
           what is certain up to it, at the end all of it, each `again`, each copy, encode and decode with it.

Times count from where the host enters the forward: before that nothing runs.

With `held`, an anchor of the backward also sees what is rebuilt: of each node v that may be needed behind the anchor,
before_v ("run again for it or before it"), behind_v ("run again behind it") and held_v ("rebuilt, and alive there"):

  demand   saved_s + before_root(s) >= before_v, and = 1 for a node of the backward up to the anchor;
           saved_s + held_root(s) + behind_root(s) >= behind_v, and = 1 for one behind it; held_v <= before_v
  memory   + held bytes at the anchor
  compute  a node runs again before_v + behind_v times: what is not held across the anchor runs twice

What a KEEP storage does while nobody demands it costs nothing, so `kept` means kept and demanded. Memory between the
anchors, waits that do not overlap and the duplex slowdown are left out, and so are the bytes of storages that together
are a tiny part of the budget: they count as kept for nothing. All of that only adds. Hence the optimum of the
relaxation is never above the step of a placement that fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from fxhome.passes.search.flow import Flow, needed_behind, read_at
from fxhome.passes.search.linear_program import LinearProgram, Part
from fxhome.passes.search.structure import Bool, Float64, Int64, Structure
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP, SimArrays
from fxhome.passes.simulate_kernels import (
    BACKWARD,
    DECODE,
    ENCODE,
    ENTER_BACKWARD,
    FORWARD,
    LEAVE,
    OWNER,
    SWAP_IN,
    SWAP_OUT,
    VIRTUAL,
    WAIT,
)

MIB = float(1 << 20)
CHAIN_CUTS = 120
ANCHOR_CUTS = 12
TIDY = 1e-5
TINY_SHARE = 5e-4  # of the budget: what the storages that are left out have together
BOUNDARY = -1  # the anchor between forward and backward


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Minimise cost @ x with matrix @ x >= low and 0 <= x <= upper.

    kept, swapped, encoded, packed, again_root: per entry of `storages` its column, -1 where there is none. free:
    storages left out. slack: the optimum less this bounds the step.
    """

    cost: Float64
    matrix: sparse.csr_matrix
    low: Float64
    upper: Float64
    integral: npt.NDArray[np.uint8]
    storages: Int64
    kept: Int64
    swapped: Int64
    encoded: Int64
    packed: Int64
    again_root: Int64
    free: Bool
    slack: float


@dataclass(frozen=True, eq=False)
class _Behind:
    """Columns of one anchor: by node id (-1: not needed behind it), and `there` by entry of `storages`."""

    before: Int64
    behind: Int64
    held: Int64
    there: Int64


class _Builder:
    """Builds the program: the parts common to all anchors first, then one anchor after the other."""

    def __init__(
        self, s: Structure, flow: Flow, budget: int, no_swap: Bool | None, targets: Mapping[int, int] | None
    ) -> None:
        problem, g, link = s.problem, s.problem.arrays, s.problem.link
        self.s, self.flow, self.g, self.budget = s, flow, g, budget
        self.targets = targets or {}
        self.nodes_total = g.node_phase.shape[0]
        self.free = _tiny(s, budget)
        self.storages = st = np.flatnonzero(s.reachable & ~self.free)
        self.index = np.full(problem.num_storages, -1, np.int64)
        self.index[st] = np.arange(st.shape[0])
        allowed = problem.allowed[st]
        may_move = np.ones(st.shape[0], np.bool_) if no_swap is None else ~no_swap[st]
        self.rebuildable = problem.allowed[:, RECOMPUTE] | problem.allowed[:, RECOMPUTE_EACH]
        forward = g.node_phase == FORWARD
        self.nodes = np.flatnonzero(s.reachable_node & forward & ~flow.seen_through)
        self.optional = self.nodes[~flow.certain[self.nodes]]
        self.lp = lp = LinearProgram()
        self.kept = lp.shares(allowed[:, KEEP])
        self.swapped = lp.shares(allowed[:, SWAP] & may_move)
        self.encoded = lp.shares(allowed[:, COMPRESS])
        self.packed = lp.shares(allowed[:, COMPRESS_SWAP] & may_move)
        self.again = np.full(self.nodes_total, -1, np.int64)
        self.again[self.nodes] = lp.shares(np.ones(self.nodes.shape[0], np.bool_))
        self.once = np.full(self.nodes_total, -1, np.int64)
        self.once[self.optional] = lp.shares(np.ones(self.optional.shape[0], np.bool_))
        self.more = np.full(self.nodes_total, -1, np.int64)  # runs beyond the first again
        self.step = lp.amounts(1)

        self.size = g.storage_bytes[st].astype(float)
        self.squeezed = np.minimum(self.size, g.storage_encoded_bytes[st])
        self.virtual = g.node_kind[g.storage_root[st]] == VIRTUAL
        # What of a storage that is there waits in either form at least.
        self.least_bytes = np.where(allowed[:, COMPRESS_SWAP], self.squeezed, self.size)
        self.out_us, self.in_us = (
            link.latency_us + g.storage_copy_bytes[st] * rate for rate in (link.d2h_us_per_byte, link.h2d_us_per_byte)
        )
        self.packed_out_us, self.packed_in_us = (
            link.latency_us + g.storage_link_bytes[st] * rate for rate in (link.d2h_us_per_byte, link.h2d_us_per_byte)
        )
        self.encode_us, self.decode_us = g.storage_encode_us[st], g.storage_decode_us[st]
        self.forward_us = float(g.node_time_us[flow.certain].sum())
        self.backward_us = float(g.node_time_us[g.node_phase == BACKWARD].sum())
        self.first = s.first_reader[st].astype(np.int64)
        self.last = s.last_reader[st].astype(np.int64)
        self.owner = g.storage_owner[st].astype(np.int64)
        self.output = flow.is_output[st]
        outputs = flow.is_output
        self.output_bytes = float(g.storage_bytes[outputs].sum())
        self.taken_bytes = _taken_bytes(g)
        # One entry more than nodes: the first of the backward's own, which BOUNDARY finds as the last entry.
        self.has_host = g.node_host_us.shape[0] > 0
        sure = float(g.node_host_us[flow.certain].sum()) if self.has_host else 0.0
        entered = sure + float(g.host_us[ENTER_BACKWARD])
        self.launched = np.append(flow.launched, entered)
        self.demand = self._edges()

    def _edges(self) -> tuple[Int64, Int64, Int64, Bool]:
        """(reader, source, storage read or -1, whether it must be saved for it) of what the backward demands."""
        reader, source = self.flow.reader, self.flow.source
        of = self.g.root_storage[source].astype(np.int64)
        real = ~((of >= 0) & self.free[of])
        reader, source, of = reader[real], source[real], of[real]
        return reader, source, of, (of >= 0) & ~self.rebuildable[of]

    def saved(self, of: Int64) -> list[Int64]:
        """Columns of the four ways in which storages `of` may be saved."""
        at = np.where(of >= 0, self.index[of], -1)
        ways = (self.kept, self.swapped, self.encoded, self.packed)
        # One entry more for those that are none of `storages`, of which there may be none at all.
        return [np.append(columns, -1)[at] for columns in ways]

    def common(self) -> None:
        """Demand, and what of the forward runs at all."""
        lp, count = self.lp, self.storages.shape[0]
        lp.add([self.kept, self.swapped, self.encoded, self.packed], [-1.0] * 4, np.full(count, -1.0))
        reader, source, of, stuck = self.demand
        backward = self.g.node_phase[reader] == BACKWARD
        one = np.where(backward, 1.0, 0.0)
        rebuilt = np.where(stuck, -1, self.again[source])
        asked = np.where(backward, -1, self.again[reader])
        lp.add([*self.saved(of), rebuilt, asked], [1.0, 1.0, 1.0, 1.0, 1.0, -1.0], one)
        # saved_s <= once(root of s), and once passes on to what a node reads
        roots = self.g.storage_root[self.storages]
        mine = np.flatnonzero(self.once[roots] >= 0)
        columns = [self.once[roots[mine]], self.kept[mine], self.swapped[mine], self.encoded[mine], self.packed[mine]]
        lp.add(columns, [1.0, -1.0, -1.0, -1.0, -1.0], np.zeros(mine.shape[0]))
        once_reader, once_source = self.once[self.flow.once_reader], self.once[self.flow.once_source]
        both = (once_reader >= 0) & (once_source >= 0)
        lp.add([once_source[both], once_reader[both]], [1.0, -1.0], np.zeros(int(both.sum())))

    def behind(self, anchor: int, off: Int64, packed_off: Int64, needed: Bool) -> _Behind:
        """Columns and demand of what is rebuilt before and behind an anchor of the backward.

        needed: the nodes that may be needed behind it. A storage that no node of the backward reads there is alive at
        the anchor where something rebuilt behind it reads it: `there`.
        """
        lp, g = self.lp, self.g
        reader, source, of, stuck = self.demand
        there = lp.shares(needed[g.storage_root[self.storages]] & (self.last <= anchor))
        quiet = np.flatnonzero(there >= 0)
        columns = [there[quiet], self.kept[quiet], self.swapped[quiet], off[quiet]]
        columns += [self.packed[quiet], packed_off[quiet]]
        lp.add(columns, [-1.0, 1.0, 1.0, -1.0, 1.0, -1.0], np.zeros(quiet.shape[0]))
        here = needed & (self.again >= 0)
        here[g.storage_root[self.storages[~self.rebuildable[self.storages]]]] = False
        before, behind, held = (lp.shares(here) for _ in range(3))
        mine = here[source] & ~stuck
        reader, source, of = reader[mine], source[mine], of[mine]
        backward = g.node_phase[reader] == BACKWARD
        early = ~backward | (reader <= anchor)
        one = np.where(backward, 1.0, 0.0)
        # What is not needed behind the anchor runs again, if at all, before it.
        asked = np.where(backward, -1, np.where(here[reader], before[reader], self.again[reader]))
        lp.add(
            [*(c[early] for c in self.saved(of)), before[source[early]], asked[early]],
            [1.0, 1.0, 1.0, 1.0, 1.0, -1.0],
            one[early],
        )
        late = np.where(backward, reader > anchor, here[reader])
        asked = np.where(backward, -1, behind[reader])
        at = np.where(of >= 0, self.index[of], -1)
        indirect = (at >= 0) & (there[at] >= 0)
        kept, swapped, encoded, packed = self.saved(of)
        kept = np.where(indirect, there[at], kept)
        swapped = np.where(indirect, off[at], swapped)
        packed = np.where(indirect, packed_off[at], packed)
        lp.add(
            [c[late] for c in (kept, swapped, encoded, packed, held[source], behind[source], asked)],
            [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0],
            one[late],
        )
        these = np.flatnonzero(here)
        none = np.zeros(these.shape[0])
        lp.add([before[these], held[these]], [1.0, -1.0], none)
        fresh = these[(self.more[these] < 0) & (g.node_time_us[these] > 0)]
        self.more[fresh] = lp.amounts(fresh.shape[0])
        timed = these[g.node_time_us[these] > 0]
        columns = [self.again[timed], self.more[timed], before[timed], behind[timed]]
        lp.add(columns, [1.0, 1.0, -1.0, -1.0], np.zeros(timed.shape[0]))
        return _Behind(before, behind, held, there)

    def anchor(self, anchor: int, start: Int64, see_rebuilt: bool) -> _Behind | None:
        """Memory, compute and copies at one anchor; the columns of what is rebuilt there, where it is to be seen."""
        lp, g, flow, s = self.lp, self.g, self.flow, self.s
        rebuilt: _Behind | None = None
        time, size = g.node_time_us, self.size
        parts: list[Part] = [(start, 1.0)]
        memory: list[Part] = []
        fixed = 0.0
        if anchor == BOUNDARY:
            # Between the graphs: everything saved, the forward's outputs, the tangents.
            here = can_leave = encoded_here = ~self.output
            fixed += self.output_bytes
            fixed += float(g.storage_bytes[g.tangent_storage].sum()) + float(g.outside_bytes.sum())
            compute_before, compute_at = self.forward_us, 0.0
        elif g.node_phase[anchor] == FORWARD:
            reach = flow.last_forward[self.storages]
            working = (self.owner <= anchor) & (reach >= anchor) & flow.certain[self.owner] & ~self.virtual
            here = can_leave = encoded_here = (self.owner < anchor) & ~working & ~self.output
            own = 0 if g.node_kind[anchor] != OWNER else int(g.storage_bytes[g.storage_owner == anchor].sum())
            fixed += float(size[working & (self.owner < anchor)].sum() + own + g.node_workspace[anchor])
            compute_at = float(time[anchor])
            compute_before = float(flow.certain_until[anchor]) - compute_at
        else:
            read = read_at(s, anchor)[self.storages] & ~self.virtual
            here = (self.last > anchor) & ~read & ~self.output
            can_leave = encoded_here = here & (self.first > anchor)
            fixed += float(size[read & ~self.output].sum() + self.output_bytes)
            fixed += float(g.node_workspace[anchor] + flow.backward_alive[anchor]) + float(g.outside_bytes[0])
            compute_at = float(time[anchor])
            compute_before = self.forward_us + self.backward_us - float(flow.backward_from[anchor])
            if see_rebuilt:
                needed = np.zeros(self.nodes_total, np.bool_)
                needed_behind(g.node_phase, g.backward_alias, g.read_start, g.read_node, anchor, needed)
                roots = g.storage_root[self.storages]
                free = ~read & ~self.output
                can_leave = can_leave | (free & needed[roots] & (self.first < 0))
                off, packed_off = (lp.shares(can_leave & (moved >= 0)) for moved in (self.swapped, self.packed))
                rebuilt = self.behind(anchor, off, packed_off, needed)
                alive = np.flatnonzero(free & ~self.virtual)
                memory.append((rebuilt.held[roots[alive]], -size[alive] / MIB))
                alive = np.flatnonzero(free)
                memory.append((rebuilt.there[alive], -self.least_bytes[alive] / MIB))
                gone = np.where(rebuilt.before[self.nodes] >= 0, -1, self.again[self.nodes])
                parts.append((gone, -time[self.nodes]))
                parts.append((rebuilt.before[self.nodes], -time[self.nodes]))
            else:
                sure = s.first_reader[g.root_storage[self.nodes]]
                known = (g.root_storage[self.nodes] >= 0) & (sure >= 0) & (sure <= anchor)
                parts.append((self.again[self.nodes[known]], -time[self.nodes[known]]))
        if anchor == BOUNDARY or g.node_phase[anchor] == BACKWARD:
            parts.append((self.once[self.optional], -time[self.optional]))
            parts += [(self.encoded, -self.encode_us), (self.packed, -self.encode_us)]
        if rebuilt is None:
            off, packed_off = (lp.shares(can_leave & (moved >= 0)) for moved in (self.swapped, self.packed))
        for gone_there, moved in ((off, self.swapped), (packed_off, self.packed)):
            these = np.flatnonzero(gone_there >= 0)
            lp.add([gone_there[these], moved[these]], [-1.0, 1.0], np.zeros(these.shape[0]))
        held = np.flatnonzero(here)
        kept_encoded = np.where(encoded_here, self.squeezed, size)
        memory += [
            (self.kept[held], -size[held] / MIB),
            (self.swapped[held], -size[held] / MIB),
            (off[held], size[held] / MIB),
            (self.encoded[held], -kept_encoded[held] / MIB),
            (self.packed[held], -kept_encoded[held] / MIB),
            (packed_off[held], self.squeezed[held] / MIB),
        ]
        # The instruction itself may be written over one of its operands.
        taken = 0.0 if anchor == BOUNDARY else float(self.taken_bytes[anchor])
        lp.add_one(memory, (fixed - taken - self.targets.get(anchor, self.budget)) / MIB)
        lp.add_one(parts, compute_before)
        if self.has_host:
            lp.add_one([(start, 1.0)], float(self.launched[anchor]))
        self._copies(anchor, start, off, packed_off, compute_at)
        return rebuilt

    def _copies(self, anchor: int, start: Int64, off: Int64, packed_off: Int64, compute_at: float) -> None:
        """Two queues, each a chain of ending times: a copy ends after the one before it and after its producer."""
        lp, flow = self.lp, self.flow
        plain, packed = np.flatnonzero(off >= 0), np.flatnonzero(packed_off >= 0)
        columns = np.concatenate([off[plain], packed_off[packed]])
        if columns.shape[0] == 0:
            return
        leaving = np.concatenate([plain, packed])
        out_us = np.concatenate([self.out_us[plain], self.packed_out_us[packed]])
        in_us = np.concatenate([self.in_us[plain], self.packed_in_us[packed]])
        first = self.first[leaving]
        deadline = np.where(first >= 0, first, self.nodes_total)
        most = CHAIN_CUTS if anchor == BOUNDARY else ANCHOR_CUTS
        for out, key, copy_us in ((True, self.owner[leaving], out_us), (False, deadline, in_us)):
            ends_at = _spread(np.unique(key), most, last_of_each=not out)
            chain = lp.amounts(len(ends_at))
            slot = np.searchsorted(ends_at, key, side="right") - 1 if out else np.searchsorted(ends_at, key)
            for j, cut in enumerate(ends_at):
                these = slot == j
                copies: list[Part] = [(chain[j : j + 1], 1.0), (columns[these], -copy_us[these])]
                if out:
                    ready = float(flow.certain_until[cut]) if flow.certain[cut] else 0.0
                    lp.add_one(copies, ready)
                elif j == 0:
                    lp.add_one([*copies, (start, -1.0)], compute_at)
                if j:
                    lp.add_one([*copies, (chain[j - 1 : j], -1.0)], 0.0)
                if not out:
                    after = float(flow.backward_from[cut]) if cut < self.nodes_total else 0.0
                    lp.add_one([(self.step, 1.0), (chain[j : j + 1], -1.0)], after)
            if out:
                lp.add_one([(start, 1.0), (chain[-1:], -1.0)], 0.0)

    def totals(self, anchors: list[int], starts: list[Int64], rebuilt: list[_Behind | None]) -> None:
        """The step holds all compute, and what comes behind each anchor."""
        lp, g, flow = self.lp, self.g, self.flow
        time, nodes = g.node_time_us, self.nodes
        reruns: list[Part] = [(self.again[nodes], -time[nodes]), (self.more[nodes], -time[nodes])]
        decodes: list[Part] = [(self.encoded, -self.decode_us), (self.packed, -self.decode_us)]
        lp.add_one([(self.step, 1.0), (starts[0], -1.0), *reruns, *decodes], self.backward_us)
        first_runs: Part = (self.once[self.optional], -time[self.optional])
        codec_us = self.encode_us + self.decode_us
        codecs: list[Part] = [(self.encoded, -codec_us), (self.packed, -codec_us)]
        everything = self.forward_us + self.backward_us
        lp.add_one([(self.step, 1.0), *reruns, *codecs, first_runs], everything)
        if self.has_host:
            self._launches()
        for anchor, start, columns in zip(anchors[1:], starts[1:], rebuilt[1:], strict=True):
            parts: list[Part] = [(self.step, 1.0), (start, -1.0)]
            if g.node_phase[anchor] == BACKWARD:
                rest = float(flow.backward_from[anchor])
                if columns is not None:
                    parts.append((columns.behind[nodes], -time[nodes]))
            else:
                rest = everything - float(flow.certain_until[anchor] - time[anchor])
            lp.add_one(parts, rest)

    def _launches(self) -> None:
        """The step ends no sooner than the host has launched everything, copies included."""
        g, nodes, host = self.g, self.nodes, self.g.host_us
        own = g.node_host_us
        moves = float(host[SWAP_OUT] + host[SWAP_IN] + 2 * host[WAIT])
        codec = float(host[ENCODE] + host[DECODE])
        parts: list[Part] = [
            (self.step, 1.0),
            (self.again[nodes], -own[nodes]),
            (self.more[nodes], -own[nodes]),
            (self.once[self.optional], -own[self.optional]),
            (self.swapped, np.full(self.swapped.shape[0], -moves)),
            (self.encoded, np.full(self.encoded.shape[0], -codec)),
            (self.packed, np.full(self.packed.shape[0], -moves - codec)),
        ]
        self.lp.add_one(parts, float(self.flow.launched.max(initial=0.0) + host[LEAVE]))

    def finish(self) -> Relaxation:
        """The matrix, and a little weight on swaps and reruns, so that those which free nothing stay out."""
        lp = self.lp
        cost = np.zeros(lp.columns)
        cost[self.step] = 1.0
        again_us = self.g.node_time_us[self.nodes]
        plain_us = np.where(self.swapped >= 0, self.out_us + self.in_us, 0.0)
        packed_us = np.where(self.packed >= 0, self.packed_out_us + self.packed_in_us, 0.0)
        for columns, us in ((self.swapped, plain_us), (self.packed, packed_us), (self.again[self.nodes], again_us)):
            cost[columns[columns >= 0]] = TIDY * us[columns >= 0]
        # A storage is swapped or packed, not both.
        slack = TIDY * float(np.maximum(plain_us, packed_us).sum() + again_us.sum())
        roots = self.again[self.g.storage_root[self.storages]]
        low, upper = np.concatenate(lp.low), np.concatenate(lp.upper)
        integral = np.concatenate(lp.integral)
        ways = (self.kept, self.swapped, self.encoded, self.packed, roots)
        return Relaxation(cost, lp.matrix(), low, upper, integral, self.storages, *ways, self.free, slack)


def relax_problem(
    s: Structure,
    flow: Flow,
    budget: int,
    anchors: list[int],
    *,
    held: bool = False,
    no_swap: Bool | None = None,
    targets: Mapping[int, int] | None = None,
) -> Relaxation:
    """Build the relaxation for `budget` bytes at the boundary and at `anchors` (node ids).

    held: anchors of the backward see what is rebuilt. no_swap: bool[storages], those that may not be swapped. targets:
    bytes for single anchors, `BOUNDARY` among them, in place of `budget`.
    """
    build = _Builder(s, flow, budget, no_swap, targets)
    build.common()
    places = [BOUNDARY, *anchors]
    starts = [build.lp.amounts(1) for _ in places]
    late = [held and v != BOUNDARY and bool(s.problem.arrays.node_phase[v] == BACKWARD) for v in places]
    rebuilt = [build.anchor(v, start, seen) for v, start, seen in zip(places, starts, late, strict=True)]
    build.totals(places, starts, rebuilt)
    return build.finish()


def _taken_bytes(g: SimArrays) -> Int64:
    """Per node, the bytes of the largest storage that its result may be written over."""
    taken = np.zeros(g.node_phase.shape[0], np.int64)
    if g.taker_start.shape[0]:
        np.maximum.at(taken, g.taker_node, np.repeat(g.storage_bytes, np.diff(g.taker_start)))
    return taken


def _tiny(s: Structure, budget: int) -> Bool:
    """The smallest storages that may be kept and together take `TINY_SHARE` of the budget."""
    size = s.problem.arrays.storage_bytes
    keepable = np.flatnonzero(s.reachable & s.problem.allowed[:, KEEP])
    ascending = keepable[np.argsort(size[keepable], kind="stable")]
    tiny = np.zeros(size.shape[0], np.bool_)
    tiny[ascending[np.cumsum(size[ascending]) <= TINY_SHARE * budget]] = True
    return tiny


def _spread(values: Int64, most: int, *, last_of_each: bool) -> list[int]:
    """At most `most` of the values, evenly spread: each stands for itself and those after (or before) it."""
    if values.shape[0] <= most:
        return [int(v) for v in values]
    return [int(part[-1 if last_of_each else 0]) for part in np.array_split(values, most)]
