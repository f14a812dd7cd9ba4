"""A plan's own program by the host's clock of real steps: what is solved for, and what changes by it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxhome.host_costs import TimedGraph
from fxhome.passes.host_calibration import HostedPlan, HostSide, SimulatedRun, host_sides, relative_time, retimed
from fxhome.passes.simulate import SWAP, Placements, Problem, simulate
from fxhome.passes.simulate_kernels import ENTER_BACKWARD, ENTER_FORWARD, LEAVE
from fxhome.placement import Plan
from tests.host_tools import EVERYTHING, host_costs, many, two_layers
from tests.plan_strategies import EXAMPLE
from tests.simulate_reference import placements, problems


def run_of(problem: Problem, placement: Placements | None = None, budget: int = EVERYTHING) -> SimulatedRun:
    placement = problem.keep_all() if placement is None else placement
    return SimulatedRun(placement, simulate(problem, placement, budget), problem.link)


def swapped(problem: Problem) -> Placements:
    placement = problem.keep_all()
    placement[np.flatnonzero(problem.allowed[:, SWAP])[0]] = SWAP
    return placement


def test_launches_and_copies_of_each_side() -> None:
    """Three launches of 10 us ahead and two behind; one storage goes out in the forward and comes back behind it."""
    figures = {"enter": 1e3, "between": 1e4, "leave": 1e5, "swap_out": 30.0, "swap_in": 40.0, "wait": 5.0}
    problem = two_layers(1.0, 10.0, **figures)
    assert host_sides(run_of(problem)) == (HostSide(30.0, 0.0, 3), HostSide(20.0, 0.0, 2))
    ahead, back = host_sides(run_of(problem, swapped(problem)))
    assert (ahead.launches_us, back.launches_us) == (30.0, 20.0)
    assert ahead.others_us + back.others_us == 30.0 + 40.0 + 2 * 5.0
    assert ahead.others_us in (30.0, 35.0)


@many
@given(st.data())
def test_both_sides_and_the_ways_in_and_out_are_all_that_the_host_does(data: st.DataObject) -> None:
    problem = data.draw(problems())
    placement = data.draw(placements(problem))
    run = run_of(problem, placement, data.draw(st.integers(0, 1 << 20)))
    inside = sum(side.launches_us + side.others_us for side in host_sides(run))
    entries = run.result.arrays.host_us[[ENTER_FORWARD, ENTER_BACKWARD, LEAVE]].sum()
    assert inside + entries == pytest.approx(run.result.host_us)


@many
@given(st.data())
def test_a_program_is_retimed_where_its_copies_stand(data: st.DataObject) -> None:
    """Not longer: what it took. Longer: never less, and never less than the host's own time."""
    problem = data.draw(problems())
    run = run_of(problem, data.draw(placements(problem)), data.draw(st.integers(0, 1 << 20)))
    step_us, idle_us = retimed(run, 1.0)
    assert step_us == run.result.step_us
    assert idle_us.tolist() == run.result.idle_us.tolist()
    longer_us, _ = retimed(run, 3.0)
    launches_us = sum(side.launches_us for side in host_sides(run))
    assert longer_us >= step_us - 1e-6
    assert longer_us >= run.result.host_us + 2 * launches_us - 1e-6


def test_the_simulator_says_the_same_of_slower_launches() -> None:
    problem = two_layers(3.0, 2.0, enter=3.0, between=1.0, leave=4.0)
    slow = two_layers(3.0, 10.0, enter=3.0, between=1.0, leave=4.0)
    assert retimed(run_of(problem), 5.0)[0] == run_of(slow).result.step_us


AHEAD, BACK = HostSide(1000.0, 200.0, 90), HostSide(2000.0, 0.0, 180)


@pytest.mark.parametrize(
    ("measured_us", "found"),
    [
        ((2000.0, 3600.0), (5400.0, 3000.0)),
        ((2000.0, None), (1800.0, 1000.0)),
        ((None, 3600.0), (3600.0, 2000.0)),
        ((None, None), None),
        ((150.0, None), None),
    ],
)
def test_what_launches_took_is_what_was_measured_less_the_copies(measured_us: Any, found: Any) -> None:
    assert relative_time((AHEAD, BACK), measured_us) == found


def test_where_nothing_is_launched_nothing_is_told() -> None:
    assert relative_time((HostSide(0.0, 5.0, 0), HostSide(0.0, 0.0, 0)), (50.0, 50.0)) is None


def hosted(device_us: float, launch_us: float, *steps: TimedGraph) -> tuple[HostedPlan, Plan]:
    run = run_of(two_layers(device_us, launch_us, enter=10.0, between=10.0, leave=10.0))
    plan = dataclasses.replace(
        EXAMPLE,
        predicted_step_seconds=run.result.step_us / 1e6,
        baseline_step_seconds=run.result.step_us / 1e6,
        notes=("something else",),
    )
    return HostedPlan(host_costs(*steps), "a graph", run, run), plan


def test_a_plan_bound_by_the_host_is_predicted_by_what_its_launches_take() -> None:
    """Five launches of 10 us that take 20 in steps; what it was predicted to take before stands in a note."""
    plan_host, plan = hosted(1.0, 10.0)
    told = plan_host.told(plan, (60.0, 40.0))
    assert told is not None
    changed, timed = told
    assert timed == TimedGraph("a graph", 100.0, 50.0)
    assert changed.predicted_step_seconds == pytest.approx(plan.predicted_step_seconds + 50e-6)
    assert changed.baseline_step_seconds == changed.predicted_step_seconds
    other, before, bound = changed.notes
    assert other == "something else"
    assert "predicted to take 80.00 us before" in before
    assert "2.00 times" in before
    assert bound.startswith("bound by the host")


def test_nothing_else_of_the_plan_changes() -> None:
    plan_host, plan = hosted(1.0, 10.0)
    told = plan_host.told(plan, (60.0, 40.0))
    assert told is not None
    names = ("predicted_step_seconds", "baseline_step_seconds", "notes")
    same = dataclasses.replace(told[0], **{name: getattr(plan, name) for name in names})
    assert same == plan
    assert told[0].fingerprint() == plan.fingerprint()


def test_a_plan_bound_by_the_device_stays_as_it_was_predicted() -> None:
    plan_host, plan = hosted(1000.0, 10.0)
    told = plan_host.told(plan, (60.0, 40.0))
    assert told is not None
    assert told[0].notes == plan.notes
    assert told[0].predicted_step_seconds == pytest.approx(plan.predicted_step_seconds, rel=0.05)


def test_what_steps_said_before_is_part_of_what_was_predicted() -> None:
    """Simulated with launches of 20 us, twice the probe's: measured as such, nothing changes."""
    plan_host, plan = hosted(1.0, 20.0, TimedGraph("another", 2000.0, 1000.0))
    told = plan_host.told(plan, (60.0, 40.0))
    assert told is not None
    assert told[1] == TimedGraph("a graph", 100.0, 50.0)
    assert told[0].predicted_step_seconds == plan.predicted_step_seconds


def test_steps_are_believed_where_the_probe_found_launches_to_take_longer() -> None:
    plan_host, plan = hosted(1.0, 20.0, TimedGraph("another", 2000.0, 1000.0))
    told = plan_host.told(plan, (15.0, 10.0))
    assert told is not None
    assert told[1] == TimedGraph("a graph", 25.0, 50.0)
    assert told[0].predicted_step_seconds == pytest.approx(plan.predicted_step_seconds - 75e-6)


def test_a_note_of_a_bound_that_is_no_longer_true_goes() -> None:
    plan_host, plan = hosted(18.0, 20.0, TimedGraph("another", 2000.0, 1000.0))
    plan = dataclasses.replace(plan, notes=("bound by the host: as it was", "something else"))
    told = plan_host.told(plan, (30.0, 20.0))
    assert told is not None
    assert not any("bound by the host" in note for note in told[0].notes)


def test_without_a_measurement_the_plan_stays() -> None:
    plan_host, plan = hosted(1.0, 10.0)
    assert plan_host.told(plan, (None, None)) is None
