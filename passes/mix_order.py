"""What Inductor's kernels of two reductions in different orders take besides their results.

    dx = sum over a row's elements,  dw = sum over the rows     one pass over the elements: layer norm's backward

Each part of the rows leaves its own sums of the second kind, float32, in a workspace that lives until they are added.
Its size is chosen while the kernel is written, behind the scheduler pass that counts: it is worked out as torch does
(torch/_inductor/codegen/simd.py, torch 2.11 to 2.14).
"""

from typing import Any

import torch

PARTS_PER_PROCESSOR = 8
LEAST_ROWS, MOST_ROWS = 16, 128


def mix_order_workspace(node: Any) -> int:
    """Bytes of the workspace of a scheduler node; 0 for any other kind of node."""
    if type(node).__name__ != "FusedMixOrderReductions":
        return 0
    from torch._inductor.scheduler import MixOrderReduction

    rows, columns = (int(extent) for extent in MixOrderReduction.get_numel_rnumel(node.node1))
    reductions = sum(bool(inner.is_reduction()) for inner in node.node2.get_nodes())
    return reductions * columns * -(-rows // rows_of_a_part(rows, node.node1.get_device())) * torch.float32.itemsize


def rows_of_a_part(rows: int, device: torch.device) -> int:
    """How many rows one part of such a kernel adds up."""
    from torch._inductor import config
    from torch._inductor.runtime.hints import DeviceProperties

    if config.triton.mix_order_reduction_split_size is not None:
        return int(config.triton.mix_order_reduction_split_size)
    parts = DeviceProperties.create(device).multi_processor_count * PARTS_PER_PROCESSOR
    share = rows // parts
    return min(max(1 << share.bit_length() - 1 if share else 0, LEAST_ROWS), MOST_ROWS)
