"""The options of every front door, read from keywords, from torch.compile's `options=` or from the command line.

`Options.from_mapping` is the one place where users' values are checked; every mistake is one `OptionError` that names
the value, what is allowed and the nearest name.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fxhome.budget import Budget, parse_budget, parse_bytes
from fxhome.errors import OptionError, nearest
from fxhome.placement import Plan, load_plans
from fxhome.units import format_bytes

__all__ = ["Budget", "Options", "format_bytes", "parse_budget", "parse_bytes"]

MEMORY_BUDGET_VARIABLE = "FXHOME_MEMORY_BUDGET"
ALLOWED = ("swap", "recompute", "compress")
INNER_BACKENDS = ("inductor", "aot_eager")
ON_INFEASIBLE = ("error", "best_effort")
POLICIES = (
    "pso",
    "home",
    "home_literal",
    "keep_all",
    "vdnn_all",
    "vdnn_conv",
    "vdnn_async",
    "superneurons",
    "capuchin",
    "checkpoint",
    "greedy",
    "random",
    "annealing",
    "genetic",
)


@dataclass(frozen=True)
class Options:
    """Plain, comparable, hashable. The constructor trusts its caller; users' values come through `from_mapping`."""

    memory_budget: Budget | None = None
    """None = what this process holds plus what the device has free, less a margin."""
    host_budget: int | None = None
    """Bytes of host memory for swapped tensors; None = what the machine and its cgroup have."""
    reserve: int = 0
    """Bytes of the budget kept free for what comes later, for example optimizer state."""
    allow: frozenset[str] = frozenset(ALLOWED)
    lossy: bool = False
    inner: str | None = None
    """Compiler of the rewritten graphs; None = inductor on CUDA, aot_eager on CPU."""
    policy: str = "pso"
    seed: int = 0
    max_evaluations: int = 20_000
    search_seconds: float | None = None
    """Safety cap on the search; a plan that it cut says so."""
    on_infeasible: str = "error"
    plan: str | Plan | None = None
    """A plan, or the path of a plan file, to replay instead of searching."""
    verify: bool = False
    """Check the graph rules after each rewriting step."""
    dump_dir: str | None = None
    """Folder that receives the graphs after each step."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> Options:
        """Check and convert users' values; raise `OptionError` (`PlanFileError` for an unreadable plan file).

        `FXHOME_MEMORY_BUDGET` in `environ` is the budget when `values` has none.
        """
        names = [entry.name for entry in fields(cls)]
        for key in values:
            if key not in names:
                raise OptionError(f"unknown option {key!r}{nearest(key, names)}; allowed: {', '.join(names)}")
        # None means "as if absent" for every option, so that front doors can pass their own defaults through.
        given = {name: values[name] for name in names if values.get(name) is not None}
        parsed = {name: _READERS[name](name, value) for name, value in given.items()}
        if "memory_budget" not in parsed and (text := environ.get(MEMORY_BUDGET_VARIABLE)):
            parsed["memory_budget"] = parse_budget(text, name=MEMORY_BUDGET_VARIABLE)
        options = cls(**parsed)
        if options.reserve and options.memory_budget is not None and options.memory_budget.bytes is not None:
            _check_reserve(options.reserve, options.memory_budget.bytes)
        return options

    def to_json(self) -> dict[str, Any]:
        """Return a mapping ready for `json.dumps`; a plan stands by its fingerprint."""
        document: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        budget = self.memory_budget
        document["memory_budget"] = None if budget is None else {"bytes": budget.bytes, "share": budget.share}
        document["allow"] = sorted(self.allow)
        document["plan"] = self.plan.fingerprint() if isinstance(self.plan, Plan) else self.plan
        return document

    def cache_key(self) -> str:
        """SHA-256 over every option that can change a compiled graph; a plan file counts by its plans, not its path."""
        document = self.to_json()
        document.pop("dump_dir")
        document.pop("verify")
        if isinstance(self.plan, str):
            document["plan"] = [plan.fingerprint() for plan in load_plans(self.plan)]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _check_reserve(reserve_bytes: int, budget_bytes: int) -> None:
    if reserve_bytes >= budget_bytes:
        raise OptionError(
            f"reserve={reserve_bytes} leaves nothing of memory_budget={budget_bytes}; give a reserve below the budget"
        )


def _read_budget(name: str, value: object) -> Budget:
    return parse_budget(value, name=name)


def _read_bytes(name: str, value: object) -> int:
    return parse_bytes(value, name=name)


def _read_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is not a bool; give True or False")
    return value


def _read_int(least: int) -> Callable[[str, object], int]:
    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise OptionError(f"{name}={value!r} is not allowed; give an int of at least {least}")
        return int(value)

    return read


def _read_seconds(name: str, value: object) -> float:
    seconds = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise OptionError(f"{name}={value!r} is not allowed; give a number of seconds, 0 or more, or None for no cap")
    return seconds


def _read_choice(choices: tuple[str, ...]) -> Callable[[str, object], str]:
    def read(name: str, value: object) -> str:
        if value not in choices or not isinstance(value, str):
            hint = nearest(value, choices) if isinstance(value, str) else ""
            raise OptionError(f"{name}={value!r} is not allowed{hint}; choose one of {', '.join(choices)}")
        return value

    return read


def _read_allow(name: str, value: object) -> frozenset[str]:
    if isinstance(value, str):
        given: list[object] = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, Iterable):
        given = list(value)
    else:
        raise OptionError(f"{name}={value!r} is not allowed; give names out of {', '.join(ALLOWED)}")
    check = _read_choice(ALLOWED)
    return frozenset(check(name, entry) for entry in given)


def _read_plan(name: str, value: object) -> str | Plan:
    if isinstance(value, Plan):
        return value
    if not isinstance(value, (str, Path)):
        raise OptionError(f"{name}={value!r} is not allowed; give a fxhome.Plan or the path of a plan file")
    load_plans(value)
    return os.fspath(value)


def _read_path(name: str, value: object) -> str:
    if not isinstance(value, (str, Path)) or not os.fspath(value):
        raise OptionError(f"{name}={value!r} is not allowed; give the path of a folder")
    return os.fspath(value)


_READERS: dict[str, Callable[[str, object], Any]] = {
    "memory_budget": _read_budget,
    "host_budget": _read_bytes,
    "reserve": _read_bytes,
    "allow": _read_allow,
    "lossy": _read_bool,
    "inner": _read_choice(INNER_BACKENDS),
    "policy": _read_choice(POLICIES),
    "seed": _read_int(0),
    "max_evaluations": _read_int(1),
    "search_seconds": _read_seconds,
    "on_infeasible": _read_choice(ON_INFEASIBLE),
    "plan": _read_plan,
    "verify": _read_bool,
    "dump_dir": _read_path,
}
