"""Plans in names and reasons, and back: the same graph and plan give the same rewrite, another graph is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fxhome.device import cached_profile
from fxhome.errors import PlanMismatchError
from fxhome.options import Options
from fxhome.passes.pipeline import plan_graph
from fxhome.passes.plan_builder import CODE_OF, PLACEMENT_OF, check_replay, find_replay, placement_codes, versions
from fxhome.passes.planned import Planned
from fxhome.passes.simulate import KEEP
from fxhome.passes.situation import Situation
from fxhome.placement import Placement, Plan
from tests.graph_tools import chain, chain_inputs, joint_graph, normalized, problem_of


def planned(budget: Any = "75%", rows: int = 64, replays: tuple[Plan, ...] = (), **options: Any) -> Planned:
    module, outputs = joint_graph(chain, *chain_inputs(rows))
    return plan_graph(
        module,
        list(chain_inputs(rows)),
        outputs,
        options=Options.from_mapping({"memory_budget": budget, "max_evaluations": 300, **options}),
        profile=cached_profile("cpu"),
        situation=Situation(resident_bytes=None),
        measure=True,
        inner="aot_eager",
        replays=replays,
    )


def test_codes_and_placements_are_one_to_one() -> None:
    assert {PLACEMENT_OF[code] for code in PLACEMENT_OF} == set(Placement)
    assert all(CODE_OF[PLACEMENT_OF[code]] == code for code in PLACEMENT_OF)


def test_every_placed_storage_has_a_reason_and_a_source() -> None:
    plan = planned().plan
    assert plan.placements
    for entry in plan.placements:
        assert entry.reason
        assert "graph_tools.py" in entry.source_line
        assert entry.size_bytes > 0
    assert plan.versions == versions()
    assert plan.host_bytes == plan.bytes_by_placement()[Placement.SWAP]


@pytest.mark.parametrize("allow", [("swap",), ("recompute",), ("swap", "recompute")])
def test_a_replay_gives_the_same_graphs_from_the_saved_file(allow: tuple[str, ...], tmp_path: Path) -> None:
    first = planned(allow=allow)
    first.plan.save(tmp_path / "plan.json")
    again = planned(allow=allow, replays=(Plan.load(tmp_path / "plan.json"),))
    assert str(again.forward.graph) == str(first.forward.graph)
    assert str(again.backward.graph) == str(first.backward.graph)
    assert again.plan == first.plan


def test_the_placement_in_numbers_is_the_plans() -> None:
    plan = planned().plan
    module, outputs = normalized(chain, *chain_inputs())
    facts, problem = problem_of(module, outputs)
    codes = placement_codes(plan, facts, problem)
    by_name = {fact.name: s for s, fact in enumerate(facts.storages)}
    for entry in plan.placements:
        assert PLACEMENT_OF[int(codes[by_name[entry.name]])] == entry.placement


def test_another_graph_is_refused() -> None:
    plan = planned(rows=64).plan
    with pytest.raises(PlanMismatchError, match=r"none of the 1 given plans .* was made for this graph"):
        planned(rows=65, replays=(plan,))


def test_the_right_plan_of_several_is_found() -> None:
    here, other = planned(rows=64).plan, planned(rows=65).plan
    module, outputs = normalized(chain, *chain_inputs())
    facts, _ = problem_of(module, outputs)
    assert find_replay((other, here), facts) is here
    assert find_replay((), facts) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"device_fingerprint": "x"}, "another device"),
        ({"inner": "inductor"}, "another inner"),
        ({"versions": (("torch", "1.0"),)}, "another torch"),
        ({"graph_fingerprint": "x"}, "another graph"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], what: str) -> None:
    plan = dataclasses.replace(planned().plan, **change)
    module, outputs = normalized(chain, *chain_inputs())
    facts, _ = problem_of(module, outputs)
    with pytest.raises(PlanMismatchError, match=what):
        check_replay(plan, facts, cached_profile("cpu"), "aot_eager")


def test_a_placement_that_the_options_forbid_is_refused() -> None:
    plan = planned(allow=("swap",)).plan
    module, outputs = normalized(chain, *chain_inputs())
    facts, problem = problem_of(module, outputs, allow=("recompute",))
    with pytest.raises(PlanMismatchError, match=r"places '.*' as swap, which .* do not allow"):
        placement_codes(plan, facts, problem)
    assert KEEP in {CODE_OF[entry.placement] for entry in planned("100%").plan.placements}
