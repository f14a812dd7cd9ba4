"""What may be written over what, judged from the graph: by cases, and against the code that Inductor then writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from fxhome.passes.facts import extract_facts
from fxhome.passes.fusion import is_pointwise, virtual_nodes
from fxhome.passes.problem import build_problem
from fxhome.passes.simulate import evaluate, simulate
from fxhome.passes.simulate_kernels import ALIAS, OWNER, VIRTUAL
from fxhome.passes.takers import find_takers
from tests.graph_tools import LINK, normalized, unit_costs

N = 64


def taken(function: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, tuple[str, ...]]:
    """Operand -> takers of a function's graph, by name."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    views = {node for node in nodes if node.target in (torch.ops.aten.t.default, torch.ops.aten.view.default)}
    virtual = virtual_nodes(nodes, views)
    kinds = {node: ALIAS if node in views else VIRTUAL if node in virtual else OWNER for node in nodes}
    found = find_takers(nodes, kinds)
    return {operand.name: tuple(taker.name for taker in takers) for operand, takers in found.items()}


def between_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Chains of loops between products: each chain is one kernel."""
    return torch.sin(torch.exp(x @ w).cos() @ w) @ w


def two_operands(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One result, two operands that could give it their memory."""
    return (torch.sin(x @ w) * (w @ x)) @ w


def through_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same elements in another shape."""
    return torch.sin((x @ w).view(2, N // 2, N)).view(N, N) @ w


def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The loop reads its operand at two places."""
    y = x @ w
    return (y + y.t()) @ w


def broadcast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The operand is smaller than the result."""
    return ((x @ w[:, :1]) * x) @ w


def other_type(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The result has another size."""
    return torch.sin(x @ w).double() @ w.double()


def beside_another_loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two loops over one operand, each read by a product: they may be one kernel. The sum is part of a product."""
    y = x @ w
    return torch.sin(y) @ w + torch.cos(y) @ w


def behind_a_reduction(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The other readers of the operand run before the loop in any case."""
    y = x @ w
    return ((y - y.sum(1, keepdim=True)) * 2) @ w


def computed_again_by_a_loop(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask computes the sine from the product too, in the same kernel."""
    y = torch.sin(x @ w)
    return y > 0, y.cumsum(0)


def written_before_a_loop(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product asks for the sine first: the mask reads it."""
    y = torch.sin(x @ w)
    return y @ w, y > 0


def inputs_only(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What the caller holds is not written over."""
    return (x + w) @ w


CASES = [
    (between_products, {"mm": ("cos",), "mm_1": ("sin",)}),
    (two_operands, {"mm": ("mul",), "mm_1": ("mul",)}),
    (through_a_view, {"mm": ("sin",)}),
    (transposed, {}),
    (broadcast, {}),
    (other_type, {}),
    (beside_another_loop, {}),
    (behind_a_reduction, {"mm": ("mul",)}),
    (computed_again_by_a_loop, {}),
    (written_before_a_loop, {"mm": ("sin",)}),
    (inputs_only, {}),
]


@pytest.mark.parametrize(("function", "expected"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_takers_by_case(function: Callable[..., Any], expected: dict[str, tuple[str, ...]]) -> None:
    assert taken(function, torch.randn(N, N), torch.randn(N, N)) == expected


@pytest.mark.parametrize("function", [function for function, _ in CASES])
def test_no_more_is_taken_than_the_code_takes(function: Callable[..., Any]) -> None:
    inputs = torch.randn(N, N), torch.randn(N, N)
    torch._dynamo.reset()
    patches = {"allow_buffer_reuse": False, "inplace_buffers": True, "fx_graph_cache": False, "cpp_wrapper": False}
    with torch._inductor.config.patch(patches), torch.no_grad():
        _, codes = run_and_get_code(torch.compile(function, backend="inductor"), *inputs)
    written = re.findall(r"buf\d+ = (?:reinterpret_tensor\()?buf\d+\b.*# reuse", "\n".join(codes))
    takers = {taker for takers in taken(function, *inputs).values() for taker in takers}
    assert len(takers) <= len(written)


def training(x: torch.Tensor, weight: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Products and activations, as a network's blocks have them."""
    return torch.nn.functional.gelu(torch.nn.functional.gelu(x @ weight) @ weight) @ last


def test_facts_and_the_simulator_know_what_is_taken_and_only_under_fusion() -> None:
    inputs = torch.randn(N, N), torch.randn(N, N, requires_grad=True), torch.randn(N, N, requires_grad=True)
    module, outputs = normalized(training, *inputs)
    plain, fused = extract_facts(module, outputs), extract_facts(module, outputs, fusing=True)
    assert not any(plain.takers)
    named = {
        storage.name: [fused.node_names[node] for node in takers]
        for storage, takers in zip(fused.storages, fused.takers, strict=True)
        if takers
    }
    by_name = {node.name: node for node in module.graph.nodes}
    assert named
    for operand, takers in named.items():
        for taker in takers:
            assert is_pointwise(by_name[taker])
            assert by_name[taker].meta["val"].stride() == by_name[operand].meta["val"].stride()
    problem = build_problem(fused, unit_costs(fused), LINK, ())
    none = problem.arrays._replace(taker_start=problem.arrays.taker_start * 0, taker_node=problem.arrays.taker_node[:0])
    placement = problem.keep_all()
    curve = simulate(problem, placement, 1 << 40).curve
    without = type(problem)(none, problem.link, problem.allowed, problem.group, problem.codecs)
    assert (curve <= simulate(without, placement, 1 << 40).curve).all()
    assert curve.sum() < simulate(without, placement, 1 << 40).curve.sum()
    assert evaluate(problem, placement, 1 << 40)[0] == curve.max()
