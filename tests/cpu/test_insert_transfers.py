"""Copies to and from the host in both graphs: text, counts, metadata, numbers under poison, and nothing without copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.graph_module import GraphModule

from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.partition import partition
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import KEEP, SWAP, Problem, simulate
from fxhome.passes.verify import verify_boundary, verify_transfers
from fxhome.placement import Instruction
from fxhome.runtime import ops
from fxhome.runtime.stand_in import CopyTiming, cpu_stand_in
from tests.graph_tools import EVERYTHING, chain, chain_inputs, normalized, placed, problem_of, targets

OPERATORS = (ops.swap_out, ops.swap_out_wait, ops.swap_in, ops.swap_in_wait)


def written(
    function: Any, *args: Any, code: int = SWAP, budget: int = 0
) -> tuple[GraphModule, GraphModule, int, tuple[Instruction, ...], Problem]:
    """Both graphs with every storage that may be swapped on the host; the tightest schedule unless told otherwise."""
    module, outputs = normalized(function, *args)
    facts, problem = problem_of(module, outputs)
    placement = placed(problem, code)
    program = schedule(facts, placement, simulate(problem, placement, budget))
    forward, backward = insert_transfers(*partition(module, program, outputs), program, outputs)
    return forward, backward, outputs, program, problem


def count(module: GraphModule, operator: Any) -> int:
    return sum(node.target is operator for node in module.graph.nodes)


def test_without_transfers_the_same_modules_come_back() -> None:
    module, outputs = normalized(chain, *chain_inputs())
    facts, problem = problem_of(module, outputs)
    placement = placed(problem, KEEP)
    program = schedule(facts, placement, simulate(problem, placement, EVERYTHING))
    sides = partition(module, program, outputs)
    assert insert_transfers(*sides, program, outputs) == sides


def test_before_and_after_in_text() -> None:
    def one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).sum()

    forward, backward, *_ = written(one, *chain_inputs())
    names = targets(forward.graph)
    assert names.index("aten.tanh.default") + 1 == names.index("fxhome.swap_out.default")
    assert names.index("fxhome.swap_out.default") < names.index("fxhome.swap_out_wait.default")
    back = targets(backward.graph)
    assert back.index("fxhome.swap_in.default") < back.index("fxhome.swap_in_wait.default")
    assert back.index("fxhome.swap_in_wait.default") < back.index("aten.tanh_backward.default")
    assert not any(node.name == "tanh" for node in backward.graph.nodes)  # only the host copy is handed over


@pytest.mark.parametrize("budget", [0, EVERYTHING], ids=["tight", "roomy"])
def test_counts_and_rules(budget: int) -> None:
    forward, backward, outputs, program, _ = written(chain, *chain_inputs(), budget=budget)
    moved = {item.target for item in program if item.kind == "swap_out"}
    assert len(moved) >= 6
    assert count(forward, ops.swap_out) == len(moved)
    assert count(forward, ops.swap_out_wait) + count(backward, ops.swap_out_wait) == len(moved)
    assert count(backward, ops.swap_in) == count(backward, ops.swap_in_wait) == len(moved)
    verify_boundary(forward, backward, outputs)
    verify_transfers(forward, backward)
    for side in (forward, backward):
        for node in side.graph.nodes:
            if node.target in OPERATORS:
                assert isinstance(node.meta["val"], torch.Tensor)
                assert node.meta["fxhome_source"] in moved


@pytest.mark.parametrize("timing", ["earliest", "latest"])
@pytest.mark.parametrize("budget", [0, EVERYTHING], ids=["tight", "roomy"])
def test_numbers_and_strides_under_poison(budget: int, timing: CopyTiming) -> None:
    def strided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight).t()
        return (y[::2].sin() * y[1::2].exp()).sum() + chain(x, weight)

    x, weight = chain_inputs()
    forward, backward, outputs, *_ = written(strided, x, weight, budget=budget)
    expected = strided(x, weight)
    expected.backward()
    with torch.no_grad(), cpu_stand_in(copy_timing=timing, poison=True):
        results = list(forward(x, weight.detach()))
        loss, saved = results[:outputs], results[outputs:]
        del results
        gradients = backward(*saved, torch.ones(()))
    assert torch.equal(loss[0], expected.detach())
    assert weight.grad is not None
    assert torch.equal(gradients[1], weight.grad)


def test_the_same_program_gives_the_same_graphs() -> None:
    texts = [[str(side.graph) for side in written(chain, *chain_inputs())[:2]] for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_wait_behind_the_forward_saves_the_source_too() -> None:
    """A copy that takes longer than the rest of the forward is waited for in the backward, where its source still lives."""
    module, outputs = normalized(chain, *chain_inputs())
    facts, problem = problem_of(module, outputs)
    slow = Problem(problem.arrays, problem.link._replace(d2h_us_per_byte=1.0), problem.allowed, problem.group)
    placement = placed(slow, SWAP)
    program = schedule(facts, placement, simulate(slow, placement, EVERYTHING))
    end = [item.kind for item in program].index("forward_end")
    late = [item.target for item in program[end:] if item.kind == "swap_out_wait"]
    assert late
    forward, backward = insert_transfers(*partition(module, program, outputs), program, outputs)
    verify_boundary(forward, backward, outputs)
    verify_transfers(forward, backward)
    taken = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
    for name in late:
        assert {name, f"{name}_host"} <= set(taken)
