"""One way to put a model under a tight budget and to compare it, bit by bit, with the stock `aot_eager`.

    expected = record(case)                   losses, gradients, buffers, inputs after each step, as bytes
    check(case, mode)                                      the same under the smallest budget that a refusal names

Everything that is kept for comparison is plain bytes: a tensor that a test holds would count as resident.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fxhome
from fxhome import backend as fxhome_backend
from fxhome.budget import Budget
from fxhome.errors import InfeasibleBudgetError
from fxhome.placement import Placement, Plan
from fxhome.runtime.host_pool import host_pool
from fxhome.runtime.meter import StorageMeter
from fxhome.runtime.stand_in import CopyTiming, cpu_stand_in

REBUILT = (Placement.RECOMPUTE, Placement.RECOMPUTE_EACH)
Step = Callable[..., Any]

# The rules are checked on every graph; a short search is as good a source of hard plans as a long one.
SETTINGS: dict[str, Any] = {"verify": True, "max_evaluations": 400}

# When copies are made, by step; the first step compiles and is the backend's own metered one.
TIMINGS: tuple[CopyTiming, ...] = ("latest", "latest", "earliest")


def loss_of(outputs: Any) -> torch.Tensor:
    """A scalar in which every element of the output, or of each of a tuple of outputs, takes part."""
    total = torch.zeros(())
    for leaf in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            total = total + leaf.abs().float().square().mean() + leaf.abs().float().mean()
    return total


def whole_step(model: nn.Module, case: Case) -> Step:
    """Model and loss in one graph."""

    def step(*args: Any) -> torch.Tensor:
        return case.loss(model(*args))

    return step


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its step. `build` is called anew, after seeding, for each run."""

    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    loss: Callable[[Any], torch.Tensor] = loss_of
    step: Callable[[nn.Module, Case], Step] = whole_step
    steps: int = len(TIMINGS)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each forward (autocast and the like)."""
    reference: str = "aot_eager"
    """What is right: "eager" where the stock backend itself gives other gradients than eager (pytorch#197039)."""


@dataclass(frozen=True)
class Mode:
    """What the plan may do, and what it must then contain."""

    allow: tuple[str, ...]
    must_swap: bool = False
    must_rebuild: bool = False

    def __str__(self) -> str:
        return "+".join(self.allow)


SWAP = Mode(("swap",), must_swap=True)
REBUILD = Mode(("recompute",), must_rebuild=True)
BOTH = Mode(("swap", "recompute"))
all_modes = pytest.mark.parametrize("mode", [SWAP, REBUILD, BOTH], ids=str)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Values and strides of a tensor; no tensor is kept."""
    if tensor.layout is torch.sparse_coo:
        return as_bytes(tensor._indices()) + as_bytes(tensor._values())
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    content = flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}".encode() + content


@dataclass
class Record:
    """What one run left behind, by step and name."""

    values: dict[str, bytes] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    """Peak of each step, seen from outside, in bytes."""

    def note(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep a value under a name."""
        self.values[name] = b"none" if tensor is None else as_bytes(tensor)

    def differences(self, other: Record) -> list[str]:
        """Names whose values differ, or that only one of the two has."""
        names = self.values.keys() | other.values.keys()
        return sorted(name for name in names if self.values.get(name) != other.values.get(name))


@functools.cache
def _set_modules_aside() -> None:
    """Import what compiling imports and take it out of garbage collection, which runs several times in every test."""
    x = torch.ones(2, requires_grad=True)
    compile_step(torch.sin, {"memory_budget": "100%"})(x).sum().backward()
    del x
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def fresh() -> None:
    """Forget every compiled graph and every tensor of earlier tests."""
    _set_modules_aside()
    torch._dynamo.reset()
    gc.collect()


@contextmanager
def outside_meter(record: Record) -> Iterator[None]:
    """Count real storages around a step, with no part of the backend's own accounting."""
    gc.collect()
    with StorageMeter(granule_bytes=1) as meter:
        meter.track_resident()
        yield
    record.peaks.append(meter.peak_bytes)


def compile_step(step: Step, options: dict[str, Any] | None = None, *, dynamic: bool | None = None) -> Step:
    """`torch.compile` with fxhome under `options`, or with the stock backend where there are none."""
    if options is None:
        return torch.compile(step, backend="aot_eager", dynamic=dynamic)
    # The function instead of its registered name, so that a checkout that was never installed is tested as well.
    return torch.compile(step, backend=fxhome_backend.fxhome, options=SETTINGS | options, dynamic=dynamic)


def record(case: Case, options: dict[str, Any] | None = None, *, metered: bool = False) -> Record:
    """Run the steps of `case` and note everything a user could look at; without options, as the reference."""
    fresh()
    torch.manual_seed(0)
    model, inputs = case.build()
    step = case.step(model, case)
    compiled = step if options is None and case.reference == "eager" else compile_step(step, options)
    found = Record()
    for number in range(case.steps):
        # The first step compiles: what tracing allocates is not the step's.
        meter = outside_meter(found) if metered and number else nullcontext()
        with cpu_stand_in(copy_timing=TIMINGS[number % len(TIMINGS)], poison=True), meter:
            with case.around():
                loss = compiled(*inputs)
            loss.backward()
        note_all(found, f"step {number}", model, inputs, loss)
        del loss
        clear_gradients(model, inputs)
    return found


def note_all(found: Record, step: str, model: nn.Module, inputs: Sequence[Any], loss: torch.Tensor) -> None:
    """Loss, gradients, buffers, inputs and the random state."""
    found.note(f"{step} loss", loss)
    for name, parameter in model.named_parameters():
        found.note(f"{step} gradient {name}", parameter.grad)
    for name, buffer in model.named_buffers():
        found.note(f"{step} buffer {name}", buffer)
    for position, leaf in enumerate(tree_leaves(list(inputs))):
        if isinstance(leaf, torch.Tensor):
            found.note(f"{step} input {position}", leaf)
            found.note(f"{step} input gradient {position}", leaf.grad if leaf.is_leaf else None)
    found.values[f"{step} random state"] = torch.get_rng_state().numpy().tobytes()


def clear_gradients(model: nn.Module, inputs: Sequence[Any]) -> None:
    """As optimizer.zero_grad does, for inputs too."""
    model.zero_grad(set_to_none=True)
    for leaf in tree_leaves(list(inputs)):
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            leaf.grad = None


def in_bytes(size_bytes: int) -> Budget:
    """A budget in bytes; users' own are not taken below 1 MiB, models of tests are smaller."""
    return Budget(bytes=size_bytes, share=None, text=f"{size_bytes} bytes")


def smallest_budget(case: Case, allow: tuple[str, ...]) -> int:
    """The figure that a refusal of a tiny budget names."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        record(case, {"memory_budget": "1%", "allow": allow})
    # The frames of the traceback hold the model and its inputs, which would be resident in the next run.
    minimum = refused.value.with_traceback(None).minimum_bytes
    assert minimum is not None
    return minimum


@functools.lru_cache(maxsize=4)
def _stock(case: Case) -> Record:
    return record(case)


def check(case: Case, mode: Mode) -> Plan:
    """Run `case` at the smallest budget: bitwise equal to stock, inside the budget by both meters, nothing leaked."""
    expected = _stock(case)
    budget = smallest_budget(case, mode.allow)
    found = record(case, {"memory_budget": in_bytes(budget), "allow": mode.allow}, metered=True)
    plans = fxhome.plans()
    assert plans, "no plan is alive after the run"
    assert found.differences(expected) == []
    for plan in plans:
        assert_promise(plan, budget)
    assert max(found.peaks) <= budget
    moved = {kind: sum(plan.bytes_by_placement()[kind] for plan in plans) for kind in Placement}
    if mode.must_swap:
        assert moved[Placement.SWAP] > 0
    if mode.must_rebuild:
        assert sum(moved[kind] for kind in REBUILT) > 0
    assert_no_host_memory_in_use()
    return plans[-1]


def assert_promise(plan: Plan, budget: int) -> None:
    """Asked, predicted and measured, in this order of size."""
    assert plan.budget_bytes <= budget
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.budget_bytes


def assert_no_host_memory_in_use() -> None:
    """Every slot of the host pool has come back."""
    gc.collect()
    assert host_pool().status().in_use_bytes == 0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What fxhome said to the user."""
    mine = [entry for entry in caplog.records if entry.name.startswith("fxhome") and entry.levelno >= logging.WARNING]
    return [entry.getMessage() for entry in mine]
