"""One compiled plan of a graph: what it promises, what lays its blocks, and what times the host in its first steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxhome.device import keep_timed_graph
from fxhome.host_timer import HostTimer
from fxhome.passes.planned import Planned
from fxhome.passes.situation import Situation
from fxhome.placed_blocks import PlacedBlocks
from fxhome.placement import Plan
from fxhome.units import format_bytes

log = logging.getLogger("fxhome")

SPARED_BYTES = 8 << 20
"""Of what a plan stays below its budget, this much is not taken for plugs: small blocks vary from step to step."""


@dataclass(eq=False)
class Variant:
    """One compiled plan. `planned` is None for a graph without a backward. `blocks` lays its blocks where they are
    scattered; `timer` times the host in its first steps where there is one beside the device.
    """

    call: Callable[..., Any]
    situation: Situation
    planned: Planned | None
    plan: Plan | None
    metered: bool = False
    blocks: PlacedBlocks | None = None
    timer: HostTimer | None = None

    def __post_init__(self) -> None:
        # Weakly: the compiled graphs hold the blocks and the timer, and the variant the graphs.
        variant = weakref.ref(self)
        if self.timer is not None:
            self.timer.is_settled = lambda: (own := variant()) is not None and own.metered
            if (blocks := self.blocks) is not None:
                self.timer.is_recorded = lambda: blocks.is_recording
        if self.blocks is not None:
            self.blocks.is_settled = lambda: (own := variant()) is not None and own.metered
            self.blocks.spare_bytes = lambda: _spare_bytes(variant())
            self.blocks.tell = lambda text: _add_note(variant(), text)

    @property
    def leaves_room(self) -> bool:
        """Whether it takes as little as possible, for graphs whose needs were not known when it was planned."""
        return self.situation.leave_room

    @property
    def kept_free_bytes(self) -> int:
        """What of the budget is kept free beside its own peak, for graphs that run between forward and backward."""
        return self.planned.kept_free_bytes if self.planned is not None else 0

    def fits(self, resident_bytes: int) -> bool:
        """Whether the promise still holds when this much is resident at the entry of the forward."""
        if self.plan is None:
            return True
        grown = resident_bytes - self.plan.resident_bytes
        promised = self.plan.predicted_peak_bytes + self.kept_free_bytes + self.plan.error_bound_bytes
        return grown <= 0 or promised + grown <= self.plan.budget_bytes

    def rebase(self, resident_bytes: int) -> None:
        """Start the prediction from what is resident now: tracing itself holds a little that is gone by now."""
        assert self.plan is not None
        gone = self.plan.resident_bytes - resident_bytes
        if gone > 0:
            self.plan = replace(
                self.plan,
                resident_bytes=resident_bytes,
                predicted_peak_bytes=self.plan.predicted_peak_bytes - gone,
                baseline_peak_bytes=self.plan.baseline_peak_bytes - gone,
            )

    def let_go(self, size_bytes: int) -> None:
        """Predict the step as it was seen: so much of what was held at its entry was gone before its backward.

        The plan goes on holding room for it: the next step may keep it.
        """
        plan, planned = self.plan, self.planned
        assert plan is not None
        assert planned is not None
        text = (
            f"{format_bytes(size_bytes)} that an earlier forward returned was held all through this one: deleted "
            "before it (del outputs), it would be free for the plan"
        )
        lowest = plan.resident_bytes + planned.forward_bytes
        predicted = max(min(lowest, plan.predicted_peak_bytes), plan.predicted_peak_bytes - size_bytes)
        planned.kept_free_bytes += plan.predicted_peak_bytes - predicted
        self.plan = replace(plan, predicted_peak_bytes=predicted, notes=(*plan.notes, text))

    def tell_host_time(self, device: torch.device) -> None:
        """Where the host was timed often enough, predict the plan's step by that, and keep it for plans to come."""
        measured_us = self.timer.finish() if self.timer is not None else None
        if measured_us is None:
            return
        assert self.plan is not None
        assert self.planned is not None
        assert self.planned.hosted is not None, "what is not there is not timed"
        told = self.planned.hosted.told(self.plan, measured_us)
        if told is None:
            log.debug("the host could not be timed in real steps: %s us in the forward and the backward", measured_us)
            return
        self.plan, timed = told
        log.debug("host in real steps: %s us in the forward and the backward, %s", measured_us, timed)
        keep_timed_graph(device, self.plan.inner, timed)


def _spare_bytes(variant: Variant | None) -> int:
    """How far below its budget a plan stays."""
    plan = variant.plan if variant is not None else None
    if variant is None or plan is None:
        return 0
    peak_bytes = max(plan.predicted_peak_bytes, plan.measured_peak_bytes or 0) + variant.kept_free_bytes
    return max(0, plan.budget_bytes - peak_bytes - SPARED_BYTES)


def _add_note(variant: Variant | None, text: str) -> None:
    if variant is not None and variant.plan is not None:
        variant.plan = replace(variant.plan, notes=(*variant.plan.notes, text))
