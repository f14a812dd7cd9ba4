"""Insert the encodes and decodes that a program lists into a partitioned forward and backward.

    forward                                       backward
      relu = aten.relu(x)                           (relu_encoded)                    saved instead of relu
      ...                                           ...
      relu_encoded = fxhome.encode(relu, ...)       relu_decoded = fxhome.decode(relu_encoded, size, stride, ...)
      return ..., relu_encoded                      relu_backward = aten.threshold_backward(..., relu_decoded)

Runs before `insert_transfers`: what a program encodes and then swaps is moved in its encoded form.
"""

from collections.abc import Mapping, Sequence

from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.cuda_kernels.codec import codec_by_name
from fxhome.errors import PlanMismatchError
from fxhome.passes import torch_compat
from fxhome.passes.codec_choice import assumed_bytes, zero_share
from fxhome.passes.facts import storage_nbytes
from fxhome.passes.insert_nodes import ENCODED_OF, anchors, geometry, insert_call
from fxhome.placement import Instruction, Plan
from fxhome.runtime import codec_ops


def codecs_of(plan: Plan) -> dict[str, str]:
    """Codec names by storage name."""
    return {entry.name: entry.codec for entry in plan.placements if entry.codec is not None}


def insert_codecs(
    forward: GraphModule,
    backward: GraphModule,
    program: Sequence[Instruction],
    num_fwd_outputs: int,
    codecs: Mapping[str, str],
    graph_key: str = "",
) -> tuple[GraphModule, GraphModule]:
    """Insert every encode and decode of `program`; with none in it, the modules come back unchanged.

    graph_key: under which what the variable-rate codecs saved is reported.
    """
    encoded = [item.target for item in program if item.kind == "encode"]
    if not encoded:
        return forward, backward
    missing = [name for name in encoded if name not in codecs]
    if missing:
        raise PlanMismatchError(f"plan: it encodes '{missing[0]}' and names no codec for it; plan this model again")
    end = next(i for i, item in enumerate(program) if item.kind == "forward_end")
    values = _insert_encodes(forward.graph, program[:end], num_fwd_outputs, codecs, graph_key)
    _insert_decodes(backward.graph, program, end, codecs, values)
    forward.graph.lint()
    backward.graph.lint()
    return torch_compat.make_module(forward, forward.graph), torch_compat.make_module(backward, backward.graph)


def _insert_encodes(
    graph: fx.Graph,
    program: Sequence[Instruction],
    num_fwd_outputs: int,
    codecs: Mapping[str, str],
    graph_key: str,
) -> dict[str, fx.Node]:
    by_name = {node.name: node for node in graph.nodes}
    made: dict[str, fx.Node] = {}
    for position, (item, anchor) in enumerate(zip(program, anchors(graph, program, 0), strict=True)):
        if item.kind == "encode":
            source = by_name[item.target]
            arguments = (source, *_how(source, codecs[item.target], graph_key))
            node = insert_call(
                graph, anchor, codec_ops.encode_op, arguments, source, position, f"{item.target}_encoded"
            )
            node.meta[ENCODED_OF] = item.target
            source.meta[torch_compat.NOT_PADDED] = True
            made[item.target] = node
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    saved = [made.get(node.name, node) for node in results[num_fwd_outputs:]]
    output.args = (tuple(results[:num_fwd_outputs] + saved),)
    return made


def _how(source: fx.Node, codec: str, graph_key: str) -> tuple[object, ...]:
    """What `encode` needs to know besides the tensor."""
    value = source.meta["val"]
    size_bytes = storage_nbytes(value)
    _, stride, _ = geometry(source)
    if codec_by_name(codec).fixed_rate:
        return size_bytes, codec, 0, "", stride, value.dtype
    assumed = assumed_bytes(codec, size_bytes // value.dtype.itemsize, value.dtype, zero_share(source, {}))
    return size_bytes, codec, assumed, codec_ops.site_name(graph_key, source.name), stride, value.dtype


def _insert_decodes(
    graph: fx.Graph, program: Sequence[Instruction], end: int, codecs: Mapping[str, str], values: dict[str, fx.Node]
) -> None:
    sources = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    body = program[end + 1 :]
    for position, (item, anchor) in enumerate(zip(body, anchors(graph, body, end + 1), strict=True), start=end + 1):
        if item.kind != "decode":
            continue
        source = sources[item.target]
        with graph.inserting_before(source):
            encoded = graph.placeholder(f"{item.target}_encoded")
        encoded.meta = {"val": values[item.target].meta["val"], "fxhome_source": item.target, ENCODED_OF: item.target}
        value = source.meta["val"]
        arguments = (encoded, storage_nbytes(value), *geometry(source), value.dtype, codecs[item.target])
        node = insert_call(graph, anchor, codec_ops.decode_op, arguments, source, position, f"{item.target}_decoded")
        source.replace_all_uses_with(node)
        graph.erase_node(source)
