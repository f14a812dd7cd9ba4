"""Measure what the host spends on a step: launches, transfers, and the way into a compiled forward and backward.

    chain of products, 4 and 36 long      -> the way in, and one product
    chain of products with something else -> that something
    network of 4 and 36 parameters        -> what each parameter adds to a forward and to a backward

Tensors are so small that the device is never what is waited for. Everything is compiled by the same inner compiler as
the step, in a thread of its own: the caller may be in the middle of a compilation.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxhome.device import HostCosts
from fxhome.runtime import codec_ops, ops
from fxhome.runtime.compile_apart import outside_of_compilation

SHORT, LONG = 4, 36
SIDE = 64
WARMUP_RUNS = 5
TIMED_RUNS = 60
_SWAP_BYTES = 1 << 16


def measure_host_costs(device: torch.device, inner: str) -> HostCosts:
    """The host's costs under `inner` ("aot_eager" or "inductor") on `device`; takes a few seconds, mostly compiling."""
    return outside_of_compilation(lambda: _measure(device, inner))


def _measure(device: torch.device, inner: str) -> HostCosts:
    kinds = ((), ("kernel",), ("view",), ("convolution",))
    chains = [_chain(device, inner, length, kind) for length, kind in ((SHORT, ()), *((LONG, kind) for kind in kinds))]
    with torch.no_grad():
        short, long, *more = (undisturbed(times) for times in in_turns(device, chains))
    library_us = max(0.0, (long - short) / (LONG - SHORT))
    kernel_us, view_us, convolution_us = (max(0.0, (each - long) / LONG) for each in more)
    ahead, back = network_us(device, inner, (SHORT, LONG))
    ahead_us, back_us = ((many - few) / (LONG - SHORT) for few, many in (ahead, back))
    input_us = max(0.0, ahead_us - library_us)
    # The backward of a product: two products, each of a transposed operand.
    gradient_us = max(0.0, back_us - 2 * library_us - 2 * view_us)
    moved = {name: undisturbed(times) for name, times in transfer_us(device).items()}
    return HostCosts(
        inner=inner,
        forward_us=max(0.0, ahead[0] - SHORT * ahead_us),
        backward_us=max(0.0, back[0] - SHORT * back_us),
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

    kinds: "kernel" (a rectifier), "view" (a transposition), "convolution" (of a tensor beside the chain).
    """
    lines = ["x = torch.mm(x, w)"]
    if "kernel" in kinds:
        lines.append("x = torch.relu(x)")
    if "view" in kinds:
        lines.append("x = torch.t(x)")
    if "convolution" in kinds:
        lines.append("image = torch.conv2d(image, filters, None, 1, 1)")
    results = "x, image" if "convolution" in kinds else "x"
    module = _module("x, w, image, filters", lines * length, results)
    dtype = _dtype(device)
    arguments = (
        torch.full((SIDE, SIDE), 1 / SIDE, device=device, dtype=dtype),
        torch.full((SIDE, SIDE), 1 / SIDE, device=device, dtype=dtype),
        torch.full((2, SIDE, 8, 8), 0.5, device=device, dtype=dtype).to(memory_format=torch.channels_last),
        torch.full((SIDE, SIDE, 3, 3), 1e-3, device=device, dtype=dtype).to(memory_format=torch.channels_last),
    )
    run = _compiled(module, inner)
    return lambda: run(*arguments)


def network_us(device: torch.device, inner: str, sizes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Host us of the forward and of the backward, gradients included, of compiled chains of products, by size.

    sizes: how many products, each with a parameter of its own.
    """
    argument = torch.full((SIDE, SIDE), 1 / SIDE, device=device, dtype=_dtype(device), requires_grad=True)
    upstream = torch.ones(SIDE, SIDE, device=device, dtype=_dtype(device))
    networks = [_network(device, parameters) for parameters in sizes]
    compiled = [_compiled(network, inner) for network in networks]
    results: list[torch.Tensor] = []

    def ahead(index: int) -> None:
        argument.grad = None
        for parameter in networks[index].parameters():
            parameter.grad = None
        results[:] = [compiled[index](argument)]

    def back() -> None:
        results.pop().backward(upstream)

    works = [work for index in range(len(sizes)) for work in (functools.partial(ahead, index), back)]
    with torch.enable_grad():
        times = [undisturbed(each) for each in in_turns(device, works)]
    return times[::2], times[1::2]


def _network(device: torch.device, parameters: int) -> nn.Module:
    network = _module("x", [f"x = torch.mm(x, self.w{i})" for i in range(parameters)], "x")
    for i in range(parameters):
        weight = torch.full((SIDE, SIDE), 1 / SIDE, device=device, dtype=_dtype(device))
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
    """Host us of every operator of a swap and of a codec, by name, in many round trips of one small tensor."""
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


def undisturbed(times: Sequence[float]) -> float:
    """The lower quartile: other processes on the same cores only ever add."""
    return statistics.quantiles(times, n=4)[0]


def in_turns(device: torch.device, works: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Host us of each of `works`, one run of each after the other, again and again; the device idle before each.

    Until each returns, not until the device is done. In turns, since what is taken from another must have had the same
    neighbours.
    """
    times: list[list[float]] = [[] for _ in works]
    for _ in range(WARMUP_RUNS + TIMED_RUNS):
        for work, found in zip(works, times, strict=True):
            _wait(device)
            begin = time.perf_counter()
            result = work()
            found.append((time.perf_counter() - begin) * 1e6)
            del result
    return [found[WARMUP_RUNS:] for found in times]


def _compiled(module: nn.Module, inner: str) -> Callable[..., Any]:
    # Planned graphs are compiled so that no buffer is used again.
    options: Any = {"allow_buffer_reuse": False} if inner == "inductor" else None
    return torch.compile(module, backend=inner, options=options, dynamic=False)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
