"""Plugs: what the plan says is what a second model of the allocator does, statement by statement."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxhome.passes.best_fit import Heap
from fxhome.passes.extents import without_free_pages
from fxhome.passes.holes import ENDLESS
from fxhome.passes.laid_step import Event, Laid, NoRoomError, Plugs, Statement
from fxhome.passes.lay_blocks import lay, lay_anew
from fxhome.passes.pack_blocks import Packing
from fxhome.passes.plug_holes import plug
from fxhome.passes.steer_blocks import steer
from fxhome.passes.step_lives import StepLives
from tests.allocator_model import PAGE, ModelAllocator

MIB = 1 << 20
BASE = 3 * PAGE


def steered(step: Sequence[Statement], model: ModelAllocator, laid: Laid) -> None:
    """Run a step on the model with the plugs of a plan, and hold each address to the plan's."""
    places: dict[int, int] = {}
    held: set[int] = set()
    for statement in step:
        if statement.hook is None:
            while held:
                model.give(held.pop())
        plugs = laid.plugs.get(statement.hook, Plugs()) if statement.hook is not None else Plugs()
        for address in plugs.gives:
            held.remove(address)
            model.give(address)
        for size, address in plugs.takes:
            assert model.take(size) == address
            held.add(address)
        for i in plugs.stand_ins:
            held.remove(plugs.takes[i][1])
            model.give(plugs.takes[i][1])
        for event in statement.events:
            if event.size_bytes:
                places[event.block] = model.take(event.size_bytes)
                assert places[event.block] == laid.addresses[event.block]
            else:
                model.give(places.pop(event.block))
    while held:
        model.give(held.pop())


def with_weights() -> ModelAllocator:
    model = ModelAllocator(base_page=BASE // PAGE)
    model.take(30 * MIB)
    model.empty_cache()
    return model


def used_by(model: ModelAllocator) -> dict[object, tuple[int, int]]:
    return {("kept", address): (address, size) for address, size in model.used.items()}


def established(step: Sequence[Statement], model: ModelAllocator) -> Laid:
    extent, laid = lay_anew(step, model.ranges(), used_by(model), {})
    assert model.map(extent.size_bytes) == extent.address
    assert tuple(model.ranges()) == extent.ranges == laid.ranges
    return laid


def one_each(text: str) -> list[Statement]:
    """`1+100 2+20 1-`: each allocation is a statement of its own, with what is freed behind it. MiB."""
    found: list[tuple[Event, ...]] = []
    for word in text.split():
        block, size = word.replace("-", "+0").split("+")
        event = Event(int(block), int(float(size) * MIB))
        if event.size_bytes or not found:
            found.append((event,))
        else:
            found[-1] = (*found[-1], event)
    return [Statement(hook, events) for hook, events in enumerate(found)]


def test_a_small_tenant_is_sent_past_the_large_hole() -> None:
    step = one_each("1+100 2+20 1- 3+20 4+100 4- 3- 2-")
    model = with_weights()
    laid = established(step, model)
    assert laid.mapped_bytes == 180 * MIB
    reserved = model.reserved
    steered(step, model, laid)
    assert model.reserved == reserved
    assert laid.plugs


def test_what_goes_to_its_place_by_itself_needs_no_plug() -> None:
    laid = established(one_each("1+100 2+20 2- 1-"), with_weights())
    assert laid.plugs == {}


def test_what_may_as_well_lie_where_it_goes_by_itself_needs_no_plug() -> None:
    model = with_weights()
    laid = established(one_each("1+100 2+10 2- 3+60 4+10 3- 5+20 1- 6+40 7+40 4- 7- 5- 6-"), model)
    assert laid.plugs == {}
    assert laid.mapped_bytes == 220 * MIB  # 170 at once, beside 30


def test_several_blocks_of_one_statement_are_sent_together() -> None:
    step = [
        Statement(0, (Event(1, 60 * MIB), Event(2, 20 * MIB), Event(3, 30 * MIB), Event(2, 0))),
        Statement(1, (Event(4, 20 * MIB), Event(5, 2 * MIB), Event(1, 0))),
        Statement(2, (Event(6, 60 * MIB), Event(3, 0), Event(4, 0), Event(5, 0), Event(6, 0))),
    ]
    model = with_weights()
    laid = established(step, model)
    reserved = model.reserved
    steered(step, model, laid)
    assert model.reserved == reserved


def test_what_is_plugged_for_one_block_leaves_the_place_of_the_next_one_of_its_statement() -> None:
    # Two holes, of 102 and 190 MiB. The first block is to pass the one that fits better, the second to lie at its end.
    heap = Heap(((0, 300 * MIB),), {"between": (102 * MIB, 8 * MIB)})
    made = [(Event(1, 90 * MIB), 110 * MIB), (Event(2, 2 * MIB), 100 * MIB)]
    plugged = plug(heap, made, ENDLESS, ENDLESS, 0)
    assert plugged.is_clear
    assert [heap.take(event.block, event.size_bytes) for event, _ in made] == [target for _, target in made]


def test_without_hooks_blocks_go_where_best_fit_puts_them() -> None:
    step = [Statement(None, s.events) for s in one_each("1+100 2+20 1- 3+20 4+100 4- 3- 2-")]
    model = with_weights()
    laid = established(step, model)
    assert laid.plugs == {}
    reserved = model.reserved
    steered(step, model, laid)
    assert model.reserved == reserved


def test_a_step_that_does_not_fit_into_what_is_mapped_is_refused() -> None:
    model = with_weights()
    with pytest.raises(NoRoomError):
        lay(one_each("1+100 1-"), model.ranges(), used_by(model), {})


def test_what_a_step_leaves_is_told_under_its_next_name() -> None:
    model = with_weights()
    model.give(model.take(100 * MIB))
    old = model.take(20 * MIB)
    step = [Statement(0, (Event(1, 50 * MIB), Event(-1, 0))), Statement(1, (Event(2, 20 * MIB), Event(1, 0)))]
    used = used_by(model)
    del used["kept", old]
    laid = lay(step, model.ranges(), {**used, -1: (old, 20 * MIB)}, {-1: 2})
    # It comes back to where the one before it lay, so that all steps start alike.
    assert laid.end[-1] == (old, 20 * MIB)


def test_a_packing_fits_into_what_may_be_mapped_or_is_refused() -> None:
    step = one_each("1+100 2+20 1- 3+20 4+100 4- 3- 2-")
    model = with_weights()
    extent, laid = lay_anew(step, model.ranges(), used_by(model), {}, most_bytes=180 * MIB)
    assert (extent.size_bytes, laid.mapped_bytes) == (140 * MIB, 180 * MIB)
    with pytest.raises(NoRoomError, match=r"that fits into 160\.00 MiB"):
        lay_anew(step, model.ranges(), used_by(model), {}, most_bytes=160 * MIB)


@given(st.lists(st.tuples(st.integers(2, 90), st.booleans()), min_size=1, max_size=12))
def test_free_pages_are_told_before_they_are_given_back(blocks: list[tuple[int, bool]]) -> None:
    model = ModelAllocator(base_page=3)
    taken = [(model.take(size * MIB + 512), stays) for size, stays in blocks]
    for address, stays in taken:
        if not stays:
            model.give(address)
    expected = without_free_pages(model.ranges(), used_by(model))
    model.empty_cache()
    assert tuple(model.ranges()) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_random_steps_are_steered_as_planned_and_map_nothing(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(2, 30)
    events: list[list[Event]] = [[] for _ in range(count)]
    block = 0
    for i in range(count):
        for _ in range(draw.choice([1, 1, 2, 3])):
            block += 1
            size = draw.choice([2, 3, 5, 8, 20, 40]) * MIB + 512 * draw.randrange(3000)
            events[i].append(Event(block, size))
            stop = min(count - 1, i + draw.choice([0, 0, 1, 3, count]))
            events[stop].append(Event(block, 0))
    step = [Statement(hook if draw.random() < 0.85 else None, tuple(some)) for hook, some in enumerate(events)]
    model = with_weights()
    laid = established(step, model)
    reserved = model.reserved
    assert reserved == laid.mapped_bytes
    alive = most = sum(model.used.values())
    sizes = {event.block: event.size_bytes for event in itertools.chain(*events) if event.size_bytes}
    for event in itertools.chain(*events):
        alive += event.size_bytes or -sizes[event.block]
        most = max(most, alive)
    for _ in range(2):
        steered(step, model, laid)
        assert model.reserved == reserved
        assert len(model.used) == 1
    assert model.most_allocated == most


TENANTS = "1+100 2+20 1- 3+30 4+40 5+50 6+100 6- 5- 4- 3- 2-"
"""The place of the first block is meant for the last one; what comes between would go there by itself."""
PLACES = {1: 30, 2: 130, 3: 150, 4: 180, 5: 220, 6: 30}


def sent_past_the_hole(step: Sequence[Statement]) -> Laid:
    """Steered to PLACES in 300 MiB, of which 30 are in use."""
    lives = StepLives(step, {"weights": (0, 30 * MIB)}, {}, 0)
    packing = Packing(tuple(PLACES[block] * MIB for block in lives.blocks), 270 * MIB)
    return steer(lives, ((0, 300 * MIB),), packing)


def test_a_plug_is_held_until_its_place_is_needed() -> None:
    laid = sent_past_the_hole(one_each(TENANTS))
    assert laid.addresses == {block: place * MIB for block, place in PLACES.items()}
    assert laid.plugs == {2: Plugs(takes=((100 * MIB, 30 * MIB),)), 5: Plugs(gives=(30 * MIB,))}


def test_the_end_of_a_call_gives_back_what_is_held() -> None:
    """No hook stands between two calls: what is made there finds the hole."""
    step = [Statement(None if s.hook == 3 else s.hook, s.events) for s in one_each(TENANTS)]
    laid = sent_past_the_hole(step)
    assert laid.plugs[2].takes == ((100 * MIB, 30 * MIB),)
    assert laid.addresses[4] == 30 * MIB
    assert not any(plugs.gives for plugs in laid.plugs.values())


def test_what_there_is_no_room_for_is_given_back_before_it_is_needed() -> None:
    """The hole cannot stay plugged beside the tenants where only 190 MiB may be in use at once, plugs included."""
    lives = StepLives(one_each(TENANTS), {"weights": (0, 30 * MIB)}, {}, 0)
    lives.most_bytes = 190 * MIB
    packing = Packing(tuple(PLACES[block] * MIB for block in lives.blocks), 270 * MIB)
    plugs = steer(lives, ((0, 400 * MIB),), packing).plugs
    assert plugs[2].takes == ((100 * MIB, 30 * MIB),)  # beside 80 that are in use with the third block
    assert plugs[3].gives == (30 * MIB,)
