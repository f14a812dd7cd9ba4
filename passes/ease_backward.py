"""Have the backward read no more of a large result than it needs, so that the plan may let go of the rest.

    y = relu(c)                                      y, 2 bytes an element, is saved or rebuilt
    dp = max_pool2d_with_indices_backward(g, y, i)   for its shape
    dx = where(le(y, 0), 0, dp)                      and for its mask

    y = relu(c);  m = le(y, 0)                       m, 1 byte an element, is a result of the forward like any other:
    dp = max_pool2d_with_indices_backward(g, full(...), i)   kept, moved, or computed where it is read from what is
    dx = where(m, 0, dp)                             there then

pools as in pool_gradients.py, and convolutions as in split_convolution.py. This is the graph that is planned for CUDA;
the baseline is the traced one. Autograd traces such masks in the backward, where a fusing compiler computes them as
they are read, unless they are kept. The constant of a shape is never written by such a compiler; other compilers are
not given one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.passes.capture import is_tangent, last_result
from fxhome.passes.facts import storage_key, storage_nbytes
from fxhome.passes.fusion import is_pointwise
from fxhome.passes.insert_nodes import inherited_meta
from fxhome.passes.pool_gradients import GATHERED_SUFFIX, OVERLAPPING_SUFFIX, gather_pool_gradients
from fxhome.passes.split_convolution import SUFFIX, split_convolutions
from fxhome.placement import Instruction

MIN_BYTES = 1 << 20
"""Of a smaller result nothing is worth the trouble."""
SHAPE_SUFFIX = "_shape"
_FUSION_SUFFIXES = (SHAPE_SUFFIX, GATHERED_SUFFIX, OVERLAPPING_SUFFIX)
_POOL_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_MAX_POOL_SIDE = 5
"""Inductor calls the library for larger windows (25 results of overlapping ones at most): that reads a real tensor."""


def ease_backward(
    module: GraphModule, *, fusing: bool, overlapping: bool = True, min_bytes: int = MIN_BYTES
) -> GraphModule:
    """Rewrite a normalized joint graph in place and return it; the same graph gives the same names.

    overlapping: gather the gradients of pools whose windows overlap, too (pool_gradients.py).
    """
    if fusing:
        gather_pool_gradients(module.graph, min_bytes, overlapping=overlapping)
        _read_shapes(module.graph, min_bytes)
    _take_masks_early(module.graph, min_bytes)
    return split_convolutions(module, min_bytes)


def is_eased(program: Iterable[Instruction]) -> bool:
    """Whether a program names what only an eased graph has."""
    return any(item.target.endswith((SUFFIX, *_FUSION_SUFFIXES)) for item in program)


def is_eased_for_fusion(program: Iterable[Instruction]) -> bool:
    """Whether a program names what only a graph has that was eased for a fusing compiler."""
    return any(item.target.endswith(_FUSION_SUFFIXES) for item in program)


def _read_shapes(graph: fx.Graph, min_bytes: int) -> None:
    for node in graph.find_nodes(op="call_function", target=_POOL_BACKWARD):
        args: Any = node.args
        source = args[1]
        value = source.meta["val"]
        sides, dilation = [*args[2]], [*args[5]]
        if source.op != "call_function" or storage_nbytes(value) < min_bytes:
            continue
        if max(sides) > _MAX_POOL_SIDE or any(step != 1 for step in dilation):
            continue
        how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        size = [int(n) for n in value.shape]
        with graph.inserting_before(node):
            shape = graph.call_function(torch.ops.aten.full.default, (size, 0), how)
        shape.name = graph._graph_namespace.create_name(node.name + SHAPE_SUFFIX, None)
        shape.meta = inherited_meta(node)
        with value.fake_mode:
            shape.meta["val"] = torch.ops.aten.full.default(size, 0, **how)
        node.replace_input_with(source, shape)


def _take_masks_early(graph: fx.Graph, min_bytes: int) -> None:
    """Move masks beside what they are taken from, where the backward wants nothing else of that but to convolve it."""
    behind: set[fx.Node] = set()
    readers: dict[object, list[fx.Node]] = {}
    masks: list[fx.Node] = []
    for node in graph.nodes:
        late = node.meta.get("partitioner_tag") == "is_backward"
        if late and not behind.intersection(node.all_input_nodes) and _is_mask(node, min_bytes):
            masks.append(node)
        elif late or is_tangent(node) or behind.intersection(node.all_input_nodes):
            behind.add(node)
            own = storage_key(node.meta.get("val"))
            for source in node.all_input_nodes:
                key = storage_key(source.meta.get("val"))
                if key is not None and key != own and node.target is not _CONVOLUTION_BACKWARD:
                    readers.setdefault(key, []).append(node)
    for mask in masks:
        (source,) = mask.all_input_nodes
        if storage_key(source.meta["val"]) not in readers:
            last_result(source).append(mask)
            mask.meta = {name: value for name, value in mask.meta.items() if name != "partitioner_tag"}


def _is_mask(node: fx.Node, min_bytes: int) -> bool:
    """Whether all that `node` needs is one tensor that the graph makes, of which it is a smaller image."""
    if len(node.all_input_nodes) != 1 or not is_pointwise(node):
        return False
    (source,) = node.all_input_nodes
    value, whole = node.meta.get("val"), source.meta.get("val")
    if source.op != "call_function" or not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    return storage_nbytes(whole) >= min_bytes and storage_nbytes(value) < storage_nbytes(whole)
