"""Is the promise kept on models that nothing here was tuned on? Real training loops, every step's peak from outside.

    python -m benchmarks.promise                                     all models, each in a process of its own
    python -m benchmarks.promise convnext bert --budgets 60% min     on whatever device is there

Per model: a few eager steps for the losses, then the same steps from the same weights under each budget, with the
allocator capped at budget + max(256 MiB, 3 %) from the third step on (until then nothing is known of the budget in
bytes). `worst step` is the largest peak that torch's counters showed in any step, the first one included, `off` the
largest difference of a loss to the eager one. Writes <out>_<device>.json and .md after each row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxhome
from benchmarks.enforced import cap_allocator, smallest_budget
from benchmarks.promise_models import MODELS
from fxhome.backend import fxhome as backend
from fxhome.inductor_graphs import cap_of
from fxhome.placed_blocks import unsteered

STEPS = 9
LOSSES = 4


def main() -> None:
    """One child process per model and budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--budgets", nargs="*", default=["60%", "min"])
    parser.add_argument("--inner", default=None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/promise"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(*arguments.child, arguments.inner)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = arguments.out.with_name(f"{arguments.out.name}_{device}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for model in arguments.models:
        for budget in arguments.budgets:
            command = [sys.executable, "-m", "benchmarks.promise", "--child", model, budget]
            command += ["--inner", arguments.inner] if arguments.inner else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            lines = done.stdout.splitlines()
            row = json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": f"exit {done.returncode}"}
            rows[f"{model} {budget}"] = row
            print(model, budget, json.dumps(row), flush=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(rows, device))


def measure(name: str, budget: str, inner: str | None) -> dict[str, Any]:
    """One model under one budget."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model, inputs = MODELS[name](device)
    model.train()
    weights = copy.deepcopy({key: value.cpu() for key, value in model.state_dict().items()})
    row: dict[str, Any] = {"eager": [round(loss, 5) for loss in _losses(model, model, inputs)]}
    model.load_state_dict(weights)
    options: dict[str, Any] = {"inner": inner} if inner else {}
    try:
        asked: int | str = smallest_budget(model, inputs, options) if budget == "min" else budget
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        step = torch.compile(model, backend=backend, options=options | {"memory_budget": asked})
        row |= _trained(step, model, inputs, device)
    except (fxhome.FxhomeError, torch.OutOfMemoryError) as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        row["minimum_bytes"] = getattr(error, "minimum_bytes", None)
    except Exception as error:  # a crash is a row, and what this is for
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    return row


def _trained(step: Callable[..., Any], model: nn.Module, inputs: tuple[Any, ...], device: torch.device) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peaks, losses, seconds = [], [], []
    begin = time.perf_counter()
    first_seconds, cap_bytes = 0.0, None
    for i in range(STEPS):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        torch.manual_seed(i)
        # Blocks that are laid take plugs, which torch's counters show as well.
        with unsteered():
            loss = step(*inputs)
            loss.backward()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            peaks.append(torch.cuda.max_memory_allocated())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
        if i == 0:
            first_seconds = time.perf_counter() - begin
        if i == 1 and device.type == "cuda":
            cap_bytes = cap_of(fxhome.plans()[-1].budget_bytes)
            cap_allocator(cap_bytes)
    for i in range(STEPS):  # with blocks laid where they are scattered, as users run them
        torch.manual_seed(i)
        start = time.perf_counter()
        loss = step(*inputs)
        loss.backward()
        float(loss.detach())
        seconds.append(time.perf_counter() - start)
        optimizer.zero_grad(set_to_none=True)
        del loss
    plans = fxhome.plans()
    plan = plans[-1]
    return {
        "plans": len(plans),
        "asked_bytes": plan.budget_bytes,
        "predicted_bytes": max(p.predicted_peak_bytes for p in plans),
        "measured_bytes": max((p.measured_peak_bytes or 0) for p in plans),
        "step_bytes": peaks,
        "cap_bytes": cap_bytes,
        "losses": losses[:LOSSES],
        "first_seconds": first_seconds,
        "step_seconds": sorted(seconds[-5:])[2],
        "predicted_seconds": sum(p.predicted_step_seconds for p in plans),
        "notes": [note for p in plans for note in p.notes],
        "placed": {kind.value: size for kind, size in plan.bytes_by_placement().items() if size},
    }


def _losses(step: Callable[..., Any], model: nn.Module, inputs: tuple[Any, ...]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for i in range(LOSSES):
        torch.manual_seed(i)
        loss = step(*inputs)
        loss.backward()
        found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def table(rows: dict[str, Any], device: str) -> str:
    """The Markdown file."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    lines = [
        f"# The promise on models that nothing was tuned on: {name}",
        "",
        f"torch {torch.__version__}. `python -m benchmarks.promise`; {__doc__.split('Per model: ')[1].strip()}",
        "",
        "| model, budget | asked / predicted / measured GB | worst step GB | kept | losses off by "
        "| step ms (predicted) | first step s | graphs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, row in rows.items():
        if "asked_bytes" not in row:
            lines.append(f"| {key} | {row.get('error', '')} | | | | | | |")
            continue
        asked = row["asked_bytes"]
        peaks = [row[name] / 1e9 for name in ("asked_bytes", "predicted_bytes", "measured_bytes")]
        worst = max(row["step_bytes"], default=0)
        off = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(row["losses"], row["eager"], strict=True))
        lines.append(
            f"| {key} | {' / '.join(f'{peak:.3f}' for peak in peaks)} | {worst / 1e9:.3f} | "
            f"{'yes' if worst <= asked and row['measured_bytes'] <= asked else 'NO'} | {off:.1e} | "
            f"{row['step_seconds'] * 1e3:.1f} ({row['predicted_seconds'] * 1e3:.1f}) | {row['first_seconds']:.0f} | "
            f"{row['plans']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
