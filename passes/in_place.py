"""Which results Inductor writes over an operand of the same kernel that nothing reads afterwards.

    buf3 = relu'(buf1, x)     x a saved tensor, buf1 made by the kernel before and read by nobody else
                              -> buf3 takes buf1's memory: one buffer in and out, not two

Inductor decides this while it writes the kernels, after any pass has run; the rules are its own (scheduler.py,
decide_inplace_update), read so that what is found here is always taken: a doubtful case counts as two buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LOOPS = ("SchedulerNode", "FusedSchedulerNode", "FusedMixOrderReductions")


@dataclass(frozen=True)
class Takeover:
    """`result` may be written over `operand` by `kernel`, if every other reader of the operand runs before it."""

    kernel: Any
    result: str
    operand: str


def takeovers(nodes: Sequence[Any], never_written: set[str]) -> list[Takeover]:
    """What each generated kernel can write in place, whatever the order of the kernels.

    never_written: results that a kernel keeps to itself.
    """
    from torch._inductor import config
    from torch._inductor.codegen.common import BackendFeature
    from torch._inductor.virtualized import V

    if not config.inplace_buffers:
        return []
    kernel_of = {loop.get_name(): node for node in nodes for loop in node.get_nodes()}
    found = []
    for node in nodes:
        if type(node).__name__ not in _LOOPS:
            continue
        if not V.graph.has_feature(node.get_device(), BackendFeature.INPLACE_BUFFERS):
            continue
        claimed: set[str] = set()
        for loop in node.get_nodes():
            for result in loop.get_outputs():
                operand = _operand(loop, node, result, kernel_of, claimed)
                if operand is None:
                    continue
                claimed.add(operand)
                # What the kernel keeps to itself may take the place all the same, and frees nothing.
                if result.get_name() not in never_written:
                    found.append(Takeover(node, result.get_name(), operand))
    return found


def _operand(loop: Any, kernel: Any, result: Any, kernel_of: dict[str, Any], claimed: set[str]) -> str | None:
    """The operand that `result` takes the memory of, or None."""
    from torch._inductor.codegen.wrapper import can_match_buffer_size
    from torch._inductor.virtualized import V

    made = result.node
    if made is None or not made.should_allocate() or made.get_inputs_that_alias_output() or made.get_mutation_names():
        return None
    for read in loop.read_writes.reads:
        operand = loop.scheduler.name_to_buf.get(read.name)
        if operand is None or read.name in claimed or not _is_plain(operand, V.graph):
            continue
        own = [user for user in operand.users if kernel_of.get(user.get_name()) is kernel]
        outside = [user for user in operand.users if user.get_name() not in kernel_of]
        # Loops of this kernel that must run before may read the operand too; any other reader comes too late.
        last = [user for user in own if user.get_name() not in loop.ancestors]
        if outside or len(last) != 1 or last[0].node is not loop or not last[0].can_inplace:
            continue
        if can_match_buffer_size(operand.node, made) and _one_index([user.node for user in own], read.name):
            return str(read.name)
    return None


def _is_plain(operand: Any, graph: Any) -> bool:
    """Whether the operand is a buffer of this graph that something else may be written over."""
    name = operand.get_name()
    node, maker = operand.node, operand.defining_op
    if node is None or maker is None or name in graph.removed_buffers or name in graph.never_reuse_buffers:
        return False
    if name in graph.graph_inputs or name in graph.constants or type(maker).__name__ == "NopKernelSchedulerNode":
        return False
    # Packed results, results written into another buffer, and buffers that other processes read.
    odd = ("NoneLayout", "MultiOutputLayout", "MutationLayoutSHOULDREMOVE", "CommBufferLayout")
    if type(node.get_output_spec()).__name__ in odd:
        return False
    return not node.get_inputs_that_alias_output()


def _one_index(loops: Sequence[Any], name: str) -> bool:
    """Whether all loops read the buffer at the same one place per element."""
    return len({dep for loop in loops for dep in loop.read_writes.reads_and_writes() if dep.name == name}) == 1
