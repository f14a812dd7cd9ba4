"""What a training step costs the host: every figure of the host's profile, and where the host's time of a step goes.

    python -m benchmarks.host_costs                              all of it, on the GPU
    python -m benchmarks.host_costs --workloads unet:64          one workload, at another batch
    python -m benchmarks.host_costs --device cpu --workloads     the figures alone, without a GPU

Prints one JSON document per line. A workload runs at a batch so small that the device is hardly waited for: its phases
are the host's own. Phases of a step, in host microseconds:

    enter_forward    from the call to the compiled forward: guards, AOTAutograd's wrapper
    forward          launches of the forward
    leave_forward    until the caller has its loss
    enter_backward   from `backward()` to the compiled backward
    backward         launches of the backward
    leave_backward   gradients handed over
    sync             until the device is done
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.step_trace import DeviceEvent, summary, trace_step
from benchmarks.workloads import WORKLOADS
from fxhome.device import measuring_turn
from fxhome.runtime.host_probe import measure_host_costs

INNERS = ("aot_eager", "inductor")
PHASES = (
    "enter_forward",
    "forward",
    "leave_forward",
    "enter_backward",
    "backward",
    "leave_backward",
    "sync",
)
STEPS = 20
ROW = 400
"""Small kernels that are queued behind a busy device, so that the host is not what they wait for."""


def main() -> None:
    """Print every figure; one line as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inners", nargs="*", default=list(INNERS), choices=INNERS)
    parser.add_argument("--workloads", nargs="*", default=["unet:2", "resnet50:4"], metavar="NAME:BATCH")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        _say("device row", {"name": torch.cuda.get_device_name(device), "torch": torch.__version__} | _row(device))
    for inner in arguments.inners:
        begin = time.perf_counter()
        with measuring_turn(device):
            figures = asdict(measure_host_costs(device, inner))
        _say("host costs", figures | {"seconds": time.perf_counter() - begin})
        torch._dynamo.reset()
    for given in arguments.workloads:
        name, _, batch = given.partition(":")
        _say(given, _step(name, int(batch), device))
        torch._dynamo.reset()


def _say(what: str, figures: dict[str, Any]) -> None:
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"what": what} | rounded), flush=True)


def _row(device: torch.device) -> dict[str, float]:
    """What a small kernel takes of a busy device by its clock, its own time, and what is left between two."""
    one = torch.zeros(1, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def row() -> None:
        torch.cuda._sleep(20_000_000)
        begin.record()
        for _ in range(ROW):
            one.add_(1)
        end.record()

    times = []
    for _ in range(5):
        row()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / ROW)
    events = [event for event in trace_step(row) if "elementwise" in event.name]
    gaps = [after.begin_us - before.begin_us - before.time_us for before, after in itertools.pairwise(events)]
    return {
        "row_us": statistics.median(times),
        "kernel_us": statistics.median(event.time_us for event in events),
        "gap_us": statistics.median(gaps),
    }


def _step(name: str, batch: int, device: torch.device) -> dict[str, Any]:
    """Phases of a compiled step in host us, its launches by kind, and what the device did meanwhile."""
    torch.manual_seed(0)
    model, inputs = WORKLOADS[name].build(batch, device)
    stamps: list[float] = []
    step = torch.compile(model, backend=lambda module, examples: _stamped(module, examples, stamps), dynamic=False)

    def run() -> list[float]:
        for parameter in model.parameters():
            parameter.grad = None
        _wait(device)
        stamps.clear()
        times = [time.perf_counter()]
        loss = step(*inputs)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        _wait(device)
        times.append(time.perf_counter())
        assert len(stamps) == 4, "one forward and one backward"
        ahead, back = stamps[:2], stamps[2:]
        marks = [times[0], *ahead, times[1], *back, *times[2:]]
        return [(after - before) * 1e6 for before, after in itertools.pairwise(marks)]

    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    for _ in range(3):
        run()
    rows = [run() for _ in range(STEPS)]
    found: dict[str, Any] = {"compile_seconds": seconds, "step_us": statistics.median(sum(row) for row in rows)}
    found |= {phase: statistics.median(row[i] for row in rows) for i, phase in enumerate(PHASES)}
    found["inputs"] = sum(1 for _ in (*model.parameters(), *model.buffers())) + len(inputs)
    found["gradients"] = sum(1 for parameter in model.parameters() if parameter.requires_grad)
    if device.type == "cuda":
        events = trace_step(run)
        found |= _launches(events)
    return found


def _launches(events: Sequence[DeviceEvent]) -> dict[str, Any]:
    kinds = Counter(
        "generated" if event.name.startswith("triton") else event.kind if event.kind != "kernel" else "library"
        for event in events
    )
    totals = summary(list(events))
    return {"launches": dict(kinds)} | {key: totals[key] for key in ("compute_busy_us", "compute_idle_us")}


def _stamped(module: Any, examples: Sequence[Any], stamps: list[float]) -> Callable[..., Any]:
    """The stock compiler, with the time noted at both ends of every compiled graph that runs."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: Any, inputs: Any, **settings: Any) -> Callable[..., Any]:
        compiled: Any = compile_fx_inner(graph, inputs, **settings)

        def call(arguments: list[Any]) -> Any:
            stamps.append(time.perf_counter())
            result = compiled(arguments)
            stamps.append(time.perf_counter())
            return result

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(module, list(examples), inner_compile=inner_compile)
    result: Callable[..., Any] = compiled
    return result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
