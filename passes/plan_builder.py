"""Turn a placement in numbers into a `Plan` with names and reasons, and a saved `Plan` back into numbers."""

import platform
from collections.abc import Sequence

import numpy as np
import torch

from fxhome.device import DeviceProfile
from fxhome.errors import PlanMismatchError
from fxhome.passes.facts import GraphFacts, StorageFacts
from fxhome.passes.simulate import (
    COMPRESS,
    COMPRESS_SWAP,
    KEEP,
    RECOMPUTE,
    RECOMPUTE_EACH,
    SWAP,
    Placements,
    Problem,
    SimResult,
)
from fxhome.placement import Instruction, Placement, Plan, SearchStats, StoragePlacement

PLACEMENT_OF = {
    KEEP: Placement.KEEP,
    SWAP: Placement.SWAP,
    RECOMPUTE: Placement.RECOMPUTE,
    RECOMPUTE_EACH: Placement.RECOMPUTE_EACH,
    COMPRESS: Placement.COMPRESS,
    COMPRESS_SWAP: Placement.COMPRESS_SWAP,
}
CODE_OF = {placement: code for code, placement in PLACEMENT_OF.items()}


def versions() -> tuple[tuple[str, str], ...]:
    """What a plan depends on besides graph and device."""
    return (("fxhome", "1"), ("torch", torch.__version__), ("python", platform.python_version()))


def build_plan(
    *,
    facts: GraphFacts,
    problem: Problem,
    placement: Placements,
    result: SimResult,
    program: tuple[Instruction, ...],
    budget_bytes: int,
    asked: str,
    baseline_bytes: int,
    baseline_us: float,
    predicted_bytes: int,
    situation_resident: int,
    outside_bytes: int,
    error_bound_bytes: int,
    workspace_bytes: int,
    profile: DeviceProfile,
    inner: str,
    stats: SearchStats,
    gap: float | None,
    estimated: bool,
    notes: tuple[str, ...],
) -> Plan:
    """Name every storage that the backward gets in some way, and say why it is where it is."""
    rebuilt = _recomputed_storages(problem, result)
    entries = []
    ineligible = []
    for s, fact in enumerate(facts.storages):
        if not fact.is_activation or not (result.saved[s] or s in rebuilt):
            continue
        code = int(placement[s])
        entries.append(
            StoragePlacement(
                name=fact.name,
                size_bytes=fact.size_bytes,
                placement=PLACEMENT_OF[code],
                codec=problem.codec_of(s, code),
                module_path=fact.module_path,
                source_line=fact.source_line,
                reason=_reason(fact, code, problem, s),
            )
        )
        if problem.allowed[s].sum() <= 1 and result.saved[s]:
            ineligible.append((fact.name, fact.size_bytes, fact.keep_reason or "small"))
    return Plan(
        budget_bytes=budget_bytes,
        asked=asked,
        baseline_peak_bytes=baseline_bytes,
        resident_bytes=situation_resident,
        outside_bytes=outside_bytes,
        workspace_bytes=workspace_bytes,
        predicted_peak_bytes=predicted_bytes,
        predicted_step_seconds=result.step_us / 1e6,
        baseline_step_seconds=baseline_us / 1e6,
        error_bound_bytes=error_bound_bytes,
        host_bytes=result.host_bytes,
        placements=tuple(entries),
        program=program,
        gap=gap,
        graph_fingerprint=facts.fingerprint,
        device_fingerprint=profile.fingerprint(),
        versions=versions(),
        inner=inner,
        search=stats,
        estimated=estimated,
        ineligible=tuple(ineligible),
        notes=notes,
    )


def _recomputed_storages(problem: Problem, result: SimResult) -> set[int]:
    g = problem.arrays
    nodes = result.nodes[result.recomputed.astype(bool)]
    roots = g.root_storage[nodes]
    return {int(s) for s in np.unique(roots[roots >= 0])}


def _reason(fact: StorageFacts, code: int, problem: Problem, s: int) -> str:
    g = problem.arrays
    move_us = float(g.storage_copy_bytes[s]) * problem.link.d2h_us_per_byte
    rebuild_us = float(g.node_time_us[g.storage_owner[s]])
    if code == KEEP:
        return fact.keep_reason or "kept: the budget allows it"
    if code == COMPRESS:
        small = int(g.storage_encoded_bytes[s])
        us = float(g.storage_encode_us[s] + g.storage_decode_us[s])
        return (
            f"encoded to {small} bytes on the device; encode and decode take {us:.0f} us, "
            f"copying would take {move_us:.0f} us each way"
        )
    if code == COMPRESS_SWAP:
        less_us = float(g.storage_link_bytes[s]) * problem.link.d2h_us_per_byte
        return f"copied encoded in about {less_us:.0f} us each way instead of {move_us:.0f} us"
    if code == SWAP:
        return (
            f"copied in {move_us:.0f} us each way; recomputing its last operator alone would take {rebuild_us:.0f} us"
        )
    if fact.must_recompute:
        return "the user's own checkpoint rebuilds it"
    times = "at each distant use" if code == RECOMPUTE_EACH else "once, at its first use"
    return f"rebuilt {times} (last operator {rebuild_us:.0f} us; copying would take {move_us:.0f} us each way)"


def find_replay(plans: Sequence[Plan], facts: GraphFacts) -> Plan | None:
    """The plan of a file that was made for this graph; None without a file.

    Raises PlanMismatchError when there are plans and none is for this graph.
    """
    if not plans:
        return None
    for plan in plans:
        if plan.graph_fingerprint == facts.fingerprint:
            return plan
    known = ", ".join(plan.graph_fingerprint for plan in plans)
    raise PlanMismatchError(
        f"plan: none of the {len(plans)} given plans ({known}) was made for this graph ({facts.fingerprint}); "
        "plan again here, or run the model and batch size that they were made for"
    )


def check_replay(plan: Plan, facts: GraphFacts, profile: DeviceProfile, inner: str) -> None:
    """Refuse a plan that was made for something else, saying what differs."""
    pairs = (
        ("graph", plan.graph_fingerprint, facts.fingerprint),
        ("device", plan.device_fingerprint, profile.fingerprint()),
        ("inner", plan.inner, inner),
        ("torch", dict(plan.versions).get("torch"), dict(versions())["torch"]),
    )
    for what, planned, here in pairs:
        if planned != here:
            raise PlanMismatchError(
                f"plan: it was made for another {what} ({planned}) than this one ({here}); "
                "plan again here, or run the model, device and versions that the plan was made for"
            )


def placement_codes(plan: Plan, facts: GraphFacts, problem: Problem) -> Placements:
    """The placement in numbers of a saved plan."""
    by_name = {fact.name: s for s, fact in enumerate(facts.storages)}
    placement = problem.keep_all()
    for entry in plan.placements:
        storage = by_name.get(entry.name)
        code = CODE_OF[entry.placement]
        if storage is None or not problem.allowed[storage, code]:
            raise PlanMismatchError(
                f"plan: it places '{entry.name}' as {entry.placement.value}, which this graph or these options do not "
                "allow; plan again"
            )
        placement[storage] = code
    # The backward asks for nothing that the plan does not mention: rebuilt, it costs nothing and nothing else is saved.
    named = {by_name[entry.name] for entry in plan.placements}
    for storage in range(len(facts.storages)):
        if storage not in named and problem.allowed[storage, RECOMPUTE]:
            placement[storage] = RECOMPUTE
    return placement
