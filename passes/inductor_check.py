"""Inside Inductor, after fusion: put the transfers where the plan wants them, and read the peak off the scheduler.

Compute keeps the order Inductor chose. Each transfer goes to the slot where the fewest compute kernels stand on the
wrong side of its place in the plan; dependencies always win. What the peak counts is in lowered_buffers.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor import custom_graph_pass

from fxhome.passes import in_place, lowered_buffers, mix_order, recorded_layouts, unfuse, whole_concatenations
from fxhome.passes.allocator import Allocation, reserved_bytes
from fxhome.passes.capped_allocator import least_cap
from fxhome.passes.lowered_buffers import LoweredBuffers, LoweredPeak
from fxhome.passes.pack_blocks import packed_bytes
from fxhome.passes.partition import INSTRUCTION
from fxhome.placement import Instruction
from fxhome.runtime import codec_ops, ops

MAX_SPLITS = 100
MAX_MOVES = 1000
"""Copies moved away from worst moments per graph, at most."""
_RANKS = {
    codec_ops.encode_op: -6,
    ops.swap_out: -5,
    codec_ops.swap_out_encoded_op: -5,
    ops.swap_out_wait: -4,
    ops.swap_in: -3,
    codec_ops.swap_in_encoded_op: -3,
    ops.swap_in_wait: -2,
    codec_ops.decode_op: -1,
}
"""Transfers and codecs; at one place, releases stand first, then what takes memory, then what must be there."""
_RELOADS = (ops.swap_in, codec_ops.swap_in_encoded_op)
_ARRIVALS = (ops.swap_in_wait, codec_ops.decode_op)


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
    reserved_bytes: what they need even then.
    """

    def __init__(self, reserved_bytes: int) -> None:
        super().__init__(reserved_bytes)
        self.reserved_bytes = reserved_bytes


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
    ) -> None:
        """The limits: what each graph may hold above what is resident; over it, OverLimitError (unless
        `stops_over_limit` is False). None: no limit. reserved_limit_bytes: what the allocator may take for both above
        what is resident, each block laid where it fits; over it, ScatteredError (unless `stops_scattered` is False).
        cap_bytes: the same before any block is laid, in the first steps, where it may give holes back.
        only_measures: every lowering ends here, by MeasuredError. keeps_concatenations_whole: whether the graphs are
        lowered so (passes/whole_concatenations.py).
        """
        self.has_transfers = any(item.kind.startswith("swap") or item.kind in ("encode", "decode") for item in program)
        self.workspace = workspace
        self.stops_over_limit = stops_over_limit
        self.stops_scattered = stops_scattered
        self.only_measures = only_measures
        self.keeps_concatenations_whole = keeps_concatenations_whole
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
        buffers = LoweredBuffers(nodes, self.workspace)
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
            self.packed_bytes = min(self.reserved_bytes, packed_bytes(both))
            self.least_cap_bytes = least_cap(both, alive_bytes, self.reserved_bytes)
            if self.stops_scattered:
                self.stop_scattered(self.packed_bytes, self.least_cap_bytes)

    def stop_scattered(self, packed_bytes: int, least_cap_bytes: int) -> None:
        """Raise ScatteredError where a plan's blocks need too much: laid, or in the first steps, under a cap."""
        if self.reserved_limit_bytes is not None and packed_bytes > self.reserved_limit_bytes:
            raise ScatteredError(packed_bytes)
        if self.cap_bytes is not None and least_cap_bytes > self.cap_bytes:
            raise ScatteredError(least_cap_bytes)

    def uuid(self) -> Any:
        """Its source, its limits and how concatenations are lowered: what else differs between plans is in the graphs
        already.
        """
        sources = (
            __file__,
            lowered_buffers.__file__,
            in_place.__file__,
            mix_order.__file__,
            recorded_layouts.__file__,
            unfuse.__file__,
            whole_concatenations.__file__,
        )
        return custom_graph_pass.get_hash_for_files(sources, str((*self.limits, self.keeps_concatenations_whole)))

    def __reduce__(self) -> tuple[Any, ...]:
        """In a pickled cache key it stands for its source and limits."""
        return str, (self.uuid().hex(),)


def _operators(node: Any) -> list[Any]:
    return [getattr(inner.node, "op_overload", None) for inner in node.get_nodes()]


def transfer_of(node: Any) -> Any:
    """The transfer operator that a scheduler node runs, or None."""
    found = [operator for operator in _operators(node) if operator in _RANKS]
    return found[0] if found else None


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


def _origins(node: Any) -> list[Any]:
    return [origin for inner in node.get_nodes() if inner.node is not None for origin in inner.node.get_origins()]


def _position(node: Any) -> int | None:
    positions = [origin.meta[INSTRUCTION] for origin in _origins(node) if INSTRUCTION in origin.meta]
    return max(positions, default=None)


def place_transfers(nodes: list[Any]) -> list[Any]:
    """A valid order of `nodes` with every transfer as near to its planned place as dependencies allow."""
    followers = _unpackers(nodes)
    compute = [node for node in nodes if transfer_of(node) is None and node not in followers]
    positions: list[int] = []
    latest = -1
    for node in compute:
        position = _position(node)
        latest = latest if position is None else position
        positions.append(latest)
    index = {node: i for i, node in enumerate(compute)}
    readers = _readers(nodes)
    keyed: list[tuple[float, int, int, Any]] = []
    for order, node in enumerate(nodes):
        operator = transfer_of(node)
        if operator is None:
            if node in index:
                keyed.append((index[node], 1, order, node))
            continue
        planned = _position(node)
        slot = _slot(positions, -1 if planned is None else planned)
        if operator in _ARRIVALS:
            first = [index[reader] for reader in _compute_readers(node, readers, followers) if reader in index]
            slot = min(first, default=slot)
        keyed.append((slot, _RANKS[operator], planned if planned is not None else order, node))
    keyed.sort(key=lambda item: item[:3])
    return _respect_dependencies([item[3] for item in keyed], nodes, followers)


def _slot(positions: list[int], planned: int) -> int:
    """Index before which a transfer stands: fewest later kernels before it plus earlier kernels behind it."""
    wrong = sum(position < planned for position in positions)
    best, best_wrong = 0, wrong
    for i, position in enumerate(positions):
        wrong += 1 if position > planned else -1
        if wrong < best_wrong:
            best, best_wrong = i + 1, wrong
    return best


def _unpackers(nodes: list[Any]) -> dict[Any, Any]:
    """MultiOutput nodes that unpack a transfer's result: they follow it."""
    by_buffer = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
    found = {}
    for node in nodes:
        if transfer_of(node) is None and all(type(inner.node).__name__ == "MultiOutput" for inner in node.get_nodes()):
            sources = [by_buffer.get(dep.name) for dep in node.read_writes.reads]
            if sources and sources[0] is not None and transfer_of(sources[0]) is not None:
                found[node] = sources[0]
    return found


def _readers(nodes: list[Any]) -> dict[str, list[Any]]:
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for dep in node.read_writes.reads:
            readers.setdefault(dep.name, []).append(node)
    return readers


def _compute_readers(node: Any, readers: dict[str, list[Any]], followers: dict[Any, Any]) -> list[Any]:
    """Compute nodes that read a transfer's result, through the node that unpacks it."""
    found = []
    for buffer in node.get_outputs():
        for reader in readers.get(buffer.get_name(), []):
            found.extend(_compute_readers(reader, readers, followers) if reader in followers else [reader])
    return found


def _respect_dependencies(wanted: list[Any], nodes: list[Any], followers: dict[Any, Any]) -> list[Any]:
    by_buffer = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
    unpacked_by = {source: node for node, source in followers.items()}
    done: dict[Any, None] = {}

    def visit(root: Any) -> None:
        stack = [(root, False)]
        while stack:
            node, expanded = stack.pop()
            if node in done:
                continue
            if expanded:
                done[node] = None
                if (follower := unpacked_by.get(node)) is not None:
                    done.setdefault(follower)
                continue
            stack.append((node, True))
            for dep in sorted(node.unmet_dependencies, key=lambda dep: str(dep.name)):
                source = by_buffer.get(dep.name)
                if source is not None and source is not node and source not in done:
                    stack.append((source, False))

    for node in wanted:
        visit(node)
    for node in nodes:
        visit(node)
    return list(done)


def fit(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> tuple[list[Any], LoweredBuffers]:
    """Bring the peak under `limit_bytes`: copies make way, fused kernels wait for their last loop, then those that are
    fused across the worst moment come apart.
    """
    nodes = _best_order(nodes, buffers, limit_bytes)
    for _ in range(MAX_SPLITS):
        peak_bytes, worst = _worst(nodes, buffers)
        if peak_bytes <= limit_bytes:
            break
        split = unfuse.come_apart(nodes, worst)
        if split is not None:
            nodes, buffers = _settled(split, buffers, limit_bytes)
            continue
        sizes = {buffer.name: buffer.size_bytes for buffer in buffers.buffers}
        for tried in unfuse.held_back(nodes, worst, sizes):
            order, counted = _settled(tried, buffers, limit_bytes)
            if _worst(order, counted)[0] < peak_bytes:
                nodes, buffers = order, counted
                break
        else:
            break
    return nodes, buffers


def _best_order(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> list[Any]:
    """The order as it is, or that by last loops where it is over the limit and needs more; copies out of the way."""
    given = relieve(nodes, buffers, limit_bytes)
    peak_bytes, _ = _worst(given, buffers)
    if peak_bytes <= limit_bytes:
        return given
    late = relieve(by_last_loop(nodes), buffers, limit_bytes)
    return late if _worst(late, buffers)[0] < peak_bytes else given


def by_last_loop(nodes: list[Any]) -> list[Any]:
    """The order in which each fused kernel stands where its last loop was lowered, not its first one.

    Inductor puts it where its first loop was, and all that the others need before it: of a gradient that is the sum of
    several branches, the gradients of all branches, and whatever else reads what they are made from waits.
    """
    nodes = _respect_dependencies(sorted(nodes, key=lambda node: node.max_order), nodes, _unpackers(nodes))
    return place_transfers(nodes) if any(transfer_of(node) is not None for node in nodes) else nodes


def _settled(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> tuple[list[Any], LoweredBuffers]:
    """An order with other kernels: dependencies first, then copies out of the way."""
    nodes = _respect_dependencies(nodes, nodes, _unpackers(nodes))
    counted = LoweredBuffers(nodes, buffers.workspace_by_name)
    return _best_order(nodes, counted, limit_bytes), counted


def _worst(nodes: list[Any], buffers: LoweredBuffers) -> tuple[int, int]:
    """(bytes at the worst moment, its index)."""
    curve, _ = buffers.curve(nodes)
    worst = max(range(len(curve)), key=curve.__getitem__, default=0)
    return (curve[worst] if curve else 0), worst


def relieve(nodes: list[Any], buffers: LoweredBuffers, limit_bytes: int) -> list[Any]:
    """Move copies away from moments over `limit_bytes`: a reload starts later, a source is waited for earlier.

    Time is what this costs, never correctness: a reload still stands before its wait, a wait behind its copy and behind
    every reader of the source. Stops when the limit holds or no copy stands in the way.
    """
    moves = _Moves(nodes)
    for _ in range(MAX_MOVES):
        peak_bytes, worst = _worst(nodes, buffers)
        if peak_bytes <= limit_bytes:
            break
        moved = moves.reload_later(nodes, worst) or moves.release_earlier(nodes, worst)
        if moved is None:
            break
        nodes = moved
    return nodes


class _Moves:
    """What may be moved in one graph: which nodes a copy stands before and behind, in whatever order."""

    def __init__(self, nodes: list[Any]) -> None:
        self.follower = {source: node for node, source in _unpackers(nodes).items()}
        self.followers = set(self.follower.values())
        self.readers = _readers(nodes)
        self.maker = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
        self.kind = {node: operator for node in nodes if (operator := transfer_of(node)) is not None}

    def reload_later(self, nodes: list[Any], worst: int) -> list[Any] | None:
        """Start behind the worst moment the reload that is needed last of those in flight there."""
        index = {node: i for i, node in enumerate(nodes)}
        best: tuple[int, Any] | None = None
        for i, node in enumerate(nodes[: worst + 1]):
            if self.kind.get(node) not in _RELOADS:
                continue
            named = self.follower.get(node, node)
            waits = [index[r] for buffer in named.get_outputs() for r in self.readers.get(buffer.get_name(), [])]
            first = min(waits, default=-1)
            # The node behind the worst one must still stand before the wait.
            if i <= worst < first - 1 and worst + 1 < len(nodes) and (best is None or first > best[0]):
                best = (first, node)
        if best is None:
            return None
        behind = worst + 1
        while nodes[behind] in self.followers:
            behind += 1
        if behind >= best[0]:
            return None
        return self._move(nodes, best[1], nodes[behind])

    def release_earlier(self, nodes: list[Any], worst: int) -> list[Any] | None:
        """Wait before the worst moment for the oldest copy whose source is otherwise done by then."""
        index = {node: i for i, node in enumerate(nodes)}
        for wait in nodes[worst + 1 :]:
            if self.kind.get(wait) is not ops.swap_out_wait:
                continue
            needed = [self.maker[dep.name] for dep in wait.unmet_dependencies if dep.name in self.maker]
            others = [r for dep in wait.read_writes.reads for r in self.readers.get(dep.name, []) if r is not wait]
            if all(index[node] < worst for node in (*needed, *others)):
                return self._move(nodes, wait, nodes[worst])
        return None

    def _move(self, nodes: list[Any], node: Any, before: Any) -> list[Any]:
        follower = self.follower.get(node)
        block = [node] if follower is None else [node, follower]
        rest = [other for other in nodes if other is not node and other is not follower]
        place = rest.index(before)
        return rest[:place] + block + rest[place:]
