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

    def step(inner, budget):
        torch.manual_seed(0)
        model, x = Blocks(), torch.randn(2048, 64)
        options = {"memory_budget": budget, "inner": inner, "max_evaluations": 400}
        compiled = torch.compile(model, backend=backend, options=options)
        losses = []
        for _ in range(2):
            model.zero_grad()
            loss = compiled(x)
            loss.backward()
            losses.append(loss.item())
        return losses, float(model.up[0].weight.grad.sum())

    found = []
    for asked in sys.argv[1:]:
        torch._dynamo.reset()
        gc.collect()
        counters.clear()
        try:
            losses, gradient = step(*asked.split(":"))
        except fxhome.InfeasibleBudgetError as error:
            found.append(error.minimum_bytes)
            continue
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

    def start(*asked: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, str(script), *asked],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | shared,
        )
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return start


def test_a_second_process_finds_the_same_plans_and_lowers_nothing_anew(process: Process) -> None:
    """Under both inner compilers; another budget is another entry."""
    eager = ("aot_eager:8MiB", "aot_eager:2MiB")
    *first, cold, refusal = process(*eager, "inductor:8MiB", "inductor:2MiB")
    *second, warm, same_refusal, other = process(*eager, "inductor:8MiB", "inductor:2MiB", "inductor:7MiB")

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

    # The same peak to the byte.
    assert second == first
    plan, refusal = first
    assert plan["predicted"] == plan["measured"] <= plan["asked"][1]
    assert refusal > 1 << 21
