"""Which nodes cost the host a launch, under either inner compiler, and what a step adds to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxhome
from fxhome.device import DeviceProfile
from fxhome.host_costs import HostCosts
from fxhome.passes.facts import GraphFacts, extract_facts
from fxhome.passes.host_times import HostTimes, host_notes, host_times
from fxhome.passes.simulate_kernels import (
    DECODE,
    ENCODE,
    ENTER_BACKWARD,
    ENTER_FORWARD,
    INPUT,
    LEAVE,
    SWAP_IN,
    SWAP_OUT,
    WAIT,
)
from tests.graph_tools import normalized

COSTS = HostCosts(
    inner="inductor",
    forward_us=1000.0,
    backward_us=500.0,
    input_us=3.0,
    gradient_us=5.0,
    kernel_us=7.0,
    library_us=11.0,
    convolution_us=20.0,
    view_us=2.0,
    swap_out_us=40.0,
    swap_in_us=41.0,
    wait_us=9.0,
    encode_us=60.0,
    decode_us=61.0,
)
PROFILE = DeviceProfile(
    name="Some GPU",
    kind="cuda",
    d2h_bytes_per_s=50e9,
    h2d_bytes_per_s=50e9,
    duplex_bytes_per_s=80e9,
    copy_latency_us=15.0,
    memory_bytes_per_s=4e12,
    launch_us=12.0,
    flops_per_s=(("float32", 5e13),),
    total_memory_bytes=140 * 1024**3,
    host_memory_bytes=128 * 1024**3,
    versions=(("torch", "2.14.1"),),
)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product, two pointwise operators, a transposition into another product, a sum."""
    return torch.mm(torch.sin(torch.cos(torch.mm(x, w))).t(), x).sum()


def timed(inner: str, function: Any, *arguments: torch.Tensor) -> tuple[GraphFacts, HostTimes, dict[str, float]]:
    """The facts, the host's times, and those of the forward by target, summed."""
    module, outputs = normalized(function, *arguments)
    facts = extract_facts(module, outputs, "cuda", fusing=inner == "inductor")
    times = host_times(module, facts, dataclasses.replace(COSTS, inner=inner))
    by_target: dict[str, float] = {}
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    for node, phase, us in zip(nodes, facts.node_phase, times.node_us.tolist(), strict=True):
        if phase != INPUT and us and not node.name.startswith("tangents"):
            by_target[str(node.target)] = by_target.get(str(node.target), 0.0) + us
    return facts, times, by_target


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)


def test_every_eager_operator_is_launched_and_views_cost_little() -> None:
    _, times, by_target = timed("aot_eager", block, *matrices())
    assert by_target["aten.sum.default"] == COSTS.kernel_us
    assert by_target["aten.cos.default"] == 2 * COSTS.kernel_us  # the backward of sin takes one more
    assert by_target["aten.mm.default"] % COSTS.library_us == 0
    assert by_target["aten.mm.default"] >= 4 * COSTS.library_us
    assert by_target["aten.t.default"] % COSTS.view_us == 0
    assert times.node_us.min() == 0.0


def test_what_is_fused_is_launched_once() -> None:
    """cos is computed in the kernel of sin, which a library reads and so is written."""
    _, _, by_target = timed("inductor", block, *matrices())
    assert "aten.cos.default" not in by_target
    assert by_target["aten.sin.default"] == COSTS.kernel_us
    eager = timed("aot_eager", block, *matrices())[1]
    fused = timed("inductor", block, *matrices())[1]
    assert fused.node_us.sum() < eager.node_us.sum()


def test_both_sums_of_the_same_elements_and_what_is_made_of_them_are_one_launch() -> None:
    def statistics(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, w)
        return torch.rsqrt(y.sum(1) + 1.0) * y.sum(1)

    _, _, by_target = timed("inductor", statistics, *matrices())
    ahead = {target: us for target, us in by_target.items() if target in ("aten.sum.dim_IntList", "aten.rsqrt.default")}
    assert ahead.get("aten.rsqrt.default", 0.0) == 0.0


def test_a_convolution_costs_a_call_for_each_gradient() -> None:
    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w).sum()

    both = torch.ones(1, 2, 5, 5, requires_grad=True), torch.ones(2, 2, 3, 3, requires_grad=True)
    _, _, by_target = timed("inductor", convolve, *both)
    assert by_target["aten.convolution.default"] == COSTS.convolution_us
    assert by_target["aten.convolution_backward.default"] == 2 * COSTS.convolution_us
    _, _, by_target = timed("inductor", convolve, both[0].detach(), both[1])
    assert by_target["aten.convolution_backward.default"] == COSTS.convolution_us


def test_a_call_that_was_timed_costs_what_it_took() -> None:
    module, outputs = normalized(block, *matrices())
    facts = extract_facts(module, outputs, "cuda")
    costs = dataclasses.replace(COSTS, inner="aot_eager")
    place = facts.index()["mm"]
    called = [33.0 if i == place else None for i in range(len(facts.node_names))]
    plain, known = host_times(module, facts, costs), host_times(module, facts, costs, called)
    assert (plain.node_us[place], known.node_us[place]) == (COSTS.library_us, 33.0)
    assert np.delete(plain.node_us, place).tolist() == np.delete(known.node_us, place).tolist()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_step_adds_its_entries_and_its_copies(inner: str) -> None:
    facts, times, _ = timed(inner, block, *matrices())
    step = times.step_us
    assert len(facts.backward_outputs) == 2
    assert step[ENTER_FORWARD] == COSTS.forward_us + 2 * COSTS.input_us
    assert step[ENTER_BACKWARD] == COSTS.backward_us
    assert step[LEAVE] == 2 * COSTS.gradient_us
    assert step[[SWAP_OUT, SWAP_IN, WAIT]].tolist() == [40.0, 41.0, 9.0]
    assert step[[ENCODE, DECODE]].tolist() == [60.0, 61.0]


def test_a_plan_for_a_slow_host_takes_longer_and_its_bound_with_it() -> None:
    """Offline, for a GPU with a host and for the same without."""
    with torch.device("meta"):
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
        batch = torch.empty(2048, 64)
    hosted = dataclasses.replace(PROFILE, host=(COSTS, dataclasses.replace(COSTS, inner="aot_eager")))
    for inner in ("aot_eager", "inductor"):
        plain, slow = (
            fxhome.plan(model, (batch,), "70%", device=profile, inner=inner, max_evaluations=1000)
            for profile in (PROFILE, hosted)
        )
        assert slow.predicted_step_seconds > plain.predicted_step_seconds + 1.5e-3
        assert slow.predicted_peak_bytes <= slow.budget_bytes
        assert any("bound by the host" in note for note in slow.notes)
        assert not plain.notes
        assert slow.gap is not None
        assert 0 <= slow.gap < 0.2


def test_what_is_told_of_a_host_that_is_waited_for() -> None:
    """The wait for the first launch is every step's, and is not told."""
    assert host_notes(np.array([900.0, 0.0, 100.0]), 1000.0) == ()
    (note,) = host_notes(np.array([900.0, 2000.0, 500.0]), 10_000.0)
    assert "wait 2.5 of 10.0 ms" in note
