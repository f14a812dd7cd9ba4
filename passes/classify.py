"""What may be done with one node of a joint graph: which side it runs on, and whether it may run twice."""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxhome.errors import UnsupportedGraphError
from fxhome.passes.capture import is_backward_seed, is_tangent, joint_outputs

# Namespaces whose functional ops are deterministic functions of their inputs unless tagged otherwise. A user's own op
# may
# read or write anything that its schema does not say, so it runs once.
_TRUSTED_NAMESPACES = frozenset({"aten", "prims", "inductor_prims", "quantized_decomposed", "torchvision"})
_ASSERTIONS = frozenset(
    {"aten::_assert_async", "aten::_assert_scalar", "aten::_assert_tensor_metadata", "aten::sym_constrain_range"}
)


def split_sides(graph: fx.Graph, num_fwd_outputs: int, saved: Collection[fx.Node] = frozenset()) -> dict[fx.Node, str]:
    """Say for every node whether it belongs to the "input", "forward" or "backward" side.

    Forward is what the forward outputs or a forward side effect need; backward is what reads a tangent, what autograd
    traced while running backward, and what reads such a node. Of `saved`, what reads no such thing is forward whenever
    it was traced: the mask of a relu is taken in the backward and worth keeping in place of the relu. Raises
    UnsupportedGraphError if a node is both.
    """
    required = forward_required(graph, num_fwd_outputs)
    sides: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            backward_input = is_tangent(node) or is_backward_seed(node)
            sides[node] = "tangent" if backward_input else "input"
        elif node.op == "output":
            sides[node] = "output"
        else:
            after = any(sides[source] in ("backward", "tangent") for source in node.all_input_nodes)
            tag = node.meta.get("partitioner_tag")
            if node in required:
                if after:
                    raise UnsupportedGraphError(
                        f"partition: node '{node.name}' ({node.target}) is needed by the forward but reads the "
                        "backward; "
                        "this graph cannot be split (report it together with the model)"
                    )
                sides[node] = "forward"
            elif after or tag == "must_be_in_backward" or (tag == "is_backward" and node not in saved):
                sides[node] = "backward"
            else:
                sides[node] = "forward"
    return sides


def forward_required(graph: fx.Graph, num_fwd_outputs: int) -> set[fx.Node]:
    """Nodes that the forward runs whatever is placed where."""
    outputs = joint_outputs(graph)
    return _ancestors([node for node in outputs[:num_fwd_outputs] if node is not None]) | _ancestors(
        [node for node in graph.nodes if _is_forward_effect(node)]
    )


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _is_forward_effect(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    tag = node.meta.get("partitioner_tag")
    if tag == "must_be_in_forward":
        return True
    return tag not in ("is_backward", "must_be_in_backward") and is_effectful(node)


def is_effectful(node: fx.Node) -> bool:
    """Whether running `node` does something besides computing its results."""
    if node.target is operator.getitem:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable) or node.is_impure(impure_random=False)
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def recompute_refusal(node: fx.Node) -> str | None:
    """Why `node` must not run a second time, or None if it may."""
    target = node.target
    if target is operator.getitem:
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target} is not a plain operator"
    namespace = target.namespace
    if "c10d" in namespace:
        return "a collective runs once"
    if is_effectful(node):
        return f"{target} has an effect besides its results"
    if namespace not in _TRUSTED_NAMESPACES and namespace != "prims":
        return f"'{namespace}' is a user's own operator library, which may keep state"
    if torch.Tag.nondeterministic_seeded in target.tags and not _is_silent_random(node):
        return "random, and its state is not kept"
    if str(target.name()).startswith("inductor_prims::inductor_seed"):
        return "draws a random seed"
    return None


def _is_silent_random(node: fx.Node) -> bool:
    """Attention operators are tagged random for their dropout; with a dropout of zero they draw nothing.

    Random Inductor prims are functions of a seed tensor, hence repeatable.
    """
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if str(target.name()).startswith("inductor_prims::inductor_random"):
        return True
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get("dropout_p", argument.default_value)
            )
            return isinstance(given, int | float) and given == 0
    return False


def checkpoint_policy(node: fx.Node) -> CheckpointPolicy | None:
    """The tag that the user's own torch.utils.checkpoint left on `node`."""
    policy: Any = node.meta.get("recompute")
    return policy if isinstance(policy, CheckpointPolicy) else None
