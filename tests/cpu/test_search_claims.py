"""What the search promises: never slower than a baseline, better than HOME's swarm at a tenth of its evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.search_problems import GraphBuilder, chain, dense, load_case, residual, transformer
from fxhome.passes.search import POLICIES, search
from fxhome.passes.search.evaluator import Evaluator
from fxhome.passes.simulate import RECOMPUTE, RECOMPUTE_EACH, SWAP, Link, Problem, evaluate
from fxhome.passes.simulate_kernels import BACKWARD, FORWARD, INPUT

PROFILES = Path(__file__).parents[2] / "benchmarks" / "profiles"
KINDS = ("convolution", "norm", "activation", "pool", "other")
EVERYTHING = 1 << 60
Case = tuple[Problem, list[str]]
MODELS: dict[str, Callable[[], Case]] = {
    "chain": lambda: chain(16),
    "residual": lambda: residual(12),
    "transformer": lambda: transformer(8),
    "dense": lambda: dense(32),
    "vgg16 on an H200": lambda: load_case(PROFILES / "vgg16_h200.npz"),
    "squeezenet on an H200": lambda: load_case(PROFILES / "squeezenet1_1_h200.npz"),
    "transformer on an H200": lambda: load_case(PROFILES / "transformer_h200.npz"),
}


@st.composite
def networks(draw: st.DrawFn, least: int = 12, most: int = 24) -> Case:
    """A random forward of so many operators with shortcuts, and a backward that reads it in reverse."""
    b = GraphBuilder()
    source, weight = b.node(INPUT, [], 0, 0.0), b.node(INPUT, [], 0, 0.0)
    nodes = [b.node(FORWARD, [source, weight], 50_000, 40.0, kind="convolution")]
    for _ in range(draw(st.integers(least, most)) - 1):
        reads = {nodes[-1], draw(st.sampled_from(nodes[-4:]))}
        kind = draw(st.sampled_from(KINDS))
        size, time_us = draw(st.integers(1, 90)) * 1000, float(draw(st.integers(1, 120)))
        nodes.append(b.node(FORWARD, [*sorted(reads), weight], size, time_us, kind=kind))
    loss = b.node(FORWARD, [nodes[-1]], 8, 1.0, movable=False)
    gradient = b.node(BACKWARD, [loss], 4000, 1.0)
    for v in reversed(nodes):
        reads = [gradient, *(u for u in b.reads[v] if u not in (source, weight))]
        gradient = b.node(BACKWARD, [*reads, v], b.size_bytes[v], 2.0 * b.time_us[v], held=draw(st.booleans()))
    return b.problem([loss], [gradient], Link(1 / 700.0, 1 / 600.0, 1.3, 5.0))


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.floats(0.45, 0.9))
def test_no_policy_that_fits_has_a_shorter_step(case: Case, share: float) -> None:
    problem, classes = case
    budget = int(share * evaluate(problem, problem.keep_all(), EVERYTHING)[0])
    ours = search(problem, budget, storage_class=classes)
    for policy in POLICIES:
        other = search(problem, budget, policy=policy, storage_class=classes, max_evaluations=1500)
        if other.feasible:
            assert ours.feasible, policy
            assert ours.step_us <= other.step_us * (1 + 1e-9), policy


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(networks(12, 12), st.floats(0.45, 0.9), st.data())
def test_brute_force_over_twelve_storages_confirms_bound_and_optimum(
    case: Case, share: float, data: st.DataObject
) -> None:
    full, _ = case
    allowed = full.allowed.copy()
    deciding = full.decisions()
    assert deciding.shape[0] == 12
    for i, storage in enumerate(deciding):  # 3**3 * 2**9 placements: more than the search walks through by itself
        codes = data.draw(st.permutations([SWAP, RECOMPUTE, RECOMPUTE_EACH]))[: 2 if i % 4 == 0 else 1]
        allowed[storage, 1:] = False
        allowed[storage, codes] = True
    problem = Problem(full.arrays, full.link, allowed, full.group)
    budget = int(share * evaluate(problem, problem.keep_all(), EVERYTHING)[0])
    fits = []
    for row in itertools.product(*(np.flatnonzero(options) for options in allowed)):
        peak, step = evaluate(problem, np.array(row, np.int8), budget)
        if peak <= budget:
            fits.append(step)
    found = search(problem, budget, bound=True)
    assert found.lower_bound_us is not None
    assert found.feasible == bool(fits)
    if fits:
        assert found.lower_bound_us <= min(fits) * (1 + 1e-9)
        assert found.step_us == pytest.approx(min(fits), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_better_than_homes_swarm_at_a_tenth_of_its_evaluations(name: str, share: float) -> None:
    problem, classes = MODELS[name]()
    budget = int(share * evaluate(problem, problem.keep_all(), EVERYTHING)[0])
    home = search(problem, budget, policy="home", max_evaluations=5000, storage_class=classes)
    ours = search(problem, budget, max_evaluations=500, storage_class=classes)
    assert ours.evaluations <= max(500, _seeding_evaluations(problem, budget, classes))
    if home.feasible:
        assert ours.feasible
        assert ours.step_us <= home.step_us * (1 + 1e-9)
    else:
        assert ours.peak_bytes <= home.peak_bytes or ours.feasible


def _seeding_evaluations(problem: Problem, budget: int, classes: list[str]) -> int:
    """What the search spends on its first plans, which no limit cuts short."""
    return search(problem, budget, max_evaluations=0, storage_class=classes).evaluations


@pytest.mark.parametrize("cores", [1, 4])
def test_the_number_of_cores_changes_nothing(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, classes = transformer(14)
    assert problem.arrays.node_phase.shape[0] > 500  # below, nothing runs in parallel
    budget = int(0.5 * evaluate(problem, problem.keep_all(), EVERYTHING)[0])
    expected = search(problem, budget, max_evaluations=900, storage_class=classes)
    monkeypatch.setattr("fxhome.passes.search.evaluator.available_cores", lambda: cores)
    found = search(problem, budget, max_evaluations=900, storage_class=classes)
    assert found.placement.tobytes() == expected.placement.tobytes()
    assert (found.step_us, found.evaluations, found.history) == (
        expected.step_us,
        expected.evaluations,
        expected.history,
    )


def test_simulations_together_are_simulations_in_turn() -> None:
    problem, _ = transformer(14)
    placements = [problem.keep_all() for _ in range(4)]
    for i, placement in enumerate(placements[1:], start=1):
        placement[problem.decisions()[: 3 * i]] = 1
    placements.append(placements[1])
    together, alone = (Evaluator(problem, 1 << 30, 3) for _ in range(2))
    with together.parallel():
        values = [value for value, _ in together.probe_all(placements[:3])]
    assert values == [alone.score(placement) for placement in placements[:3]]
    assert (together.evaluations, together.best_fitness) == (alone.evaluations, alone.best_fitness)
