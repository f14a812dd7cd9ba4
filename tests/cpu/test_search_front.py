"""The search front: brute force on small graphs, determinism, feasibility first, awkward budgets."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.search_problems import GraphBuilder, chain, dense, residual, transformer
from fxhome.passes.search import SearchResult, minimum_peak, search
from fxhome.passes.simulate import KEEP, Link, Placements, Problem, evaluate
from fxhome.passes.simulate_kernels import BACKWARD, FORWARD, INPUT

SLOW_LINK = Link(1 / 400.0, 1 / 300.0, 1.2, 5.0)


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    """A random forward of 2 to 6 storages and a backward that reads random parts of it in reverse."""
    count = draw(st.integers(2, 6))
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    nodes = [source]
    for _ in range(count):
        reads = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2, unique=True))
        size = draw(st.integers(1, 64)) * 1000
        nodes.append(b.node(FORWARD, reads, size, draw(st.integers(1, 90)) * 1.0, movable=draw(st.integers(0, 5)) > 0))
    loss = b.node(FORWARD, [nodes[-1]], 8, 1.0, movable=False)
    gradient = b.node(BACKWARD, [loss], draw(st.integers(1, 16)) * 1000, 1.0)
    for v in reversed(nodes[1:]):
        needed = draw(st.lists(st.sampled_from(nodes[1:]), max_size=2, unique=True))
        gradient = b.node(
            BACKWARD, [gradient, *needed], b.size_bytes[v], draw(st.integers(1, 90)) * 1.0, held=draw(st.booleans())
        )
    return b.problem([loss], [gradient], SLOW_LINK)[0]


def every_placement(problem: Problem) -> list[Placements]:
    """All placements of a small problem."""
    options = [np.flatnonzero(row) for row in problem.allowed]
    return [np.array(row, np.int8) for row in itertools.product(*options)]


def outcome(result: SearchResult) -> tuple[bytes, int, float, int, str]:
    """What must repeat."""
    return result.placement.tobytes(), result.peak_bytes, result.step_us, result.evaluations, result.stopped_by


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_problems(), st.floats(0.3, 1.0))
def test_small_graphs_reach_the_brute_force_optimum(problem: Problem, share: float) -> None:
    budget = int(share * evaluate(problem, problem.keep_all(), 1 << 60)[0])
    results = [evaluate(problem, x, budget) for x in every_placement(problem)]
    fits = [step for peak, step in results if peak <= budget]
    found = search(problem, budget, max_evaluations=6000)
    assert found.feasible == bool(fits)
    if fits:
        assert found.step_us == pytest.approx(min(fits), rel=1e-9)
    else:
        assert found.peak_bytes == min(peak for peak, _ in results)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_problems())
def test_the_named_minimum_is_met_and_nothing_smaller_exists(problem: Problem) -> None:
    peak, placement = minimum_peak(problem)
    assert evaluate(problem, placement, peak)[0] <= peak
    found = search(problem, peak, max_evaluations=50)
    assert found.feasible
    assert found.peak_bytes <= peak
    assert peak == min(evaluate(problem, x, 0)[0] for x in every_placement(problem))


@pytest.mark.parametrize("make", [lambda: chain(12), lambda: residual(6), lambda: transformer(3), lambda: dense(12)])
def test_the_minimum_peak_is_a_feasible_budget_for_any_seed_and_limit(make) -> None:  # type: ignore[no-untyped-def]
    problem, _ = make()
    peak, _ = minimum_peak(problem)
    for seed, limit in ((0, 0), (3, 40)):
        found = search(problem, peak, seed=seed, max_evaluations=limit)
        assert found.feasible
        assert found.peak_bytes <= peak
    assert not search(problem, peak // 2, max_evaluations=10).feasible


def test_same_seed_same_plan() -> None:
    problem, _ = residual(6)
    budget = evaluate(problem, problem.keep_all(), 1 << 60)[0] // 2
    first = search(problem, budget, seed=7, max_evaluations=1500)
    again = search(problem, budget, seed=7, max_evaluations=1500)
    assert outcome(first) == outcome(again)


def test_a_generous_budget_keeps_everything() -> None:
    problem, _ = chain(6)
    peak, step = evaluate(problem, problem.keep_all(), 1 << 60)
    found = search(problem, peak, max_evaluations=500)
    assert found.feasible
    assert found.step_us == step


def test_the_figures_are_the_simulators() -> None:
    problem, _ = transformer(3)
    budget = evaluate(problem, problem.keep_all(), 1 << 60)[0] // 2
    found = search(problem, budget, max_evaluations=800)
    assert (found.peak_bytes, found.step_us) == evaluate(problem, found.placement, budget)
    assert evaluate(problem, found.minimum_placement, found.minimum_peak_bytes)[0] <= found.minimum_peak_bytes


def test_no_choice_is_one_placement() -> None:
    problem, _ = chain(3)
    fixed = np.zeros_like(problem.allowed)
    fixed[:, KEEP] = True
    rigid = Problem(problem.arrays, problem.link, fixed, problem.group)
    found = search(rigid, 1)
    assert found.stopped_by == "no choice"
    assert not found.feasible
    assert found.minimum_peak_bytes == evaluate(rigid, rigid.keep_all(), 1)[0]
    assert minimum_peak(rigid)[0] == found.minimum_peak_bytes


def test_one_enormous_storage_is_reported_not_hidden() -> None:
    b = GraphBuilder()
    image = b.node(INPUT, [], 0, 0.0)
    huge = b.node(FORWARD, [image], 10**9, 50.0)
    loss = b.node(FORWARD, [huge], 8, 1.0, movable=False)
    gradient = b.node(BACKWARD, [loss, huge], 1000, 50.0)
    problem, _ = b.problem([loss], [gradient], SLOW_LINK)
    found = search(problem, 10**8)
    assert not found.feasible
    assert found.minimum_peak_bytes >= 10**9


@pytest.mark.parametrize("limits", [{"search_seconds": 0.0}, {"max_evaluations": 0}])
def test_no_time_still_gives_a_plan_that_fits(limits: dict[str, float]) -> None:
    problem, _ = residual(6)
    budget = evaluate(problem, problem.keep_all(), 1 << 60)[0] // 2
    found = search(problem, budget, **limits)  # type: ignore[arg-type]
    assert found.feasible
    assert found.stopped_by == ("seconds" if "search_seconds" in limits else "evaluations")


def test_a_callers_seed_is_never_made_worse() -> None:
    problem, _ = transformer(2)
    budget = evaluate(problem, problem.keep_all(), 1 << 60)[0] // 2
    good = search(problem, budget, seed=1, max_evaluations=3000)
    again = search(problem, budget, seed=2, max_evaluations=0, seeds=[good.placement])
    assert again.step_us <= good.step_us


def test_progress_is_told_of_every_improvement() -> None:
    problem, _ = chain(6)
    budget = evaluate(problem, problem.keep_all(), 1 << 60)[0] // 2
    told: list[float] = []
    found = search(problem, budget, max_evaluations=800, progress=lambda n, peak, step, fits: told.append(step))
    assert told == [step for _, step in found.history]
    assert told == sorted(told, reverse=True)
