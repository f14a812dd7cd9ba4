"""The sweep: one plan per budget, monotone, each plan honest about its figures."""

import itertools

import pytest

from benchmarks.search_problems import dense, residual, transformer
from fxhome.passes.search import minimum_peak, search, sweep
from fxhome.passes.simulate import evaluate


@pytest.mark.parametrize("make", [lambda: residual(6), lambda: transformer(3), lambda: dense(8)])
def test_the_front_is_monotone_and_its_figures_repeat(make) -> None:  # type: ignore[no-untyped-def]
    problem, classes = make()
    peak = evaluate(problem, problem.keep_all(), 1 << 60)[0]
    budgets = [int(peak * share) for share in (0.9, 0.65, 0.7, 0.6, 0.55, 0.8, 1.0)]
    results = sweep(problem, budgets, max_evaluations=300, storage_class=classes)
    assert len(results) == len(budgets)
    for budget, result in zip(budgets, results, strict=True):
        assert result.feasible
        assert result.peak_bytes <= budget
        assert (result.peak_bytes, result.step_us) == evaluate(problem, result.placement, result.budget_bytes)
    ordered = [result for _, result in sorted(zip(budgets, results, strict=True), key=lambda pair: pair[0])]
    assert all(a.step_us >= b.step_us for a, b in itertools.pairwise(ordered))
    assert ordered[-1].step_us == evaluate(problem, problem.keep_all(), peak)[1]


def test_what_does_not_fit_stays_in_its_place() -> None:
    problem, _ = residual(3)
    least, _ = minimum_peak(problem)
    small, enough = sweep(problem, [least // 2, 2 * least], max_evaluations=100)
    assert not small.feasible
    assert enough.feasible


def test_neighbours_are_reused() -> None:
    problem, classes = transformer(3)
    peak = evaluate(problem, problem.keep_all(), 1 << 60)[0]
    alone = search(problem, int(0.6 * peak), max_evaluations=300, storage_class=classes)
    swept = sweep(
        problem, [int(0.65 * peak), int(0.6 * peak), int(0.55 * peak)], max_evaluations=300, storage_class=classes
    )
    assert swept[1].step_us <= alone.step_us * 1.02


def test_gaps_follow_the_plan_that_is_returned() -> None:
    problem, _ = residual(3)
    peak = evaluate(problem, problem.keep_all(), 1 << 60)[0]
    for result in sweep(problem, [int(0.7 * peak), int(0.6 * peak)], max_evaluations=200, bound=True):
        assert result.lower_bound_us is not None
        assert result.gap == pytest.approx(result.step_us / result.lower_bound_us - 1)
