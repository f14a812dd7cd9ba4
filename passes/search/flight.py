"""`pso`, the default policy: the swarm of `swarm` from its seeds until it gains no more, or is at the lower bound."""

from collections.abc import Sequence

import numpy as np

from fxhome.passes.search.evaluator import Evaluator, OutOfBudgetError, base_placement
from fxhome.passes.search.flow import read_flow
from fxhome.passes.search.relaxed import LARGE_DECISIONS, first_bound, relaxed_seeds
from fxhome.passes.search.repair import relax
from fxhome.passes.search.result import Placements, StoppedBy
from fxhome.passes.search.seeds import Ingredients, constructive_seeds, uniform_seeds
from fxhome.passes.search.structure import Structure
from fxhome.passes.search.swarm import KICK_EVALUATIONS, Swarm

SMALL_NODES = 1500  # evaluations of such a graph are so cheap that annealing may follow the swarm
TINY_NODES, TINY_PATIENCE = 300, 1000.0  # ... and here annealing finds what the swarm does not
ANNEAL_EVALUATIONS, MOST_ANNEALS, IDLE_ANNEALS = 2000, 8, 4
HEAT_OF_BEST, HEAT_OF_START = 0.02, 0.04  # of the step: annealing in turn from the best plan and from keep-all
LEAST_GAIN = 5e-4  # of the step: what counts as progress
EXPECTED_GAP = 0.01  # a plan this far from the bound is as good as most that cannot be improved
SMALL_GAP = 2e-3  # so near the bound, annealing is not worth its time even in a small graph
CLOSE_ENOUGH = 5e-4  # of the lower bound: nothing is left to gain
RELAXED_SEEDS, RELAX_RUNS = 3, 120  # how many of the best seeds have conversions undone, in how many simulations each


def pso(
    s: Structure,
    evaluator: Evaluator,
    *,
    seed: int,
    seeds: Sequence[Placements] = (),
    ingredients: Ingredients | None = None,
    storage_class: Sequence[str] | None = None,
) -> StoppedBy:
    """Run the swarm to convergence or to its limits; the best is in `evaluator`, and the bound where one was found."""
    ingredients = ingredients or Ingredients()
    rng = np.random.default_rng(seed)
    with evaluator.parallel() as pool:
        evaluator.protected += 1
        try:
            evaluator.score(base_placement(s.problem, s.demanded))
            made: list[Placements] = []
            relaxed = ingredients.relaxation and int(s.reachable.sum()) <= LARGE_DECISIONS
            flow = read_flow(s)
            bound = pool.submit(first_bound, s, flow, evaluator.budget_bytes) if relaxed else None
            if ingredients.seeds:
                made += constructive_seeds(s, evaluator, seeds, ingredients, storage_class)
            else:
                made += [np.ascontiguousarray(x, np.int8) for x in seeds]
                made += uniform_seeds(s, rng, ingredients.particles)
            if bound is not None:
                made += relaxed_seeds(s, flow, evaluator, rng, bound)
            if evaluator.lower_bound_us == np.inf:
                # Proven: nothing fits. What is left is the smallest peak, and that is not the swarm's to find.
                return "exhausted"
        finally:
            evaluator.protected -= 1
        try:
            stopped = _fly(s, evaluator, rng, ingredients, made)
            if ingredients.restart and _may_gain(s, evaluator):
                _anneal(s, evaluator, rng, ingredients)
            return stopped
        except OutOfBudgetError as stop:
            return "seconds" if stop.reason == "seconds" else "evaluations"


def _fly(
    s: Structure,
    evaluator: Evaluator,
    rng: np.random.Generator,
    ingredients: Ingredients,
    made: Sequence[Placements],
) -> StoppedBy:
    """Move the swarm from its seeds until it gains no more, or is at the bound."""
    swarm = Swarm(s, evaluator, rng, ingredients)
    for placement in made:
        swarm.add(placement)
    if ingredients.seeds:
        for i in swarm.ranking()[:RELAXED_SEEDS]:
            swarm.add(relax(s, evaluator, swarm.bests[i], max_runs=RELAX_RUNS))
    swarm.trim(ingredients.particles)
    bound_us = evaluator.lower_bound_us or 0.0
    last_gain, last_step = evaluator.evaluations, evaluator.best_fitness
    last_kick = last_gain
    idle = 0
    while evaluator.evaluations - last_gain < _patience(s, evaluator, ingredients) and idle < 50:
        if evaluator.best_fitness[0] == 0 and evaluator.best_fitness[1] <= bound_us * (1 + CLOSE_ENOUGH):
            return "converged"
        before = evaluator.evaluations
        swarm.step()
        idle = idle + 1 if evaluator.evaluations == before else 0
        if evaluator.best_fitness[0] < last_step[0] or evaluator.best_fitness[1] < last_step[1] * (1 - LEAST_GAIN):
            last_gain, last_step = evaluator.evaluations, evaluator.best_fitness
            last_kick = last_gain
        elif ingredients.mutation and evaluator.evaluations - last_kick >= KICK_EVALUATIONS:
            swarm.kick()
            last_kick = evaluator.evaluations
    return "exhausted" if idle >= 50 else "converged"


def _anneal(s: Structure, evaluator: Evaluator, rng: np.random.Generator, ingredients: Ingredients) -> None:
    """Simulated annealing, in turn from the best placement and from keep-all, hotter than the swarm ever is.

    In a small graph tensors are large beside the budget: better plans differ from the best in many places at once.
    """
    swarm = Swarm(s, evaluator, rng, ingredients)
    idle = 0
    for turn in range(MOST_ANNEALS):
        before = evaluator.best_fitness
        assert evaluator.best is not None, "the swarm has scored something"
        start, heat = (evaluator.best, HEAT_OF_BEST) if turn % 2 == 0 else (s.problem.keep_all(), HEAT_OF_START)
        swarm.anneal(start, max(1, min(ANNEAL_EVALUATIONS, evaluator.left())), heat, 1)
        idle = 0 if evaluator.best_fitness < before else idle + 1
        if idle >= IDLE_ANNEALS or not _may_gain(s, evaluator):
            return


def _may_gain(s: Structure, evaluator: Evaluator) -> bool:
    """Whether annealing is worth its time: the graph is small, and the best plan is not near the bound."""
    overflow, step_us = evaluator.best_fitness
    close = not overflow and step_us <= (evaluator.lower_bound_us or 0.0) * (1 + SMALL_GAP)
    return s.problem.arrays.node_phase.shape[0] <= SMALL_NODES and not close


def _patience(s: Structure, evaluator: Evaluator, ingredients: Ingredients) -> int:
    """Evaluations without a gain after which the swarm stops: more where they are cheap, fewer near the lower bound."""
    if ingredients.patience is not None:
        return ingredients.patience
    nodes = s.problem.arrays.node_phase.shape[0]
    base = TINY_PATIENCE if nodes <= TINY_NODES else float(np.clip(4_000_000 / nodes, 800, 3000))
    overflow, step_us = evaluator.best_fitness
    if overflow or not evaluator.lower_bound_us:
        return int(base)
    gap = step_us / evaluator.lower_bound_us - 1
    return int(base * np.clip(gap / EXPECTED_GAP, 0.25, 1.5))
