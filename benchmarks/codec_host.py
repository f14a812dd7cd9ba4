"""What the operators of transfers and codecs cost the host, alone and within a training step."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fxhome.cuda_kernels import codec_by_name
from fxhome.runtime import codec_ops, codec_sites, ops

CALLS = 200


def host_cost(size_bytes: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """One row per call: the codecs by themselves, then the operators, on a tensor of `size_bytes`."""
    device = torch.device("cuda", torch.cuda.current_device())
    values = torch.relu(torch.randn(size_bytes // 4, device=device))
    for name, source in (("zvc", values), ("bitpack", values > 0), ("int8", values), ("exponent", values.bfloat16())):
        codec = codec_by_name(name)
        encoded = torch.empty(codec.worst_case_bytes(source.numel(), source.dtype), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        yield {"case": f"codec {name} encode", "host_us": per_call_us(lambda: codec.encode(source, encoded))}  # noqa: B023
        yield {"case": f"codec {name} decode", "host_us": per_call_us(lambda: codec.decode(encoded, target))}  # noqa: B023
    for name, seconds in operator_seconds(values).items():
        yield {"case": f"operator {name}", "host_us": statistics.median(seconds) * 1e6}


def per_call_us(call: Callable[[], object]) -> float:
    """Host microseconds of one call among many, without waiting for the device."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


def operator_seconds(values: torch.Tensor) -> dict[str, list[float]]:
    """Seconds of every operator in many round trips of one tensor, the device idle before each."""
    codec_sites.clear()
    found: dict[str, list[float]] = {}
    size_bytes, place = values.untyped_storage().nbytes(), (list(values.shape), list(values.stride()), 0, values.dtype)

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        found.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for _ in range(CALLS):
        torch.cuda.synchronize()
        host = timed("swap_out", ops.swap_out, values)
        host = timed("swap_out_wait", ops.swap_out_wait, host, values)
        back = timed("swap_in", ops.swap_in, host, *place, values.device)
        timed("swap_in_wait", ops.swap_in_wait, back, host)
        torch.cuda.synchronize()
        encoded = timed("encode zvc", codec_ops.encode_op, values, size_bytes, "zvc", size_bytes // 2, "host cost")
        host = timed("swap_out_encoded", codec_ops.swap_out_encoded_op, encoded)
        host = ops.swap_out_wait(host, encoded)
        encoded = timed("swap_in_encoded", codec_ops.swap_in_encoded_op, host, values.device)
        encoded = timed("swap_in_wait of an unknown size", ops.swap_in_wait, encoded, host)
        timed("decode zvc", codec_ops.decode_op, encoded, size_bytes, *place, "zvc")
        torch.cuda.synchronize()
        encoded = timed("encode", codec_ops.encode_op, values, size_bytes, "int8")
        timed("decode", codec_ops.decode_op, encoded, size_bytes, *place, "int8")
    return found


class _Timed(fx.Interpreter):
    """Runs a graph node by node and times its transfer and codec operators on the host."""

    def __init__(self, module: fx.GraphModule, found: dict[str, list[float]]) -> None:
        super().__init__(module)
        self.found = found

    def run_node(self, n: fx.Node) -> Any:
        """Time what belongs to fxhome."""
        begin = time.perf_counter()
        result = super().run_node(n)
        elapsed = time.perf_counter() - begin
        if n.op == "call_function":
            namespace = getattr(n.target, "namespace", "")
            name = str(getattr(n.target, "_opname", "")) if namespace == "fxhome" else "all other operators"
            self.found.setdefault(name, []).append(elapsed)
        return result


def step_cost(
    step: Callable[[Callable[..., Any], Callable[..., Any]], object],
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    compiled: tuple[Callable[..., Any], Callable[..., Any]],
    repeats: int = 5,
) -> Iterator[dict[str, Any]]:
    """Rows of host microseconds per call and calls per step of a placed training step; prints cProfile's top list.

    step: runs one step with the two callables that it is given, each taking a list of inputs.
    """
    found: dict[str, list[float]] = {}
    runs = tuple(_as_boxed(_Timed(module, found)) for module in (forward, backward))
    for repeat in range(repeats + 1):
        if repeat == 1:
            found.clear()
        torch.cuda.synchronize()
        step(*runs)
    torch.cuda.synchronize()
    for name, seconds in sorted(found.items(), key=lambda item: -sum(item[1])):
        yield {
            "operator": name,
            "calls": len(seconds) // repeats,
            "median_us": statistics.median(seconds) * 1e6,
            "mean_us": statistics.fmean(seconds) * 1e6,
            "most_us": max(seconds) * 1e6,
        }
    profile = cProfile.Profile()
    torch.cuda.synchronize()
    profile.enable()
    for _ in range(repeats):
        step(*compiled)
    profile.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
    print("\n".join(_without_blanks(text.getvalue().splitlines())), flush=True)


def _as_boxed(interpreter: fx.Interpreter) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        return interpreter.boxed_run(arguments)

    return run


def _without_blanks(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.strip())
