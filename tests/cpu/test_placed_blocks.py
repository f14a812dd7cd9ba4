"""Steps on a model of the caching allocator: laid, they take no more than was promised, and nothing leaks."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxhome import block_layout, placed_blocks
from fxhome.placed_blocks import (
    MAX_FAILURES,
    MAX_RECORDINGS,
    MAX_TOGETHER,
    SETTLED_STEPS,
    Calls,
    PlacedBlocks,
    unsteered,
)
from tests.allocator_model import PAGE, ModelAllocator

MIB = 1 << 20
Statement = tuple[tuple[str, float], ...]
"""(name, MiB): allocated; zero MiB: freed."""


def statements(text: str) -> list[Statement]:
    """`a+40 w+3 w- | b+20 a-`: statements, sizes in MiB."""
    found = []
    for part in text.split("|"):
        words = part.split()
        found.append(tuple((w[:-1], 0.0) if w[-1] == "-" else (w.split("+")[0], float(w.split("+")[1])) for w in words))
    return found


@dataclass
class Loop:
    """A training loop: statements of the forward, of the backward, and what comes between and behind without hooks."""

    allocator: ModelAllocator
    forward: list[Statement]
    backward: list[Statement]
    between: Statement = ()
    behind: Statement = ()
    alive: dict[str, int] = field(default_factory=dict)
    blocks: PlacedBlocks = field(init=False)
    notes: list[str] = field(default_factory=list)
    surprise: Callable[[int], None] = lambda _: None
    is_expected: bool = True
    limit_bytes: int = 1 << 40
    hooked_calls: int = 0
    hooks_met: int = 0

    def __post_init__(self) -> None:
        self.blocks = PlacedBlocks(
            self.allocator,
            self._calls(lambda _: None),
            self._hooked,
            limit_bytes=self.limit_bytes,
            is_expected=self.is_expected,
        )
        self.blocks.tell = self.notes.append

    def _calls(self, at: Callable[[int], None]) -> Calls:
        behind = len(self.forward) + 1
        return Calls(
            lambda _: self._run(at, self.forward, 0),
            lambda _: self._run(at, self.backward, behind),
            behind + len(self.backward) + 1,
        )

    def _hooked(self, at: Callable[[int], None], only: Container[int] | None) -> Calls:
        def thinned(number: int) -> None:
            if only is None or number in only:
                self.hooks_met += 1
                at(number)

        calls = self._calls(thinned)

        def counted(args: Any) -> Any:
            self.hooked_calls += 1
            return calls.forward(args)

        return Calls(counted, calls.backward, calls.hooks)

    def do(self, statement: Statement) -> None:
        for name, mib in statement:
            if mib:
                old = self.alive.pop(name, None)
                self.alive[name] = self.allocator.take(int(mib * MIB))
                if old is not None:  # a name is bound again: the old value dies behind it
                    self.allocator.give(old)
            elif name in self.alive:
                self.allocator.give(self.alive.pop(name))

    def _run(self, at: Callable[[int], None], body: list[Statement], first: int) -> None:
        for number, statement in enumerate(body, first):
            at(number)
            self.surprise(number)
            self.do(statement)
        at(first + len(body))

    def step(self, backward: bool = True) -> None:
        self.blocks.forward(None)
        if backward:
            self.do(self.between)
            self.blocks.backward(None)
        self.do(self.behind)

    def steps(self, count: int) -> int:
        """Run some; the bytes that are reserved at most meanwhile."""
        self.allocator.most_reserved = self.allocator.reserved
        for _ in range(count):
            self.step()
        return self.allocator.most_reserved


WARM = SETTLED_STEPS + 2
"""Steps up to and with the first one that is steered."""


def scattered(allocator: ModelAllocator | None = None, **more: Any) -> Loop:
    """Best fit needs 220 MiB, and 140 are alive at most: a small tenant moves into the large hole."""
    loop = Loop(
        allocator or ModelAllocator(),
        statements("a+100 | b+20 a- | c+20"),
        statements("d+100 | d- c- b-"),
        **more,
    )
    loop.do((("weights", 30.0),))
    return loop


def test_a_scattered_step_takes_what_it_needs_once_it_is_laid() -> None:
    loop = scattered()
    before = loop.steps(SETTLED_STEPS + 1)
    loop.step()
    assert loop.steps(3) == 180 * MIB < before
    assert loop.blocks.laid is not None
    assert loop.blocks.laid.mapped_bytes == loop.allocator.reserved
    assert (loop.blocks.failures, loop.blocks.steered_steps) == (0, 3)
    assert loop.notes == ["blocks are laid: the allocator takes 180.00 MiB for large ones; it took 260.00 MiB"]


def test_steered_steps_meet_no_hook_but_those_with_something_to_do() -> None:
    loop = scattered()
    loop.steps(WARM)
    assert loop.blocks.laid is not None
    busy = set(loop.blocks.laid.plugs)
    assert 0 < len(busy) < loop.blocks.hooks
    loop.hooks_met = 0
    loop.steps(3)
    assert loop.hooks_met == 3 * len(busy)
    assert loop.blocks.failures == 0


def test_under_a_cap_nothing_is_given_back_any_more() -> None:
    def loop() -> Loop:
        made = Loop(
            ModelAllocator(cap_bytes=220 * MIB),
            statements("a+30 | b+60 | a- c+60 | c- d+100"),
            statements("d- e+100 | e- f+20 | f- g+60 | b- g- h+60 h-"),
        )
        made.do((("weights", 30.0),))
        return made

    free, laid = loop(), loop()
    free.blocks.is_settled = lambda: False
    for each in (free, laid):
        each.steps(WARM)
        each.allocator.remaps = 0
        each.steps(3)
    assert free.allocator.remaps >= 3
    assert laid.allocator.remaps == 0
    assert laid.blocks.steered_steps == 3


def test_room_below_everything_else_is_taken_as_it_comes() -> None:
    loop = scattered()
    loop.do((("early", 400.0), ("late weights", 30.0), ("early", 0.0)))
    before = loop.steps(SETTLED_STEPS + 1)
    loop.step()
    assert loop.steps(3) < before
    assert loop.blocks.laid is not None
    assert loop.blocks.failures == 0


def test_only_the_step_s_own_blocks_are_left() -> None:
    loop = scattered()
    loop.steps(WARM + 2)
    assert set(loop.allocator.used) == {loop.alive["weights"]}
    assert not loop.allocator.small


def test_gradients_that_are_dropped_before_the_next_forward() -> None:
    loop = scattered(behind=(("state", 40.0), ("g", 0.0), ("state", 0.0)))
    loop.backward[0] = (("d", 100.0), ("g", 12.0))
    loop.steps(WARM)
    assert loop.steps(3) == loop.allocator.reserved
    assert loop.blocks.failures == 0
    assert loop.blocks.steered_steps == 3


def test_gradients_that_live_through_the_next_forward_keep_their_place() -> None:
    loop = scattered(between=(("g", 0.0),))
    loop.backward[0] = (("d", 100.0), ("g", 12.0))
    loop.steps(WARM)
    reserved = loop.allocator.reserved
    assert loop.steps(3) == reserved
    assert loop.blocks.failures == 0
    assert loop.blocks.steered_steps == 3


def test_a_batch_that_takes_turns_with_the_one_before() -> None:
    loop = scattered(behind=(("batch", 25.0),))
    loop.do((("batch", 25.0),))
    loop.steps(WARM)
    reserved = loop.allocator.reserved
    assert loop.steps(6) == reserved
    assert loop.blocks.failures == 0
    assert loop.blocks.steered_steps == 6


def test_gradients_that_are_added_up_over_several_backwards() -> None:
    loop = scattered()
    first = loop.backward[0]

    def three() -> None:
        loop.do((("g", 0.0),))
        loop.backward[0] = (*first, ("g", 12.0))
        loop.step()
        for _ in range(2):
            loop.backward[0] = (*first, ("more", 12.0), ("more", 0.0))
            loop.step()
        loop.do((("state", 40.0), ("state", 0.0)))

    for _ in range(6):
        three()
    assert loop.blocks.laid is not None
    steered, failures, reserved = loop.blocks.steered_steps, loop.blocks.failures, loop.allocator.reserved
    loop.allocator.most_reserved = 0
    for _ in range(3):
        three()
    assert (loop.blocks.steered_steps, loop.blocks.failures) == (steered + 9, failures)
    assert loop.allocator.most_reserved == reserved < 260 * MIB
    assert set(loop.allocator.used) == {loop.alive["weights"], loop.alive["g"]}


def test_a_mistake_in_laying_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(block_layout, "lay_anew", fail)
    loop = scattered()
    loop.steps(WARM + 2)
    assert loop.notes == ["blocks are left to the allocator: KeyError: 'a mistake'"]


def test_an_exception_in_the_middle_gives_every_plug_back() -> None:
    loop = scattered()
    loop.steps(WARM)

    def fail(number: int) -> None:
        if number == 2:
            raise ValueError("in the middle")

    loop.surprise = fail
    with pytest.raises(ValueError, match="in the middle"):
        loop.step()
    loop.do((("a", 0.0), ("b", 0.0), ("c", 0.0)))
    assert set(loop.allocator.used) == {loop.alive["weights"]}
    loop.surprise = lambda _: None
    loop.steps(2)
    assert loop.blocks.laid is not None
    assert loop.blocks.steered_steps >= 1


def test_a_forward_without_a_backward_is_passed_over() -> None:
    loop = scattered()
    loop.steps(WARM)
    loop.step(backward=False)
    loop.do((("b", 0.0), ("c", 0.0)))
    assert set(loop.allocator.used) == {loop.alive["weights"]}
    failed = loop.blocks.failures
    loop.steps(3)
    assert loop.blocks.failures == failed + 1
    assert loop.blocks.laid is not None


def test_a_step_with_other_sizes_is_left_alone() -> None:
    loop = scattered()
    loop.steps(WARM)
    usual = loop.forward[1]
    loop.forward[1] = (("b", 33.0), ("a", 0.0))
    loop.step()
    loop.forward[1] = usual
    held = set(loop.allocator.used)
    assert held == {loop.alive["weights"]}
    loop.steps(2)
    assert loop.blocks.steered_steps >= 2


def test_other_sizes_from_some_step_on_are_recorded_again() -> None:
    loop = scattered()
    loop.steps(WARM)
    loop.forward[0] = (("a", 120.0),)
    loop.backward[0] = (("d", 120.0),)
    loop.steps(MAX_FAILURES + WARM + 1)
    steered, failures = loop.blocks.steered_steps, loop.blocks.failures
    assert loop.steps(3) == 200 * MIB
    assert (loop.blocks.steered_steps, loop.blocks.failures) == (steered + 3, failures)


def test_memory_that_someone_gave_back_is_mapped_again() -> None:
    loop = scattered()
    loop.steps(WARM)
    loop.allocator.empty_cache()
    loop.step()
    assert loop.blocks.failures == 0
    assert loop.steps(3) == 180 * MIB


def test_what_other_streams_map_changes_nothing() -> None:
    loop = scattered()
    loop.steps(WARM)
    for number in range(2 * MAX_FAILURES):
        loop.allocator.other_streams_bytes = (number % 3) * PAGE
        loop.step()
    loop.allocator.other_streams_bytes = 0
    loop.allocator.empty_cache()
    loop.steps(2)
    assert (loop.blocks.steered_steps, loop.blocks.failures) == (2 * MAX_FAILURES + 2, 0)
    assert len(loop.notes) == 1


def test_an_evaluation_now_and_then_costs_one_mapping() -> None:
    loop = scattered()
    loop.steps(WARM)
    for _ in range(10):
        loop.do((("evaluation", 300.0), ("evaluation", 0.0)))
        steered = loop.blocks.steered_steps
        loop.steps(4)
        assert loop.blocks.steered_steps == steered + 4
    assert loop.blocks.failures == 0
    assert len(loop.notes) == 1


def test_who_empties_the_cache_in_every_step_is_left_alone() -> None:
    loop = scattered()
    for _ in range(40):
        loop.step()
        loop.allocator.empty_cache()
    assert loop.notes[-1].startswith("blocks are left to the allocator")
    assert set(loop.allocator.used) == {loop.alive["weights"]}


def test_what_else_becomes_alive_is_met_with_another_recording() -> None:
    loop = scattered()
    loop.steps(WARM)
    loop.do((("more weights", 30.0),))
    loop.steps(MAX_FAILURES + WARM)
    steered = loop.blocks.steered_steps
    loop.steps(3)
    assert loop.blocks.steered_steps == steered + 3


def test_steps_that_never_repeat_themselves_are_given_up() -> None:
    loop = scattered()
    for number in range(20 * MAX_RECORDINGS):
        loop.forward[1] = (("b", 20.0 + number % 7 * number), ("a", 0.0))
        loop.step()
    assert loop.notes[-1].startswith("blocks are left to the allocator")
    assert loop.allocator.entries is None


def test_a_step_that_leaves_more_each_time_is_not_laid() -> None:
    loop = scattered()
    for number in range((MAX_TOGETHER + 3) * MAX_RECORDINGS):
        loop.behind = ((f"kept {number}", 3.0),)
        loop.step()
    assert loop.notes == ["blocks are left to the allocator: a block of 3145728 bytes that the step makes is still "
                          "there behind it"]  # fmt: skip


def test_a_history_that_someone_else_records_is_not_touched() -> None:
    loop = scattered()
    loop.allocator.others_record = True
    loop.steps(WARM + 2)
    assert loop.allocator.entries is None
    assert loop.blocks.laid is None
    loop.allocator.others_record = False
    loop.steps(3)
    assert loop.blocks.laid is not None


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_training_that_ends_while_it_is_recorded_keeps_nobody_from_it(is_dropped: bool) -> None:
    allocator = ModelAllocator()
    first = scattered(allocator)
    first.steps(SETTLED_STEPS + 1)
    assert allocator.entries is not None
    if is_dropped:
        del first
        gc.collect()
        assert allocator.entries is None
    second = scattered(allocator)
    second.steps(WARM + 1)
    assert second.blocks.laid is not None
    assert allocator.entries is None


def test_unsettled_and_paused_steps_are_left_alone() -> None:
    loop = scattered()
    loop.blocks.is_settled = lambda: False
    loop.steps(WARM + 2)
    assert loop.blocks.laid is None
    loop.blocks.is_settled = lambda: True
    loop.steps(2)
    with unsteered():
        loop.step()
    assert loop.blocks.laid is None
    loop.steps(2)
    assert loop.blocks.laid is not None


def test_room_that_is_not_to_be_had_leaves_everything_as_it_was() -> None:
    loop = scattered()
    before = loop.steps(SETTLED_STEPS + 1)
    loop.allocator.cap_bytes = 150 * MIB
    assert loop.steps(5) == before
    assert loop.allocator.remaps == 0
    assert loop.notes == ["blocks are left to the allocator: no packing of its blocks was found that fits into "
                          "150.00 MiB"]  # fmt: skip


def test_memory_that_is_refused_is_not_asked_for_again() -> None:
    loop = scattered()
    before = loop.steps(SETTLED_STEPS + 1)
    loop.allocator.refusals = 1
    assert loop.steps(4) == before
    assert loop.allocator.refusals == 0
    assert loop.notes == ["blocks are left to the allocator: no packing of its blocks was found that fits into "
                          "179.10 MiB"]  # fmt: skip


def test_a_cap_that_comes_later_is_no_matter_where_the_layout_fits_and_ends_it_where_it_does_not() -> None:
    loop = scattered()
    loop.steps(WARM)
    loop.allocator.cap_bytes = 180 * MIB
    loop.allocator.empty_cache()
    loop.steps(3)
    assert loop.allocator.reserved == 180 * MIB
    assert loop.blocks.steered_steps == 3
    loop.allocator.other_streams_bytes = 20 * MIB
    loop.allocator.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        loop.step()
    assert loop.notes[-1] == ("blocks are left to the allocator: no packing of its blocks was found that fits into "
                              "160.00 MiB")  # fmt: skip


def test_two_plans_that_take_turns_are_not_both_laid() -> None:
    allocator = ModelAllocator()
    one, other = (scattered(allocator) for _ in range(2))
    for _ in range(30):
        one.step()
        other.step()
    assert one.blocks._mode is placed_blocks._Mode.OFF or other.blocks._mode is placed_blocks._Mode.OFF
    assert set(allocator.used) == {one.alive["weights"], other.alive["weights"]}


def test_steps_that_are_not_scattered_have_no_hooks_and_are_rarely_looked_at() -> None:
    loop = scattered(is_expected=False)
    free = scattered()
    free.blocks.is_settled = lambda: False
    assert loop.steps(300) == free.steps(300)
    assert loop.allocator.looks == 6 + 2 * 6
    assert loop.hooked_calls == 0
    assert loop.blocks.hooks == 0
    assert loop.notes == []


def test_steps_that_are_seen_to_take_too_much_are_laid() -> None:
    loop = scattered(is_expected=False, limit_bytes=200 * MIB)
    loop.steps(SETTLED_STEPS)
    assert loop.hooked_calls == 0
    loop.steps(2)
    assert loop.steps(3) == 180 * MIB
    assert loop.hooked_calls == 5
    assert loop.notes == [
        "the allocator took 260.00 MiB for large blocks: a step was recorded",
        "blocks are laid: the allocator takes 180.00 MiB for large ones; it took 260.00 MiB",
    ]


def test_steps_that_are_seen_to_map_memory_anew_are_laid() -> None:
    loop = Loop(
        ModelAllocator(cap_bytes=220 * MIB),
        statements("a+30 | b+60 | a- c+60 | c- d+100"),
        statements("d- e+100 | e- f+20 | f- g+60 | b- g- h+60 h-"),
        is_expected=False,
    )
    loop.do((("weights", 30.0),))
    loop.steps(WARM + 1)
    loop.allocator.remaps = 0
    loop.steps(3)
    assert loop.allocator.remaps == 0
    assert loop.blocks.steered_steps == 3
    assert loop.notes[0] == "the allocator gave memory back and mapped it anew in a step: a step was recorded"


def test_a_cap_that_comes_later_is_seen_later() -> None:
    loop = Loop(
        ModelAllocator(),
        statements("a+30 | b+60 | a- c+60 | c- d+100"),
        statements("d- e+100 | e- f+20 | f- g+60 | b- g- h+60 h-"),
        is_expected=False,
    )
    loop.do((("weights", 30.0),))
    loop.steps(40)
    loop.allocator.empty_cache()
    loop.allocator.cap_bytes = 220 * MIB
    loop.steps(64 + SETTLED_STEPS - 40 + 2)
    assert loop.hooked_calls == 1
    loop.allocator.remaps = 0
    loop.steps(4)
    assert loop.allocator.remaps == 0
    assert loop.blocks.laid is not None


def test_what_something_else_left_reserved_is_not_the_step_s_fault() -> None:
    loop = Loop(ModelAllocator(), statements("a+100 | b+20"), statements("b- | a-"), is_expected=False)
    loop.limit_bytes = loop.blocks.watch.limit_bytes = 200 * MIB
    loop.do((("weights", 30.0), ("evaluation", 500.0), ("evaluation", 0.0)))
    reserved = loop.allocator.reserved
    loop.steps(40)
    assert 0 < loop.hooked_calls <= 12
    assert loop.notes == []
    assert loop.allocator.reserved == reserved
    assert loop.allocator.entries is None


def test_an_evaluation_that_maps_memory_anew_is_not_the_step_s_fault() -> None:
    loop = Loop(
        ModelAllocator(cap_bytes=300 * MIB),
        statements("a+100 | b+20"),
        statements("b- | a-"),
        behind=(("evaluation", 190.0), ("evaluation", 0.0), ("other", 250.0), ("other", 0.0)),
        is_expected=False,
    )
    loop.do((("weights", 30.0),))
    loop.steps(1)
    assert loop.allocator.remaps
    loop.behind = ()
    loop.steps(SETTLED_STEPS)
    loop.do((("other", 260.0), ("other", 0.0)))
    loop.steps(3)
    assert loop.notes == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6))
def test_random_steps_take_what_was_promised_and_never_more_than_before(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(3, 25)
    body: list[list[tuple[str, float]]] = [[] for _ in range(count)]
    for i in range(count):
        for k in range(draw.choice([1, 1, 1, 2])):
            body[i].append((f"t{i}.{k}", draw.choice([2, 3, 5, 8, 20, 40]) + draw.randrange(9) / 8))
            stop = min(count - 1, i + draw.choice([0, 1, 2, count]))
            body[stop].append((f"t{i}.{k}", 0.0))
    half = count // 2
    allocator = ModelAllocator()
    loop = Loop(allocator, [tuple(s) for s in body[:half]], [tuple(s) for s in body[half:]])
    loop.do((("weights", 30.0),))
    before = loop.steps(SETTLED_STEPS + 1)
    most_allocated = allocator.most_allocated
    loop.step()
    if loop.blocks.laid is None:
        assert loop.notes == ["blocks are left to the allocator: no packing of its blocks was found that takes less"]
        return
    most = loop.steps(3)
    assert most < before
    assert most == loop.blocks.laid.mapped_bytes
    assert allocator.most_allocated == most_allocated, "no counter shows a plug"
    assert loop.blocks.failures == 0
    assert loop.blocks.steered_steps == 3
    assert set(allocator.used) == {loop.alive["weights"]}
    assert PAGE * (most // PAGE) == most
