"""What the process looks like when a graph is planned: what is held around the graph, and what was learned of it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Situation:
    """What the process looks like when a graph is planned. Bytes on the device of the graph."""

    resident_bytes: int | None
    """Held at the entry of the forward, this graph's inputs included; None offline: the graph's inputs are all there
    is.
    """
    outside_bytes: int = 0
    """Held during the backward by nothing in this graph; learned from a metered step."""
    between_bytes: int = 0
    """Needed by the graphs that run between this forward and its backward."""
    error_bound_bytes: int = 0
    """How far above its prediction a metered step was."""
    lowering_bytes: int = 0
    """How far above the model's peak the compiler's own buffers were; what is checked after lowering needs no such
    margin.
    """
    leave_room: bool = False
    """More graphs of the same step follow whose needs are not known yet: take as little as possible."""
    fixed_layouts: tuple[str, ...] = ()
    """Storages that the compiler lays out otherwise than the graph records: neither moved nor encoded."""
    smallest: bool = False
    """Do not search: the smallest plan that is known, whatever it costs and whether or not it fits."""
    tightest: bool = False
    """Schedule the copies of the smallest plan as if no byte more than its own peak were there."""
    unsaved_bytes: int = 0
    """How much less the graphs before it in the step have saved than they would by themselves: a share of the baseline
    is one of the whole step's.
    """
    step_budget_bytes: int = 0
    """The largest budget that a graph before it in the step was given; a share comes to no less."""
    settled_bytes: int | None = None
    """The budget in bytes that an earlier plan of this graph came to; None for the first."""
    observed_bytes: tuple[tuple[str, int], ...] = ()
    """Encoded bytes seen at run time by storage name: what the next plan of this graph assumes."""
    free_bytes: int = 0
    """What the device could still give: the budget when none was asked for is resident + free."""


def with_lowering(situation: Situation, missed_bytes: int, budget_bytes: int) -> Situation:
    """The same situation after lowering needed `missed_bytes` more than the model said; the budget stays what it was,
    also where it was a share of the baseline.
    """
    lowering_bytes = max(situation.lowering_bytes, missed_bytes)
    return replace(situation, lowering_bytes=lowering_bytes, settled_bytes=budget_bytes)
