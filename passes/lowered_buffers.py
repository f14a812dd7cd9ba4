"""What Inductor's scheduler will allocate: every device buffer, who makes it, who reads it; and the peak of any order.

    scheduler nodes -> LoweredBuffers (sizes, makers, readers: the same for every order)
                    -> lives, curve, peak under one order

Counted like the allocator counts: a storage once however many inputs are views of it, the results of one call from the
call on, what a wait returns as the buffer that it returns, what is written over its operand as that operand, the parts
of a concatenation as the whole of it from the first part on, and nothing for what a fused kernel makes for itself
alone.
Inputs of the forward are resident and not counted, host copies are not on the device, outputs live to the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxhome.passes.allocator import Allocation, events
from fxhome.passes.buffer_spans import BufferSpans, LoweredBuffer
from fxhome.passes.facts import allocated_bytes, storage_key, storage_nbytes
from fxhome.passes.in_place import takeovers
from fxhome.passes.mix_order import mix_order_workspace
from fxhome.runtime import codec_ops, ops

HOLDERS = 40
_HELD_ANYWAY = ("primals_", "tangents_", "arg", "fwd_rng_state", "bwd_rng_state")
"""Inputs that the caller holds, as torch names them: they are not this graph's. Saved outputs come beside them."""


@dataclass(frozen=True)
class LoweredPeak:
    """Bytes of one lowered graph above what is resident: worst moment, end, and which kernel stands at the worst
    moment.
    """

    peak_bytes: int
    end_bytes: int
    kernel: str
    holders: tuple[tuple[str, int], ...] = ()
    """The largest buffers alive then, largest first."""


class LoweredBuffers:
    """The allocations of the graph that Inductor is scheduling. Built inside a scheduler pass, for any order of
    `nodes`.

    workspace: bytes that an operator's own kernel takes besides its results, by the name of its graph node. held:
    inputs that the caller holds, which are no buffers of this graph's.
    """

    def __init__(self, nodes: Sequence[Any], workspace: Mapping[str, int], held: frozenset[str] = frozenset()) -> None:
        self.workspace_by_name = workspace
        self.held = held
        self.buffers, kept_inside, self.whole_of = _collect(list(nodes), held)
        self.by_name = {buffer.name: buffer for buffer in self.buffers}
        self.takeovers = [
            takeover
            for takeover in takeovers(nodes, kept_inside)
            if (operand := self.by_name.get(takeover.operand)) is not None
            and not operand.is_output
            and operand.maker is not takeover.kernel
            and (result := self.by_name.get(takeover.result)) is not None
            and operand.size_bytes == result.size_bytes
        ]
        self.output_names = _output_names()
        self.workspace = {node: size for node in nodes if (size := _workspace_of(node, workspace))}
        self.spans = BufferSpans(nodes, self.buffers, self.takeovers, self.workspace)

    def lives(self, order: Sequence[Any]) -> list[tuple[LoweredBuffer, int, int]]:
        """(buffer, first step, last step) under an order of the nodes; what is returned lives to len(order).

        What is written over an operand begins as that operand ends, one step before.
        """
        start, stop = self.spans.of(order)
        return list(zip(self.buffers, start.tolist(), stop.tolist(), strict=True))

    def allocations(self, order: Sequence[Any]) -> list[Allocation]:
        """What the allocator is asked for, in order. Inputs are there already and only freed; an output carries its
        name in the graph, by which the backward knows it.
        """
        step = {node: i for i, node in enumerate(order)}
        # What is written over an operand is the operand's block under another name.
        block = {buffer.name: buffer.name for buffer in self.buffers}
        for takeover in self.spans.taken(order):
            block[takeover.result] = block[takeover.operand]
        lives: dict[str, tuple[int, int, int]] = {}
        for buffer, start, stop in self.lives(order):
            first = start if buffer.maker is not None else -1
            name = block[buffer.name]
            known = lives.get(name, (buffer.size_bytes, first, stop))
            lives[name] = (known[0], min(known[1], first), max(known[2], stop))
        called: dict[str, str] = {}
        for name, output in self.output_names.items():
            whole = self.whole_of.get(name, name)
            if whole in block and (whole == name or block[whole] not in called):
                called[block[whole]] = output
        named = [(called.get(name, name), *life) for name, life in lives.items()]
        named += [
            (f"workspace of {node.get_name()}", size, step[node], step[node]) for node, size in self.workspace.items()
        ]
        return events(named, len(order))

    def curve(self, order: Sequence[Any]) -> tuple[list[int], int]:
        """Bytes alive while each node runs, its own workspace included; and the bytes alive at the end."""
        curve, end_bytes = self.spans.curve(order)
        return curve.tolist(), end_bytes

    def peak(self, order: Sequence[Any]) -> LoweredPeak:
        """The worst moment of an order."""
        curve, end_bytes = self.curve(order)
        if not curve:
            return LoweredPeak(0, end_bytes, "")
        worst = max(range(len(curve)), key=curve.__getitem__)
        alive = [(b.name, b.size_bytes) for b, start, stop in self.lives(order) if start <= worst <= stop]
        holders = tuple(sorted((item for item in alive if item[1]), key=lambda item: -item[1])[:HOLDERS])
        return LoweredPeak(curve[worst], end_bytes, str(order[worst].get_name()), holders)


def _collect(nodes: list[Any], held: frozenset[str]) -> tuple[list[LoweredBuffer], set[str], dict[str, str]]:
    """The allocations, the names of the results that no kernel writes, and by what name results are allocated that are
    not by their own: parts of a concatenation.
    """
    from torch._inductor import memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    graph = V.graph
    memory.assign_memory_planning_info_for_scheduler_buffers(nodes, graph.scheduler.name_to_buf)
    inputs = memory.get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs.keys()))
    outputs = set(graph.get_output_names())
    main = "cuda" if "cuda" in graph.device_types else "cpu"
    found: dict[str, LoweredBuffer] = {}
    for buffer in _input_buffers(inputs, graph, main, held):
        found[buffer.name] = buffer
        buffer.is_output = buffer.is_output or buffer.name in outputs
    aliases: list[tuple[str, LoweredBuffer]] = []
    whole_of: dict[str, str] = {}
    kept_inside: set[str] = set()
    maker_of = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
    for node in nodes:
        never_written = kernel_locals(node)
        kept_inside |= never_written
        for scheduled in node.get_outputs():
            name = scheduled.get_name()
            ir_buffer = graph.name_to_buffer.get(name)
            if _device_of(name, graph) != main or _is_host(name, graph) or _is_packed(ir_buffer):
                continue
            if name in never_written:
                continue
            plan = scheduled.mpi_buffer
            size = allocated_bytes(max(plan.size_free, _extent_bytes(ir_buffer)), main)
            made = LoweredBuffer(name, size, node, set(plan.succ_nodes), name in outputs)
            if (whole := _part_of(ir_buffer)) is not None:
                whole_of[name] = whole
                aliases.append((whole, made))
                continue
            source = _unpacked_from(ir_buffer)
            # Up to torch 2.11 a single result is unpacked, too; in 2.14 it is the call itself.
            if (aliased := _waited_for(ir_buffer if source is None else source)) is not None:
                aliases.append((aliased, made))
                continue
            if source is not None:
                # The results of one call are allocated by the call; the nodes that unpack them only name them.
                made.maker = maker_of[source.get_name()]
                made.readers.add(node)
            found[name] = made
    for aliased, made in aliases:
        while aliased in whole_of:
            aliased = whole_of[aliased]
        if made.name in whole_of:
            whole_of[made.name] = aliased
        if (original := found.get(aliased)) is not None:
            original.readers |= made.readers | {made.maker}
            original.is_output = original.is_output or made.is_output
            if made.name in whole_of:
                original.parts.add(made.maker)
    return list(found.values()), kept_inside, whole_of


def _extent_bytes(ir_buffer: Any) -> int:
    """From the first to the last element as the buffer is laid out: rows may be padded. 0 where it has no layout of its
    own.
    """
    from torch._inductor import ir

    layout = ir_buffer.get_output_spec() if ir_buffer is not None else None
    if not isinstance(layout, ir.Layout) or isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
        return 0
    if any(int(length) == 0 for length in layout.size):
        return 0
    extent = 1 + sum((int(length) - 1) * int(step) for length, step in zip(layout.size, layout.stride, strict=True))
    return extent * int(layout.dtype.itemsize)


def _part_of(ir_buffer: Any) -> str | None:
    """The concatenation that a result is written into, which is allocated before its first part is written."""
    if ir_buffer is None or type(ir_buffer.get_output_spec()).__name__ != "NonOwningLayout":
        return None
    return str(ir_buffer.get_output_spec().view.get_name())


def kernel_locals(node: Any) -> set[str]:
    """Buffers that a fused kernel makes and reads within one pass over its elements: they stay in registers.

    A kernel with reductions goes over its elements again once a reduction's result is needed; what is read in a later
    pass than the one that makes it is written to memory. (A kernel that holds a whole row at a time needs no second
    pass: there this counts too much, never too little.)
    """
    if type(node).__name__ != "FusedSchedulerNode":
        return set()
    operations = node.get_operation_names()
    pass_of = _passes(node.get_nodes())
    readers: dict[str, set[int]] = {}
    for loop in node.get_nodes():
        for dep in loop.read_writes.reads:
            readers.setdefault(dep.name, set()).add(pass_of[loop.get_name()])
    found = set()
    for loop in node.get_nodes():
        for buffer in loop.get_outputs():
            name = buffer.get_name()
            if readers.get(name, set()) == {pass_of[loop.get_name()]} and not loop.is_reduction():
                if node.scheduler.can_buffer_be_removed_through_fusion(name, operations):
                    found.add(name)
    return found


def _passes(loops: Sequence[Any]) -> dict[str, int]:
    """Which pass over the elements each loop of a kernel is in: a new one begins where a reduction of the current one
    is needed.
    """
    found: dict[str, int] = {}
    current = 0
    open_reductions: set[str] = set()
    for loop in loops:
        if open_reductions & set(loop.ancestors):
            current += 1
            open_reductions = set()
        found[loop.get_name()] = current
        if loop.is_reduction():
            open_reductions.add(loop.get_name())
    return found


def _output_names() -> dict[str, str]:
    """The graph's names of what it returns, by the names of the buffers."""
    from torch._inductor.virtualized import V

    (output,) = V.graph.orig_gm.graph.find_nodes(op="output")
    results = [result for result in output.args[0] if result is not None]
    names = V.graph.get_output_names()
    return {buffer: str(result.name) for buffer, result in zip(names, results, strict=False)}


def _input_buffers(inputs: Mapping[str, Any], graph: Any, main: str, held: frozenset[str]) -> list[LoweredBuffer]:
    """One buffer per storage among the inputs that the graph may free: views of one storage free it together."""
    values = {str(node.target): node.meta.get("val") for node in graph.orig_gm.graph.nodes if node.op == "placeholder"}
    by_storage: dict[object, LoweredBuffer] = {}
    # What nothing reads (an operator that wants no more than its shape) is never dropped: it is there to the end.
    unread = [name for name in values if name not in inputs and not name.startswith(_HELD_ANYWAY)]
    for name in (*inputs, *unread):
        if name in held or _device_of(name, graph) != main or _is_host(name, graph):
            continue
        value = values.get(name)
        key: object = name
        size = inputs[name].mpi_buffer.size_free if name in inputs else 0
        if isinstance(value, torch.Tensor) and (known := storage_key(value)) is not None:
            key, size = known, storage_nbytes(value)
        readers = set(inputs[name].mpi_buffer.succ_nodes) if name in inputs else set()
        buffer = by_storage.setdefault(key, LoweredBuffer(name, allocated_bytes(size, main), None, set(), False))
        buffer.readers |= readers
        buffer.is_output = buffer.is_output or name not in inputs
    return list(by_storage.values())


def _workspace_of(node: Any, workspace: Mapping[str, int]) -> int:
    """Workspace of a library call, or of a generated kernel that has one; most have none, whichever graph nodes they
    stem from.
    """
    sizes = [
        workspace.get(origin.name, 0)
        for inner in node.get_nodes()
        if inner.node is not None and inner.is_extern()
        for origin in inner.node.get_origins()
    ]
    return max([mix_order_workspace(node), *sizes])


def _device_of(name: str, graph: Any) -> str | None:
    source = graph.graph_inputs.get(name) or graph.name_to_buffer.get(name)
    device = source.get_device() if source is not None and hasattr(source, "get_device") else None
    return device.type if device is not None else None


def _is_packed(buffer: Any) -> bool:
    """Whether a buffer stands for the several results of one call and is no memory itself."""
    return type(getattr(buffer, "layout", None)).__name__ in ("MultiOutputLayout", "NoneLayout")


def _unpacked_from(buffer: Any) -> Any:
    """The call whose result a buffer names, or None."""
    return buffer.inputs[0] if type(buffer).__name__ == "MultiOutput" else None


def _waited_for(call: Any) -> str | None:
    """The buffer that a wait returns unchanged, or None for any other call."""
    if getattr(call, "op_overload", None) in (ops.swap_in_wait, ops.swap_out_wait):
        return str(call.inputs[0].get_name())
    return None


def _is_host(name: str, graph: Any) -> bool:
    """Whether a buffer is the host copy of a swapped tensor (on CPU, host and device memory have one device type)."""
    buffer = graph.name_to_buffer.get(name)
    for candidate in (buffer, _unpacked_from(buffer)):
        if getattr(candidate, "op_overload", None) in (ops.swap_out, ops.swap_out_wait, codec_ops.swap_out_encoded_op):
            return True
    return name.endswith("_host") and name in graph.graph_inputs
