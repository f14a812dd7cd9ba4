"""Which results a fusing compiler may write over an operand, judged from the joint graph before anything is lowered.

    mm -> gelu's backward (pointwise) -> mm     the pointwise result takes the memory of the first product, if nothing
                                                reads that product later

These are Inductor's rules (see in_place.py, which reads them off the lowered kernels), kept narrow: one place per
element, same dtype, bytes and strides, and no other reader that might end up in the same kernel. Whether the operand is
dead when the result is made depends on the plan: the simulator decides that.
"""

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxhome.passes.fusion import CLONING_LOOPS, is_generated_loop, is_pointwise, is_reduction, operator_name
from fxhome.passes.simulate_kernels import ALIAS, GETITEM, OWNER, VIRTUAL

_ELSEWHERE = frozenset(
    {
        "aten::constant_pad_nd",
        "aten::embedding",
        "aten::index",
        "aten::gather",
        "aten::_unsafe_index",
        "aten::select_scatter",
        "aten::slice_scatter",
    }
)
"""Pointwise loops that read an operand at another place than they write."""
_NEVER_TAKEN = CLONING_LOOPS | {"aten::cat", "aten::empty", "aten::empty_like"}
"""Results that no kernel writes as a whole: parts of other buffers, and copies that are changed afterwards."""

_ASK_EARLY = frozenset({"aten::mm", "aten::_int_mm", "aten::convolution", "aten::convolution_backward"})
"""Calls whose operands are written as soon as they are lowered, before any other reader is."""


def find_takers(nodes: Sequence[fx.Node], kinds: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Operand -> the nodes whose results may be written over it, in graph order. Operands without any are left out.

    kinds: OWNER, ALIAS, GETITEM or VIRTUAL per node, as facts have them. An operand is a node that is in memory.
    """
    behind: dict[fx.Node, frozenset[fx.Node]] = {}  # what a reader of the node reads from memory
    moved: dict[fx.Node, frozenset[fx.Node]] = {}  # and which of it at another place
    earlier: dict[fx.Node, int] = {}  # everything a node depends on, one bit per node
    bit = {node: 1 << i for i, node in enumerate(nodes)}
    readers: dict[fx.Node, list[fx.Node]] = {}
    candidates: list[tuple[fx.Node, fx.Node]] = []
    for node in nodes:
        read: frozenset[fx.Node] = frozenset()
        away: frozenset[fx.Node] = frozenset()
        before = 0
        for source in node.all_input_nodes:
            before |= earlier[source] | bit[source]
            read |= behind[source]
            away |= moved[source] if _same_place(node, source, kinds[node]) else behind[source]
        earlier[node] = before
        in_memory = node.op == "call_function" and kinds[node] in (OWNER, GETITEM)
        if node.op == "call_function" and (kinds[node] == OWNER or not node.users or _is_mutable(node)):
            for operand in read:
                readers.setdefault(operand, []).append(node)
        if kinds[node] == OWNER and is_pointwise(node) and not _joins_a_product(node):
            candidates += [(operand, node) for operand in read - away if _same_memory(operand, node)]
        behind[node] = frozenset({node}) if in_memory else read
        moved[node] = frozenset() if in_memory else away
    found: dict[fx.Node, list[fx.Node]] = {}
    for operand, taker in candidates:
        maker = _maker(operand)
        if operator_name(maker) in _NEVER_TAKEN or _is_mutable(maker) or not _is_read_as_written(taker, kinds, bit):
            continue
        # A loop that need not run before the taker may share its kernel, and so may the maker of the operand then.
        others = [r for r in readers[operand] if r is not taker and not earlier[taker] & bit[r]]
        others = [r for r in others if not earlier[r] & bit[taker]]  # behind the taker: the operand is not dead
        if not any(is_generated_loop(node) for node in others) and not (others and is_generated_loop(maker)):
            found.setdefault(operand, []).append(taker)
    return {operand: tuple(takers) for operand, takers in found.items()}


def _maker(operand: fx.Node) -> fx.Node:
    source = operand.args[0] if operand.target is operator.getitem else operand
    assert isinstance(source, fx.Node)
    return source


def _is_read_as_written(taker: fx.Node, kinds: Mapping[fx.Node, int], bit: Mapping[fx.Node, int]) -> bool:
    """Whether the loops that read `taker` read its result, not the operands that they would compute it from again.

    Inductor lowers node by node and writes a result once a reader that calls a library is lowered, or at once for some
    of them; loops lowered before compute it again, in the same kernel as a rule. bit: grows along the graph.
    """
    library: list[int] = []
    loops: list[int] = []
    stack = [taker]
    while stack:
        shown = stack.pop()
        for user in shown.users:
            if user not in kinds:
                continue
            if kinds[user] == ALIAS:
                stack.append(user)
            elif is_pointwise(user) or is_reduction(user):
                loops.append(bit[user])
            elif not is_generated_loop(user):
                library.append(bit[shown if operator_name(user) in _ASK_EARLY else user])
    return not loops or (bool(library) and min(library) < min(loops))


def _joins_a_product(node: fx.Node) -> bool:
    """Whether Inductor may make one library call (addmm) of a sum and the product that it adds."""
    return operator_name(node) == "aten::add" and any(
        operator_name(source) == "aten::mm" for source in node.all_input_nodes
    )


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _same_place(node: fx.Node, source: fx.Node, kind: int) -> bool:
    """Whether each element of `node` is made of (or shows) the element of `source` at the same place in memory."""
    mine, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if mine.layout is not torch.strided or other.layout is not torch.strided or _offset(mine) or _offset(other):
        return False
    alike = tuple(mine.shape) == tuple(other.shape) and tuple(mine.stride()) == tuple(other.stride())
    if kind == ALIAS:
        return alike or (mine.numel() == other.numel() and mine.is_contiguous() and other.is_contiguous())
    return alike and kind in (OWNER, VIRTUAL) and is_pointwise(node) and operator_name(node) not in _ELSEWHERE


def _offset(value: torch.Tensor) -> int:
    return int(value.storage_offset())


def _same_memory(operand: fx.Node, result: fx.Node) -> bool:
    """Whether both fill storages of the same dtype and bytes, each element once."""
    mine, other = result.meta["val"], operand.meta["val"]
    full = int(mine.numel()) * mine.element_size()
    sizes = (int(mine.untyped_storage().nbytes()), int(other.untyped_storage().nbytes()))
    return full > 0 and mine.dtype == other.dtype and mine.device == other.device and sizes == (full, full)
