"""Each graph rule against a graph that breaks it, and a rewrite that keeps them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.errors import GraphRuleError
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.partition import partition
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import SWAP, simulate
from fxhome.passes.verify import verify_boundary, verify_partition, verify_transfers
from fxhome.placement import Instruction
from fxhome.runtime import ops
from tests.graph_tools import chain_inputs, normalized, placed, problem_of

Written = tuple[GraphModule, GraphModule, GraphModule, tuple[Instruction, ...], int]


def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x @ weight).sin(), 0.5).cos().sum()


@pytest.fixture
def rewritten() -> Written:
    module, outputs = normalized(function, *chain_inputs())
    facts, problem = problem_of(module, outputs)
    placement = placed(problem, SWAP)
    program = schedule(facts, placement, simulate(problem, placement, 0))
    forward, backward = insert_transfers(*partition(module, program, outputs), program, outputs)
    return module, forward, backward, program, outputs


def first(module: GraphModule, target: object) -> fx.Node:
    return next(node for node in module.graph.nodes if node.target is target)


def test_a_rewrite_keeps_every_rule(rewritten: Written) -> None:
    joint, forward, backward, program, outputs = rewritten
    verify_boundary(forward, backward, outputs)
    verify_transfers(forward, backward)
    verify_partition(joint, *partition(joint, program, outputs), program, outputs)


def test_saved_tensors_and_inputs_agree_in_number(rewritten: Written) -> None:
    _, forward, backward, _, outputs = rewritten
    (output,) = forward.graph.find_nodes(op="output")
    inputs = backward.graph.find_nodes(op="placeholder")
    output.args = ((*output.args[0], *[output.args[0][-1]] * len(inputs)),)
    with pytest.raises(GraphRuleError, match="saved tensors and backward inputs agree"):
        verify_boundary(forward, backward, outputs)


def test_saved_tensors_and_inputs_agree_in_layout(rewritten: Written) -> None:
    _, forward, backward, _, outputs = rewritten
    taken = next(node for node in backward.graph.nodes if node.meta["val"].dim() == 2)
    with taken.meta["val"].fake_mode:
        taken.meta["val"] = taken.meta["val"].t()
    with pytest.raises(GraphRuleError, match=rf"agree: node '{taken.name}' .*saved \(\("):
        verify_boundary(forward, backward, outputs)


def test_nothing_random_is_rebuilt(rewritten: Written) -> None:
    joint, _, _, program, outputs = rewritten
    sides = partition(joint, program, outputs)
    name = next(node.name for node in joint.graph.nodes if "native_dropout.default" in str(node.target))
    with pytest.raises(GraphRuleError, match=f"must be repeatable: node '{name}'.* random"):
        verify_partition(joint, *sides, (*program, Instruction("recompute", name)), outputs)


def test_every_node_has_a_value(rewritten: Written) -> None:
    joint, _, _, program, outputs = rewritten
    forward, backward = partition(joint, program, outputs)
    node = next(node for node in forward.graph.nodes if node.name == "tanh")
    del node.meta["val"]
    with pytest.raises(GraphRuleError, match="node 'tanh' .* is missing"):
        verify_partition(joint, forward, backward, program, outputs)


def drop_wait_out(forward: GraphModule, backward: GraphModule) -> None:
    wait = first(forward, ops.swap_out_wait)
    wait.replace_all_uses_with(wait.args[0])
    forward.graph.erase_node(wait)


def double_wait_out(forward: GraphModule, backward: GraphModule) -> None:
    wait = first(forward, ops.swap_out_wait)
    with forward.graph.inserting_after(wait):
        forward.graph.call_function(ops.swap_out_wait, wait.args)


def read_released(forward: GraphModule, backward: GraphModule) -> None:
    wait = first(forward, ops.swap_out_wait)
    with forward.graph.inserting_after(wait):
        forward.graph.call_function(torch.ops.aten.sin.default, (wait.args[1],))


def read_host_copy(forward: GraphModule, backward: GraphModule) -> None:
    out = first(forward, ops.swap_out)
    with forward.graph.inserting_after(out):
        forward.graph.call_function(torch.ops.aten.sin.default, (out,))


def drop_wait_in(forward: GraphModule, backward: GraphModule) -> None:
    wait = first(backward, ops.swap_in_wait)
    wait.replace_all_uses_with(wait.args[0])
    backward.graph.erase_node(wait)


def read_before_wait_in(forward: GraphModule, backward: GraphModule) -> None:
    arriving = first(backward, ops.swap_in)
    with backward.graph.inserting_after(arriving):
        backward.graph.call_function(torch.ops.aten.sin.default, (arriving,))


def wait_for_something_else(forward: GraphModule, backward: GraphModule) -> None:
    wait = first(backward, ops.swap_in_wait)
    with backward.graph.inserting_after(wait):
        backward.graph.call_function(ops.swap_in_wait, (wait, wait.args[1]))


def read_host_before_its_late_wait(forward: GraphModule, backward: GraphModule) -> None:
    arriving = first(backward, ops.swap_in)
    with backward.graph.inserting_before(arriving):
        backward.graph.call_function(ops.swap_out_wait, (arriving.args[0], arriving.args[0]))


Breach = Callable[[GraphModule, GraphModule], None]
BREACHES: list[tuple[Breach, str]] = [
    (drop_wait_out, "one wait for each swap-out"),
    (double_wait_out, "one wait for each swap-out|no reader of a released tensor"),
    (read_released, "no reader of a released tensor"),
    (read_host_copy, "one wait for each swap-out"),
    (drop_wait_in, "one wait for each swap-in"),
    (read_before_wait_in, "one wait for each swap-in"),
    (wait_for_something_else, "a wait follows its swap-in"),
    (read_host_before_its_late_wait, "a host copy is read only after its wait|no reader of a released tensor"),
]


@pytest.mark.parametrize(("breach", "rule"), BREACHES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_transfer_is_named(rewritten: Written, breach: Breach, rule: str) -> None:
    _, forward, backward, _, _ = rewritten
    breach(forward, backward)
    with pytest.raises(GraphRuleError, match=rule) as error:
        verify_transfers(forward, backward)
    assert "this is a bug in fxhome" in str(error.value)
