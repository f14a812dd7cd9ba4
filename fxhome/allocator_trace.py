"""What the caching allocator did in one step, from its own history, as a step that can be laid out.

    entries (alloc, free_requested, free_completed, ...) with a marker at each hook + the order of the hooks
        ->  statements of named blocks; what was there before and freed on the way; what is left at the end

A marker is an allocation of MARK_BYTES that is freed at once. Only large blocks (above SMALL_BYTES) of one stream are
told: small ones and other streams' have segments of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxhome.passes.allocator import SMALL_BYTES
from fxhome.passes.best_fit import rounded
from fxhome.passes.laid_step import Event, Statement
from fxhome.passes.ranges import Ranges, joined, total_bytes

MARK_BYTES = 77


class UnsteadyError(Exception):
    """A step that tells nothing of the next one, with the reason."""


class UnfinishedError(UnsteadyError):
    """A step that leaves more than it found: more may belong to it."""


class BeginsError(UnsteadyError):
    """A step that leaves less than it found: it was the last part of one, and another begins here."""


@dataclass(frozen=True)
class RecordedStep:
    """Blocks that the step allocates are named 1, 2, ...; those that it frees and found there -1, -2, ...

    carried: those it found, and what it leaves in their place. left: (address, size in bytes) of the latter at the end
    of the step, by the names at the start of the next one. gives_back: the allocator unmapped pages meanwhile.
    starts: bytes more than at its start that are allocated where each of its parts begins. touched: (start, end) of
    addresses where its blocks lay.
    """

    statements: tuple[Statement, ...]
    carried: Mapping[int, int]
    left: Mapping[int, tuple[int, int]]
    gives_back: bool
    starts: tuple[int, ...]
    touched: Ranges

    def spread_bytes(self, used: Mapping[int, int]) -> int:
        """Bytes of memory that the step was spread over, with what is in use, as {address: size in bytes}."""
        found = joined([*self.touched, *((address, address + size) for address, size in used.items())])
        return total_bytes(found)


@dataclass(frozen=True)
class Snapshot:
    """What is mapped for one stream's large blocks, as (start, end), and those in use, as {address: size in bytes}.
    elsewhere_bytes: what else is reserved; other streams' segments that hold nothing are left out, small blocks'
    are not: they come back.
    """

    ranges: Ranges
    used: Mapping[int, int]
    elsewhere_bytes: int = 0


def snapshot_of(segments: Sequence[Mapping[str, Any]], device: int, stream: int) -> Snapshot:
    """The state that torch.cuda.memory._snapshot()["segments"] shows. Raises UnsteadyError where segments are not
    expandable or blocks wait for another stream.
    """
    ranges: list[tuple[int, int]] = []
    used: dict[int, int] = {}
    elsewhere_bytes = 0
    for segment in segments:
        if segment["device"] != device:
            continue
        is_private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        if segment["stream"] != stream or segment["segment_type"] != "large" or is_private:
            is_cache = segment["segment_type"] == "large" and not is_private
            if not is_cache or any(block["state"] != "inactive" for block in segment["blocks"]):
                elsewhere_bytes += int(segment["total_size"])
            continue
        if not segment.get("is_expandable", False):
            raise UnsteadyError("the allocator's segments are not expandable")
        ranges.append((int(segment["address"]), int(segment["address"]) + int(segment["total_size"])))
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                used[int(block["address"])] = int(block["size"])
            elif block["state"] != "inactive":
                raise UnsteadyError("a block waits for another stream")
    return Snapshot(tuple(sorted(ranges)), used, elsewhere_bytes)


def recorded_step(
    entries: Sequence[Mapping[str, Any]], hooks: Sequence[int | None], begins: Sequence[int], stream: int
) -> RecordedStep:
    """The step between the first entry and the last. hooks: in the order of their markers; what follows one belongs to
    it; None where what follows cannot be plugged. begins: which of the markers stand where a further part of the step
    begins. Raises UnsteadyError.
    """
    events: list[list[Event]] = [[]]
    alive: dict[int, Event] = {}
    found: dict[int, int] = {}
    touched: set[tuple[int, int]] = set()
    requested: int | None = None
    skip = made = 0
    for i, entry in enumerate(entries):
        if skip:
            skip -= 1
            continue
        if entry["action"] == "oom":  # has no address; who asked went on without
            continue
        action, address = entry["action"], int(entry["addr"])
        if _is_marker(entries, i):
            events.append([])
            skip = 2
            continue
        size = rounded(int(entry["size"]))
        if entry["stream"] != stream or size <= SMALL_BYTES:
            continue
        if requested is not None and not (action == "free_completed" and address == requested):
            raise UnsteadyError("a block is freed later than it is given up")
        if action in ("alloc", "free_completed"):
            touched.add((address, address + size))
        if action == "alloc":
            made += 1
            alive[address] = Event(made, size)
            events[-1].append(alive[address])
        elif action == "free_requested":
            requested = address
        elif action == "free_completed":
            requested = None
            known = alive.pop(address, None)
            if known is None:
                found[-len(found) - 1] = size
            events[-1].append(Event(known.block if known is not None else -len(found), 0))
    if len(events) != len(hooks) + 1:
        raise UnsteadyError(f"{len(events) - 1} markers in the history of {len(hooks)} hooks")
    carried = _carried(found, {event.block: event.size_bytes for event in alive.values()})
    places = {event.block: (address, event.size_bytes) for address, event in alive.items()}
    # A call's end gives plugs back, whether or not anything happens behind it.
    statements = tuple(
        Statement(hook, tuple(group))
        for i, (hook, group) in enumerate(zip([None, *hooks], events, strict=True))
        if group or (hook is None and i)
    )
    left = {before: places[after] for before, after in carried.items()}
    gives_back = any(entry["action"] == "segment_unmap" for entry in entries)
    size_of = found | {event.block: event.size_bytes for group in events for event in group if event.size_bytes}
    changes = [sum(event.size_bytes or -size_of[event.block] for event in group) for group in events]
    starts = tuple(sum(changes[: begin + 1]) for begin in begins)
    return RecordedStep(statements, carried, left, gives_back, (0, *starts), joined(touched))


def _is_marker(entries: Sequence[Mapping[str, Any]], i: int) -> bool:
    three = entries[i : i + 3]
    actions = [entry["action"] for entry in three]
    return (
        actions == ["alloc", "free_requested", "free_completed"]
        and all(entry["size"] == MARK_BYTES for entry in three)
        and len({entry["addr"] for entry in three}) == 1
    )


def _carried(found: Mapping[int, int], left: Mapping[int, int]) -> dict[int, int]:
    """Pairs of equal size, in order. Raises UnfinishedError or BeginsError where something is left over."""
    rest = dict(left)
    pairs: dict[int, int] = {}
    for before, size in found.items():
        after = next((name for name, other in rest.items() if other == size), None)
        if after is None:
            raise BeginsError(f"a block of {size} bytes that the step frees is not made again by it")
        pairs[before] = after
        del rest[after]
    if rest:
        raise UnfinishedError(
            f"a block of {next(iter(rest.values()))} bytes that the step makes is still there behind it"
        )
    return pairs
