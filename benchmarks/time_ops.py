"""Time every distinct operator of the workloads on this GPU, with nothing else running on it.

    python -m benchmarks.time_ops                    all workloads; benchmarks/profiles/<device>_ops.json
    python -m benchmarks.time_ops resnet50 vgg16     some; what the file has of others stays

What is timed goes to fxhome's own cache as well, so later runs on this machine find it there. The file is what plans
are lowered with where there is no GPU (benchmarks.lowering). Only traces and plans: nothing is compiled, no step runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import WORKLOADS
from fxhome.device import cached_profile
from fxhome.inductor_graphs import plan_only
from fxhome.options import Options
from fxhome.passes import pipeline
from fxhome.passes.cost_model import TimingCache
from fxhome.passes.planned import Planned
from fxhome.passes.situation import Situation

PROFILES = Path(__file__).parent / "profiles"


class _PlannedError(BaseException):
    """Ends a compilation behind its plan."""


def main() -> None:
    """Plan each workload once and write what was timed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help="all that have a batch for CUDA, unless given")
    parser.add_argument("--out", type=Path, default=PROFILES / "h200_ops.json")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    profile = cached_profile(device, "inductor")
    options = Options.from_mapping({"memory_budget": "70%", "inner": "inductor", "max_evaluations": 1})

    def plan_step(joint: Any, inputs: Any, outputs: int, situation: Any, static: Any) -> Planned:
        return pipeline.plan_graph(
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

    def backend(module: Any, inputs: Sequence[Any]) -> Any:
        plan_only(module, inputs, plan_step, Situation(None, free_bytes=profile.total_memory_bytes))
        raise _PlannedError

    for name in arguments.workloads or [name for name in WORKLOADS if "small_width" not in name]:
        begin = time.perf_counter()
        torch.manual_seed(0)
        model, inputs = WORKLOADS[name].build(WORKLOADS[name].batch["cuda"], device)
        try:
            torch.compile(model, backend=backend)(*inputs)
        except _PlannedError:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
        del model, inputs
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    cache = TimingCache(profile)
    known |= {signature: list(astuple(timing)) for signature, timing in cache.entries.items()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    print(f"{len(cache.entries)} operators in {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
