"""Writing forward and backward as a program lists them: text, counts, order, copies, and the numbers that come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.graph_module import GraphModule

from fxhome.errors import PlanMismatchError
from fxhome.passes.partition import INSTRUCTION, partition
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, simulate
from fxhome.passes.verify import verify_partition
from fxhome.placement import Instruction
from tests.graph_tools import EVERYTHING, chain, chain_inputs, normalized, placed, problem_of, targets


def program_of(module: GraphModule, outputs: int, code: int) -> tuple[Instruction, ...]:
    facts, problem = problem_of(module, outputs)
    placement = placed(problem, code)
    return schedule(facts, placement, simulate(problem, placement, EVERYTHING))


def run(forward: GraphModule, backward: GraphModule, outputs: int, inputs: list[Any]) -> list[Any]:
    """Execute both graphs with tangents of one."""
    results = forward(*inputs)
    tangents = [torch.ones_like(result) for result in results[:outputs]]
    return [*results[:outputs], *backward(*results[outputs:], *tangents)]


def two_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight).sin().sum()


def test_before_and_after_in_text() -> None:
    module, outputs = normalized(two_products, *chain_inputs())
    forward, backward = partition(module, program_of(module, outputs, RECOMPUTE), outputs)
    assert targets(forward.graph) == ["aten.mm.default", "aten.tanh.default", "aten.sin.default", "aten.sum.default"]
    names = targets(backward.graph)
    assert names.index("aten.tanh.default") < names.index("aten.cos.default")
    assert names.count("aten.mm.default") == 2  # the product rebuilt, and the weight's gradient
    saved = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    assert saved == ["primals_1", "primals_2", "tangents_1"]


@pytest.mark.parametrize("code", [KEEP, RECOMPUTE, RECOMPUTE_EACH])
def test_counts_order_rules_and_numbers(code: int) -> None:
    x, weight = chain_inputs()
    module, outputs = normalized(chain, x, weight)
    program = program_of(module, outputs, code)
    before = str(module.graph)
    forward, backward = partition(module, program, outputs)
    assert str(module.graph) == before  # the joint graph is read only
    verify_partition(module, forward, backward, program, outputs)
    written = [node for side in (forward, backward) for node in side.graph.nodes if node.op == "call_function"]
    assert len(written) == sum(item.kind in ("op", "recompute") for item in program)
    assert [program[node.meta[INSTRUCTION]].target for node in written] == [
        item.target for item in program if item.kind in ("op", "recompute")
    ]
    with torch.no_grad():
        loss, _, gradient = run(forward, backward, outputs, [x, weight.detach()])
    expected = chain(x, weight)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert weight.grad is not None
    assert torch.equal(gradient, weight.grad)


def test_the_same_program_gives_the_same_graphs() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    program = program_of(module, outputs, RECOMPUTE)
    texts = [[str(side.graph) for side in partition(module, program, outputs)] for _ in range(2)]
    assert texts[0] == texts[1]


def test_the_backward_reads_the_clone_of_an_overwritten_input() -> None:
    scale = torch.full((64, 32), 0.5)

    def step(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight) * scale.cos()
        scale.mul_(2.0)
        return y.sin().sum()

    module, outputs = normalized(step, *chain_inputs(), scale)
    forward, backward = partition(module, program_of(module, outputs, RECOMPUTE), outputs)
    original = next(node.meta["fxhome_clone_of"] for node in module.graph.nodes if "fxhome_clone_of" in node.meta)
    taken = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    assert original not in taken
    assert f"fxhome_before_{original}" in taken
    clone = next(node for node in forward.graph.nodes if node.name == f"fxhome_before_{original}")
    order = list(forward.graph.nodes)
    write = next(node for node in order if "copy_" in str(node.target))
    assert order.index(clone) < order.index(write)


def test_a_program_of_another_graph_is_refused() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    program = (*program_of(module, outputs, KEEP), Instruction("op", "no_such_node"))
    with pytest.raises(PlanMismatchError, match="names 'no_such_node', which this graph does not have"):
        partition(module, program, outputs)
