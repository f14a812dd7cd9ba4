"""One Dynamo graph under a budget: its compiled variants, its outstanding forwards, and what was measured of it.

    entry of a forward:  what is resident?  -> a variant whose promise still holds, or a new one planned for it
    first step of a variant: metered        -> asked / predicted / measured; a broken promise is planned again, once
    some steps behind it:    the host timed -> predicted by what it spends in real steps; nothing is planned again

A variant is a plan with the two graphs compiled for it. Backwards already outstanding keep the variant they started
with.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.graph_module import GraphModule

from fxhome import ledger
from fxhome.errors import FxhomeError, InfeasibleBudgetError
from fxhome.joint import Part, Share
from fxhome.optimizer_state import arrived_bytes, watch_optimizers
from fxhome.options import Options
from fxhome.passes.planned import Planned
from fxhome.passes.refusal import RESIDENT_SLACK_BYTES
from fxhome.passes.situation import Situation
from fxhome.passes.torch_compat import compile_lock, is_inside_backward
from fxhome.placement import Plan
from fxhome.returned import Returned
from fxhome.runtime import codec_sites
from fxhome.session import Session, compiled_node, open_session
from fxhome.units import format_bytes
from fxhome.variant import Variant
from fxhome.whole_step import Entries, for_the_whole_step, growing_bytes

log = logging.getLogger("fxhome")

# A replan traces with the fake tensors that Dynamo left, which two threads must not use at once.
_planning = threading.RLock()

# On CPU the resident bytes are found by walking all Python objects; once things have settled, every so many steps is
# enough.
CPU_SCAN_EVERY = 16
RESIDENT_ROUNDING_BYTES = 1 << 20
CPU_SCAN_FIRST = 6

Compile = Callable[["ManagedGraph", Situation], Variant]


class ManagedGraph:
    """The callable that torch.compile gets. `compile_variant` runs AOTAutograd and the inner compiler once."""

    def __init__(
        self, module: GraphModule, options: Options, device: torch.device, compile_variant: Compile, replay: Plan | None
    ) -> None:
        self.module = module
        self.options = options
        self.device = device
        self.refusal: FxhomeError | None = None
        self.variants: list[Variant] = []
        self.current: Session | None = None
        self.notes: list[str] = []
        self._compile_variant = compile_variant
        self._replay = replay
        self._pending: list[tuple[weakref.ref[Any], Session]] = []
        self._entries = 0
        self._entry_bytes = 0
        self._outside_bytes = 0
        self._part: Part | None = None
        self._joint: ledger.Joint | None = None
        self._error_bound_bytes = 0
        self._settled_bytes: int | None = None
        self._first_resident = 0
        self._replan = False
        self.may_be_followed = False
        self._joined = self.was_joined = False
        self._last: Session | None = None
        self._returned: Returned | None = None
        self._seen_outside = 0
        self._announced: set[str] = set()
        self.entries = Entries()
        self._weights: list[weakref.ref[torch.Tensor]] | None = None
        watch_optimizers()
        ledger.register(self)

    @property
    def plan(self) -> Plan | None:
        """The plan of the variant that ran last, with what was measured of it."""
        return self.variants[-1].plan if self.variants else None

    def prepare(self) -> None:
        """Compile the first variant. A refusal is kept and raised by the first call, where nothing can swallow it."""
        if self.device.type == "cpu":
            gc.collect()
        self._first_resident = ledger.held_bytes(self.device)
        try:
            self._add_variant(self._first_resident)
        except FxhomeError as error:
            # Its traceback would keep the whole step, model and batch included, alive for as long as it is remembered.
            # So would that of an error which it replaced.
            error.__context__ = error.__cause__ = None
            self.refusal = error.with_traceback(None)

    def _situation(self, resident_bytes: int) -> Situation:
        if self.device.type == "cuda":
            # Rounded, so that a second process makes the same plan and finds it in the caches.
            resident_bytes = -(-resident_bytes // RESIDENT_ROUNDING_BYTES) * RESIDENT_ROUNDING_BYTES
        # What is reserved for later is counted from the first plan on; once it has appeared it is simply resident.
        resident_bytes = max(resident_bytes, self._first_resident + self.options.reserve)
        part = self._part or Part()
        resident_bytes = max(resident_bytes, part.entry_bytes)
        before = self._planned_before()
        return Situation(
            unsaved_bytes=sum(planned.unsaved_bytes for planned in before),
            step_budget_bytes=max((planned.plan.budget_bytes for planned in before), default=0),
            leave_room=self._leaves_room,
            resident_bytes=resident_bytes,
            outside_bytes=max(self._outside_bytes, part.outside_bytes),
            between_bytes=part.between_bytes(self._settled_bytes or 0, resident_bytes),
            error_bound_bytes=self._error_bound_bytes,
            settled_bytes=self._settled_bytes,
            observed_bytes=self._observed_bytes(),
            free_bytes=ledger.free_bytes(self.device) if self.options.memory_budget is None else 0,
        )

    def _planned_before(self) -> list[Planned]:
        """The plans of the forwards that wait for their backwards."""
        sessions = ledger.outstanding(self.device)
        return [session.variant.planned for session in sessions if session.variant.planned is not None]

    def _observed_bytes(self) -> tuple[tuple[str, int], ...]:
        plan = self.variants[-1].plan if self.variants else None
        return tuple(sorted(codec_sites.observed_bytes(plan.graph_fingerprint).items())) if plan is not None else ()

    def _add_variant(self, resident_bytes: int) -> Variant:
        with compile_lock():
            variant = self._compile_variant(self, self._situation(resident_bytes))
        if variant.plan is not None and self.notes:
            variant.plan = replace(variant.plan, notes=(*variant.plan.notes, *self.notes))
        self.variants.append(variant)
        if variant.plan is not None:
            # A share of the baseline is a number of bytes from the first plan on, whatever appears later.
            self._settled_bytes = variant.plan.budget_bytes
        return variant

    def __call__(self, *args: Any) -> Any:
        """Run the forward under a variant whose promise holds now."""
        if self._weights is None:
            self._weights = [weakref.ref(value) for value in args if isinstance(value, torch.nn.Parameter)]
            if isinstance(self.refusal, InfeasibleBudgetError):
                self.refusal = for_the_whole_step(self.refusal, self)
        if self.refusal is not None:
            # A copy each time: what is remembered must not collect tracebacks.
            raise copy.copy(self.refusal)
        resident = self._resident_bytes(args)
        with _planning:
            variant = self._choose(resident)
        session = self._open(variant, resident)
        # A checkpoint's forward runs again inside the backward, which goes on afterwards.
        around, self.current = self.current, session
        begin = time.perf_counter()
        try:
            with session.with_frugal_benchmarks():
                outputs = variant.call(*args)
        finally:
            self.current = around
        session.forward_seconds = time.perf_counter() - begin
        self._close_forward(session, outputs)
        return outputs

    def _resident_bytes(self, args: Sequence[Any]) -> int:
        if self.device.type == "cuda":
            return ledger.held_bytes(self.device)
        if is_inside_backward():
            # A checkpoint's forward, run again: what is held there tells nothing of the forwards that follow.
            return self._entry_bytes
        self._entries += 1
        if self._entries <= CPU_SCAN_FIRST or self._entries % CPU_SCAN_EVERY == 0:
            self._entry_bytes = ledger.held_bytes(self.device)
        return self._entry_bytes

    def _choose(self, resident: int) -> Variant:
        latest = self.variants[-1]
        if is_inside_backward():
            return self._variant_of_the_forward()
        if not self._replan:
            if latest.fits(resident):
                return latest
            for variant in self.variants:
                if variant.fits(resident) and not (self._joined and variant.leaves_room):
                    self.variants.remove(variant)
                    self.variants.append(variant)
                    return variant
            assert latest.plan is not None
            grown = resident - latest.plan.resident_bytes
            self._announce(
                "grown",
                f"memory held at the entry of the forward grew by {format_bytes(grown)} since planning (optimizer "
                "state, gradients or "
                "another forward's activations): planning again",
            )
        if self._joint is not None and self._joint.begins_with(self) and not self._is_behind_another:
            # What has appeared since is taken from what all of them may save.
            self._joint.plan(max(resident, self._first_resident + self.options.reserve))
        self._replan = False
        try:
            return self._add_variant(resident)
        except InfeasibleBudgetError as refusal:
            if self._part is None:
                raise for_the_whole_step(refusal, self) from None
        # Its part of what all graphs may save is too small for it: it takes as little as it can instead.
        self._outside_bytes = max(self._outside_bytes, self._part.outside_bytes)
        self._part = self._joint = None
        self._joined = False
        try:
            return self._add_variant(resident)
        except InfeasibleBudgetError as refusal:
            raise for_the_whole_step(refusal, self) from None

    @property
    def _is_behind_another(self) -> bool:
        """Whether a forward, of this graph or of another, waits for its backward."""
        return self.is_pending or bool(ledger.pending_before(self))

    def _variant_of_the_forward(self) -> Variant:
        """The variant of a forward that torch.utils.checkpoint now runs again: it wants the same tensors saved."""
        if self.current is not None:
            return self.current.variant
        outstanding = self.outstanding
        return outstanding[-1].variant if outstanding else self.variants[-1]

    def _announce(self, kind: str, message: str) -> None:
        if kind not in self._announced:
            self._announced.add(kind)
            log.warning("fxhome: %s", message)

    def _open(self, variant: Variant, resident: int) -> Session:
        self._pending = [(node, session) for node, session in self._pending if node() is not None and not session.done]
        if not is_inside_backward() and variant.plan is not None:
            self.entries.note(resident + growing_bytes(self.device))
            ledger.note_forward(self)
        metered = variant.plan is not None and not variant.metered and not self._pending and torch.is_grad_enabled()
        first = next((session for session in self.outstanding if session.metered), None)
        session = open_session(
            variant, resident, self.device, metered=metered, first=first, behind_bytes=self._behind_bytes(variant)
        )
        session.place = ledger.num_forwards(self.device)
        if metered:
            session.returned, session.held_bytes = self._returned, self.returned_bytes
        return session

    def _behind_bytes(self, variant: Variant) -> int:
        """How much more the last forward of this graph in a step finds than its first one, which is metered."""
        if self._part is None or variant.planned is None:
            return 0
        return self._part.others_bytes + self._part.earlier_forwards * variant.planned.boundary_bytes

    def _close_forward(self, session: Session, outputs: Any) -> None:
        if session.variant.plan is None:
            return
        node = compiled_node(outputs)
        if node is None:
            return
        session.note_forward_end(self.device)
        self._returned = Returned(outputs, self.device)
        self._pending.append((weakref.ref(node), session))
        graph = weakref.ref(self)

        def before(_: Any) -> None:
            if (owner := graph()) is not None:
                owner._enter_backward(session)

        def after(*_: Any) -> None:
            if (owner := graph()) is not None:
                owner._leave_backward(session)

        # A step that calls backward() inside the compiled function runs these hooks where Dynamo looks at every frame.
        node.register_prehook(torch.compiler.disable(before))
        node.register_hook(torch.compiler.disable(after))

    def _enter_backward(self, session: Session) -> None:
        self.current = session
        later: list[Session] = []
        if session.metered:  # only then is anything made of it, and a step of many graphs has many backwards
            session.is_last = session.place == ledger.num_forwards(self.device)
            later = [other for other in ledger.outstanding(self.device) if other.place > session.place]
            session.later_bytes = sum(other.saved_bytes for other in later)
            session.num_later = sum(other.place > session.place for other in self.outstanding)
        session.note_backward_entry(self.device, later)

    def _leave_backward(self, session: Session) -> None:
        self.current = None
        session.benchmarks.close()
        if session.done:
            return
        session.done = True
        variant = session.variant
        assert variant.plan is not None
        seconds = session.forward_seconds + time.perf_counter() - session.backward_started
        if not session.metered:
            if variant.plan.measured_step_seconds is None and self.device.type == "cpu":
                variant.plan = replace(variant.plan, measured_step_seconds=seconds)
            variant.tell_host_time(self.device)
            return
        variant.metered = True
        left_room = self._leaves_room
        if session.note_backward_end(self.device):
            self._learn(session)
        else:
            self._last = session  # generated code is not metered on a CPU: what was held at its entry is all there is
        if not ledger.note_backward_done(self) and left_room and not self.was_joined:
            # No other graph came after it in this step: it has the budget for itself.
            self.join(None, None)

    @property
    def is_relative(self) -> bool:
        """Whether its budget is a share of the baseline, and no number of bytes by itself."""
        budget = self.options.memory_budget
        return budget is not None and budget.bytes is None

    @property
    def _leaves_room(self) -> bool:
        """Whether more graphs may follow in this step: they do where some came before (a model compiled by blocks)."""
        if self._joined:
            return False
        return self.may_be_followed or self.was_joined or self._is_behind_another

    @property
    def outstanding(self) -> list[Session]:
        """The forwards of this graph that wait for their backwards, oldest first."""
        return [session for node, session in self._pending if node() is not None and not session.done]

    @property
    def is_pending(self) -> bool:
        """Whether a forward of this graph waits for its backward."""
        return bool(self.outstanding)

    @property
    def returned_bytes(self) -> int:
        """What its last forward returned and somebody still holds."""
        return self._returned.alive_bytes() if self._returned is not None else 0

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters that its first call was given, as far as they are alive."""
        return [weight for known in self._weights or () if (weight := known()) is not None]

    def least_bytes(self) -> int | None:
        """The least that a plan of this graph can do with, above what is held at its entry; None without a plan."""
        planned = self.variants[-1].planned if self.variants else None
        if planned is None:
            return None
        slack = RESIDENT_SLACK_BYTES[planned.facts.planned_for]
        return planned.smallest_peak_bytes() + self._error_bound_bytes + self._seen_outside + slack

    def join(self, part: Part | None, joint: ledger.Joint | None, budget_bytes: int | None = None) -> None:
        """Plan again at the next forward, knowing what of the common budget is left to this graph; None: all of it.

        budget_bytes: what the budget of all comes to, where it is a share.
        """
        if budget_bytes is not None and self.is_relative:
            self._settled_bytes = budget_bytes
        self._joined = self.was_joined = True
        self._part, self._joint = part, joint
        self._replan = True

    @property
    def share(self) -> Share | None:
        """What this graph needs of the common budget; None before its first metered step."""
        variant = self.variants[-1] if self.variants else None
        if variant is None or variant.planned is None or self._last is None:
            return None
        planned = variant.planned
        baseline_bytes = planned.plan.baseline_peak_bytes - planned.plan.resident_bytes
        return Share(
            entry_bytes=max(self._last.entry_bytes, self._first_resident + self.options.reserve),
            saved_bytes=planned.boundary_bytes,
            wanted_bytes=planned.stock_boundary_bytes,
            least_bytes=planned.smallest_peak_bytes(),
            outside_bytes=self._seen_outside,
            budget_bytes=planned.plan.budget_bytes,
            is_relative=self.is_relative,
            gradient_bytes=planned.facts.gradient_bytes,
            passing_bytes=max(0, baseline_bytes - planned.stock_boundary_bytes),
        )

    def _learn(self, session: Session) -> None:
        """Record what the metered step showed; where the promise broke, learn what it missed and plan again, once."""
        variant = session.variant
        plan, planned = variant.plan, variant.planned
        assert plan is not None
        assert planned is not None
        outside = 0
        if session.backward_entry_bytes is not None:
            expected = session.entry_bytes + planned.boundary_bytes
            tangents = planned.tangent_bytes
            # The state of an optimizer that made its first step meanwhile is there before every step to come.
            state = arrived_bytes(session.num_stepped, self.device)
            outside = max(0, session.backward_entry_bytes - expected - tangents - state)
        # What later forwards saved is theirs; the gradients that they will leave are beside the first one's backward,
        # or its own beside theirs.
        beside = max(0, outside - session.later_bytes) + session.num_later * planned.facts.gradient_bytes
        self._last, self._seen_outside = session, beside
        if session.is_last:
            # Held by the caller (an eager loss), not by graphs between the two: so it will be in every step.
            self._outside_bytes = max(self._outside_bytes, outside)
        log.debug(
            "metered: entry %d, forward peak %d, before the backward %s, peak %d; predicted: resident %d, peak "
            "%d, boundary %d",
            session.entry_bytes,
            session.forward_peak_bytes,
            session.backward_entry_bytes,
            session.peak_bytes,
            plan.resident_bytes,
            plan.predicted_peak_bytes,
            planned.boundary_bytes,
        )
        variant.plan = plan.with_measurement(
            peak_bytes=session.peak_bytes,
            step_seconds=plan.measured_step_seconds,
            reserved_bytes=session.reserved_bytes,
        )
        session.meter = None
        if session.let_go_bytes > 0 and session.is_last and not self._part and ledger.num_forwards(self.device) < 2:
            variant.let_go(session.let_go_bytes)
        if session.peak_bytes <= plan.budget_bytes or planned.is_best_effort:
            return
        over = session.peak_bytes - plan.budget_bytes
        if "overrun" in self._announced or self._replay is not None:
            self._announce("overrun again", f"the measured peak is {format_bytes(over)} over the budget")
            return
        self._announce(
            "overrun",
            f"the measured peak {format_bytes(session.peak_bytes)} is {format_bytes(over)} over the budget of "
            f"{format_bytes(plan.budget_bytes)}; {format_bytes(outside)} is held outside the compiled graph: "
            "planning again",
        )
        # Planned at the next forward: autograd is off in here, so tracing would not see a training step.
        newly_outside = max(0, outside - plan.outside_bytes)
        self._outside_bytes = max(self._outside_bytes, outside)
        # What was missed, not just what went over: a plan as far below the budget would be taken and miss it again.
        # Where room was left for other graphs, theirs is in what was measured and not in what was predicted.
        missed = over if variant.leaves_room else session.peak_bytes - plan.predicted_peak_bytes
        self._error_bound_bytes = max(self._error_bound_bytes, missed - newly_outside)
        self._replan = True
