"""Measure what the host spends on a step: launches, transfers, and the way into a compiled forward and backward.

    chain of products, 4 and 16 long      -> the way in, and one product
    chain of products with something else -> that something
    network of 4 and 32 parameters        -> what each parameter adds to a forward and to a backward

Tensors are so small that the device is never what is waited for. No two generated kernels of a chain are the same, and
the processor's caches are swept before every run: in a step hundreds of others lie between two launches of one kernel,
and a launch repeated at once takes half the time. An eager step goes through the same code for each of its operators:
there nothing is swept (swept, steps were predicted twice as long as they were). Everything is compiled by the same
inner compiler as the step, apart from any compilation that the caller is in the middle of.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxhome.host_clock import Sweeper, undisturbed
from fxhome.host_costs import HostCosts
from fxhome.runtime import codec_ops, ops
from fxhome.runtime.compile_apart import outside_of_compilation

SHORT, LONG = 4, 16
FEW_AND_MANY = 4, 32
SIDE, STEP = 64, 8
WARMUP_RUNS = 4
TIMED_RUNS = 40
_SWAP_BYTES = 1 << 16


def measure_host_costs(device: torch.device, inner: str) -> HostCosts:
    """The host's costs under `inner` ("aot_eager" or "inductor") on `device`; takes a few seconds, mostly compiling."""

    def measure() -> HostCosts:
        # A thread of its own starts on the first device.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return _measure(device, inner)

    costs = outside_of_compilation(measure)
    if device.type == "cuda":
        # What this has left behind would be resident in the step that is planned now, and in no later process.
        torch.cuda.synchronize(device)
        clear_workspaces: Any = torch._C._cuda_clearCublasWorkspaces
        clear_workspaces()
        torch.cuda.empty_cache()
    return costs


def _measure(device: torch.device, inner: str) -> HostCosts:
    kinds = ((), ("kernel",), ("view",), ("convolution",))
    chains = [_chain(device, inner, length, kind) for length, kind in ((SHORT, ()), *((LONG, kind) for kind in kinds))]
    if device.type == "cuda":
        # The thread of backwards has no context until something is launched on it, of which cuBLAS warns.
        torch.ones(1, device=device, requires_grad=True).mul(2).sum().backward()
    # All in one: a network's figures are taken from a chain's, and the host is slower at one time than at another.
    with torch.enable_grad():
        works = [*chains, *_networks(device, inner, FEW_AND_MANY)]
        times = [undisturbed(each) for each in in_turns(device, works, inner)]
    short, long, *more = times[: len(chains)]
    library_us = max(0.0, (long - short) / (LONG - SHORT))
    kernel_us, view_us, convolution_us = (max(0.0, (each - long) / LONG) for each in more)
    ahead, back = times[len(chains) :: 2], times[len(chains) + 1 :: 2]
    few, many = FEW_AND_MANY
    ahead_us, back_us = ((of_many - of_few) / (many - few) for of_few, of_many in (ahead, back))
    input_us = max(0.0, ahead_us - library_us)
    # Every convolution of a chain has its filter as an input more.
    convolution_us = max(0.0, convolution_us - input_us)
    # The backward of a product: two products, each of a transposed operand.
    gradient_us = max(0.0, back_us - 2 * library_us - 2 * view_us)
    moved = {name: undisturbed(times) for name, times in transfer_us(device).items()}
    return HostCosts(
        inner=inner,
        forward_us=max(0.0, ahead[0] - few * ahead_us),
        backward_us=max(0.0, back[0] - few * back_us),
        input_us=input_us,
        gradient_us=gradient_us,
        kernel_us=kernel_us,
        library_us=library_us,
        convolution_us=convolution_us,
        view_us=view_us,
        swap_out_us=moved["swap_out"],
        swap_in_us=moved["swap_in"],
        wait_us=(moved["swap_out_wait"] + moved["swap_in_wait"]) / 2,
        encode_us=moved["encode"],
        decode_us=moved["decode"],
    )


def _chain(device: torch.device, inner: str, length: int, kinds: tuple[str, ...]) -> Callable[[], object]:
    """A compiled chain of `length` products, each followed by one of every kind, ready to run.

    kinds: "kernel" (one that Inductor generates, or one eager sum), "view" (some of the columns), "convolution" (of a
    tensor beside the chain).
    """
    more = STEP if "view" in kinds else 0
    widths = [SIDE + STEP * i for i in range(length + 1)]
    lines = ["a = b = side"] if "kernel" in kinds else []
    for i, width in enumerate(widths[1:]):
        lines.append(f"x = torch.mm(x, w[{i}])")
        if "kernel" in kinds and inner == "inductor":
            # As in real steps: some four pointers, and a block of its own for what it writes, since the product that
            # it reads is read again. A constant of its own makes it a kernel of its own.
            lines.append(f"x, a, b = x * {(i + 1) / 1024} + a[:, :1] + b[:, :1], x, a")
        elif "kernel" in kinds:
            lines.append(f"x = torch.add(x, {(i + 1) / 1024})")
        if "view" in kinds:
            lines.append(f"x = x[:, :{width}]")
        if "convolution" in kinds:
            lines.append(f"image = torch.conv2d(image, filters[{i}], None, 1, 1)")
    results = "x, image" if "convolution" in kinds else "x"
    dtype = _dtype(device)

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, 1e-3, device=device, dtype=dtype)

    def channels_last(*sizes: int) -> torch.Tensor:
        return full(*sizes).to(memory_format=torch.channels_last)

    pairs = list(itertools.pairwise(widths))
    arguments = {
        "x": full(SIDE, widths[0]),
        "w": [full(before, after + more) for before, after in pairs],
        "image": channels_last(2, widths[0], 8, 8),
        "filters": [channels_last(after, before, 3, 3) for before, after in pairs] if "convolution" in kinds else [],
        "side": full(SIDE, 1),
    }
    run = _compiled(_module(", ".join(arguments), lines, results), inner)
    given = tuple(arguments.values())

    def work() -> object:
        with torch.no_grad():
            return run(*given)

    return work


def _networks(device: torch.device, inner: str, sizes: Sequence[int]) -> list[Callable[[], None]]:
    """The forward of each compiled chain of products, and behind it its backward, gradients included, ready to run.

    sizes: how many products, each with a parameter of its own.
    """
    argument = torch.full((SIDE, SIDE), 1e-3, device=device, dtype=_dtype(device), requires_grad=True)
    upstreams = [torch.ones(SIDE, SIDE + STEP * size, device=device, dtype=_dtype(device)) for size in sizes]
    networks = [_network(device, parameters) for parameters in sizes]
    compiled = [_compiled(network, inner) for network in networks]
    results: list[torch.Tensor] = []

    def ahead(index: int) -> None:
        argument.grad = None
        for parameter in networks[index].parameters():
            parameter.grad = None
        results[:] = [compiled[index](argument)]

    def back(index: int) -> None:
        results.pop().backward(upstreams[index])

    return [functools.partial(work, index) for index in range(len(sizes)) for work in (ahead, back)]


def _network(device: torch.device, parameters: int) -> nn.Module:
    network = _module("x", [f"x = torch.mm(x, self.w{i})" for i in range(parameters)], "x")
    for i in range(parameters):
        sizes = (SIDE + STEP * i, SIDE + STEP * (i + 1))
        weight = torch.full(sizes, 1e-3, device=device, dtype=_dtype(device))
        network.register_parameter(f"w{i}", nn.Parameter(weight))
    return network


def _dtype(device: torch.device) -> torch.dtype:
    # Where the device has matrix units, what is multiplied is mostly of this type; of float32 Inductor warns there.
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _module(arguments: str, lines: Sequence[str], results: str) -> nn.Module:
    """A module with such a forward. Written out, so that each has code of its own: torch keeps few compilations of one
    code, and takes a graph module that is made in the middle of a compilation for its own.
    """
    source = [f"def forward(self, {arguments}):", *(f"    {line}" for line in lines), f"    return {results}"]
    names: dict[str, Any] = {"torch": torch}
    exec(compile("\n".join(source), "<fxhome host probe>", "exec"), names)
    module: nn.Module = type("HostProbe", (nn.Module,), {"forward": names["forward"]})()
    return module


def transfer_us(device: torch.device) -> dict[str, list[float]]:
    """Host us of every operator of a swap and of a codec, by name, in many round trips of one small tensor.

    Without a sweep: within steps that were measured they took what they take here.
    """
    values = torch.full((_SWAP_BYTES // 4,), 0.5, device=device)
    place = (list(values.shape), list(values.stride()), 0, values.dtype)
    found: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        found.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)
        return result

    with torch.no_grad():
        for run in range(WARMUP_RUNS + TIMED_RUNS):
            if run == WARMUP_RUNS:
                found.clear()
            _wait(device)
            host = timed("swap_out", ops.swap_out, values)
            host = timed("swap_out_wait", ops.swap_out_wait, host, values)
            back = timed("swap_in", ops.swap_in, host, *place, device)
            back = timed("swap_in_wait", ops.swap_in_wait, back, host)
            encoded = timed("encode", codec_ops.encode_op, values, _SWAP_BYTES, "int8")
            timed("decode", codec_ops.decode_op, encoded, _SWAP_BYTES, *place, "int8")
    return found


def in_turns(device: torch.device, works: Sequence[Callable[[], object]], inner: str) -> list[list[float]]:
    """Host us of each of `works`, one run of each after the other, again and again; the device idle before each.

    Until each returns, not until the device is done. In turns, since what is taken from another must have had the same
    neighbours.
    """
    times: list[list[float]] = [[] for _ in works]
    sweep = Sweeper()
    for _ in range(WARMUP_RUNS + TIMED_RUNS):
        for work, found in zip(works, times, strict=True):
            _wait(device)
            if inner == "inductor":
                sweep()
            begin = time.perf_counter()
            result = work()
            found.append((time.perf_counter() - begin) * 1e6)
            del result
    return [found[WARMUP_RUNS:] for found in times]


def _compiled(module: nn.Module, inner: str) -> Callable[..., Any]:
    # In planned graphs few buffers of a kernel's own size are used again.
    options: Any = {"allow_buffer_reuse": False} if inner == "inductor" else None
    return torch.compile(module, backend=inner, options=options, dynamic=False)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
