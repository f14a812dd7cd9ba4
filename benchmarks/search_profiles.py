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
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx.graph_module import GraphModule
from torch.overrides import TorchFunctionMode

from benchmarks.search_problems import save_case
from benchmarks.workloads import WORKLOADS
from fxhome.device import DeviceProfile
from fxhome.passes.baseline import copy_joint
from fxhome.passes.capture import normalize
from fxhome.passes.codec_choice import choose_codecs
from fxhome.passes.cost_model import node_costs, op_signature
from fxhome.passes.facts import extract_facts
from fxhome.passes.op_class import storage_classes
from fxhome.passes.pipeline import link_of
from fxhome.passes.problem import Costs, build_problem
from fxhome.passes.simulate import Problem
from fxhome.trace_offline import trace_joint

ALLOW = ("swap", "recompute", "compress")
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

    def use(joint: GraphModule, _: object, num_fwd_outputs: int, __: object) -> tuple[Problem, list[str], float]:
        work = normalize(copy_joint(joint))
        facts = extract_facts(work, num_fwd_outputs, profile.kind, fusing=True)
        costs, estimated = with_measured(work, node_costs(work, facts, profile, measure=False, fusing=True), times)
        codecs = choose_codecs(work, facts, profile, ALLOW, lossy=False, observed={})
        problem = build_problem(facts, costs, link_of(profile), ALLOW, codecs=codecs)
        return problem, storage_classes(work, facts), estimated

    found: tuple[Problem, list[str], float] = trace_joint(model, inputs, "inductor", use)
    torch._dynamo.reset()
    return found


def with_measured(work: GraphModule, costs: Costs, times: Times) -> tuple[Costs, float]:
    """The costs with measured times where there are some, and the share of the sum that is still estimated."""
    nodes = [node for node in work.graph.nodes if node.op != "output"]
    us, workspace = list(costs.time_us), list(costs.workspace_bytes)
    attention = {_attention_key(key): value for key, value in times.items() if "scaled_dot_product" in key}
    known = np.zeros(len(nodes), np.bool_)
    for i, node in enumerate(nodes):
        # What the compiler fuses was costed by its bytes, as in a plan made on the device.
        known[i] = not costs.estimated[i]
        signature = op_signature(node) if node.op == "call_function" else ""
        value = times.get(signature)
        if value is None and "scaled_dot_product" in signature:
            value = attention.get(_attention_key(signature))
        if value is not None:
            us[i], workspace[i], known[i] = value[0], value[1], True
    total = np.array(us)
    measured = replace(costs, time_us=tuple(us), workspace_bytes=tuple(workspace))
    return measured, float(total[~known].sum() / total.sum())


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
