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

from fxhome.cuda_kernels.chunks import Chunk
from fxhome.runtime import staging, transfer
from fxhome.runtime.host_pool import HostPool

DEVICE = torch.device("cuda", 0)
Step = tuple[str, Any]


class Stream:
    """A queue of steps; `current` is what torch.cuda.current_stream would say."""

    current: Stream
    everyone: list[Stream]

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = DEVICE
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
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


class FakeKernels:
    """Stands in for codec kernels and copies by address: a chunk's bytes are one number, found in `Memory.cells`."""

    def move(self, stream: int, target: object, source: object) -> None:
        streams = {other.cuda_stream: other for other in Stream.everyone}

        def act() -> None:
            Memory.cells[target] = Memory.cells.get(source)

        streams[stream].steps.append(("do", act))


def staged(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> staging.Staging:
    """A staging whose buffers and kernels are fakes."""
    monkeypatch.setattr(
        staging, "copy_to_host", lambda target, source, size, stream: kernels.move(stream, target, source)
    )
    monkeypatch.setattr(
        staging, "copy_to_device", lambda target, source, size, stream: kernels.move(stream, target, source)
    )
    monkeypatch.setattr(staging, "copy_overflow", lambda *arguments: None)
    made = staging.Staging(DEVICE)
    for number, ring in enumerate((made.out, made.back)):
        ring.addresses = tuple((1 + number) * 10**9 + index for index in range(len(ring.ready)))
    return made


def staged_mistakes(seed: int, monkeypatch: pytest.MonkeyPatch, *, forget_free: bool = False) -> list[str]:
    """Send and fetch tensors of three chunks through the staging buffers, in one random interleaving."""
    choose, mistakes, kernels = random.Random(seed), list[str](), FakeKernels()
    compute = Stream()
    Stream.current = compute
    made = staged(kernels, monkeypatch)
    if forget_free:
        for ring in (made.out, made.back):
            ring.free = tuple(NeverRecorded() for _ in ring.free)
    out, back = transfer._CopyQueue(DEVICE), transfer._CopyQueue(DEVICE)
    pool = HostPool()
    chunks = [Chunk(number, 1, 16 * number, 0, 16) for number in range(3)]
    encode = [(chunk, lambda stream, plain, encoded: kernels.move(stream, encoded, plain)) for chunk in chunks]
    decode = [(chunk, lambda stream, plain, encoded: kernels.move(stream, plain, encoded)) for chunk in chunks]
    held: list[tuple[int, torch.Tensor, Any]] = []

    def put(value: int, at: int) -> None:
        for number in range(3):
            Memory.cells[at + number] = value * 10 + number

    def check(value: int, at: int) -> None:
        found = [Memory.cells[at + number] for number in range(3)]
        if found != [value * 10 + number for number in range(3)]:
            mistakes.append(f"tensor {value} came back as {found}")

    def fetch() -> None:
        value, host, slot = held.pop(choose.randrange(len(held)))
        target = 5000 + 100 * (value % 3)
        work = functools.partial(_read, made, decode, host.data_ptr(), target)
        compute.wait_event(back.run(work, slot))  # type: ignore[arg-type]
        compute.steps.append(("do", functools.partial(check, value, target)))
        compute.steps.append(("do", functools.partial(put, -1, target)))

    for value in range(30):
        source = 1000 + 100 * (value % 3)
        compute.steps.append(("do", functools.partial(put, value, source)))
        host, slot = pool.empty(512, pinned=False)
        assert slot is not None
        work = functools.partial(_write, made, encode, host.data_ptr(), source)
        compute.wait_event(out.run(work, slot))  # type: ignore[arg-type]
        compute.steps.append(("do", functools.partial(put, -1, source)))  # freed and used by something else
        held.append((value, host, slot))
        del host, slot
        while len(held) > 3:
            fetch()
    while held:
        fetch()
    run_interleaved(seed)

    return mistakes


@pytest.mark.parametrize("seed", range(25))
def test_staging_buffers_are_never_overwritten_too_early(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert staged_mistakes(seed, monkeypatch) == []


def test_the_check_notices_a_staging_buffer_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the events that guard the buffers, some interleaving goes wrong."""
    found: list[str] = []
    for seed in range(25):
        Stream.everyone = []
        Memory.cells = {}
        found += staged_mistakes(seed, monkeypatch, forget_free=True)
    assert found


class NeverRecorded(Event):
    """An event that somebody forgot to record."""

    def record(self, stream: Stream) -> None:
        """Do not."""


def _write(made: staging.Staging, chunks: Any, host: int, source: int, start: Any) -> Any:
    return made.to_host(chunks, (16,) * 3, (0,) * 3, source, host, start.stream, start.event)


def _read(made: staging.Staging, chunks: Any, host: int, target: int, start: Any) -> Any:
    return made.from_host(chunks, (16,) * 3, False, host, target, start.stream)


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
    transfer.note_host_use(slot, DEVICE)
    del host, slot
    _, reused = pool.empty(512, pinned=False)
    assert reused is not None
    Stream.current = second
    transfer.prepare_host_write(reused, DEVICE)
    second.steps.append(note("written by the second"))
    for seed in range(10):
        log.clear()
        run_interleaved(seed)
        assert log == ["read by the first", "written by the second"]
