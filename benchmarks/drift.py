"""200 training steps with changing data: losses, memory and step times with a budget, beside torch.compile twice.

    python -m benchmarks.drift                 a transformer on the bytes of Python's standard library, at 60 %

torch.compile runs twice: the distance between its own two runs is what ours is held against. Writes
<out>/drift_<device>.json and .md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import fxhome
from benchmarks.workloads import Decoder
from fxhome.backend import fxhome as backend


def main() -> None:
    """Run the three trainings and write what they did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    inner = "inductor" if arguments.device == "cuda" else "aot_eager"
    ours = {"backend": backend, "options": {"memory_budget": arguments.budget, "inner": inner}}
    runs = {
        "torch.compile": train(arguments, backend=inner),
        "torch.compile again": train(arguments, backend=inner),
        f"fxhome {arguments.budget}": train(arguments, **ours),
    }
    document = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "command": "python -m benchmarks.drift " + " ".join(sys.argv[1:]),
        "runs": runs,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"drift_{arguments.device}.json"
    path.write_text(json.dumps(document) + "\n")
    path.with_suffix(".md").write_text(report(document))
    print(report(document))


def text(count: int) -> torch.Tensor:
    """The first bytes of the standard library's sources."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= count:
            break
    return torch.frombuffer(bytes(found[:count]), dtype=torch.uint8).long()


def train(arguments: argparse.Namespace, **how: Any) -> dict[str, Any]:
    """Losses, step seconds, and device and host memory behind every step."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: nn.Module = Decoder(arguments.width, arguments.layers, arguments.width // 64, 256, arguments.tokens)
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = torch.compile(model, **how)
    data = text(4 << 20).to(device)
    draw = torch.Generator().manual_seed(1)
    offsets = torch.arange(arguments.tokens + 1, device=device)
    figures: dict[str, list[float]] = {"loss": [], "seconds": [], "device_bytes": [], "host_bytes": []}
    process = psutil.Process()
    for _ in range(arguments.steps):
        starts = torch.randint(len(data) - arguments.tokens - 1, (arguments.batch, 1), generator=draw).to(device)
        batch = data[starts + offsets]
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        figures["loss"].append(float(loss.detach()))
        figures["seconds"].append(time.perf_counter() - begin)
        del loss
        figures["device_bytes"].append(float(torch.cuda.memory_allocated()) if device.type == "cuda" else 0.0)
        figures["host_bytes"].append(float(process.memory_info().rss))
    plans = fxhome.plans()
    promise = {}
    if plans:
        promise = {
            "asked_bytes": plans[-1].budget_bytes,
            "predicted_bytes": plans[-1].predicted_peak_bytes,
            "measured_bytes": plans[-1].measured_peak_bytes,
        }
    return {**figures, **promise}


def report(document: dict[str, Any]) -> str:
    """First and last parts of each run side by side, and the distance of its losses from torch.compile's first run."""
    reference = next(iter(document["runs"].values()))["loss"]
    lines = [
        f"# {len(reference)} steps with changing data, {document['device']}",
        "",
        f"torch {document['torch']}; `{document['command']}`",
        "",
        "| run | last loss | largest loss difference | ms, steps 20 to 60 | ms, last 40 | device MiB, step 20 | last | "
        "host MiB, step 20 | last | asked / predicted / measured MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in document["runs"].items():
        early, late = run["seconds"][20:60], run["seconds"][-40:]
        promise = [run[key] for key in ("asked_bytes", "predicted_bytes", "measured_bytes") if run.get(key)]
        cells = [
            name,
            f"{run['loss'][-1]:.4f}",
            f"{max(abs(a - b) for a, b in zip(run['loss'], reference, strict=True)):.4f}",
            f"{statistics.median(early or run['seconds']) * 1e3:.2f}",
            f"{statistics.median(late) * 1e3:.2f}",
            *(
                f"{run[kind][min(20, len(run[kind]) - 1)] / 2**20:.1f} | {run[kind][-1] / 2**20:.1f}"
                for kind in ("device_bytes", "host_bytes")
            ),
            " / ".join(f"{size / 2**20:.1f}" for size in promise),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
