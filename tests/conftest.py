"""What every test group shares: no budget from the environment, and one shape of hypothesis run everywhere."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No test is judged by its time: a slow machine must not turn a property into a failure.
settings.register_profile("fxhome", deadline=None, derandomize=True, database=None)
settings.load_profile("fxhome")


@pytest.fixture(autouse=True)
def no_budget_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that the developer exported would change what half the tests plan."""
    monkeypatch.delenv("FXHOME_MEMORY_BUDGET", raising=False)
