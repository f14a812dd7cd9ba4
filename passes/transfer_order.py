"""Where transfers stand among Inductor's scheduler nodes: as near to their places in the plan as dependencies allow.

Compute keeps the order Inductor chose. Each transfer goes to the slot where the fewest compute kernels stand on the
wrong side of its place in the plan; dependencies always win.
"""

from typing import Any

from fxhome.passes.partition import INSTRUCTION
from fxhome.runtime import codec_ops, ops

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
RELOADS = (ops.swap_in, codec_ops.swap_in_encoded_op)
ARRIVALS = (ops.swap_in_wait, codec_ops.decode_op)


def _operators(node: Any) -> list[Any]:
    return [getattr(inner.node, "op_overload", None) for inner in node.get_nodes()]


def transfer_of(node: Any) -> Any:
    """The transfer operator that a scheduler node runs, or None."""
    found = [operator for operator in _operators(node) if operator in _RANKS]
    return found[0] if found else None


def _origins(node: Any) -> list[Any]:
    return [origin for inner in node.get_nodes() if inner.node is not None for origin in inner.node.get_origins()]


def _position(node: Any) -> int | None:
    positions = [origin.meta[INSTRUCTION] for origin in _origins(node) if INSTRUCTION in origin.meta]
    return max(positions, default=None)


def place_transfers(nodes: list[Any]) -> list[Any]:
    """A valid order of `nodes` with every transfer as near to its planned place as dependencies allow."""
    followers = unpackers(nodes)
    compute = [node for node in nodes if transfer_of(node) is None and node not in followers]
    positions: list[int] = []
    latest = -1
    for node in compute:
        position = _position(node)
        latest = latest if position is None else position
        positions.append(latest)
    index = {node: i for i, node in enumerate(compute)}
    readers = readers_of(nodes)
    keyed: list[tuple[float, int, int, Any]] = []
    for order, node in enumerate(nodes):
        operator = transfer_of(node)
        if operator is None:
            if node in index:
                keyed.append((index[node], 1, order, node))
            continue
        planned = _position(node)
        slot = _slot(positions, -1 if planned is None else planned)
        if operator in ARRIVALS:
            first = [index[reader] for reader in _compute_readers(node, readers, followers) if reader in index]
            slot = min(first, default=slot)
        keyed.append((slot, _RANKS[operator], planned if planned is not None else order, node))
    keyed.sort(key=lambda item: item[:3])
    return respect_dependencies([item[3] for item in keyed], nodes, followers)


def _slot(positions: list[int], planned: int) -> int:
    """Index before which a transfer stands: fewest later kernels before it plus earlier kernels behind it."""
    wrong = sum(position < planned for position in positions)
    best, best_wrong = 0, wrong
    for i, position in enumerate(positions):
        wrong += 1 if position > planned else -1
        if wrong < best_wrong:
            best, best_wrong = i + 1, wrong
    return best


def unpackers(nodes: list[Any]) -> dict[Any, Any]:
    """MultiOutput nodes that unpack a transfer's result: they follow it."""
    by_buffer = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
    found = {}
    for node in nodes:
        if transfer_of(node) is None and all(type(inner.node).__name__ == "MultiOutput" for inner in node.get_nodes()):
            sources = [by_buffer.get(dep.name) for dep in node.read_writes.reads]
            if sources and sources[0] is not None and transfer_of(sources[0]) is not None:
                found[node] = sources[0]
    return found


def readers_of(nodes: list[Any]) -> dict[str, list[Any]]:
    """The nodes that read each buffer, by its name."""
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


def respect_dependencies(wanted: list[Any], nodes: list[Any], followers: dict[Any, Any]) -> list[Any]:
    """The nodes as near to the wanted order as they may stand; what unpacks a result stands right behind it."""
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
