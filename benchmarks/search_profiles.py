"""Write search problems with a GPU's measured operator times, from a machine without one.

    python -m benchmarks.search_profiles --device device.json --ops ops-cuda-....json resnet50 llama unet

The workload is built for CUDA (dtypes, layouts, batch) on the meta device and traced on fake CPU tensors as Inductor
traces it; facts, costs and codecs are those of a plan for the profile's device. Operator times come from `--ops`, the
file that fxhome keeps in its cache directory: what stands there under the node's signature is taken (attention by the
shape of its query, because the CPU traces another operator of it), the rest is estimated from the profile's rates, and
the share of the step so estimated is printed. Writes benchmarks/profiles/<workload>_<name>.npz.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx.graph_module import GraphModule
from torch.overrides import TorchFunctionMode

from benchmarks.pretend_gpu import known_timings
from benchmarks.search_problems import save_case
from benchmarks.workloads import WORKLOADS
from fxhome.device import DeviceProfile
from fxhome.options import Options
from fxhome.passes import cost_model, graph_model, pipeline
from fxhome.passes.cost_model import TimingCache
from fxhome.passes.problem import Costs
from fxhome.passes.simulate import Problem
from fxhome.passes.situation import Situation
from fxhome.trace_offline import trace_joint

ALLOW = ["swap", "recompute", "compress"]
Times = Mapping[str, tuple[float, int]]


def main() -> None:
    """Parse the command line and write one file per workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--device", required=True, help="a profile written by `fxhome profile`, or a cached one")
    parser.add_argument("--ops", required=True, type=Path, help="measured operator times from the cache directory")
    parser.add_argument("--name", default="h200")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "profiles")
    arguments = parser.parse_args()
    profile = DeviceProfile.load(arguments.device)
    times: Times = {key: (found[0], found[1]) for key, found in json.loads(arguments.ops.read_text()).items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.workloads:
        problem, classes, estimated = problem_of(name, profile, times)
        save_case(arguments.out / f"{name}_{arguments.name}.npz", problem, classes)
        nodes, decisions = problem.arrays.node_phase.shape[0], problem.decisions().shape[0]
        print(
            f"{name}: {nodes} nodes, {decisions} decisions, {estimated:.0%} of the compute time estimated", flush=True
        )


def problem_of(name: str, profile: DeviceProfile, times: Times) -> tuple[Problem, list[str], float]:
    """(problem, class of each storage, share of compute time that is an estimate) of a workload's training step."""
    workload = WORKLOADS[name]
    with _OnMeta():
        model, inputs = workload.build(workload.batch["cuda"], torch.device("cuda"))
    options = Options.from_mapping({"memory_budget": "60%", "inner": "inductor", "max_evaluations": 1, "allow": ALLOW})

    def use(
        joint: GraphModule, given: Any, num_fwd_outputs: int, static: list[int] | None
    ) -> tuple[Problem, list[str], float]:
        with _recalled(profile, times) as costs:
            planned = pipeline.plan_graph(
                joint,
                given,
                num_fwd_outputs,
                options=replace(options, on_infeasible="best_effort"),
                profile=profile,
                situation=Situation(None, free_bytes=profile.total_memory_bytes),
                measure=True,
                inner="inductor",
                static_lifetime_input_indices=static,
            )
        assert planned.problem is not None, "the plan was made here"
        us, is_estimated = np.array(costs[-1].time_us), np.array(costs[-1].estimated)
        return planned.problem, list(planned.storage_class), float(us[is_estimated].sum() / us.sum())

    found: tuple[Problem, list[str], float] = trace_joint(model, inputs, "inductor", use)
    torch._dynamo.reset()
    return found


@contextlib.contextmanager
def _recalled(profile: DeviceProfile, times: Times) -> Iterator[list[Costs]]:
    """Plan with operator times that were measured before; the costs of each graph that is modelled meanwhile."""
    attention = {_attention_key(key): value for key, value in times.items() if "scaled_dot_product" in key}
    made: list[Costs] = []

    def recall(wanted: dict[str, Any], cache: TimingCache, _: str) -> None:
        same = {
            signature: attention[key]
            for signature in wanted
            if "scaled_dot_product" in signature and (key := _attention_key(signature)) in attention
        }
        cache.entries = known_timings(wanted, same | dict(times), profile)

    def remember(*arguments: Any, **how: Any) -> Costs:
        made.append(costs(*arguments, **how))
        return made[-1]

    measure, costs = cost_model._measure_missing, graph_model.node_costs
    cost_model._measure_missing, graph_model.node_costs = recall, remember
    try:
        yield made
    finally:
        cost_model._measure_missing, graph_model.node_costs = measure, costs


def _attention_key(signature: str) -> str:
    """Direction of an attention operator and the first tensor that it takes (the query, or its output's gradient)."""
    side = "backward" if "_backward" in signature.split("(")[0] else "forward"
    shape = signature.split("(", 2)[2].split(")")[0] if signature.count("(") > 1 else ""
    return f"{side} {shape}"


class _OnMeta(TorchFunctionMode):
    """Make on the meta device what is asked for on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        device = given.get("device")
        if device is not None and torch.device(device).type == "cuda":
            given["device"] = torch.device("meta")
        return func(*args, **given)


if __name__ == "__main__":
    main()
