"""Plan a model without its weights: traced on fake tensors, planned for a device's profile, nothing run or timed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx.graph_module import GraphModule

from fxhome.device import DeviceProfile
from fxhome.host_room import within_host
from fxhome.options import Options
from fxhome.passes.pipeline import plan_graph
from fxhome.passes.planned import Planned
from fxhome.passes.recorded_values import correct_recorded_values
from fxhome.passes.situation import Situation
from fxhome.placement import Plan
from fxhome.trace_offline import trace_joint

log = logging.getLogger("fxhome")


def plan_offline(model: nn.Module, example_args: tuple[Any, ...], options: Options, profile: DeviceProfile) -> Plan:
    """Trace the (first) training graph of `model` on fake CPU tensors and plan it for `profile`'s device."""
    room_bytes = profile.host_memory_bytes if options.host_budget is None else options.host_budget

    def use(joint: GraphModule, inputs: object, num_fwd_outputs: int, static: list[int] | None) -> Plan:
        def plan(off_host: Collection[str]) -> Planned:
            return plan_joint(joint, inputs, num_fwd_outputs, static, options, profile, off_host)

        return within_host(plan, room_bytes, functools.partial(log.warning, "fxhome: %s")).plan

    notes: list[str] = []
    made = trace_joint(model, example_args, inner_of(options, profile), use, notes.append, planned_for=profile.kind)
    for note in notes:
        log.warning("fxhome: %s", note)
    return replace(made, notes=(*made.notes, *notes))


def inner_of(options: Options, profile: DeviceProfile) -> str:
    """The inner backend that a plan for the profile's device is made for."""
    return options.inner or ("inductor" if profile.kind == "cuda" else "aot_eager")


def plan_joint(
    joint: GraphModule,
    inputs: object,
    num_fwd_outputs: int,
    static: list[int] | None,
    options: Options,
    profile: DeviceProfile,
    off_host: Collection[str] = (),
) -> Planned:
    """Plan a traced joint graph for `profile`'s device, with nothing timed."""
    correct_recorded_values(joint, runs_as_traced=inner_of(options, profile) == "aot_eager")
    return plan_graph(
        joint,
        inputs,
        num_fwd_outputs,
        options=options,
        profile=profile,
        situation=Situation(resident_bytes=None, free_bytes=profile.total_memory_bytes),
        measure=False,
        inner=inner_of(options, profile),
        static_lifetime_input_indices=static,
        off_host=off_host,
    )
