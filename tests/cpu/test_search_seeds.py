"""Where the search starts: relaxations rounded, what makes the program wait kept, and views looked through."""

import math
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search_problems import GraphBuilder, load_case, residual, transformer
from fxhome.passes.search import lower_bound, search
from fxhome.passes.search.bound import Bound, rounded
from fxhome.passes.search.evaluator import Evaluator
from fxhome.passes.search.flow import read_flow
from fxhome.passes.search.relaxed import SHORT_WAIT, relaxed_seeds, retarget, without_waits
from fxhome.passes.search.structure import instruction_times, read_structure
from fxhome.passes.simulate import KEEP, SWAP, Link, Problem, evaluate, simulate
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, FORWARD, INPUT

PROFILES = Path(__file__).parents[2] / "benchmarks" / "profiles"
EVERYTHING = 1 << 60


def _peak(problem: Problem) -> int:
    return evaluate(problem, problem.keep_all(), EVERYTHING)[0]


def test_what_the_program_waits_for_is_kept() -> None:
    problem, _ = transformer(6)
    s = read_structure(problem)
    placement = problem.keep_all()
    moved = s.decisions[s.demanded[s.decisions] & problem.allowed[s.decisions, SWAP]]
    placement[moved[-20:]] = SWAP  # read again at once: the copies cannot be hidden
    evaluator = Evaluator(problem, EVERYTHING, 1000)

    calm, waits, program = without_waits(s, evaluator, placement)

    before, after = (simulate(problem, x, EVERYTHING) for x in (placement, calm))
    assert waits
    assert (calm[waits] == KEEP).all()
    assert np.array_equal(np.flatnonzero(calm != placement), np.unique(waits))
    assert (program.peak_bytes, after.step_us < before.step_us) == (after.peak_bytes, True)
    wait = np.diff(after.start_us) - instruction_times(problem.arrays, after.program)
    assert wait.max() < SHORT_WAIT * after.step_us


@pytest.mark.parametrize("share", [0.6, 0.45])
def test_the_first_plans_of_a_real_model_are_near_the_bound(share: float) -> None:
    problem, classes = load_case(PROFILES / "resnet50_h200.npz")
    found = search(problem, int(share * _peak(problem)), storage_class=classes, max_evaluations=0)
    assert found.gap is not None
    assert found.gap < 0.03


def test_swaps_that_the_link_hides_bring_a_rounded_relaxation_within_the_budget() -> None:
    problem, classes = load_case(PROFILES / "vgg16_h200.npz")
    found = search(problem, int(0.6 * _peak(problem)), storage_class=classes, max_evaluations=0)
    assert found.gap is not None
    assert found.gap < 0.002  # dearer: codecs and recomputation while the link is idle


def test_no_seed_comes_from_a_relaxation_that_nothing_meets() -> None:
    problem, _ = residual(4)
    s = read_structure(problem)
    first: Future[Bound] = Future()
    first.set_result(Bound(math.inf, False, None, ()))
    evaluator = Evaluator(problem, 1000, 100)
    assert relaxed_seeds(s, read_flow(s), evaluator, np.random.default_rng(0), first) == []
    assert evaluator.lower_bound_us == math.inf


def test_no_further_relaxation_is_solved_when_the_seconds_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = transformer(4)
    s, budget = read_structure(problem), int(0.5 * _peak(problem))
    first: Future[Bound] = Future()
    first.set_result(lower_bound(problem, budget, structure=s))

    def solved(*_: object, **__: object) -> Bound:
        raise AssertionError("another relaxation")

    monkeypatch.setattr("fxhome.passes.search.relaxed.lower_bound", solved)
    for seconds in (0.0, None):
        evaluator = Evaluator(problem, budget, 1000, search_seconds=seconds)
        evaluator.protected += 1
        if seconds is None:
            with pytest.raises(AssertionError, match="another relaxation"):
                relaxed_seeds(s, read_flow(s), evaluator, np.random.default_rng(0), first)
        else:
            assert relaxed_seeds(s, read_flow(s), evaluator, np.random.default_rng(0), first)


def _rebuilt(layers: int = 8) -> Problem:
    """Layers of a slow node and a cheap one behind it; the backward reads the cheap ones, on a slow link."""
    b = GraphBuilder()
    last = b.node(INPUT, [], 0, 0.0)
    read = []
    for _ in range(layers):
        slow = b.node(FORWARD, [last], 1000, 100.0)
        last = b.node(FORWARD, [slow], 1000, 1.0)
        read.append(last)
    loss = b.node(FORWARD, [last], 8, 1.0, movable=False)
    gradient = loss
    for cheap in reversed(read):
        gradient = b.node(BACKWARD, [gradient, cheap], 1000, 100.0)
    problem, _ = b.problem([loss], [gradient], Link(1.0, 1.0, 1.2, 2.0))
    return problem


def test_the_bound_of_a_small_graph_sees_what_a_recomputation_needs_kept() -> None:
    """What a cheap node is rebuilt from is read by no node of the backward, and must be kept or rebuilt as well."""
    problem = _rebuilt()
    budget = int(0.6 * _peak(problem))
    blind, seeing = (lower_bound(problem, budget, held=held).step_us for held in (False, None))
    assert seeing > 1.03 * blind


def _views() -> Problem:
    """input -> a -> view of a -> b -> loss; the backward reads the view and b."""
    b = GraphBuilder()
    source = b.node(INPUT, [], 0, 0.0)
    a = b.node(FORWARD, [source], 1000, 5.0)
    view = b.node(FORWARD, [a], 0, 0.0)
    last = b.node(FORWARD, [view], 1000, 5.0)
    loss = b.node(FORWARD, [last], 8, 1.0, movable=False)
    gradient = b.node(BACKWARD, [loss, view, last], 1000, 5.0)
    problem, _ = b.problem([loss], [gradient], Link(1e-3, 1e-3, 1.2, 2.0))
    kind = problem.arrays.node_kind.copy()
    kind[view] = ALIAS
    return Problem(problem.arrays._replace(node_kind=kind), problem.link, problem.allowed, problem.group)


def test_readers_of_a_view_read_what_it_views() -> None:
    flow = read_flow(read_structure(_views()))
    demanded = set(zip(flow.reader.tolist(), flow.source.tolist(), strict=True))
    assert demanded == {(5, 1), (5, 3), (5, 4), (3, 1), (4, 3)}
    assert set(zip(flow.once_reader.tolist(), flow.once_source.tolist(), strict=True)) == {(3, 1), (4, 3)}
    assert np.flatnonzero(flow.seen_through).tolist() == [2]
    assert np.flatnonzero(flow.certain).tolist() == [1, 2, 3, 4]


def test_a_view_of_what_the_backward_reads_otherwise_stays() -> None:
    problem = _views()
    alias = problem.arrays.backward_alias.copy()
    alias[1] = 3  # as where a mutated input has a clone
    arrays = problem.arrays._replace(backward_alias=alias)
    flow = read_flow(read_structure(Problem(arrays, problem.link, problem.allowed, problem.group)))
    assert not flow.seen_through.any()


def test_only_where_the_program_is_over_the_budget_does_the_relaxation_aim_lower() -> None:
    problem, _ = residual(8)
    s, budget = read_structure(problem), int(0.6 * _peak(problem))
    flow = read_flow(s)
    bound = lower_bound(problem, budget, structure=s, held=False)
    assert bound.shares is not None
    result = simulate(problem, rounded(s, bound.shares), EVERYTHING)
    program = result.program.tolist()
    # Over the budget at one anchor alone: the others have room to spare.
    result.curve[:] = budget - 1000
    over = bound.anchors[-1]
    result.curve[program.index(over)] = budget + 4096
    targets: dict[int, int] = {}

    anchors = retarget(s, flow, result, budget, bound.anchors, targets, most=len(bound.anchors))

    assert anchors == bound.anchors
    assert targets.pop(over) == budget - 4096
    assert set(targets.values()) == {budget}
