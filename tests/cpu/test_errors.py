"""Every error is a FxhomeError and the built-in that a caller would expect; attributes survive a process boundary."""

from __future__ import annotations

import inspect
import pickle

import pytest

from fxhome import errors
from fxhome.errors import FxhomeError, InfeasibleBudgetError, nearest

BUILT_INS = {
    "OptionError": ValueError,
    "SpecError": ValueError,
    "PlanFileError": ValueError,
    "PlanMismatchError": ValueError,
    "InfeasibleBudgetError": ValueError,
    "HostMemoryError": RuntimeError,
    "DeviceError": RuntimeError,
    "UnsupportedGraphError": RuntimeError,
    "GraphRuleError": RuntimeError,
}


def test_every_error_has_the_base_and_its_built_in() -> None:
    classes = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, FxhomeError) and kind is not FxhomeError
    }

    assert {name: kind.__bases__ for name, kind in classes.items()} == {
        name: (FxhomeError, built_in) for name, built_in in BUILT_INS.items()
    }


def test_infeasible_budget_survives_pickling() -> None:
    """The command line runs steps in child processes."""
    error = InfeasibleBudgetError("too small", minimum_bytes=5, budget_bytes=3, holders=(("conv", 4),))

    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == "too small"
    assert (copy.minimum_bytes, copy.budget_bytes, copy.holders) == (5, 3, (("conv", 4),))


@pytest.mark.parametrize(
    ("given", "hint"), [("sed", " (did you mean 'seed'?)"), ("zzz", ""), ("policy", " (did you mean 'policy'?)")]
)
def test_nearest(given: str, hint: str) -> None:
    assert nearest(given, ("seed", "policy")) == hint
