"""Plans for tests: one small example and a hypothesis strategy over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from fxhome.placement import INSTRUCTION_KINDS, Instruction, Placement, Plan, SearchStats, StoragePlacement

MIB = 1024**2

EXAMPLE = Plan(
    budget_bytes=600 * MIB,
    asked="60%",
    baseline_peak_bytes=1000 * MIB,
    resident_bytes=200 * MIB,
    outside_bytes=0,
    workspace_bytes=8 * MIB,
    predicted_peak_bytes=590 * MIB,
    predicted_step_seconds=0.125,
    baseline_step_seconds=0.1,
    error_bound_bytes=4 * MIB,
    host_bytes=256 * MIB,
    placements=(
        StoragePlacement("relu_1", 96 * MIB, Placement.KEEP, None, "layer1.0.relu", "net.py:10", "read soon"),
        StoragePlacement("conv_2", 256 * MIB, Placement.SWAP, None, "layer1.0.conv", "net.py:11", "hidden by compute"),
        StoragePlacement("add_3", 64 * MIB, Placement.RECOMPUTE, None, "layer2.blocks[0]", "net.py:12", "cheap"),
        StoragePlacement("gelu_4", 32 * MIB, Placement.RECOMPUTE_EACH, None, "layer2.act", "net.py:13", "cheap"),
        StoragePlacement("relu_5", 16 * MIB, Placement.COMPRESS, "bitmask", "layer3.act", "net.py:14", "sparse"),
        StoragePlacement("relu_6", 8 * MIB, Placement.COMPRESS_SWAP, "bitmask", "layer3.act", "net.py:15", "sparse"),
    ),
    program=(
        Instruction("op", "conv_2"),
        Instruction("swap_out", "conv_2"),
        Instruction("swap_out_wait", "conv_2"),
        Instruction("forward_end", ""),
        Instruction("swap_in", "conv_2"),
        Instruction("swap_in_wait", "conv_2"),
        Instruction("recompute", "add_3"),
    ),
    gap=0.025,
    graph_fingerprint="a1b2c3d4e5f6a7b8",
    device_fingerprint="0011223344556677",
    versions=(("torch", "2.14.1"),),
    inner="aot_eager",
    search=SearchStats(policy="pso", seed=0, evaluations=1234, seconds=1.5, stopped_by="convergence"),
    estimated=False,
    ineligible=(("getitem_7", 2 * MIB, "written by a user kernel"),),
    notes=("the search was seeded from the baselines",),
)

MEASURED = EXAMPLE.with_measurement(peak_bytes=588 * MIB, step_seconds=0.126, reserved_bytes=None)

_sizes = st.integers(min_value=0, max_value=2**60)
_seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
_texts = st.text(max_size=12)
_by_type: dict[str, st.SearchStrategy[Any]] = {
    "int": _sizes,
    "float": _seconds,
    "str": _texts,
    "bool": st.booleans(),
    "int | None": st.none() | _sizes,
    "float | None": st.none() | _seconds,
    "str | None": st.none() | _texts,
    "Placement": st.sampled_from(Placement),
    "tuple[tuple[str, str], ...]": st.lists(st.tuples(_texts, _texts), max_size=3).map(tuple),
    "tuple[tuple[str, int, str], ...]": st.lists(st.tuples(_texts, _sizes, _texts), max_size=3).map(tuple),
    "tuple[str, ...]": st.lists(_texts, max_size=3).map(tuple),
}


def _instances(kind: type) -> st.SearchStrategy[Any]:
    """Any instance of a dataclass: a field of a type not listed above is an error, so no new field goes untested."""
    return st.builds(kind, **{field.name: _by_type[str(field.type)] for field in dataclasses.fields(kind)})


_by_type["SearchStats"] = _instances(SearchStats)
_by_type["tuple[StoragePlacement, ...]"] = st.lists(_instances(StoragePlacement), max_size=4).map(tuple)
_by_type["tuple[Instruction, ...]"] = st.lists(
    st.builds(Instruction, st.sampled_from(sorted(INSTRUCTION_KINDS)), _texts), max_size=4
).map(tuple)

plans: st.SearchStrategy[Plan] = _instances(Plan)
