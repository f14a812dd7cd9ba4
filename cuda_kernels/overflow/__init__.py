"""What a copy of an encoded buffer's prefix left out, moved by a kernel that knows how long the buffer is.

The host lets a copy engine move as many bytes as it believes to be in use, without asking the device. This kernel runs
behind that copy, looks at the count in the header and moves the rest; as a rule there is none and it ends at once. It
also leaves the count where the host finds it for the next time.
"""

from __future__ import annotations

import functools

from fxhome.cuda_kernels.launch import KernelKey, loaded_kernel
from fxhome.cuda_kernels.layout import VECTOR_BYTES

BLOCKS, THREADS = 8, 256
"""Few, because what is left is little and the link is the limit."""

KERNEL = KernelKey("overflow.kernel", "make_copy_overflow", ())


@functools.lru_cache(maxsize=8192)
def _constants(head_bytes: int, worst_case_bytes: int) -> tuple[int, int]:
    return head_bytes // VECTOR_BYTES, (worst_case_bytes - head_bytes) // VECTOR_BYTES


def copy_overflow(
    device_index: int,
    stream: int,
    header: int,
    source: int,
    target: int,
    copied_bytes: int,
    sizes: tuple[int, int],
    note: int = 0,
) -> None:
    """Queue on `stream` (a raw handle) the move of what lies behind `copied_bytes` of an encoded buffer.

    header: address of the buffer's device copy. source, target: addresses of the buffer and its copy. copied_bytes: a
    multiple of 16. sizes: (head bytes, worst-case bytes). note: address of a 32-bit word, visible to the device, that
    gets the count of tail vectors in use plus one; 0 for none.
    """
    head_vectors, most_vectors = _constants(*sizes)
    arguments = [header, source, target, copied_bytes // VECTOR_BYTES, head_vectors, most_vectors, note]
    loaded_kernel(KERNEL, device_index)(BLOCKS, THREADS, arguments, stream)
