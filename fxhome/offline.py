"""Plan a model without its weights: Dynamo and AOTAutograd run on fake tensors and stop when the plan is made."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph_module import GraphModule
from torch.utils._pytree import tree_map

from fxhome.device import DeviceProfile
from fxhome.errors import FxhomeError, UnsupportedGraphError
from fxhome.host_room import within_host
from fxhome.options import Options
from fxhome.passes.pipeline import Planned, Situation, plan_graph
from fxhome.placement import Plan

log = logging.getLogger("fxhome")


class _PlannedError(BaseException):
    """Leaves the trace once the plan is there: the graph must not be run. Not an Exception, so nothing swallows it."""


def plan_offline(model: nn.Module, example_args: tuple[Any, ...], options: Options, profile: DeviceProfile) -> Plan:
    """Trace the (first) training graph of `model` on fake CPU tensors and plan it for `profile`'s device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model, fake_args = _without_data(model, example_args, mode)
    found: list[Planned] = []
    failure: list[FxhomeError] = []
    inner = options.inner or ("inductor" if profile.kind == "cuda" else "aot_eager")

    def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def partition(joint: GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **extra: Any) -> Any:
            def plan(off_host: Collection[str]) -> Planned:
                return plan_graph(
                    joint,
                    joint_inputs,
                    num_fwd_outputs,
                    options=options,
                    profile=profile,
                    situation=Situation(resident_bytes=None, free_bytes=profile.total_memory_bytes),
                    measure=False,
                    inner=inner,
                    static_lifetime_input_indices=extra.get("static_lifetime_input_indices"),
                    off_host=off_host,
                )

            room_bytes = profile.host_memory_bytes if options.host_budget is None else options.host_budget
            found.append(within_host(plan, room_bytes, functools.partial(log.warning, "fxhome: %s")))
            raise _PlannedError

        def never(*_: Any) -> Any:
            raise _PlannedError

        compiler = aot_autograd(
            fw_compiler=never,
            bw_compiler=never,
            inference_compiler=never,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        try:
            compiler(gm, example_inputs)
        except FxhomeError as error:
            failure.append(error)
        except _PlannedError:
            pass

        def leave(*_: Any) -> Any:
            raise _PlannedError

        return leave

    try:
        torch.compile(fake_model, backend=compile_graph)(*fake_args)
    except _PlannedError:
        pass
    if failure:
        raise failure[0]
    if not found:
        raise UnsupportedGraphError(
            "plan: no training graph was found; the model must have a trainable parameter that its outputs depend on"
        )
    return found[0].plan


def _without_data(
    model: nn.Module, example_args: tuple[Any, ...], mode: FakeTensorMode
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of the model and its inputs as fake CPU tensors; tied weights stay tied, nothing real is copied."""
    known: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
            return tensor
        if id(tensor) not in known:
            with mode, torch.no_grad():
                blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            known[id(tensor)] = (
                nn.Parameter(blank, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else blank.requires_grad_(tensor.requires_grad)
            )
        result: torch.Tensor = known[id(tensor)]
        return result

    for tensor in [*model.parameters(), *model.buffers()]:
        fake(tensor)
    memo = dict(known)
    arguments = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, example_args)
    return copy.deepcopy(model, memo), arguments
