"""The one-shot and the offline front door: `optimize`, `plan`, `plans`.

fast = fxhome.optimize(model, example_args, memory_budget="20GiB")    traced, planned, metered; a drop-in module
plan = fxhome.plan(model, example_args, memory_budget="20GiB", device=profile)    nothing is executed
fxhome.plans()                                                       the plans alive in this process
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils._pytree import tree_leaves

from fxhome import backend, ledger
from fxhome.device import DeviceProfile, cached_profile
from fxhome.eager_frames import watch_frames
from fxhome.errors import OptionError, UnsupportedGraphError
from fxhome.offline import plan_offline
from fxhome.options import Options
from fxhome.placement import Plan
from fxhome.report import render


class Optimized(nn.Module):
    """A module that runs `model` under its plan: same parameters, same results, same gradients.

    `plan` is a fresh snapshot of the plan in force; `report()` prints it with what was measured.
    """

    _step: Any
    _graphs: list[Any]

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__()
        self.model = model
        self._options = options
        self._compile()

    def _compile(self) -> None:
        options = self._options
        graphs: list[Any] = []

        def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            graph = backend.fxhome(gm, example_inputs, options=options)  # type: ignore[arg-type]
            graphs.append(graph)
            return graph

        compile_graph.holds_budget = True  # type: ignore[attr-defined]
        watch_frames()
        self._graphs = graphs
        # Not a submodule: the parameters are the model's, once.
        self.__dict__["_step"] = torch.compile(self.model, backend=compile_graph)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: the model and the options; it plans again by itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_step", "_graphs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._step(*args, **kwargs)

    @property
    def all_plans(self) -> list[Plan]:
        """One plan per compiled graph, oldest first."""
        found = [getattr(graph, "plan", None) for graph in self._graphs]
        return [plan for plan in found if plan is not None]

    @property
    def plan(self) -> Plan:
        """The plan of the (first) graph."""
        plans = self.all_plans
        if not plans:
            raise UnsupportedGraphError(
                "optimize: no training graph was compiled, so there is no plan; the model must have a trainable "
                "parameter "
                "and must not be traced under torch.no_grad()"
            )
        return plans[0]

    def report(self, console: Console | None = None) -> None:
        """Print asked, predicted and measured, and where the bytes went."""
        render(self.all_plans, console if console is not None else Console())


def optimize(
    model: nn.Module, example_args: Sequence[Any], memory_budget: object = None, **options: object
) -> Optimized:
    """Plan `model` for `memory_budget` and run one metered forward and backward on `example_args`.

    Args: example_args: positional inputs, real tensors on the model's device. memory_budget: bytes (int, "8GiB") or a
    share
    ("60%", 0.6) of the peak without fxhome; absent: all the device has free. options: every field of `Options`.

    The metered step leaves gradients, buffers and random state as they were. Raises OptionError, InfeasibleBudgetError
    (with `minimum_bytes`), HostMemoryError, PlanMismatchError, DeviceError, UnsupportedGraphError (no graph at all).
    """
    _check_example_args(example_args)
    parsed = Options.from_mapping({"memory_budget": memory_budget, **options})
    fast = Optimized(model, parsed)
    with _left_as_it_was(model):
        outputs = fast(*example_args)
        scalars = [
            leaf.float().sum() if leaf.dtype.is_floating_point else leaf.abs().float().sum()
            for leaf in tree_leaves(outputs)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        del outputs
        if scalars:
            torch.stack(scalars).sum().backward() if len(scalars) > 1 else scalars[0].backward()
    if not fast._graphs:
        raise UnsupportedGraphError(
            f"optimize: torch.compile could make no graph of {type(model).__name__}, so nothing of it is planned; "
            "torch.compile(model, fullgraph=True) names what breaks the graph: take it out of its loop or of the model"
        )
    return fast


def plan(
    model: nn.Module,
    example_args: Sequence[Any],
    memory_budget: object = None,
    *,
    device: DeviceProfile | str | Path | None = None,
    **options: object,
) -> Plan:
    """Plan `model` without running it: no weights needed (a model on the meta device will do), nothing timed.

    Args: device: a DeviceProfile, the path of a saved one, "cpu" or "cuda" (this machine's); absent: where the model
    is.
    The plan is an estimate (`plan.estimated`): costs come from the profile's rates. Raises as `optimize` does.
    """
    _check_example_args(example_args)
    parsed = Options.from_mapping({"memory_budget": memory_budget, **options})
    return plan_offline(model, tuple(example_args), parsed, _profile(model, device, parsed.inner))


def plans() -> list[Plan]:
    """Fresh snapshots of the plans alive in this process, oldest first."""
    return ledger.plans()


def _check_example_args(example_args: object) -> None:
    if not isinstance(example_args, tuple | list):
        raise OptionError(
            f"example_args is a {type(example_args).__name__}; give a tuple of the model's positional inputs, for "
            "example (x,)"
        )


def _profile(model: nn.Module, device: DeviceProfile | str | Path | None, inner: str | None) -> DeviceProfile:
    if isinstance(device, DeviceProfile):
        return device
    if device is None:
        kinds = {tensor.device.type for tensor in model.parameters()}
        return cached_profile("cuda" if "cuda" in kinds else "cpu", inner or "inductor")
    if isinstance(device, str) and (device == "cpu" or device.split(":")[0] == "cuda"):
        return cached_profile(device, inner or "inductor")
    return DeviceProfile.load(device)


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back gradients, buffers and random state. The copies are plain bytes: they must not count as tensors."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, _bytes_of(buffer)) for buffer in model.buffers()]
    cpu_state = torch.random.get_rng_state()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    cuda_states = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, content in buffers:
                _restore(buffer, content)
        torch.random.set_rng_state(cpu_state)
        for device, state in cuda_states:
            torch.cuda.set_rng_state(state, device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def _restore(tensor: torch.Tensor, content: bytes) -> None:
    if content:
        saved = torch.frombuffer(bytearray(content), dtype=tensor.dtype).reshape(tensor.shape)
        tensor.detach().copy_(saved)
