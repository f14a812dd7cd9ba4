"""Tracing without weights: as the inner backend would see the graph, and never a graph that is run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.graph_module import GraphModule

import fxhome
from fxhome.errors import UnsupportedGraphError
from fxhome.trace_offline import trace_joint
from tests.hazard_tools import fresh


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


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_model_that_is_not_trained_has_no_graph(inner: str) -> None:
    fresh()
    with pytest.raises(UnsupportedGraphError, match="no training graph was found"):
        trace_joint(nn.ReLU(), (torch.empty(2, 3, device="meta"),), inner, operators)


@pytest.mark.slow
def test_an_offline_plan_for_inductor_is_for_the_very_graph_that_inductor_runs() -> None:
    fresh()
    x = torch.randn(64, 3, 8, 8)
    offline = fxhome.plan(build("meta"), (x.to("meta"),), "100%", device="cpu", inner="inductor", max_evaluations=50)
    real = fxhome.optimize(build("cpu"), (x,), memory_budget="100%", inner="inductor", max_evaluations=50)
    assert offline.graph_fingerprint == real.plan.graph_fingerprint
