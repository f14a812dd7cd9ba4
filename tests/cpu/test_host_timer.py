"""When a call of a compiled graph says what the host spends, and when it does not; clock and device are made up."""

from __future__ import annotations

from typing import Any

import pytest

from fxhome.host_timer import BACKWARD, FORWARD, MAX_CALLS, PATIENCE, QUEUE_LAUNCHES, SAMPLES, SKIPPED_CALLS, HostTimer
from tests.host_tools import Machine


def timer_on(machine: Machine, launches: tuple[int, int] = (100, 200)) -> HostTimer:
    return HostTimer(launches, machine, machine.clock)


def steps(timer: HostTimer, machine: Machine, ahead_us: float, back_us: float, count: int = 1) -> None:
    for _ in range(count):
        timer.timed(machine.work(ahead_us), FORWARD)([])
        timer.timed(machine.work(back_us), BACKWARD)([])


def test_both_sides_are_told_once_and_then_nothing_is_timed() -> None:
    machine = Machine()
    timer = timer_on(machine)
    released: list[bool] = []
    timer.release = lambda: released.append(timer.is_complete)
    steps(timer, machine, 9000.0, 9000.0, SKIPPED_CALLS)
    for _ in range(SAMPLES):
        assert timer.finish() is None
        steps(timer, machine, 1000.0, 2000.0)
    asked = machine.asked
    steps(timer, machine, 1.0, 1.0, 5)
    assert machine.asked == asked
    assert timer.finish() == pytest.approx((1000.0, 2000.0))
    assert timer.finish() is None
    assert released == [True]


def test_a_call_gives_what_it_gave() -> None:
    machine = Machine()
    given = ["an argument"]
    assert timer_on(machine).timed(machine.work(1.0), FORWARD)(given) is given

    def fail(_: Any) -> Any:
        raise KeyError("inside")

    timer = timer_on(machine)
    with pytest.raises(KeyError, match="inside"):
        timer.timed(fail, FORWARD)([])
    steps(timer, machine, 1000.0, 2000.0, SKIPPED_CALLS + SAMPLES)
    assert timer.finish() == pytest.approx((1000.0, 2000.0))


def test_nothing_is_seen_before_the_plan_is_settled() -> None:
    machine = Machine()
    timer = timer_on(machine)
    timer.is_settled = lambda: False
    steps(timer, machine, 1.0, 1.0, MAX_CALLS)
    assert machine.asked == 0
    assert not timer.is_complete


def test_a_step_that_was_disturbed_hardly_counts() -> None:
    machine = Machine()
    timer = timer_on(machine)
    steps(timer, machine, 1000.0, 2000.0, SKIPPED_CALLS + SAMPLES - 1)
    steps(timer, machine, 50_000.0, 60_000.0)
    assert timer.finish() == pytest.approx((1000.0, 2000.0))


def test_a_device_that_is_behind_at_the_start_of_a_step_says_nothing_of_the_host() -> None:
    machine = Machine()
    timer = timer_on(machine)
    machine.idle = False
    steps(timer, machine, 1000.0, 2000.0, MAX_CALLS)
    assert timer.finish() == (None, None)


@pytest.mark.parametrize("back", [QUEUE_LAUNCHES - 100, QUEUE_LAUNCHES - 99])
def test_behind_an_idle_start_a_step_counts_as_far_as_the_queue_holds_it(back: int) -> None:
    """The device is busy from the forward's first kernel to the end: the backward's launches come on top of those."""
    machine = Machine()
    timer = timer_on(machine, (100, back))
    for _ in range(MAX_CALLS):
        machine.idle = True
        timer.timed(machine.work(1000.0), FORWARD)([])
        machine.idle = False
        timer.timed(machine.work(2000.0), BACKWARD)([])
    known = 2000.0 if 100 + back <= QUEUE_LAUNCHES else None
    assert timer.finish() == (pytest.approx(1000.0), known and pytest.approx(known))


def test_a_backward_that_begins_on_an_idle_device_counts_by_itself() -> None:
    machine = Machine()
    timer = timer_on(machine, (QUEUE_LAUNCHES + 1, QUEUE_LAUNCHES))
    steps(timer, machine, 1000.0, 2000.0, MAX_CALLS)
    assert timer.finish() == (None, pytest.approx(2000.0))


def test_a_side_that_can_never_count_is_not_waited_for() -> None:
    machine = Machine()
    timer = timer_on(machine, (100, QUEUE_LAUNCHES + 1))
    steps(timer, machine, 1000.0, 2000.0, SKIPPED_CALLS + SAMPLES)
    assert timer.finish() == (pytest.approx(1000.0), None)
    assert timer_on(machine, (QUEUE_LAUNCHES + 1, QUEUE_LAUNCHES + 1)).finish() == (None, None)


def test_a_side_that_never_counted_is_soon_given_up_where_the_other_is_known() -> None:
    machine = Machine()
    timer = timer_on(machine, (400, QUEUE_LAUNCHES - 300))
    for call in range(1, PATIENCE + 1):
        assert timer.finish() is None
        machine.idle = True
        timer.timed(machine.work(1000.0), FORWARD)([])
        machine.idle = False
        timer.timed(machine.work(2000.0), BACKWARD)([])
        assert timer.is_complete is (call == PATIENCE)
    assert timer.finish() == (pytest.approx(1000.0), None)


def test_a_call_that_asked_the_driver_for_memory_does_not_count() -> None:
    machine = Machine()
    timer = timer_on(machine)

    def allocating(args: Any) -> Any:
        machine.calls += 1
        return machine.work(90_000.0)(args)

    for _ in range(2 * SAMPLES):
        timer.timed(allocating, FORWARD)([])
        timer.timed(machine.work(2000.0), BACKWARD)([])
    assert not timer.is_complete
    steps(timer, machine, 1000.0, 2000.0, SAMPLES)
    assert timer.finish() == pytest.approx((1000.0, 2000.0))


@pytest.mark.parametrize("first", [True, False])
def test_a_step_whose_allocations_are_recorded_does_not_count(first: bool) -> None:
    """Neither the one in which recording begins, nor the one in which it ends."""
    machine = Machine()
    timer = timer_on(machine)
    state = [False]
    timer.is_recorded = lambda: state[0]
    steps(timer, machine, 1000.0, 2000.0, SKIPPED_CALLS)

    def changing(args: Any) -> Any:
        state[0] = first
        return machine.work(90_000.0)(args)

    for _ in range(SAMPLES):
        state[0] = not first
        timer.timed(changing, FORWARD)([])
    state[0] = False
    steps(timer, machine, 1000.0, 2000.0, SAMPLES)
    assert timer.finish() == pytest.approx((1000.0, 2000.0))


def test_what_never_comes_to_an_end_is_given_up() -> None:
    machine = Machine()
    timer = timer_on(machine)
    machine.idle = False
    steps(timer, machine, 1.0, 1.0, MAX_CALLS - 1)
    assert not timer.is_complete
    steps(timer, machine, 1.0, 1.0)
    assert timer.is_complete
