"""The step between a graph's model and its plan: which placement is taken, by search or as the smallest that is known.

problem + room -> Choice (placement, its simulation, how it was found)   or a refusal
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fxhome.options import Options
from fxhome.passes.facts import GraphFacts
from fxhome.passes.graph_model import GraphModel
from fxhome.passes.refusal import infeasible, policy_infeasible
from fxhome.passes.search import minimum_peak, search
from fxhome.passes.simulate import Placements, Problem, SimResult, simulate
from fxhome.placement import SearchStats
from fxhome.progress import progress

LEAVE_ROOM_TRIALS = 6
MAX_BOUND_DECISIONS = 4000
"""The linear program behind `gap` is solved up to this many decisions; beyond, it would take longer than the search."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A placement, what the simulator says of it, how it was found, and how far it is from the lower bound."""

    placement: Placements
    result: SimResult
    stats: SearchStats
    gap: float | None


def saving_least(model: GraphModel, room_bytes: int) -> Problem:
    """The model's problem with as much as can be kept free between its forward and its backward, found by bisection."""
    problem = model.problem
    least, most = 0, max(0, room_bytes)
    for _ in range(LEAVE_ROOM_TRIALS):
        middle = (least + most) // 2
        tried = model.asking(middle)
        if minimum_peak(tried)[0] <= room_bytes:
            least, problem = middle, tried
        else:
            most = middle
    return problem


def spared_bytes(result: SimResult) -> int:
    """How much lower the peak would be without what is kept free between forward and backward."""
    curve = result.curve.copy()
    curve[result.forward_length] -= result.arrays.outside_bytes[1]
    return result.peak_bytes - int(curve.max())


def choose_smallest(problem: Problem, options: Options, room_bytes: int) -> Choice:
    """The smallest plan that is known, with its copies scheduled for the room or, over it, for its own peak."""
    begin = time.perf_counter()
    peak, placement = minimum_peak(problem, options.seed)
    result = simulate(problem, placement, max(peak, room_bytes))
    stats = SearchStats("smallest", options.seed, 0, time.perf_counter() - begin, "nothing faster fits once lowered")
    return Choice(placement, result, stats, None)


def choose_placement(
    problem: Problem,
    facts: GraphFacts,
    options: Options,
    *,
    budget_bytes: int,
    fixed_bytes: int,
    resident_bytes: int,
    stock: Placements,
    storage_class: Sequence[str],
) -> Choice:
    """What the policy finds for the budget, from the inner backend's own placement (`stock`) on.

    fixed_bytes: what of the budget no placement can change. resident_bytes: what of it is held before the step. Raises
    InfeasibleBudgetError (unless on_infeasible="best_effort").
    """
    room_bytes = budget_bytes - fixed_bytes
    with progress("searching placements", total=options.max_evaluations) as advance:
        counted = 0

        def report(evaluations: int, *_: object) -> None:
            nonlocal counted
            advance(evaluations - counted)
            counted = evaluations

        found = search(
            problem,
            room_bytes,
            policy=options.policy,
            seed=options.seed,
            max_evaluations=options.max_evaluations,
            search_seconds=options.search_seconds,
            progress=report,
            seeds=(stock,),
            storage_class=storage_class,
            bound=len(problem.decisions()) <= MAX_BOUND_DECISIONS,
        )
    placement = found.placement
    if not found.feasible:
        smallest, minimal = minimum_peak(problem, options.seed)
        if smallest > room_bytes and options.on_infeasible == "error":
            raise infeasible(
                problem, facts, minimal, smallest, budget_bytes, fixed_bytes, resident_bytes, options.allow
            )
        if options.policy == "pso":
            placement = minimal
        elif options.on_infeasible == "error":
            raise policy_infeasible(
                options.policy, found.peak_bytes + fixed_bytes, budget_bytes, smallest + fixed_bytes
            )
    result = simulate(problem, placement, room_bytes, synchronous=found.sync_transfers)
    stats = SearchStats(options.policy, options.seed, found.evaluations, found.seconds, found.stopped_by)
    return Choice(placement, result, stats, found.gap)
