"""Give the backward constants of its own: what is made from nothing is made again rather than saved.

    full -> where (forward)              full   -> where
    full -> where (backward)      =>     full_1 -> where        full_1 runs in the backward

A saved scalar is one more buffer that a generated kernel reads. A compiler writes a result that several readers would
compute from more than a few buffers, however large: four saved scalars of a cross-entropy loss cost the whole fp32
gradient of its logits.
"""

import torch
from torch import fx

from fxhome.passes.capture import fake_mode_of
from fxhome.passes.classify import forward_required, recompute_refusal, split_sides
from fxhome.passes.insert_nodes import inherited_meta


def separate_constants(module: fx.GraphModule, num_fwd_outputs: int) -> fx.GraphModule:
    """Change a joint graph in place, and return it: no constant of the forward is read by the backward.

    A constant is the result of an operator without tensor inputs that is neither random nor has an effect.
    """
    graph = module.graph
    required = forward_required(graph, num_fwd_outputs)
    sides = split_sides(graph, num_fwd_outputs)
    for node in list(graph.nodes):
        if not is_constant(node) or sides[node] != "forward":
            continue
        behind = [user for user in node.users if sides[user] == "backward"]
        if not behind:
            continue
        if len(behind) == len(node.users) and node not in required:
            node.meta["partitioner_tag"] = "is_backward"
            continue
        with graph.inserting_after(node):
            own = graph.create_node("call_function", node.target, node.args, node.kwargs)
        # A value of its own: with its source's it would pass for a view of it and count nothing.
        with fake_mode_of(node.meta["val"]):
            value = node.target(*node.args, **node.kwargs)
        own.meta = inherited_meta(node) | {"val": value, "partitioner_tag": "is_backward"}
        # Named after its source: the same graph gives the same names in whatever order it lists them.
        own.name = graph._graph_namespace.create_name(f"{node.name}_again", None)
        sides[own] = "backward"
        for user in behind:
            user.replace_input_with(node, own)
    module.recompile()
    return module


def is_constant(node: fx.Node) -> bool:
    """Whether `node` makes a tensor from nothing but numbers."""
    return (
        node.op == "call_function"
        and not node.all_input_nodes
        and isinstance(node.meta.get("val"), torch.Tensor)
        and recompute_refusal(node) is None
    )
