"""fxhome: train inside a byte budget.

Three front doors: `torch.compile(step, backend="fxhome", options={"memory_budget": "20GiB"})`, `fxhome.optimize` and
`fxhome.plan`. Public names load on first use: importing the package touches neither torch, nor CUDA, nor Numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxhome.api import optimize, plan, plans
    from fxhome.device import DeviceProfile
    from fxhome.errors import FxhomeError, InfeasibleBudgetError
    from fxhome.options import Options
    from fxhome.placement import Placement, Plan

__version__ = "0.1.0"

__all__ = [
    "DeviceProfile",
    "FxhomeError",
    "InfeasibleBudgetError",
    "Options",
    "Placement",
    "Plan",
    "__version__",
    "optimize",
    "plan",
    "plans",
]

_HOMES = {
    "DeviceProfile": "fxhome.device",
    "FxhomeError": "fxhome.errors",
    "InfeasibleBudgetError": "fxhome.errors",
    "Options": "fxhome.options",
    "Placement": "fxhome.placement",
    "Plan": "fxhome.placement",
    "optimize": "fxhome.api",
    "plan": "fxhome.api",
    "plans": "fxhome.api",
}


def __getattr__(name: str) -> object:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fxhome' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
