"""Have Inductor write a concatenation as the planned graph says: all of it, when the last part is there.

    y = relu(a); saved mask y > 0; ...; cat([y, b])     left to itself, Inductor makes y at its place in the result, or
                                                        copies it there in the kernel that makes it
                                                        -> the whole result is allocated with y, long before b
    here                                                -> y is a buffer, the result one kernel behind b

Which one Inductor takes depends on what else reads a part, and differs from the forward to the backward and from plan
to plan: no model of the joint graph knows it. What is written at once is what the model counts. It costs what a part
that was written already is read and written once more. A concatenation of which no part is in memory yet is left to
Inductor, and so is one of more than MAX_PARTS: the kernel asks of each element which part it is from.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

MAX_PARTS = 8


@contextlib.contextmanager
def concatenations_kept_whole() -> Iterator[None]:
    """While a graph is lowered in here, a concatenation with a part that is written already is one kernel of its own.

    Lowerings must not run at the same time in other threads (passes/torch_compat.py, compile_lock).
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    create = ir.ConcatKernel.__dict__["create"]

    def whole(cls: Any, inputs: Sequence[Any], dim: int) -> Any:
        is_concatenation = V.graph.current_node.target is torch.ops.aten.cat.default
        if not is_concatenation or len(inputs) > MAX_PARTS or not any(_is_written(part) for part in inputs):
            return create.__func__(cls, inputs, dim)
        joined = lowering.pointwise_cat(inputs, dim)
        # Otherwise its readers would compute it again, and its parts would live as long as they do.
        joined.realize()
        return joined.data

    ir.ConcatKernel.create = classmethod(whole)  # type: ignore[assignment]
    try:
        yield
    finally:
        ir.ConcatKernel.create = create  # type: ignore[method-assign]


def _is_written(part: Any) -> bool:
    """Whether a generated kernel has a part in memory already: one that might have made it in place."""
    from torch._inductor import ir

    while isinstance(part, ir.MutableBox | ir.BaseView):
        part = part.data
    return isinstance(part, ir.ComputedBuffer | ir.ConcatKernel)
