"""Measure a workload's training step over memory budgets, against what torch offers by itself.

    python -m benchmarks.train_step transformer --budgets 24GB 19.2GB 16GB --methods compile fxhome checkpoint_compiled

Every method is compiled and metered first; then all are timed in turns in this one process, so that a drift of clocks
meets all alike. fxhome's budgets are enforced: the allocator is capped at budget + max(256 MiB, 3 %) while its steps
are timed and metered; they are timed once more without the cap, because nothing caps torch's own methods. Writes
<out>/<workload>_<device>.json, .md and .png; a row that is there already is not measured again (--again measures all),
so a run can be resumed; `compile` is measured in every run: the ratios refer to it. Of several such processes on one
device none is timed while another compiles (benchmarks/quiet.py), as far as --quiet-by allows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxhome
from benchmarks.enforced import cap_allocator, smallest_budget
from benchmarks.quiet import getting_ready, quiet, tuned_in_turn
from benchmarks.step_table import picture, table
from benchmarks.step_trace import DeviceEvent, kernel_differences, summary, trace_step
from benchmarks.workloads import WORKLOADS
from fxhome.device import measuring_turn
from fxhome.inductor_graphs import cap_of
from fxhome.placed_blocks import unsteered

RECOMPUTE_BUDGETS = (0.8, 0.6, 0.5, 0.3, 0.1)
REFERENCE = "compile"
METHODS = ("compile", "fxhome", "partitioner", "checkpoint_compiled", "eager", "checkpoint_eager", "save_on_cpu")


def main() -> None:
    """Parse the command line, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument(
        "--budgets", nargs="*", default=["60%"], help="bytes or shares; 'min' = the smallest that is feasible"
    )
    parser.add_argument("--methods", nargs="*", default=list(METHODS[:4]), choices=METHODS)
    parser.add_argument("--partitioner-budgets", nargs="*", type=float, default=list(RECOMPUTE_BUDGETS))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each method")
    parser.add_argument("--until", type=float, help="seconds after which no further method is compiled")
    parser.add_argument(
        "--quiet-by", type=float, default=0.0, help="seconds by which timing begins though others still compile"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_step"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--allow", nargs="*", help="fxhome's option of that name; all placements unless given")
    parser.add_argument("--policy", default=None, help="fxhome's option of that name")
    parser.add_argument("--log", action="store_true", help="print what fxhome logs while it plans")
    parser.add_argument("--profile", action="store_true", help="print kernels and who holds the memory at the peak")
    parser.add_argument("--trace", action="store_true", help="write where each method's time goes (<workload>_trace)")
    arguments = parser.parse_args()
    if arguments.log or arguments.profile:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("fxhome").setLevel(logging.DEBUG)
    Bench(arguments).run()


@dataclass
class Method:
    """One compiled way to run the step, and what is known of it."""

    name: str
    step: Callable[[], torch.Tensor]
    around: AbstractContextManager[Any]
    """Entered around every one of its steps (checkpointing patches the model)."""
    figures: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    uncapped_times: list[float] = field(default_factory=list)
    """The same plan where the allocator may take what it wants, as torch's own methods may."""
    cap_bytes: int | None = None


class Bench:
    """One workload, many methods."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.began = time.perf_counter()
        self.device = torch.device(arguments.device)
        workload = WORKLOADS[arguments.workload]
        self.batch = arguments.batch or workload.batch[self.device.type]
        torch.manual_seed(0)
        self.model, self.inputs = workload.build(self.batch, self.device)
        self.path = arguments.out / f"{arguments.workload}_{self.device.type}.json"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists() and not arguments.again:
            self.rows = json.loads(self.path.read_text())["rows"]
        # All methods stay compiled side by side on one model.
        torch._dynamo.config.recompile_limit = 64

    def run(self) -> None:
        """Compile and meter every method that has no row yet, then time them in turns."""
        with getting_ready(self.device), tuned_in_turn(self.device):
            ready = self.all_prepared()
        left_seconds = self.arguments.quiet_by - (time.perf_counter() - self.began)
        with quiet(self.device, left_seconds) as alone, measuring_turn(self.device):
            for turn in range(self.arguments.rounds):
                for method in ready if turn % 2 == 0 else reversed(ready):
                    self.time(method)
                self.keep(ready, alone, turn + 1)
            if self.arguments.trace and self.device.type == "cuda":
                self.trace([method for method in ready if method.times])
        for method in ready:
            print(json.dumps({method.name: method.figures}), flush=True)
        self.write()

    def keep(self, ready: list[Method], alone: bool, rounds: int) -> None:
        """Write down what is known of all methods by now: a run may be ended before its last turn."""
        reference = next((m for m in ready if m.name == REFERENCE and m.times), None)
        for method in ready:
            if method.times:
                method.figures |= {
                    "alone": alone,
                    "rounds": rounds,
                    "step_seconds": statistics.median(method.times),
                    "fastest_seconds": min(method.times),
                    "slowest_seconds": max(method.times),
                }
                if method.uncapped_times:
                    method.figures["uncapped_seconds"] = statistics.median(method.uncapped_times)
                if reference is not None:
                    stock_seconds = statistics.median(reference.times)
                    method.figures["ratio"] = statistics.median(method.times) / stock_seconds
                    if method.uncapped_times:
                        method.figures["uncapped_ratio"] = statistics.median(method.uncapped_times) / stock_seconds
            self.rows[method.name] = method.figures
        self.write_rows()

    def is_measured(self, name: str) -> bool:
        """Whether a row is there, with all the turns that are wanted of it."""
        wanted = self.arguments.rounds
        return name in self.rows and self.rows[name].get("rounds", wanted) >= wanted

    def all_prepared(self) -> list[Method]:
        """Every method that has no row yet and is to be had before the time is over."""
        ready: list[Method] = []
        for name, build in self.wanted():
            if self.is_measured(name) and name != REFERENCE:
                continue
            if self.arguments.until is not None and time.perf_counter() - self.began > self.arguments.until:
                print(f"not started, the time is over: {name}", flush=True)
                continue
            method = self.prepared(name, build)
            if method is not None:
                ready.append(method)
        return ready

    def wanted(self) -> list[tuple[str, Callable[[], Method]]]:
        """Names of rows and how to build what they measure."""
        found: list[tuple[str, Callable[[], Method]]] = []
        for method in self.arguments.methods:
            if method == "fxhome":
                extra = "".join(f" {kind}" for kind in self.arguments.allow or ())
                extra += f" {self.arguments.policy}" if self.arguments.policy else ""
                found += [(f"fxhome {b}{extra}", lambda b=b: self.fxhome(b)) for b in self.arguments.budgets]
            elif method == "partitioner":
                found += [
                    (f"activation_memory_budget {share}", lambda share=share: self.partitioner(share))
                    for share in self.arguments.partitioner_budgets
                ]
            else:
                found.append((method, getattr(self, method)))
        return found

    def prepared(self, name: str, build: Callable[[], Method]) -> Method | None:
        """Compiled, settled and metered; None (and a row that says why) where that failed."""
        began = time.perf_counter()
        try:
            method = build()
            method.name = name
            with method.around:
                figures = self.meter(method)
            method.figures = figures | method.figures
        except Exception as error:  # a method that cannot run this workload is a result, told in the table
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
            if (minimum := getattr(error, "minimum_bytes", None)) is not None:
                figures["minimum_bytes"] = minimum
            self.rows[name] = figures
            self.write()
            method = None
        self.open_cap(None)
        print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        return method

    def meter(self, method: Method) -> dict[str, Any]:
        """First step (compiles), settling steps, under the cap one for reserved and one for allocated bytes."""
        began = time.perf_counter()
        loss = self.one(method.step)
        self.sync()
        figures: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began, "loss": loss}
        self.one(method.step)
        if method.name.startswith("fxhome"):
            method.figures = self.promise()
            method.cap_bytes = method.figures["cap_bytes"]
        if self.device.type == "cuda":
            with measuring_turn(self.device):
                if method.cap_bytes is not None:
                    figures["uncapped_reserved_bytes"] = self.uncapped(method)
                self.open_cap(method.cap_bytes)
                self.one(method.step)
                for parameter in self.model.parameters():
                    parameter.grad = None
                torch.cuda.reset_peak_memory_stats()
                self.one(method.step)
                self.sync()
                reserved_bytes = torch.cuda.max_memory_reserved()
                # Blocks that are laid take plugs, which the allocator counts as allocated.
                with unsteered():
                    torch.cuda.reset_peak_memory_stats()
                    self.one(method.step, keep=True)
                    self.sync()
            figures |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": reserved_bytes}
            norms = [p.grad.float().norm().double() for p in self.model.parameters() if p.grad is not None]
            figures["gradient_norm"] = float(torch.stack(norms).norm())
            if method.figures:
                # What came of laying its blocks is said after a few steps, and what they told of the host.
                method.figures["first_predicted_seconds"] = method.figures["predicted_seconds"]
                later = self.promise()
                method.figures |= {name: later[name] for name in ("notes", "predicted_seconds", "baseline_seconds")}
        if self.arguments.profile and self.device.type == "cuda":
            _print_profile(lambda: self.one(method.step))
        return figures

    def time(self, method: Method) -> None:
        """One turn: a step to settle, then timed ones."""
        try:
            with method.around:
                retries = self.retries()
                method.times += self.timed_steps(method, method.cap_bytes)
                method.figures["allocator_retries"] = (
                    method.figures.get("allocator_retries", 0) + self.retries() - retries
                )
                if method.cap_bytes is not None:
                    method.uncapped_times += self.timed_steps(method, None)
        except torch.OutOfMemoryError as error:
            method.figures["error"] = f"out of memory while timed: {str(error).splitlines()[0][:200]}"

    def timed_steps(self, method: Method, cap_bytes: int | None) -> list[float]:
        """Seconds of each step under a cap, after two to settle."""
        self.open_cap(cap_bytes)
        for _ in range(2):
            self.one(method.step)
        found = []
        for _ in range(self.arguments.steps):
            self.sync()
            begin = time.perf_counter()
            self.one(method.step)
            self.sync()
            found.append(time.perf_counter() - begin)
        return found

    def trace(self, methods: list[Method]) -> None:
        """One profiled step of each method; a file beside the rows with totals, gaps, copies and every event."""
        found: dict[str, list[DeviceEvent]] = {}
        for method in methods:
            with method.around:
                self.open_cap(method.cap_bytes)
                self.one(method.step)
                found[method.name] = trace_step(lambda method=method: self.one(method.step))
        stock = found.get(REFERENCE, [])
        document = {
            name: summary(events) | {"kernels": kernel_differences(stock, events) if stock else []}
            for name, events in found.items()
        }
        print(json.dumps({"trace": document}), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = {name: [list(vars(event).values()) for event in events] for name, events in found.items()}
        self.path.with_name(self.path.stem + "_trace.json").write_text(json.dumps(rows))

    def open_cap(self, cap_bytes: int | None) -> None:
        """Give everything cached back and set what the allocator may take from here on."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            cap_allocator(cap_bytes)

    def retries(self) -> int:
        """How often the allocator has had to give memory back before it could go on: each stops the device."""
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if self.device.type == "cuda" else 0

    def uncapped(self, method: Method) -> int:
        """Bytes that the allocator takes where nothing stops it."""
        self.open_cap(None)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            self.one(method.step)
        self.sync()
        return int(torch.cuda.max_memory_reserved())

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

    def plain(self, step: Callable[[], torch.Tensor], around: AbstractContextManager[Any] | None = None) -> Method:
        """A method without a name yet."""
        return Method("", step, around if around is not None else contextlib.nullcontext())

    def eager(self) -> Method:
        """No compiler."""
        return self.plain(lambda: self.model(*self.inputs))

    def compile(self) -> Method:
        """torch.compile with its defaults."""
        return self.stock(None)

    def partitioner(self, share: float) -> Method:
        """torch.compile with activation_memory_budget."""
        return self.stock(share)

    def stock(self, share: float | None) -> Method:
        """The stock inner compiler behind a backend of its own, so that no two methods share compiled code."""
        inner = self.arguments.inner or ("inductor" if self.device.type == "cuda" else "aot_eager")
        backend = torch._dynamo.lookup_backend(inner)

        def own(module: Any, inputs: Any) -> Any:
            change = {} if share is None else {"activation_memory_budget": share}
            with torch._functorch.config.patch(change):
                return backend(module, inputs)

        step = torch.compile(self.model, backend=own)
        return self.plain(lambda: step(*self.inputs))

    def checkpoint_compiled(self) -> Method:
        """torch.compile over torch.utils.checkpoint around each block."""
        method = self.stock(None)
        method.around = _Checkpointed(self.model)
        return method

    def checkpoint_eager(self) -> Method:
        """torch.utils.checkpoint around each block."""
        return self.plain(lambda: self.model(*self.inputs), _Checkpointed(self.model))

    def save_on_cpu(self) -> Method:
        """torch.autograd.graph.save_on_cpu(pin_memory=True)."""

        def step() -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                loss: torch.Tensor = self.model(*self.inputs)
            return loss

        return self.plain(step)

    def fxhome(self, budget: str) -> Method:
        """fxhome under an enforced budget."""
        asked: object = budget
        if budget == "min":
            asked = smallest_budget(self.model, self.inputs, self.options(None))
        step = torch.compile(self.model, backend=_backend(), options=self.options(asked))
        return self.plain(lambda: step(*self.inputs))

    def options(self, budget: object) -> dict[str, object]:
        """fxhome's options for a budget, with what the command line says."""
        given = {"inner": self.arguments.inner, "allow": self.arguments.allow, "policy": self.arguments.policy}
        return {"memory_budget": budget} | {name: value for name, value in given.items() if value is not None}

    def promise(self) -> dict[str, Any]:
        """What the newest plan says of itself."""
        graph = fxhome.ledger.graphs()[-1]
        plan, planned = graph.plan, graph.variants[-1].planned
        assert plan is not None
        assert planned is not None
        return {
            "asked_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "plan_measured_bytes": plan.measured_peak_bytes,
            "predicted_seconds": plan.predicted_step_seconds,
            "baseline_bytes": plan.baseline_peak_bytes,
            "host_bytes": plan.host_bytes,
            "placed": {p.value: size for p, size in plan.bytes_by_placement().items() if size},
            "baseline_seconds": plan.baseline_step_seconds,
            "gap": plan.gap,
            "search": [plan.search.evaluations, plan.search.seconds, plan.search.stopped_by],
            "planning": planned.step_seconds,
            "notes": list(plan.notes),
            "cap_bytes": cap_of(plan.budget_bytes),
        }

    def write(self) -> None:
        """JSON with everything, Markdown with the table, a picture of the front."""
        document = self.write_rows()
        self.path.with_suffix(".md").write_text(table(document))
        picture(document, self.path.with_suffix(".png"))

    def write_rows(self) -> dict[str, Any]:
        """JSON with everything, and what is in it."""
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
        return document


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


def _backend() -> Any:
    from fxhome.backend import fxhome as backend

    return backend


class _Checkpointed:
    """Wrap every repeated block of a model in torch.utils.checkpoint while the context is open; it can be entered
    again."""

    def __init__(self, model: nn.Module) -> None:
        from torch.utils.checkpoint import checkpoint

        blocks = [
            child
            for module in model.modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            for child in module
            if any(True for _ in child.parameters())
        ]
        outer = [b for b in blocks if not any(b is not other and b in list(other.modules()) for other in blocks)]
        # The same wrappers every time: compiled code is guarded by them.
        self.wrapped = {
            block: lambda *args, _forward=block.forward, **kwargs: checkpoint(
                _forward, *args, use_reentrant=False, **kwargs
            )
            for block in outer
        }

    def __enter__(self) -> None:
        for block, forward in self.wrapped.items():
            block.forward = forward

    def __exit__(self, *_: object) -> None:
        for block in self.wrapped:
            del block.forward


if __name__ == "__main__":
    main()
