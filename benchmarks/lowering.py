"""Plan and lower workloads for a GPU that is not there, and hold the model's peak and time to what Inductor lowers.

    python -m benchmarks.lowering transformer:16GB resnet50:60% [--out benchmarks/results/lowering]
    python -m benchmarks.lowering t5@5:60%        the fifth graph of a model that breaks into several

Each row is a process of its own (see pretend_gpu.py). Peaks are those of the scheduler's buffers, as the check before
the first step takes them. The lowered step is the sum of its kernels (measured operators; bytes over bandwidth for
generated ones) with its copies replayed on two queues; the ratio is to torch.compile's own graphs taken the same way.
Operator times and the device's profile are those measured on an H200 (benchmarks/profiles/h200_*.json); of a gradient
of a convolution that was timed only together with the other one, half the time is taken.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from benchmarks.pretend_gpu import environment, install, known_timings, with_estimated_host
from benchmarks.promise_models import MODELS
from benchmarks.workloads import WORKLOADS, Built
from fxhome import inner_inductor
from fxhome.device import DeviceProfile
from fxhome.errors import InfeasibleBudgetError
from fxhome.options import Options
from fxhome.passes import cost_model, graph_model, inductor_check, pipeline, transfer_order
from fxhome.passes.planned import Planned
from fxhome.passes.situation import Situation

PROFILES = Path(__file__).parent / "profiles"
SLACK = "1000GB"
KERNEL_US = 2.0
Item = tuple[str, object, float]


@dataclass
class Row:
    """One workload at one budget; bytes, and milliseconds per step. None where the budget was refused."""

    workload: str
    asked: str
    budget_bytes: int | None = None
    model_bytes: int | None = None
    lowered_bytes: int | None = None
    tries: int = 0
    model_ms: float | None = None
    lowered_ms: float | None = None
    stalls_ms: float | None = None
    refused: str = ""


def main() -> None:
    """Run every row in a child, print it, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="WORKLOAD:BUDGET")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/lowering"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(asdict(measure(*arguments.child.split(":")))))
        return
    stored = arguments.out.with_suffix(".json")
    rows = {key: Row(**row) for key, row in json.loads(stored.read_text()).items()} if stored.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        child = environment(Path(folder)) | {"FXHOME_CACHE_DIR": folder}
        baselines = dict.fromkeys(f"{row.split(':')[0]}:{SLACK}" for row in arguments.rows)
        for key in [*(b for b in baselines if b not in rows), *arguments.rows]:
            command = [sys.executable, "-m", "benchmarks.lowering", "--child", key]
            done = subprocess.run(command, env=child, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{key}: {done.stderr[-2000:]}")
            rows[key] = Row(**json.loads(done.stdout.splitlines()[-1]))
            print(key, rows[key], flush=True)
            stored.write_text(json.dumps({name: asdict(row) for name, row in sorted(rows.items())}, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(table(rows))


def table(rows: dict[str, Row]) -> str:
    """The Markdown file: what it is, one row per workload and budget."""
    lines = [
        "# Plans lowered for an H200 that is not there",
        "",
        *__doc__.splitlines()[2:],
        "",
        f"torch {torch.__version__}. GB are 1e9 bytes. No figure here was measured on a device.",
        "",
        "| workload | asked GB | model peak | lowered peak | off by | tries | model step | lowered step | stalls ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        base = rows[f"{row.workload}:{SLACK}"]
        if row.refused:
            lines.append(f"| {row.workload} | {row.asked} | refused: {row.refused} | | | {row.tries} | | | |")
            continue
        off = 100 * (row.model_bytes / row.lowered_bytes - 1)
        peaks = f"{row.model_bytes / 1e9:.3f} | {row.lowered_bytes / 1e9:.3f} | {off:+.2f} %"
        asked = "(slack)" if row.asked == SLACK else f"{row.budget_bytes / 1e9:.2f} ({row.asked})"
        steps = f"{row.model_ms / base.model_ms:.3f} | {row.lowered_ms / base.lowered_ms:.3f} | {row.stalls_ms:.1f}"
        lines.append(f"| {row.workload} | {asked} | {peaks} | {row.tries} | {steps} |")
    return "\n".join(lines) + "\n"


def measure(name: str, budget: str) -> Row:
    """Plan and lower one workload in this process, which pretends."""
    profile = _profile()
    install(profile)
    cost_model._measure_missing = _known_times
    recorder = Recorder(profile)
    row = Row(name, budget)
    tried: list[tuple[Planned, int]] = []
    options = Options.from_mapping({"memory_budget": budget, "inner": "inductor"})
    workload, _, place = name.partition("@")
    skipped = itertools.count(2 - int(place or 1))

    def plan_step(joint: Any, inputs: object, outputs: int, situation: Any, static: list[int] | None) -> Any:
        planned = pipeline.plan_graph(
            joint,
            inputs,
            outputs,
            options=options,
            profile=profile,
            situation=situation,
            measure=True,
            inner="inductor",
            static_lifetime_input_indices=static,
        )
        tried.append((planned, planned.plan.predicted_peak_bytes))
        return planned

    def compile_graph(gm: Any, inputs: Sequence[Any]) -> Any:
        if any(node.op == "call_function" for node in gm.graph.nodes) and next(skipped) < 1:
            return gm
        situation = Situation(resident_bytes=None, free_bytes=profile.total_memory_bytes)
        try:
            variant = inner_inductor.compile_inductor(gm, inputs, plan_step, situation)
            if variant.planned is None:
                return gm  # there is no backward in it: what a graph break left
            # Of all that were tried, the one that was taken; once checked its peak is the lowered one.
            (row.model_bytes,) = [size for one, size in tried if one is variant.planned]
            plan = variant.planned.plan
            row.budget_bytes, row.lowered_bytes = plan.budget_bytes, plan.predicted_peak_bytes
            row.model_ms = 1e3 * plan.predicted_step_seconds
            row.lowered_ms, row.stalls_ms = replay([recorder.graphs[False], recorder.graphs[True]], profile)
        except InfeasibleBudgetError as refusal:
            row.refused = f"at least {refusal.minimum_bytes / 1e9:.2f} GB"
        row.tries = len(tried)
        raise _DoneError

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, arguments = _fake(*_built(workload), mode)
    try:
        with mode:
            torch.compile(model, backend=compile_graph)(*arguments)
    except _DoneError:
        pass
    return row


def _built(name: str) -> Built:
    """A workload, or one of the models on which the promise is tried."""
    device: Any = _Meta("meta")
    if name in WORKLOADS:
        return WORKLOADS[name].build(WORKLOADS[name].batch["cuda"], device)
    return MODELS[name](device)


class _DoneError(BaseException):
    """Leaves the trace: nothing is run."""


class _Meta(str):
    """The meta device for those who build, CUDA for those who ask what to build for."""

    type = "cuda"


def _fake(model: nn.Module, arguments: Any, mode: FakeTensorMode) -> tuple[nn.Module, Any]:
    known: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            with mode, torch.no_grad():
                blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            is_weight = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if is_weight else blank
        return known[id(tensor)]

    for tensor in [*model.parameters(), *model.buffers()]:
        fake(tensor)
    given = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, arguments)
    return copy.deepcopy(model, dict(known)), given


def _profile() -> DeviceProfile:
    return with_estimated_host(DeviceProfile.load(PROFILES / "h200_device.json"))


def _known_times(wanted: dict[str, Any], cache: Any, _: str) -> None:
    """Take the times that were measured on the device; whatever is missing is estimated, and named."""
    cache.entries = known_timings(wanted, json.loads((PROFILES / "h200_ops.json").read_text()), _profile())
    for signature in wanted.keys() - cache.entries.keys():
        print("not measured:", signature[:200], file=sys.stderr)


class Recorder:
    """Keeps the kernels and copies of the last lowered forward and backward."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self.graphs: dict[bool, list[Item]] = {}
        self.times: dict[str, float] = {}
        costs, check = graph_model.node_costs, inductor_check.ScheduleCheck.__call__

        def remember_costs(work: Any, facts: Any, *args: Any, **how: Any) -> Any:
            found = costs(work, facts, *args, **how)
            self.times = dict(zip(facts.node_names, found.time_us, strict=True))
            return found

        def remember_nodes(this: Any, nodes: list[Any]) -> list[Any]:
            from torch._inductor.virtualized import V

            order = check(this, nodes)
            self.graphs[V.graph.is_backward] = [item for node in order for item in self._item(node, V.graph)]
            return order

        graph_model.node_costs = remember_costs
        inductor_check.ScheduleCheck.__call__ = remember_nodes

    def _item(self, node: Any, graph: Any) -> list[Item]:
        operator = transfer_order.transfer_of(node)
        if operator is None:
            if all(type(inner.node).__name__ == "MultiOutput" for inner in node.get_nodes()):
                return []
            return [("kernel", None, KERNEL_US + self._kernel_us(node))]
        kind = operator.name().split("::")[1].split(".")[0]
        inputs = [value.get_name() for value in node.node.inputs]
        if kind in ("swap_out", "swap_in"):
            moved = graph.name_to_buffer.get(inputs[0]) or graph.graph_inputs[inputs[0]]
            size = int(moved.get_numel()) * moved.get_dtype().itemsize
            return [(kind, inputs[0], size)]
        # A wait names what was moved last among its inputs: the source, or the host copy.
        return [(kind, inputs[-1], 0.0)]

    def _kernel_us(self, node: Any) -> float:
        if not node.is_extern():
            return 1e6 * node.get_read_write_buffers_sizes() / self.profile.memory_bytes_per_s
        origins = [o.name for inner in node.get_nodes() if inner.node is not None for o in inner.node.get_origins()]
        return max((self.times.get(name, 0.0) for name in origins), default=0.0)


def replay(graphs: Sequence[Sequence[Item]], profile: DeviceProfile) -> tuple[float, float]:
    """(ms per step, ms of it that kernels wait for copies) of a forward and a backward, one behind the other.

    An item is a kernel with its microseconds, a copy with what it moves and its bytes, or a wait with what it waits
    for. Copies of one direction run in order, beside the kernels. Codecs on the way count nothing.
    """
    now = stalls = 0.0
    free = {"swap_out": 0.0, "swap_in": 0.0}
    rate = {"swap_out": profile.d2h_bytes_per_s, "swap_in": profile.h2d_bytes_per_s}
    done: dict[object, float] = {}
    for items in graphs:
        for kind, name, amount in items:
            if kind == "kernel":
                now += amount
            elif kind in free:
                begin = max(now, free[kind])
                done[name] = free[kind] = begin + profile.copy_latency_us + 1e6 * amount / rate[kind]
            elif done.get(name, 0.0) > now:
                stalls += done[name] - now
                now = done[name]
    return now / 1e3, stalls / 1e3


if __name__ == "__main__":
    main()
