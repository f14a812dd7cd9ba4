"""The simulator against an obvious model of it, on random joint graphs; and facts that must hold whatever the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP, Problem, evaluate, holders, simulate
from tests.graph_tools import EVERYTHING, chain, chain_inputs, normalized, placed, problem_of
from tests.simulate_reference import Model, placements, problems

CODES = [KEEP, SWAP, RECOMPUTE, RECOMPUTE_EACH]
many = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
budgets = st.sampled_from([0, 60, 120, EVERYTHING])


@many
@given(problems(with_host=True), budgets, st.data())
def test_curve_peak_and_time_agree_with_the_model(problem: Problem, budget: int, data: st.DataObject) -> None:
    placement = data.draw(placements(problem))
    result = simulate(problem, placement, budget)
    model = Model(problem, placement, result)
    assert result.curve.tolist() == model.curve()
    assert result.peak_bytes == max(model.curve())
    assert result.step_us == pytest.approx(model.step_us(), abs=1e-6, rel=1e-9)


@many
@given(problems(with_host=True), st.data())
def test_layer_by_layer_copies_agree_with_the_model(problem: Problem, data: st.DataObject) -> None:
    placement = data.draw(placements(problem))
    result = simulate(problem, placement, 0, synchronous=True)
    model = Model(problem, placement, result)
    assert result.curve.tolist() == model.curve()
    assert result.step_us == pytest.approx(model.step_us(), abs=1e-6, rel=1e-9)
    for s in np.flatnonzero((placement == SWAP) & (result.saved == 1)):
        assert max(result.last_forward[s], result.produced[s] + 1) >= result.issue_out[s] > result.produced[s]
        assert result.issue_out[s] <= result.wait_out[s] <= result.issue_out[s] + 1
        assert result.last_forward[s] < result.wait_out[s] <= result.forward_length <= result.issue_in[s]
        assert result.issue_in[s] <= result.wait_in[s] <= min(result.issue_in[s] + 1, result.first_backward[s])


@many
@given(problems(with_host=True), budgets, st.data())
def test_program_is_complete_and_transfers_are_in_order(problem: Problem, budget: int, data: st.DataObject) -> None:
    placement = data.draw(placements(problem))
    result = simulate(problem, placement, budget)
    g = problem.arrays
    program = result.program.tolist()
    backward = [n for n in range(len(g.node_phase)) if g.node_phase[n] == 2]
    assert [n for n in program if g.node_phase[n] == 2] == backward  # each once, in order
    forward = program[: result.forward_length]
    assert sorted(set(forward)) == forward
    assert {int(n) for n in np.flatnonzero(g.node_must_forward)} <= set(forward)
    for s in np.flatnonzero((placement == SWAP) & (result.saved == 1)):
        assert (
            result.produced[s]
            < result.wait_out[s]
            <= result.issue_in[s]
            <= result.first_backward[s]
            <= result.last_backward[s]
        )
        assert result.wait_out[s] > result.last_forward[s]
    for s in np.flatnonzero(result.saved):
        assert placement[s] in (KEEP, SWAP)


@many
@given(problems(with_host=True), budgets, st.data())
def test_evaluate_and_holders_agree_with_simulate(problem: Problem, budget: int, data: st.DataObject) -> None:
    placement = data.draw(placements(problem))
    result = simulate(problem, placement, budget)
    assert evaluate(problem, placement, budget) == (result.peak_bytes, result.step_us)
    assert result.curve[result.peak_position] == result.peak_bytes == result.curve.max()
    held = holders(problem, placement, result)
    assert [size for _, size in held] == sorted((size for _, size in held), reverse=True)
    # An instance of a rebuilt storage may be alive twice, workspace and outside bytes belong to no storage.
    position = result.peak_position
    other = 0
    if position < len(result.program):
        other = int(problem.arrays.node_workspace[result.program[position]])
        if position >= result.forward_length:
            other += int(problem.arrays.outside_bytes[0])
        if position == result.forward_length:
            other += int(problem.arrays.outside_bytes[1])
    alive = [s for s, begin, end in Model(problem, placement, result).lifetimes() if begin <= position <= end]
    twice = sum(int(problem.arrays.storage_bytes[s]) * (alive.count(s) - 1) for s in set(alive))
    if not twice:
        assert sum(size for _, size in held) + other == result.peak_bytes


@many
@given(problems())
def test_a_faster_device_is_never_slower_and_memory_does_not_depend_on_time_alone(problem: Problem) -> None:
    """With everything kept there are no copies: time is the sum of the nodes, memory is independent of the budget."""
    placement = problem.keep_all()
    results = [simulate(problem, placement, budget) for budget in (0, EVERYTHING)]
    assert results[0].peak_bytes == results[1].peak_bytes
    assert results[0].step_us == pytest.approx(float(problem.arrays.node_time_us[results[0].program].sum()))
    assert results[0].stall_us == results[0].host_bytes == 0


@many
@given(problems(), st.data())
def test_a_tighter_budget_never_saves_time_or_costs_memory_when_only_swapping(
    problem: Problem, data: st.DataObject
) -> None:
    """The smaller of two budgets waits for copies earlier and fetches later: not more memory, not a faster step."""
    placement = np.where(problem.allowed[:, SWAP], SWAP, problem.keep_all()).astype(np.int8)
    tight, roomy = simulate(problem, placement, 0), simulate(problem, placement, EVERYTHING)
    assert tight.peak_bytes <= roomy.peak_bytes
    assert tight.step_us >= roomy.step_us - 1e-6
    assert tight.host_bytes == roomy.host_bytes


@many
@given(problems(), st.data())
def test_more_room_is_never_more_than_filled(problem: Problem, data: st.DataObject) -> None:
    """What is held behind a copy, or comes back early, takes no room from reloads that are due."""
    placement = data.draw(placements(problem))
    least = simulate(problem, placement, 0).peak_bytes
    for budget in (least, least + 1, least + 40):
        assert simulate(problem, placement, budget).peak_bytes <= budget


@many
@given(problems())
def test_where_memory_allows_copies_may_take_half_as_long_again(problem: Problem) -> None:
    """In the forward nobody waits for one before that, and none comes back later but for those in front of it."""
    g = problem.arrays
    placement = np.where(problem.allowed[:, SWAP], SWAP, problem.keep_all()).astype(np.int8)
    result = simulate(problem, placement, EVERYTHING)
    at_us = np.concatenate([[0.0], np.cumsum(g.node_time_us[result.program])])
    moved = np.flatnonzero((placement == SWAP) & (result.saved == 1))
    for s in moved[
        (result.wait_out[moved] <= result.forward_length) & (result.wait_out < result.first_backward)[moved]
    ]:
        copy_us = problem.link.latency_us + g.storage_copy_bytes[s] * problem.link.d2h_us_per_byte
        assert at_us[result.wait_out[s]] >= at_us[result.issue_out[s]] + 1.5 * copy_us - 1e-6
    if (result.wait_out[moved] > result.forward_length).any():
        return  # the step stalls for those, so that time passes of which `at_us` knows nothing
    before = result.forward_length
    for s in sorted(moved, key=lambda s: (result.first_backward[s], result.issue_out[s])):
        copy_us = problem.link.latency_us + g.storage_copy_bytes[s] * problem.link.h2d_us_per_byte
        latest_us = at_us[result.first_backward[s]] - 1.5 * copy_us
        assert at_us[result.issue_in[s]] <= latest_us + 1e-6 or result.issue_in[s] == max(before, result.wait_out[s])
        before = result.issue_in[s]


@many
@given(problems())
def test_rebuilding_moves_nothing_and_saves_less(problem: Problem) -> None:
    kept = simulate(problem, problem.keep_all(), EVERYTHING)
    for code in (RECOMPUTE, RECOMPUTE_EACH):
        rebuilt = simulate(problem, placed(problem, code), EVERYTHING)
        sizes = problem.arrays.storage_bytes
        assert sizes[rebuilt.saved == 1].sum() <= sizes[kept.saved == 1].sum()
        assert rebuilt.host_bytes == 0
        assert rebuilt.step_us >= kept.step_us - 1e-6


def test_a_known_chain_by_hand() -> None:
    """Three blocks of product, tanh, sin: what is saved, and what the peak is made of."""
    module, outputs = normalized(chain, *chain_inputs())
    facts, problem = problem_of(module, outputs)
    one = 64 * 32 * 4
    kept = simulate(problem, problem.keep_all(), EVERYTHING)
    saved = {facts.storages[s].name for s in np.flatnonzero(kept.saved)}
    assert {"tanh", "tanh_1", "tanh_2", "sin", "sin_1", "sin_2"} <= saved
    swapped = simulate(problem, placed(problem, SWAP), 0)
    assert swapped.host_bytes == 6 * one
    assert swapped.peak_bytes < kept.peak_bytes


def test_a_problem_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    module, outputs = normalized(chain, *chain_inputs())
    _, problem = problem_of(module, outputs)
    problem.save(tmp_path / "problem.npz")
    loaded = Problem.load(tmp_path / "problem.npz")
    for code in CODES:
        placement = placed(problem, code)
        assert evaluate(loaded, placement, 40_000) == evaluate(problem, placement, 40_000)


def test_a_file_that_tells_of_no_takers_has_none(tmp_path: Path) -> None:
    _, problem = problem_of(*normalized(chain, *chain_inputs()))
    problem.save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as data:
        np.savez(tmp_path / "old.npz", **{name: data[name] for name in data if not name.startswith("taker")})
        np.savez(tmp_path / "broken.npz", **{name: data[name] for name in data if name != "storage_bytes"})
    loaded = Problem.load(tmp_path / "old.npz")
    assert loaded.arrays.taker_start.shape == (0,)
    kept = problem.keep_all()
    assert evaluate(loaded, kept, EVERYTHING) == evaluate(problem, kept, EVERYTHING)
    with pytest.raises(TypeError, match="storage_bytes"):
        Problem.load(tmp_path / "broken.npz")
