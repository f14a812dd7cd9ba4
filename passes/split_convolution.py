"""Take a convolution's backward apart, so that its input may be gone before its input's gradient is made.

    gx, gw = convolution_backward(gy, x, w)            x, gy, gx and gw at once

    gw = convolution_backward(gy, x, w)                wants no gx: x, gy and gw at once
    gx = convolution(gy, w), transposed                gy, gx and gw

Libraries compute the two gradients by separate calls anyway, so on CUDA this costs no time. Only where x is an
activation of the graph that nothing behind reads but such backwards (for masks see ease_backward.py). On CPU the
kernels differ in the last bits: graphs planned for it are left alone by the caller. Left alone here: transposed and
depthwise convolutions (other kernels), what does not run in cuDNN, and what would come out in another layout than
recorded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.passes.capture import last_result
from fxhome.passes.facts import storage_key, storage_nbytes
from fxhome.passes.insert_nodes import inherited_meta
from fxhome.passes.torch_compat import convolution_library

SUFFIX = "_input_gradient"
_BACKWARD = torch.ops.aten.convolution_backward.default
_CONVOLUTION = torch.ops.aten.convolution.default


def split_convolutions(module: GraphModule, min_bytes: int) -> GraphModule:
    """Rewrite a normalized joint graph in place and return it; the same graph gives the same names.

    min_bytes: smaller inputs are left alone.
    """
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    owner, readers = _storages(graph)
    for node in list(order):
        if node.target is not _BACKWARD or not _is_plain(node):
            continue
        source = _argument(node, 1)
        key = storage_key(source.meta["val"])
        if owner[key].op != "call_function" or storage_nbytes(source.meta["val"]) < min_bytes:
            continue
        if all(order[reader] <= order[node] or reader.target is _BACKWARD for reader in readers[key]):
            _split(node)
    graph.lint()
    module.recompile()
    return module


def _storages(graph: fx.Graph) -> tuple[dict[object, fx.Node], dict[object, list[fx.Node]]]:
    """The first node of every storage, and the nodes that read it; views only name it."""
    owner: dict[object, fx.Node] = {}
    readers: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        own = storage_key(node.meta.get("val"))
        if own is not None:
            owner.setdefault(own, node)
        for source in node.all_input_nodes:
            key = storage_key(source.meta.get("val"))
            if key is not None and key != own:
                readers.setdefault(key, []).append(node)
    return owner, readers


def _argument(node: fx.Node, position: int) -> fx.Node:
    found = node.args[position]
    assert isinstance(found, fx.Node)
    return found


def _is_plain(node: fx.Node) -> bool:
    """Whether both gradients are wanted of a convolution that is neither transposed nor depthwise, over real numbers.

    Depthwise ones have kernels of their own, which a transposed convolution does not use.
    """
    args: Any = node.args
    output, source, weight = (arg.meta["val"] for arg in args[:3])
    transposed, groups, (wants_input, wants_weight, _) = args[7], args[9], args[10]
    return bool(
        wants_input
        and wants_weight
        and not transposed
        and not 1 < groups == source.shape[1]
        and weight.dtype.is_floating_point
        and output.dtype == weight.dtype
    )


def undoing(
    output_size: Sequence[int], input_size: Sequence[int], kernel: Sequence[int], *, settings: Sequence[Sequence[int]]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Stride, padding, dilation and output padding of the transposed convolution that leads back to `input_size`.

    Sizes are those of the spatial dimensions. settings: stride, padding and dilation of the convolution, each for
    every dimension or one for all.
    """
    dims = len(kernel)
    stride, padding, dilation = (list(given) * (dims if len(given) == 1 else 1) for given in settings)
    reached = [
        (output_size[i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1 for i in range(dims)
    ]
    return stride, padding, dilation, [wanted - got for wanted, got in zip(input_size, reached, strict=True)]


def _split(node: fx.Node) -> None:
    """Do it to one node, unless the gradient would not come out as it is recorded."""
    graph = node.graph
    args: Any = node.args
    items = {item.args[1]: item for item in node.users}
    name = node.name + SUFFIX
    if 0 not in items or any(other.name == name for other in graph.nodes):
        return
    recorded = items[0].meta["val"]
    sizes = [[int(n) for n in arg.meta["val"].shape[2:]] for arg in args[:3]]

    def arguments(output: Any, weight: Any) -> tuple[Any, ...]:
        # Made anew for each use: the fake implementation changes the lists that it is given.
        stride, padding, dilation, more = undoing(*sizes, settings=args[4:7])
        return output, weight, None, stride, padding, dilation, True, more, args[9]

    output, source, weight = (arg.meta["val"] for arg in args[:3])
    with recorded.fake_mode:
        made = _CONVOLUTION(*arguments(output, weight))
        if output.device.type == "cuda":
            # Bitwise the same kernel, at the same speed.
            whole = convolution_library((source, weight, None, *map(_copied, args[4:10])))
            if (whole, convolution_library(arguments(output, weight))) != ("Cudnn", "CudnnTranspose"):
                return
    if (made.shape, made.stride(), made.dtype) != (recorded.shape, recorded.stride(), recorded.dtype):
        return
    with graph.inserting_after(last_result(node)):
        gradient = graph.call_function(_CONVOLUTION, arguments(args[0], args[2]))
    gradient.name = graph._graph_namespace.create_name(name, None)
    gradient.meta = inherited_meta(node)
    gradient.meta |= {key: items[0].meta[key] for key in ("val", "tensor_meta") if key in items[0].meta}
    items[0].replace_all_uses_with(gradient)
    graph.erase_node(items[0])
    node.args = (*args[:10], [False, *args[10][1:]])
    node.meta = inherited_meta(node) | {"val": (None, *node.meta["val"][1:])}


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
