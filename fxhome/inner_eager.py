"""The inner backend "aot_eager": every node of the planned graphs is run as it stands, so the peak is exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.graph_module import GraphModule

from fxhome.host_timer import BACKWARD, FORWARD, CudaDevice, HostTimer
from fxhome.managed_graph import ManagedGraph
from fxhome.passes.planned import Planned
from fxhome.passes.situation import Situation
from fxhome.passes.torch_compat import boxed_callable, donate_nothing
from fxhome.variant import Variant


def compile_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan_step: Callable[..., Planned],
    situation: Situation,
    graph: ManagedGraph,
) -> Variant:
    """Trace `gm` with AOTAutograd, plan it in its partition, and run both halves under the graph's meter."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[Planned] = []
    timers: list[HostTimer] = []

    def partition(
        joint: GraphModule, inputs: object, *, num_fwd_outputs: int, **extra: Any
    ) -> tuple[GraphModule, GraphModule]:
        planned = plan_step(joint, inputs, num_fwd_outputs, situation, extra.get("static_lifetime_input_indices"))
        found.append(planned)
        if planned.hosted is not None:
            timers.append(HostTimer(planned.hosted.launches, CudaDevice(graph.device)))
        return planned.forward, planned.backward

    def run_metered(module: GraphModule, _: Sequence[Any], *, side: int) -> Any:
        donate_nothing()
        run = boxed_callable(module)
        if timers:
            run = timers[-1].timed(run, side)

        def call(args: list[Any]) -> Any:
            session = graph.current
            if session is None or session.meter is None or session.done:
                return run(args)
            # A gradient that autograd made up (zeros for an output that no loss reads) is first seen here.
            session.meter.track(leaf for leaf in args if isinstance(leaf, torch.Tensor))
            with session.metering():
                return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    compiler = aot_autograd(
        fw_compiler=functools.partial(run_metered, side=FORWARD),
        bw_compiler=functools.partial(run_metered, side=BACKWARD),
        inference_compiler=functools.partial(run_metered, side=FORWARD),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    # A donated buffer forbids backward(retain_graph=True); it saves nothing where each node runs by itself. With the
    # setting off nothing is collected; `donate_nothing` tells the run time so, which asks the setting again.
    with torch._functorch.config.patch(donated_buffer=False):
        compiled: Callable[..., Any] = compiler(gm, example_inputs)
    planned = found[-1] if found else None
    plan = planned.plan if planned is not None else None
    return Variant(compiled, situation, planned, plan, timer=timers[-1] if timers else None)
