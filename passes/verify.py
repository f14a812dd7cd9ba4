"""The graph rules, as code. Run after each step in tests, and for users under `verify=True`.

Raises GraphRuleError, naming the rule, the node and what was found. These are rules about our own rewrite: a breach is a
bug in fxhome, never a user's mistake.
"""

from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.errors import GraphRuleError
from fxhome.passes.classify import recompute_refusal
from fxhome.placement import Instruction
from fxhome.runtime import ops


def _fail(rule: str, node: fx.Node, found: str) -> GraphRuleError:
    return GraphRuleError(f"verify: {rule}: node '{node.name}' ({node.target}): {found}; this is a bug in fxhome, please report it with the plan file")


def verify_partition(
    joint: GraphModule, forward: GraphModule, backward: GraphModule, program: Iterable[Instruction], num_fwd_outputs: int
) -> None:
    """Forward outputs and backward inputs agree, nothing forbidden is recomputed, every value is present."""
    verify_boundary(forward, backward, num_fwd_outputs)
    by_name = {node.name: node for node in joint.graph.nodes}
    for item in program:
        if item.kind == "recompute" and (refusal := recompute_refusal(by_name[item.target])) is not None:
            raise _fail("a recomputed node must be repeatable", by_name[item.target], refusal)
    for module in (forward, backward):
        module.graph.lint()
        for node in module.graph.nodes:
            if node.op in ("call_function", "placeholder") and "val" not in node.meta:
                raise _fail("every node has a value", node, "meta['val'] is missing")


def verify_boundary(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> None:
    """What the forward saves is what the backward takes: same order, shapes, strides, dtypes and devices."""
    (output,) = forward.graph.find_nodes(op="output")
    saved = list(output.args[0])[num_fwd_outputs:]
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"][: len(saved)]
    if len(inputs) != len(saved):
        raise _fail("saved tensors and backward inputs agree", output, f"{len(saved)} saved, {len(inputs)} taken")
    for given, taken in zip(saved, inputs, strict=True):
        left, right = given.meta["val"], taken.meta["val"]
        if isinstance(left, torch.Tensor) and _signature(left) != _signature(right):
            raise _fail("saved tensors and backward inputs agree", taken, f"saved {_signature(left)}, taken {_signature(right)}")


def _signature(value: torch.Tensor) -> tuple[object, ...]:
    return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


def verify_transfers(forward: GraphModule, backward: GraphModule) -> None:
    """Each swap-out has one wait before its host copy is read or its source released; each swap-in one before its reader."""
    waits_out = 0
    outs = 0
    for module in (forward, backward):
        released: set[fx.Node] = set()
        for node in module.graph.nodes:
            for source in node.all_input_nodes:
                if source in released and node.op != "output":
                    raise _fail("no reader of a released tensor", node, f"reads '{source.name}' after its swap-out was waited for")
            if node.target is ops.swap_out:
                outs += 1
                waits = [user for user in node.users if user.target is ops.swap_out_wait]
                others = [user for user in node.users if user.target is not ops.swap_out_wait and user.op != "output"]
                if len(waits) > 1 or others:
                    raise _fail("one wait for each swap-out", node, f"{len(waits)} waits, other readers {[user.name for user in others]}")
            elif node.target is ops.swap_out_wait:
                waits_out += 1
                released.add(node.args[1])
            elif node.target is ops.swap_in:
                waits = [user for user in node.users if user.target is ops.swap_in_wait]
                others = [user for user in node.users if user.target is not ops.swap_in_wait]
                if len(waits) != 1 or others:
                    raise _fail("one wait for each swap-in", node, f"{len(waits)} waits, other readers {[user.name for user in others]}")
                host = node.args[0]
                if host.op == "placeholder" and any(user.target is ops.swap_out_wait for user in host.users):
                    raise _fail("a host copy is read only after its wait", node, f"reads '{host.name}', whose wait is elsewhere")
            elif node.target is ops.swap_in_wait and node.args[0].target is not ops.swap_in:
                raise _fail("a wait follows its swap-in", node, f"waits for '{node.args[0]}'")
    if outs != waits_out:
        raise _fail("one wait for each swap-out", next(iter(forward.graph.nodes)), f"{outs} swap-outs, {waits_out} waits")
