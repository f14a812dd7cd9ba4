"""What each graph of one step may take of the common budget: arithmetic over what was seen of them.

A graph may run several times in a step: Dynamo compiles identical blocks once, and every block's forward saves its part
before any of their backwards gives it back. One plan serves all those forwards: it is made for the last of them, which
finds the most in memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """What one graph of a step needs, seen in its metered step. Bytes.

    entry: held at its forward's entry. saved: what its plan keeps for the backward. wanted: what the baseline would
    keep.
    least: the smallest peak of any plan, above entry. outside: held during its backward by no part of its graph.
    gradient: what its backward leaves behind. passing: what the baseline's peak has beside what it keeps. is_relative:
    whether the budget is a share of the baseline.
    """

    entry_bytes: int
    saved_bytes: int
    wanted_bytes: int
    least_bytes: int
    outside_bytes: int
    budget_bytes: int
    gradient_bytes: int = 0
    passing_bytes: int = 0
    is_relative: bool = False


@dataclass(frozen=True)
class Calls:
    """How often a graph's forward ran in a step, and how often each graph had run before its first and its last."""

    count: int
    before_first: tuple[int, ...]
    before_last: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a joint plan leaves to one graph. Bytes.

    entry: held at the entry of its last forward. may_save: what it may keep for each backward; None: nothing runs
    between its only forward and its backward, so the budget is all it has to hold. outside: beside what its graph says.
    earlier_forwards: how many of its own run before its last one; others: what graphs that run in between may save.
    """

    entry_bytes: int = 0
    may_save_bytes: int | None = None
    outside_bytes: int = 0
    earlier_forwards: int = 0
    others_bytes: int = 0

    def between_bytes(self, budget_bytes: int, entry_bytes: int) -> int:
        """What must stay free between forward and backward, seen from a forward that finds `entry_bytes`."""
        return 0 if self.may_save_bytes is None else max(0, budget_bytes - entry_bytes - self.may_save_bytes)


class Step:
    """The forwards of one step on one device, graph by graph in the order of their first forwards."""

    def __init__(self) -> None:
        self._index: dict[Hashable, int] = {}
        self._counts: list[int] = []
        self._first: list[tuple[int, ...]] = []
        self._last: list[tuple[int, ...]] = []

    def note(self, graph: Hashable) -> None:
        """A forward of `graph` begins."""
        before = tuple(self._counts)
        index = self._index.setdefault(graph, len(self._index))
        if index == len(self._counts):
            self._counts.append(0)
            self._first.append(before)
            self._last.append(before)
        self._counts[index] += 1
        self._last[index] = before

    @property
    def graphs(self) -> list[Hashable]:
        """Every graph once."""
        return list(self._index)

    @property
    def num_forwards(self) -> int:
        """How many forwards began."""
        return sum(self._counts)

    def calls(self) -> list[Calls]:
        """One entry per graph."""
        return [Calls(*of) for of in zip(self._counts, self._first, self._last, strict=True)]


def joint_parts(shares: Sequence[Share], calls: Sequence[Calls], held_bytes: int) -> list[Part]:
    """The part of each graph; `held_bytes`: held before the step.

    What all forwards may save together is the budget less what was held before the step and less the largest least need
    of any of them; each gets a part of it in proportion to what it would keep if it could. The last forward's own is
    not among them, as nothing runs before its backward: but where its graph ran before, its one plan must also leave
    room for what passes beside what it keeps itself.
    """
    budget_bytes = step_budget(shares)
    seen = [share.saved_bytes for share in shares]
    wants = [share.wanted_bytes for share in shares]
    # What each graph found beside what those before it saved: results handed on, what eager code between them keeps.
    beside = [
        max(0, share.entry_bytes - shares[0].entry_bytes - _in_all(own.before_first, seen))
        for share, own in zip(shares, calls, strict=True)
    ]
    held_in_all = held_bytes + max(beside)
    last = max(range(len(calls)), key=lambda index: sum(calls[index].before_last))

    def scaled(room_bytes: int, counts: Sequence[int]) -> list[int]:
        wanted = sum(count * size for count, size in zip(counts, wants, strict=True))
        room_bytes = max(0, room_bytes)
        return [min(size, room_bytes * size // wanted) if wanted else 0 for size in wants]

    largest_need = max(share.least_bytes + share.outside_bytes for share in shares)
    counts = [own.count for own in calls]
    behind = [count - (index == last) for index, count in enumerate(counts)]
    may_save = scaled(budget_bytes - held_in_all - largest_need, behind)
    if calls[last].count > 1:
        passing = shares[last].passing_bytes + shares[last].outside_bytes
        may_save = list(map(min, may_save, scaled(budget_bytes - held_in_all - passing, counts)))

    parts = []
    for index, (share, own) in enumerate(zip(shares, calls, strict=True)):
        if index == last and own.count == 1:
            parts.append(Part(held_bytes + beside[index] + _in_all(own.before_last, may_save)))
            continue
        # Its first forward's backward runs last, beside what all later ones left behind, but with less saved.
        grown = _in_all(own.before_last, may_save) - _in_all(own.before_first, may_save)
        at_last = share.outside_bytes - (own.count - 1) * share.gradient_bytes
        outside = max(0, share.outside_bytes - grown, at_last)
        entry = held_bytes + beside[index] + _in_all(own.before_last, may_save)
        others = grown - (own.count - 1) * may_save[index]
        parts.append(Part(entry, may_save[index], outside, own.count - 1, others))
    return parts


def step_budget(shares: Sequence[Share]) -> int:
    """The budget of all graphs of a step: a share of the baseline comes to more the more of them were known."""
    return max(share.budget_bytes for share in shares) if shares[0].is_relative else shares[0].budget_bytes


def _in_all(counts: Sequence[int], sizes_bytes: Sequence[int]) -> int:
    """Bytes of so many forwards of each graph; of graphs that had not run yet there is no count."""
    return sum(count * size for count, size in zip(counts, sizes_bytes, strict=False))
