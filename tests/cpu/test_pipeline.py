"""The ordered steps: their names, what is dumped after them, refusals with a minimum that works, and budgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fxhome.device import cached_profile
from fxhome.errors import InfeasibleBudgetError, OptionError
from fxhome.options import Options
from fxhome.passes.graph_model import link_of
from fxhome.passes.pipeline import plan_graph, rewrite
from fxhome.passes.planned import Planned
from fxhome.passes.situation import Situation
from fxhome.placement import Placement
from tests.graph_tools import chain, chain_inputs, joint_graph
from tests.hazard_tools import in_bytes


def planned(budget: Any, *, resident: int | None = None, fixed: tuple[str, ...] = (), **options: Any) -> Planned:
    module, outputs = joint_graph(chain, *chain_inputs())
    return plan_graph(
        module,
        list(chain_inputs()),
        outputs,
        options=Options.from_mapping({"memory_budget": budget, "max_evaluations": 300, "verify": True, **options}),
        profile=cached_profile("cpu"),
        situation=Situation(resident_bytes=resident, free_bytes=1 << 30, fixed_layouts=fixed),
        measure=True,
        inner="aot_eager",
    )


def test_what_the_compiler_lays_out_otherwise_is_not_moved() -> None:
    def moved(plan: Any) -> set[str]:
        return {item.target for item in plan.program if item.kind == "swap_out"}

    free = moved(planned("95%", allow=["swap", "recompute"], policy="vdnn_all").plan)
    assert len(free) > 1
    held = moved(planned("95%", allow=["swap", "recompute"], policy="vdnn_all", fixed=(min(free),)).plan)
    assert held == free - {min(free)}


def test_every_step_is_named_timed_and_dumped(tmp_path: Path) -> None:
    result = planned("70%", dump_dir=str(tmp_path / "steps"))
    expected = [
        "baseline",
        "normalize",
        "channels_last",
        "constants",
        "facts",
        "cost",
        "search",
        "partition",
        "insert_codecs",
        "insert_transfers",
        "check",
    ]
    assert list(result.step_seconds) == expected
    assert all(seconds >= 0 for seconds in result.step_seconds.values())
    written = sorted(path.name for path in (tmp_path / "steps").iterdir())
    for name, sides in (
        ("baseline", ("forward", "backward")),
        ("normalize", ("joint",)),
        ("constants", ("joint",)),
        ("partition", ("forward", "backward")),
        ("insert_codecs", ("forward", "backward")),
        ("insert_transfers", ("forward", "backward")),
    ):
        for side in sides:
            (found,) = [file for file in written if re.fullmatch(rf"\d\d_{name}_{side}\.py", file)]
            assert "def forward" in (tmp_path / "steps" / found).read_text(encoding="utf-8")
    numbers = [int(file[:2]) for file in written]
    assert numbers == sorted(numbers)


def test_dumping_changes_nothing(tmp_path: Path) -> None:
    assert planned("70%").plan == planned("70%", dump_dir=str(tmp_path)).plan


def test_a_baseline_that_fits_is_returned_as_it_is() -> None:
    result = planned("100%")
    assert result.is_baseline
    assert result.plan.predicted_peak_bytes == result.plan.baseline_peak_bytes <= result.plan.budget_bytes
    assert result.plan.search.evaluations == 0


def test_the_joint_graph_is_not_changed() -> None:
    module, outputs = joint_graph(chain, *chain_inputs())
    before = str(module.graph)
    plan_graph(
        module,
        list(chain_inputs()),
        outputs,
        options=Options.from_mapping({"memory_budget": "70%", "max_evaluations": 100}),
        profile=cached_profile("cpu"),
        situation=Situation(resident_bytes=None),
        measure=True,
        inner="aot_eager",
    )
    assert str(module.graph) == before


@pytest.mark.parametrize("allow", [("swap",), ("recompute",), ("swap", "recompute")])
def test_a_refusal_names_a_minimum_that_works_and_what_holds_the_memory(allow: tuple[str, ...]) -> None:
    with pytest.raises(InfeasibleBudgetError, match="cannot be met: the smallest plan found needs") as refused:
        planned("1%", allow=allow)
    minimum = refused.value.minimum_bytes
    assert minimum is not None
    assert refused.value.holders
    assert str(minimum) in str(refused.value)
    result = planned(in_bytes(minimum), allow=allow)
    assert result.plan.predicted_peak_bytes <= minimum
    kinds = {kind for kind, size in result.plan.bytes_by_placement().items() if size}
    if allow == ("swap",):
        assert Placement.RECOMPUTE not in kinds
    if allow == ("recompute",):
        assert Placement.SWAP not in kinds


def test_best_effort_goes_on_and_says_so() -> None:
    result = planned("1%", on_infeasible="best_effort")
    assert result.is_best_effort
    assert any("best effort" in note for note in result.plan.notes)
    assert result.plan.predicted_peak_bytes > result.plan.budget_bytes


def test_the_same_seed_gives_the_same_plan() -> None:
    assert planned("75%").plan == planned("75%").plan
    assert planned("75%").plan.fingerprint() == planned("75%").plan.fingerprint()


def test_what_is_resident_counts_once() -> None:
    alone, together = planned("100%"), planned("100%", resident=1 << 24)
    inputs = sum(tensor.numel() * 4 for tensor in chain_inputs())
    assert together.plan.baseline_peak_bytes - alone.plan.baseline_peak_bytes == (1 << 24) - inputs


def test_without_a_budget_everything_free_is_asked_for() -> None:
    result = planned(None)
    assert "all that is free" in result.plan.asked
    assert result.plan.budget_bytes < result.plan.resident_bytes + (1 << 30)


def test_rewrite_repeats_the_planned_graphs() -> None:
    module, outputs = joint_graph(chain, *chain_inputs())
    result = planned("75%", allow=("swap",))
    forward, backward = rewrite(module, result.plan.program, outputs)
    assert str(forward.graph) == str(result.forward.graph)
    assert str(backward.graph) == str(result.backward.graph)


def test_the_links_slowdown_comes_from_the_duplex_rate() -> None:
    profile = cached_profile("cpu")
    link = link_of(profile)
    assert link.d2h_us_per_byte == pytest.approx(1e6 / profile.d2h_bytes_per_s)
    assert link.duplex_slowdown >= 1.0


def test_a_dump_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OptionError, match=r"dump_dir='.*taken' cannot be made \(File exists\); give a folder"):
        planned("70%", dump_dir=str(tmp_path / "taken"))


@pytest.mark.parametrize(
    ("allow", "advice"),
    [
        (["swap", "recompute", "compress"], " or use a smaller batch"),
        (["swap", "compress"], ", use a smaller batch, or allow recompute too"),
    ],
)
def test_a_refusal_advises_what_was_not_allowed(allow: list[str], advice: str) -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        planned("1%", allow=allow)
    assert str(refused.value).endswith(f"Ask for at least {refused.value.minimum_bytes}{advice}")
