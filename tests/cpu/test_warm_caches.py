"""A second process with warm caches: the same plan, the same promise, the same refusal, and nothing lowered anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # each process imports torch, and the first one compiles C++

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = '''
    import gc, json, sys
    import torch
    from torch import nn
    from torch._dynamo.utils import counters

    import fxhome
    from fxhome.backend import fxhome as backend

    class Blocks(nn.Module):
        """Products and next to nothing else: what takes the time here is to compile C++."""

        def __init__(self):
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(3))
            self.down = nn.ModuleList(nn.Linear(256, 64, bias=False) for _ in range(3))

        def forward(self, x):
            for up, down in zip(self.up, self.down):
                x = down(up(x))
            return x.square().mean()

    def step(budget):
        torch.manual_seed(0)
        model, x = Blocks(), torch.randn(2048, 64)
        options = {"memory_budget": budget, "inner": sys.argv[1], "max_evaluations": 400}
        compiled = torch.compile(model, backend=backend, options=options)
        losses = []
        for _ in range(2):
            model.zero_grad()
            loss = compiled(x)
            loss.backward()
            losses.append(loss.item())
        return losses, float(model.up[0].weight.grad.sum())

    found = []
    for budget in sys.argv[2:]:
        torch._dynamo.reset()
        gc.collect()
        counters.clear()
        losses, gradient = step(budget)
        (plan,) = fxhome.plans()
        found.append({
            "fingerprint": plan.fingerprint(),
            "asked": [plan.asked, plan.budget_bytes],
            "predicted": plan.predicted_peak_bytes,
            "measured": plan.measured_peak_bytes,
            "host": plan.host_bytes,
            "placements": [[entry.name, entry.placement] for entry in plan.placements],
            "losses": losses,
            "gradient": gradient,
            "caches": [counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]],
        })
    torch._dynamo.reset()
    gc.collect()
    try:
        step("2MiB")
    except fxhome.InfeasibleBudgetError as error:
        found.append(error.minimum_bytes)
    print(json.dumps(found))
'''

Process = Callable[..., list[Any]]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """Runs the script in a process of its own; all of them share the two caches."""
    script = tmp_path / "step.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    shared = {
        "FXHOME_CACHE_DIR": str(tmp_path / "fxhome"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }

    def start(inner: str, *budgets: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, str(script), inner, *budgets],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | shared,
        )
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return start


def test_inductor_lowers_nothing_anew_and_another_budget_is_another_entry(process: Process) -> None:
    cold, refusal = process("inductor", "8MiB")
    warm, other, same_refusal = process("inductor", "8MiB", "7MiB")

    # Forward and backward are lowered by the first process (again where lowering showed that more was needed) ...
    _, missed = cold.pop("caches")
    assert missed >= 2
    # ... and only read by the second.
    hit, missed = warm.pop("caches")
    assert hit >= 2
    assert missed == 0
    assert warm == cold
    assert any(placement != "keep" for _, placement in cold["placements"])
    assert cold["predicted"] <= cold["asked"][1]
    assert same_refusal == refusal

    assert other["fingerprint"] != cold["fingerprint"]
    assert other["predicted"] <= other["asked"][1]
    assert other["caches"][1] >= 2


def test_aot_eager_measures_the_same_peak_to_the_byte(process: Process) -> None:
    first, second = (process("aot_eager", "8MiB") for _ in range(2))
    assert second == first
    plan, refusal = first
    assert plan["predicted"] == plan["measured"] <= plan["asked"][1]
    assert refusal > 1 << 21
