"""Which results a fusing compiler never writes to memory, judged from the joint graph before anything is lowered.

    relu(bn(x)) * mask  read by a sum and a multiplication     -> virtual: its readers compute it again from what is
    in memory
    the same            read by a matrix product               -> written: an external kernel needs its operand in
    memory

The rules follow Inductor's: pointwise results are inlined into pointwise and reduction readers until they read too many
buffers; one reader over the same elements ends up in the same kernel however much it reads; anything else is a kernel
of its own. The real decision is checked after lowering; this one steers the search.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxhome.passes.torch_compat import inductor_generates

MAX_READS_SHARED = 4
"""A result with several readers is written once it would make each of them read more buffers than this."""
MAX_READS = 8
MAX_OPERATORS = 30

_POINTWISE_NAMES = frozenset(
    {
        "aten::_to_copy",
        "aten::clone",
        "aten::full",
        "aten::full_like",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::scalar_tensor",
        "aten::arange",
        "prims::iota",
        "prims::convert_element_type",
        "aten::constant_pad_nd",
        "aten::embedding",
        "aten::index",
        "aten::gather",
        "aten::where",
        "inductor_prims::inductor_random",
        "inductor_prims::inductor_lookup_seed",
        "aten::empty_like",
        "aten::tril",
        "aten::triu",
        "aten::copy",
        "aten::lift_fresh_copy",
        "aten::select_scatter",
        "aten::slice_scatter",
        "aten::rand_like",
        "aten::_unsafe_index",
        "prims::inductor_random",
        "prims::inductor_lookup_seed",
        "prims::_low_memory_max_pool_offsets_to_indices",
    }
)
_REDUCTION_NAMES = frozenset(
    {
        "aten::sum",
        "aten::mean",
        "aten::var_mean",
        "aten::var",
        "aten::amax",
        "aten::amin",
        "aten::prod",
        "aten::any",
        "aten::all",
        "aten::max",
        "aten::min",
        "aten::argmax",
        "aten::argmin",
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::native_layer_norm",
        "aten::native_group_norm",
        "prims::xor_sum",
    }
)

_LIBRARY_NAMES = frozenset(
    {
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::baddbmm",
        "aten::mv",
        "aten::addmv",
        "aten::dot",
        "aten::convolution",
        "aten::_scaled_mm",
        "aten::_int_mm",
        "aten::sort",
        "aten::topk",
    }
)
"""Operators that Inductor lowers to calls of a library, although it has a lowering for them."""
_POOL = "prims::_low_memory_max_pool_with_offsets"
_POOL_BACKWARD = "aten::max_pool2d_with_indices_backward"
_WINDOW_LOOPS = frozenset({_POOL_BACKWARD, "aten::upsample_nearest2d_backward"})
"""Loops over windows: their inputs may be computed inside them, and they inside a pointwise reader."""
POOL_OPERATIONS = 10
POOL_BACKWARD_OPERATIONS = 30
"""Integer operations that the generated code takes for each element of a window, or for each window that an element may
lie in: addresses, bounds, comparisons. They take longer than the memory does.
"""
_INLINING_LOOPS = _WINDOW_LOOPS | {"aten::cat"}
"""Loops whose inputs may be computed inside them. What only a concatenation reads is written into its result."""
CLONING_LOOPS = frozenset(
    {
        "aten::scatter",
        "aten::scatter_add",
        "aten::scatter_reduce",
        "aten::index_put",
        "aten::_unsafe_index_put",
        "aten::index_add",
    }
)
"""Loops that copy their first input and then change the copy: that input may be computed while it is copied."""


def operator_name(node: fx.Node) -> str:
    """`aten::add` for aten.add.Tensor; an empty string for what is no operator."""
    return str(node.target.name()).split(".")[0] if isinstance(node.target, torch._ops.OpOverload) else ""


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on a few elements of the inputs."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or operator_name(node) in _POINTWISE_NAMES
    )


def is_reduction(node: fx.Node) -> bool:
    """Whether a fusing compiler generates the loop of `node`, with its pointwise inputs inside."""
    return operator_name(node) in _REDUCTION_NAMES


def is_generated_loop(node: fx.Node) -> bool:
    """Whether a fusing compiler writes the kernel of `node` itself, so that it costs the bytes it reads and writes."""
    return is_pointwise(node) or is_reduction(node) or operator_name(node) in _INLINING_LOOPS or _is_lowered(node)


def _is_lowered(node: fx.Node) -> bool:
    if operator_name(node) in _LIBRARY_NAMES or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return inductor_generates(node.target)


def _inlines(reader: fx.Node, source: fx.Node) -> bool:
    """Whether the kernel of `reader` can compute `source` where it needs it."""
    if is_pointwise(reader) or is_reduction(reader) or operator_name(reader) in _INLINING_LOOPS:
        return True
    return operator_name(reader) in CLONING_LOOPS and reader.args[0] is source and source not in reader.args[1:]


def virtual_nodes(
    nodes: Sequence[fx.Node], aliases: set[fx.Node], saved: Collection[fx.Node] = frozenset()
) -> set[fx.Node]:
    """The results that are never written. `aliases`: nodes that allocate nothing (views). `saved`: written in any
    case, as a mask is that is kept in place of the larger result it was taken from.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        effective: list[fx.Node] = []
        for user in node.users:
            effective.extend(readers.get(user, []) if user in aliases else [user])
            if user in aliases and not user.users:
                effective.append(user)
        readers[node] = effective
    virtual: set[fx.Node] = set()
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    operators: dict[fx.Node, int] = {}
    for node in nodes:
        inputs = [source for source in node.all_input_nodes if source in sources]
        read = frozenset().union(*(sources[source] for source in inputs)) if inputs else frozenset()
        if node in aliases:
            # Each result of a call is a buffer of its own; a view is what it views.
            sources[node] = frozenset({node}) if node.target is operator.getitem else read
            operators[node] = max((operators[source] for source in inputs), default=0)
            continue
        count = 1 + sum(operators[source] for source in set(inputs))
        inlined = is_pointwise(node) or (operator_name(node) in _WINDOW_LOOPS and _ends_in_one_kernel(node, readers))
        if inlined and node not in saved and _stays_inside(node, readers, read, count):
            virtual.add(node)
            sources[node] = read
            operators[node] = count
        else:
            sources[node] = frozenset({node})
            operators[node] = 0
    return virtual


def _stays_inside(
    node: fx.Node, readers_of: Mapping[fx.Node, Sequence[fx.Node]], read: frozenset[fx.Node], operators: int
) -> bool:
    readers = readers_of[node]
    if not readers or not all(_inlines(reader, node) for reader in readers):
        return False
    is_buffer = len(read) > MAX_READS or operators > MAX_OPERATORS
    if len(readers) == 1 and elements(node) == iterations(readers[0]) != 0:
        return not is_buffer or _meets_its_reader(elements(node), readers[0], readers_of)
    return not is_buffer and (len(readers) == 1 or len(read) <= MAX_READS_SHARED)


def _meets_its_reader(count: int, reader: fx.Node, readers_of: Mapping[fx.Node, Sequence[fx.Node]]) -> bool:
    """Whether a result of `count` elements that is a buffer by itself, for it is made of too much, ends up in one
    kernel with its only reader: over the same elements. The gradient of a joined and normalized image does not: what
    reads it is computed again in each part's kernel, over that part.
    """
    while not is_reduction(reader):
        behind = readers_of[reader]
        if not behind or not all(_inlines(other, reader) for other in behind):
            return True  # it is written itself
        if any(iterations(other) != count for other in behind):
            return False
        if len(behind) > 1:
            return True
        (reader,) = behind
    return True


def _ends_in_one_kernel(node: fx.Node, readers: Mapping[fx.Node, Sequence[fx.Node]]) -> bool:
    """Whether all that a window loop's result is inlined into is one kernel: each element takes many reads, and a
    result with two readers would take them twice.
    """
    while len(readers[node]) == 1 and _inlines(readers[node][0], node):
        (node,) = readers[node]
        if is_reduction(node):
            return True
    return not readers[node] or not all(_inlines(reader, node) for reader in readers[node])


def iterations(node: fx.Node) -> int:
    """Elements that a loop goes over: those of its largest operand for a reduction, of its result otherwise."""
    operands = node.all_input_nodes if is_reduction(node) else [node]
    return max((elements(operand) for operand in operands), default=0)


def elements(node: fx.Node) -> int:
    """Elements of the largest result of `node`."""
    leaves = tree_leaves(node.meta.get("val"))
    return max((int(leaf.numel()) for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)


def adds_bias_apart(node: fx.Node) -> bool:
    """Whether Inductor calls a convolution on a GPU without its bias and adds that in a loop: the one that reads the
    result, or one of its own.
    """
    return operator_name(node) == "aten::convolution" and isinstance(node.args[2], fx.Node)


def window_operations(node: fx.Node, inlined: Collection[fx.Node]) -> int:
    """Integer operations of the pooling windows in the kernel of `node`, those of `inlined` operands with it."""
    found, seen, pending = 0, set[fx.Node](), [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if operator_name(current) == _POOL:
            found += elements(current) * math.prod(_pair(current.args[1])) * POOL_OPERATIONS
        elif operator_name(current) == _POOL_BACKWARD:
            kernel, stride = _pair(current.args[2]), _pair(current.args[3] or current.args[2])
            windows = math.prod(-(-k // s) for k, s in zip(kernel, stride, strict=True))
            found += elements(current) * windows * POOL_BACKWARD_OPERATIONS
        pending.extend(source for source in current.all_input_nodes if source in inlined)
    return found


def _pair(value: Any) -> tuple[int, int]:
    sizes = value if isinstance(value, list | tuple) else [value]
    return int(sizes[0]), int(sizes[-1])


def memory_sources(nodes: Sequence[fx.Node], not_written: set[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every node, the nodes in memory that its kernel reads, through views and virtual results."""
    behind: dict[fx.Node, frozenset[fx.Node]] = {}
    result: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        read: frozenset[fx.Node] = frozenset()
        for source in node.all_input_nodes:
            read |= behind.get(source, frozenset())
        result[node] = read
        through = node in not_written or node.target is operator.getitem
        behind[node] = read if through else frozenset({node})
    return result
