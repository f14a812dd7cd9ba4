"""Where the time of a measured step goes: kernels, idle gaps of the compute stream, copies and their rates.

    python -m benchmarks.train_step resnet50 --budgets 60% --methods compile fxhome --trace

A miss of the predicted time is one of three: kernels that take longer than they were timed alone (copies beside them
use the same memory), a compute stream that waits for a copy or for the host, copies slower than the profile says.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHOWN_GAPS = 14
SHOWN_KERNELS = 14
GAP_US = 5.0


@dataclass(frozen=True)
class DeviceEvent:
    """One kernel, copy or memset as the profiler saw it. Times in microseconds from the first of the step."""

    kind: str
    name: str
    stream: int
    begin_us: float
    time_us: float
    size_bytes: int


def trace_step(run: Callable[[], object]) -> list[DeviceEvent]:
    """Everything the device did in one call of `run`, by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        raw = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}
    found = [
        DeviceEvent(
            kinds[event["cat"]],
            event["name"],
            int(event["args"].get("stream", -1)),
            float(event["ts"]),
            float(event["dur"]),
            int(event["args"].get("bytes", 0)),
        )
        for event in raw
        if event.get("cat") in kinds
    ]
    found.sort(key=lambda event: event.begin_us)
    first = found[0].begin_us if found else 0.0
    return [DeviceEvent(e.kind, e.name, e.stream, round(e.begin_us - first, 2), e.time_us, e.size_bytes) for e in found]


def summary(events: list[DeviceEvent]) -> dict[str, Any]:
    """Totals of a step: busy and idle time of the compute stream, its longest gaps, copies by direction."""
    kernels = [event for event in events if event.kind == "kernel"]
    by_stream: dict[int, float] = defaultdict(float)
    for event in kernels:
        by_stream[event.stream] += event.time_us
    compute = max(by_stream, key=lambda stream: by_stream[stream])
    own = [event for event in events if event.stream == compute]
    gaps = []
    end, before = own[0].begin_us, ""
    for event in own:
        if event.begin_us - end > GAP_US:
            gaps.append({"at_us": end, "gap_us": event.begin_us - end, "before": before[:60], "next": event.name[:60]})
        if event.begin_us + event.time_us > end:
            end, before = event.begin_us + event.time_us, event.name
    copies: dict[str, dict[str, float]] = {}
    for name in sorted({event.name for event in events if event.kind == "copy"}):
        group = [event for event in events if event.kind == "copy" and event.name == name]
        total_us, total = sum(e.time_us for e in group), sum(e.size_bytes for e in group)
        copies[name] = {
            "count": len(group),
            "gb": total / 1e9,
            "time_us": total_us,
            "gbs": total / max(total_us, 1e-9) / 1e3,
            "first_us": group[0].begin_us,
            "last_us": group[-1].begin_us + group[-1].time_us,
        }
    return {
        "step_us": max(event.begin_us + event.time_us for event in events),
        "compute_busy_us": sum(event.time_us for event in own),
        "compute_idle_us": sum(gap["gap_us"] for gap in gaps),
        "other_kernels_us": sum(by_stream.values()) - by_stream[compute],
        "copies": copies,
        "gaps": sorted(gaps, key=lambda gap: -float(gap["gap_us"]))[:SHOWN_GAPS],
    }


def kernel_differences(stock: list[DeviceEvent], planned: list[DeviceEvent]) -> list[dict[str, Any]]:
    """Kernels whose total time differs most between two steps."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for side, events in enumerate((stock, planned)):
        for event in events:
            if event.kind == "kernel":
                totals[event.name][2 * side] += event.time_us
                totals[event.name][2 * side + 1] += 1
    rows = [
        {"kernel": name[:90], "stock_us": t[0], "stock_calls": t[1], "planned_us": t[2], "planned_calls": t[3]}
        for name, t in totals.items()
    ]
    return sorted(rows, key=lambda row: -abs(float(row["planned_us"]) - float(row["stock_us"])))[:SHOWN_KERNELS]
