"""The host's clock in the simulator: timelines by hand, and nothing at all where it costs nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxhome.passes.simulate import KEEP, RECOMPUTE, SWAP, Link, Problem, SimResult, evaluate, simulate
from fxhome.passes.simulate_kernels import (
    ENTER_BACKWARD,
    ENTER_FORWARD,
    LEAVE,
    SWAP_IN,
    SWAP_OUT,
    WAIT,
)
from tests.host_tools import EVERYTHING, many, two_layers
from tests.simulate_reference import placements, problems


def kept(problem: Problem) -> SimResult:
    return simulate(problem, problem.keep_all(), EVERYTHING)


def test_a_busy_device_waits_for_the_first_launch_only() -> None:
    """5 kernels of 10 us, launched every 2 us from 3 us on: idle for 5, then busy to the end."""
    result = kept(two_layers(10.0, 2.0, enter=3.0, between=1.0, leave=4.0))
    assert result.start_us.tolist() == [5.0, 15.0, 25.0, 35.0, 45.0, 55.0]
    assert result.idle_us.tolist() == [5.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert (result.step_us, result.host_us, result.stall_us) == (55.0, 18.0, 0.0)


def test_a_slow_host_is_what_the_step_takes() -> None:
    """5 kernels of 1 us, launched every 10 us: each waits for its launch, and the end for what the host still does."""
    result = kept(two_layers(1.0, 10.0, enter=3.0, between=20.0, leave=7.0))
    assert result.start_us.tolist() == [13.0, 23.0, 33.0, 63.0, 73.0, 80.0]
    assert result.step_us == result.host_us == 80.0
    assert float(result.idle_us.sum()) == pytest.approx(80.0 - 5.0)


def test_a_swap_costs_the_host_where_it_is_started_and_waited_for() -> None:
    """The first result is swapped: two launches of copies and two waits come between those of the kernels."""
    problem = two_layers(1.0, 10.0, swap_out=30.0, swap_in=40.0, wait=5.0)
    first = int(problem.arrays.root_storage[1])
    placement = problem.keep_all()
    placement[first] = SWAP
    result = simulate(problem, placement, EVERYTHING)
    assert result.host_us == kept(problem).host_us + 30.0 + 40.0 + 2 * 5.0
    # Launched at 10 and done at 11, its copy is started at 40 and takes 10; the second node is launched at 50.
    assert result.start_us[1] == 50.0
    assert result.step_us == result.host_us + 1.0


def test_a_copy_begins_when_the_host_has_started_it() -> None:
    """With nothing else to do: out from 110 to 120; the copy back, started behind it, is waited for to the end."""
    problem = two_layers(1.0, 10.0, swap_out=100.0)
    slow = dataclasses.replace(problem, link=Link(1e-2, 1.0, 1.0, 0.0))
    placement = slow.keep_all()
    placement[int(problem.arrays.root_storage[1])] = SWAP
    result = simulate(slow, placement, EVERYTHING)
    issue = int(result.issue_in[int(problem.arrays.root_storage[1])])
    begun = max(result.start_us[issue - 1] + 1.0, 100.0 + 10.0 * issue) if issue else 100.0
    assert result.start_us[4] == pytest.approx(begun + 1000.0)
    assert result.stall_us > 900.0


def test_rebuilding_costs_its_launches() -> None:
    problem = two_layers(1.0, 10.0)
    second = int(problem.arrays.root_storage[2])
    placement = problem.keep_all()
    placement[second] = RECOMPUTE
    assert simulate(problem, placement, EVERYTHING).host_us == kept(problem).host_us + 10.0


@many
@given(problems(), st.integers(0, 200), st.data())
def test_a_host_that_costs_nothing_changes_nothing(problem: Problem, budget: int, data: st.DataObject) -> None:
    placement = data.draw(placements(problem))
    free = problem.arrays._replace(node_host_us=np.zeros(len(problem.arrays.node_phase)))
    plain = simulate(problem, placement, budget)
    hosted = simulate(dataclasses.replace(problem, arrays=free), placement, budget)
    for field in dataclasses.fields(SimResult):
        if field.name != "arrays":
            assert np.array_equal(getattr(plain, field.name), getattr(hosted, field.name)), field.name
    assert not plain.idle_us.any()


@many
@given(problems(with_host=True), st.integers(0, 200), st.data())
def test_the_step_holds_what_the_host_and_the_device_do(problem: Problem, budget: int, data: st.DataObject) -> None:
    g = problem.arrays
    placement = data.draw(placements(problem))
    result = simulate(problem, placement, budget)
    assert evaluate(problem, placement, budget) == (result.peak_bytes, result.step_us)
    launches = g.node_host_us[result.program].sum() if g.node_host_us.shape[0] else 0.0
    moved = int(((placement == SWAP) & (result.saved == 1)).sum())
    copies = moved * (g.host_us[SWAP_OUT] + g.host_us[SWAP_IN] + 2 * g.host_us[WAIT])
    entries = g.host_us[[ENTER_FORWARD, ENTER_BACKWARD, LEAVE]].sum()
    assert result.host_us == pytest.approx(launches + copies + entries)
    assert result.step_us >= result.host_us - 1e-9
    busy = float(g.node_time_us[result.program].sum())
    # Copies cost the kernels beside them something on top.
    assert result.step_us >= busy + float(result.idle_us.sum()) + result.stall_us - 1e-6


def test_what_is_kept_is_saved_and_loaded(tmp_path: Path) -> None:
    problem = two_layers(1.0, 10.0, enter=3.0, leave=2.0)
    problem.save(tmp_path / "problem.npz")
    loaded = Problem.load(tmp_path / "problem.npz")
    assert (loaded.keep_all() == KEEP).all()
    assert kept(loaded).step_us == kept(problem).step_us
    with np.load(tmp_path / "problem.npz") as data:
        older = {name: data[name] for name in data if name not in ("node_host_us", "host_us")}
        np.savez(tmp_path / "older.npz", **older)
    assert kept(Problem.load(tmp_path / "older.npz")).step_us == 5.0
