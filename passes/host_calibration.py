"""The host's time of a plan's own program, held against what real steps took, and the plan told by that clock.

    host_sides     what the simulated program spends in the forward and in the backward: on launches, and on the rest
    relative_time  what was measured of both, without that rest, over the launches as they were modelled
    retimed        the same program, its launches so many times longer: where every copy stands stays as it was planned
    HostedPlan     all of that for one plan

What is scaled are launches alone (fxhome/host_costs.py says why one factor, and why only those).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fxhome.host_costs import HostCosts, TimedGraph
from fxhome.passes import simulate_timeline
from fxhome.passes.host_times import BOUND_BY_HOST, host_notes
from fxhome.passes.simulate import Link, Placements, SimResult
from fxhome.passes.simulate_kernels import (
    COMPRESS_SWAP,
    DECODE,
    ENCODE,
    SWAP,
    SWAP_IN,
    SWAP_OUT,
    WAIT,
    Float64,
)
from fxhome.placement import Plan
from fxhome.units import format_seconds

NOTED_CHANGE = 0.01
"""A prediction that moves less is not worth a note."""


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """A placement as it was simulated on a link."""

    placement: Placements
    result: SimResult
    link: Link


@dataclass(frozen=True)
class HostSide:
    """What the host spends inside the forward, or inside the backward: us, and how many entries are launched."""

    launches_us: float
    others_us: float
    launches: int


def host_sides(run: SimulatedRun) -> tuple[HostSide, HostSide]:
    """Inside the forward and the backward of a run; the ways in and out are in neither."""
    result, g = run.result, run.result.arrays
    nodes = g.node_phase.shape[0]
    entries = result.program
    is_node = entries < nodes
    launched = g.node_host_us if g.node_host_us.shape[0] else np.zeros(nodes, np.float64)
    launches = np.where(is_node, launched[np.where(is_node, entries, 0)], 0.0)
    is_decode = entries >= nodes + g.storage_bytes.shape[0]
    others = np.where(is_node, 0.0, np.where(is_decode, g.host_us[DECODE], g.host_us[ENCODE]))
    total, forward = len(entries), result.forward_length
    # One place more than there are entries: the last waits stand behind all of them.
    others = np.append(others, 0.0)
    moved = (result.saved == 1) & np.isin(run.placement, (SWAP, COMPRESS_SWAP))
    last = np.where(result.wait_out < 0, total, np.minimum(result.wait_out, total))
    for places, figure in (
        (result.issue_out, SWAP_OUT),
        (last, WAIT),
        (result.issue_in, SWAP_IN),
        (result.wait_in, WAIT),
    ):
        np.add.at(others, places[moved], g.host_us[figure])
    return tuple(  # type: ignore[return-value]
        HostSide(float(launches[part].sum()), float(others[part].sum()), int(np.count_nonzero(launches[part])))
        for part in (slice(0, forward), slice(forward, None))
    )


def relative_time(
    sides: tuple[HostSide, HostSide], measured_us: tuple[float | None, float | None]
) -> tuple[float, float] | None:
    """(us that the launches took, us that they were modelled to take) over the sides that were measured.

    measured_us: of the forward and of the backward; None where that could not be told. None where nothing was measured
    that launches anything, or less than the copies alone should take.
    """
    known = [(side, us) for side, us in zip(sides, measured_us, strict=True) if us is not None]
    modelled_us = sum(side.launches_us for side, _ in known)
    taken_us = sum(us - side.others_us for side, us in known)
    return (taken_us, modelled_us) if modelled_us > 0 and taken_us > 0 else None


def retimed(run: SimulatedRun, times_longer: float) -> tuple[float, Float64]:
    """(step us, us that the device waits for the host before each entry), with launches so many times longer."""
    result = run.result
    g = result.arrays._replace(node_host_us=result.arrays.node_host_us * times_longer)
    total = len(result.program)
    idle_us = np.zeros(total + 1, np.float64)
    step_us, *_ = simulate_timeline.timeline(
        g,
        np.ascontiguousarray(run.placement, np.int8),
        result.saved,
        result.program,
        result.forward_length,
        total,
        run.link,
        result.issue_out,
        result.wait_out,
        result.issue_in,
        result.wait_in,
        np.zeros(total + 1, np.float64),
        idle_us,
    )
    return float(step_us), idle_us


@dataclass(frozen=True, eq=False)
class HostedPlan:
    """What a plan and its baseline were simulated as, and the host's costs that they were simulated with."""

    costs: HostCosts
    graph: str
    """The fingerprint of the joint graph."""
    run: SimulatedRun
    baseline: SimulatedRun

    @property
    def launches(self) -> tuple[int, int]:
        """How many entries are launched in the forward, and in the backward."""
        ahead, back = host_sides(self.run)
        return ahead.launches, back.launches

    def told(self, plan: Plan, measured_us: tuple[float | None, float | None]) -> tuple[Plan, TimedGraph] | None:
        """The plan as the host was measured inside its forward and its backward, and what to keep of that for others.

        Only the predicted times and the notes change; what the step was predicted to take at first stays as a note.
        None where `relative_time` has none.
        """
        found = relative_time(host_sides(self.run), measured_us)
        if found is None:
            return None
        taken_us, modelled_us = found
        timed = TimedGraph(self.graph, taken_us, modelled_us / self.costs.launch_factor)
        launch_factor = timed.taken_us / timed.alone_us
        times_longer = launch_factor / self.costs.launch_factor
        step_us, idle_us = retimed(self.run, times_longer)
        baseline_us, _ = retimed(self.baseline, times_longer)
        notes = [note for note in plan.notes if not note.startswith(BOUND_BY_HOST)]
        if abs(step_us / 1e6 - plan.predicted_step_seconds) > NOTED_CHANGE * plan.predicted_step_seconds:
            notes.append(
                f"the step was predicted to take {format_seconds(plan.predicted_step_seconds)} before the host was "
                f"timed in real steps: its launches take {launch_factor:.2f} times as long there as by themselves"
            )
        notes += host_notes(idle_us, step_us)
        told = replace(
            plan,
            predicted_step_seconds=step_us / 1e6,
            baseline_step_seconds=baseline_us / 1e6,
            notes=tuple(notes),
        )
        return told, timed
