"""Insert the copies to and from the host that a program lists into a partitioned forward and backward.

    forward                                       backward
      relu = aten.relu(x)                           (relu_host)                       saved instead of relu
      relu_host = fxhome.swap_out(relu)             ...
      ...                                           relu_in = fxhome.swap_in(relu_host, size, stride, ...)
      relu_host_1 = fxhome.swap_out_wait(           ...
          relu_host, relu)                          relu_1 = fxhome.swap_in_wait(relu_in, relu_host)
      return ..., relu_host_1                       relu_backward = aten.threshold_backward(..., relu_1)

What `insert_codecs` encoded is moved in that form, under its source's name; where its size depends on the data, by
`swap_out_encoded` and `swap_in_encoded` in place of `swap_out` and `swap_in`.
A wait that the program puts behind `forward_end` stands in the backward; the source is then saved beside the host copy,
because it must live until that wait. Inserted nodes carry their source's metadata and a fake value of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.cuda_kernels.codec import codec_by_name
from fxhome.passes import torch_compat
from fxhome.passes.insert_nodes import ENCODED_OF, anchors, carried, geometry, insert_call
from fxhome.placement import Instruction
from fxhome.runtime import codec_ops, ops

TRANSFERS = frozenset({"swap_out", "swap_out_wait", "swap_in", "swap_in_wait"})


def insert_transfers(
    forward: GraphModule,
    backward: GraphModule,
    program: Sequence[Instruction],
    num_fwd_outputs: int,
    codecs: Mapping[str, str] | None = None,
) -> tuple[GraphModule, GraphModule]:
    """Insert every transfer of `program`; with none in it, the modules come back unchanged.

    codecs: names by storage (see `codecs_of`).
    """
    if not any(item.kind in TRANSFERS for item in program):
        return forward, backward
    end = next(i for i, item in enumerate(program) if item.kind == "forward_end")
    moved = {item.target for item in program if item.kind == "swap_out"}
    encoded = moved & {item.target for item in program if item.kind == "encode"}
    varying = {name for name in encoded if not codec_by_name((codecs or {})[name]).fixed_rate}
    late = {item.target for item in program[end:] if item.kind == "swap_out_wait"}
    hosts = _insert_forward(forward.graph, program[:end], moved, late, num_fwd_outputs, varying)
    _insert_backward(backward.graph, program, end, moved, late, hosts, varying)
    forward.graph.lint()
    backward.graph.lint()
    return torch_compat.make_module(forward, forward.graph), torch_compat.make_module(backward, backward.graph)


def _insert_forward(
    graph: fx.Graph,
    program: Sequence[Instruction],
    moved: set[str],
    late: set[str],
    num_fwd_outputs: int,
    varying: set[str],
) -> dict[str, fx.Node]:
    by_name = carried(list(graph.nodes))
    hosts: dict[str, fx.Node] = {}
    for position, (item, anchor) in enumerate(zip(program, anchors(graph, program, 0), strict=True)):
        source = by_name.get(item.target)
        if item.kind == "swap_out":
            assert source is not None
            target = codec_ops.swap_out_encoded_op if item.target in varying else ops.swap_out
            node = insert_call(graph, anchor, target, (source,), source, position, f"{item.target}_host")
            node.meta["fxhome_host"] = True
            source.meta[torch_compat.NOT_PADDED] = True
            hosts[item.target] = node
        elif item.kind == "swap_out_wait":
            assert source is not None
            arguments = (hosts[item.target], source)
            hosts[item.target] = insert_call(
                graph, anchor, ops.swap_out_wait, arguments, source, position, f"{item.target}_host_done"
            )
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    saved: list[Any] = []
    for node in results[num_fwd_outputs:]:
        name = node.meta.get(ENCODED_OF, node.name)
        if name in moved:
            saved.append(hosts[name])
            if name in late:
                saved.append(node)
        else:
            saved.append(node)
    descriptions = output.meta.get("desc", [None] * len(results))[:num_fwd_outputs]
    output.args = (tuple(results[:num_fwd_outputs] + saved),)
    output.meta["desc"] = list(descriptions) + torch_compat.saved_descriptions(len(saved))
    return hosts


def _insert_backward(
    graph: fx.Graph,
    program: Sequence[Instruction],
    end: int,
    moved: set[str],
    late: set[str],
    hosts: dict[str, fx.Node],
    varying: set[str],
) -> None:
    sources = carried([node for node in graph.nodes if node.op == "placeholder"])
    hosts_here: dict[str, fx.Node] = {}
    waiting: dict[str, fx.Node] = {}
    arrived: dict[str, fx.Node] = {}
    for name in [name for name in sources if name in moved]:
        with graph.inserting_before(sources[name]):
            host = graph.placeholder(f"{name}_host")
        host.meta = {"val": hosts[name].meta["val"], "fxhome_source": name, "fxhome_host": True}
        hosts_here[name] = host
    body = program[end + 1 :]
    for position, (item, anchor) in enumerate(zip(body, anchors(graph, body, end + 1), strict=True), start=end + 1):
        name = item.target
        if item.kind == "swap_out_wait":
            # The placeholder that held the swapped tensor is its source now; readers get what comes back.
            arguments: tuple[Any, ...] = (hosts_here[name], sources[name])
            hosts_here[name] = insert_call(
                graph, anchor, ops.swap_out_wait, arguments, sources[name], position, f"{name}_host_done"
            )
        elif item.kind == "swap_in":
            value = sources[name].meta["val"]
            if name in varying:
                arguments, target = (hosts_here[name], value.device), codec_ops.swap_in_encoded_op
            else:
                place = (*geometry(sources[name]), value.dtype, value.device)
                arguments, target = (hosts_here[name], *place), ops.swap_in
            waiting[name] = insert_call(graph, anchor, target, arguments, sources[name], position, f"{name}_in")
        elif item.kind == "swap_in_wait":
            arrived[name] = insert_call(
                graph,
                anchor,
                ops.swap_in_wait,
                (waiting[name], hosts_here[name]),
                sources[name],
                position,
                f"{name}_back",
            )
    for name, node in arrived.items():
        source = sources[name]
        source.replace_all_uses_with(node, delete_user_cb=lambda user: user.target is not ops.swap_out_wait)
        if name not in late:
            graph.erase_node(source)
