"""What a whole training step needs where one graph of it is refused: the minimum that the refusal names.

    this graph's own smallest plan, beside what is held at its entry
    what every other forward of the step found at its entry, and its smallest plan beside that
  + optimizer state that is not there yet
  + where a step has not been seen to its end: gradients to come, what the step's first forward saves once the budget is
    larger, and as much again as the forwards whose backward is outstanding hold (behind a graph break: as the whole
    step was seen to need so far)

A run with a larger budget begins anew and knows nothing of this one: what is named must do for its first step as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from fxhome import ledger
from fxhome.errors import InfeasibleBudgetError
from fxhome.optimizer_state import has_stepped, missing_gradient_bytes, num_stepped, optimizers_of, state_bytes
from fxhome.session import Session
from fxhome.units import format_bytes

if TYPE_CHECKING:
    from fxhome.managed_graph import ManagedGraph


class Entries:
    """What the forwards of one graph found at their entries, by how many optimizers had made a step by then."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}

    def note(self, entry_bytes: int) -> None:
        """A forward begins with so much held."""
        stepped = num_stepped()
        self._most[stepped] = max(self._most.get(stepped, 0), entry_bytes)

    def items(self) -> Iterable[tuple[int, int]]:
        """(optimizers that had made a step, most bytes held at an entry)."""
        return self._most.items()


def growing_bytes(device: torch.device) -> int:
    """How much more the first of the outstanding forwards may save under a larger budget: it knew of no other one.

    The others save as little as they can, whatever the budget is.
    """
    first = ledger.first_outstanding(device)
    if first is None or first.variant.leaves_room or first.variant.planned is None:
        return 0
    return first.variant.planned.unsaved_bytes


def for_the_whole_step(refusal: InfeasibleBudgetError, graph: ManagedGraph) -> InfeasibleBudgetError:
    """The same refusal, naming what the whole step needs by all that was seen of it."""
    own_bytes = refusal.minimum_bytes
    if own_bytes is None:
        return refusal
    device = graph.device
    seen = [other for other in ledger.graphs() if other.device == device and other.options == graph.options]
    optimizers = optimizers_of([weight for other in {graph, *seen} for weight in other.weights])
    sizes = {id(optimizer): state_bytes(optimizer, device) for optimizer in optimizers}

    def to_come(stepped: int) -> int:
        late = [optimizer for optimizer in optimizers if not has_stepped(optimizer, stepped)]
        missing = sum(sizes[id(optimizer)] or 0 for optimizer in late)
        return max(0, missing - (0 if stepped else graph.options.reserve))

    needs = [own_bytes + to_come(num_stepped())]
    for other in seen:
        least = other.least_bytes()
        needs += [entry + least + to_come(stepped) for stepped, entry in other.entries.items() if least is not None]
    is_in_the_middle = any(True for other in seen for _ in other.entries.items())
    unseen = 0
    if is_in_the_middle and not (optimizers and all(map(has_stepped, optimizers))):
        unseen = _unseen_bytes(optimizers, ledger.outstanding(device), device)
        if graph.may_be_followed:
            # Behind a graph break there may be any number of graphs: as much again as those so far needed together.
            start = min(entry for other in seen for _, entry in other.entries.items())
            unseen = max(unseen, own_bytes - start)
    if is_in_the_middle:
        unseen += growing_bytes(device)
    minimum = max(needs) + unseen
    reasons = []
    if (state := to_come(num_stepped())) > 0:
        reasons.append(f"{format_bytes(state)} of optimizer state to come")
    if minimum > own_bytes + state:
        reasons.append("what else was seen of this step so far")
    if returned := graph.returned_bytes:
        reasons.append(f"{format_bytes(returned)} that its last forward returned and that is still held (del outputs)")
    if graph.may_be_followed and not is_in_the_middle:
        reasons.append("no graph that follows behind a graph break: a later refusal may name more")
    if None in sizes.values():
        reasons.append("not the state of every optimizer, which only its first step shows")
    if not reasons:
        return refusal
    return _naming(refusal, minimum, " and ".join(reasons))


def _unseen_bytes(optimizers: Iterable[Optimizer], outstanding: Iterable[Session], device: torch.device) -> int:
    """What the rest of a step that nobody has seen yet may still hold."""
    gradients = sum(missing_gradient_bytes(optimizer, device) for optimizer in optimizers)
    return gradients + sum(session.saved_bytes for session in outstanding)


def _naming(refusal: InfeasibleBudgetError, minimum: int, reason: str) -> InfeasibleBudgetError:
    assert refusal.budget_bytes is not None
    told = f"Ask for at least {refusal.minimum_bytes}"
    counted = f"Ask for at least {minimum} ({format_bytes(minimum)}, which counts {reason})"
    return InfeasibleBudgetError(
        str(refusal).replace(told, counted),
        minimum_bytes=minimum,
        budget_bytes=refusal.budget_bytes,
        holders=refusal.holders,
    )
