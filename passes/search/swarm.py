"""The swarm of the default policy: discrete particles over placements, feasible first; `flight` flies it.

What it keeps of HOME's swarm (He et al., IEEE TC 2023): particles are whole placements, drawn to their own best and to
the swarm's best. What differs: seeds from published policies, greedy construction and the linear relaxation instead of
uniform vectors; moves act on blocks of neighbours and on identical layers at once, not gene by gene; mutation and
exchange, so that the swarm does not collapse; a particle over the budget is repaired by converting who is alive at its
peak.
Each ingredient can be switched off for the ablation.
"""

from collections.abc import Sequence

import numpy as np

from fxhome.passes.search.evaluator import Evaluator
from fxhome.passes.search.repair import Prices, Tried, convert
from fxhome.passes.search.result import Fitness, Placements
from fxhome.passes.search.seeds import Ingredients
from fxhome.passes.search.structure import Int64, Structure, instruction_times, read_storages
from fxhome.passes.simulate import COMPRESS_SWAP, KEEP, RECOMPUTE, SWAP, SimResult

KICK_EVALUATIONS = 300
WANDER_PRICE = 10.0
WANDER_TEMPERATURE = 1e-3  # of the step, to begin with
WANDER_TRIALS = 4  # neighbours looked at together; the first one that is accepted is taken


class Swarm:
    """Particles, their bests, and the operators that move them."""

    def __init__(self, s: Structure, evaluator: Evaluator, rng: np.random.Generator, ingredients: Ingredients) -> None:
        self.s = s
        self.evaluator = evaluator
        self.rng = rng
        self.ingredients = ingredients
        self.position_of = {int(d): i for i, d in enumerate(s.decisions)}
        self.choices = [np.flatnonzero(row).astype(np.int8) for row in s.problem.allowed[s.decisions]]
        self.bests: list[Placements] = []
        self.values: list[Fitness] = []
        self.culprits: dict[int, list[Int64]] = {}
        self.sources: dict[int, list[int]] = {}

    def add(self, placement: Placements) -> None:
        """Add a particle unless it is there already."""
        if any(np.array_equal(placement, other) for other in self.bests):
            return
        self.values.append(self.evaluator.score(placement))
        self.bests.append(placement.copy())

    def _subset(self) -> Int64:
        """Storages that move together: a block of neighbours, members of one group, or a scatter."""
        rng, decisions = self.rng, self.s.decisions
        n = decisions.shape[0]
        draw = rng.random()
        if draw < 0.4 and self.ingredients.groups and self.s.units:
            unit = self.s.units[int(rng.integers(len(self.s.units)))]
            size = int(rng.integers(1, unit.shape[0] + 1))
            start = int(rng.integers(0, unit.shape[0] - size + 1))
            return unit[start : start + size]
        if draw < 0.8:
            size = max(1, int(n ** rng.random()))
            start = int(rng.integers(0, n - size + 1))
            return decisions[start : start + size]
        scatter: Int64 = decisions[rng.random(n) < rng.random() * 0.5]
        return scatter

    def _attract(self, x: Placements, other: Placements) -> None:
        subset = self._subset()
        x[subset] = other[subset]

    def _mutate(self, x: Placements) -> None:
        subset = self._subset()
        if subset.shape[0] > 4:
            kept = np.flatnonzero(self.rng.random(subset.shape[0]) < self.rng.random())
            subset = subset[kept] if kept.shape[0] else subset[:1]
        if subset.shape[0] == 0:
            self._flip(x)
            return
        options = self.choices[self.position_of[int(subset[0])]]
        code = int(self.rng.choice(options))
        x[subset[self.s.problem.allowed[subset, code]]] = code

    def _flip(self, x: Placements) -> None:
        i = int(self.rng.integers(self.s.decisions.shape[0]))
        x[self.s.decisions[i]] = self.rng.choice(self.choices[i])

    def _exchange(self, x: Placements) -> None:
        """Two storages trade placements: within a group this keeps the bytes and changes only where they are."""
        rng = self.rng
        if self.s.units and self.ingredients.groups and rng.random() < 0.6:
            pool = self.s.units[int(rng.integers(len(self.s.units)))]
        else:
            pool = self.s.decisions
        a = int(pool[int(rng.integers(pool.shape[0]))])
        different = pool[x[pool] != x[a]]
        if different.shape[0] == 0:
            self._flip(x)
            return
        size = self.s.problem.arrays.storage_bytes
        near = different[np.argsort(np.abs(size[different] - size[a]), kind="stable")[:8]]
        b = int(near[int(rng.integers(near.shape[0]))])
        allowed = self.s.problem.allowed
        if allowed[a, x[b]] and allowed[b, x[a]]:
            x[a], x[b] = x[b], x[a]

    def _shift(self, x: Placements) -> None:
        """What is saved moves to a source of it, or back from one: same bytes perhaps, but ready at another time."""
        s, rng = self.s, self.rng
        d = int(s.decisions[int(rng.integers(s.decisions.shape[0]))])
        sources = self.sources.get(d)
        if sources is None:
            found = read_storages(s.problem.arrays, int(s.problem.arrays.storage_owner[d]))
            sources = self.sources[d] = [u for u in found if u in self.position_of]
        if not sources or not s.problem.allowed[d, RECOMPUTE]:
            self._flip(x)
            return
        u = sources[int(rng.integers(len(sources)))]
        if x[d] != RECOMPUTE and s.problem.allowed[u, x[d]]:
            x[u], x[d] = x[d], RECOMPUTE
        elif s.problem.allowed[d, x[u]] and s.problem.allowed[u, RECOMPUTE]:
            x[d], x[u] = x[u], RECOMPUTE

    def _undo(self, x: Placements) -> None:
        """A moved storage is kept, or moved the other way; weighted to what costs most time."""
        s, g = self.s, self.s.problem.arrays
        moved = s.decisions[(x[s.decisions] != KEEP) & s.demanded[s.decisions]]
        if moved.shape[0] == 0:
            self._flip(x)
            return
        swapped = (x[moved] == SWAP) | (x[moved] == COMPRESS_SWAP)
        us = np.where(swapped, s.swap_us[moved], g.node_time_us[g.storage_owner[moved]]) + 1e-3
        d = int(self.rng.choice(moved, p=us / us.sum()))
        options = self.choices[self.position_of[d]]
        options = options[options != x[d]]
        x[d] = KEEP if KEEP in options and self.rng.random() < 0.7 else self.rng.choice(options)

    def _relieve(self, x: Placements, i: int) -> None:
        """A storage whose copy the compute waits for, at one of the longest waits, is placed otherwise."""
        culprits = self.culprits.get(i)
        if culprits is None:
            culprits = self.culprits[i] = waited_for(self.s, self.evaluator.run(x))
        culprits = [group[x[group] != KEEP] for group in culprits]
        culprits = [group for group in culprits if group.shape[0]]
        if not culprits:
            self._undo(x)
            return
        group = culprits[min(int(self.rng.exponential(1.5)), len(culprits) - 1)]
        d = int(self.rng.choice(group))
        options = self.choices[self.position_of[d]]
        x[d] = self.rng.choice(options[options != x[d]])

    def settle(self, moves: Sequence[tuple[Placements, Placements]]) -> list[Fitness]:
        """Score each `x` of (x, before); one that is a little over the budget is converted at its peak, twice at most.

        Each `x` changes in place. All are simulated together; what comes out does not depend on the number of cores.
        """
        probed = self.evaluator.probe_all([x for x, _ in moves])
        values, results = [value for value, _ in probed], [result for _, result in probed]
        if not self.ingredients.repair:
            return values
        near = self.evaluator.budget_bytes // 4
        pending = [k for k, value in enumerate(values) if 0 < value[0] <= near]
        tried: dict[int, Tried] = {}
        prices: dict[int, Prices] = {}
        for k in pending:
            x, before = moves[k]
            tried[k] = {(int(d), int(before[d])) for d in np.flatnonzero(x != before)[:64]}
            prices[k] = Prices(link=float(np.exp(self.rng.normal(-0.3, 1.0))), share=1.0)
        for _ in range(2):
            changed = []
            for k in pending:
                x = moves[k][0]
                result = results[k] or self.evaluator.run(x)
                if convert(self.s, x, result, values[k][0], prices[k], tried[k]):
                    changed.append(k)
            for k, (value, found) in zip(
                changed, self.evaluator.probe_all([moves[k][0] for k in changed]), strict=True
            ):
                values[k], results[k] = value, found
            pending = [k for k in changed if values[k][0] > 0]
        return values

    def _propose(self, i: int) -> Placements:
        """Particle i moved once from its best."""
        rng = self.rng
        x = self.bests[i].copy()
        draw = rng.random()
        if draw < 0.2 or not self.ingredients.mutation:
            lead = 0 if rng.random() < 0.6 else int(rng.integers(len(self.bests)))
            self._attract(x, self.bests[self.ranking()[lead]])
        elif draw < 0.3:
            self._mutate(x)
        elif draw < 0.45:
            self._flip(x)
        elif draw < 0.6:
            self._exchange(x)
        elif draw < 0.7:
            self._shift(x)
        elif draw < 0.8:
            self._relieve(x, i)
        else:
            self._undo(x)
        return x

    def step(self) -> None:
        """Move every particle once from its best, and keep the places that are better."""
        proposed = [(i, self._propose(i)) for i in range(len(self.bests))]
        proposed = [(i, x) for i, x in proposed if not np.array_equal(x, self.bests[i])]
        for (i, x), value in zip(proposed, self.settle([(x, self.bests[i]) for i, x in proposed]), strict=True):
            if value < self.values[i]:
                self.bests[i], self.values[i] = x, value
                self.culprits.pop(i, None)

    def ranking(self) -> list[int]:
        """Particles, best first."""
        return sorted(range(len(self.values)), key=lambda i: (self.values[i], i))

    def kick(self) -> None:
        """All but the two best start again from the best, some blocks drawn anew; the worst wanders off from it.

        Wandering is annealing that may cross placements over the budget, an overflow priced by its transfer.
        """
        order = self.ranking()
        lead = self.bests[order[0]]
        fresh = [lead.copy() for _ in order[2:-1]]
        for x in fresh:
            for _ in range(int(self.rng.integers(2, 5))):
                self._mutate(x)
        for i, x, value in zip(order[2:-1], fresh, self.settle([(x, lead) for x in fresh]), strict=True):
            self.bests[i], self.values[i] = x, value
            self.culprits.pop(i, None)
        self._wander(order[-1], lead)

    def _wander(self, i: int, start: Placements) -> None:
        self.bests[i], self.values[i] = self.anneal(start, KICK_EVALUATIONS, WANDER_TEMPERATURE, WANDER_TRIALS)
        self.culprits.pop(i, None)

    def anneal(self, start: Placements, runs: int, heat: float, together: int) -> tuple[Placements, Fitness]:
        """Where simulated annealing over `runs` simulations ends; placements over the budget may be crossed.

        heat: the first temperature as a share of the step. together: neighbours simulated at once.
        """
        rng, link = self.rng, self.s.problem.link
        rate = WANDER_PRICE * (link.d2h_us_per_byte + link.h2d_us_per_byte)
        x = start.copy()
        value = self.evaluator.score(x)
        now = value[1] + rate * value[0]
        for k in range(0, runs, together):
            temperature = heat * now * 10 ** (-2.5 * k / runs)
            trials = [x.copy() for _ in range(together)]
            for trial in trials:
                draw = rng.random()
                if draw < 0.5:
                    self._flip(trial)
                elif draw < 0.8:
                    self._exchange(trial)
                else:
                    self._shift(trial)
            for trial, (got, _) in zip(trials, self.evaluator.probe_all(trials), strict=True):
                energy = got[1] + rate * got[0]
                if energy <= now or rng.random() < np.exp((now - energy) / temperature):
                    x, now, value = trial, energy, got
                    break
        return x, value

    def trim(self, particles: int) -> None:
        """Keep the best particles only."""
        order = self.ranking()[:particles]
        self.bests = [self.bests[i] for i in order]
        self.values = [self.values[i] for i in order]
        self.culprits.clear()


def waited_for(s: Structure, result: SimResult) -> list[Int64]:
    """For the longest waits of the program, longest first: the swapped storages whose copies queue up before it."""
    busy = instruction_times(s.problem.arrays, result.program)
    wait = np.diff(result.start_us, prepend=0.0)
    wait[1:] -= busy
    wait -= result.idle_us
    swapped = np.flatnonzero((result.saved == 1) & (result.issue_in >= 0))
    found: list[Int64] = []
    for p in np.argsort(-wait, kind="stable")[:8]:
        if wait[p] <= 1.0:
            break
        at = result.wait_out[swapped] if p <= result.forward_length else result.first_backward[swapped]
        near = swapped[at <= p]
        queue = near[np.argsort(-at[at <= p], kind="stable")[:6]]
        if queue.shape[0]:
            found.append(queue)
    return found
