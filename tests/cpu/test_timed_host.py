"""A training whose host is timed in its first steps, on a CPU that is given a host: the plan is told, once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxhome
from fxhome import ledger
from fxhome.device import cached_profile
from fxhome.host_costs import HostCosts, TimedGraph
from fxhome.host_timer import MAX_CALLS, SAMPLES, SKIPPED_CALLS, HostTimer
from fxhome.managed_graph import ManagedGraph
from fxhome.placement import Placement
from tests.hazard_tools import compile_step, fresh
from tests.host_tools import Machine, host_costs

CALL_US = 50_000.0
"""What every call of a compiled graph is made to take."""
LAUNCH_US = 400.0
UNTIL_TOLD = 1 + SKIPPED_CALLS + SAMPLES


class Ticking(Machine):
    """A clock that goes on by half of a call's time whenever it is asked: a call takes just that."""

    def clock(self) -> float:
        self.now_s += CALL_US / 1e6
        return super().clock()


@dataclasses.dataclass
class Hosted:
    """What is seen of a training with a host."""

    machine: Ticking
    costs: HostCosts
    kept: list[tuple[torch.device, str, TimedGraph]]


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def hosted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hosted:
    costs = host_costs(inner=request.param, **dict.fromkeys(("kernel_us", "library_us"), LAUNCH_US))
    seen = Hosted(Ticking(), costs, [])

    def profile(device: torch.device, inner: str) -> Any:
        return dataclasses.replace(cached_profile(device), host=(seen.costs,))

    monkeypatch.setattr("fxhome.backend.cached_profile", profile)
    monkeypatch.setattr("fxhome.variant.keep_timed_graph", lambda *told: seen.kept.append(told))
    for module in ("fxhome.inner_eager", "fxhome.inductor_graphs"):
        monkeypatch.setattr(f"{module}.CudaDevice", lambda *_: seen.machine)
        monkeypatch.setattr(f"{module}.HostTimer", functools.partial(HostTimer, clock=seen.machine.clock))
    return seen


def training(inner: str) -> Callable[[], None]:
    """One step of a small model, compiled for less than its baseline needs."""
    fresh()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())))
    x = torch.randn(2048, 64)
    options = {"memory_budget": "75%", "inner": inner, "allow": ["swap"], "max_evaluations": 400}
    compiled = compile_step(lambda x: model(x).square().mean(), options)

    def step() -> None:
        model.zero_grad()
        compiled(x).backward()

    return step


def the_graph() -> ManagedGraph:
    (graph,) = ledger.graphs()
    return graph


def test_the_plan_is_predicted_by_what_steps_took_and_nothing_else_happens(hosted: Hosted) -> None:
    step = training(hosted.costs.inner)
    for _ in range(UNTIL_TOLD - 1):
        step()
    (first,) = fxhome.plans()
    assert any(entry.placement is Placement.SWAP for entry in first.placements)
    assert hosted.kept == []
    step()
    (told,) = fxhome.plans()
    # Both calls are all that the host does, apart from the ways in and out, which take some us here.
    assert 2 * CALL_US / 1e6 < told.predicted_step_seconds < 2 * CALL_US / 1e6 + first.predicted_step_seconds
    assert any(note.startswith("the step was predicted to take") for note in told.notes)
    assert any(note.startswith("bound by the host") for note in told.notes)
    assert told.fingerprint() == first.fingerprint()
    assert told.measured_peak_bytes == first.measured_peak_bytes
    ((device, inner, timed),) = hosted.kept
    assert (device.type, inner, timed.graph) == ("cpu", hosted.costs.inner, told.graph_fingerprint)
    assert timed.taken_us == pytest.approx(2 * CALL_US, rel=0.01)
    asked = hosted.machine.asked
    for _ in range(3):
        step()
    assert hosted.machine.asked == asked
    assert len(the_graph().variants) == 1
    assert fxhome.plans() == [told]
    assert len(hosted.kept) == 1


def test_the_next_plan_reckons_with_it(hosted: Hosted) -> None:
    step = training(hosted.costs.inner)
    for _ in range(UNTIL_TOLD):
        step()
    ((_, _, timed),) = hosted.kept
    hosted.costs = hosted.costs.with_steps((timed,))
    assert hosted.costs.launch_factor > 1.1
    (told,) = fxhome.plans()
    graph = the_graph()
    graph.join(None, None)
    step()
    assert len(graph.variants) == 2
    (again,) = fxhome.plans()
    assert again.predicted_step_seconds == pytest.approx(told.predicted_step_seconds, rel=0.2)
    for _ in range(UNTIL_TOLD - 1):
        step()
    (settled,) = fxhome.plans()
    assert settled.predicted_step_seconds == pytest.approx(2 * CALL_US / 1e6, rel=0.1)


def test_a_device_that_is_always_behind_leaves_the_plan_as_it_is(hosted: Hosted) -> None:
    hosted.machine.idle = False
    step = training(hosted.costs.inner)
    step()
    (first,) = fxhome.plans()
    for _ in range(MAX_CALLS + 2):
        step()
    assert fxhome.plans() == [first]
    assert hosted.kept == []


def test_a_cpu_has_no_host_to_time() -> None:
    step = training("aot_eager")
    step()
    (variant,) = the_graph().variants
    assert variant.timer is None
