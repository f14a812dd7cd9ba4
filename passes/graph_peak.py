"""Peak of a forward and a backward graph that are already written, for baselines and as a check of a rewrite.

Same rule as the simulator's, but read off the graphs themselves: a storage lives from its producer to its last reader;
what the forward returns lives on; what the backward was given is dropped after its last reader there. A rebuilt node is
a new instance although it shares its recorded value with the first one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.graph_module import GraphModule
from torch.utils._pytree import tree_leaves

from fxhome.passes.capture import is_tangent
from fxhome.passes.facts import allocated_bytes, is_put_together, storage_key, storage_nbytes
from fxhome.runtime import ops

Instance = int


@dataclass(frozen=True)
class GraphPeak:
    """Bytes above what is resident: in the forward, between the graphs, in the backward."""

    forward_bytes: int
    boundary_bytes: int
    """Alive at the end of the forward: its outputs and what it saves."""
    backward_bytes: int
    output_bytes: int = 0
    """Outputs of the forward alone: held by the caller while the backward runs."""
    held_inputs: frozenset[str] = frozenset()
    """Inputs of the backward that live in such outputs: counted there, and not freed by their last reader."""

    @property
    def peak_bytes(self) -> int:
        """The worst moment of the step."""
        return max(self.forward_bytes, self.backward_bytes)


def graph_peak(
    forward: GraphModule,
    backward: GraphModule,
    num_fwd_outputs: int,
    device_type: str,
    planned_for: str,
    workspace: Mapping[str, int],
) -> GraphPeak:
    """Walk both graphs; exact where each node is run as it stands and values are dropped after their last use.

    workspace: bytes that an operator takes besides its results while it runs, by node name.
    """
    first = _Walk(forward.graph, device_type, planned_for, workspace)
    for node in forward.graph.nodes:
        if node.op == "placeholder":
            first.give(node, count=False)
    first.run()
    (output,) = forward.graph.find_nodes(op="output")
    returned = list(output.args[0])
    visible: set[Instance] = set()
    for node in returned[:num_fwd_outputs]:
        if isinstance(node, fx.Node):
            visible |= set(first.instances[node].values())
    held = outputs = sum(first.sizes[i] for i in visible)

    second = _Walk(backward.graph, device_type, planned_for, workspace)
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
    saved = returned[num_fwd_outputs:]
    shared: dict[Instance, Instance] = {}
    held_inputs = set()
    for node, given in _paired(inputs[: len(saved)], saved):
        second.instances[node] = {}
        if visible.intersection(first.instances[given].values()):
            held_inputs.add(node.name)
        for instance in first.instances[given].values():
            alive_anyway = instance in visible or first.sizes[instance] == 0
            shared[instance] = second.give(node, count=not alive_anyway, same_as=shared.get(instance))
    for node in inputs[len(saved) :]:
        if is_tangent(node):
            held += sum(size for _, size in _storages(node, device_type, planned_for))
        second.give(node, count=False)
    second.run()
    return GraphPeak(first.peak, first.alive, second.peak + held, outputs, frozenset(held_inputs))


def _paired(taken: list[fx.Node], saved: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Backward inputs with what the forward saves for them: the stock one saves sizes last, takes them first."""

    def in_common_order(nodes: list[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=lambda node: isinstance(node.meta.get("val"), torch.Tensor))

    return list(zip(in_common_order(taken), in_common_order(saved), strict=True))


def _storages(node: fx.Node, device_type: str, planned_for: str) -> list[tuple[int, int]]:
    """(storage key, bytes) of what a node's value lives in; bytes are 0 off the device and for host copies."""
    found = []
    on_host = node.target in (ops.swap_out, ops.swap_out_wait) or "fxhome_host" in node.meta
    for leaf in tree_leaves(node.meta.get("val")):
        key = storage_key(leaf)
        if key is not None and isinstance(leaf, torch.Tensor):
            counted = leaf.device.type == device_type and not on_host
            found.append((key, allocated_bytes(storage_nbytes(leaf), planned_for) if counted else 0))
    return found


class _Walk:
    """One graph: which storage instance every node's value lives in, and how many bytes are alive when."""

    def __init__(self, graph: fx.Graph, device_type: str, planned_for: str, workspace: Mapping[str, int]) -> None:
        self.nodes = list(graph.nodes)
        self.device_type = device_type
        self.planned_for = planned_for
        self.workspace = workspace
        self.instances: dict[fx.Node, dict[int, Instance]] = {}
        self.sizes: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.peak = 0
        self.alive = 0

    def _new(self, size: int, position: int) -> Instance:
        self.sizes.append(size)
        self.born.append(position)
        self.last.append(position)
        return len(self.sizes) - 1

    def give(self, node: fx.Node, *, count: bool, same_as: Instance | None = None) -> Instance:
        """Declare a placeholder; `count` its bytes until its last reader, or leave them to whoever holds it anyway."""
        table: dict[int, Instance] = {}
        instance = -1
        for key, size in _storages(node, self.device_type, self.planned_for):
            instance = same_as if same_as is not None else self._new(size if count else 0, 0)
            table[key] = instance
        self.instances[node] = table
        return instance

    def run(self) -> None:
        """Fill instances and lifetimes, then add up."""
        end = len(self.nodes) - 1
        for position, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                for instance in self.instances[source].values():
                    self.last[instance] = end + 1 if node.op == "output" else position
            if node.op not in ("placeholder", "output"):
                self.instances[node] = self._define(node, position)
        # A reader of a view reads its base: a view shares its base's instance, so the table above covers it.
        change = [0] * (end + 3)
        for size, born, last in zip(self.sizes, self.born, self.last, strict=True):
            change[born] += size
            change[last + 1] -= size
        running = 0
        for position in range(end + 1):
            running += change[position]
            self.peak = max(self.peak, running + self.workspace.get(self.nodes[position].name, 0))
        self.alive = running

    def _define(self, node: fx.Node, position: int) -> dict[int, Instance]:
        inherited: dict[int, Instance] = {}
        for source in node.all_input_nodes:
            inherited.update(self.instances[source])
        if is_put_together(node):
            return inherited
        table: dict[int, Instance] = {}
        for key, size in _storages(node, self.device_type, self.planned_for):
            if node.op == "get_attr":
                table[key] = self._new(0, position)
            elif key not in table:
                table[key] = inherited[key] if key in inherited else self._new(size, position)
        return table
