"""The joint graph of a model without its weights: traced on fake CPU tensors as the inner backend would, never run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.graph_module import GraphModule
from torch.utils._pytree import tree_map

from fxhome.errors import FxhomeError, UnsupportedGraphError, reason_of
from fxhome.gpu_decompositions import gpu_decompositions
from fxhome.passes.torch_compat import copy_graph, has_uncompiled_callers

T = TypeVar("T")
Use = Callable[[GraphModule, object, int, "list[int] | None"], T]


class _TracedError(BaseException):
    """Leaves the trace once the graph was used: it must not be run. Not an Exception, so nothing swallows it."""


def trace_joint(
    model: nn.Module,
    example_args: tuple[Any, ...],
    inner: str,
    use: Use[T],
    on_part: Callable[[str], None] = lambda _: None,
    *,
    planned_for: str = "cpu",
) -> T:
    """What `use(joint graph, its inputs, number of forward outputs, static inputs)` makes of the first training graph.

    inner: "inductor" or "aot_eager", whose decompositions and rewrites the joint graph has then been through.
    planned_for: the kind of device, "cuda" or "cpu", that it would make them for. on_part: called with a message where
    that graph is only a part of the step. Raises UnsupportedGraphError where there is no
    training graph or the model itself fails, and what `use` raises of fxhome's own errors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model, fake_args = _without_data(model, example_args, mode)
    found: list[T] = []
    failure: list[FxhomeError] = []
    broken: list[str] = []

    def partition(joint: GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **extra: Any) -> Any:
        found.append(use(joint, joint_inputs, num_fwd_outputs, extra.get("static_lifetime_input_indices")))
        raise _TracedError

    def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        reason = _why_a_part(gm)
        try:
            if inner == "inductor":
                _trace_for_inductor(gm, example_inputs, partition, planned_for)
            else:
                _trace_plain(gm, example_inputs, partition)
        except FxhomeError as error:
            failure.append(error)
        except _TracedError:
            if reason is not None and not found:
                broken.append(reason)
            elif reason is not None:
                on_part(
                    f"only the first graph of this model is planned, not the whole step: {reason}; "
                    "remove the graph break, or plan the running step with torch.compile(backend='fxhome')"
                )
        return _leave

    try:
        torch.compile(fake_model, backend=compile_graph)(*fake_args)
    except _TracedError:
        pass
    except torch._dynamo.exc.BackendCompilerFailed:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedGraphError(
            f"plan: what this model computes depends on the values of its data ({error}), and offline there are none; "
            "plan it on real inputs with fxhome.optimize or torch.compile(backend='fxhome')"
        ) from error
    except Exception as error:  # the user's model may raise anything
        raise UnsupportedGraphError(
            f"plan: the model cannot be traced with these inputs: {reason_of(error)}; "
            "call the model once with such inputs to see where, and mend it or them first"
        ) from error
    if failure:
        raise failure[0]
    if broken and not found:
        raise UnsupportedGraphError(
            f"plan: the first graph of this model trains nothing, and only that is traced offline: {broken[0]}; "
            "remove the graph break, or plan it on real inputs with fxhome.optimize or torch.compile(backend='fxhome')"
        )
    if not found:
        raise UnsupportedGraphError(
            "plan: no training graph was found; the model must have a trainable parameter that its outputs depend on"
        )
    return found[0]


def _why_a_part(gm: GraphModule) -> str | None:
    """Why Dynamo's graph is not the whole of what was compiled, or None if it is."""
    why = getattr(gm, "compile_subgraph_reason", None)
    if why is not None and why.graph_break:
        place = f" at {why.user_stack[-1].filename}:{why.user_stack[-1].lineno}" if why.user_stack else ""
        return f"it breaks off{place} ({str(why.reason).splitlines()[0]})"
    return "code around it could not be compiled as one graph" if has_uncompiled_callers() else None


def _leave(*_: Any, **__: Any) -> Any:
    """Stands for every compiled graph."""
    raise _TracedError


def _trace_plain(gm: GraphModule, example_inputs: Sequence[Any], partition: Callable[..., Any]) -> None:
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(
        fw_compiler=_leave,
        bw_compiler=_leave,
        inference_compiler=_leave,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiler(gm, example_inputs)


def _trace_for_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], partition: Callable[..., Any], planned_for: str
) -> None:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), **gpu_decompositions()} if planned_for == "cuda" else None

    # compile_fx owns what it is given and may change it.
    own = fx.GraphModule(gm, copy_graph(gm.graph))
    own.meta = dict(gm.meta)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compile_fx(
            own,
            list(example_inputs),
            inner_compile=_leave,
            config_patches={"custom_partitioner_fn": _Partitioner(partition)},
            decompositions=table,
        )


class _Partitioner(CustomPartitionerFn):
    """Hands the joint graph on; nothing compiled with it is ever kept."""

    def __init__(self, partition: Callable[..., Any]) -> None:
        self.partition = partition

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        return self.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "fxhome offline"


def _without_data(
    model: nn.Module, example_args: tuple[Any, ...], mode: FakeTensorMode
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of the model and its inputs as fake CPU tensors; tied weights stay tied, nothing real is copied."""
    known: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
            return tensor
        if id(tensor) not in known:
            with mode, torch.no_grad():
                blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            known[id(tensor)] = (
                nn.Parameter(blank, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else blank.requires_grad_(tensor.requires_grad)
            )
        result: torch.Tensor = known[id(tensor)]
        return result

    for tensor in [*model.parameters(), *model.buffers()]:
        fake(tensor)
    memo = dict(known)
    arguments = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, example_args)
    return copy.deepcopy(model, memo), arguments
