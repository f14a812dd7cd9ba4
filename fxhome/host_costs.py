"""What a training step costs the host: measured by itself by a probe, and corrected by what real steps took.

    probe         each kind of launch, repeated in a small graph of its own
    real steps    the compiled forward and backward of a plan, timed while a user trains (host_timer.py)

Launches take longer in real steps: hundreds of kernels with many arguments each, and allocations between them. The
figures of benchmarks/results/host_h200.md speak for one factor on launches of every kind: by the probe's 11.3 us for a
generated kernel and 23.8 for a convolution, ResNet-50's forward (309 and 54) took 1.75 times as long, and its backward
(230 and 107) 1.82 times. Were only generated kernels to take longer, it would be 23 us for one in the forward and 30 in
the backward, and above 30 in a U-Net with convolutions that take long by themselves. The ways into graphs and out of
them, copies and codecs are outside of the factor: copies took in steps what they take alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

MAX_GRAPHS = 32
"""The graphs timed last that count."""
MOST_TIMES = 5.0
"""Above this, launches are not what a graph's time went to: something in it computes on the host, or waits. Where it is
as far below the probe's figures, these were disturbed.
"""
CLEARLY_LESS = 0.9
"""How much less a graph's launches must take than before to count anew. What is not clear must change no figure: with
other figures the next process may make another plan, and nothing that was compiled for this one is found again.
"""


@dataclass(frozen=True)
class TimedGraph:
    """The launches of one graph's steps: what they took of the host, and what they take by the probe. Microseconds."""

    graph: str
    """The fingerprint of the joint graph."""
    taken_us: float
    alone_us: float

    def __post_init__(self) -> None:
        for name, number in (("taken_us", self.taken_us), ("alone_us", self.alone_us)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} should be positive and finite, got {number}")


@dataclass(frozen=True)
class HostCosts:
    """What the host spends on a training step before the device may start, under one inner compiler. Microseconds.

    forward_us, backward_us: a step's start up to its first kernel, and from there between the forward and the backward.
    input_us, gradient_us: what each input adds to the first (its guards, its passing on), each gradient to the second.
    kernel_us: a generated kernel, or one eager operator. library_us: a matrix product. convolution_us: a convolution.
    view_us: a view. swap_out_us and swap_in_us start a copy, wait_us waits for one; encode_us, decode_us: one codec.
    steps: graphs whose real steps were timed, oldest first; none before the first one was.
    """

    inner: str  # "aot_eager" or "inductor"
    forward_us: float
    backward_us: float
    input_us: float
    gradient_us: float
    kernel_us: float
    library_us: float
    convolution_us: float
    view_us: float
    swap_out_us: float
    swap_in_us: float
    wait_us: float
    encode_us: float
    decode_us: float
    steps: tuple[TimedGraph, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if field.name not in ("inner", "steps") and not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{field.name} should be finite and not negative, got {number}")

    @property
    def launch_factor(self) -> float:
        """How many times as long launches (kernels, library calls, views) take in steps as by the probe; 1 as long as
        no step was timed.
        """
        alone_us = sum(timed.alone_us for timed in self.steps)
        return sum(timed.taken_us for timed in self.steps) / alone_us if alone_us else 1.0

    def with_steps(self, found: tuple[TimedGraph, ...]) -> HostCosts:
        """The same costs with more timed graphs. Of one graph the shorter time counts: whatever else runs on the host
        only ever adds; it replaces the one that is known where it is clearly shorter. Above MOST_TIMES none counts, nor
        below its inverse.
        """
        known = {timed.graph: timed for timed in self.steps}
        for timed in found:
            before = known.get(timed.graph)
            if not 1 / MOST_TIMES <= _ratio(timed) <= MOST_TIMES:
                continue
            if before is None or _ratio(timed) < CLEARLY_LESS * _ratio(before):
                known.pop(timed.graph, None)
                known[timed.graph] = timed
        steps = tuple(known.values())[-MAX_GRAPHS:]
        return self if steps == self.steps else replace(self, steps=steps)


def _ratio(timed: TimedGraph) -> float:
    return timed.taken_us / timed.alone_us


def merge_hosts(mine: tuple[HostCosts, ...], others: tuple[HostCosts, ...]) -> tuple[HostCosts, ...]:
    """One entry per inner compiler: mine, with the graphs that others have timed, and theirs where I have none."""
    theirs = {costs.inner: costs for costs in others}
    joined = [costs.with_steps(theirs.pop(costs.inner).steps) if costs.inner in theirs else costs for costs in mine]
    return (*joined, *theirs.values())
