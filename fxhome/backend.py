"""The torch.compile backend: `torch.compile(model, backend="fxhome", options={"memory_budget": "20GiB"})`.

Dynamo hands over a graph; AOTAutograd traces its joint forward and backward; our partition function plans it; the inner
compiler compiles the two graphs. What Dynamo gets back is a ManagedGraph, which can do all of that again when the
situation has changed. Nothing is raised while compiling: a refusal is raised by the first call, unwrapped.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph_module import GraphModule
from torch.utils._pytree import tree_leaves

from fxhome import ledger
from fxhome.device import DeviceProfile, cached_profile
from fxhome.eager_frames import forget_frames, note_graph, watch_frames
from fxhome.errors import DeviceError, FxhomeError
from fxhome.host_room import reserve_host, within_host
from fxhome.managed_graph import ManagedGraph
from fxhome.options import Options
from fxhome.passes.pipeline import plan_graph
from fxhome.passes.planned import Planned
from fxhome.passes.recorded_values import correct_recorded_values
from fxhome.passes.situation import Situation
from fxhome.passes.torch_compat import forgive_specialisation, has_uncompiled_callers
from fxhome.placement import Plan, load_plans
from fxhome.runtime.host_pool import host_pool
from fxhome.variant import Variant

log = logging.getLogger("fxhome")


class _Refusal:
    """Stands in for a compiled graph where nothing could be compiled: every call raises the reason."""

    def __init__(self, error: FxhomeError) -> None:
        self.error = error

    def __call__(self, *_: Any) -> Any:
        # A copy each time: a traceback kept here would keep the inputs of the refused call alive.
        raise copy.copy(self.error)


def fxhome(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Plan and compile one Dynamo graph. `mode` (for example "reduce-overhead") is accepted and noted, not applied."""
    watch_frames()
    note_graph()
    try:
        parsed = options if isinstance(options, Options) else Options.from_mapping(options or {})
        device = _device_of(example_inputs)
        return managed(gm, example_inputs, parsed, device, mode)
    except FxhomeError as error:
        # Without its traceback, whose frames hold the example inputs.
        return _Refusal(error.with_traceback(None))


def _reset() -> None:
    """torch._dynamo.reset() calls this: plans end with the graphs they were made for."""
    ledger.forget_all()
    forget_frames()


fxhome.reset = _reset  # type: ignore[attr-defined]
fxhome.holds_budget = True  # type: ignore[attr-defined]
watch_frames()


def managed(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, device: torch.device, mode: str | None
) -> ManagedGraph:
    """The ManagedGraph of one Dynamo graph, its first variant compiled or refused."""
    _fail_at_recompile_limit()
    inner = options.inner or ("inductor" if device.type == "cuda" else "aot_eager")
    cached_profile(device, inner)  # measured now, where nothing is traced yet
    if device.type == "cuda":
        _allocate_library_workspaces(device)
    context = torch._guards.TracingContext.try_get()
    stored = _stored_plans(options)
    inputs = list(example_inputs)
    host_pool().set_budget(options.host_budget)
    # Planning again for the same graph says the same again: once is enough.
    announce = functools.cache(functools.partial(log.warning, "fxhome: %s"))

    def plan_step(
        profile: DeviceProfile,
        joint: GraphModule,
        joint_inputs: object,
        num_fwd_outputs: int,
        situation: Situation,
        static: list[int] | None,
    ) -> Planned:
        correct_recorded_values(joint, runs_as_traced=inner == "aot_eager")

        def plan(off_host: Collection[str]) -> Planned:
            return plan_graph(
                joint,
                joint_inputs,
                num_fwd_outputs,
                options=options,
                profile=profile,
                situation=situation,
                measure=True,
                inner=inner,
                static_lifetime_input_indices=static,
                replays=stored,
                off_host=off_host,
            )

        return within_host(plan, host_pool().room_bytes(), announce, replayed=bool(stored))

    def compile_variant(graph: ManagedGraph, situation: Situation) -> Variant:
        # Read again for every variant: steps that were timed may have told more of the host by now.
        plan_variant = functools.partial(plan_step, cached_profile(device, inner))
        with torch._guards.tracing(context):
            if inner == "inductor":
                from fxhome.inner_inductor import compile_inductor

                variant = compile_inductor(gm, inputs, plan_variant, situation)
            else:
                from fxhome.inner_eager import compile_eager

                variant = compile_eager(gm, inputs, plan_variant, situation, graph)
        if variant.plan is not None:
            reserve_host(variant.plan, pinned=device.type == "cuda")
        return variant

    graph = ManagedGraph(gm, options, device, compile_variant, stored[0] if stored else None)
    graph.notes.extend(_notes(mode, inner))
    if forgive_specialisation(context):
        graph.notes.append("torch._dynamo.mark_dynamic is not applied: every size gets a plan of its own")
        log.info("fxhome: %s", graph.notes[-1])
    is_broken_off = bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))
    graph.may_be_followed = is_broken_off or has_uncompiled_callers()
    graph.prepare()
    inputs[:] = _as_recorded(gm, inputs)
    return graph


def _as_recorded(gm: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The fake values that Dynamo traced with, for a later replan: the first batch must die with its step.

    A number that Dynamo passes as a tensor stays real: AOTAutograd finds the number's symbol by that tensor alone.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    recorded = [node.meta.get("example_value") for node in placeholders]
    return [
        fake if isinstance(fake, FakeTensor) and fake.item_memo is None else value
        for value, fake in zip(inputs, recorded, strict=True)
    ]


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    devices = {leaf.device for leaf in tree_leaves(list(example_inputs)) if isinstance(leaf, torch.Tensor)}
    cuda = sorted({device for device in devices if device.type == "cuda"}, key=str)
    if len(cuda) > 1:
        raise DeviceError(
            f"fxhome: this graph uses {', '.join(map(str, cuda))}; a plan is for one device. "
            "Compile each device's part of the model by itself"
        )
    other = sorted({device.type for device in devices} - {"cuda", "cpu"})
    if other:
        raise DeviceError(
            f"fxhome: tensors on {', '.join(other)}; only cuda and cpu are supported. Move the model first"
        )
    return cuda[0] if cuda else torch.device("cpu")


def _stored_plans(options: Options) -> tuple[Plan, ...]:
    if options.plan is None:
        return ()
    if isinstance(options.plan, Plan):
        return (options.plan,)
    return load_plans(options.plan)


def _notes(mode: str | None, inner: str) -> list[str]:
    notes = []
    if mode is not None:
        notes.append(
            f"mode={mode!r} is not applied: host copies make CUDA graphs impossible, and fxhome keeps Inductor's "
            "stock settings"
        )
        log.warning("fxhome: %s", notes[-1])
    ddp = torch.nn.parallel.DistributedDataParallel
    if (
        torch.distributed.is_available()
        and ddp._get_active_ddp_module() is not None
        and torch._dynamo.config.optimize_ddp
    ):
        notes.append(
            "DistributedDataParallel's optimizer splits the model into one graph per bucket, each planned by "
            "itself under "
            "the one budget; torch._dynamo.config.optimize_ddp = False gives one graph and a better plan"
        )
        log.warning("fxhome: %s", notes[-1])
    return notes


def _allocate_library_workspaces(device: torch.device) -> None:
    """Make cuBLAS take its workspaces now, on this thread and on autograd's: they stay, so they are resident.

    For every graph: what was measured for it may have made cuBLAS give them back.
    """
    for dtype in (torch.float32, torch.bfloat16):
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            left = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            torch.addmm(left[0], left, left).sum().backward()


def _fail_at_recompile_limit() -> None:
    """At its recompile limit Dynamo would run the model eagerly, without any budget: make it raise instead."""
    config = torch._dynamo.config
    if config.fail_on_recompile_limit_hit:
        return
    if config.suppress_errors:
        # torch.compile refuses to be called where both are set.
        _warn_of_suppressed_errors()
        return
    config.fail_on_recompile_limit_hit = True
    log.info(
        "fxhome: torch._dynamo.config.fail_on_recompile_limit_hit is now True (running eagerly would ignore the budget)"
    )


@functools.cache
def _warn_of_suppressed_errors() -> None:
    log.warning(
        "fxhome: torch._dynamo.config.suppress_errors is on: a function that fails to compile, or meets the recompile "
        "limit (%d), runs eagerly and without any budget; switch it off to have an error there",
        torch._dynamo.config.recompile_limit,
    )
