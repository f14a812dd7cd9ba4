"""What was decided: the placement of every storage, the program that carries it out, and the promise made with it.

A `Plan` is an immutable value. It is saved as JSON ({"schema": 1, "plans": [...]}, one plan per graph), printed, and
replayed: the same graph and the same plan give the same rewrite.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxhome import plan_text
from fxhome.errors import PlanFileError
from fxhome.json_codec import DecodeError, decode, encode

SCHEMA_VERSION = 1

INSTRUCTION_KINDS = frozenset(
    {
        "op",
        "recompute",
        "swap_out",
        "swap_out_wait",
        "swap_in",
        "swap_in_wait",
        "encode",
        "decode",
        "forward_end",
    }
)


class Placement(enum.StrEnum):
    """Where a storage lives between its last forward and its first backward reader."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"
    RECOMPUTE_EACH = "recompute_each"
    """Rebuilt for every distant use instead of being held from the first one on."""
    COMPRESS = "compress"
    """Encoded on the device, decoded before its first backward reader."""
    COMPRESS_SWAP = "compress+swap"
    """Encoded on its way to the host, decoded after it comes back."""


@dataclass(frozen=True)
class StoragePlacement:
    """One storage of the joint graph and what happens to it."""

    name: str
    """Joint graph node that produces the storage."""
    size_bytes: int
    placement: Placement
    codec: str | None
    module_path: str
    source_line: str
    reason: str


@dataclass(frozen=True)
class Instruction:
    """One step of the planned program; `target` is a joint graph node name, empty for `forward_end`."""

    kind: str
    target: str

    def __post_init__(self) -> None:
        """Refuse a kind that no rewrite knows."""
        if self.kind not in INSTRUCTION_KINDS:
            raise ValueError(f"unknown instruction kind {self.kind!r}; allowed: {', '.join(sorted(INSTRUCTION_KINDS))}")


@dataclass(frozen=True)
class SearchStats:
    """How the search went. Wall time takes no part in equality: the same seed gives the same plan."""

    policy: str
    seed: int
    evaluations: int
    seconds: float = field(compare=False)
    stopped_by: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The promise for one graph and how it is kept. Sizes in bytes, times in seconds."""

    budget_bytes: int
    asked: str
    """What the user typed, or how the budget came about when nothing was asked."""
    baseline_peak_bytes: int
    """Peak when everything is kept, as the inner backend does by itself."""
    resident_bytes: int
    outside_bytes: int
    """Held between the end of the forward and the start of the backward by nothing that a graph contains."""
    workspace_bytes: int
    predicted_peak_bytes: int
    predicted_step_seconds: float
    baseline_step_seconds: float
    error_bound_bytes: int
    """The plan was accepted on `predicted_peak_bytes + error_bound_bytes <= budget_bytes`."""
    host_bytes: int
    placements: tuple[StoragePlacement, ...]
    program: tuple[Instruction, ...]
    gap: float | None
    """Distance of the predicted step from its lower bound, as a fraction of the bound; None: no bound was computed."""
    graph_fingerprint: str
    device_fingerprint: str
    versions: tuple[tuple[str, str], ...]
    inner: str
    search: SearchStats
    estimated: bool
    """Made offline: nothing was measured on the device."""
    ineligible: tuple[tuple[str, int, str], ...]
    """Storages that must stay: (name, bytes, why)."""
    notes: tuple[str, ...]
    measured_peak_bytes: int | None = field(default=None, compare=False)
    measured_step_seconds: float | None = field(default=None, compare=False)
    measured_reserved_bytes: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Plain text for people; asked, predicted and measured always stand together."""
        return plan_text.describe(self)

    def bytes_by_placement(self) -> dict[Placement, int]:
        """Sum the planned bytes per placement; every placement has an entry, in the order of the enum."""
        totals = dict.fromkeys(Placement, 0)
        for entry in self.placements:
            totals[entry.placement] += entry.size_bytes
        return totals

    def with_measurement(
        self, *, peak_bytes: int, step_seconds: float | None = None, reserved_bytes: int | None = None
    ) -> Plan:
        """Return the same plan with what a metered step showed."""
        return dataclasses.replace(
            self,
            measured_peak_bytes=peak_bytes,
            measured_step_seconds=step_seconds,
            measured_reserved_bytes=reserved_bytes,
        )

    def fingerprint(self) -> str:
        """SHA-256 over all that a replay depends on: graph, device, versions, inner, budget, placements, program."""
        relevant = (
            SCHEMA_VERSION,
            self.graph_fingerprint,
            self.device_fingerprint,
            self.versions,
            self.inner,
            self.budget_bytes,
            [(entry.name, entry.size_bytes, entry.placement.value, entry.codec) for entry in self.placements],
            [(step.kind, step.target) for step in self.program],
        )
        return hashlib.sha256(json.dumps(relevant).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return a mapping ready for `json.dumps`; program steps are [kind, target] pairs."""
        document: dict[str, Any] = encode(self)
        document["program"] = [[step.kind, step.target] for step in self.program]
        return document

    @classmethod
    def from_json(cls, document: object) -> Plan:
        """Rebuild a plan from `to_json`'s mapping; raise `PlanFileError` on what is missing, unknown or mistyped."""
        if not isinstance(document, Mapping):
            raise PlanFileError(f"a plan should be a JSON object, got {type(document).__name__}")
        prepared = dict(document)
        try:
            steps = decode(tuple[tuple[str, str], ...], prepared.get("program"), "plan.program")
            prepared["program"] = [{"kind": kind, "target": target} for kind, target in steps]
            plan: Plan = decode(cls, prepared, "plan")
        except DecodeError as error:
            raise PlanFileError(f"not a plan of schema {SCHEMA_VERSION}: {error}") from error
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file that holds this one plan; raise `PlanFileError` when the path cannot be written."""
        save_plans(path, (self,))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file that holds exactly one plan; raise `PlanFileError` otherwise."""
        plans = load_plans(path)
        if len(plans) != 1:
            raise PlanFileError(
                f"plan file {os.fspath(path)!r} holds {len(plans)} plans (one per graph), where one was expected; "
                "read it with fxhome.placement.load_plans"
            )
        return plans[0]


def plans_document(plans: Iterable[Plan]) -> dict[str, Any]:
    """The JSON document of a plan file: {"schema": 1, "plans": [...]}, one plan per graph in compile order."""
    return {"schema": SCHEMA_VERSION, "plans": [plan.to_json() for plan in plans]}


def save_plans(path: str | os.PathLike[str], plans: Iterable[Plan]) -> None:
    """Write a plan file, replacing one that exists as a whole; raise `PlanFileError` when it cannot be written."""
    text = json.dumps(plans_document(plans), indent=1, allow_nan=False)
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise PlanFileError(
            f"plan file {os.fspath(path)!r} cannot be written: {error.strerror}; give a path in a writable folder"
        ) from error


def load_plans(path: str | os.PathLike[str]) -> tuple[Plan, ...]:
    """Read every plan of a plan file; raise `PlanFileError` when it is missing, corrupt or of another schema."""
    name = repr(os.fspath(path))
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(
            f"plan file {name} cannot be read: {error.strerror}; make one with `fxhome plan -o`"
        ) from error
    except ValueError as error:
        raise PlanFileError(f"plan file {name} is not JSON: {error}; make it again with `fxhome plan -o`") from error
    if not isinstance(document, dict) or "schema" not in document or not isinstance(document.get("plans"), list):
        raise PlanFileError(
            f"plan file {name} is not a plan: it should be an object with 'schema' and 'plans'; "
            "make it with `fxhome plan -o`"
        )
    if document["schema"] != SCHEMA_VERSION:
        raise PlanFileError(
            f"plan file {name} has schema {document['schema']!r}, this version reads schema {SCHEMA_VERSION}; "
            "make it again with `fxhome plan -o`"
        )
    try:
        return tuple(Plan.from_json(entry) for entry in document["plans"])
    except PlanFileError as error:
        raise PlanFileError(f"plan file {name} is {error}; make it again with `fxhome plan -o`") from error
