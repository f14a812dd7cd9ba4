"""Compile one training step under placements chosen here instead of searched, to measure the codecs by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from fxhome.device import DeviceProfile
from fxhome.passes import codec_choice
from fxhome.passes.baseline import copy_joint
from fxhome.passes.capture import normalize
from fxhome.passes.codec_choice import MIN_ZERO_SHARE, choose_codecs, zero_share
from fxhome.passes.cost_model import node_costs
from fxhome.passes.facts import extract_facts
from fxhome.passes.graph_model import link_of
from fxhome.passes.insert_codecs import insert_codecs
from fxhome.passes.insert_transfers import insert_transfers
from fxhome.passes.partition import partition
from fxhome.passes.problem import build_problem
from fxhome.passes.schedule import schedule
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, SWAP, simulate
from fxhome.passes.torch_compat import boxed_callable

NO_LIMIT = 1 << 60
Graphs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Placed:
    """Both graphs of a placement, and how many bytes each codec takes of the saved set."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    bytes_by_codec: dict[str, int]
    saved_bytes: int
    kinds: dict[str, str]
    """Storage -> "sparse" (floats that a rectifier made or that follow from one), "dense" (other floats) or "other"."""
    sparse_bytes: dict[str, int]
    """As `bytes_by_codec`, of the sparse ones alone."""


def place(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    profile: DeviceProfile,
    order: tuple[int, ...],
    lossy: bool | str,
    *,
    masks: bool = True,
) -> Placed:
    """Give every saved storage the first placement of `order` that it may take; what may take none is kept.

    masks: whether what the backward asks for no values may be kept as one bit per element.
    """
    work = normalize(copy_joint(joint))
    facts = extract_facts(work, num_fwd_outputs)
    costs = node_costs(work, facts, profile, measure=False)
    allow = {"swap", "compress"}
    with contextlib.nullcontext() if masks else mock.patch.object(codec_choice, "mask_codecs", return_value={}):
        codecs = choose_codecs(work, facts, profile, allow, lossy=lossy)
    problem = build_problem(facts, costs, link_of(profile), allow, codecs=codecs)
    placement = problem.keep_all()
    for code in reversed(order):
        placement[problem.allowed[:, code]] = code
    result = simulate(problem, placement, NO_LIMIT)
    program = schedule(facts, placement, result)
    names = {facts.storages[s].name: problem.codec_of(s, int(code)) for s, code in enumerate(placement)}
    used = {name: codec for name, codec in names.items() if codec is not None}
    graphs = insert_codecs(
        *partition(work, program, num_fwd_outputs), program, num_fwd_outputs, used, facts.fingerprint
    )
    graphs = insert_transfers(*graphs, program, num_fwd_outputs, used)
    known: dict[fx.Node, float] = {}
    kinds = {node.name: kind_of(node, known) for node in work.graph.nodes}
    by_codec: dict[str, int] = {}
    sparse: dict[str, int] = {}
    for s in np.flatnonzero(result.saved):
        codec = problem.codec_of(int(s), int(placement[s])) or ("swapped plainly" if placement[s] == SWAP else "kept")
        size = facts.storages[s].copy_bytes
        by_codec[codec] = by_codec.get(codec, 0) + size
        if kinds[facts.storages[s].name] == "sparse":
            sparse[codec] = sparse.get(codec, 0) + size
    return Placed(*graphs, by_codec, sum(by_codec.values()), kinds, sparse)


def kind_of(node: fx.Node, known: dict[fx.Node, float]) -> str:
    """What a saved tensor counts as when the codecs are judged."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return "other"
    return "sparse" if zero_share(node, known) >= MIN_ZERO_SHARE else "dense"


def compile_placed(
    step: Callable[..., Any], profile: DeviceProfile, order: tuple[int, ...], lossy: bool | str
) -> tuple[Callable[..., Any], list[Placed]]:
    """`torch.compile` with every saved storage placed by `order`; each traced graph is appended to the list."""
    found: list[Placed] = []

    def split(joint: fx.GraphModule, _: object, *, num_fwd_outputs: int, **__: Any) -> Graphs:
        found.append(place(joint, num_fwd_outputs, profile, order, lossy))
        return found[-1].forward, found[-1].backward

    return torch.compile(step, backend=_backend(split), dynamic=False), found


def capture_joint(step: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, int, list[Any]]:
    """(joint graph, number of forward outputs, the forward's real inputs) of one step, from one trace."""
    found: list[Any] = []

    def split(joint: fx.GraphModule, inputs: object, *, num_fwd_outputs: int, **extra: Any) -> Graphs:
        from torch._functorch.partitioners import default_partition

        found.extend((copy_joint(joint), num_fwd_outputs))
        graphs: Graphs = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **extra)
        return graphs

    torch.compile(step, backend=_backend(split, found), dynamic=False)(*args)
    joint, num_fwd_outputs, inputs = found[0], found[1], found[2]
    return joint, num_fwd_outputs, inputs


def _backend(split: Callable[..., Graphs], inputs: list[Any] | None = None) -> Callable[..., Any]:
    def run(module: fx.GraphModule, _: Any) -> Any:
        call = boxed_callable(module)

        def noted(args: list[Any]) -> Any:
            if inputs is not None and len(inputs) == 2:
                inputs.append(list(args))
            return call(args)

        noted._boxed_call = True  # type: ignore[attr-defined]
        return noted

    compiler = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=split)

    def backend(module: fx.GraphModule, args: Any) -> Any:
        with torch._functorch.config.patch(donated_buffer=False):
            return compiler(module, args)

    torch._dynamo.reset()
    return backend


ENCODED = (COMPRESS, COMPRESS_SWAP)
SWAPPED = (SWAP,)
SWAPPED_ENCODED = (COMPRESS_SWAP, SWAP)
