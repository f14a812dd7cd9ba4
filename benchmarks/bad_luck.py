"""A step under its budget where things go wrong: a busy link, little host memory, other allocators, a slow first step.

    python -m benchmarks.bad_luck              a transformer at half of what it needs, each case in a process of its own

The promise on bytes has to hold in every case, under the same cap on the allocator; time may suffer, and the last
column is what fxhome itself said. Writes <out>/bad_luck_<device>.json and .md.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxhome
from benchmarks.enforced import cap_allocator
from benchmarks.workloads import Decoder
from fxhome.backend import fxhome as backend
from fxhome.inductor_graphs import cap_of

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
CASES: dict[str, dict[str, Any]] = {
    "nothing is wrong": {},
    "the link is busy: another process copies both ways": {"busy": True},
    "a quarter of the host memory that the plan takes": {"host_share": 0.25},
    "an allocator without expandable segments": {"conf": ""},
    "a first step that is slower (2 s)": {"slow_first": 2.0},
}


def main() -> None:
    """Run every case in a child process and write what they report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        if (share := case.get("host_share")) is not None:
            case = {"host_budget": int(share * rows["nothing is wrong"]["host_bytes"])}
        rows[name] = in_child(arguments, case)
        print(json.dumps({name: rows[name]}), flush=True)
    document = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "command": "python -m benchmarks.bad_luck " + " ".join(sys.argv[1:]),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"bad_luck_{arguments.device}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(document))
    print(report(document))


def in_child(arguments: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """One case in a fresh process: the allocator's settings are read when CUDA starts."""
    context = multiprocessing.get_context("spawn")
    os.environ[VARIABLE] = case.get("conf", EXPANDABLE)
    stop, going = context.Event(), context.Event()
    other = context.Process(target=copy_both_ways, args=(arguments.device, going, stop)) if case.get("busy") else None
    if other is not None:
        other.start()
        going.wait(120)
    try:
        with context.Pool(1) as pool:
            return pool.apply(train, (arguments, case))
    finally:
        stop.set()
        if other is not None:
            other.join()


def copy_both_ways(device: str, going: Event, stop: Event) -> None:
    """Keep the link busy until told to stop."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, pin_memory=device == "cuda")
    held = torch.empty_like(source, device=device)
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
    going.set()
    while not stop.is_set():
        for stream, (into, out_of) in zip(streams, ((held, source), (target, held)), strict=False):
            with torch.cuda.stream(stream):
                into.copy_(out_of, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        else:
            target.copy_(source)


def train(arguments: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """Median step and the promise of torch.compile's and fxhome's training, with Adam, under the cap."""
    said: list[str] = []
    watch_log(said.append)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = Decoder(arguments.width, arguments.layers, arguments.width // 64, 256, arguments.tokens)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    ids = torch.randint(256, (arguments.batch, arguments.tokens + 1), device=device)
    inner = "inductor" if device.type == "cuda" else "aot_eager"
    options: dict[str, Any] = {"memory_budget": arguments.budget, "inner": inner}
    if "host_budget" in case:
        options["host_budget"] = case["host_budget"]
    step = torch.compile(model, backend=backend, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times: list[float] = []
    cap_bytes = peak = 0
    for i in range(arguments.steps):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        if i == 0:
            time.sleep(case.get("slow_first", 0.0))
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            if i == 1:
                # From here on more than this is out of memory.
                budget_bytes = fxhome.plans()[-1].budget_bytes
                cap_bytes = cap_of(budget_bytes)
                cap_allocator(cap_bytes)
                torch.cuda.reset_peak_memory_stats()
        times.append(time.perf_counter() - begin)
        del loss
    plan = fxhome.plans()[-1]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {
        "asked_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "measured_bytes": peak or plan.measured_peak_bytes,
        "cap_bytes": cap_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else 0,
        "step_seconds": statistics.median(times[3:] or times),
        "predicted_seconds": plan.predicted_step_seconds,
        "host_bytes": plan.host_bytes,
        "said": [*said, *plan.notes],
    }


def watch_log(tell: Callable[[str], None]) -> None:
    """Hand every warning of fxhome's to `tell`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    logging.getLogger("fxhome").addHandler(Handler(logging.WARNING))


def report(document: dict[str, Any]) -> str:
    """A row per case; peaks in MiB, steps in ms."""
    rows = document["rows"]
    normal = next(iter(rows.values()))["step_seconds"]
    lines = [
        f"# When luck is bad, {document['device']}",
        "",
        f"torch {document['torch']}; `{document['command']}`",
        "",
        "| case | asked / predicted / measured MiB | reserved MiB | cap MiB | step ms | / the first row | "
        "predicted ms | host MiB | fxhome said |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        promise = " / ".join(f"{row[f'{key}_bytes'] / 2**20:.1f}" for key in ("asked", "predicted", "measured"))
        cells = [
            name,
            promise,
            f"{row['reserved_bytes'] / 2**20:.0f}",
            f"{row['cap_bytes'] / 2**20:.0f}",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['step_seconds'] / normal:.3f}",
            f"{row['predicted_seconds'] * 1e3:.1f}",
            f"{row['host_bytes'] / 2**20:.0f}",
            "; ".join(row["said"]) or "nothing",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
