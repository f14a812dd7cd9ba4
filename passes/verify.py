"""The graph rules, as code. Run after each step in tests, and for users under `verify=True`.

Raises GraphRuleError, naming the rule, the node and what was found. These are rules about our own rewrite: a breach is
a bug in fxhome, never a user's mistake.
"""

from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.graph_module import GraphModule

from fxhome.errors import GraphRuleError
from fxhome.passes.classify import recompute_refusal
from fxhome.passes.insert_nodes import ENCODED_OF
from fxhome.passes.mask_readers import MASK_CODECS, value_reader
from fxhome.placement import Instruction
from fxhome.runtime import codec_ops, ops

SWAP_OUTS = (ops.swap_out, codec_ops.swap_out_encoded_op)
SWAP_INS = (ops.swap_in, codec_ops.swap_in_encoded_op)


def _fail(rule: str, node: fx.Node, found: str) -> GraphRuleError:
    return GraphRuleError(
        f"verify: {rule}: node '{node.name}' ({node.target}): {found}; "
        "this is a bug in fxhome, please report it with the plan file"
    )


def verify_partition(
    joint: GraphModule,
    forward: GraphModule,
    backward: GraphModule,
    program: Iterable[Instruction],
    num_fwd_outputs: int,
) -> None:
    """Forward outputs and backward inputs agree, nothing forbidden is recomputed, every value is present."""
    for module in (forward, backward):
        module.graph.lint()
        for node in module.graph.nodes:
            if node.op in ("call_function", "placeholder") and "val" not in node.meta:
                raise _fail("every node has a value", node, "meta['val'] is missing")
    verify_boundary(forward, backward, num_fwd_outputs)
    by_name = {node.name: node for node in joint.graph.nodes}
    for item in program:
        if item.kind == "recompute" and (refusal := recompute_refusal(by_name[item.target])) is not None:
            raise _fail("a recomputed node must be repeatable", by_name[item.target], refusal)


def verify_boundary(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> None:
    """What the forward saves is what the backward takes: same order, shapes, strides, dtypes and devices."""
    (output,) = forward.graph.find_nodes(op="output")
    saved = list(output.args[0])[num_fwd_outputs:]
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"][: len(saved)]
    if len(inputs) != len(saved):
        raise _fail("saved tensors and backward inputs agree", output, f"{len(saved)} saved, {len(inputs)} taken")
    for given, taken in zip(saved, inputs, strict=True):
        left, right = given.meta["val"], taken.meta["val"]
        if isinstance(left, torch.Tensor) and _signature(left) != _signature(right):
            raise _fail(
                "saved tensors and backward inputs agree", taken, f"saved {_signature(left)}, taken {_signature(right)}"
            )


def _signature(value: torch.Tensor) -> tuple[object, ...]:
    return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


def verify_transfers(forward: GraphModule, backward: GraphModule) -> None:
    """Each swap-out has one wait before its copy is read or its source released; each swap-in one before its reader."""
    waits_out = 0
    outs = 0
    for module in (forward, backward):
        released: set[fx.Node] = set()
        for node in module.graph.nodes:
            for source in node.all_input_nodes:
                if source in released and node.op != "output":
                    raise _fail(
                        "no reader of a released tensor",
                        node,
                        f"reads '{source.name}' after its swap-out was waited for",
                    )
            if node.target in SWAP_OUTS:
                outs += 1
                waits = [user for user in node.users if user.target is ops.swap_out_wait]
                others = [user for user in node.users if user.target is not ops.swap_out_wait and user.op != "output"]
                if len(waits) > 1 or others:
                    raise _fail(
                        "one wait for each swap-out",
                        node,
                        f"{len(waits)} waits, other readers {[user.name for user in others]}",
                    )
            elif node.target is ops.swap_out_wait:
                waits_out += 1
                released.add(node.args[1])
            elif node.target in SWAP_INS:
                waits = [user for user in node.users if user.target is ops.swap_in_wait]
                others = [user for user in node.users if user.target is not ops.swap_in_wait]
                if len(waits) != 1 or others:
                    raise _fail(
                        "one wait for each swap-in",
                        node,
                        f"{len(waits)} waits, other readers {[user.name for user in others]}",
                    )
                host = node.args[0]
                if host.op == "placeholder" and any(user.target is ops.swap_out_wait for user in host.users):
                    raise _fail(
                        "a host copy is read only after its wait", node, f"reads '{host.name}', whose wait is elsewhere"
                    )
            elif node.target is ops.swap_in_wait and node.args[0].target not in SWAP_INS:
                raise _fail("a wait follows its swap-in", node, f"waits for '{node.args[0]}'")
    if outs != waits_out:
        raise _fail(
            "one wait for each swap-out", next(iter(forward.graph.nodes)), f"{outs} swap-outs, {waits_out} waits"
        )


def verify_codecs(forward: GraphModule, backward: GraphModule) -> None:
    """A decode follows its encode: same codec, dtype and storage; an encoded tensor is only moved and decoded; where a
    mask alone was kept, nothing asks for values.
    """
    encodes = {node.meta[ENCODED_OF]: node for node in forward.graph.nodes if node.target is codec_ops.encode_op}
    decoded: set[str] = set()
    for node in forward.graph.nodes:
        if node.target is codec_ops.decode_op:
            raise _fail("a decode stands in the backward", node, "it is in the forward")
    for node in backward.graph.nodes:
        if node.target is codec_ops.encode_op:
            raise _fail("an encode stands in the forward", node, "it is in the backward")
        if node.target is not codec_ops.decode_op:
            continue
        name = node.meta["fxhome_source"]
        encode = encodes.get(name)
        if encode is None or name in decoded:
            raise _fail("one decode for each encode", node, f"'{name}' is not encoded, or decoded twice")
        decoded.add(name)
        source = encode.args[0].meta["val"]
        found = (node.args[6], node.args[1], list(node.args[2]), list(node.args[3]), node.args[4], node.args[5])
        given = (
            encode.args[2],
            encode.args[1],
            list(source.shape),
            list(source.stride()),
            source.storage_offset(),
            source.dtype,
        )
        if found != given:
            raise _fail("a decode agrees with its encode", node, f"encoded {given}, decoded {found}")
        if node.args[6] in MASK_CODECS and (reader := value_reader(node, str(node.args[6]))) is not None:
            raise _fail("what was kept as a mask is read as one", node, f"'{reader.name}' ({reader.target}) reads it")
    if lost := sorted(set(encodes) - decoded):
        raise _fail("one decode for each encode", encodes[lost[0]], "nothing decodes it")
