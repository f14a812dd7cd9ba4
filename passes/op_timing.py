"""Time one operator on fresh tensors, outside every tracing mode, so that a model that does not fit can be measured.

Inputs are rebuilt from the recorded values: floating ones random, integer ones zero (a random index ends a CUDA
context), and floating ones from 0 to 1 where an operator may take them for more than numbers: for probabilities, which
a kernel asserts, or, as the boxes of images in torchvision, for indices, which nothing checks.
The random state of the process is forked; nothing of the user's is read or written.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fxhome.host_clock import undisturbed

WARMUP_RUNS = 1
TIMED_RUNS = 3
# One slow operator must not hold up planning: after this much time it has been seen often enough.
ENOUGH_US = 60_000.0
# On CUDA: how long an operator runs before and while it is timed, how often at most, in how many parts of which those
# count that nobody else has made longer, and below which time it is too small a part of any step to be run before.
SETTLE_US = 40_000.0
MAX_CUDA_RUNS = 200
PARTS = 8
BRIEF_US = 30.0
# On CUDA: how long the device is held up at first and at most while calls are queued, at about the clock of today's
# devices, and from which time on a call is longer than its launch in any case.
HOLD_US = 1_000.0
MAX_HOLD_US = 60_000.0
CYCLES_PER_US = 1_800
LONG_US = 300.0
HOST_RUNS = 8


_OF_PROBABILITIES = frozenset(
    {
        torch.ops.aten.bernoulli,
        torch.ops.aten.binary_cross_entropy,
        torch.ops.aten.binary_cross_entropy_backward,
        torch.ops.aten.binomial,
        torch.ops.aten.multinomial,
        torch.ops.aten.poisson,
    }
)


@dataclass(frozen=True)
class OpTiming:
    """Time of one call, the device bytes that the operator took and gave back besides its results, and the host's time
    until it was launched; None where the host is the device.
    """

    time_us: float
    workspace_bytes: int
    host_us: float | None = None


@contextlib.contextmanager
def outside_tracing(device: torch.device) -> Iterator[None]:
    """Real execution in the middle of a trace: no fake tensors, no autograd, no autocast, the random state put back."""
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast(), torch.random.fork_rng(devices):
        yield


def wants_unit_values(target: Any) -> bool:
    """Whether an operator is given floating values from 0 to 1 only: others might be asserted, or used as indices."""
    return (
        getattr(target, "namespace", "aten") != "aten" or getattr(target, "overloadpacket", None) in _OF_PROBABILITIES
    )


def example(value: Any, *, unit: bool = False) -> Any:
    """A real tensor with the layout of a recorded one; lists likewise; anything else as it is. unit: see above."""
    if isinstance(value, list | tuple):
        return type(value)(example(leaf, unit=unit) for leaf in value)
    if not isinstance(value, torch.Tensor):
        return value
    size = [int(x) for x in value.shape]
    stride = [int(x) for x in value.stride()]
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    flat = torch.empty(extent, dtype=value.dtype, device=value.device)
    if (value.dtype.is_floating_point and value.dtype.itemsize >= 2) or value.dtype.is_complex:
        flat = flat.uniform_() if unit and not value.dtype.is_complex else flat.normal_()
    else:
        flat.zero_()
    return flat.as_strided(size, stride)


def example_bytes(node: fx.Node) -> int:
    """Bytes that timing `node` takes: inputs and results."""
    values = [source.meta.get("val") for source in node.all_input_nodes] + [node.meta.get("val")]
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def time_op(node: fx.Node, device: torch.device, given: tuple[Any, ...] | None = None) -> OpTiming:
    """Run `node`'s operator a few times on fresh tensors; `given`: in place of its positional arguments. Call it inside
    `outside_tracing`.
    """
    target: Any = node.target
    unit = wants_unit_values(target)
    args = fx.node.map_arg(node.args if given is None else given, lambda source: example(source.meta["val"], unit=unit))
    kwargs = fx.node.map_arg(node.kwargs, lambda source: example(source.meta["val"], unit=unit))
    if device.type == "cuda":
        return _time_cuda(target, args, kwargs, device)
    for _ in range(WARMUP_RUNS):
        target(*args, **kwargs)
    times: list[float] = []
    while len(times) < TIMED_RUNS and sum(times) < ENOUGH_US:
        begin = time.perf_counter_ns()
        target(*args, **kwargs)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return OpTiming(sorted(times)[len(times) // 2], 0)


def _time_cuda(target: Any, args: Any, kwargs: Any, device: torch.device) -> OpTiming:
    for _ in range(WARMUP_RUNS):
        target(*args, **kwargs)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = target(*args, **kwargs)
    peak = torch.cuda.max_memory_allocated(device)
    after = torch.cuda.memory_allocated(device)
    del result
    workspace = max(0, peak - max(after, before))
    host_us = _host_us(target, args, kwargs, device)
    once_us = _elapsed_us(target, args, kwargs, 1)
    # A burst runs at a higher clock than a whole training step does: the device is kept busy until the clock has
    # settled, and timed without a gap behind that. Whoever else uses the device meanwhile makes parts of it longer.
    runs = max(TIMED_RUNS, min(MAX_CUDA_RUNS, int(SETTLE_US / max(once_us, 1.0))))
    if once_us >= BRIEF_US:
        _elapsed_us(target, args, kwargs, runs, hold_us=0.0)
    part = -(-runs // PARTS)
    # Held up, a device cools down: what is longer than its launch is timed without.
    hold_us = HOLD_US if once_us < LONG_US else 0.0
    elapsed_us = undisturbed([_elapsed_us(target, args, kwargs, part, hold_us) for _ in range(PARTS)])
    return OpTiming(elapsed_us, workspace, host_us)


def _host_us(target: Any, args: Any, kwargs: Any, device: torch.device) -> float:
    """Host us of one call, the device idle before it: until it returns, not until the device is done."""
    times = []
    for _ in range(HOST_RUNS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter_ns()
        result = target(*args, **kwargs)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        del result
    return undisturbed(times)


def _elapsed_us(target: Any, args: Any, kwargs: Any, runs: int, hold_us: float = HOLD_US) -> float:
    """Mean time of `runs` calls in a row, by the device's own clock.

    hold_us: they are queued while the device is held up so long, and longer where that was not enough: what is timed is
    the device then, however slow the host is at launching. 0: it is not held up.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    while True:
        if hold_us:
            torch.cuda._sleep(int(hold_us * CYCLES_PER_US))
        queued = time.perf_counter()
        begin.record()
        for _ in range(runs):
            target(*args, **kwargs)
        end.record()
        kept_up = begin.query()
        queueing_us = (time.perf_counter() - queued) * 1e6
        end.synchronize()
        if not hold_us or not kept_up or hold_us > MAX_HOLD_US:
            return float(begin.elapsed_time(end)) * 1e3 / runs
        hold_us = 2 * max(hold_us, queueing_us)
