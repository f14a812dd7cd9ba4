"""Tracing without weights: as the inner backend would see the graph, and never a graph that is run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.graph_module import GraphModule

import fxhome
from fxhome.errors import UnsupportedGraphError
from fxhome.trace_offline import trace_joint
from tests.hazard_tools import fresh, warnings_of


def build(device: str) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 4)).to(
        device
    )


def operators(joint: GraphModule, *_: object) -> set[str]:
    return {str(node.target) for node in joint.graph.nodes if node.op == "call_function"}


def test_the_graph_is_what_the_inner_backend_would_plan() -> None:
    fresh()
    args = (torch.empty(2, 3, 8, 8, device="meta"),)
    plain, fused = (trace_joint(build("meta"), args, inner, operators) for inner in ("aot_eager", "inductor"))
    assert any("batch_norm" in name for name in plain)
    assert not any("batch_norm" in name for name in fused)  # Inductor takes it apart
    assert any("convolution_backward" in name for name in fused)


def test_for_a_gpu_it_is_taken_apart_as_inductor_does_there() -> None:
    """A bias gradient is a sum of its own, and a product over an inner size of 1 no call of a library."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 1)).to("meta")
    args = (torch.empty(2, 3, 8, 8, device="meta"),)

    def parts(joint: GraphModule, *_: object) -> tuple[list[bool], int]:
        (backward,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
        return backward.args[10], len(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))

    fresh()
    assert trace_joint(model, args, "inductor", parts) == ([False, True, True], 2)
    fresh()
    assert trace_joint(model, args, "inductor", parts, planned_for="cuda") == ([False, True, False], 1)
    fresh()
    assert trace_joint(model, args, "aot_eager", parts, planned_for="cuda") == ([False, True, True], 2)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_model_that_is_not_trained_has_no_graph(inner: str) -> None:
    fresh()
    with pytest.raises(UnsupportedGraphError, match="no training graph was found"):
        trace_joint(nn.ReLU(), (torch.empty(2, 3, device="meta"),), inner, operators)


class Breaking(nn.Module):
    """Two graphs: Dynamo cannot look into a number that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Looping(nn.Module):
    """A graph per call of `one`, none of which ends in the break."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Breaking() for _ in range(2))

    def one(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(part, Breaking)
        return part.first(x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = self.one(part, x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("model", [Breaking, Looping])
def test_a_plan_of_a_part_says_so(model: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    fresh()
    plan = fxhome.plan(model(), (torch.ones(4, 8),), "100%", device="cpu")
    (note,) = plan.notes
    assert note.startswith("only the first graph of this model is planned, not the whole step")
    assert warnings_of(caplog) == [f"fxhome: {note}"]


def test_a_plan_of_the_whole_has_no_note() -> None:
    fresh()
    assert fxhome.plan(nn.Linear(8, 8), (torch.ones(4, 8),), "100%", device="cpu").notes == ()


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((torch.ones(4, 3),), "RuntimeError: a and b must have same reduction dim, but got [4, 3] X [8, 8]"),
        ((), "TypeError: Linear.forward() missing 1 required positional argument: 'input'"),
    ],
)
def test_a_model_that_fails_is_one_error(inputs: tuple[torch.Tensor, ...], reason: str) -> None:
    fresh()
    with pytest.raises(UnsupportedGraphError, match="cannot be traced with these inputs") as refused:
        fxhome.plan(nn.Linear(8, 8), inputs, "100%", device="cpu")
    assert reason in str(refused.value)


class Routed(nn.Module):
    """How many rows go through the layer depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(x[torch.where(rows)[0]])


class Late(nn.Module):
    """A graph break before anything that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (Routed, (torch.ones(4, 8), torch.ones(4)), r"depends on the values of its data \(aten\.nonzero"),
        (Late, (torch.ones(4, 8),), r"the first graph of this model trains nothing.*: it breaks off at .*py:\d+ \("),
    ],
)
def test_what_can_only_be_planned_on_real_inputs_says_so(
    model: type[nn.Module], inputs: tuple[torch.Tensor, ...], reason: str
) -> None:
    fresh()
    with pytest.raises(UnsupportedGraphError, match=f"{reason}.*on real inputs with fxhome.optimize"):
        fxhome.plan(model(), inputs, "100%", device="cpu")


@pytest.mark.slow
def test_an_offline_plan_for_inductor_is_for_the_very_graph_that_inductor_runs() -> None:
    fresh()
    x = torch.randn(64, 3, 8, 8)
    offline = fxhome.plan(build("meta"), (x.to("meta"),), "100%", device="cpu", inner="inductor", max_evaluations=50)
    real = fxhome.optimize(build("cpu"), (x,), memory_budget="100%", inner="inductor", max_evaluations=50)
    assert offline.graph_fingerprint == real.plan.graph_fingerprint
