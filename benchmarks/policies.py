"""Published policies against ours on one executor: same model, batch, budget and run time; only decisions differ.

    python -m benchmarks.policies --seconds 150                         CIFAR-10 shapes, inner aot_eager
    python -m benchmarks.policies --shapes imagenet --inner inductor --models vgg16 resnet --policies pso capuchin
    python -m benchmarks.policies --device cpu --models tiny            a smoke run without a GPU

Three budgets per model: `common`, the smallest one that both vDNN-conv and Capuchin can meet (by bisection), 60 % of
the baseline's peak (or 2 % above the smallest feasible budget, where that is more), and, where asked for, `tight`, the
smallest one that Capuchin can meet. A policy that cannot meet a budget is run as far as it gets and marked. Writes
<out>/policies_<device>.json and .md after each row; rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fxhome
from benchmarks.policy_models import MODELS, SHAPES, build
from benchmarks.policy_report import report
from fxhome import ledger
from fxhome.backend import fxhome as backend
from fxhome.passes.op_class import op_class
from fxhome.passes.planned import Planned
from fxhome.passes.search import POLICIES, minimum_peak, search
from fxhome.passes.simulate import Problem

BUDGETS = ("common", "60%", "tight")
DEFAULT_BUDGETS = BUDGETS[:2]
DEFAULT_MODELS = tuple(name for name in MODELS if name != "tiny")
DEFAULT_POLICIES = ("pso", "vdnn_conv", "capuchin", "keep_all", "vdnn_all", "superneurons", "checkpoint", "home")
CORE_POLICIES = 3
HOME_EVALUATIONS = 5000
BISECTIONS = 12
SLACK_BYTES = {"cpu": 1 << 16, "cuda": 4 << 20}
"""Above what two policies need: what a process holds at the next trace differs by less."""


@dataclass(frozen=True)
class Case:
    """What one row measures."""

    shapes: str
    model: str
    inner: str
    budget: str
    policy: str

    @property
    def key(self) -> str:
        """The row's name in the results."""
        return "/".join(asdict(self).values())


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=["cifar"], choices=SHAPES)
    parser.add_argument("--models", nargs="*", default=list(DEFAULT_MODELS), choices=list(MODELS))
    parser.add_argument("--policies", nargs="*", default=list(DEFAULT_POLICIES), choices=POLICIES)
    parser.add_argument("--budgets", nargs="*", default=list(DEFAULT_BUDGETS), choices=BUDGETS)
    parser.add_argument("--inner", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="on CUDA; fp32 without TF32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, help="start no further row after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    arguments = parser.parse_args(argv)
    PolicyBench(arguments, " ".join(sys.argv[1:] if argv is None else argv)).run()


class PolicyBench:
    """All rows of one call, the most telling ones first, so that a run cut short is still of use."""

    def __init__(self, arguments: argparse.Namespace, command: str) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.began = time.perf_counter()
        self.path: Path = arguments.out / f"policies_{self.device.type}.json"
        self.document: dict[str, Any] = {"rows": {}, "budgets": {}, "commands": []}
        if self.path.exists():
            self.document |= json.loads(self.path.read_text())
        cuda = self.device.type == "cuda"
        self.document |= {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        line = f"python -m benchmarks.policies {command}".strip()
        if line not in self.document["commands"]:
            self.document["commands"].append(line)
        self.model: torch.nn.Module | None = None
        self.inputs: tuple[Any, ...] = ()
        self.built: tuple[str, str] | None = None

    def run(self) -> None:
        """Measure every row that is not there yet: the core policies of all models, then the others."""
        policies = self.arguments.policies
        for group in (policies[:CORE_POLICIES], policies[CORE_POLICIES:]):
            for budget, shapes, model in itertools.product(
                self.arguments.budgets, self.arguments.shapes, self.arguments.models
            ):
                for policy in group:
                    self.row(Case(shapes, model, self.arguments.inner, budget, policy))
        self.write()

    def row(self, case: Case) -> None:
        """Measure one row, keep it, print it; a failure is a row too."""
        limit = self.arguments.seconds
        known = case.key in self.document["rows"] and not self.arguments.again
        if known or (limit is not None and time.perf_counter() - self.began > limit):
            return
        began = time.perf_counter()
        try:
            self._build(case)
            figures = self.measure(case.policy, self.budget_bytes(case))
        except Exception as error:  # a policy that cannot run a model is a result, told in the table
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        finally:
            self.clean()
        figures |= {"total_seconds": time.perf_counter() - began}
        self.document["rows"][case.key] = asdict(case) | figures
        print(json.dumps({case.key: figures}), flush=True)
        self.write()

    def _build(self, case: Case) -> None:
        if self.built == (case.shapes, case.model):
            return
        self.model, self.inputs = None, ()
        self.clean()
        torch.manual_seed(0)
        autocast = self.arguments.precision == "bf16"
        self.model, self.inputs = build(
            case.model, case.shapes, self.device, batch=self.arguments.batch, autocast=autocast
        )
        self.built = (case.shapes, case.model)

    def budget_bytes(self, case: Case) -> int:
        """The row's budget; the first row of a model traces it once to find out."""
        name = f"{case.shapes}/{case.model}/{case.inner}"
        if case.budget not in self.document["budgets"].get(name, {}):
            self.compiled("pso", "60%")()
            planned = ledger.graphs()[0].variants[-1].planned
            assert planned is not None, "a training graph was planned"
            self.document["budgets"][name] = common_budget(planned) | {"batch": int(self.inputs[0].shape[0])}
            self.clean()
        found: int = self.document["budgets"][name][case.budget]
        return found

    def compiled(self, policy: str, budget: int | str) -> Any:
        """The training step under a policy: a call gives the loss."""
        assert self.model is not None, "the row's model was built"
        options: dict[str, Any] = {"memory_budget": budget, "policy": policy, "inner": self.arguments.inner}
        options |= {"on_infeasible": "best_effort"}
        if policy == "home":
            options["max_evaluations"] = HOME_EVALUATIONS
        step = torch.compile(self.model, backend=backend, options=options)
        return lambda: step(*self.inputs)

    def measure(self, policy: str, budget: int) -> dict[str, Any]:
        """First step (plans, compiles, meters), a warm one, timed ones, one metered by torch's own counters."""
        step = self.compiled(policy, budget)
        began = time.perf_counter()
        self.one(step)
        first = time.perf_counter() - began
        self.one(step)
        times = []
        for _ in range(self.arguments.steps):
            begin = time.perf_counter()
            self.one(step)
            times.append(time.perf_counter() - begin)
        peak = None
        if self.device.type == "cuda":
            self._drop_gradients()
            torch.cuda.reset_peak_memory_stats()
            self.one(step, keep=True)
            peak = torch.cuda.max_memory_allocated()
        plan = fxhome.plans()[0]
        return {
            "fits": plan.predicted_peak_bytes <= budget,
            "step_ms": 1e3 * statistics.median(times),
            "fastest_ms": 1e3 * min(times),
            "slowest_ms": 1e3 * max(times),
            "predicted_ms": 1e3 * plan.predicted_step_seconds,
            "asked_bytes": budget,
            "predicted_bytes": plan.predicted_peak_bytes,
            "measured_bytes": peak if peak is not None else plan.measured_peak_bytes,
            "baseline_bytes": plan.baseline_peak_bytes,
            "placed": {str(kind): size for kind, size in plan.bytes_by_placement().items() if size},
            "search": [plan.search.evaluations, plan.search.seconds, plan.search.stopped_by],
            "first_step_seconds": first,
        }

    def one(self, step: Any, *, keep: bool = False) -> None:
        """Forward and backward, waited for; gradients are dropped before it unless they are to be counted."""
        if not keep:
            self._drop_gradients()
        step().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.grad = None

    def clean(self) -> None:
        """Give everything back between two rows."""
        torch._dynamo.reset()
        self._drop_gradients()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self) -> None:
        """JSON with everything, Markdown with the tables."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.document, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(report(self.document))


def common_budget(planned: Planned) -> dict[str, Any]:
    """Bytes of each budget, and what each of the two policies needs at least."""
    plan, problem = planned.plan, planned.problem
    assert problem is not None, "plans made by search carry their problem"
    fixed = plan.resident_bytes + plan.error_bound_bytes
    classes = _classes(planned)
    least = {policy: fixed + _least_bytes(problem, policy, classes) for policy in ("vdnn_conv", "capuchin")}
    slack = SLACK_BYTES[planned.facts.planned_for]
    return {
        "common": max(least.values()) + slack,
        "tight": least["capuchin"] + slack,
        "60%": max(int(0.6 * plan.baseline_peak_bytes), int(1.02 * (fixed + minimum_peak(problem)[0]))),
        "baseline": plan.baseline_peak_bytes,
        "least": least,
    }


def _least_bytes(problem: Problem, policy: str, classes: list[str]) -> int:
    """The smallest budget for graph storages that a policy meets: what vDNN takes, or by bisection."""
    if policy.startswith("vdnn"):
        return search(problem, 0, policy=policy, storage_class=classes).peak_bytes
    low = minimum_peak(problem)[0]
    high = search(problem, 1 << 62, policy="keep_all").peak_bytes
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        if search(problem, middle, policy=policy, storage_class=classes).feasible:
            high = middle
        else:
            low = middle
    return high


def _classes(planned: Planned) -> list[str]:
    """The class of the op behind each storage, for the policies that decide by it."""
    by_name = {
        node.name: op_class(node)
        for module in (planned.backward, planned.forward)
        for node in module.graph.nodes
        if node.op == "call_function"
    }
    names = planned.facts.node_names
    return [by_name.get(names[owner], "other") for owner in planned.facts.storage_owner]


if __name__ == "__main__":
    main()
