"""Many budgets in one call: each search starts from what its neighbours found, and the front is monotone."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxhome.passes.search.front import search
from fxhome.passes.search.result import Placements, SearchResult, fitness
from fxhome.passes.simulate import Problem, evaluate


def sweep(
    problem: Problem,
    budgets: Sequence[int],
    *,
    seed: int = 0,
    max_evaluations: int = 20000,
    search_seconds: float | None = None,
    storage_class: Sequence[str] | None = None,
    bound: bool = False,
    seeds: Sequence[Placements] = (),
    progress: Callable[[int, SearchResult], None] | None = None,
) -> list[SearchResult]:
    """One result per budget, in the order given; among those that fit, more bytes never mean a slower step.

    Budgets are searched from the largest down, each from the placements of the two before; then from the smallest up, a
    result that is slower than the one below is replaced by it: by its placement at the larger budget where that is
    faster, else by the very plan of the smaller one, whose `budget_bytes` then says which budget steers it.
    `search_seconds` holds for each budget; `seeds` are placements for each search to start from.
    `progress(budget, result)` is called after each search.
    """
    found: dict[int, SearchResult] = {}
    neighbours: list[Placements] = []
    for budget in sorted(set(budgets), reverse=True):
        result = search(
            problem,
            budget,
            seed=seed,
            max_evaluations=max_evaluations,
            search_seconds=search_seconds,
            seeds=(*seeds, *neighbours),
            storage_class=storage_class,
            bound=bound,
        )
        found[budget] = result
        neighbours = [*neighbours[-1:], result.placement]
        if progress is not None:
            progress(budget, result)
    below: SearchResult | None = None
    for budget in sorted(found):
        here = found[budget]
        if below is not None and below.feasible:
            here = _better(problem, budget, here, below)
        found[budget] = below = here
    return [found[budget] for budget in budgets]


def _better(problem: Problem, budget: int, here: SearchResult, below: SearchResult) -> SearchResult:
    """`here`, or the plan of a smaller budget where that is faster."""
    peak, step = evaluate(problem, below.placement, budget)
    mine = fitness(here.peak_bytes, here.step_us, budget)
    if fitness(peak, step, budget) < mine and step <= below.step_us:
        taken = replace(here, placement=below.placement, peak_bytes=peak, step_us=step, feasible=True)
    elif below.step_us < here.step_us or not here.feasible:
        taken = replace(
            here,
            placement=below.placement,
            peak_bytes=below.peak_bytes,
            step_us=below.step_us,
            budget_bytes=below.budget_bytes,
            feasible=True,
        )
    else:
        return here
    if taken.lower_bound_us:
        taken = replace(taken, gap=(taken.step_us - taken.lower_bound_us) / taken.lower_bound_us)
    return taken
