"""Write the forward and the backward graph that a program lists.

    joint graph, [op conv, op relu, forward_end, recompute relu, op relu_backward, ...]
        -> forward:  conv, relu                     returns its outputs and what the backward reads
        -> backward: relu (again), relu_backward    takes the saved tensors and the tangents

Order and copies come from the program alone. Transfers are not inserted here: a swapped tensor appears as a saved one.
Each node carries meta["fxhome_instruction"], its index in the program.
"""

from collections.abc import Sequence

from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.errors import PlanMismatchError
from fxhome.passes import torch_compat
from fxhome.passes.capture import is_backward_seed, is_tangent, joint_outputs
from fxhome.placement import Instruction

INSTRUCTION = "fxhome_instruction"


def partition(
    module: GraphModule, program: Sequence[Instruction], num_fwd_outputs: int
) -> tuple[GraphModule, GraphModule]:
    """Split a normalized joint graph as `program` says. The joint graph itself is not changed."""
    graph = module.graph
    by_name = {node.name: node for node in graph.nodes}
    unknown = [item.target for item in program if item.target and item.target not in by_name]
    if unknown:
        raise PlanMismatchError(
            f"partition: the plan names '{unknown[0]}', which this graph does not have; plan this model again "
            "instead of replaying"
        )
    clones = {node.meta["fxhome_clone_of"]: node for node in graph.nodes if "fxhome_clone_of" in node.meta}
    outputs = joint_outputs(graph)
    descriptions = torch_compat.output_descriptions(graph, len(outputs))
    end = next(i for i, item in enumerate(program) if item.kind == "forward_end")

    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and not is_tangent(node) and not is_backward_seed(node):
            env[node] = forward.node_copy(node, lambda n: env[n])
    for node in graph.nodes:
        if node.op == "get_attr" and any(user.op != "output" for user in node.users):
            env[node] = forward.node_copy(node, lambda n: env[n])
    for position, item in enumerate(program[:end]):
        if item.kind == "op":
            node = by_name[item.target]
            env[node] = forward.node_copy(node, lambda n: env[n])
            env[node].meta[INSTRUCTION] = position

    backward = fx.Graph()
    saved: dict[fx.Node, fx.Node] = {}
    present: dict[fx.Node, fx.Node] = {}
    demanded = _demanded(by_name, clones, program[end + 1 :])
    for node in demanded:
        if node.op != "get_attr" and not is_tangent(node) and not is_backward_seed(node):
            saved[node] = backward.placeholder(node.name)
            saved[node].meta = dict(node.meta)
            saved[node].name = node.name
            present[node] = saved[node]
    for node in graph.nodes:
        if node.op == "placeholder" and (is_tangent(node) or is_backward_seed(node)):
            present[node] = backward.node_copy(node)
    for node in demanded:
        if node.op == "get_attr":
            present[node] = backward.node_copy(node)

    def lookup(node: fx.Node) -> fx.Node:
        return present[clones.get(node.name, node)]

    for position, item in enumerate(program[end + 1 :], start=end + 1):
        if item.kind in ("op", "recompute"):
            node = by_name[item.target]
            copy = backward.node_copy(node, lookup)
            copy.meta = dict(node.meta)
            copy.meta[INSTRUCTION] = position
            copy.meta["autograd_backward"] = True
            present[node] = copy

    results: list[fx.Node | None] = [None if node is None else env[node] for node in outputs[:num_fwd_outputs]]
    kept = [env[node] for node in saved]
    out = forward.output((*results, *kept))
    out.meta["desc"] = descriptions[:num_fwd_outputs] + torch_compat.saved_descriptions(len(kept))
    out = backward.output(tuple(None if node is None else present[node] for node in outputs[num_fwd_outputs:]))
    out.meta["desc"] = descriptions[num_fwd_outputs:]
    forward.lint()
    backward.lint()
    return torch_compat.make_module(module, forward), torch_compat.make_module(module, backward)


def _demanded(by_name: dict[str, fx.Node], clones: dict[str, fx.Node], program: Sequence[Instruction]) -> list[fx.Node]:
    """Nodes that the backward reads before it defines them, in order of first reading."""
    defined: set[fx.Node] = set()
    demanded: dict[fx.Node, None] = {}
    for item in program:
        if item.kind not in ("op", "recompute"):
            continue
        node = by_name[item.target]
        for source in node.all_input_nodes:
            actual = clones.get(source.name, source)
            if actual not in defined:
                demanded[actual] = None
        defined.add(node)
    return list(demanded)
