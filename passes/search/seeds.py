"""Where the swarm starts: published policies, greedy construction at several link prices, uniform draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxhome.passes.search.capuchin import capuchin
from fxhome.passes.search.evaluator import Evaluator, base_placement
from fxhome.passes.search.policies import checkpoint, superneurons, vdnn_all, vdnn_conv
from fxhome.passes.search.repair import Prices, descend, repair
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Structure
from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP

CAPUCHIN_DECISIONS = 20_000  # above, Capuchin is left out: its cost grows faster than linearly
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
