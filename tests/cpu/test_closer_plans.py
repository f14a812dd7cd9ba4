"""Where the blocks of a plan would lie too far apart, others are tried, and the best one is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fxhome import inner_inductor
from fxhome.errors import InfeasibleBudgetError
from fxhome.inductor_graphs import LoweredGraphs, budget_for, cap_of, reserved_limit, room_under
from fxhome.inner_inductor import MAX_CLOSER, compile_inductor, enforceable_minimum
from fxhome.lowered_store import Lowered, recall, remember
from fxhome.passes.allocator import Allocation
from fxhome.passes.inductor_check import LayoutError, ScatteredError, ScheduleCheck
from fxhome.passes.planned import Planned
from fxhome.passes.refusal import RESIDENT_SLACK_BYTES
from fxhome.passes.situation import Situation

BUDGET = 10 << 30


@dataclass(frozen=True)
class StandInPlan:
    """What the loop reads of a plan."""

    budget_bytes: int = BUDGET
    notes: tuple[str, ...] = ()


def planned(number: int) -> Planned:
    """A stand-in for the plan of one attempt."""
    found = SimpleNamespace(number=number, plan=StandInPlan())
    found.checked = lambda predicted: found.plan
    return cast(Planned, found)


def run(monkeypatch: pytest.MonkeyPatch, reserved: Sequence[int | None]) -> tuple[Any, list[int], list[int]]:
    """Compile with attempts that reserve so much (None: nothing closer); (result, margins asked for, plans lowered)."""
    margins: list[int] = []
    lowered: list[int] = []

    def attempt(_: Any, __: Any, ___: Any, situation: Situation, *, fallback: bool) -> Any:
        number = len(margins)
        margins.append(situation.lowering_bytes)
        assert fallback == (number > 0)
        if reserved[number] is None:
            raise inner_inductor._NothingCloserError
        if reserved[number] <= reserved_limit(BUDGET):  # type: ignore[operator]
            return SimpleNamespace(planned=planned(number), plan=StandInPlan())
        raise inner_inductor._ScatteredPlanError(planned(number), situation, cast(int, reserved[number]))

    def lower(_: Any, __: Any, chosen: Any, *___: Any, closely: bool) -> Any:
        assert not closely
        lowered.append(chosen.number)
        return LoweredGraphs(lambda: None, BUDGET, None)

    monkeypatch.setattr(inner_inductor, "_hold_budget", attempt)
    monkeypatch.setattr(inner_inductor, "lower_and_check", lower)
    return compile_inductor(cast(Any, None), [], cast(Any, None), Situation(None)), margins, lowered


def test_a_plan_that_lies_close_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, margins, lowered = run(monkeypatch, [BUDGET])
    assert margins == [0]
    assert not lowered


def test_another_plan_is_made_with_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    over = reserved_limit(BUDGET) + (5 << 20)
    result, margins, lowered = run(monkeypatch, [over, BUDGET])
    assert margins == [0, 5 << 20]
    assert not lowered
    assert not result.plan.notes


def test_steps_are_small_however_far_apart_blocks_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    _, margins, _ = run(monkeypatch, [2 * BUDGET, BUDGET])
    assert margins == [0, BUDGET // 50]


def test_the_closest_of_all_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [BUDGET + (n << 30) for n in (2, 1, 3)]
    assert len(sizes) == MAX_CLOSER
    _, _, lowered = run(monkeypatch, sizes)
    assert lowered == [1]


def test_where_nothing_closer_fits_the_first_plan_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, lowered = run(monkeypatch, [2 * BUDGET, None])
    assert lowered == [0]


def fallbacks(
    monkeypatch: pytest.MonkeyPatch, enforceable: Sequence[bool], smallest_runs: bool
) -> tuple[int, list[int]]:
    """Compile where no attempt lies close enough, each one closer than the one before; (plan taken, plans lowered)."""
    numbers = iter(range(MAX_CLOSER))
    lowered: list[int] = []

    def attempt(_: Any, __: Any, ___: Any, situation: Situation, *, fallback: bool) -> Any:
        number = next(numbers)
        reserved_bytes = reserved_limit(BUDGET) + (MAX_CLOSER - number) * (1 << 20)
        raise inner_inductor._ScatteredPlanError(planned(number), situation, reserved_bytes, enforceable[number])

    def plan(_: Any, __: Any, ___: Any, situation: Situation) -> Planned:
        assert situation.smallest
        assert situation.tightest
        assert situation.lowering_bytes == 0
        return planned(-1)

    def lower(_: Any, __: Any, chosen: Any, *___: Any, closely: bool) -> Any:
        assert not closely
        lowered.append(chosen.number)
        return LoweredGraphs(lambda: None, BUDGET, None, is_enforceable=smallest_runs)

    monkeypatch.setattr(inner_inductor, "_hold_budget", attempt)
    monkeypatch.setattr(inner_inductor, "plan_only", plan)
    monkeypatch.setattr(inner_inductor, "lower_and_check", lower)
    variant = compile_inductor(cast(Any, None), [], cast(Any, None), Situation(None))
    return cast(Any, variant.planned).number, lowered


def test_a_plan_that_runs_under_a_cap_is_better_than_one_that_lies_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fallbacks(monkeypatch, (False, True, False), smallest_runs=True) == (1, [1])


@pytest.mark.parametrize(("smallest_runs", "taken"), [(True, (-1, [-1])), (False, (2, [-1, 2]))])
def test_where_no_plan_runs_under_a_cap_the_smallest_is_tried(
    monkeypatch: pytest.MonkeyPatch, smallest_runs: bool, taken: tuple[int, list[int]]
) -> None:
    """It is the plan by which a minimum is named: asked for just that, it must be taken, though others are faster."""
    assert fallbacks(monkeypatch, (False, False, False), smallest_runs) == taken


def tenant(text: str = "a+100 b+20 a- c+20 d+100 d- c- b-") -> list[Allocation]:
    """Best fit needs 220 MiB; laid where they fit, blocks need 140."""
    words = text.split()
    return [Allocation(word[0], int(word[2:]) << 20 if word[1] == "+" else 0) for word in words]


@pytest.mark.parametrize(("limit_mib", "stops", "packed_mib"), [(300, True, 220), (150, True, 140), (100, False, 140)])
def test_blocks_that_can_be_laid_are_close_enough(limit_mib: int, stops: bool, packed_mib: int) -> None:
    check = ScheduleCheck((), {}, reserved_limit_bytes=limit_mib << 20, stops_scattered=stops)
    half = tenant()
    check._reserve(half[:4], is_backward=False)
    check._reserve(half[4:], is_backward=True)
    assert check.reserved_bytes == 220 << 20
    assert check.packed_bytes == packed_mib << 20


def test_blocks_that_cannot_be_laid_close_enough_stop_the_lowering() -> None:
    check = ScheduleCheck((), {}, reserved_limit_bytes=100 << 20)
    check._reserve([], is_backward=False)
    with pytest.raises(ScatteredError) as found:
        check._reserve(tenant(), is_backward=True)
    assert found.value.reserved_bytes == 140 << 20


def test_blocks_that_could_be_laid_must_also_do_in_the_steps_before() -> None:
    """150 MiB are enough for blocks that are laid. Before, two whole pages of the hole that `a` leaves can be given
    back: 120 - 40 + 100 are needed.
    """

    def lower(cap_mib: int) -> int | None:
        check = ScheduleCheck((), {}, reserved_limit_bytes=160 << 20, cap_bytes=cap_mib << 20)
        check._reserve([], is_backward=False)
        check._reserve(tenant("a+90 b+25 a- c+25 d+100 d- c- b-"), is_backward=True)
        return check.least_cap_bytes

    assert lower(500) == 180 << 20
    assert lower(180) == 180 << 20
    with pytest.raises(ScatteredError) as found:
        lower(179)
    assert found.value.reserved_bytes == 180 << 20


@pytest.mark.parametrize("least_cap_bytes", [1 << 30, 20 << 30])
def test_a_budget_is_named_that_leaves_enough_room_under_its_cap(least_cap_bytes: int) -> None:
    outside = 300 << 20
    budget = budget_for(least_cap_bytes, outside)
    assert room_under(cap_of(budget), outside) >= least_cap_bytes
    assert room_under(cap_of(budget - (1 << 20)), outside) < least_cap_bytes


@pytest.mark.parametrize(("kind", "is_enforced"), [("cuda", True), ("cpu", False)])
def test_the_minimum_leaves_room_for_holes_though_its_plan_is_over_what_was_asked(kind: str, is_enforced: bool) -> None:
    plan = SimpleNamespace(resident_bytes=1 << 30, predicted_peak_bytes=2 << 30, budget_bytes=1 << 20)
    planned = SimpleNamespace(facts=SimpleNamespace(planned_for=kind), plan=plan, is_best_effort=True)
    least = enforceable_minimum(cast(Any, planned), Situation(None), 2 << 30, 3 << 30)
    if is_enforced:
        assert room_under(cap_of(least), plan.resident_bytes) >= 3 << 30
        assert least < 4.2 * (1 << 30)
    else:
        assert least == (2 << 30) + RESIDENT_SLACK_BYTES[kind]


def test_where_blocks_must_lie_close_no_buffer_is_kept_for_another() -> None:
    """The smallest plan and the closest of those that lie badly are lowered so."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.cos(x @ w) @ w) @ w

    x = torch.randn(1024, 1024)
    for stops, has_room in ((True, True), (False, False)):
        check = ScheduleCheck((), {}, stops_scattered=stops)
        torch._dynamo.reset()
        with torch._inductor.config.patch(_post_fusion_custom_pass=check, fx_graph_cache=False):
            torch.compile(function)(x, x)
        assert (check.room is not None) is has_room
    assert ScheduleCheck((), {}, stops_scattered=True).uuid() != ScheduleCheck((), {}, stops_scattered=False).uuid()


def test_what_the_allocator_will_take_is_remembered() -> None:
    seen = Lowered(1 << 20, 3 << 20, 2 << 20, 3 << 19)
    remember("a plan", False, seen)
    assert recall("a plan", False) == seen
    assert recall("a plan", True) is None
    remember("a plan", False, replace(seen, reserved_bytes=None, packed_bytes=None, least_cap_bytes=None))
    assert recall("a plan", False) == Lowered(1 << 20, None, None)


def test_what_inductor_lays_out_otherwise_is_planned_without_being_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def plan(_: Any, __: Any, ___: Any, situation: Situation) -> Any:
        asked.append(situation.fixed_layouts)
        found = SimpleNamespace(plan=StandInPlan(), is_baseline=False, is_best_effort=False, kept_free_bytes=0)
        found.plan = SimpleNamespace(budget_bytes=BUDGET, predicted_peak_bytes=BUDGET)
        found.checked = lambda predicted: found.plan
        return found

    def lower(_: Any, __: Any, ___: Any, situation: Situation, *, closely: bool) -> Any:
        missing = [name for name in ("mask", "offsets") if name not in situation.fixed_layouts]
        if missing:
            raise LayoutError(frozenset(missing[:1]))
        return LoweredGraphs(lambda: None, BUDGET, None)

    monkeypatch.setattr(inner_inductor, "plan_only", plan)
    monkeypatch.setattr(inner_inductor, "lower_and_check", lower)
    variant = compile_inductor(cast(Any, None), [], cast(Any, None), Situation(None))
    assert asked == [(), ("mask",), ("mask", "offsets")]
    assert variant.situation.fixed_layouts == ("mask", "offsets")


@pytest.mark.parametrize(("fits_up_to", "expected"), [(30, 25), (60, 50), (99, 75), (20, None)])
def test_margins_between_the_one_before_and_one_that_is_too_large_are_tried(
    monkeypatch: pytest.MonkeyPatch, fits_up_to: int, expected: int | None
) -> None:
    def plan(_: Any, __: Any, ___: Any, situation: Situation) -> Planned:
        if situation.lowering_bytes > fits_up_to:
            raise InfeasibleBudgetError("by the model", minimum_bytes=None, budget_bytes=1)
        return planned(situation.lowering_bytes)

    monkeypatch.setattr(inner_inductor, "plan_only", plan)
    too_large = Situation(None, lowering_bytes=100)
    found = inner_inductor._with_less_margin(cast(Any, None), [], cast(Any, None), 0, too_large)

    assert (found is None) == (expected is None)
    if found is not None:
        assert found[0].lowering_bytes == expected
        assert found[1].number == expected  # type: ignore[union-attr]
