"""Joint graphs for tests of single passes: traced from a small function, normalized, with unit costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph_module import GraphModule

from fxhome.device import DeviceProfile
from fxhome.options import Options
from fxhome.passes.baseline import copy_joint
from fxhome.passes.capture import normalize
from fxhome.passes.facts import GraphFacts, extract_facts
from fxhome.passes.pipeline import plan_graph
from fxhome.passes.planned import Planned
from fxhome.passes.problem import Costs, build_problem
from fxhome.passes.simulate import KEEP, Link, Placements, Problem
from fxhome.passes.situation import Situation
from fxhome.placement import Plan

LINK = Link(d2h_us_per_byte=1e-3, h2d_us_per_byte=1e-3, duplex_slowdown=1.5, latency_us=1.0, compute_slowdown=1.1)
EVERYTHING = 1 << 40
H200 = Path(__file__).parents[1] / "benchmarks" / "profiles" / "h200_device.json"


class _TracedError(BaseException):
    """Ends a trace at its partition; not an Exception, so nothing on the way swallows it."""


def joint_graph(
    function: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> tuple[GraphModule, int]:
    """The joint graph of `function` as a partition function gets it, and its number of forward outputs."""
    found: list[tuple[GraphModule, int]] = []

    def partition(joint: GraphModule, _: object, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((copy_joint(joint), num_fwd_outputs))
        raise _TracedError

    def never(*_: Any) -> Any:
        raise AssertionError("a graph without a backward was traced")

    torch._dynamo.reset()
    compiler = aot_autograd(
        fw_compiler=never,
        bw_compiler=never,
        partition_fn=partition,
        keep_inference_input_mutations=True,
        decompositions=decompositions,
    )
    try:
        torch.compile(function, backend=compiler, dynamic=dynamic)(*args)
    except _TracedError:
        pass
    torch._dynamo.reset()
    return found[0]


def normalized(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> tuple[GraphModule, int]:
    """The joint graph in the form that every pass assumes."""
    module, outputs = joint_graph(function, *args, dynamic=dynamic)
    return normalize(module), outputs


def unit_costs(facts: GraphFacts, time_us: float = 10.0) -> Costs:
    """The same time for every node, no workspace."""
    nodes = len(facts.node_names)
    return Costs((time_us,) * nodes, (0,) * nodes, (False,) * nodes)


def problem_of(
    module: GraphModule, outputs: int, allow: tuple[str, ...] = ("swap", "recompute")
) -> tuple[GraphFacts, Problem]:
    """Facts and problem of a normalized joint graph, at unit costs."""
    facts = extract_facts(module, outputs)
    return facts, build_problem(facts, unit_costs(facts), LINK, allow)


def planned_for_gpu(
    joint: tuple[GraphModule, int],
    inputs: object,
    budget: int | str,
    *,
    inner: str,
    policy: str = "pso",
    replays: Sequence[Plan] = (),
) -> Planned:
    """A plan for an H200 of a joint graph that was traced here, by a short search; every rule is checked on the way."""
    module, outputs = joint
    options = {"memory_budget": budget, "max_evaluations": 300, "verify": True, "policy": policy}
    return plan_graph(
        module,
        inputs,
        outputs,
        options=Options.from_mapping(options),
        profile=DeviceProfile.load(H200),
        situation=Situation(resident_bytes=None),
        measure=False,
        inner=inner,
        replays=replays,
    )


def placed(problem: Problem, code: int, storages: list[int] | None = None) -> Placements:
    """Everything kept, except `code` for the given storages (all, if none are given) that may take it."""
    placement = problem.keep_all()
    for storage in range(problem.num_storages) if storages is None else storages:
        if problem.allowed[storage, code] and code != KEEP:
            placement[storage] = code
    return placement


def targets(graph: fx.Graph) -> list[str]:
    """Names of the operators of a graph, in order."""
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Three products with a saved activation behind each: the usual example. Shapes (n, m) and (m, m)."""
    for _ in range(3):
        x = torch.tanh(x @ weight).sin()
    return x.square().mean()


def chain_inputs(rows: int = 64, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of `chain`; activations have rows * width * 4 bytes."""
    return torch.randn(rows, width), torch.randn(width, width, requires_grad=True)


def written_code(
    function: Callable[..., Any], *inputs: torch.Tensor, scheduler_pass: Any, inplace: bool, **more: Any
) -> str:
    """The code that Inductor writes for `function`, with a pass over its scheduler nodes and no reuse of buffers.

    inplace: whether results may be written over operands. more: Inductor's settings.
    """
    from torch._inductor.utils import run_and_get_code

    patches = {
        "_post_fusion_custom_pass": scheduler_pass,
        "allow_buffer_reuse": False,
        "inplace_buffers": inplace,
        "fx_graph_cache": False,
        "cpp_wrapper": False,
    }
    torch._dynamo.reset()
    with torch._inductor.config.patch(patches | more), torch.no_grad():
        _, codes = run_and_get_code(torch.compile(function, backend="inductor"), *inputs)
    return "\n".join(codes)
