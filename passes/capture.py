"""Bring a joint graph into the one form that every later step assumes.

    joint graph of AOTAutograd (aot_eager or Inductor, symbolic or not)
        -> no symbolic sizes: each one used is a number now, guarded by torch
        -> one getitem per result of a multi-output node, standing right behind it
        -> a clone of every input that the step overwrites and that the backward (or a recomputed node) may read
        -> every node has meta["val"]

The graph stays a valid joint graph throughout; nothing here decides anything about memory.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fxhome.errors import UnsupportedGraphError
from fxhome.passes.origin import made_at
from fxhome.passes.torch_compat import has_unbacked_symbols

CLONE_PREFIX = "fxhome_before_"


def joint_outputs(graph: fx.Graph) -> list[fx.Node | None]:
    """The flat outputs of a joint graph: forward outputs first, then gradients (None where there is none)."""
    (output,) = graph.find_nodes(op="output")
    return list(tree_flatten(output.args)[0])


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is the gradient of a forward output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_backward_seed(node: fx.Node) -> bool:
    """Whether a placeholder carries random state for the backward only."""
    return node.op == "placeholder" and "bwd_seed" in str(node.target)


def mutated_input(node: fx.Node) -> fx.Node | None:
    """The placeholder that `node` writes to, if it is the copy_ that ends a functionalised mutation."""
    if node.op != "call_function" or node.target is not torch.ops.aten.copy_.default:
        return None
    target = node.args[0]
    return target if isinstance(target, fx.Node) and target.op == "placeholder" else None


def last_result(node: fx.Node) -> fx.Node:
    """`node`, or the last of the getitems that stand behind it."""
    while node.next.target is operator.getitem:
        node = node.next
    return node


def normalize(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite `module` in place into the form described above and return it.

    Raises UnsupportedGraphError where a node has no value that sizes can be taken from.
    """
    graph = module.graph
    for node in graph.nodes:
        _refuse_unknown_sizes(node)
    _specialise_symbols(graph)
    _one_getitem_per_result(graph)
    _clone_overwritten_inputs(graph)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            infer_value(node)
    graph.lint()
    module.recompile()
    return module


def _refuse_unknown_sizes(node: fx.Node) -> None:
    """Raise UnsupportedGraphError where a recorded value, or a size of it, is no number before the step runs."""
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.SymInt) and value.node.is_nested_int():
            raise UnsupportedGraphError(
                "capture: the graph takes a nested (jagged) tensor, whose bytes no plan can know before the step; pad "
                "it, or keep nested tensors outside the compiled region (torch.compiler.disable)"
            )
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and has_unbacked_symbols(
            value
        ):
            raise UnsupportedGraphError(
                f"capture: node '{node.name}' ({node.target}){made_at(node)} has a size or a number that depends on "
                "the data of each step, so no plan can know it; leave capture_dynamic_output_shape_ops and "
                "capture_scalar_outputs of torch._dynamo.config off, so that the graph breaks there"
            )


def _specialise_symbols(graph: fx.Graph) -> None:
    """Replace every symbolic number by its value: `int()` of a SymInt guards it, so no other size runs here."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, symbolic):
            number = _concrete(value)
            for user in list(node.users):
                user.args = _substitute(user.args, node, number)
                user.kwargs = _substitute(user.kwargs, node, number)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and isinstance(node.meta.get("val"), symbolic) and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = tree_map(_concrete, node.args)
            node.kwargs = tree_map(_concrete, node.kwargs)


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return value


def _substitute(arguments: Any, old: fx.Node, number: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: number if node is old else node)


def _one_getitem_per_result(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), tuple | list):
            continue
        items: dict[Any, fx.Node] = {}
        for user in list(node.users):
            if user.target is not operator.getitem:
                continue
            first = items.setdefault(user.args[1], user)
            if first is not user:
                user.replace_all_uses_with(first)
                graph.erase_node(user)
        anchor = node
        for index in sorted(items):
            anchor.append(items[index])
            anchor = items[index]


def _clone_overwritten_inputs(graph: fx.Graph) -> None:
    """Insert clones; whoever does not read them costs nothing, since unread nodes are not executed."""
    overwritten: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if (target := mutated_input(node)) is not None:
            overwritten[target] = None
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1]
    anchor = last_placeholder
    for source in overwritten:
        if not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_after(anchor):
            clone = graph.call_function(torch.ops.aten.clone.default, (source,))
        clone.meta = {key: source.meta[key] for key in ("val", "tensor_meta") if key in source.meta}
        with fake_mode_of(source.meta["val"]):
            clone.meta["val"] = torch.ops.aten.clone.default(source.meta["val"])
        clone.meta["fxhome_clone_of"] = source.name
        clone.name = graph._graph_namespace.create_name(CLONE_PREFIX + source.name, None)
        anchor = clone


def fake_mode_of(value: torch.Tensor) -> Any:
    """The mode that a recorded value was traced in. Raises UnsupportedGraphError where there is none."""
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        raise UnsupportedGraphError(
            "capture: a graph input carries no fake value; trace the model through torch.compile or fxhome.optimize"
        )
    return mode


def infer_value(node: fx.Node) -> None:
    """Give a node that a pattern pass inserted the fake value it lacks, by running it on its inputs' fake values."""
    missing = [source.name for source in node.all_input_nodes if "val" not in source.meta]
    if missing or not isinstance(node.target, torch._ops.OpOverload):
        raise UnsupportedGraphError(
            f"capture: node '{node.name}' ({node.target}) has no recorded value, so its size is unknown; "
            "report the model, or compile it with inner='aot_eager'"
        )
    arguments = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    keywords = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
    tensors = [leaf for leaf in tree_flatten((arguments, keywords))[0] if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise UnsupportedGraphError(
            f"capture: node '{node.name}' ({node.target}) reads no tensor and has no recorded value"
        )
    with fake_mode_of(tensors[0]):
        node.meta["val"] = node.target(*arguments, **keywords)
