"""`search`: one budget in, one placement out; `minimum_peak`: the smallest budget that can be met."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fxhome.errors import OptionError
from fxhome.passes.search import baselines, policies
from fxhome.passes.search.bound import SEEN_DECISIONS, lower_bound
from fxhome.passes.search.capuchin import capuchin
from fxhome.passes.search.evaluator import Evaluator, Progress
from fxhome.passes.search.flight import pso
from fxhome.passes.search.result import Placements, SearchResult, StoppedBy
from fxhome.passes.search.seeds import Ingredients, smallest
from fxhome.passes.search.structure import Structure, read_structure
from fxhome.passes.simulate import Problem, simulate

Constructive = Callable[[Structure, Evaluator, Sequence[str] | None], Placements]

CONSTRUCTIVE: dict[str, Constructive] = {
    "keep_all": policies.keep_all,
    "vdnn_all": policies.vdnn_all,
    "vdnn_conv": policies.vdnn_conv,
    "vdnn_async": policies.vdnn_all,
    "superneurons": policies.superneurons,
    "capuchin": capuchin,
    "checkpoint": policies.checkpoint,
    "greedy": policies.greedy,
}
SEARCHING: dict[str, baselines.Loop] = {
    "home": baselines.home,
    "home_literal": baselines.home_literal,
    "random": baselines.random_search,
    "annealing": baselines.annealing,
    "genetic": baselines.genetic,
}
SYNCHRONOUS = ("vdnn_all", "vdnn_conv")
POLICIES = ("pso", *CONSTRUCTIVE, *SEARCHING)

# A space this small is walked through: the result is the optimum.
EXHAUSTIVE_PLACEMENTS = 4096
CLOSE_TO_BOUND = 0.02  # a plan this near its bound is told so without another, better bound


def search(
    problem: Problem,
    budget_bytes: int,
    *,
    policy: str = "pso",
    seed: int = 0,
    max_evaluations: int = 20000,
    search_seconds: float | None = None,
    progress: Progress | None = None,
    seeds: Sequence[Placements] = (),
    storage_class: Sequence[str] | None = None,
    ingredients: Ingredients | None = None,
    bound: bool = False,
) -> SearchResult:
    """The fastest placement found whose peak is within `budget_bytes` (graph storages only).

    Deterministic for a seed. `max_evaluations` and `search_seconds` end the improvement, never the search for a first
    plan that fits, so a limit of zero still yields a plan. `seeds` are placements for `pso` to start from.
    `storage_class`: per storage, the class of the op that produces it ("convolution", "matmul", "attention", "pool",
    "activation", "norm", "other"); vdnn_conv and superneurons need it. `ingredients` switches parts of `pso` off.
    `progress(evaluations, peak_bytes, step_us, feasible)` is called at each improvement.
    `bound` adds `lower_bound_us` and `gap`, at the cost of a linear program; `pso` solves it anyway up to 4,000
    deciding storages, and then they are there in any case.
    A policy other than `pso` that cannot meet the budget returns what it reached, with `feasible` False.
    """
    if policy not in POLICIES:
        raise OptionError(f"search: policy {policy!r} is unknown; allowed are {', '.join(POLICIES)}")
    structure = read_structure(problem)
    evaluator = Evaluator(problem, budget_bytes, max_evaluations, search_seconds, progress)
    evaluator.protected += 1
    if policy in CONSTRUCTIVE:
        placement = CONSTRUCTIVE[policy](structure, evaluator, storage_class)
        return _bounded(structure, _reached(structure, evaluator, placement, policy, seed), budget_bytes, bound)
    evaluator.score(problem.keep_all())
    evaluator.protected -= 1
    if structure.decisions.shape[0] == 0:
        return _bounded(structure, _result(evaluator, "no choice", policy, seed), budget_bytes, bound)
    stopped: StoppedBy
    if policy != "pso":
        stopped = baselines.run_baseline(SEARCHING[policy], structure, evaluator, seed)
    elif _space(structure) <= min(EXHAUSTIVE_PLACEMENTS, max_evaluations) and search_seconds is None:
        stopped = _exhaust(structure, evaluator)
    else:
        known = storage_class is not None and any(c in policies.COMPUTE_CLASSES for c in storage_class)
        classes = storage_class if known else None
        stopped = pso(structure, evaluator, seed=seed, seeds=seeds, ingredients=ingredients, storage_class=classes)
        if evaluator.best_fitness[0] > 0:
            _fit(structure, evaluator)
    result = _result(evaluator, stopped, policy, seed)
    return _bounded(structure, result, budget_bytes, bound, evaluator.lower_bound_us)


def _bounded(
    structure: Structure, result: SearchResult, budget_bytes: int, wanted: bool, known: float | None = None
) -> SearchResult:
    """The result with its lower bound and gap, where they are wanted or came up in the search."""
    if not wanted and known is None:
        return result
    below = known or 0.0
    tight = known is not None and result.feasible and result.step_us <= known * (1 + CLOSE_TO_BOUND)
    small = int(structure.reachable.sum()) <= SEEN_DECISIONS
    if known is None or (small and not tight and known < np.inf):
        below = max(below, lower_bound(structure.problem, budget_bytes, structure=structure).step_us)
    gap = (result.step_us - below) / below if result.feasible and 0 < below < np.inf else None
    return replace(result, lower_bound_us=below, gap=gap)


def _space(structure: Structure) -> int:
    """How many placements there are, or one more than is walked through."""
    size = 1
    counts: list[int] = structure.problem.allowed[structure.decisions].sum(axis=1).tolist()
    for count in counts:
        size *= count
        if size > EXHAUSTIVE_PLACEMENTS:
            return size
    return size


def _exhaust(structure: Structure, evaluator: Evaluator) -> StoppedBy:
    """Score every placement."""
    placement = structure.problem.keep_all()
    options = [np.flatnonzero(structure.problem.allowed[d]) for d in structure.decisions]
    evaluator.protected += 1
    for row in itertools.product(*options):
        placement[structure.decisions] = row
        evaluator.score(placement)
    evaluator.protected -= 1
    return "exhausted"


def _reached(structure: Structure, evaluator: Evaluator, placement: Placements, policy: str, seed: int) -> SearchResult:
    """The outcome of a policy that decides: its own placement, not the best that was simulated on the way."""
    synchronous = policy in SYNCHRONOUS
    evaluator.score(placement)
    result = simulate(structure.problem, placement, evaluator.budget_bytes, synchronous=synchronous)
    assert evaluator.minimum_placement is not None, "something was scored"
    return SearchResult(
        placement=placement,
        peak_bytes=result.peak_bytes,
        step_us=result.step_us,
        feasible=result.peak_bytes <= evaluator.budget_bytes,
        evaluations=evaluator.evaluations,
        seconds=evaluator.seconds,
        stopped_by="exhausted" if structure.decisions.shape[0] else "no choice",
        minimum_peak_bytes=evaluator.minimum_peak,
        minimum_placement=evaluator.minimum_placement,
        budget_bytes=evaluator.budget_bytes,
        policy=policy,
        seed=seed,
        sync_transfers=synchronous,
    )


def _fit(structure: Structure, evaluator: Evaluator) -> None:
    """Last resort for a tight budget: the placement whose minimum `minimum_peak` would name."""
    evaluator.protected += 1
    if _space(structure) <= EXHAUSTIVE_PLACEMENTS:
        _exhaust(structure, evaluator)
    else:
        evaluator.score(smallest(structure, evaluator)[1])
    evaluator.protected -= 1


def _result(evaluator: Evaluator, stopped: StoppedBy, policy: str, seed: int) -> SearchResult:
    assert evaluator.best is not None, "something is always scored"
    assert evaluator.minimum_placement is not None, "something is always scored"
    return SearchResult(
        placement=evaluator.best,
        peak_bytes=evaluator.best_peak,
        step_us=evaluator.best_fitness[1],
        feasible=evaluator.best_fitness[0] == 0,
        evaluations=evaluator.evaluations,
        seconds=evaluator.seconds,
        stopped_by=stopped,
        minimum_peak_bytes=evaluator.minimum_peak,
        minimum_placement=evaluator.minimum_placement,
        budget_bytes=evaluator.budget_bytes,
        policy=policy,
        seed=seed,
        history=tuple(evaluator.history),
    )


def minimum_peak(problem: Problem, seed: int = 0, max_evaluations: int = 600) -> tuple[int, Placements]:
    """(bytes, placement): the smallest budget found that `search` can meet, by greedy descent; no randomness.

    `search` falls back to this very placement, so a budget of the returned bytes is feasible when asked for.
    """
    del seed  # the descent draws nothing; accepted so that callers treat all searches alike
    structure = read_structure(problem)
    evaluator = Evaluator(problem, 0, np.iinfo(np.int64).max)
    evaluator.score(problem.keep_all())
    if structure.decisions.shape[0] == 0:
        return evaluator.minimum_peak, problem.keep_all()
    if _space(structure) <= EXHAUSTIVE_PLACEMENTS:
        _exhaust(structure, evaluator)
    else:
        smallest(structure, evaluator, max_runs=max_evaluations)
    assert evaluator.minimum_placement is not None, "keep-all was scored"
    return evaluator.minimum_peak, evaluator.minimum_placement
