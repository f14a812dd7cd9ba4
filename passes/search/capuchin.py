"""Capuchin's policy (Peng et al., ASPLOS'20, section 4): swaps by free time, then the cheaper of swap and recompute.

Its measured iteration is our keep-all timeline. A swap is free where its copies fit between the last forward and the
first backward access, outside the peak. When free swaps do not save enough, each next candidate takes the cheaper of
its exposed swap time and its recompute time; recomputation is ranked by saved bytes per us (MSPS), with the paper's
updates of sources after each choice. The required saving grows by what the simulator says is missing, as Capuchin's own
feedback from the next iteration does.
"""

from collections.abc import Sequence

import numpy as np

from fxhome.passes.compiled import compiled
from fxhome.passes.search.evaluator import Evaluator, base_placement
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Bool, Float64, Int64, Structure
from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP, SimResult
from fxhome.passes.simulate_kernels import FORWARD

_ROUNDS = 12


class _Lineage:
    """What each candidate is recomputed from, and at what cost; kept up to date as candidates are chosen.

    cost_us[t]: recompute time of storage t with the repeats that it causes.
    """

    def __init__(self, s: Structure, result: SimResult, candidates: list[int]) -> None:
        g = s.problem.arrays
        self.candidates = set(candidates)
        self.sources: dict[int, set[int]] = {}
        self.users: dict[int, set[int]] = {t: set() for t in candidates}
        self.time_us = np.zeros(s.problem.num_storages)
        self.extra_us = np.zeros(s.problem.num_storages)
        self.repeats = np.ones(s.problem.num_storages)
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
            for u in sources:
                self.users[u].add(t)

    @property
    def cost_us(self) -> Float64:
        """Per storage, of those that are candidates."""
        return self.time_us + self.extra_us

    def _inherit(self, user: int, t: int) -> None:
        """Recomputing `user` now starts from what t itself is recomputed from."""
        self.sources[user] = (self.sources[user] - {t}) | self.sources[t]
        for u in self.sources[t]:
            self.users[u].add(user)

    def choose(self, t: int, chosen: set[int]) -> None:
        """The paper's three updates after target t is chosen."""
        users = [x for x in self.users[t] if t in self.sources[x]]
        for r in users:
            if r in chosen:
                self._inherit(r, t)
                self.repeats[t] += 1
        self.candidates.discard(t)
        for c in users:
            if c in self.candidates:
                self._inherit(c, t)
                self.time_us[c] += self.time_us[t]
                repeated = sum(1 for r in self.users[c] if r in chosen and c in self.sources[r])
                self.extra_us[c] += repeated * self.time_us[c]
        for c in self.sources[t] & self.candidates:
            self.extra_us[c] = self.repeats[t] * self.time_us[c]
        chosen.add(t)


@compiled()
def _exposed_us(copies, taken, by_eviction, by_return, opens, closes):  # type: ignore[no-untyped-def]
    """Exposed copy time of the `taken` rows of `copies` [evicted at, back at, out us, in us]."""
    clock = 0.0
    latest = -1.0
    for i in by_eviction:
        if taken[i]:
            clock = max(clock, copies[i, 0]) + copies[i, 2]
            latest = max(latest, copies[i, 0])
    late = max(0.0, clock - max(opens, latest)) if latest >= 0 else 0.0
    clock = closes
    delay = 0.0
    for i in by_return:
        if taken[i]:
            clock += copies[i, 3]
            delay = max(delay, clock - copies[i, 1])
    return late + delay


class _Lanes:
    """Exposed copy time of a set of swaps: outs must end before the peak window, ins begin after it."""

    def __init__(self, result: SimResult, budget: int, copies: Float64, candidates: Int64) -> None:
        self.result, self.budget, self.copies = result, budget, copies
        self.taken: Bool = np.zeros(copies.shape[0], np.bool_)
        self.by_eviction: Int64 = candidates[np.argsort(copies[candidates, 0], kind="stable")]
        self.by_return: Int64 = candidates[np.argsort(copies[candidates, 1], kind="stable")]
        # The window over the budget; as more is saved it only shrinks.
        self.first, self.last = 0, result.curve.shape[0] - 1

    def exposed_us(self, more: int, saved_bytes: float) -> float:
        """With candidate `more` taken too, where `saved_bytes` have been saved already: never fewer than before."""
        result = self.result
        self._narrow(self.budget + saved_bytes)
        empty = self.first > self.last
        first, last = (result.peak_position, result.peak_position) if empty else (self.first, self.last)
        closes = float(result.start_us[min(last, result.start_us.shape[0] - 1)])
        before = bool(self.taken[more])
        self.taken[more] = True
        exposed = _exposed_us(
            self.copies, self.taken, self.by_eviction, self.by_return, float(result.start_us[first]), closes
        )
        self.taken[more] = before
        return float(exposed)

    def _narrow(self, limit_bytes: float) -> None:
        curve = self.result.curve
        while self.first <= self.last and curve[self.first] <= limit_bytes:
            self.first += 1
        while self.first <= self.last and curve[self.last] <= limit_bytes:
            self.last -= 1


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
    demanded = s.decisions[s.demanded[s.decisions]]
    candidates: list[int] = demanded[(base[demanded] == KEEP) & (result.saved[demanded] == 1)].tolist()
    copies = np.zeros((problem.num_storages, 4))
    for d in candidates:
        v = int(last_forward[d])
        moved = float(g.storage_copy_bytes[d])
        copies[d] = (
            float(result.start_us[node_at[v]] + g.node_time_us[v]) if v in node_at else 0.0,
            float(result.start_us[node_at[int(s.first_reader[d])]]),
            link.latency_us + moved * link.d2h_us_per_byte,
            link.latency_us + moved * link.h2d_us_per_byte,
        )
    placement = base.copy()
    saved = 0.0
    lanes = _Lanes(result, budget, copies, np.array(sorted(candidates), np.int64))
    free_us = copies[:, 1] - copies[:, 3] - copies[:, 0] - copies[:, 2]
    order = sorted(candidates, key=lambda d: (-free_us[d], d))
    exposed = 0.0
    for d in order:
        if saved >= required or free_us[d] < 0:
            break
        if not problem.allowed[d, SWAP]:
            continue
        if lanes.exposed_us(d, saved) > exposed + 1e-6:
            continue
        placement[d] = SWAP
        lanes.taken[d] = True
        saved += float(g.storage_bytes[d])
    if saved >= required:
        return placement
    rest = [d for d in order if placement[d] == KEEP]
    lineage = _Lineage(s, result, rest)
    chosen: set[int] = set()
    to_swap = [d for d in rest if problem.allowed[d, SWAP]]
    next_swap = 0
    able = np.array(sorted(d for d in rest if problem.allowed[d, RECOMPUTE]), np.int64)
    size = g.storage_bytes.astype(np.float64)
    while saved < required:
        # The next candidate: the best of the free-time ranking against the best of the MSPS ranking.
        while next_swap < len(to_swap) and placement[to_swap[next_swap]] != KEEP:
            next_swap += 1
        by_swap = to_swap[next_swap] if next_swap < len(to_swap) else None
        able = able[placement[able] == KEEP]
        cost_us = lineage.cost_us
        by_rate = int(able[np.argmax(size[able] / (cost_us[able] + 1e-6))]) if able.shape[0] else None
        if by_swap is None and by_rate is None:
            break
        swap_us = lanes.exposed_us(by_swap, saved) - exposed if by_swap is not None else np.inf
        swap_rate = swap_us / size[by_swap] if by_swap is not None else np.inf
        again_rate = cost_us[by_rate] / size[by_rate] if by_rate is not None else np.inf
        if by_swap is not None and swap_rate <= again_rate:
            d = by_swap
            placement[d] = SWAP
            lanes.taken[d] = True
            exposed += max(0.0, swap_us)
            lineage.candidates.discard(d)
        else:
            assert by_rate is not None, "one of the two rates is finite"
            d = by_rate
            placement[d] = RECOMPUTE
            lineage.choose(d, chosen)
        saved += float(size[d])
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
