"""Facts of a joint graph, per storage: bytes, producer, readers, aliases, what may be done with it and where it came
from.

    normalized joint graph -> GraphFacts (frozen)   ->   SimArrays, once the costs are known

A storage is found by the identity of the fake storage behind each node's recorded value, so views, in-place aliases and
getitems need no list of operators. Inputs of the step are resident and no decision; only what the graph allocates is.
"""

import hashlib
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fxhome.errors import UnsupportedGraphError
from fxhome.passes.capture import joint_outputs, mutated_input
from fxhome.passes.classify import checkpoint_policy, forward_required, recompute_refusal, split_sides
from fxhome.passes.fusion import virtual_nodes
from fxhome.passes.origin import made_at, module_path, source_line
from fxhome.passes.simulate_kernels import ALIAS, BACKWARD, FORWARD, GETITEM, INPUT, OWNER, VIRTUAL
from fxhome.passes.takers import find_takers

CUDA_ROUNDING_BYTES = 512

_PUT_TOGETHER = frozenset(
    {
        torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors,
        torch.ops.aten._sparse_coo_tensor_unsafe,
    }
)


@dataclass(frozen=True)
class StorageFacts:
    """One storage that the graph allocates. `root` is the tensor that is saved, copied or encoded in its name."""

    name: str
    size_bytes: int
    copy_bytes: int
    owner: str
    is_activation: bool
    """Allocated by the forward and readable by the backward: a decision."""
    may_recompute: bool
    may_move: bool
    must_recompute: bool
    keep_reason: str
    """Why it has no choice, or fewer choices than others; empty if it has them all."""
    module_path: str
    source_line: str
    dtype: str


@dataclass(frozen=True, eq=False)
class GraphFacts:
    """What is true of one joint graph, in names and numbers. Node tuples are in graph order."""

    node_names: tuple[str, ...]
    node_phase: tuple[int, ...]
    node_kind: tuple[int, ...]
    must_forward: tuple[bool, ...]
    reads: tuple[tuple[int, ...], ...]
    owns: tuple[tuple[int, ...], ...]
    backward_alias: tuple[int, ...]
    storages: tuple[StorageFacts, ...]
    storage_owner: tuple[int, ...]
    storage_root: tuple[int, ...]
    storage_held: tuple[bool, ...]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    tangent_storages: tuple[int, ...]
    takers: tuple[tuple[int, ...], ...]
    """Per storage, the nodes whose results a fusing compiler may write over it; all empty where nothing fuses."""
    input_bytes: int
    """Distinct bytes of the graph's inputs on the device: parameters, buffers, batch."""
    gradient_bytes: int
    device_type: str
    """Where the traced tensors are."""
    planned_for: str
    """The kind of device whose allocator counts: differs from `device_type` only offline."""
    fingerprint: str
    group: tuple[int, ...]

    def index(self) -> dict[str, int]:
        """Node name -> node index."""
        return {name: i for i, name in enumerate(self.node_names)}


def storage_key(value: Any) -> int | None:
    """Identity of the storage behind a recorded value, or None where there is no such thing (numbers, sparse)."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def is_put_together(node: fx.Node) -> bool:
    """Whether `node` is a sparse tensor that has no bytes but those of its operands, which it holds: as a view does."""
    return getattr(node.target, "overloadpacket", None) in _PUT_TOGETHER


def held_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose storages live as long as the result of `node`: itself, or what it is put together from."""
    return node.all_input_nodes if is_put_together(node) else [node]


def storage_nbytes(value: torch.Tensor) -> int:
    """Raw bytes of the storage behind a recorded value; symbolic sizes are specialised by torch."""
    return int(value.untyped_storage().nbytes())


def allocated_bytes(size: int, device_type: str) -> int:
    """What the device's allocator takes for `size` bytes: CUDA rounds up to 512, CPU storages count as they are."""
    if device_type == "cuda":
        return -(-size // CUDA_ROUNDING_BYTES) * CUDA_ROUNDING_BYTES
    return size


def _graph_device(graph: fx.Graph) -> str:
    kinds = {
        leaf.device.type
        for node in graph.nodes
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    }
    return "cuda" if "cuda" in kinds else "cpu"


def extract_facts(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    planned_for: str | None = None,
    *,
    fusing: bool = False,
    saved: Collection[object] = frozenset(),
) -> GraphFacts:
    """Read the facts off a normalized joint graph. Nothing is executed and nothing is changed.

    planned_for: "cuda" counts bytes as the CUDA allocator does although the graph was traced elsewhere (offline).
    fusing: the inner compiler fuses, so results that it would not write to memory are virtual.
    saved: keys of the storages that the inner compiler's own partition saves for the backward, and so writes.
    """
    graph = module.graph
    device_type = _graph_device(graph)
    planned_for = planned_for or device_type
    kept = {node for node in graph.nodes if storage_key(node.meta.get("val")) in saved}
    sides = split_sides(graph, num_fwd_outputs, kept)
    required = forward_required(graph, num_fwd_outputs)
    nodes = [node for node in graph.nodes if node.op != "output"]
    index = {node: i for i, node in enumerate(nodes)}
    outputs = joint_outputs(graph)

    owner_of: dict[int, int] = {}  # storage key -> storage id
    foreign: set[int] = set()  # storages of inputs
    storages: list[dict[str, Any]] = []
    kinds = [OWNER] * len(nodes)
    owns: list[list[int]] = [[] for _ in nodes]
    input_bytes = 0
    tangents: list[int] = []
    item_of: dict[tuple[int, Any], int] = {}

    def new_storage(value: torch.Tensor, owner: int, root: int) -> int:
        size = storage_nbytes(value)
        on_device = value.device.type == device_type
        storages.append(
            {
                "size": allocated_bytes(size, planned_for) if on_device else 0,
                "copy": size,
                "owner": owner,
                "root": root,
                "on_device": on_device,
                "dtype": str(value.dtype).removeprefix("torch."),
            }
        )
        return len(storages) - 1

    for i, node in enumerate(nodes):
        value = node.meta.get("val")
        if sides[node] in ("input", "tangent"):
            key = storage_key(value)
            if key is None or key in foreign:
                continue
            foreign.add(key)
            if value.device.type == device_type:
                if sides[node] == "tangent":
                    storage = new_storage(value, i, i)
                    owns[i].append(storage)
                    tangents.append(storage)
                else:
                    input_bytes += allocated_bytes(storage_nbytes(value), planned_for)
            continue
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            kinds[i] = GETITEM
            known = item_of.get((index[source], node.args[1]))
            if known is None:
                kinds[i] = ALIAS
            else:
                storages[known]["root"] = i
            continue
        if isinstance(value, torch.Tensor):
            key = storage_key(value)
            if key is None and not (is_put_together(node) and sides[node] == "backward"):
                raise UnsupportedGraphError(
                    f"facts: node '{node.name}' ({node.target}){made_at(node)} makes a {value.layout} tensor, whose "
                    "bytes are unknown; keep sparse tensors outside the compiled region (torch.compiler.disable); the "
                    "gradient of nn.Embedding(sparse=True) is taken where the layer is used once in a graph"
                )
            if key is None or key in foreign or key in owner_of:
                kinds[i] = ALIAS
            else:
                owner_of[key] = new_storage(value, i, i)
                owns[i].append(owner_of[key])
        elif isinstance(value, tuple | list):
            fresh = 0
            for position, leaf in enumerate(value):
                key = storage_key(leaf)
                if key is None or key in foreign or key in owner_of:
                    continue
                owner_of[key] = new_storage(leaf, i, -1)
                owns[i].append(owner_of[key])
                item_of[(i, position)] = owner_of[key]
                fresh += 1
            if not fresh:
                kinds[i] = ALIAS
        else:
            kinds[i] = ALIAS

    taken_by: dict[fx.Node, tuple[fx.Node, ...]] = {}
    if fusing:
        results = {index[node] for node in outputs if node is not None}
        for node in virtual_nodes(nodes, {node for i, node in enumerate(nodes) if kinds[i] != OWNER}, kept):
            if index[node] not in results and kinds[index[node]] == OWNER:
                kinds[index[node]] = VIRTUAL
        taken_by = find_takers(nodes, {node: kinds[i] for i, node in enumerate(nodes)})
    phase = [
        INPUT if sides[n] in ("input", "tangent") else FORWARD if sides[n] == "forward" else BACKWARD for n in nodes
    ]
    backward_alias = list(range(len(nodes)))
    by_name = {node.name: i for i, node in enumerate(nodes)}
    for node in nodes:
        if (original := node.meta.get("fxhome_clone_of")) is not None:
            backward_alias[by_name[original]] = index[node]

    forward_outputs = [index[node] for node in outputs[:num_fwd_outputs] if node is not None]
    backward_outputs = [index[node] for node in outputs[num_fwd_outputs:] if node is not None]
    output_keys = {storage_key(nodes[i].meta.get("val")) for i in forward_outputs}
    gradients = [part for i in backward_outputs for part in held_nodes(nodes[i])]
    gradient_keys = {storage_key(node.meta.get("val")) for node in gradients}
    read_by_backward = _readable_by_backward(nodes, index, phase)
    result: list[StorageFacts] = []
    for facts in storages:
        owner, root = nodes[facts["owner"]], facts["root"]
        root_value = nodes[root].meta.get("val") if root >= 0 else None
        is_output = root_value is not None and storage_key(root_value) in output_keys
        activation = phase[facts["owner"]] == FORWARD and root >= 0 and read_by_backward[root]
        refusal = recompute_refusal(owner) if activation else None
        if activation and refusal is None and owner.meta.get("fxhome_clone_of") is not None:
            refusal = "a copy of an input that the step overwrites"
        policy = checkpoint_policy(owner)
        if policy == CheckpointPolicy.MUST_SAVE and refusal is None:
            refusal = "the user's checkpoint policy says MUST_SAVE"
        movable = activation and not is_output and facts["on_device"] and facts["copy"] > 0
        reasons = []
        if activation and is_output:
            reasons.append("an output of the forward, which the caller holds")
        elif activation and not facts["on_device"]:
            reasons.append("not on the device")
        if refusal is not None:
            reasons.append(refusal)
        result.append(
            StorageFacts(
                name=nodes[root].name if root >= 0 else owner.name,
                size_bytes=facts["size"],
                copy_bytes=facts["copy"],
                owner=owner.name,
                is_activation=activation,
                may_recompute=activation and refusal is None and not is_output,
                may_move=movable,
                must_recompute=activation
                and refusal is None
                and not is_output
                and policy == CheckpointPolicy.MUST_RECOMPUTE,
                keep_reason="; ".join(reasons),
                module_path=module_path(owner),
                source_line=source_line(owner),
                dtype=facts["dtype"],
            )
        )
    gradient_bytes = sum(
        s["size"] for s in storages if s["root"] >= 0 and storage_key(nodes[s["root"]].meta.get("val")) in gradient_keys
    )
    return GraphFacts(
        node_names=tuple(node.name for node in nodes),
        node_phase=tuple(phase),
        node_kind=tuple(kinds),
        must_forward=tuple(node in required for node in nodes),
        reads=tuple(tuple(index[source] for source in node.all_input_nodes) for node in nodes),
        owns=tuple(tuple(own) for own in owns),
        backward_alias=tuple(backward_alias),
        storages=tuple(result),
        storage_owner=tuple(s["owner"] for s in storages),
        storage_root=tuple(s["root"] for s in storages),
        storage_held=tuple(sides[nodes[s["owner"]]] == "tangent" for s in storages),
        forward_outputs=tuple(forward_outputs),
        backward_outputs=tuple(backward_outputs),
        tangent_storages=tuple(tangents),
        takers=tuple(_taker_ids(nodes, index, phase, s["root"], owns, storages, taken_by) for s in storages),
        input_bytes=input_bytes,
        gradient_bytes=gradient_bytes,
        device_type=device_type,
        planned_for=planned_for,
        fingerprint=graph_fingerprint(module, num_fwd_outputs),
        group=_layer_groups(nodes, index, storages, result),
    )


def _taker_ids(
    nodes: list[fx.Node],
    index: dict[fx.Node, int],
    phase: list[int],
    root: int,
    owns: list[list[int]],
    storages: list[dict[str, Any]],
    taken_by: dict[fx.Node, tuple[fx.Node, ...]],
) -> tuple[int, ...]:
    """Nodes that allocate what the storage of `root` frees: inputs are the caller's and are never written over."""
    if root < 0 or phase[root] == INPUT:
        return ()
    found = (index[taker] for taker in taken_by.get(nodes[root], ()))
    return tuple(i for i in found if len(owns[i]) == 1 and storages[owns[i][0]]["size"] > 0)


def _readable_by_backward(nodes: list[fx.Node], index: dict[fx.Node, int], phase: list[int]) -> list[bool]:
    """Whether the backward may read a node: directly, or by recomputing something that reads it."""
    wanted = [False] * len(nodes)
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        if mutated_input(node) is not None and phase[i] == FORWARD:
            continue
        if phase[i] == BACKWARD or wanted[i]:
            for source in node.all_input_nodes:
                wanted[index[source]] = True
    for i, node in enumerate(nodes):
        original = node.meta.get("fxhome_clone_of")
        if original is not None:
            wanted[i] = True
    return wanted


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = tuple(map(int, value.shape))
        if value.layout is not torch.strided:
            return f"{value.dtype}{size}{value.layout}{value.device.type}"
        stride = tuple(map(int, value.stride()))
        return f"{value.dtype}{size}{stride}{value.device.type}"
    if isinstance(value, tuple | list):
        return "(" + ",".join(_describe(leaf) for leaf in value) + ")"
    return repr(value)


def graph_fingerprint(module: fx.GraphModule, num_fwd_outputs: int) -> str:
    """Hash of what a plan refers to: every node's name, target, arguments and value. Same graph, same fingerprint."""
    digest = hashlib.sha256(str(num_fwd_outputs).encode())
    for node in module.graph.nodes:
        digest.update(
            f"{node.op}|{node.name}|{node.target}|{node.args}|{node.kwargs}|{_describe(node.meta.get('val'))}\n".encode()
        )
    return digest.hexdigest()[:32]


def _layer_groups(
    nodes: list[fx.Node], index: dict[fx.Node, int], storages: list[dict[str, Any]], facts: list[StorageFacts]
) -> tuple[int, ...]:
    """Storages whose producers look alike to a depth of several operators: the same tensor of identical layers."""
    depth = 8
    # An input is told by its value alone: its name is what differs between identical layers.
    label = [
        hash(("" if node.op == "placeholder" else str(node.target), _describe(node.meta.get("val")))) for node in nodes
    ]
    for _ in range(depth):
        label = [
            hash((label[i], tuple(label[index[source]] for source in node.all_input_nodes)))
            for i, node in enumerate(nodes)
        ]
    seen: dict[tuple[int, int, int], int] = {}
    group = []
    for storage, fact in zip(storages, facts, strict=True):
        key = (label[storage["owner"]], storage["size"], storage["root"] - storage["owner"])
        group.append(seen.setdefault(key, len(seen)) if fact.is_activation else -1)
    return tuple(np.asarray(group, dtype=int).tolist())
