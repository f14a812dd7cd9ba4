"""One forward and its backward: what is measured at their four ends.

entry of the forward   what is resident; in a metered step, peaks are counted from here on
its end                the forward's peak
entry of the backward  what is held between the two
its end                the step's peak, and how long both took
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxhome.optimizer_state import num_stepped
from fxhome.passes.torch_compat import frugal_benchmarks
from fxhome.returned import Returned
from fxhome.runtime.meter import StorageMeter
from fxhome.variant import Variant

log = logging.getLogger("fxhome")

CYCLES_BYTES = 1 << 20
"""By how much more than a forward leaves may be held behind it before cycles are collected."""


class Session:
    """What was seen of one step. Bytes on the device of the graph."""

    def __init__(self, variant: Variant, entry_bytes: int, meter: StorageMeter | None, metered: bool) -> None:
        self.variant = variant
        self.entry_bytes = entry_bytes
        self.meter = meter
        self.metered = metered
        self.peak_bytes = 0
        self.forward_peak_bytes = 0
        self.reserved_bytes: int | None = None
        self.backward_entry_bytes: int | None = None
        self.forward_seconds = 0.0
        self.backward_started = 0.0
        self.done = False
        self.place = 0
        """Which forward of its step it began with, counted from 1."""
        self.later_bytes = self.num_later = 0
        """What forwards that began after it hold at its backward's entry, and how many of them are its own graph's."""
        self.num_stepped = num_stepped()
        self.returned: Returned | None = None
        """What the graph's forward before it returned."""
        self.held_bytes = self.let_go_bytes = 0
        """What of that was held at its entry; what of it was gone at its backward's."""
        self.is_last = False
        """Whether no other forward of the step began between its forward and its backward."""
        self.benchmarks = ExitStack()

    @property
    def saved_bytes(self) -> int:
        """What its plan keeps for the backward; nothing without one."""
        planned = self.variant.planned
        return planned.boundary_bytes if planned is not None else 0

    def with_frugal_benchmarks(self) -> ExitStack:
        """In the metered step of generated kernels: trying them out must not take memory that no plan knows of."""
        plan, planned = self.variant.plan, self.variant.planned
        if self.metered and plan is not None and planned is not None and plan.inner == "inductor":
            is_cuda = planned.facts.planned_for == "cuda"
            self.benchmarks.enter_context(frugal_benchmarks(plan.predicted_peak_bytes if is_cuda else None))
        return self.benchmarks

    def metering(self) -> AbstractContextManager[object]:
        """Around the execution of one graph."""
        return self.meter if self.meter is not None and not self.done else nullcontext()

    def note_forward_end(self, device: torch.device) -> None:
        """Behind the forward, where a backward follows."""
        if self.metered and device.type == "cuda":
            self.forward_peak_bytes = torch.cuda.max_memory_allocated(device)
            planned = self.variant.planned
            expected_bytes = self.entry_bytes + (planned.boundary_bytes if planned else 0)
            if torch.cuda.memory_allocated(device) > expected_bytes + CYCLES_BYTES:
                # What compiles in a first step may leave its frames behind in cycles, and what these held with them.
                gc.collect()

    def note_backward_entry(self, device: torch.device, later: Sequence[Session] = ()) -> None:
        """Before the backward; `later`: the outstanding forwards that began after this one."""
        self.with_frugal_benchmarks()
        self.backward_started = time.perf_counter()
        if self.metered and not self.done:
            if self.returned is not None:
                self.let_go_bytes = self.held_bytes - self.returned.alive_bytes()
            if device.type == "cuda":
                if not self.is_last and not self.num_later:
                    # The worst moment so far is that of the graphs in between, which measure it themselves.
                    for other in later:
                        other.forward_peak_bytes = max(
                            other.forward_peak_bytes, torch.cuda.max_memory_allocated(device)
                        )
                    torch.cuda.reset_peak_memory_stats(device)
                self.backward_entry_bytes = torch.cuda.memory_allocated(device)
            elif self.meter is not None:
                self.meter.track_resident()
                self.backward_entry_bytes = self.meter.current_bytes

    def note_backward_end(self, device: torch.device) -> bool:
        """Behind the first backward of a metered step; False where nothing meters this device under this compiler."""
        if device.type == "cuda":
            self.peak_bytes = max(self.forward_peak_bytes, torch.cuda.max_memory_allocated(device))
            self.reserved_bytes = torch.cuda.max_memory_reserved(device)
        elif self.meter is not None:
            self.peak_bytes = self.meter.peak_bytes
        else:
            return False
        return True


def open_session(
    variant: Variant,
    resident_bytes: int,
    device: torch.device,
    *,
    metered: bool,
    first: Session | None = None,
    behind_bytes: int = 0,
) -> Session:
    """The session of a forward that starts now; in a metered step, everything is counted anew.

    first: the metered forward of the same plan whose backward is outstanding: what it counts is for both. behind_bytes:
    how much more the forward that the plan is made for finds than this one, the first of its step.
    """
    meter = first.meter if first is not None and first.variant is variant else None
    if metered:
        log.info("fxhome: this step is metered (peak memory counters are reset)")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif variant.plan is not None and variant.plan.inner == "aot_eager":
            # Garbage that dies in the middle of the step would be counted at its start.
            gc.collect()
            meter = StorageMeter(granule_bytes=1)
            meter.track_resident()
            resident_bytes = meter.current_bytes
        if variant.plan is not None and variant.plan.inner == "aot_eager":
            variant.rebase(resident_bytes + behind_bytes)
    return Session(variant, resident_bytes, meter, metered)


def compiled_node(outputs: Any, depth: int = 3) -> Any:
    """The autograd node of the compiled graph behind `outputs`, or None (no gradient wanted)."""
    level = [
        leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    for _ in range(depth):
        for node in level:
            if type(node).__name__ == "CompiledFunctionBackward":
                return node
        level = [parent for node in level for parent, _ in node.next_functions if parent is not None]
    return None
