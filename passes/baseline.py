"""What the inner backend would do by itself: its default min-cut partition, as graphs and as a placement.

Both aot_eager and Inductor partition by min-cut. fxhome returns exactly these graphs where they fit the budget,
measures
every share ("60%") against their peak, and starts the search from their placement.
"""

import torch
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.passes import torch_compat
from fxhome.passes.capture import last_result, mutated_input
from fxhome.passes.facts import GraphFacts, storage_key
from fxhome.passes.simulate import KEEP, RECOMPUTE, Placements, Problem


def copy_joint(module: GraphModule) -> GraphModule:
    """A joint graph that can be changed without changing `module`; node names and values are shared."""
    return fx.GraphModule(module, torch_compat.copy_graph(module.graph))


def baseline_partition(
    module: GraphModule,
    inputs: object,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None,
    compiler: str | None,
) -> tuple[GraphModule, GraphModule]:
    """The stock partition of (a copy of) `module`."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    options = {"compiler": compiler} if compiler is not None else {}
    forward, backward = min_cut_rematerialization_partition(
        copy_joint(module),
        inputs,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices,
        **options,
    )
    return forward, backward


def baseline_placement(
    module: GraphModule, facts: GraphFacts, problem: Problem, forward: GraphModule, num_fwd_outputs: int
) -> Placements:
    """The min-cut's saved set in the search's terms: what it saves is kept, what it does not save is recomputed."""
    saved = saved_storages(forward, num_fwd_outputs)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    placement = problem.keep_all()
    for storage, root in enumerate(facts.storage_root):
        if root < 0 or not problem.allowed[storage, RECOMPUTE]:
            continue
        value = nodes[root].meta.get("val")
        kept = isinstance(value, torch.Tensor) and storage_key(value) in saved
        placement[storage] = KEEP if kept and problem.allowed[storage, KEEP] else RECOMPUTE
    return placement


def saved_storages(forward: GraphModule, num_fwd_outputs: int) -> frozenset[object]:
    """The storages (`storage_key`) that a partitioned forward hands to its backward."""
    values = [node.meta.get("val") for node in _saved_nodes(forward, num_fwd_outputs)]
    return frozenset(key for value in values if (key := storage_key(value)) is not None)


def _saved_nodes(forward: GraphModule, num_fwd_outputs: int) -> list[fx.Node]:
    (output,) = forward.graph.find_nodes(op="output")
    return [node for node in list(output.args[0])[num_fwd_outputs:] if isinstance(node, fx.Node)]


def take_saved_early(module: GraphModule, saved: frozenset[object]) -> None:
    """Move, in place, what the partition saves and autograd traced late to where its operands are there.

    The mask of a relu stands in the backward of a joint graph; taken at the end of the forward it would keep the relu's
    operand alive until then.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.meta.get("partitioner_tag") != "is_backward":
            continue
        if storage_key(node.meta.get("val")) not in saved or not node.all_input_nodes:
            continue
        last = max(node.all_input_nodes, key=order.__getitem__)
        if last.op == "placeholder":
            continue
        last_result(last).append(node)
        order[node] = order[last]


def overwritten_saved(forward: GraphModule, num_fwd_outputs: int) -> tuple[str, ...]:
    """Inputs that a stock forward saves for the backward and overwrites itself.

    What the backward rebuilds from them is wrong, silently (pytorch#197039): such graphs are not used.
    """
    saved = set(_saved_nodes(forward, num_fwd_outputs))
    overwritten = {mutated_input(node) for node in forward.graph.nodes}
    return tuple(sorted(node.name for node in saved if node in overwritten))
