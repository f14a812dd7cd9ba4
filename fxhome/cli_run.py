"""`fxhome run`: train a few steps of a SPEC without and with a plan, and put what happened side by side.

The plain step runs in a child process: it may not fit, and then neither its error nor its memory may touch the rest.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fxhome
from fxhome.errors import FxhomeError, SpecError, reason_of
from fxhome.json_codec import decode, encode
from fxhome.options import Options
from fxhome.placement import Plan
from fxhome.progress import announce, progress, progress_shown
from fxhome.report import placed_bytes
from fxhome.runtime.host_pool import host_pool
from fxhome.spec import Workload, load_workload
from fxhome.train_steps import Training, largest_difference, train

_TRAINING_FILE = "training.json"
_PLAIN_GRADIENTS = "gradients_without.pt"
_PLANNED_GRADIENTS = "gradients_with.pt"


@dataclass(frozen=True)
class RunRequest:
    """What the user asked `fxhome run` for."""

    spec: str
    batch_size: int | None
    num_steps: int
    device: str
    options: Mapping[str, object]
    """As typed; checked by `Options.from_mapping` before anything is built."""
    show_progress: bool | None


@dataclass(frozen=True)
class RunReport:
    """The plain and the planned run; `plain` is None where it did not fit, and `plain_failure` then says why."""

    spec: str
    device: str
    inner: str
    batch_size: int
    plan: Plan
    plain: Training | None
    plain_failure: str | None
    planned: Training
    largest_gradient_difference: float | None

    def to_json(self) -> dict[str, Any]:
        """Return a mapping ready for `json.dumps`; the plan stands without its program."""
        plan = self.plan
        return {
            "spec": self.spec,
            "device": self.device,
            "inner": self.inner,
            "batch_size": self.batch_size,
            "asked": plan.asked,
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": self.planned.peak_bytes,
            "predicted_step_seconds": plan.predicted_step_seconds,
            "baseline_peak_bytes": plan.baseline_peak_bytes,
            "placed_bytes": placed_bytes(plan),
            "plan_fingerprint": plan.fingerprint(),
            "notes": list(plan.notes),
            "plain": None if self.plain is None else _training_json(self.plain),
            "plain_failure": self.plain_failure,
            "planned": _training_json(self.planned),
            "largest_gradient_difference": _json_number(self.largest_gradient_difference),
        }


def run(request: RunRequest) -> RunReport:
    """Train without a plan (in a child process), then with one; raise `FxhomeError` for what the user got wrong."""
    options = Options.from_mapping(request.options)
    # Refused now, not after the plain run.
    host_pool().set_budget(options.host_budget)
    device = torch.device(request.device)
    inner = options.inner or ("inductor" if device.type == "cuda" else "aot_eager")
    workload = _workload(request, options)
    with tempfile.TemporaryDirectory(prefix="fxhome_run_") as folder:
        plain, plain_failure = plain_in_child(request, inner, Path(folder))
        plan, planned = _planned(request, options, workload, Path(folder, _PLANNED_GRADIENTS))
        difference = None
        if plain is not None:
            difference = largest_difference(Path(folder, _PLAIN_GRADIENTS), Path(folder, _PLANNED_GRADIENTS))
    return RunReport(
        spec=request.spec,
        device=request.device,
        inner=inner,
        batch_size=workload.batch_size,
        plan=plan,
        plain=plain,
        plain_failure=plain_failure,
        planned=planned,
        largest_gradient_difference=difference,
    )


def _workload(request: RunRequest, options: Options) -> Workload:
    device = torch.device(request.device)
    workload = load_workload(request.spec, batch_size=request.batch_size, device=device, seed=options.seed)
    if not any(weight.requires_grad for weight in workload.model.parameters()):
        raise SpecError(f"SPEC {request.spec!r}: the model has no trainable parameter, so there is nothing to train")
    return workload


def _planned(request: RunRequest, options: Options, workload: Workload, gradients_path: Path) -> tuple[Plan, Training]:
    # Compiling has no bar of its own: this one tells that it goes on.
    with progress("planning, compiling and metering with fxhome"):
        fast = fxhome.optimize(workload.model, workload.example_args, **request.options)
    training = train(
        fast,
        workload.model,
        workload.example_args,
        num_steps=request.num_steps,
        seed=options.seed,
        device=torch.device(request.device),
        title="training with fxhome",
        gradients_path=gradients_path,
    )
    plan = fast.plan
    # Two steps were metered, fxhome's own and the last one here: the promise covers both.
    peak_bytes = max(training.peak_bytes, plan.measured_peak_bytes or 0)
    return plan, replace(training, peak_bytes=peak_bytes)


def plain_in_child(request: RunRequest, inner: str, folder: Path) -> tuple[Training | None, str | None]:
    """The plain step's figures, or why there are none."""
    announce(f"training with {inner} alone, in a process of its own")
    process = multiprocessing.get_context("spawn").Process(target=_plain_child, args=(request, inner, str(folder)))
    process.start()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return None, "does not fit: the system killed it for its memory"
    result = folder / _TRAINING_FILE
    if process.exitcode != 0 or not result.is_file():
        raise FxhomeError(
            f"SPEC {request.spec!r}: the step without fxhome ended with exit status {process.exitcode} and no result; "
            "its own messages stand above"
        )
    document = json.loads(result.read_text(encoding="utf-8"))
    if document["error"] is not None:
        raise SpecError(
            f"SPEC {request.spec!r}: the step fails without fxhome too: {document['error']}; mend the model first"
        )
    if document["failure"] is not None:
        return None, document["failure"]
    training: Training = decode(Training, document["training"], "training")
    return training, None


def _plain_child(request: RunRequest, inner: str, folder: str) -> None:
    """Body of the child process: leaves its figures, or what went wrong, in `folder`."""
    _be_first_victim()
    outcome: dict[str, Any] = {"training": None, "failure": None, "error": None}
    with contextlib.redirect_stdout(sys.stderr), progress_shown(request.show_progress):
        try:
            outcome["training"] = encode(_train_plain(request, inner, Path(folder, _PLAIN_GRADIENTS)))
        except Exception as error:  # whatever the user's model raises is told by the parent
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if out_of_memory:
                first_line = (str(error).strip() or "no message").splitlines()[0]
                outcome["failure"] = f"does not fit: {first_line}"
            else:
                outcome["error"] = reason_of(error)
    Path(folder, _TRAINING_FILE).write_text(json.dumps(outcome), encoding="utf-8")


def _train_plain(request: RunRequest, inner: str, gradients_path: Path) -> Training:
    options = Options.from_mapping(request.options)
    workload = _workload(request, options)
    compiled = torch.compile(workload.model, backend=inner)
    return train(
        compiled,
        workload.model,
        workload.example_args,
        num_steps=request.num_steps,
        seed=options.seed,
        device=torch.device(request.device),
        title=f"training with {inner} alone",
        gradients_path=gradients_path,
    )


def _be_first_victim() -> None:
    """Where Linux runs out of memory, let it end this process and not the user's others."""
    score = Path("/proc/self/oom_score_adj")
    if os.access(score, os.W_OK):
        score.write_text("1000", encoding="ascii")


def _training_json(training: Training) -> dict[str, Any]:
    document: dict[str, Any] = encode(training)
    document["losses"] = [_json_number(loss) for loss in training.losses]
    return document


def _json_number(value: float | None) -> float | str | None:
    """JSON has no nan and no infinity: they go out as text."""
    return value if value is None or math.isfinite(value) else str(value)
