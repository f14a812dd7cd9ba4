"""Where the swarm starts: published policies, greedy construction at several link prices, the linear relaxation."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from fxhome.passes.search.bound import Bound, lower_bound, rounded
from fxhome.passes.search.capuchin import capuchin
from fxhome.passes.search.evaluator import Evaluator, base_placement
from fxhome.passes.search.flow import Flow
from fxhome.passes.search.policies import checkpoint, superneurons, vdnn_all, vdnn_conv
from fxhome.passes.search.repair import Prices, descend, repair
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Structure, instruction_times
from fxhome.passes.simulate import COMPRESS_SWAP, KEEP, RECOMPUTE, SWAP

RELAXATIONS, SLOW_RELAXATIONS = 4, 2
NEAR_BUDGET = 0.01  # of the budget: a peak this near below it leaves nothing to a further relaxation ...
NEAR_STEP = 0.003  # ... and a step this near above the relaxation's
SHORT_WAIT = 1e-3  # of the step
MOST_WAITS = 24
UNLIMITED = 1 << 60
# Above this many storages, seeds whose cost grows faster than linearly are left out: linear programs, then Capuchin.
LARGE_DECISIONS = 4000
CAPUCHIN_DECISIONS = 20_000
SLOW_DECISIONS, VERY_SLOW_DECISIONS = 600, 2500
HOPELESS = 0.05  # of the best step: a start that is slower before its repair, which only adds, is not repaired
SAME_STEP = 1e-3  # link prices whose extremes differ by less make no difference
LINK_PRICES = (0.05, 0.3, 0.7, 1.0, 2.0, 8.0)


@dataclass(frozen=True)
class Ingredients:
    """Switches for the ablation, and the swarm's few sizes."""

    seeds: bool = True
    relaxation: bool = True
    groups: bool = True
    mutation: bool = True
    repair: bool = True
    restart: bool = True
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
    made: list[Placements] = []

    def start(placement: Placements, prices: Prices, *, given: bool = False) -> float:
        """Repair and add it, unless it is slow before it is even within the budget; its step in us.

        given: by the caller, and so worth a repair in any case.
        """
        over, step_us = evaluator.score(placement)
        if over and ingredients.repair:
            best_over, best_us = evaluator.best_fitness
            if not given and best_over == 0 and step_us > best_us * (1 + HOPELESS):
                return step_us
            placement, result = repair(s, evaluator, placement, prices)
            step_us = result.step_us
        made.append(placement)
        return step_us

    start(problem.keep_all(), Prices(link=1.0))
    dear, cheap = (start(base, Prices(link=price, share=0.34)) for price in (LINK_PRICES[-1], LINK_PRICES[0]))
    if abs(dear - cheap) > SAME_STEP * cheap:
        for price in LINK_PRICES[1:-1]:
            start(base, Prices(link=price, share=0.34))
    for given in seeds:
        start(np.ascontiguousarray(given, np.int8), Prices(link=1.0), given=True)
    published = [checkpoint, vdnn_all] + ([superneurons, vdnn_conv] if storage_class is not None else [])
    if s.decisions.shape[0] <= CAPUCHIN_DECISIONS:
        published.insert(0, capuchin)
    for policy in published:
        start(policy(s, evaluator, storage_class), Prices(link=0.5))
    swap = base.copy()
    swappable = s.decisions[problem.allowed[s.decisions, SWAP] & s.demanded[s.decisions]]
    swap[swappable] = SWAP
    again = base.copy()
    rebuilt = s.decisions[problem.allowed[s.decisions, RECOMPUTE]]
    again[rebuilt] = RECOMPUTE
    segments = again.copy()
    step = max(1, round(np.sqrt(rebuilt.shape[0])))
    segments[rebuilt[::step]] = np.where(problem.allowed[rebuilt[::step], KEEP], KEEP, RECOMPUTE)
    start(swap, Prices())
    start(segments, Prices())
    start(again, Prices(link=0.3))
    return made


def first_bound(s: Structure, flow: Flow, budget_bytes: int) -> Bound:
    """The relaxation at the budget itself: a start for `relaxed_seeds`, and the bound that the result is told with."""
    return lower_bound(s.problem, budget_bytes, structure=s, flow=flow, held=False, rounds=1 if _is_slow(s) else 2)


def _is_slow(s: Structure) -> bool:
    """Whether the relaxation takes as long as hundreds of simulations, so that it is solved less often."""
    return int(s.reachable.sum()) > SLOW_DECISIONS


def relaxed_seeds(
    s: Structure, flow: Flow, evaluator: Evaluator, rng: np.random.Generator, first: "Future[Bound]"
) -> list[Placements]:
    """Placements rounded from the linear relaxation, whose shares are read as the odds of each choice.

    The relaxation knows nothing of memory between its anchors, and moves fractions of what can only move whole. So what
    the compute waits for in the rounded program is not moved, and the relaxation is solved again without it and for a
    budget lower by what the program would take if it waited for nothing.
    first: the relaxation at the budget, perhaps still being solved on another core.
    """
    problem, budget = s.problem, evaluator.budget_bytes
    made: list[Placements] = []
    target = budget
    no_swap = np.zeros(problem.num_storages, np.bool_)
    bound = first.result()
    evaluator.lower_bound_us = bound.step_us
    for turn in range(RELAXATIONS):
        if turn and evaluator.late:
            break
        if turn:
            anchors = bound.anchors
            bound = lower_bound(
                problem,
                target,
                structure=s,
                flow=flow,
                start_anchors=anchors,
                rounds=1,
                held=False,
                no_swap=no_swap,
            )
        if bound.shares is None:
            break
        start, waits, peak = without_waits(s, evaluator, rounded(s, bound.shares))
        fixed, result = repair(s, evaluator, start, Prices(link=4.0, share=1.0))
        made.append(fixed)
        if not _is_slow(s):
            drawn = rounded(s, bound.shares, rng)
            made.append(repair(s, evaluator, drawn, Prices(link=0.6, share=1.0))[0])
        near = (1 - NEAR_BUDGET) * budget < result.peak_bytes <= budget
        if turn and near and result.step_us <= bound.step_us * (1 + NEAR_STEP):
            break
        if turn >= SLOW_RELAXATIONS - 1 and _is_slow(s) and result.peak_bytes <= budget:
            break
        target -= peak - budget
        no_swap[waits] = True
        if int(s.reachable.sum()) > VERY_SLOW_DECISIONS:
            # Swaps that this solution does not use are most of the next program's size.
            no_swap |= np.maximum(bound.shares[:, SWAP], bound.shares[:, COMPRESS_SWAP]) <= 0
    return made


def without_waits(s: Structure, evaluator: Evaluator, placement: Placements) -> tuple[Placements, list[int], int]:
    """(placement, storages, peak bytes): keep, one after the other, what the compute waits longest for.

    Simulated without a budget, so that memory makes nothing wait. The storages are those that were kept.
    """
    problem, g = s.problem, s.problem.arrays
    current, waits = placement.copy(), list[int]()
    while True:
        result = evaluator.run(current, UNLIMITED)
        busy = instruction_times(g, result.program)
        wait = np.diff(result.start_us) - busy
        longest = int(np.argmax(wait))
        if wait[longest] < SHORT_WAIT * result.step_us or len(waits) >= MOST_WAITS:
            return current, waits, result.peak_bytes
        here = (result.wait_out == longest + 1) | (result.wait_in == longest + 1)
        waited = np.flatnonzero(here & (result.saved == 1) & problem.allowed[:, KEEP])
        if waited.shape[0] == 0:
            return current, waits, result.peak_bytes
        storage = int(waited[np.argmax(g.storage_bytes[waited])])
        current[storage] = KEEP
        waits.append(storage)


def uniform_seeds(s: Structure, rng: np.random.Generator, count: int) -> list[Placements]:
    """Uniform draws over what each storage may take, as HOME starts."""
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
