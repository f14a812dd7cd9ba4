"""Have Inductor lay out what is moved or encoded as the planned graph says.

    forward:  le (bool, channels-last by the graph)  -> swap_out      Inductor may write it in any layout it likes
    backward: swap_in(host, size, stride of the graph)                and reads it back in the one that was recorded

Inductor constrains the operands of operators that were traced; those that a pass inserts it leaves free. Here a layout
that is still open is closed as recorded, and one that is fixed is left: a copy in another layout would be freed while
it is still being moved.

What nothing constrains Inductor lays out by what it reads, and where that tells nothing, row by row: a concatenation
of channels-last images, for one, which is then written and read across, or copied once more. `channels_last_kept`
closes those as recorded, too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from fxhome.passes.channels_last import prefers_channels_last
from fxhome.runtime import codec_ops, ops

MOVERS = (ops.swap_out, codec_ops.encode_op, codec_ops.swap_out_encoded_op)
"""Operators whose operand comes back in the recorded geometry."""


def keep_recorded_layouts() -> None:
    """Register it with Inductor; more than once does no harm."""
    from torch._inductor.lowering import lowerings, make_fallback

    for operator in MOVERS:
        if operator not in lowerings:
            make_fallback(operator, warn=False)
            lowerings[operator] = functools.partial(_close_layouts, lowerings[operator])


def _close_layouts(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for operand, recorded in zip(args, V.graph.current_node.args, strict=False):
        if not isinstance(operand, ir.TensorBox) or not isinstance(recorded, fx.Node):
            continue
        operand.realize()
        if ir.is_storage_and_layout(operand) and isinstance(operand.get_layout(), ir.FlexibleLayout):
            strides = [int(step) for step in recorded.meta["val"].stride()]
            ir.as_storage_and_layout(operand, freeze=True, want_contiguous=False, exact_strides=strides)
    return call(*args, **kwargs)


@contextlib.contextmanager
def channels_last_kept() -> Iterator[None]:
    """While a graph is lowered in here, a layout that is still open at its end is channels-last where the graph's is.

    Lowerings must not run at the same time in other threads (passes/torch_compat.py, compile_lock).
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    fill_order, create = ir.ComputedBuffer.get_fill_order, ir.ConcatKernel.__dict__["create"]
    contiguous_strides = ir.FlexibleLayout.contiguous_strides

    def recorded_order(self: Any) -> Any:
        if isinstance(self.layout, ir.FlexibleLayout) and _is_recorded_channels_last(self):
            return ir.stride_order2fill_order(ir.NHWC_STRIDE_ORDER)
        return fill_order(self)

    def joined(cls: Any, inputs: Sequence[Any], dim: int) -> Any:
        node = V.graph.current_node
        if not _prefers_channels_last(node):
            return create.__func__(cls, inputs, dim)
        joined_size = [int(length) for length in node.meta["val"].shape]

        def strides(size: Sequence[Any]) -> Any:
            if [int(length) for length in size] == joined_size:
                return ir.FlexibleLayout.stride_ordered(size, ir.NHWC_STRIDE_ORDER)
            return contiguous_strides(size)

        # It asks for these once, for its own layout, to which that of its parts is then bound.
        ir.FlexibleLayout.contiguous_strides = staticmethod(strides)  # type: ignore[assignment]
        try:
            return create.__func__(cls, inputs, dim)
        finally:
            ir.FlexibleLayout.contiguous_strides = staticmethod(contiguous_strides)  # type: ignore[method-assign]

    ir.ComputedBuffer.get_fill_order = recorded_order  # type: ignore[method-assign]
    ir.ConcatKernel.create = classmethod(joined)  # type: ignore[assignment]
    try:
        yield
    finally:
        ir.ComputedBuffer.get_fill_order = fill_order  # type: ignore[method-assign]
        ir.ConcatKernel.create = create  # type: ignore[method-assign]


def _is_recorded_channels_last(buffer: Any) -> bool:
    origin, size = getattr(buffer.data, "origin_node", None), [int(length) for length in buffer.get_size()]
    return _prefers_channels_last(origin) and [int(length) for length in origin.meta["val"].shape] == size


def _prefers_channels_last(node: Any) -> TypeGuard[fx.Node]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.ndim == 4 and prefers_channels_last(value)
