"""Capuchin's policy (Peng et al., ASPLOS'20, section 4): swaps by free time, then the cheaper of swap and recompute.

Its measured iteration is our keep-all timeline. A swap is free where its copies fit between the last forward and the
first backward access, outside the peak. When free swaps do not save enough, each next candidate takes the cheaper of
its exposed swap time and its recompute time; recomputation is ranked by saved bytes per us (MSPS), with the paper's
updates of sources after each choice. The required saving grows by what the simulator says is missing, as Capuchin's own
feedback from the next iteration does.
"""

from collections.abc import Sequence

import numpy as np

from fxhome.passes.search.evaluator import Evaluator, base_placement
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Structure
from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP, SimResult
from fxhome.passes.simulate_kernels import FORWARD

_ROUNDS = 12


class _Lineage:
    """What each candidate is recomputed from, and at what cost; kept up to date as candidates are chosen."""

    def __init__(self, s: Structure, result: SimResult, candidates: list[int]) -> None:
        g = s.problem.arrays
        self.candidates = set(candidates)
        self.sources: dict[int, set[int]] = {}
        self.time_us: dict[int, float] = {}
        self.extra_us: dict[int, float] = {}
        self.repeats: dict[int, int] = {}
        for t in candidates:
            root = int(g.storage_root[t])
            sources: set[int] = set()
            us, stack, seen = 0.0, [root], {root}
            while stack:
                v = stack.pop()
                us += float(g.node_time_us[v])
                for u in g.read_node[g.read_start[v] : g.read_start[v + 1]].tolist():
                    if g.node_phase[u] != FORWARD or u in seen:
                        continue
                    seen.add(u)
                    storage = int(g.root_storage[u])
                    if storage in self.candidates:
                        sources.add(storage)
                    elif storage >= 0 and result.saved[storage]:
                        continue
                    else:
                        stack.append(u)
            self.sources[t], self.time_us[t] = sources, us
            self.extra_us[t], self.repeats[t] = 0.0, 1

    def cost_us(self, t: int) -> float:
        """Recompute time with the repeats it causes."""
        return self.time_us[t] + self.extra_us[t]

    def choose(self, t: int, chosen: list[int]) -> None:
        """The paper's three updates after target t is chosen."""
        for r in chosen:
            if t in self.sources[r]:
                self.sources[r] = (self.sources[r] - {t}) | self.sources[t]
                self.repeats[t] += 1
        self.candidates.discard(t)
        for c in self.candidates:
            if t in self.sources[c]:
                self.sources[c] = (self.sources[c] - {t}) | self.sources[t]
                self.time_us[c] += self.time_us[t]
                self.extra_us[c] += sum(self.time_us[c] for r in chosen if c in self.sources[r])
        for c in self.sources[t] & self.candidates:
            self.extra_us[c] = self.repeats[t] * self.time_us[c]
        chosen.append(t)


class _Lanes:
    """Exposed copy time of a set of swaps: outs must end before the peak window, ins begin after it."""

    def __init__(self, s: Structure, result: SimResult, budget: int, saved_bytes: float) -> None:
        over = np.flatnonzero(result.curve - saved_bytes > budget)
        first = int(over[0]) if over.shape[0] else result.peak_position
        last = int(over[-1]) if over.shape[0] else result.peak_position
        self.opens = float(result.start_us[first])
        self.closes = float(result.start_us[min(last, result.start_us.shape[0] - 1)])

    def exposed_us(self, swaps: Sequence[tuple[float, float, float, float]]) -> float:
        """`swaps`: (evicted at, back at, out us, in us)."""
        clock = late = 0.0
        for evicted, _, out, _ in sorted(swaps):
            clock = max(clock, evicted) + out
        if swaps:
            late = max(0.0, clock - max(self.opens, max(x[0] for x in swaps)))
        clock, delay = self.closes, 0.0
        for _, back, _, into in sorted(swaps, key=lambda x: x[1]):
            clock = max(clock, self.closes) + into
            if clock > back + delay:
                delay = clock - back
        return late + delay


def capuchin(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """The placement Capuchin decides on at the budget."""
    problem, g = s.problem, s.problem.arrays
    base = base_placement(problem, s.demanded)
    result = evaluator.run(base)
    required = float(result.peak_bytes - evaluator.budget_bytes)
    placement = base
    best = evaluator.score(base)
    for _ in range(_ROUNDS):
        if required <= 0:
            break
        trial = _decide(s, result, base, evaluator.budget_bytes, required)
        value = evaluator.score(trial)
        if value < best:
            best, placement = value, trial
        if value[0] == 0 or required >= float(g.storage_bytes.sum()):
            break
        required = required + max(float(value[0]), 0.02 * required)
    return placement


def _decide(s: Structure, result: SimResult, base: Placements, budget: int, required: float) -> Placements:
    problem, g, link = s.problem, s.problem.arrays, s.problem.link
    node_at = {int(v): p for p, v in enumerate(result.program)}
    last_forward = _last_forward(s)
    swaps: dict[int, tuple[float, float, float, float]] = {}
    candidates: list[int] = []
    for d in s.decisions[s.demanded[s.decisions]].tolist():
        if base[d] != KEEP or result.saved[d] == 0:
            continue
        v = int(last_forward[d])
        evicted = float(result.start_us[node_at[v]] + g.node_time_us[v]) if v in node_at else 0.0
        back = float(result.start_us[node_at[int(s.first_reader[d])]])
        size = float(g.storage_copy_bytes[d])
        out, into = link.latency_us + size * link.d2h_us_per_byte, link.latency_us + size * link.h2d_us_per_byte
        swaps[d] = (evicted, back, out, into)
        candidates.append(d)
    placement = base.copy()
    saved = 0.0
    taken: list[tuple[float, float, float, float]] = []
    free_us = {d: swaps[d][1] - swaps[d][3] - swaps[d][0] - swaps[d][2] for d in candidates}
    order = sorted(candidates, key=lambda d: (-free_us[d], d))
    exposed = 0.0
    for d in order:
        if saved >= required or free_us[d] < 0:
            break
        if not problem.allowed[d, SWAP]:
            continue
        with_it = _Lanes(s, result, budget, saved).exposed_us([*taken, swaps[d]])
        if with_it > exposed + 1e-6:
            continue
        placement[d] = SWAP
        taken.append(swaps[d])
        saved += float(g.storage_bytes[d])
    if saved >= required:
        return placement
    rest = [d for d in order if placement[d] == KEEP]
    lineage = _Lineage(s, result, rest)
    chosen: list[int] = []
    while saved < required and rest:
        lanes = _Lanes(s, result, budget, saved)
        # The next candidate: the best of the free-time ranking against the best of the MSPS ranking.
        by_swap = next((d for d in rest if problem.allowed[d, SWAP]), None)
        able = [d for d in rest if problem.allowed[d, RECOMPUTE]]
        by_rate = max(able, key=lambda d: (g.storage_bytes[d] / (lineage.cost_us(d) + 1e-6), -d)) if able else None
        if by_swap is None and by_rate is None:
            break
        swap_us = lanes.exposed_us([*taken, swaps[by_swap]]) - exposed if by_swap is not None else np.inf
        swap_rate = swap_us / g.storage_bytes[by_swap] if by_swap is not None else np.inf
        again_rate = lineage.cost_us(by_rate) / g.storage_bytes[by_rate] if by_rate is not None else np.inf
        if by_swap is not None and swap_rate <= again_rate:
            d = by_swap
            placement[d] = SWAP
            taken.append(swaps[d])
            exposed += max(0.0, swap_us)
            lineage.candidates.discard(d)
        else:
            assert by_rate is not None, "one of the two rates is finite"
            d = by_rate
            placement[d] = RECOMPUTE
            lineage.choose(d, chosen)
        rest.remove(d)
        saved += float(g.storage_bytes[d])
    return placement


def _last_forward(s: Structure) -> dict[int, int]:
    """The last forward node that reads each storage, through views too; its producer where none does."""
    g = s.problem.arrays
    n = g.node_phase.shape[0]
    last = {d: int(g.storage_owner[d]) for d in s.decisions.tolist()}
    base = np.arange(n)
    for v in range(n):
        if g.node_phase[v] != FORWARD:
            continue
        for u in g.read_node[g.read_start[v] : g.read_start[v + 1]].tolist():
            storage = int(g.root_storage[base[u]])
            if storage in last:
                last[storage] = v
            if g.own_start[v + 1] == g.own_start[v]:
                base[v] = base[u]
    return last
