"""Where the swarm starts: published policies, greedy construction at several link prices, the linear relaxation."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from fxhome.passes.search.bound import Bound, lower_bound, rounded
from fxhome.passes.search.capuchin import capuchin
from fxhome.passes.search.evaluator import Evaluator, base_placement
from fxhome.passes.search.policies import checkpoint, superneurons, vdnn_all, vdnn_conv
from fxhome.passes.search.repair import Prices, descend, repair
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Structure
from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP

RELAXATIONS = 3
FAR_OVER = 0.01  # of the budget: a rounding this much over it says that the relaxation left out what matters
# Above this many storages, seeds whose cost grows faster than linearly are left out: linear programs, then Capuchin.
LARGE_DECISIONS = 4000
CAPUCHIN_DECISIONS = 20_000
SLOW_DECISIONS, VERY_SLOW_DECISIONS = 600, 1500
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
    starts: list[tuple[Placements, Prices]] = []
    published = [checkpoint, vdnn_all] + ([superneurons, vdnn_conv] if storage_class is not None else [])
    if s.decisions.shape[0] <= CAPUCHIN_DECISIONS:
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


def first_bound(s: Structure, budget_bytes: int) -> Bound:
    """The relaxation at the budget itself: a start for `relaxed_seeds`, and the bound that the result is told with."""
    return lower_bound(s.problem, budget_bytes, structure=s, rounds=1 if _is_slow(s) else 2)


def _is_slow(s: Structure) -> bool:
    """Whether the relaxation takes as long as hundreds of simulations, so that it is solved only once."""
    return int(s.reachable.sum()) > SLOW_DECISIONS


def _is_very_slow(s: Structure) -> bool:
    """Whether it takes seconds."""
    return int(s.reachable.sum()) > VERY_SLOW_DECISIONS


def relaxed_seeds(
    s: Structure, evaluator: Evaluator, rng: np.random.Generator, first: "Future[Bound]"
) -> list[Placements]:
    """Placements rounded from the linear relaxation, whose shares are read as the odds of each choice.

    The relaxation knows nothing of transients, so it is solved again for a budget lower by what its rounding overran.
    first: the relaxation at the budget, perhaps still being solved on another core.
    """
    problem = s.problem
    made: list[Placements] = []
    target = evaluator.budget_bytes
    anchors: tuple[int, ...] = ()
    for turn in range(RELAXATIONS):
        if turn == 0:
            bound = first.result()
            evaluator.lower_bound_us = bound.step_us
        else:
            bound = lower_bound(problem, target, structure=s, start_anchors=anchors, rounds=1)
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
        if worst <= (FAR_OVER * evaluator.budget_bytes if _is_slow(s) else 0) or _is_very_slow(s):
            break
        target -= worst
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
