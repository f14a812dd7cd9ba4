"""Inside Inductor, after fusion: put the transfers where the plan wants them, and read the peak off the scheduler.

Where transfers go is in transfer_order.py, what the peak counts in lowered_buffers.py, and what is done where that is
over its limit in fit_peak.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor import custom_graph_pass

from fxhome.passes import (
    buffer_spans,
    fit_peak,
    in_place,
    inlined_random,
    lowered_buffers,
    mix_order,
    recorded_layouts,
    reused_buffers,
    transfer_order,
    unfuse,
    whole_concatenations,
)
from fxhome.passes.allocator import Allocation, reserved_bytes
from fxhome.passes.capped_allocator import least_cap
from fxhome.passes.fit_peak import fit
from fxhome.passes.lowered_buffers import LoweredBuffers, LoweredPeak
from fxhome.passes.pack_blocks import packed_bytes
from fxhome.passes.reused_buffers import Room
from fxhome.passes.transfer_order import place_transfers, transfer_of
from fxhome.placement import Instruction

# torch 2.12 and later want this class there and take its uuid() into the cache key; 2.11 takes any callable.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


class OverLimitError(BaseException):
    """Ends a lowering whose peak is over its limit, before any kernel is compiled. Not an Exception: nothing on the way
    may swallow it.
    """

    def __init__(self, peak: LoweredPeak, is_backward: bool) -> None:
        super().__init__(peak)
        self.peak = peak
        self.is_backward = is_backward


class ScatteredError(BaseException):
    """Ends a lowering whose blocks lie too far apart, laid or before they are, before the backward is compiled.
    reserved_bytes: what they need even then. is_enforceable: whether the plan runs under a cap all the same.
    """

    def __init__(self, reserved_bytes: int, is_enforceable: bool) -> None:
        super().__init__(reserved_bytes)
        self.reserved_bytes = reserved_bytes
        self.is_enforceable = is_enforceable


class LayoutError(BaseException):
    """Ends a lowering in which what is moved or encoded lies otherwise than the graph says, and cannot be told to."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(names)
        self.names = names


class MeasuredError(BaseException):
    """Ends a lowering that was only to be measured."""


class ScheduleCheck(_SchedulerPass):  # type: ignore[misc]
    """Inductor's post-fusion pass for one plan: it orders the forward and the backward and keeps what it sees of
    them.
    """

    def __init__(
        self,
        program: Sequence[Instruction],
        workspace: Mapping[str, int],
        forward_limit_bytes: int | None = None,
        backward_limit_bytes: int | None = None,
        *,
        reserved_limit_bytes: int | None = None,
        cap_bytes: int | None = None,
        stops_over_limit: bool = True,
        stops_scattered: bool = True,
        only_measures: bool = False,
        keeps_concatenations_whole: bool = False,
        held_inputs: frozenset[str] = frozenset(),
    ) -> None:
        """The limits: what each graph may hold above what is resident; over it, OverLimitError (unless
        `stops_over_limit` is False). None: no limit. reserved_limit_bytes: what the allocator may take for both above
        what is resident, each block laid where it fits; over it, ScatteredError (unless `stops_scattered` is False).
        cap_bytes: the same before any block is laid, in the first steps, where it may give holes back.
        only_measures: every lowering ends here, by MeasuredError. keeps_concatenations_whole: whether the graphs are
        lowered so (passes/whole_concatenations.py). held_inputs: what the backward is given and the caller holds on to.
        """
        self.has_transfers = any(item.kind.startswith("swap") or item.kind in ("encode", "decode") for item in program)
        self.workspace = workspace
        self.stops_over_limit = stops_over_limit
        self.stops_scattered = stops_scattered
        self.only_measures = only_measures
        self.keeps_concatenations_whole = keeps_concatenations_whole
        self.held_inputs = held_inputs
        self.room: Room | None = None  # in the graph lowered last
        self.has_parts = False  # whether the graph lowered last has a concatenation that is allocated with a part
        self.limits = (forward_limit_bytes, backward_limit_bytes)
        self.reserved_limit_bytes = reserved_limit_bytes
        self.cap_bytes = cap_bytes
        self.reserved_bytes: int | None = None
        self.packed_bytes: int | None = None
        self.least_cap_bytes: int | None = None
        self._allocations: list[Allocation] | None = None
        self.forward: LoweredPeak | None = None
        self.backward: LoweredPeak | None = None
        self.order: list[str] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Reorder (if there is anything to move) and measure."""
        from torch._inductor.virtualized import V

        if self.has_transfers and not self.only_measures and (names := laid_out_otherwise(nodes)):
            raise LayoutError(names)
        self.room = None
        buffers = LoweredBuffers(nodes, self.workspace, self.held_inputs)
        self.has_parts = bool(buffers.whole_of)
        limit = self.limits[1 if V.graph.is_backward else 0]
        if self.has_transfers:
            nodes = place_transfers(nodes)
        if limit is not None:
            nodes, buffers = fit(nodes, buffers, limit)
        peak = buffers.peak(nodes)
        if limit is not None and peak.peak_bytes > limit and self.stops_over_limit:
            raise OverLimitError(peak, V.graph.is_backward)
        if V.graph.is_backward:
            self.backward = peak
        else:
            self.forward = peak
        self.order = [_label(node) for node in nodes]
        self._reserve(buffers.allocations(nodes), V.graph.is_backward)
        if self.only_measures:
            raise MeasuredError
        if self.stops_scattered:
            # Where blocks must lie close, none is kept longer than it is needed.
            self.room = Room(buffers.curve(nodes)[0], V.graph, buffers.by_name)
        return nodes

    def _reserve(self, allocations: list[Allocation], is_backward: bool) -> None:
        """With both graphs seen, what the allocator takes for a step, left to itself and with its blocks laid."""
        if not is_backward:
            self._allocations = allocations
        elif self._allocations is not None:
            both = [*self._allocations, *allocations]
            self.reserved_bytes, alive_bytes = reserved_bytes(both)
            self.packed_bytes = self.least_cap_bytes = self.reserved_bytes
            if self.only_measures:
                self.least_cap_bytes = least_cap(both, alive_bytes, self.reserved_bytes)
                return
            if self.reserved_limit_bytes is None or self.reserved_bytes <= self.reserved_limit_bytes:
                return
            self.packed_bytes = min(self.reserved_bytes, packed_bytes(both, self.reserved_limit_bytes))
            self.least_cap_bytes = least_cap(both, alive_bytes, self.reserved_bytes)
            if self.stops_scattered:
                self.stop_scattered(self.packed_bytes, self.least_cap_bytes)

    def stop_scattered(self, packed_bytes: int, least_cap_bytes: int) -> None:
        """Raise ScatteredError where a plan's blocks need too much: laid, or in the first steps, under a cap."""
        is_enforceable = self.cap_bytes is None or least_cap_bytes <= self.cap_bytes
        if self.reserved_limit_bytes is not None and packed_bytes > self.reserved_limit_bytes:
            raise ScatteredError(packed_bytes, is_enforceable)
        if not is_enforceable:
            raise ScatteredError(least_cap_bytes, is_enforceable)

    def uuid(self) -> Any:
        """Its source, its limits, whether buffers are used again and how concatenations are lowered: what else differs
        between plans is in the graphs already.
        """
        sources = (
            __file__,
            transfer_order.__file__,
            buffer_spans.__file__,
            fit_peak.__file__,
            lowered_buffers.__file__,
            in_place.__file__,
            inlined_random.__file__,
            mix_order.__file__,
            recorded_layouts.__file__,
            reused_buffers.__file__,
            unfuse.__file__,
            whole_concatenations.__file__,
        )
        settings = (*self.limits, self.stops_scattered, self.keeps_concatenations_whole, *sorted(self.held_inputs))
        return custom_graph_pass.get_hash_for_files(sources, str(settings))

    def __reduce__(self) -> tuple[Any, ...]:
        """In a pickled cache key it stands for its source and limits."""
        return str, (self.uuid().hex(),)


def laid_out_otherwise(nodes: Sequence[Any]) -> frozenset[str]:
    """Tensors that are moved or encoded in other strides than the graph recorded, in which they would come back."""
    found = set()
    for node in nodes:
        for inner in node.get_nodes():
            if getattr(inner.node, "op_overload", None) not in recorded_layouts.MOVERS:
                continue
            operand = inner.node.inputs[0]
            for origin in inner.node.get_origins():
                if origin.target not in recorded_layouts.MOVERS:
                    continue
                recorded = origin.args[0].meta["val"].stride()
                lies = zip(operand.get_size(), operand.get_stride(), recorded, strict=True)
                if any(int(extent) > 1 and int(real) != int(said) for extent, real, said in lies):
                    found.add(str(origin.meta["fxhome_source"]))
    return frozenset(found)


def _label(node: Any) -> str:
    operator = transfer_of(node)
    return f"{operator.name().split('::')[1]}" if operator is not None else str(node.get_name())
