"""Measure a workload's training step over memory budgets, against what torch offers by itself.

    python -m benchmarks.train_step transformer --budgets 24GB 19.2GB 16GB --methods compile fxhome checkpoint_compiled

Every method runs in this one process: a few timed steps (median, spread) and one metered step. fxhome's budgets are
enforced:
the allocator is capped at budget + max(256 MiB, 3 %). Writes <out>/<workload>.json and .md; rows that are there already
are not measured again (--again measures them), so a run can be resumed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxhome
from benchmarks.workloads import WORKLOADS

RECOMPUTE_BUDGETS = (0.8, 0.6, 0.5, 0.3, 0.1)


def main() -> None:
    """Parse the command line, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument(
        "--budgets", nargs="*", default=["60%"], help="bytes or shares; 'min' = the smallest that is feasible"
    )
    parser.add_argument(
        "--methods", nargs="*", default=["eager", "compile", "partitioner", "checkpoint_compiled", "fxhome"]
    )
    parser.add_argument("--partitioner-budgets", nargs="*", type=float, default=list(RECOMPUTE_BUDGETS))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--allow", nargs="*", help="fxhome's option of that name; all placements unless given")
    parser.add_argument("--log", action="store_true", help="print what fxhome logs while it plans")
    parser.add_argument("--profile", action="store_true", help="print kernels and who holds the memory at the peak")
    arguments = parser.parse_args()
    if arguments.log or arguments.profile:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("fxhome").setLevel(logging.DEBUG)
    Bench(arguments).run()


class Bench:
    """One workload, many methods."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        workload = WORKLOADS[arguments.workload]
        self.batch = arguments.batch or workload.batch[self.device.type]
        torch.manual_seed(0)
        self.model, self.inputs = workload.build(self.batch, self.device)
        self.path = arguments.out / f"{arguments.workload}_{self.device.type}.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not arguments.again:
            self.rows = json.loads(self.path.read_text())["rows"]

    def run(self) -> None:
        """Measure every method that has no row yet."""
        for method in self.arguments.methods:
            if method == "fxhome":
                for budget in self.arguments.budgets:
                    self.row(f"fxhome {budget}", lambda budget=budget: self.fxhome(budget))
            elif method == "partitioner":
                for share in self.arguments.partitioner_budgets:
                    self.row(f"activation_memory_budget {share}", lambda share=share: self.partitioner(share))
            else:
                self.row(method, getattr(self, method))

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure one row, keep it, print it; a failure is a row too."""
        if name in self.rows:
            return
        began = time.perf_counter()
        try:
            figures = measure()
        except Exception as error:  # a method that cannot run this workload is a result, told in the table
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
            if (minimum := getattr(error, "minimum_bytes", None)) is not None:
                figures["minimum_bytes"] = minimum
        figures["total_seconds"] = time.perf_counter() - began
        self.rows[name] = figures
        print(json.dumps({name: {key: value for key, value in figures.items() if key != "plan"}}), flush=True)
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        self.write()
        self.clean()

    def clean(self) -> None:
        """Give everything back between two methods."""
        torch._dynamo.reset()
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(
        self, step: Callable[[], torch.Tensor], before_metering: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """First step (compiles), timed steps, one metered step."""
        began = time.perf_counter()
        loss = self.one(step)
        self.sync()
        figures: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began, "loss": loss}
        self.one(step)
        if before_metering is not None:
            before_metering()
        times = []
        for _ in range(self.arguments.steps):
            self.sync()
            begin = time.perf_counter()
            self.one(step)
            self.sync()
            times.append(time.perf_counter() - begin)
        figures |= {
            "step_seconds": statistics.median(times),
            "fastest_seconds": min(times),
            "slowest_seconds": max(times),
        }
        if self.device.type == "cuda":
            for parameter in self.model.parameters():
                parameter.grad = None
            torch.cuda.reset_peak_memory_stats()
            self.one(step, keep=True)
            self.sync()
            figures |= {
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }
            norms = [p.grad.float().norm().double() for p in self.model.parameters() if p.grad is not None]
            figures["gradient_norm"] = float(torch.stack(norms).norm())
        if self.arguments.profile and self.device.type == "cuda":
            _print_profile(lambda: self.one(step))
        return figures

    def one(self, step: Callable[[], torch.Tensor], keep: bool = False) -> float:
        """Forward and backward; gradients are dropped before it."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = step()
        loss.backward()
        return float(loss.detach()) if not keep else 0.0

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def eager(self) -> dict[str, Any]:
        """No compiler."""
        return self.measure(lambda: self.model(*self.inputs))

    def compile(self) -> dict[str, Any]:
        """torch.compile with its defaults."""
        inner = self.arguments.inner or ("inductor" if self.device.type == "cuda" else "aot_eager")
        step = torch.compile(self.model, backend=inner)
        return self.measure(lambda: step(*self.inputs))

    def partitioner(self, share: float) -> dict[str, Any]:
        """torch.compile with activation_memory_budget."""
        with torch._functorch.config.patch(activation_memory_budget=share):
            return self.compile()

    def checkpoint_compiled(self) -> dict[str, Any]:
        """torch.compile over torch.utils.checkpoint around each block."""
        with _checkpointed(self.model):
            return self.compile()

    def checkpoint_eager(self) -> dict[str, Any]:
        """torch.utils.checkpoint around each block."""
        with _checkpointed(self.model):
            return self.eager()

    def save_on_cpu(self) -> dict[str, Any]:
        """torch.autograd.graph.save_on_cpu(pin_memory=True)."""

        def step() -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                loss: torch.Tensor = self.model(*self.inputs)
            return loss

        return self.measure(step)

    def fxhome(self, budget: str) -> dict[str, Any]:
        """fxhome under an enforced budget."""
        asked: object = budget
        if budget == "min":
            asked = self.smallest()
        options: dict[str, object] = {"memory_budget": asked}
        if self.arguments.inner:
            options["inner"] = self.arguments.inner
        if self.arguments.allow is not None:
            options["allow"] = self.arguments.allow
        step = torch.compile(self.model, backend="fxhome" if _registered() else _backend(), options=options)
        cap: list[int] = []

        def enforce() -> None:
            if self.device.type == "cuda":
                promised = fxhome.plans()[0].budget_bytes
                cap.append(promised + max(256 << 20, promised * 3 // 100))
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(
                    min(1.0, cap[0] / torch.cuda.get_device_properties(0).total_memory)
                )

        figures = self.measure(lambda: step(*self.inputs), enforce)
        plan = fxhome.plans()[0]
        placed = {placement.value: size for placement, size in plan.bytes_by_placement().items() if size}
        figures |= {
            "asked_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "plan_measured_bytes": plan.measured_peak_bytes,
            "predicted_seconds": plan.predicted_step_seconds,
            "baseline_bytes": plan.baseline_peak_bytes,
            "host_bytes": plan.host_bytes,
            "placed": placed,
            "baseline_seconds": plan.baseline_step_seconds,
            "search": [plan.search.evaluations, plan.search.seconds, plan.search.stopped_by],
            "planning": fxhome.ledger.graphs()[0].variants[-1].planned.step_seconds,
            "cap_bytes": cap[0] if cap else None,
        }
        return figures

    def smallest(self) -> int:
        """The smallest budget that fxhome names when it refuses an impossible one."""
        options = {"memory_budget": "1MiB"} | ({"inner": self.arguments.inner} if self.arguments.inner else {})
        try:
            torch.compile(self.model, backend=_backend(), options=options)(*self.inputs)
        except fxhome.InfeasibleBudgetError as error:
            self.clean()
            return error.minimum_bytes or 0
        raise AssertionError("a budget of 1 MiB was accepted")

    def write(self) -> None:
        """JSON with everything, Markdown with the table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "CPU"
        document = {
            "workload": self.arguments.workload,
            "batch": self.batch,
            "device": device,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": "python -m benchmarks.train_step " + " ".join(sys.argv[1:]),
            "rows": self.rows,
        }
        self.path.write_text(json.dumps(document, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(table(document))


def table(document: dict[str, Any]) -> str:
    """The rows as Markdown; peaks in GB (1e9), times in ms."""
    lines = [
        f"# {document['workload']}, batch {document['batch']}, {document['device']}",
        "",
        f"torch {document['torch']}, Python {document['python']}; `{document['command']}`",
        "",
        "| method | step ms (fastest, slowest) | asked GB | predicted GB | measured GB | reserved GB | predicted "
        "ms | kept / swapped / recomputed GB | first step s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in document["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | | |")
            continue
        times = (
            f"{row['step_seconds'] * 1e3:.1f} ({row['fastest_seconds'] * 1e3:.1f}, {row['slowest_seconds'] * 1e3:.1f})"
        )
        placed = row.get("placed", {})
        again = placed.get("recompute", 0) + placed.get("recompute_each", 0)
        shares = (
            f"{placed.get('keep', 0) / 1e9:.2f} / {placed.get('swap', 0) / 1e9:.2f} / {again / 1e9:.2f}"
            if placed
            else ""
        )
        cells = [_gb(row.get(key)) for key in ("asked_bytes", "predicted_bytes", "peak_bytes", "reserved_bytes")]
        predicted = f"{row['predicted_seconds'] * 1e3:.1f}" if "predicted_seconds" in row else ""
        lines.append(
            f"| {name} | {times} | {' | '.join(cells)} | {predicted} | {shares} | {row['first_step_seconds']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _print_profile(run: Callable[[], object]) -> None:
    """Kernel totals of one step, and the blocks alive at its worst moment with the line that allocated them."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        run()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70))
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    start = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    alive: dict[int, tuple[int, str]] = {}
    running = peak = 0
    worst: list[tuple[int, str]] = []
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            frames = [
                f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']}" for frame in event.get("frames", [])[:3]
            ]
            alive[event["addr"]] = (event["size"], " < ".join(frames))
            running += event["size"]
            if running > peak:
                peak, worst = running, list(alive.values())
        elif event["action"] == "free_completed" and event["addr"] in alive:
            running -= alive.pop(event["addr"])[0]
    print(f"start {start} peak {start + peak}: allocated in the step and alive then:")
    totals: dict[tuple[int, str], int] = {}
    for block in worst:
        totals[block] = totals.get(block, 0) + 1
    for (size, where), count in sorted(totals.items(), key=lambda item: -item[0][0] * item[1])[:40]:
        print(f"{count:4d} x {size / 1e6:9.2f} MB  {where}")


def _gb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}"


def _registered() -> bool:
    return "fxhome" in torch._dynamo.list_backends(())


def _backend() -> Any:
    from fxhome.backend import fxhome as backend

    return backend


class _checkpointed:
    """Wrap every repeated block of a model in torch.utils.checkpoint while the context is open."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = [
            child
            for module in model.modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            for child in module
            if any(True for _ in child.parameters())
        ]
        outer = [
            block
            for block in self.blocks
            if not any(block is not other and block in list(other.modules()) for other in self.blocks)
        ]
        self.blocks = outer

    def __enter__(self) -> None:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            forward = block.forward
            block.forward = lambda *args, _forward=forward, **kwargs: checkpoint(
                _forward, *args, use_reentrant=False, **kwargs
            )

    def __exit__(self, *_: object) -> None:
        for block in self.blocks:
            del block.forward


if __name__ == "__main__":
    main()
