"""`search`: one budget in, one placement out; `minimum_peak`: the smallest budget that can be met."""

from collections.abc import Sequence

import numpy as np

from fxhome.passes.search.evaluator import Evaluator, Progress
from fxhome.passes.search.result import Placements, SearchResult, StoppedBy
from fxhome.passes.search.structure import Structure, read_structure
from fxhome.passes.search.swarm import pso, smallest
from fxhome.passes.simulate import Problem


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
) -> SearchResult:
    """The fastest placement found whose peak is within `budget_bytes` (graph storages only).

    Deterministic for a seed. `max_evaluations` and `search_seconds` end the improvement, never the search for a first
    plan that fits, so a limit of zero still yields a plan. `seeds` are placements to start from.
    `progress(evaluations, peak_bytes, step_us, feasible)` is called at each improvement.
    """
    structure = read_structure(problem)
    evaluator = Evaluator(problem, budget_bytes, max_evaluations, search_seconds, progress)
    evaluator.protected += 1
    evaluator.score(problem.keep_all())
    evaluator.protected -= 1
    if structure.decisions.shape[0] == 0:
        return _result(evaluator, "no choice", policy, seed)
    stopped = pso(structure, evaluator, seed=seed, seeds=seeds)
    if evaluator.best_fitness[0] > 0:
        _fit(structure, evaluator)
    return _result(evaluator, stopped, policy, seed)


def _fit(structure: Structure, evaluator: Evaluator) -> None:
    """Last resort for a tight budget: the placement whose minimum `minimum_peak` would name."""
    evaluator.protected += 1
    _, placement = smallest(structure, evaluator)
    evaluator.score(placement)
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
    smallest(structure, evaluator, max_runs=max_evaluations)
    assert evaluator.minimum_placement is not None, "keep-all was scored"
    return evaluator.minimum_peak, evaluator.minimum_placement
