"""What the host really spends inside a plan's compiled forward and backward, seen in the first steps of a training.

    call 1      metered (the plan is not settled before it is over)
    call 2      may still tune what it calls
    from 3 on   timed, until SAMPLES count or MAX_CALLS were seen; then nothing is timed any more. A side that can never
                count is not waited for, and one that never did for PATIENCE calls only where the other has not enough

Nothing waits for the device. Where the device is behind, the host may have to wait for it: launches are put into a
queue that holds about a thousand. Such a time says nothing of the host, and steps cannot be told by their length (a
step that the host binds is as long as the host's work, and so is one that the device binds once the queue is full). So
a call counts only where the queue cannot have been full: the stream had nothing left to do when the call began, or when
the forward before it began, and no more was launched from there on than the queue surely holds. Graphs of more launches
are not timed, however fast their device is, nor are steps at whose start the device is always behind (those that it
binds, where nobody waits for a loss). A call in which the allocator asked the driver for memory, or gave some back, may
have waited as well; one whose allocations were recorded took longer than others.

The lower quartile of what is left is taken, as for everything else that is measured of the host.

On a CPU there is nothing to time: the host computes, no launch can be told from its work, and plans have no host times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fxhome.host_clock import undisturbed

FORWARD, BACKWARD = range(2)
SKIPPED_CALLS = 1
SAMPLES = 4
MAX_CALLS = 100
PATIENCE = 12
QUEUE_LAUNCHES = 800
"""What surely fits into a queue of 1,024, with room for what others launch between a forward and its backward."""


class Device(Protocol):
    """What can be asked of a device without waiting for it."""

    def is_idle(self) -> bool:
        """Whether everything launched so far is done."""

    def memory_calls(self) -> int:
        """How often the driver was asked for memory or given some back so far."""


class CudaDevice:
    """A CUDA device (None: the current one), and its stream that is current where it is asked."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device is None else device

    def is_idle(self) -> bool:
        """Never while a graph is captured: a stream must not be asked then."""
        return not torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream(self._device).query()

    def memory_calls(self) -> int:
        """Of the caching allocator."""
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(counts["num_device_alloc"] + counts["num_device_free"])


class HostTimer:
    """Times both callables of one plan. launches: how many each of them queues, forward and backward.

    `is_settled` tells when steps may be timed, `is_recorded` whether this one's allocations are being recorded;
    `release` is called once, when there is nothing more to time.
    """

    def __init__(
        self, launches: tuple[int, int], device: Device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.is_settled: Callable[[], bool] = lambda: True
        self.is_recorded: Callable[[], bool] = lambda: False
        self.release: Callable[[], None] = lambda: None
        self._launches = launches
        self._device = device
        self._clock = clock
        self._times_us: tuple[list[float], list[float]] = ([], [])
        self._calls = [0, 0]
        self._queued = math.inf
        self._is_released = False

    def timed(self, call: Callable[..., Any], side: int) -> Callable[..., Any]:
        """The callable, timed as the forward or the backward while that is wanted."""

        def run(args: Any) -> Any:
            if self.is_complete or not self.is_settled():
                return call(args)
            return self._time(call, args, side)

        return run

    def _time(self, call: Callable[..., Any], args: Any, side: int) -> Any:
        if self._device.is_idle():
            self._queued = 0.0
        elif side == FORWARD:
            self._queued = math.inf
        self._queued += self._launches[side]
        self._calls[side] += 1
        if self._calls[side] <= SKIPPED_CALLS or self._queued > QUEUE_LAUNCHES or self.is_recorded():
            return call(args)
        memory_calls = self._device.memory_calls()
        begin = self._clock()
        result = call(args)
        taken_us = (self._clock() - begin) * 1e6
        if self._device.memory_calls() == memory_calls and not self.is_recorded():
            self._times_us[side].append(taken_us)
        return result

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to be learned."""
        return all(self._is_enough(side) for side in (FORWARD, BACKWARD))

    def _is_enough(self, side: int) -> bool:
        seen, calls = len(self._times_us[side]), self._calls[side]
        if seen >= SAMPLES or calls >= MAX_CALLS or self._launches[side] > QUEUE_LAUNCHES:
            return True
        return not seen and calls >= PATIENCE and len(self._times_us[1 - side]) >= SAMPLES

    def finish(self) -> tuple[float | None, float | None] | None:
        """Us inside the forward and inside the backward, None for what could not be told; the first time that it is
        asked after everything was seen, and None otherwise.
        """
        if self._is_released or not self.is_complete:
            return None
        self._is_released = True
        self.release()
        self.release = lambda: None  # it knows the graphs, which know this
        ahead, back = (undisturbed(times) if len(times) >= SAMPLES else None for times in self._times_us)
        return ahead, back
