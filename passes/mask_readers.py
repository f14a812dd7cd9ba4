"""Saved tensors of which the backward asks no values: only where a gradient passes, or nothing but their shape.

    y = relu(c)                                        forward readers: a pooling, a concatenation, a dropout
    dy = max_pool2d_with_indices_backward(g, y, ..)    asks the shape of y
    dc = threshold_backward(dy, y, 0)                  asks where y <= 0

One bit per element (cuda_kernels.relu_mask) gives the same gradients, bit for bit. What a convolution reads besides
does not qualify, nor does what something may be recomputed from: a reader of the forward that runs again in the
backward wants values. (Gist, Jain et al. 2018, calls the first case binarization.)
"""

import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxhome.passes.facts import GraphFacts, storage_key
from fxhome.passes.simulate_kernels import BACKWARD, FORWARD

_aten = torch.ops.aten
_SHAPE_READERS = frozenset(
    {
        _aten.max_pool2d_with_indices_backward.default,
        _aten.avg_pool2d_backward.default,
        _aten._adaptive_avg_pool2d_backward.default,
    }
)
RELU_MASK, RELU6_MASK = "relu_mask", "relu6_mask"
MASK_CODECS = frozenset({RELU_MASK, RELU6_MASK})


def asked_of(reader: fx.Node, source: fx.Node) -> str | None:
    """What an operator of the backward needs of `source`: the mask codec that keeps it, "" for the shape alone, None
    for its values."""
    others = [argument for position, argument in enumerate(reader.args) if position != 1]
    if len(reader.args) < 2 or reader.args[1] is not source or reader.kwargs or source in tree_leaves(others):
        return None
    if reader.target in _SHAPE_READERS:
        return ""
    if reader.target is _aten.threshold_backward.default and reader.args[2] == 0:
        return RELU_MASK
    if reader.target is _aten.hardtanh_backward.default and tuple(reader.args[2:4]) == (0, 6):
        return RELU6_MASK
    return None


def value_reader(decoded: fx.Node, codec: str) -> fx.Node | None:
    """A reader of a decoded mask, or of a view of it, that asks for more than `codec` kept; None where none does."""
    return _value_reader(decoded, codec, decoded.meta["val"].dtype)


def _value_reader(source: fx.Node, codec: str, dtype: torch.dtype) -> fx.Node | None:
    for reader in source.users:
        # Not by storages: a decoded tensor stands in for another one in what its readers recorded.
        if _views_by_schema(reader, dtype):
            found = _value_reader(reader, codec, dtype)
        else:
            found = None if asked_of(reader, source) in ("", codec) else reader
        if found is not None:
            return found
    return None


def mask_codecs(graph: fx.Graph, facts: GraphFacts, allow: Collection[str]) -> dict[str, str]:
    """Storage name -> the mask codec that keeps all that the backward asks of it, under the user's `allow`."""
    phase = dict(zip(facts.node_names, facts.node_phase, strict=True))
    rebuilt = _rebuildable(facts, "recompute" in allow)
    holders: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if (key := storage_key(node.meta.get("val"))) is not None:
            holders.setdefault(key, []).append(node)
    by_name = {node.name: node for node in graph.nodes}
    found: dict[str, str] = {}
    for storage in facts.storages:
        root = by_name.get(storage.name)
        # What stands for a mutated input is read under the input's name.
        if root is None or not storage.may_move or "fxhome_clone_of" in root.meta:
            continue
        key = storage_key(root.meta.get("val"))
        codec = None if key is None else _kept_by(root, key, holders[key], phase, rebuilt)
        if codec is not None:
            found[storage.name] = codec
    return found


def _kept_by(
    root: fx.Node, key: int, holders: list[fx.Node], phase: Mapping[str, int], rebuilt: Collection[str]
) -> str | None:
    asked: set[str] = set()
    dtype = root.meta["val"].dtype
    for node in holders:
        if node.meta["val"].dtype != dtype:  # a view of the bits as something else
            return None
        for reader in node.users:
            if _is_view(reader, key):
                continue
            side = phase.get(reader.name)
            if side == FORWARD and reader.name not in rebuilt:
                continue
            wanted = asked_of(reader, node) if side == BACKWARD else None
            if wanted is None:
                return None
            asked.add(wanted)
    if not asked or len(asked - {""}) > 1:
        return None
    return max(asked) or RELU_MASK


def _is_view(node: fx.Node, key: int) -> bool:
    """Whether all that `node` gives lies in the storage `key`: then its readers are looked at."""
    leaves = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(storage_key(leaf) == key for leaf in leaves)


def _views_by_schema(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether all that an operator gives is views of its argument, of that dtype; so is one taken from among them."""
    leaves = tree_leaves(node.meta.get("val"))
    if not leaves or any(not isinstance(leaf, torch.Tensor) or leaf.dtype != dtype for leaf in leaves):
        return False
    if node.target is operator.getitem or node.target is _aten._unsafe_view.default:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [result.alias_info for result in node.target._schema.returns]
    return len(aliases) == 1 and aliases[0] is not None and not aliases[0].is_write


def _rebuildable(facts: GraphFacts, may_recompute: bool) -> frozenset[str]:
    """Nodes of the forward that a plan may run again in the backward, views apart."""
    names = []
    for name, owned in zip(facts.node_names, facts.owns, strict=True):
        results = [facts.storages[s] for s in owned]
        if not results or any(r.must_recompute or (may_recompute and r.may_recompute) for r in results):
            names.append(name)
    return frozenset(names)
