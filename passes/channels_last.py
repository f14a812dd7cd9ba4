"""Make the layout that convolutions run in explicit in a joint graph, where it is channels-last.

    norm -> relu -> convolution          -> norm -> clone(channels_last) -> relu -> convolution
    convolution -> view (of channels)    -> convolution -> clone(contiguous) -> view
    convolution -> output                -> convolution -> clone(as traced) -> output

Inductor's own layout optimization does this while lowering, with copies and workspace that no plan knows of. Written
into the graph before facts are taken, the strides in meta["val"] are those that run. A copy stands where a chain of
pointwise operators begins, so that it is part of the kernel which makes the value, and all of the chain reads it.
Inputs and outputs of the graph keep their traced strides. Assumes a normalized graph; random operators, and whatever
Inductor does not generate, read the strides that they were traced with.
"""

import enum
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxhome.errors import UnsupportedGraphError
from fxhome.passes import torch_compat
from fxhome.passes.capture import fake_mode_of, last_result
from fxhome.passes.fusion import is_generated_loop, is_pointwise, operator_name
from fxhome.passes.insert_nodes import inherited_meta

NAME_SUFFIX = "_channels_last"
TRACED_SUFFIX = "_as_traced"
LAYOUT = "fxhome_layout"
"""meta key of what this pass inserted."""

_CONVOLUTION_OPERANDS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.convolution.default: (0, 1),
    torch.ops.aten.convolution_backward.default: (0, 1, 2),
}
_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})
_STRIDES_MATTER = frozenset(
    {"aten::as_strided", "aten::as_strided_scatter", "aten::view_as_complex", "aten::view_as_real", "aten::set_"}
)
_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})


class Layouts(enum.Enum):
    """Which 2-d convolutions are given all their operands channels-last."""

    TRACED = "none: the graph stays as it was traced"
    EXPLICIT = "those that run so in any case, because an input or the weight is"
    EVERYWHERE = "all of them"


def convolution_layouts(stock_forward: fx.GraphModule, *, device_type: str, fusing: bool) -> Layouts:
    """What the inner compiler would do with the convolutions of its own forward; another device's are left alone.

    Where Inductor's layout optimization is switched off, so is this.
    """
    if device_type != "cuda" or not fusing or not torch_compat.optimizes_layouts():
        return Layouts.TRACED
    return Layouts.EVERYWHERE if torch_compat.chooses_channels_last(stock_forward) else Layouts.EXPLICIT


def to_channels_last(module: fx.GraphModule, layouts: Layouts) -> fx.GraphModule:
    """Rewrite a normalized joint graph in place, and return it. Without a convolution concerned nothing changes.

    Raises UnsupportedGraphError, with the graph half rewritten, where a node does not run on other strides.
    """
    if layouts is Layouts.TRACED:
        return module
    graph, everywhere = module.graph, layouts is Layouts.EVERYWHERE
    wanted = _wanted(graph, everywhere)
    if any(is_convolution(node) and (everywhere or _runs_channels_last(node)) for node in graph.nodes):
        rewriter = _Rewriter(graph, wanted, everywhere)
        for node in list(graph.nodes):
            try:
                rewriter.visit(node)
            except (RuntimeError, ValueError) as error:
                raise UnsupportedGraphError(
                    f"channels_last: '{node.name}' ({node.target}) does not run on the strides that channels-last "
                    f"convolutions lead to: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                ) from error
        for node in rewriter.passed:
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        module.recompile()
    return module


def is_converted(module: fx.GraphModule) -> bool:
    """Whether the pass had anything to change in a graph."""
    return any(LAYOUT in node.meta for node in module.graph.nodes)


def is_convolution(node: fx.Node) -> bool:
    """Whether `node` is a convolution of images, or its backward."""
    return node.target in _CONVOLUTION_OPERANDS and all(value.meta["val"].ndim == 4 for value in operands(node))


def operands(node: fx.Node) -> list[fx.Node]:
    """The images and the weight that a convolution or its backward reads."""
    found = [node.args[i] for i in _CONVOLUTION_OPERANDS[node.target]]
    assert all(isinstance(value, fx.Node) for value in found)
    return [value for value in found if isinstance(value, fx.Node)]


def is_channels_last(value: torch.Tensor) -> bool:
    """Whether a 4-d value can be read channels-last as it stands."""
    return value.is_contiguous(memory_format=torch.channels_last)


def prefers_channels_last(value: torch.Tensor) -> bool:
    """Whether ATen takes a 4-d value for channels-last (c10/core/MemoryFormat.h); what could be either is not."""
    stride, step = _stride(value), 0
    if stride[1] == 0:
        return False
    for d in (1, 3, 2, 0):
        if stride[d] < step or value.shape[d] == 0 or (d == 0 and step == stride[1]):
            return False
        step = stride[d] * max(int(value.shape[d]), 1)
    return True


def _runs_channels_last(node: fx.Node) -> bool:
    """ATen's rule: a convolution runs channels-last where its input or its weight is."""
    return any(prefers_channels_last(value.meta["val"]) for value in operands(node)[-2:])


def _wanted(graph: fx.Graph, everywhere: bool) -> set[fx.Node]:
    """The 4-d results that convolutions read, themselves or through pointwise operators."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.ndim != 4:
            continue
        for user in node.users:
            if is_convolution(user):
                reads = node in operands(user) and (everywhere or _runs_channels_last(user))
            else:
                reads = user in found and _hands_layout_on(user)
            if reads:
                found.add(node)
                break
    return found


def _hands_layout_on(node: fx.Node) -> bool:
    """Whether the result has the layout of the operands where they have all the same."""
    if node.kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        return False
    return is_pointwise(node) or operator_name(node) == "aten::cat"


class _Rewriter:
    """Visits the nodes in order.

    clones: the channels-last copy of a value that pointwise readers get; pinned: one for convolutions only; passed:
    what a copy was made of that served its layout alone; traced: the copy with the old strides; strides: those of what
    has others now; changed: nodes with another value; operands: the old ones of what reads others now.
    """

    def __init__(self, graph: fx.Graph, wanted: set[fx.Node], everywhere: bool) -> None:
        self.graph = graph
        self.wanted = wanted
        self.everywhere = everywhere
        self.clones: dict[fx.Node, fx.Node] = {}
        self.pinned: dict[fx.Node, fx.Node] = {}
        self.passed: dict[fx.Node, fx.Node] = {}
        self.traced: dict[fx.Node, fx.Node] = {}
        self.strides: dict[fx.Node, list[tuple[int, ...]]] = {}
        self.changed: set[fx.Node] = set()
        self.operands: dict[fx.Node, tuple[Any, Any]] = {}

    def visit(self, node: fx.Node) -> None:
        """Give one node its operands in the layout it takes, and its value the strides that follow."""
        if node.op == "output":
            self._read(node, self._as_traced)
        elif node.op == "call_function":
            if is_convolution(node) and (self.everywhere or self._is_reached(node)):
                images = set(operands(node))
                self._read(node, lambda value: self._pinned(value, node) if value in images else value)
                self._infer(node)
            elif node.target is operator.getitem:
                self._infer(node)
            elif _takes_any_layout(node):
                self._flow(node)
            else:
                self._read(node, self._as_traced)
                self._infer(node)
            self._clone_where_wanted(node)

    def _is_reached(self, node: fx.Node) -> bool:
        """Whether a convolution runs channels-last by what it is given now."""
        read = [self.clones.get(value, value) for value in operands(node)[-2:]]
        return any(prefers_channels_last(value.meta["val"]) for value in read)

    def _flow(self, node: fx.Node) -> None:
        """Let a node take its operands as they are; as traced where it cannot."""
        args, kwargs, meta = node.args, node.kwargs, node.meta
        if operator_name(node) in _RESHAPES:
            self._read(node, lambda value: self.passed.get(value, value))
        else:
            self._read(node, lambda value: self.clones.get(value, value))
        try:
            self._infer(node)
            if _makes_contiguous(node) and LAYOUT not in node.meta:
                (source,) = node.all_input_nodes
                if is_channels_last(source.meta["val"]):
                    self.passed[node] = source
            results = [leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
            if node not in self.strides or _is_view(node) or all(_is_dense(result) for result in results):
                return
        except (RuntimeError, ValueError):
            # A view of channels that lie apart, for example.
            pass
        node.args, node.kwargs, node.meta = args, kwargs, meta
        self.changed.discard(node)
        self.strides.pop(node, None)
        self.operands.pop(node, None)
        self._read(node, self._as_traced)
        self._infer(node)

    def _read(self, node: fx.Node, choose: Callable[[fx.Node], fx.Node]) -> None:
        before, operands_before = node.all_input_nodes, (node.args, node.kwargs)
        node.args = fx.node.map_arg(node.args, choose)
        node.kwargs = fx.node.map_arg(node.kwargs, choose)
        if node.all_input_nodes != before:
            self.operands[node] = operands_before

    def _infer(self, node: fx.Node) -> None:
        """Run a node on its inputs' fake values where one of them is not what it was traced with."""
        inputs = node.all_input_nodes
        if node not in self.operands and not any(source in self.changed for source in inputs):
            return
        old = node.meta["val"]
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) and target is not operator.getitem:
            return
        args: Any = fx.node.map_arg(node.args, lambda source: source.meta["val"])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
        leaves = [leaf for source in inputs for leaf in tree_leaves(source.meta["val"])]
        like = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        with fake_mode_of(like), torch._C._DisableAutocast(), torch.no_grad():
            new = target(*args, **kwargs)
        self._replace(node, old, new)

    def _replace(self, node: fx.Node, old: Any, new: Any) -> None:
        before, after = ([_stride(leaf) for leaf in tree_leaves(value)] for value in (old, new))
        if before == after and not _is_view(node) and node.target is not operator.getitem:
            return
        self.changed.add(node)
        node.meta = {key: value for key, value in node.meta.items() if key != "tensor_meta"} | {"val": new}
        if before != after:
            self.strides[node] = before

    def _clone_where_wanted(self, node: fx.Node) -> None:
        if node in self.passed:
            self.clones[node] = self.passed[node]
        if node not in self.wanted or node in self.passed:
            return
        value = node.meta["val"]
        if is_channels_last(value) or not _is_dense(value):
            return
        self.clones[node] = self._clone(node, node, torch.channels_last, node.name + NAME_SUFFIX)

    def _pinned(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """What a convolution reads for `value`."""
        value = self.clones.get(value, value)
        if is_channels_last(value.meta["val"]):
            return value
        if value not in self.pinned:
            # An input, or a part of something: nothing but convolutions reads its copy, which is made for the first.
            self.pinned[value] = self._call(
                reader, True, torch.ops.aten.clone.default, (value,), {"memory_format": torch.channels_last}
            )
            self._name(self.pinned[value], value.name + NAME_SUFFIX)
        return self.pinned[value]

    def _as_traced(self, node: fx.Node) -> fx.Node:
        """The node's value with the strides it was traced with."""
        if node not in self.strides:
            return node
        if node not in self.traced:
            self.traced[node] = self._restored(node)
        return self.traced[node]

    def _restored(self, node: fx.Node) -> fx.Node:
        value, (stride, *_) = node.meta["val"], self.strides[node]
        if not isinstance(value, torch.Tensor) or not _is_dense(value, stride):
            # A part of something, or something repeated: taken from the whole as that was traced.
            again = self.graph.node_copy(node)
            again.args, again.kwargs = self.operands.get(node, (node.args, node.kwargs))
            self._read(again, self._as_traced)
            # The parts of a list stand right behind it.
            (again.all_input_nodes[0] if node.target is operator.getitem else _behind(node)).append(again)
            again.meta = inherited_meta(node) | {"val": value, LAYOUT: True}
            self.operands[again] = (node.args, node.kwargs)
            self._infer(again)
            self._name(again, node.name + TRACED_SUFFIX)
            self.strides.pop(again, None)
            strides = [_stride(leaf) for leaf in tree_leaves(again.meta["val"])]
            if strides != self.strides[node]:
                raise ValueError(f"no way back to {self.strides[node]}")
            return again
        if stride == _contiguous(value.shape):
            return self._clone(node, node, torch.contiguous_format, node.name + TRACED_SUFFIX)
        order = sorted(range(value.ndim), key=lambda d: -stride[d])
        turned = self._call(node, False, torch.ops.aten.permute.default, (node, order), {})
        copied = self._clone(turned, node, torch.contiguous_format, node.name + TRACED_SUFFIX)
        arguments = (copied, [int(n) for n in value.shape], list(stride))
        return self._call(copied, False, torch.ops.aten.as_strided.default, arguments, {})

    def _clone(self, source: fx.Node, like: fx.Node, memory_format: torch.memory_format, name: str) -> fx.Node:
        node = self._call(
            source, False, torch.ops.aten.clone.default, (source,), {"memory_format": memory_format}, like
        )
        self._name(node, name)
        return node

    def _call(
        self,
        place: fx.Node,
        before: bool,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        like: fx.Node | None = None,
    ) -> fx.Node:
        """A new call beside `place`, with the metadata of `like` (default: `place`) and a fake value of its own."""
        inserting = self.graph.inserting_before(place) if before else self.graph.inserting_after(_behind(place))
        with inserting:
            node = self.graph.call_function(target, args, kwargs)
        node.meta = inherited_meta(like or place)
        if before:
            # What the user said of recomputing the reader says nothing of its operand.
            node.meta.pop("recompute", None)
        values = fx.node.map_arg(args, lambda source: source.meta["val"])
        with fake_mode_of(values[0]), torch.no_grad():
            node.meta["val"] = target(*values, **kwargs)
        node.meta[LAYOUT] = True
        self.changed.add(node)
        return node

    def _name(self, node: fx.Node, name: str) -> None:
        node.name = self.graph._graph_namespace.create_name(name, None)


def _takes_any_layout(node: fx.Node) -> bool:
    """Whether a node may be given other strides than it was traced with."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = operator_name(node)
    if name in _STRIDES_MATTER or target is torch.ops.aten.view.dtype:
        return False
    if node.target in _CONVOLUTION_OPERANDS:
        return False
    return name in _PRODUCTS or _is_view(node) or is_generated_loop(node)


def _makes_contiguous(node: fx.Node) -> bool:
    """Whether a node copies an image for no more than its layout, as the decomposition of group norm does."""
    value = node.meta["val"]
    return (
        node.target is torch.ops.aten.clone.default
        and node.kwargs.get("memory_format") is torch.contiguous_format
        and value.ndim == 4
    )


def _is_view(node: fx.Node) -> bool:
    """Whether a node's results share the storage of an input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return operator_name(node) == "aten::_unsafe_view" or any(
        result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns
    )


def _behind(node: fx.Node) -> fx.Node:
    """The last of the getitems that stand right behind a node, or behind the node whose result it is."""
    has_parts = isinstance(node.meta.get("val"), tuple | list) or node.target is operator.getitem
    return last_result(node) if has_parts else node


def _stride(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ()
    return tuple(int(step) for step in value.stride())


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))


def _is_dense(value: torch.Tensor, stride: tuple[int, ...] | None = None) -> bool:
    """Whether strides (of `value`, where none are given) leave no gaps and repeat nothing."""
    step = 1
    for own, size in sorted(zip(stride or _stride(value), map(int, value.shape), strict=True)):
        if size > 1:
            if own != step:
                return False
            step *= size
    return True
