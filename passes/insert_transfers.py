"""Insert the copies to and from the host that a program lists into a partitioned forward and backward.

    forward                                       backward
      relu = aten.relu(x)                           (relu_host)                       saved instead of relu
      relu_host = fxhome.swap_out(relu)             ...
      ...                                           relu_in = fxhome.swap_in(relu_host, size, stride, ...)
      relu_host_1 = fxhome.swap_out_wait(           ...
          relu_host, relu)                          relu_1 = fxhome.swap_in_wait(relu_in, relu_host)
      return ..., relu_host_1                       relu_backward = aten.threshold_backward(..., relu_1)

A wait that the program puts behind `forward_end` stands in the backward; the source is then saved beside the host copy,
because it must live until that wait. Inserted nodes carry their source's metadata and a fake value of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.passes import torch_compat
from fxhome.passes.partition import INSTRUCTION
from fxhome.placement import Instruction
from fxhome.runtime import ops

TRANSFERS = frozenset({"swap_out", "swap_out_wait", "swap_in", "swap_in_wait"})


def insert_transfers(
    forward: GraphModule, backward: GraphModule, program: Sequence[Instruction], num_fwd_outputs: int
) -> tuple[GraphModule, GraphModule]:
    """Insert every transfer of `program`; with none in it, the modules come back unchanged."""
    if not any(item.kind in TRANSFERS for item in program):
        return forward, backward
    end = next(i for i, item in enumerate(program) if item.kind == "forward_end")
    moved = {item.target for item in program if item.kind == "swap_out"}
    late = {item.target for item in program[end:] if item.kind == "swap_out_wait"}
    hosts = _insert_forward(forward.graph, program[:end], moved, late, num_fwd_outputs)
    _insert_backward(backward.graph, program, end, moved, late, hosts)
    forward.graph.lint()
    backward.graph.lint()
    return torch_compat.make_module(forward, forward.graph), torch_compat.make_module(backward, backward.graph)


def _anchors(graph: fx.Graph, program: Sequence[Instruction], base: int) -> list[fx.Node]:
    """For every instruction, the node before which a transfer at that place is inserted: the next executed one."""
    (output,) = graph.find_nodes(op="output")
    by_position = {node.meta[INSTRUCTION]: node for node in graph.nodes if INSTRUCTION in node.meta}
    anchors: list[fx.Node] = [output] * len(program)
    following: fx.Node = output
    for i in range(len(program) - 1, -1, -1):
        following = by_position.get(base + i, following)
        anchors[i] = following
    return anchors


def _call(graph: fx.Graph, anchor: fx.Node, target: Any, args: tuple[Any, ...], source: fx.Node, position: int, name: str) -> fx.Node:
    with graph.inserting_before(anchor):
        node = graph.call_function(target, args)
    node.meta = {key: value for key, value in source.meta.items() if key not in ("val", "tensor_meta", INSTRUCTION, "fxhome_clone_of")}
    values = fx.node.map_arg(args, lambda argument: argument.meta["val"])
    with source.meta["val"].fake_mode:
        node.meta["val"] = target(*values)
    node.meta[INSTRUCTION] = position
    node.meta["fxhome_source"] = source.name
    node.name = graph._graph_namespace.create_name(name, None)
    return node


def _insert_forward(graph: fx.Graph, program: Sequence[Instruction], moved: set[str], late: set[str], num_fwd_outputs: int) -> dict[str, fx.Node]:
    by_name = {node.name: node for node in graph.nodes}
    hosts: dict[str, fx.Node] = {}
    for position, (item, anchor) in enumerate(zip(program, _anchors(graph, program, 0), strict=True)):
        source = by_name.get(item.target)
        if item.kind == "swap_out":
            assert source is not None
            hosts[item.target] = _call(graph, anchor, ops.swap_out, (source,), source, position, f"{item.target}_host")
        elif item.kind == "swap_out_wait":
            assert source is not None
            arguments = (hosts[item.target], source)
            hosts[item.target] = _call(graph, anchor, ops.swap_out_wait, arguments, source, position, f"{item.target}_host_done")
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    saved: list[Any] = []
    for node in results[num_fwd_outputs:]:
        if node.name in moved:
            saved.append(hosts[node.name])
            if node.name in late:
                saved.append(node)
        else:
            saved.append(node)
    descriptions = output.meta.get("desc", [None] * len(results))[:num_fwd_outputs]
    output.args = (tuple(results[:num_fwd_outputs] + saved),)
    output.meta["desc"] = list(descriptions) + torch_compat.saved_descriptions(len(saved))
    return hosts


def _insert_backward(graph: fx.Graph, program: Sequence[Instruction], end: int, moved: set[str], late: set[str], hosts: dict[str, fx.Node]) -> None:
    sources = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    hosts_here: dict[str, fx.Node] = {}
    waiting: dict[str, fx.Node] = {}
    arrived: dict[str, fx.Node] = {}
    for name in [node.name for node in graph.nodes if node.op == "placeholder" and node.name in moved]:
        with graph.inserting_before(sources[name]):
            host = graph.placeholder(f"{name}_host")
        host.meta = {"val": hosts[name].meta["val"], "fxhome_source": name, "fxhome_host": True}
        hosts_here[name] = host
    body = program[end + 1 :]
    for position, (item, anchor) in enumerate(zip(body, _anchors(graph, body, end + 1), strict=True), start=end + 1):
        name = item.target
        if item.kind == "swap_out_wait":
            # The placeholder that held the swapped tensor is its source now; readers get what comes back.
            arguments: tuple[Any, ...] = (hosts_here[name], sources[name])
            hosts_here[name] = _call(graph, anchor, ops.swap_out_wait, arguments, sources[name], position, f"{name}_host_done")
        elif item.kind == "swap_in":
            value = sources[name].meta["val"]
            geometry = ([int(x) for x in value.shape], [int(x) for x in value.stride()], int(value.storage_offset()), value.dtype, value.device)
            waiting[name] = _call(graph, anchor, ops.swap_in, (hosts_here[name], *geometry), sources[name], position, f"{name}_in")
        elif item.kind == "swap_in_wait":
            arrived[name] = _call(graph, anchor, ops.swap_in_wait, (waiting[name], hosts_here[name]), sources[name], position, f"{name}_back")
    for name, node in arrived.items():
        source = sources[name]
        source.replace_all_uses_with(node, delete_user_cb=lambda user: user.target is not ops.swap_out_wait)
        if name not in late:
            graph.erase_node(source)
