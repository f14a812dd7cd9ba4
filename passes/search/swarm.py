"""The default policy: a discrete particle swarm over placements, feasible first.

What it keeps of HOME's swarm (He et al., IEEE TC 2023): particles are whole placements, drawn to their own best and to
the swarm's best. What differs: seeds built greedily at several prices of the link instead of uniform vectors; moves act
on blocks of neighbours and on identical layers at once, not gene by gene; mutation and exchange, so that the swarm does
not collapse; a particle over the budget is repaired by converting who is alive at its peak.
Each ingredient can be switched off for the ablation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxhome.passes.search.bound import lower_bound, rounded
from fxhome.passes.search.capuchin import capuchin
from fxhome.passes.search.evaluator import Evaluator, OutOfBudgetError, base_placement
from fxhome.passes.search.policies import checkpoint, superneurons, vdnn_all, vdnn_conv
from fxhome.passes.search.repair import Prices, Tried, convert, descend, relax, repair
from fxhome.passes.search.result import Fitness, Placements, StoppedBy
from fxhome.passes.search.structure import Int64, Structure, instruction_times, read_storages
from fxhome.passes.simulate import COMPRESS_SWAP, KEEP, RECOMPUTE, SWAP, SimResult

RELAXATIONS = 3
# Above this many storages, seeds whose cost grows faster than linearly (linear programs, Capuchin) are left out.
LARGE_DECISIONS = 4000
KICK_EVALUATIONS = 600
WANDER_PRICE = 10.0
LINK_PRICES = (0.05, 0.3, 0.7, 1.0, 2.0, 8.0)


@dataclass(frozen=True)
class Ingredients:
    """Switches for the ablation, and the swarm's few sizes."""

    seeds: bool = True
    relaxation: bool = True
    groups: bool = True
    mutation: bool = True
    repair: bool = True
    polish: bool = True
    particles: int = 8
    patience: int | None = None  # evaluations without a gain; None: more for small graphs, whose evaluations are cheap


def constructive_seeds(
    s: Structure,
    evaluator: Evaluator,
    seeds: Sequence[Placements],
    ingredients: Ingredients,
    storage_class: Sequence[str] | None,
) -> list[Placements]:
    """Starting placements, each repaired: published policies, the caller's, greedy at several link prices, segments."""
    problem = s.problem
    base = base_placement(problem, s.demanded)
    starts: list[tuple[Placements, Prices]] = []
    published = [checkpoint, vdnn_all] + ([superneurons, vdnn_conv] if storage_class is not None else [])
    if s.decisions.shape[0] <= LARGE_DECISIONS:
        published.insert(0, capuchin)
    for policy in published:
        starts.append((policy(s, evaluator, storage_class), Prices(link=0.5)))
    for given in seeds:
        starts.append((np.ascontiguousarray(given, np.int8), Prices(link=1.0)))
    starts.append((problem.keep_all(), Prices(link=1.0)))
    starts += [(base, Prices(link=price, share=0.34)) for price in LINK_PRICES]
    swap = base.copy()
    swappable = s.decisions[problem.allowed[s.decisions, SWAP] & s.demanded[s.decisions]]
    swap[swappable] = SWAP
    again = base.copy()
    rebuilt = s.decisions[problem.allowed[s.decisions, RECOMPUTE]]
    again[rebuilt] = RECOMPUTE
    segments = again.copy()
    step = max(1, round(np.sqrt(rebuilt.shape[0])))
    segments[rebuilt[::step]] = np.where(problem.allowed[rebuilt[::step], KEEP], KEEP, RECOMPUTE)
    starts += [(swap, Prices()), (segments, Prices()), (again, Prices(link=0.3))]
    made: list[Placements] = []
    for start, prices in starts:
        if ingredients.repair:
            fixed, _ = repair(s, evaluator, start, prices)
        else:
            fixed = start
            evaluator.score(fixed)
        made.append(fixed)
    return made


def relaxed_seeds(s: Structure, evaluator: Evaluator, rng: np.random.Generator) -> list[Placements]:
    """Placements rounded from the linear relaxation, whose shares are read as the odds of each choice.

    The relaxation knows nothing of transients, so it is solved again for a budget lower by what its rounding overran.
    """
    problem = s.problem
    made: list[Placements] = []
    target = evaluator.budget_bytes
    anchors: tuple[int, ...] = ()
    for turn in range(RELAXATIONS):
        bound = lower_bound(problem, target, structure=s, start_anchors=anchors, rounds=2 if turn == 0 else 1)
        anchors = bound.anchors
        if bound.shares is None:
            break
        worst = 0
        for draw in (None, rng):
            start = rounded(s, bound.shares, draw)
            over = evaluator.score(start)[0]
            worst = over if draw is None else worst
            fixed, _ = repair(s, evaluator, start, Prices(link=0.6, share=1.0))
            made.append(fixed)
        if worst == 0:
            break
        target -= worst
    return made


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

    def settle(self, x: Placements, before: Placements) -> Fitness:
        """Score `x`; where it is a little over the budget, convert once or twice at the peak. `x` changes in place."""
        value, result = self.evaluator.probe(x)
        if value[0] == 0 or not self.ingredients.repair or value[0] > self.evaluator.budget_bytes // 4:
            return value
        changed = np.flatnonzero(x != before)
        tried: Tried = {(int(d), int(before[d])) for d in changed[:64]}
        prices = Prices(link=float(np.exp(self.rng.normal(-0.3, 1.0))), share=1.0)
        for _ in range(2):
            result = result or self.evaluator.run(x)
            if not convert(self.s, x, result, value[0], prices, tried):
                break
            value, result = self.evaluator.probe(x)
            if value[0] == 0:
                break
        return value

    def step(self, i: int) -> None:
        """Move particle i once from its best, and keep the place where it is better."""
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
        if np.array_equal(x, self.bests[i]):
            return
        value = self.settle(x, self.bests[i])
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
        for i in order[2:-1]:
            x = self.bests[order[0]].copy()
            for _ in range(int(self.rng.integers(2, 5))):
                self._mutate(x)
            self.values[i] = self.settle(x, self.bests[order[0]])
            self.bests[i] = x
            self.culprits.pop(i, None)
        self._wander(order[-1], self.bests[order[0]])

    def _wander(self, i: int, start: Placements) -> None:
        rng, link = self.rng, self.s.problem.link
        rate = WANDER_PRICE * (link.d2h_us_per_byte + link.h2d_us_per_byte)
        x = start.copy()
        value = self.evaluator.score(x)
        now = value[1] + rate * value[0]
        for k in range(KICK_EVALUATIONS):
            temperature = 1e-3 * now * 10 ** (-2.5 * k / KICK_EVALUATIONS)
            trial = x.copy()
            draw = rng.random()
            if draw < 0.5:
                self._flip(trial)
            elif draw < 0.8:
                self._exchange(trial)
            else:
                self._shift(trial)
            got = self.evaluator.score(trial)
            energy = got[1] + rate * got[0]
            if energy <= now or rng.random() < np.exp((now - energy) / temperature):
                x, now, value = trial, energy, got
        self.bests[i], self.values[i] = x, value
        self.culprits.pop(i, None)

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


def pso(
    s: Structure,
    evaluator: Evaluator,
    *,
    seed: int,
    seeds: Sequence[Placements] = (),
    ingredients: Ingredients | None = None,
    storage_class: Sequence[str] | None = None,
) -> StoppedBy:
    """Run the swarm to convergence or to its limits; the best is in `evaluator`."""
    ingredients = ingredients or Ingredients()
    rng = np.random.default_rng(seed)
    evaluator.protected += 1
    try:
        evaluator.score(base_placement(s.problem, s.demanded))
        made: list[Placements] = []
        if ingredients.relaxation and int(s.reachable.sum()) <= LARGE_DECISIONS:
            made += relaxed_seeds(s, evaluator, rng)
        if ingredients.seeds:
            made += constructive_seeds(s, evaluator, seeds, ingredients, storage_class)
        else:
            made += [np.ascontiguousarray(x, np.int8) for x in seeds] + _uniform(s, rng, ingredients.particles)
    finally:
        evaluator.protected -= 1
    try:
        swarm = Swarm(s, evaluator, rng, ingredients)
        for placement in made:
            swarm.add(placement)
        if ingredients.seeds:
            for i in swarm.ranking()[:3]:
                swarm.add(relax(s, evaluator, swarm.bests[i], max_runs=120))
        swarm.trim(ingredients.particles)
        last_gain, last_step = evaluator.evaluations, evaluator.best_fitness
        last_kick = last_gain
        idle = 0
        nodes = s.problem.arrays.node_phase.shape[0]
        patience = ingredients.patience or int(np.clip(2_000_000 // nodes, 1500, 8000))
        while evaluator.evaluations - last_gain < patience and idle < 50:
            before = evaluator.evaluations
            for i in range(len(swarm.bests)):
                swarm.step(i)
            idle = idle + 1 if evaluator.evaluations == before else 0
            if evaluator.best_fitness[0] < last_step[0] or evaluator.best_fitness[1] < last_step[1] * (1 - 2e-4):
                last_gain, last_step = evaluator.evaluations, evaluator.best_fitness
                last_kick = last_gain
            elif ingredients.mutation and evaluator.evaluations - last_kick >= KICK_EVALUATIONS:
                swarm.kick()
                last_kick = evaluator.evaluations
        return "exhausted" if idle >= 50 else "converged"
    except OutOfBudgetError as stop:
        return "seconds" if stop.reason == "seconds" else "evaluations"


def _uniform(s: Structure, rng: np.random.Generator, count: int) -> list[Placements]:
    made = []
    for _ in range(count):
        x = s.problem.keep_all()
        for d in s.decisions:
            x[d] = rng.choice(np.flatnonzero(s.problem.allowed[d]))
        made.append(x)
    return made


def smallest(s: Structure, evaluator: Evaluator, *, max_runs: int = 600) -> tuple[int, Placements]:
    """The smallest peak reached by greedy descent from three starts; the same for every seed and budget."""
    problem = s.problem
    base = base_placement(problem, s.demanded)
    swap = base.copy()
    swap[s.decisions[problem.allowed[s.decisions, SWAP]]] = SWAP
    again = base.copy()
    again[s.decisions[problem.allowed[s.decisions, RECOMPUTE]]] = RECOMPUTE
    found = [descend(s, evaluator, start, max_runs=max_runs // 3) for start in (base, swap, again)]
    return min(found, key=lambda item: item[0])
