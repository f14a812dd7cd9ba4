"""Placing calls into a partitioned graph by their position in the program; shared by the inserting passes."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxhome.passes.capture import fake_mode_of
from fxhome.passes.partition import INSTRUCTION
from fxhome.placement import Instruction

ENCODED_OF = "fxhome_encoded_of"
"""meta key of a node that stands for a tensor in encoded form: the name of that tensor."""

_NOT_INHERITED = ("val", "tensor_meta", INSTRUCTION, "fxhome_clone_of", ENCODED_OF)


def inherited_meta(source: fx.Node) -> dict[str, Any]:
    """What a node that stands in for `source` takes over: where it comes from, not what it is."""
    return {key: value for key, value in source.meta.items() if key not in _NOT_INHERITED}


def anchors(graph: fx.Graph, program: Sequence[Instruction], base: int) -> list[fx.Node]:
    """For every instruction, the node before which a call at that place is inserted: the next executed one."""
    (output,) = graph.find_nodes(op="output")
    by_position = {node.meta[INSTRUCTION]: node for node in graph.nodes if INSTRUCTION in node.meta}
    found: list[fx.Node] = [output] * len(program)
    following: fx.Node = output
    for i in range(len(program) - 1, -1, -1):
        following = by_position.get(base + i, following)
        found[i] = following
    return found


def stand_in(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], source: fx.Node, name: str, **options: Any
) -> fx.Node:
    """A call where `graph` inserts just now, with `source`'s metadata and a fake value of its own."""
    node = graph.call_function(target, args, options)
    node.meta = inherited_meta(source)
    with fake_mode_of(source.meta["val"]):
        node.meta["val"] = target(*fx.node.map_arg(args, lambda argument: argument.meta["val"]), **options)
    node.name = graph._graph_namespace.create_name(name, None)
    return node


def insert_call(
    graph: fx.Graph, anchor: fx.Node, target: Any, args: tuple[Any, ...], source: fx.Node, position: int, name: str
) -> fx.Node:
    """Insert a call that stands in for `source` before `anchor`."""
    with graph.inserting_before(anchor):
        node = stand_in(graph, target, args, source, name)
    node.meta[INSTRUCTION] = position
    node.meta["fxhome_source"] = source.name
    return node


def carried(nodes: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """Nodes by the name of the tensor they stand for: an encoded one stands for its source."""
    table = {node.name: node for node in nodes}
    table.update({node.meta[ENCODED_OF]: node for node in nodes if ENCODED_OF in node.meta})
    return table


def geometry(node: fx.Node) -> tuple[list[int], list[int], int]:
    """Size, stride and storage offset of a node's value."""
    value = node.meta["val"]
    return [int(x) for x in value.shape], [int(x) for x in value.stride()], int(value.storage_offset())
