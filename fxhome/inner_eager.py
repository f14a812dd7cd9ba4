"""The inner backend "aot_eager": every node of the planned graphs is run as it stands, so the peak is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.graph_module import GraphModule

from fxhome.managed_graph import ManagedGraph
from fxhome.passes.torch_compat import boxed_callable


def compile_eager(gm: GraphModule, example_inputs: Sequence[Any], partition: Callable[..., Any], graph: ManagedGraph) -> Callable[..., Any]:
    """Trace `gm` with AOTAutograd, partition it with `partition`, and run both halves under the graph's meter."""
    from torch._dynamo.backends.common import aot_autograd

    def run_metered(module: GraphModule, _: Sequence[Any]) -> Any:
        run = boxed_callable(module)

        def call(args: list[Any]) -> Any:
            session = graph.current
            if session is None or session.meter is None or session.done:
                return run(args)
            with session.metering():
                return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    compiler = aot_autograd(
        fw_compiler=run_metered,
        bw_compiler=run_metered,
        inference_compiler=run_metered,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    # A donated buffer forbids backward(retain_graph=True); it saves nothing where each node runs by itself.
    with torch._functorch.config.patch(donated_buffer=False):
        compiled: Callable[..., Any] = compiler(gm, example_inputs)
    return compiled
