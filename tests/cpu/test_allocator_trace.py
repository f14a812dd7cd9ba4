"""The allocator's history as a step: markers, names, what is carried from step to step, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fxhome.allocator_trace import MARK_BYTES, UnsteadyError, recorded_step, snapshot_of
from fxhome.passes.laid_step import Event, Statement

MIB = 1 << 20
Entry = dict[str, Any]


def entries(text: str) -> list[Entry]:
    """`5+30 5- !`: 30 MiB allocated at 5 MiB, freed; a marker."""
    found: list[Entry] = []
    sizes: dict[int, int] = {}
    for word in text.split():
        if word == "!":
            found += [_entry(action, 1, MARK_BYTES) for action in ("alloc", "free_requested", "free_completed")]
        elif word.endswith("-"):
            address = int(word[:-1])
            size = sizes.pop(address, 7 * MIB)
            found += [_entry(action, address, size) for action in ("free_requested", "free_completed")]
        else:
            address, size = int(word.split("+")[0]), int(float(word.split("+")[1]) * MIB)
            sizes[address] = size
            found.append(_entry("alloc", address, size))
    return found


def _entry(action: str, address: int, size: int, stream: int = 0) -> Entry:
    return {"action": action, "addr": address, "size": size, "stream": stream}


def test_statements_lie_between_their_markers() -> None:
    step = recorded_step(entries("9+3 9- ! 5+30 ! 6+2 5- ! 6-"), [0, 1, None], [], 0)
    assert step.statements == (
        Statement(None, (Event(1, 3 * MIB), Event(1, 0))),
        Statement(0, (Event(2, 30 * MIB),)),
        Statement(1, (Event(3, 2 * MIB), Event(2, 0))),
        Statement(None, (Event(3, 0),)),
    )
    assert step.carried == {}
    assert not step.gives_back


def test_small_blocks_and_other_streams_are_left_out() -> None:
    found = [*entries("! 5+1 6+0.2"), _entry("alloc", 9, 40 * MIB, stream=3), _entry("segment_map", 7, 20 * MIB)]
    assert recorded_step(found, [0], [], 0).statements == ()


def test_sizes_are_what_the_allocator_rounds_them_to() -> None:
    (statement,) = recorded_step(
        [*entries("!"), _entry("alloc", 5, 3 * MIB + 1), *entries("5-")], [0], [], 0
    ).statements
    assert statement.events[0] == Event(1, 3 * MIB + 512)


def test_what_was_there_before_is_carried_by_what_is_left() -> None:
    step = recorded_step(entries("! 4- 5+7 6+9 6-"), [0], [], 0)
    assert step.carried == {-1: 1}
    assert step.left == {-1: (5, 7 * MIB)}
    assert step.statements[0].events[0] == Event(-1, 0)


def test_parts_of_a_step_begin_with_what_the_ones_before_left() -> None:
    found = entries("! 5+30 6+4 5- ! ! 5+30 5- ! 6-")
    step = recorded_step(found, [0, None, 10, None], [1], 0)
    assert step.starts == (0, 4 * MIB)
    assert step.carried == {}


def test_memory_that_was_given_back_meanwhile_is_told() -> None:
    assert recorded_step([*entries("!"), _entry("segment_unmap", 7, 20 * MIB)], [0], [], 0).gives_back


def test_memory_that_was_asked_for_in_vain_changes_nothing() -> None:
    refused = {"action": "oom", "device_free": 0, "size": 9 << 30, "stream": 0}
    step = recorded_step([*entries("! 5+7"), refused, *entries("5-")], [0], [], 0)
    assert step.statements == (Statement(0, (Event(1, 7 * MIB), Event(1, 0))),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("! 5+30", "still there"),
        ("! 4-", "is not made again"),
        ("5+30 5-", "0 markers in the history of 1 hooks"),
    ],
)
def test_steps_that_tell_nothing_of_the_next_one(text: str, why: str) -> None:
    with pytest.raises(UnsteadyError, match=why):
        recorded_step(entries(text), [0], [], 0)


def test_a_block_that_waits_for_another_stream_is_not_steady() -> None:
    with pytest.raises(UnsteadyError, match="later than it is given up"):
        recorded_step([*entries("! 5+30"), _entry("free_requested", 5, 30 * MIB), *entries("6+2")], [0], [], 0)


def segment(**more: Any) -> dict[str, Any]:
    blocks = [
        {"address": 100, "size": 40, "state": "active_allocated"},
        {"address": 140, "size": 60, "state": "inactive"},
    ]
    base = {"device": 0, "stream": 0, "segment_type": "large", "is_expandable": True, "segment_pool_id": (0, 0)}
    return base | {"address": 100, "total_size": 100, "blocks": blocks} | more


def test_a_snapshot_of_one_stream_s_large_blocks() -> None:
    others = [segment(device=1), segment(stream=5), segment(segment_type="small"), segment(segment_pool_id=(0, 1))]
    shown = snapshot_of([*others, segment()], 0, 0)
    assert shown.ranges == ((100, 200),)
    assert shown.used == {100: 40}


def test_what_else_is_reserved_counts_unless_it_is_only_a_cache() -> None:
    free = [{"address": 100, "size": 100, "state": "inactive"}]
    others = [segment(stream=5), segment(stream=5, blocks=free, total_size=3000), segment(device=1, total_size=3000)]
    small = segment(segment_type="small", blocks=free, total_size=20)
    private = segment(segment_pool_id=(0, 1), blocks=free, total_size=7)
    shown = snapshot_of([*others, small, private, segment()], 0, 0)
    assert shown.elsewhere_bytes == 100 + 20 + 7


def test_a_step_is_spread_over_what_it_touched_and_what_is_in_use() -> None:
    found = [*entries("!"), _entry("alloc", 0, 30 * MIB), *_freed(0, 30 * MIB), _entry("alloc", 20 * MIB, 30 * MIB)]
    found += _freed(20 * MIB, 30 * MIB)
    step = recorded_step(found, [0], [], 0)
    assert step.touched == ((0, 50 * MIB),)
    assert step.spread_bytes({40 * MIB: 30 * MIB, 900 * MIB: 5 * MIB}) == 75 * MIB


def _freed(address: int, size: int) -> list[Entry]:
    return [_entry(action, address, size) for action in ("free_requested", "free_completed")]


def test_snapshots_that_cannot_be_laid_on() -> None:
    with pytest.raises(UnsteadyError, match="not expandable"):
        snapshot_of([segment(is_expandable=False)], 0, 0)
    waiting = [{"address": 100, "size": 100, "state": "active_pending_free"}]
    with pytest.raises(UnsteadyError, match="waits for another stream"):
        snapshot_of([segment(blocks=waiting)], 0, 0)
