"""Lay the blocks of a step where they fit: record one, pack it, steer all that follow.

    watching   scattered by no prediction: settled steps are looked at now and then (scatter_watch.py)
    waiting    scattered by prediction, or seen to be: for a step that can be recorded
    recording  one step, with a marker at each hook; several where each adds to the gradients of the one before;
               what was only seen to be scattered must be so in the recording as well, else: watching
    steering   packed: plugs before statements, held as long as nobody needs their place, while steps start alike
    off        left to the allocator

The calls with hooks are made and run only from recording on: all other steps run what Inductor made, and those that
are steered have hooks only where there is something to do.
Nothing but the places of blocks changes: a plug is never written to. A step that is not what was recorded (an address
that is not the planned one, an exception, a forward without its backward) is left alone from there on. What the
allocator's counters call allocated holds the plugs as well: there are never more of them than the budget has room for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from fxhome.allocator_trace import (
    MARK_BYTES,
    BeginsError,
    RecordedStep,
    UnfinishedError,
    UnsteadyError,
    recorded_step,
)
from fxhome.block_layout import Layout, establish
from fxhome.generated_code import HookError
from fxhome.passes.laid_step import Laid, NoRoomError, Plugs
from fxhome.raw_allocator import Allocator
from fxhome.scatter_watch import ScatterWatch
from fxhome.units import format_bytes

log = logging.getLogger("fxhome")

SETTLED_STEPS = 2
"""Steps that are left alone before one is recorded: the first is metered, the optimizer's state appears behind it."""
MAX_RECORDINGS = 3
"""Recordings that may come to nothing, until so many steps went well one behind the other:"""
LONG_RUN = 100
MAX_FAILURES = 3
"""Steps one behind the other that did not go as planned, before another one is recorded."""
MAX_TOGETHER = 16
"""Forwards and backwards that are recorded as one step, where each adds to the gradients of the one before."""


class _Mode(Enum):
    WATCHING = auto()
    WAITING = auto()
    RECORDING = auto()
    STEERING = auto()
    OFF = auto()


class _Phase(Enum):
    IDLE = auto()
    FORWARD = auto()
    BETWEEN = auto()
    BACKWARD = auto()


_ticks = itertools.count(1)
_owner: weakref.ref[PlacedBlocks] | None = None
"""Who lays blocks: those of two graphs at once are nobody's steady step."""
_is_paused = False


@contextlib.contextmanager
def unsteered() -> Iterator[None]:
    """Steps that begin inside are left alone: the allocator's counters then hold no plugs."""
    global _is_paused
    before, _is_paused = _is_paused, True
    try:
        yield
    finally:
        _is_paused = before


@dataclass(frozen=True)
class Calls:
    """What runs the forward and the backward, and how many hooks they have."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    hooks: int = 0


class PlacedBlocks:
    """Steers the steps of one compiled plan. `forward` and `backward` stand for those that Inductor made.

    plain: what Inductor made. hook: makes the same with hooks that call what it is given, those of the given numbers
    or (None) all; raises HookError.
    limit_bytes: what may be reserved before a step counts as scattered. is_expected: more was predicted.
    `is_settled` tells when steps may be recorded; `spare_bytes` by how much plugs may raise what is allocated at the
    worst moment of a step; `tell` gets one line that says what came of it.
    """

    def __init__(
        self,
        allocator: Allocator,
        plain: Calls,
        hook: Callable[[Callable[[int], None], Container[int] | None], Calls],
        *,
        limit_bytes: int,
        is_expected: bool,
    ) -> None:
        self.allocator = allocator
        self.watch = ScatterWatch(allocator, limit_bytes)
        self.is_settled: Callable[[], bool] = lambda: True
        self.spare_bytes: Callable[[], int] = lambda: 0
        self.tell: Callable[[str], None] = lambda _: None
        self.laid: Laid | None = None
        self.failures = 0
        self.steered_steps = 0
        self._plain = self._calls = plain
        self._hook = hook
        self._hooked: Calls | None = None
        self._steered: Calls | None = None
        self._steered_at: frozenset[int] = frozenset()
        self._steered_by: Mapping[int, Plugs] = {}
        self._first = 0
        self._mode = _Mode.WAITING if is_expected else _Mode.WATCHING
        self._seen: str | None = None
        self._phase = _Phase.IDLE
        self._table: Mapping[int, Plugs] | None = None
        self._held: set[int] = set()
        self._marks: list[int | None] | None = None
        self._begins: list[int] = []
        self._part = 0
        self._steps = 0
        self._recordings = 0
        self._stream = 0
        self._is_clean = True
        self._in_a_row = 0
        self._restores = 0
        self._clean_run = 0
        self._reserved_bytes = 0
        self._tick = self._previous_tick = 0
        self._layout: Layout | None = None
        self._state: dict[int, tuple[int, int]] = {}

    def __del__(self) -> None:
        # A training may end in the middle of a recording: it would go on for good, and nobody else could record.
        if self.is_recording and not sys.is_finalizing():
            self.allocator.stop()

    @property
    def hooks(self) -> int:
        """How many hooks there are in both calls; none before a step was recorded."""
        return self._hooked.hooks if self._hooked is not None else 0

    @property
    def is_recording(self) -> bool:
        """Whether this step's allocations are recorded, or those of one that is looked at when the next one begins."""
        return self._mode is _Mode.RECORDING

    # What the generated code calls.

    def at(self, hook: int) -> None:
        """Before a statement that may allocate."""
        table = self._table
        if table is not None:
            plugs = table.get(self._first + hook)
            if plugs is not None:
                self._plug(plugs)
        elif self._marks is not None:
            self._mark(self._part * self.hooks + hook)

    def _mark(self, hook: int | None) -> None:
        assert self._marks is not None
        self._marks.append(hook)
        self.allocator.give(self.allocator.take(MARK_BYTES))

    def forward(self, args: Any) -> Any:
        """Run the forward."""
        self._enter_forward()
        return self._run(self._calls.forward, args, _Phase.FORWARD, _Phase.BETWEEN)

    def backward(self, args: Any) -> Any:
        """Run the backward."""
        self._enter_backward()
        return self._run(self._calls.backward, args, _Phase.BACKWARD, _Phase.IDLE)

    def _run(self, call: Callable[..., Any], args: Any, phase: _Phase, following: _Phase) -> Any:
        is_done = False
        try:
            result = call(args)
            is_done = True
            return result
        finally:
            self._leave(phase, following if is_done else _Phase.IDLE, is_done)

    def _enter_backward(self) -> None:
        if self._phase is _Phase.BETWEEN:
            self._phase = _Phase.BACKWARD
        else:
            self._disturb()

    def _leave(self, phase: _Phase, following: _Phase, is_done: bool) -> None:
        self._give_back()
        if not is_done or self._phase is not phase:
            self._disturb()
        else:
            if self._marks is not None:
                self._mark(None)
                _, self._reserved_bytes = self.allocator.large_bytes()
            if phase is _Phase.BACKWARD:
                self._steps += 1
                self._table = None
        self._phase = following

    def _plug(self, plugs: Plugs) -> None:
        held, give, take = self._held, self.allocator.give, self.allocator.take
        for address in plugs.gives:
            held.remove(address)
            give(address)
        try:
            for size_bytes, address in plugs.takes:
                got = take(size_bytes)
                held.add(got)
                if got != address:
                    self._disturb()
                    return
        except torch.OutOfMemoryError:
            self._disturb()
            return
        for i in plugs.stand_ins:
            address = plugs.takes[i][1]
            held.remove(address)
            give(address)

    def _give_back(self) -> None:
        while self._held:
            self.allocator.give(self._held.pop())

    def _disturb(self) -> None:
        """This step is not one that is known: it is left alone, and nothing is learned from it."""
        self._give_back()
        self._table = None
        self._is_clean = False
        self._phase = _Phase.IDLE
        if self._marks is not None:
            self._marks = None
            self.allocator.stop()
            self._mode = _Mode.WAITING

    # Between two steps.

    def _enter_forward(self) -> None:
        is_regular = self._phase is _Phase.IDLE
        if not is_regular:
            self._disturb()
        self._phase = _Phase.FORWARD
        self._previous_tick, self._tick = self._tick, next(_ticks)
        was_clean, self._is_clean = self._is_clean and is_regular, True
        if self._mode is _Mode.OFF:
            return
        try:
            if self._mode is _Mode.WATCHING:
                self._look()
            if self._mode is _Mode.RECORDING:
                self._finish_recording()
            elif self._mode is _Mode.WAITING:
                self._wait()
            if self._mode is _Mode.STEERING:
                self._steer(was_clean)
        except UnsteadyError as reason:
            self._again(str(reason))
        except (HookError, NoRoomError) as reason:
            self._give_up(str(reason))
        except torch.OutOfMemoryError:
            self._give_up("the room for its blocks was not to be had at once")
        except Exception as error:
            # Steps run as well without: a mistake in here must not end a training.
            log.exception("fxhome: laying blocks failed")
            self._give_up(f"{type(error).__name__}: {error}")
        hooked = self._hooked if self._mode is _Mode.RECORDING else self._steered
        is_hooked = self._mode in (_Mode.RECORDING, _Mode.STEERING)
        self._calls = hooked if is_hooked and hooked is not None else self._plain

    def _is_ready(self) -> bool:
        return self._steps >= SETTLED_STEPS and not _is_paused and self.is_settled()

    def _look(self) -> None:
        if self._is_ready() and (why := self.watch.seen()) is not None:
            self._seen = why
            self._mode = _Mode.WAITING

    def _wait(self) -> None:
        global _owner
        if not self._is_ready():
            return
        owner = _owner() if _owner is not None else None
        if owner not in (None, self) and owner._mode is not _Mode.OFF and owner._tick > self._previous_tick:
            self._give_up("another graph's blocks are laid")
            return
        if owner not in (None, self) and owner.is_recording:
            owner._disturb()  # its training was left in the middle of that
        if self.allocator.is_recorded():
            return
        if self._recordings == MAX_RECORDINGS:
            self._give_up("its steps do not repeat themselves")
            return
        if self._hooked is None:
            self._hooked = self._hook(self.at, None)
        _owner = weakref.ref(self)
        self._recordings += 1
        self._stream = self.allocator.stream()
        self.allocator.snapshot(self._stream)  # nothing is recorded where nothing could be laid
        self._marks, self._begins, self._part = [], [], 0
        self._mode = _Mode.RECORDING
        self.allocator.record()

    def _finish_recording(self) -> None:
        marks = self._marks
        assert marks is not None
        try:
            step = recorded_step(self.allocator.history(), marks, self._begins, self._stream)
        except UnfinishedError:
            if len(self._begins) + 1 < MAX_TOGETHER:
                self._begins.append(len(marks))
                self._part += 1
                self._mark(None)
                return
            self._stop_recording()
            raise
        except UnsteadyError as error:
            self._stop_recording()
            if isinstance(error, BeginsError) and self._recordings < MAX_RECORDINGS:
                self._wait()
                return
            raise
        self._stop_recording()
        if self.allocator.stream() != self._stream:
            raise UnsteadyError("its stream is another one every time")
        if self._seen is not None:
            if not self._is_confirmed(step):
                self._mode, self._seen, self._recordings = _Mode.WATCHING, None, 0
                return
            self.tell(f"{self._seen}: a step was recorded")
            self._seen = None
        before_bytes = self._reserved_bytes
        self._state = dict(step.left)
        self._layout = establish(self.allocator, self._stream, step, self._state, before_bytes, self.spare_bytes())
        self._mode = _Mode.STEERING
        self._tell_of_layout(before_bytes)

    def _is_confirmed(self, step: RecordedStep) -> bool:
        """Whether the recorded step is scattered: what is reserved may as well be left of something else."""
        used = self.allocator.snapshot(self._stream).used
        return step.gives_back or step.spread_bytes(used) > self.watch.limit_bytes

    def _tell_of_layout(self, before_bytes: int) -> None:
        assert self._layout is not None
        _, after_bytes = self._layout.expected_bytes
        self.tell(
            f"blocks are laid: the allocator takes {format_bytes(after_bytes)} for large ones; it took "
            f"{format_bytes(before_bytes)}"
        )

    def _stop_recording(self) -> None:
        self._marks = None
        self._mode = _Mode.WAITING
        self.allocator.stop()

    def _steer(self, was_clean: bool) -> None:
        layout = self._layout
        assert layout is not None
        if self.laid is not None:
            self._judge(was_clean, layout)
        is_known = self.laid is not None  # this is another part of a step that is being steered
        if not is_known:
            self._part = 0
        if _is_paused or self.allocator.stream() != self._stream:
            self.laid = None
            if self._state:
                raise UnsteadyError("a step was left alone")
            return
        allocated_bytes, reserved_bytes = self.allocator.large_bytes()
        if allocated_bytes != layout.expected_bytes[0] + layout.step.starts[self._part]:
            self.laid = None
            self._in_a_row += 1
            if allocated_bytes < layout.expected_bytes[0] and not is_known:
                # Steps begin before what was recorded: with gradients that are dropped, say.
                self._again("steps begin otherwise than the one that was recorded")
                self._steps = SETTLED_STEPS
                self._wait()
            elif self._state or self._in_a_row == MAX_FAILURES * len(layout.step.starts):
                raise UnsteadyError("something else is alive at the start of a step")
            return
        if not is_known:
            if reserved_bytes == layout.expected_bytes[1] or layout.is_mapped():
                self._restores = 0
            else:
                layout = self._restored(layout)
            self.laid = layout.laid(self._state)
        assert self.laid is not None
        self._table, self._first = self.laid.plugs, self._part * self.hooks
        if self._table is not self._steered_by:
            # Layouts that take turns share one pair of calls: compiling them takes as long as many steps.
            self._steered_by = self._table
            wanted = self._steered_at.union(place % self.hooks for place in self._table)
            if wanted != self._steered_at:
                self._steered, self._steered_at = self._hook(self.at, wanted), wanted

    def _restored(self, layout: Layout) -> Layout:
        """Someone gave memory back, or took more: start again from what the layout started from."""
        self._restores += 1
        if self._restores > MAX_FAILURES:
            raise UnsteadyError("the allocator takes or gives back memory between steps")
        if not self._state and layout.has_room():
            layout.restore()
            return layout
        before_bytes = layout.extent.mapped_bytes
        self._layout = establish(
            self.allocator, self._stream, layout.step, self._state, self._reserved_bytes, self.spare_bytes()
        )
        if self._layout.extent.mapped_bytes != before_bytes:
            self._tell_of_layout(before_bytes)
        return self._layout

    def _judge(self, was_clean: bool, layout: Layout) -> None:
        """What became of the part that was steered last: `laid` stays where the next one belongs to the same step."""
        assert self.laid is not None
        self._in_a_row = 0 if was_clean else self._in_a_row + 1
        self.failures += not was_clean
        self.steered_steps += was_clean
        self._clean_run = self._clean_run + 1 if was_clean else 0
        if self._clean_run == LONG_RUN:
            self._recordings = 0
        if not was_clean:
            if self._state or self._in_a_row == MAX_FAILURES:
                raise UnsteadyError("blocks went elsewhere than planned")
            self.laid = None
        elif self._part + 1 < len(layout.step.starts):
            self._part += 1
        else:
            self._state = {key: place for key, place in self.laid.end.items() if isinstance(key, int)}
            self.laid = None

    def _again(self, reason: str) -> None:
        """Record another step, unless enough were."""
        self.laid = self._layout = self._table = None
        self._in_a_row = self._restores = 0
        self._mode = _Mode.WAITING
        self._steps = 0
        log.debug("fxhome: blocks are not laid: %s", reason)
        if self._recordings == MAX_RECORDINGS:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self.laid = self._layout = self._table = None
        self._mode = _Mode.OFF
        log.warning("fxhome: the blocks of this plan are left to the allocator: %s", reason)
        self.tell(f"blocks are left to the allocator: {reason}")
