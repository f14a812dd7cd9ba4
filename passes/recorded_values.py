"""Tracing's records that no kernel keeps to, put right: other types, storages of more bytes than a result fills, and
views in another storage than what they view.
"""

import operator
from typing import Any

import torch
from torch import fx

from fxhome.passes.capture import fake_mode_of, infer_value
from fxhome.passes.facts import storage_key

_NORMS_WITH_STATISTICS = frozenset(
    {
        torch.ops.aten.native_batch_norm,
        torch.ops.aten._native_batch_norm_legit,
        torch.ops.aten._native_batch_norm_legit_functional,
        torch.ops.aten._batch_norm_with_update,
        torch.ops.aten._batch_norm_with_update_functional,
        torch.ops.aten.native_group_norm,
        torch.ops.aten.native_layer_norm,
    }
)


_LOSSES_IN_PLACE = frozenset(
    {
        torch.ops.aten.mse_loss,
        torch.ops.aten.smooth_l1_loss,
        torch.ops.aten.soft_margin_loss,
        torch.ops.aten.binary_cross_entropy,
    }
)

_EMBEDDING_BAGS = frozenset({torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only})

_CLONES_OF_STORAGE = frozenset(
    {
        torch.ops.aten.copy,
        torch.ops.aten.slice_scatter,
        torch.ops.aten.select_scatter,
        torch.ops.aten.diagonal_scatter,
        torch.ops.aten.as_strided_scatter,
    }
)


def correct_recorded_values(module: fx.GraphModule, *, runs_as_traced: bool) -> None:
    """Put right, in place, what tracing records wrongly: types of the results of some norms, bytes of some losses, of
    folded images, of embedding bags' indices and of copies into a part of a tensor.

    Views of a corrected result are inferred again, so that they still share its storage, and so are those of a node
    that a pass of torch's put in another's place (a product with a number that became one with a tensor): they were
    recorded for the node that is gone. runs_as_traced: every operator is run as it stands, and not written anew by a
    compiler.
    """
    corrected: set[fx.Node] = set()
    replaced: dict[int, torch.Tensor] = {}  # what was recorded, by storage; kept, so that no storage is met again
    for node in module.graph.nodes:
        types, shrunk = _true_types(node), _shrunk_results(node)
        buffer = _loss_buffer(node)
        if buffer is None:
            buffer = _columns_buffer(node)
        if buffer is None and runs_as_traced:
            buffer = _cloned_storage(node)
        if buffer is not None:
            old = node.meta["val"]
            replaced[old.untyped_storage()._cdata] = old
            node.meta["val"] = buffer
        elif types or shrunk:
            with fake_mode_of(node.meta["val"][0]):
                results = [
                    value.to(types[i]) if i in types and value is not None else value
                    for i, value in enumerate(node.meta["val"])
                ]
                for i in shrunk:
                    results[i] = results[i].new_empty(results[i].numel() + 1)[:-1]
            wrong = [old for old, new in zip(node.meta["val"], results, strict=True) if old is not new]
            replaced.update({value.untyped_storage()._cdata: value for value in wrong})
            node.meta["val"] = tuple(results)
            corrected.add(node)
        elif node.target is operator.getitem and node.all_input_nodes[0] in corrected:
            node.meta["val"] = node.all_input_nodes[0].meta["val"][node.args[1]]
        elif _is_astray(node):
            infer_value(node)
            if not isinstance(node.meta["val"], torch.Tensor):
                corrected.add(node)
        elif replaced and _shares_storage(node.meta.get("val"), replaced):
            infer_value(node)


def _true_types(node: fx.Node) -> dict[int, torch.dtype]:
    """The types of results, by position, that are recorded wrongly (torch/_decomp/decompositions.py)."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _NORMS_WITH_STATISTICS and packet is not torch.ops.aten.native_group_norm_backward:
        return {}
    values = [leaf.meta["val"] for leaf in node.args if isinstance(leaf, fx.Node)]
    values = [value for value in values if isinstance(value, torch.Tensor)]
    is_half = values[0].device.type == "cpu" and values[0].dtype in (torch.bfloat16, torch.float16)
    if not is_half or all(value.dtype is not torch.float32 for value in values[1:]):
        return {}
    if packet is torch.ops.aten.native_group_norm_backward:
        return {0: values[0].dtype}
    # Half-precision input, float32 parameters (autocast): the mean and the deviation are float32.
    return {1: torch.float32, 2: torch.float32}


def _shrunk_results(node: fx.Node) -> list[int]:
    """The positions of results that a kernel makes with one element more, and shrinks."""
    if getattr(node.target, "overloadpacket", None) not in _EMBEDDING_BAGS or node.meta["val"][0].device.type != "cpu":
        return []
    # Which bag each index belongs to, where that is wanted, and the bags' sizes where the last offset is the end.
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [
        i for i, asked in ((1, True), (2, given.get("include_last_offset"))) if asked and node.meta["val"][i].numel()
    ]


def _loss_buffer(node: fx.Node) -> torch.Tensor | None:
    """The result of a reduced loss whose kernel shrinks a buffer of all elements' losses to one; None for others."""
    if getattr(node.target, "overloadpacket", None) not in _LOSSES_IN_PLACE or node.meta["val"].ndim:
        return None
    source, target = (leaf.meta["val"] for leaf in node.args[:2] if isinstance(leaf, fx.Node))
    if source.ndim == 0:
        return None
    with fake_mode_of(source):
        elements = torch.broadcast_shapes(source.shape, target.shape)
        result: torch.Tensor = node.meta["val"].new_empty(elements).as_strided((), ())
    return result


def _columns_buffer(node: fx.Node) -> torch.Tensor | None:
    """The result of folding columns into an image, whose kernel shrinks a buffer of the columns' size; None for others.

    The gradient of an unfolded image is one.
    """
    if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.col2im:
        return None
    source, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if source.numel() <= value.numel():
        return None
    with fake_mode_of(source):
        result: torch.Tensor = source.new_empty(int(source.numel())).as_strided(value.shape, value.stride())
    return result


def _cloned_storage(node: fx.Node) -> torch.Tensor | None:
    """The result of an operator that clones all that lies behind its first operand, to write into that operand's place,
    where tracing recorded the operand's own bytes (`buffer[i] = x` makes one); None for others.
    """
    if getattr(node.target, "overloadpacket", None) not in _CLONES_OF_STORAGE:
        return None
    source, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(source.stride(), source.shape, strict=True))
    size_bytes = int(source.untyped_storage().nbytes())
    if overlaps or not size_bytes or size_bytes == int(value.untyped_storage().nbytes()):
        return None
    with fake_mode_of(source):
        whole = source.new_empty(size_bytes // source.element_size())
        result: torch.Tensor = whole.as_strided(source.shape, source.stride(), source.storage_offset())
    return result


def _is_astray(node: fx.Node) -> bool:
    """Whether a view, or several of one operator, is recorded in another storage than the tensor that it views."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if not target.is_view and target is not torch.ops.aten._unsafe_view.default:
        return False
    viewed = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    results = node.meta.get("val")
    first = results[0] if isinstance(results, list | tuple) and results else results
    keys = storage_key(viewed), storage_key(first)
    return None not in keys and keys[0] != keys[1]


def _shares_storage(value: Any, storages: dict[int, torch.Tensor]) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.untyped_storage()._cdata in storages
