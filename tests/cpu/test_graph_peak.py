"""The peak read off written graphs, against the simulator's and against real storages counted while they run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxhome.passes.baseline import baseline_partition, baseline_placement
from fxhome.passes.graph_peak import GraphPeak, graph_peak
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.partition import partition
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP, simulate
from fxhome.passes.torch_compat import boxed_callable
from fxhome.runtime.meter import StorageMeter
from tests.graph_tools import EVERYTHING, chain, chain_inputs, joint_graph, normalized, placed, problem_of


def pooled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.dropout(torch.tanh(x @ weight), 0.25).view(1, 4, -1, 32)
    z, mean = F.max_pool2d(y.sin(), 2), y.mean(dim=-1)
    return z.exp().sum() + torch.var_mean(mean, dim=1)[0].sum()


def two_outputs(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tanh(x @ weight)
    return y, y.sin().exp() @ weight


FUNCTIONS: list[Callable[..., Any]] = [chain, pooled, two_outputs]
CODES = [KEEP, SWAP, RECOMPUTE, RECOMPUTE_EACH]


def measured(forward: Any, backward: Any, outputs: int, inputs: list[torch.Tensor]) -> int:
    """Bytes above the inputs while both graphs really run, tangents included."""
    first, second = boxed_callable(forward), boxed_callable(backward)
    gc.collect()
    with torch.no_grad(), StorageMeter(granule_bytes=1) as meter:
        meter.track(inputs)
        before = meter.current_bytes
        results = list(first(list(inputs)))
        visible, saved = results[:outputs], results[outputs:]
        del results
        tangents = [torch.ones_like(result) for result in visible]  # autograd holds them while the backward runs
        arguments = [*saved, *tangents]
        del saved
        gradients = second(arguments)
    del gradients, tangents
    return int(meter.peak_bytes - before)


@pytest.mark.parametrize("budget", [0, EVERYTHING], ids=["tight", "roomy"])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_simulated_read_and_measured_peaks_agree_to_the_byte(
    function: Callable[..., Any], code: int, budget: int
) -> None:
    x, weight = chain_inputs()
    module, outputs = normalized(function, x, weight)
    facts, problem = problem_of(module, outputs)
    placement = placed(problem, code)
    result = simulate(problem, placement, budget)
    program = schedule(facts, placement, result)
    sides = insert_transfers(*partition(module, program, outputs), program, outputs)
    read = graph_peak(*sides, outputs, "cpu", "cpu", {})
    assert read.peak_bytes == result.peak_bytes
    assert measured(*sides, outputs, [x, weight.detach()]) == result.peak_bytes


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_stock_partition_is_read_and_measured_alike(function: Callable[..., Any]) -> None:
    x, weight = chain_inputs()
    module, outputs = joint_graph(function, x, weight)
    sides = baseline_partition(module, [x, weight], outputs, None, None)
    read = graph_peak(*sides, outputs, "cpu", "cpu", {})
    assert read.peak_bytes == measured(*sides, outputs, [x, weight.detach()])
    assert read.boundary_bytes >= read.output_bytes > 0


def test_the_stock_placement_saves_what_the_stock_partition_saves() -> None:
    x, weight = chain_inputs()
    module, outputs = joint_graph(chain, x, weight)
    forward, _ = baseline_partition(module, [x, weight], outputs, None, None)
    work, _ = normalized(chain, x, weight)
    facts, problem = problem_of(work, outputs)
    placement = baseline_placement(work, facts, problem, forward, outputs)
    (output,) = forward.graph.find_nodes(op="output")
    saved = {node.name for node in output.args[0][outputs:]}
    kept = {s.name for s, code in zip(facts.storages, placement, strict=True) if s.is_activation and code == KEEP}
    assert {name for name in saved if not name.startswith("primals")} <= kept | saved
    assert any(code == RECOMPUTE for code in placement)


def test_symbolic_sizes_among_the_saved_take_nothing() -> None:
    """The stock partition of a dynamic graph hands sizes over, in another place than it saves them."""

    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        return (y.view(-1) * x.shape[0]).reshape(x.shape[0], -1).sin().mean() * (x.shape[0] + 1)

    module, outputs = joint_graph(scaled, *chain_inputs(), dynamic=True)
    forward, backward = baseline_partition(module, [], outputs, None, None)
    taken = [node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder"]
    assert any(isinstance(value, torch.SymInt) for value in taken)
    dynamic = graph_peak(forward, backward, outputs, "cpu", "cpu", {})
    module, outputs = joint_graph(scaled, *chain_inputs(), dynamic=False)
    static = graph_peak(*baseline_partition(module, [], outputs, None, None), outputs, "cpu", "cpu", {})
    assert abs(dynamic.peak_bytes - static.peak_bytes) <= 64  # a scalar more or less


def test_cuda_counts_by_its_granule() -> None:
    module, outputs = joint_graph(chain, *chain_inputs(rows=65, width=33))
    sides = baseline_partition(module, [], outputs, None, None)
    plain, rounded = (graph_peak(*sides, outputs, "cpu", kind, {}) for kind in ("cpu", "cuda"))
    assert isinstance(plain, GraphPeak)
    assert rounded.peak_bytes % 512 == 0
    assert rounded.peak_bytes > plain.peak_bytes
