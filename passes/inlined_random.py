"""Have Inductor compute random numbers again where they are read, instead of writing them.

    rand -> gt (dropout's mask) -> multiplied at once, and once more in the gradient, long after

Inductor writes the numbers (fp32) where they are made and inlines what is made of them into each reader, so that a mask
that is computed anew for the backward keeps four bytes of random number per element alive in place of its one. A number
depends on its seed and its place alone: each reader computes it from these, and nothing is kept, as a plan has it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def random_numbers_inlined() -> Iterator[None]:
    """While a graph is lowered in here, random numbers are written only where something asks for them in memory.

    Lowerings must not run at the same time in other threads (passes/torch_compat.py, compile_lock).
    """
    from torch._inductor import inductor_prims, ir
    from torch._inductor.lowering import lowerings

    random = inductor_prims.random
    written = lowerings[random]

    def not_written(*args: Any, **kwargs: Any) -> Any:
        realize = ir.StorageBox.realize
        # The only thing that the lowering of this operator has written is its own result.
        ir.StorageBox.realize = lambda _: None  # type: ignore[assignment,method-assign]
        try:
            return written(*args, **kwargs)
        finally:
            ir.StorageBox.realize = realize  # type: ignore[method-assign]

    lowerings[random] = not_written
    try:
        yield
    finally:
        lowerings[random] = written
