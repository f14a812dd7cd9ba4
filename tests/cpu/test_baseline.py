"""What the inner compiler's own partition saves: written, a decision, and taken as soon as it can be."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

import fxhome
from fxhome.backend import fxhome as backend
from fxhome.passes.baseline import take_saved_early
from fxhome.passes.classify import split_sides
from fxhome.passes.facts import storage_key
from fxhome.passes.fusion import virtual_nodes
from tests.graph_tools import chain, chain_inputs, normalized

aten = torch.ops.aten


def fire() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A relu that only a concatenation and its own mask read; the mask was traced behind everything else."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    relu = graph.call_function(aten.relu.default, (product,))
    cat = graph.call_function(aten.cat.default, ([relu, x],))
    late = graph.call_function(aten.mm.default, (cat, x))
    mask = graph.call_function(aten.le.Scalar, (relu, 0))
    mask.meta["partitioner_tag"] = "is_backward"
    where = graph.call_function(aten.where.self, (mask, x, x))
    graph.output((late, where))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4)
    return graph, {"relu": relu, "cat": cat, "late": late, "mask": mask, "where": where}


def test_a_mask_that_is_saved_is_written_forward_and_early() -> None:
    graph, node = fire()
    mask = node["mask"]
    nodes = [n for n in graph.nodes if n.op != "output"]
    assert mask in virtual_nodes(nodes, set())
    assert mask not in virtual_nodes(nodes, set(), {mask})
    assert split_sides(graph, 1)[mask] == "backward"
    assert split_sides(graph, 1, {mask})[mask] == "forward"

    key = storage_key(mask.meta["val"])
    assert key is not None
    take_saved_early(fx.GraphModule(nn.Module(), graph), frozenset({key}))

    assert node["relu"].next is mask
    assert [n.name for n in graph.nodes][-2:] == [node["where"].name, "output"]
    graph.lint()


def test_what_reads_a_tangent_is_never_forward() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    sides = split_sides(module.graph, outputs, set(module.graph.nodes))
    for node in module.graph.nodes:
        if any(sides[source] in ("tangent", "backward") for source in node.all_input_nodes):
            assert sides[node] in ("backward", "output")


class Fire(nn.Module):
    """Two branches behind one another, joined by a concatenation, twice: as in SqueezeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 1)]) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, 8, height, width)."""
        for left, right, squeeze in self.layers:
            x = squeeze(torch.cat([left(x).relu(), right(x).relu()], 1)).relu()
        return x.square().mean()


def test_gradients_with_saved_masks_are_those_of_inductor(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x = Fire(), torch.randn(8, 8, 32, 32)

    def gradients(**how: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        torch.compile(own, **how)(x).backward()
        return [weight.grad for weight in own.parameters() if weight.grad is not None]

    stock = gradients(backend="inductor")
    planned = gradients(backend=backend, options={"memory_budget": "75%", "inner": "inductor", "max_evaluations": 400})

    (plan,) = fxhome.plans()
    assert plan.predicted_peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    for found, wanted in zip(planned, stock, strict=True):
        torch.testing.assert_close(found, wanted)
