"""What every test group shares: nothing from the developer's environment, one shape of hypothesis run everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# No test is judged by its time: a slow machine must not turn a property into a failure.
settings.register_profile("fxhome", deadline=None, derandomize=True, database=None)
settings.load_profile("fxhome")

# One process per core already (`pytest -n auto`): threads inside them wait for each other, and operators that are timed
# then take fifty times as long. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Inductor's C++ without vector instructions: the same kernels and buffers for half of the compiler's time, and nothing
# to try out on this machine first. Read when Inductor is imported, by the processes that tests start, too.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.fixture(autouse=True)
def no_budget_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that the developer exported would change what half the tests plan."""
    monkeypatch.delenv("FXHOME_MEMORY_BUDGET", raising=False)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured profiles and op times are this session's own: tests neither read nor write the developer's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXHOME_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
