"""Every error that fxhome raises on purpose.

One base, `FxhomeError`; each child also derives from the built-in that a caller would expect. A message says where,
what was given, what is allowed and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FxhomeError(Exception):
    """Base of every error of fxhome."""


class OptionError(FxhomeError, ValueError):
    """An option has an unknown name, a wrong type or a value outside its range."""


class SpecError(FxhomeError, ValueError):
    """A model SPEC of the command line names nothing that can be built."""


class PlanFileError(FxhomeError, ValueError):
    """A plan file is missing, corrupt or of another schema."""


class PlanMismatchError(FxhomeError, ValueError):
    """A plan was made for another graph, device or set of versions."""


class HostMemoryError(FxhomeError, RuntimeError):
    """The host has too little memory for the planned swaps."""


class DeviceError(FxhomeError, RuntimeError):
    """A device was asked for that is not there, or cannot do what was asked."""


class UnsupportedGraphError(FxhomeError, RuntimeError):
    """The captured graph holds something that fxhome cannot plan."""


class GraphRuleError(FxhomeError, RuntimeError):
    """A rewritten graph breaks one of fxhome's own graph rules: a defect of fxhome, never of the user's model."""


class InfeasibleBudgetError(FxhomeError, ValueError):
    """No plan keeps the step inside the memory budget.

    `minimum_bytes` is the smallest budget that was found and verified (None when none was found), `budget_bytes` the
    one that was asked for, `holders` the largest holders of memory at the worst moment as (name, bytes), largest first.
    """

    def __init__(
        self,
        message: str,
        *,
        minimum_bytes: int | None,
        budget_bytes: int,
        holders: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.budget_bytes = budget_bytes
        self.holders = holders

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword attributes when the error crosses a process boundary."""
        return _rebuild_infeasible, (str(self), self.minimum_bytes, self.budget_bytes, self.holders)


def nearest(given: str, names: Iterable[str]) -> str:
    """A hint for a message: the name closest to `given`, or nothing when none is close."""
    matches = difflib.get_close_matches(given, list(names), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def reason_of(error: BaseException) -> str:
    """Type and first line of an error of the user's model: of its origin where torch.compile wrapped it."""
    if type(error).__module__.startswith("torch._dynamo"):
        while (inner := error.__cause__ or error.__context__) is not None:
            error = inner
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line.rstrip('.')}"


def _rebuild_infeasible(
    message: str, minimum_bytes: int | None, budget_bytes: int, holders: tuple[tuple[str, int], ...]
) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(message, minimum_bytes=minimum_bytes, budget_bytes=budget_bytes, holders=holders)
