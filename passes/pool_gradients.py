"""Gather the gradient of max pooling where the joint graph was traced with a scatter in its place (torch 2.14).

    z = full(0)                                 fp32, as large as the pooled image
    s = scatter_add(z, 1, view(i), convert(view(g)))
    d = convert(view(s))                        and once more in the image's own type

    d = max_pool2d_with_indices_backward(g, x, ..., i)

Inductor writes the second as a loop that looks for each pixel into the windows around it: it has no intermediate, may
be part of the kernel that reads it, and is what torch 2.11 runs for the same model. Where windows overlap it looks into
several and takes longer than a scatter would (by the model, 3.9 ms in place of 1.0 for ResNet-50's pool at batch 512):
then it is for budgets that are not met without. Only windows that Inductor does not call the library for, which are
those whose forward it has taken apart. Part of ease_backward.py.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxhome.passes.facts import storage_nbytes
from fxhome.passes.fusion import operator_name
from fxhome.passes.insert_nodes import stand_in
from fxhome.placement import Instruction

GATHERED_SUFFIX = "_gathered"
OVERLAPPING_SUFFIX = "_gathered_overlapping"
_POOL_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_SCATTER = torch.ops.aten.scatter_add.default
_CONVERT = torch.ops.prims.convert_element_type.default
_TO_INDICES = "prims::_low_memory_max_pool_offsets_to_indices"
_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::clone"})


@dataclass(frozen=True)
class ScatteredPool:
    """A pool's gradient that is made by a scatter: its node, and the arguments of the operator in its place."""

    result: fx.Node
    arguments: tuple[Any, ...]

    @property
    def overlaps(self) -> bool:
        """Whether a pixel may lie in several windows."""
        _, _, kernel, stride, *_ = self.arguments
        return any(side > step for side, step in zip(kernel, stride, strict=True))


def gather_pool_gradients(graph: fx.Graph, min_bytes: int, *, overlapping: bool) -> None:
    """Rewrite a normalized joint graph in place; the same graph gives the same names.

    min_bytes: gradients of smaller images are left alone. overlapping: also where windows do. Results keep their types,
    their strides and, but for the order and precision in which overlapping windows are added up, their bits.
    """
    for found in scattered_pools(graph, min_bytes):
        if found.overlaps and not overlapping:
            continue
        result, suffix = found.result, OVERLAPPING_SUFFIX if found.overlaps else GATHERED_SUFFIX
        with graph.inserting_before(result):
            gathered = stand_in(graph, _POOL_BACKWARD, found.arguments, result, result.name + suffix)
        _hand_over(graph, result, gathered)
        _erase_unread(graph, result)


def gathers_overlapping(program: Iterable[Instruction]) -> bool:
    """Whether a program names what only a graph has where gradients of overlapping windows are gathered."""
    return any(item.target.endswith(OVERLAPPING_SUFFIX) for item in program)


def scattered_pools(graph: fx.Graph, min_bytes: int) -> list[ScatteredPool]:
    """The gradients of images of at least so many bytes that a graph makes by scatters."""
    found = [_taken_apart(node) for node in graph.find_nodes(op="call_function", target=_SCATTER)]
    return [pool for pool in found if pool is not None and storage_nbytes(pool.result.meta["val"]) >= min_bytes]


def _taken_apart(scatter: fx.Node) -> ScatteredPool | None:
    arguments: Any = scatter.args
    zeros, dimension, index, added = arguments
    indices = next((node for node in _behind(index) if operator_name(node) == _TO_INDICES), None)
    offsets: Any = indices.args[0] if indices is not None else None
    if offsets is None or offsets.target is not operator.getitem:
        return None
    pool = offsets.args[0]
    if operator_name(pool) != "prims::_low_memory_max_pool_with_offsets":
        return None
    image, kernel, stride, padding, dilation, ceil_mode = pool.args
    value, pooled = image.meta["val"], offsets.meta["val"]
    if value.ndim != 4 or dimension != 1 or any(step != 1 for step in dilation):
        return None
    if zeros.target is not torch.ops.aten.full.default or zeros.args[1] != 0:
        return None
    gradient = next((node for node in _behind(added) if _is_like(node, pooled.shape, value.dtype)), None)
    result = _whole_result(scatter, value)
    if result is None or gradient is None:
        return None
    return ScatteredPool(result, (gradient, image, kernel, stride, padding, dilation, ceil_mode, indices))


def _whole_result(scatter: fx.Node, image: torch.Tensor) -> fx.Node | None:
    """The gradient of an image that is made of a scatter and of nothing else; None where anything reads a part of it
    on the way.
    """
    node = scatter
    while not _is_like(node, image.shape, image.dtype):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if not _is_reshape(node) and node.target is not _CONVERT:
            return None
    return node


def _behind(value: Any) -> Iterator[fx.Node]:
    """A node, and what it holds the elements of in another shape, layout or type; the nearest first."""
    while isinstance(value, fx.Node):
        yield value
        value = value.args[0] if _is_reshape(value) or value.target is _CONVERT else None


def _is_reshape(node: fx.Node) -> bool:
    return operator_name(node) in _RESHAPES


def _is_like(node: fx.Node, shape: torch.Size, dtype: torch.dtype) -> bool:
    value = node.meta["val"]
    return bool(value.shape == shape and value.dtype == dtype)


def _hand_over(graph: fx.Graph, result: fx.Node, gathered: fx.Node) -> None:
    """Have the readers of `result` read `gathered`, in the strides that they know."""
    stride = gathered.meta["val"].stride()
    if stride != result.meta["val"].stride():
        for copy in list(result.users):
            # A scatter is contiguous: who wanted its image's layout has made a copy, who did not is given one.
            if operator_name(copy) == "aten::clone" and copy.meta["val"].stride() == stride:
                copy.replace_all_uses_with(gathered)
                graph.erase_node(copy)
        if result.users:
            clone, options = torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}
            with graph.inserting_before(result):
                gathered = stand_in(graph, clone, (gathered,), result, gathered.name + "_contiguous", **options)
    result.replace_all_uses_with(gathered)


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    pending = [node]
    while pending:
        current = pending.pop()
        if current.op == "call_function" and not current.users:
            pending.extend(source for source in current.all_input_nodes if source not in pending)
            graph.erase_node(current)
