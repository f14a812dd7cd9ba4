"""The order that the copy queues ask of the device, checked without one.

Streams and events are replaced by recorded programs, which are then run in many random interleavings: any order that
waits allow may happen on a GPU. Every reload must see its own tensor's value in all of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxhome.runtime import codec_ops, codec_sites, transfer
from fxhome.runtime.host_pool import HostPool

DEVICE = torch.device("cuda", 0)
Step = tuple[str, Any]


class Stream:
    """A queue of steps; `current` is what the CUDA runtime would call the current stream."""

    current: Stream
    everyone: list[Stream]

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = DEVICE
        self.device_index = 0
        self.cuda_stream = id(self)
        self.steps: list[Step] = []
        self._outer: list[Stream] = []
        Stream.everyone.append(self)

    def wait_event(self, event: Event) -> None:
        if event.ticket is not None:
            self.steps.append(("wait", event.ticket))

    def __enter__(self) -> None:
        self._outer.append(Stream.current)
        Stream.current = self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._outer.pop()


class Event:
    """What was recorded last; waiting takes the ticket of that moment, as CUDA does."""

    def __init__(self) -> None:
        self.ticket: object | None = None

    def record(self, stream: Stream) -> None:
        self.ticket = object()
        stream.steps.append(("signal", self.ticket))

    def query(self) -> bool:
        """The host is far ahead of the device."""
        return False


class Memory:
    """Bytes at an address, on either side; copying is a step of the current stream."""

    cells: dict[object, int | None]

    def __init__(self, address: object) -> None:
        self.address = address

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking
        Stream.current.steps.append(("do", lambda: Memory.cells.update({self.address: Memory.cells[source.address]})))

    def set(self, value: int) -> None:
        Stream.current.steps.append(("do", lambda: Memory.cells.update({self.address: value})))


@pytest.fixture(autouse=True)
def _recorded_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.everyone = []
    Memory.cells = {}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(transfer, "current_stream", lambda index: Stream.current)
    monkeypatch.setattr(transfer, "OnStream", lambda stream, index: stream)
    monkeypatch.setattr(transfer, "_RING_LENGTH", 4)  # events are recorded again while others still rely on them


def run_interleaved(seed: int) -> None:
    """Run all recorded steps in a random order that keeps each stream's own order and every wait."""
    choose, signalled = random.Random(seed), set[object]()
    pending = [list(reversed(stream.steps)) for stream in Stream.everyone]
    while any(pending):
        ready = [steps for steps in pending if steps and (steps[-1][0] != "wait" or steps[-1][1] in signalled)]
        assert ready, "deadlock: every stream waits for something that is queued behind another wait"
        # Bursts, so that one stream gets far ahead of the others.
        steps = choose.choice(ready)
        for _ in range(choose.choice((1, 3, 30))):
            if not steps or (steps[-1][0] == "wait" and steps[-1][1] not in signalled):
                break
            kind, what = steps.pop()
            if kind == "signal":
                signalled.add(what)
            elif kind == "do":
                what()


HEAD, TAIL = 16, 64
"""Bytes of an encoded buffer in these tests: a head, and a tail that is always in use. Each is one number here."""


class Copies:
    """Stands in for copies and the kernel that completes them, by address; a bound of `HEAD` leaves the tail out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, forget_rest: bool = False) -> None:
        self.forget_rest = forget_rest
        monkeypatch.setattr(codec_ops, "current_handle", lambda index: Stream.current.cuda_stream)
        monkeypatch.setattr(codec_ops, "_kernels_reach_the_pool", lambda: True)
        for name in ("copy_to_host", "copy_to_device"):
            monkeypatch.setattr(codec_ops, name, self.copy)
        monkeypatch.setattr(codec_ops, "copy_overflow", self.complete)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """The copy engine."""
        self._move(target, source, stream)
        if size > HEAD:
            self._move(target + HEAD, source + HEAD, stream)

    def complete(
        self, index: int, stream: int, header: int, source: int, target: int, done: int, sizes: Any, note: int = 0
    ) -> None:
        """The kernel behind it."""
        if done == HEAD and not self.forget_rest:
            self._move(target + HEAD, source + HEAD, stream)

    def _move(self, target: int, source: int, stream: int) -> None:
        streams = {other.cuda_stream: other for other in Stream.everyone}

        def act() -> None:
            Memory.cells[target] = Memory.cells.get(source)

        streams[stream].steps.append(("do", act))


def encoded_mistakes(seed: int, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Send and fetch encoded tensors through few buffers, with bounds that leave something out or not, in one random
    interleaving."""
    choose, mistakes = random.Random(seed), list[str]()
    computes = [Stream(), Stream()]
    Stream.current = computes[0]
    out, back = transfer._CopyQueue(DEVICE), transfer._CopyQueue(DEVICE)
    pool = HostPool()
    sizes = codec_ops._Sizes(1, False, HEAD, HEAD + TAIL, 512)
    codec_sites.clear()
    held: list[tuple[int, int, torch.Tensor, Any]] = []

    def put(value: int, at: int) -> None:
        Memory.cells[at] = value
        Memory.cells[at + HEAD] = value * 10

    def check(value: int, at: int) -> None:
        found = [Memory.cells.get(at), Memory.cells.get(at + HEAD)]
        if found != [value, value * 10]:
            mistakes.append(f"tensor {value} came back as {found}")

    def fetch() -> None:
        lane, value, host, slot = held.pop(choose.randrange(len(held)))
        if choose.random() < 0.2:
            return  # nobody asks for it
        Stream.current = compute = computes[lane]
        target = 5000 + 1000 * lane
        bound, is_all = slot.contents.before_read(slot)
        done = back.run(functools.partial(slot.contents.read, slot, target, bound), slot)  # type: ignore[arg-type]
        if is_all:
            transfer._wait_on_both(done, compute)  # type: ignore[arg-type]
        else:
            transfer._wait_and_complete(done, compute, slot, target, bound)  # type: ignore[arg-type]
        del host, slot  # the slot may be reused although the kernel behind the copy has not run
        compute.steps.append(("do", functools.partial(check, value, target)))
        compute.steps.append(("do", functools.partial(put, -1, target)))

    for value in range(40):
        lane = choose.randrange(2)
        Stream.current = compute = computes[lane]
        source = 1000 + 1000 * lane
        compute.steps.append(("do", functools.partial(put, value, source)))
        moving = codec_ops._Moving("site", "zvc", sizes, 400, 100, False)
        bound = choose.choice((0, HEAD, HEAD + TAIL))
        monkeypatch.setattr(moving.site, "bound_bytes", lambda bound=bound: bound)
        host, slot = pool.empty(512, pinned=False)
        assert slot is not None
        slot.contents = moving
        moving.before_write(slot, source, 0)
        done = out.run(functools.partial(moving.write, slot, source), slot)
        transfer._wait_for(done, torch.empty(0))
        compute.steps.append(("do", functools.partial(put, -1, source)))  # freed and used by something else
        held.append((lane, value, host, slot))
        del host, slot
        while len(held) > 3:
            fetch()
    while held:
        fetch()
    run_interleaved(seed)
    return mistakes


@pytest.mark.parametrize("seed", range(25))
def test_encoded_tensors_come_back_whole_in_every_interleaving(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoded_mistakes(seed, Copies(monkeypatch), monkeypatch) == []


def test_the_check_notices_what_a_bound_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoded_mistakes(0, Copies(monkeypatch, forget_rest=True), monkeypatch)


@pytest.mark.parametrize("forgotten", ["prepare_host_write", "note_host_use"])
def test_the_check_notices_a_slot_that_a_kernel_did_not_guard(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, forgotten, lambda *_: None)
    found: list[str] = []
    for seed in range(60):
        Stream.everyone = []
        Memory.cells = {}
        found += encoded_mistakes(seed, Copies(monkeypatch), monkeypatch)
    assert found


def record_steps(seed: int, *, forget_fences: bool = False) -> list[str]:
    """Send and fetch tensors from two streams with few slots and few device buffers; returns the list of mistakes."""
    choose, mistakes = random.Random(seed), list[str]()
    pool = HostPool()
    computes = [Stream(), Stream()]
    Stream.current = computes[0]
    out, back = transfer._CopyQueue(DEVICE), transfer._CopyQueue(DEVICE)
    held: list[tuple[int, int, torch.Tensor, Any]] = []

    def check(buffer: Memory, value: int) -> None:
        if Memory.cells[buffer.address] != value:
            mistakes.append(f"tensor {value} came back as {Memory.cells[buffer.address]}")

    def fetch() -> None:
        lane, value, host, slot = held.pop(choose.randrange(len(held)))
        Stream.current = computes[lane]
        buffer = Memory(("device", lane, value % 2))
        done = back.copy(buffer, Memory(host.data_ptr()), slot)  # type: ignore[arg-type]
        transfer._wait_on_both(done, computes[lane])  # type: ignore[arg-type]
        Stream.current.steps.append(("do", functools.partial(check, buffer, value)))

    for value in range(40):
        lane = choose.randrange(2)
        Stream.current = computes[lane]
        source = Memory(("device", lane, value % 2))
        source.set(value)
        host, slot = pool.empty(512, pinned=False)
        assert slot is not None
        if forget_fences:
            slot.fences = ()
        done = out.copy(Memory(host.data_ptr()), source, slot)  # type: ignore[arg-type]
        transfer._wait_for(done, torch.empty(0))
        source.set(-1)  # the buffer is freed and used by something else
        held.append((lane, value, host, slot))
        del host, slot
        while len(held) > 3:
            fetch()
    while held:
        fetch()
    return mistakes


@pytest.mark.parametrize("seed", range(25))
def test_every_interleaving_brings_the_right_value_back(seed: int) -> None:
    mistakes = record_steps(seed)
    run_interleaved(seed)
    assert mistakes == []


def test_the_check_notices_a_slot_reused_too_early() -> None:
    """Without the fences of the slot's last user, some interleaving goes wrong."""
    found: list[str] = []
    for seed in range(25):
        Stream.everyone = []
        mistakes = record_steps(seed, forget_fences=True)
        run_interleaved(seed)
        found += mistakes
    assert found


def test_kernels_that_write_to_the_host_wait_and_guard_their_slot() -> None:
    pool = HostPool()
    first, second = Stream(), Stream()
    host, slot = pool.empty(512, pinned=False)
    assert slot is not None
    Stream.current = first
    log: list[str] = []
    note: Callable[[str], Step] = lambda word: ("do", lambda: log.append(word))  # noqa: E731
    first.steps.append(note("read by the first"))
    transfer.note_host_use(slot, 0)
    del host, slot
    _, reused = pool.empty(512, pinned=False)
    assert reused is not None
    Stream.current = second
    transfer.prepare_host_write(reused, 0)
    second.steps.append(note("written by the second"))
    for seed in range(10):
        log.clear()
        run_interleaved(seed)
        assert log == ["read by the first", "written by the second"]
