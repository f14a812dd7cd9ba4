"""The private names of torch that the passes use, in one place, for torch 2.11 to 2.14."""

import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import GraphModule
from torch.utils._pytree import tree_leaves

NOT_PADDED = "dislike_padding"
"""A node's meta under which Inductor does not widen the rows of its result to aligned ones. What is moved or encoded
comes back in the recorded strides; what the backward still holds when its copy ends is a result of the forward, and of
those Inductor pads the rows before anything else may say how they lie.
"""


def output_descriptions(graph: fx.Graph, count: int) -> list[Any]:
    """What AOTAutograd says of each flat output of a joint graph (None where it says nothing)."""
    (output,) = graph.find_nodes(op="output")
    given = output.meta.get("desc")
    if given is None:
        return [None] * count
    leaves = tree_leaves(given, is_leaf=lambda leaf: not isinstance(leaf, list | tuple))
    return list(leaves) if len(leaves) == count else [None] * count


def saved_descriptions(count: int) -> list[Any]:
    """Descriptions of `count` tensors saved for the backward."""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    return [SavedForBackwardsAOTOutput(i) for i in range(count)]


def compile_lock() -> AbstractContextManager[object]:
    """Held by torch whenever it compiles: tracing patches torch's own functions, for all threads."""
    from torch._dynamo.convert_frame import compile_lock as lock

    return lock


def has_uncompiled_callers() -> bool:
    """Whether the function that Dynamo compiles now was called by code that it could not compile as one graph.

    That code has a graph break, maybe in a loop: it runs as plain Python, and what else it calls are graphs of their
    own. Its frames stand between Dynamo's and the call of what torch.compile returned.
    """
    own = os.path.dirname(torch.__file__)
    is_outside = False
    frame: FrameType | None = sys._getframe()
    found = False
    while frame is not None:
        code = frame.f_code
        if not is_outside:
            is_outside = code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py")
        elif code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return found
        elif not code.co_filename.startswith(own):
            found = True
        frame = frame.f_back
    return False


def compiled_for() -> tuple[Any, Any] | None:
    """What Dynamo compiles a frame for just now: the backend that was asked for, and what torch.compile was given (the
    outermost where one such runs inside another). None outside of a compilation.
    """
    backend = root = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if name == "_compile" and path.endswith("convert_frame.py") and backend is None:
            backend = _own_backend(frame.f_locals["compiler_fn"])
        elif name == "compile_wrapper" and path.endswith("eval_frame.py"):
            root = frame.f_locals.get("fn")
        frame = frame.f_back
    return None if backend is None or root is None else (backend, _given(root))


def _own_backend(backend: Any) -> Any:
    for name in ("_torchdynamo_orig_backend", "compiler_fn"):
        while (inner := getattr(backend, name, None)) is not None:
            backend = inner
    return backend


def _given(root: Any) -> Any:
    """The module or function behind what Dynamo wraps around it."""
    for name in ("__wrapped__", "func", "__self__"):
        while (inner := getattr(root, name, None)) is not None and not isinstance(root, torch.nn.Module):
            root = inner
    return root


def frame_given_up() -> tuple[CodeType, Any, BaseException] | None:
    """Inside a callback at the end of a compilation by Dynamo: the code of the frame, the backend that was asked for,
    and why none of it could be compiled. None where it was compiled, or holds nothing to compile.
    """
    error = sys.exc_info()[1]
    if error is None or isinstance(error, torch._dynamo.exc.SkipFrame):
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_code.co_filename.endswith("convert_frame.py"):
            return frame.f_locals["code"], _own_backend(frame.f_locals["compiler_fn"]), error
        frame = frame.f_back
    return None


def at_end_of_compilation(callback: Callable[[object], None]) -> None:
    """Have Dynamo call `callback` after every compilation from now on; twice is once."""
    # A lock is held meanwhile that each compilation takes: Dynamo, which may be looking at every frame just then, must
    # not look at this one.
    unseen = _unseen(callback)
    handler = torch._dynamo.callback.callback_handler
    if not isinstance(handler.end_callbacks, _LastingCallbacks):
        handler.end_callbacks = _LastingCallbacks(handler.end_callbacks)
    handler.end_callbacks.last(unseen)


class _LastingCallbacks(list[Any]):
    """Callbacks some of which stay when `torch._dynamo.reset()` clears them all: what is compiled next, before any
    backend is asked, is to be seen as well.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        super().__init__(callbacks)
        self._lasting: list[Any] = []

    def last(self, callback: Any) -> None:
        """Add a callback that stays."""
        if callback not in self._lasting:
            self._lasting.append(callback)
            self.append(callback)

    def clear(self) -> None:
        """Drop all others."""
        self[:] = self._lasting


@functools.cache
def _unseen(function: Callable[[object], None]) -> Callable[[object], None]:
    unseen: Callable[[object], None] = torch.compiler.disable(function)
    return unseen


def forgive_specialisation(context: Any) -> bool:
    """Make torch.compile accept numbers for sizes that `mark_dynamic` marked; whether there were any.

    context: Dynamo's tracing context. Dynamo checks the marks after its backend is done, and would raise.
    """
    found = False
    for symbolic in context.tensor_to_context.values() if context is not None else ():
        marks = getattr(symbolic, "constraint_sizes", None) or []
        for dimension, mark in enumerate(marks):
            if mark is not None and not mark.warn_only:
                marks[dimension] = None
                found = True
    return found


def has_unbacked_symbols(value: Any) -> bool:
    """Whether a recorded value, or a size of it, is known only once the step has computed it."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def is_inside_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward in it is a checkpoint's, run again."""
    return int(torch._C._current_graph_task_id()) != -1


def make_module(root: GraphModule, graph: fx.Graph) -> GraphModule:
    """A graph module over `graph` with the attributes of `root`, compiled to source on first use."""
    from torch.fx._lazy_graph_module import _make_graph_module

    module = _make_graph_module(root, graph)
    assert isinstance(module, GraphModule)
    return module


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes can be changed: names, values and metadata are shared, and so is how its source is written."""
    new = fx.Graph(tracer_cls=getattr(graph, "_tracer_cls", None))
    copied = new.graph_copy(graph, val_map={}, return_output_node=True)
    assert isinstance(copied, tuple)
    values, old_output = copied
    output = new.output(values, type_expr=getattr(old_output, "type", None))
    output.meta = dict(old_output.meta)
    new._codegen = graph._codegen
    return new


def copy_dynamo_module(module: GraphModule) -> GraphModule:
    """The same over a copied graph, with what AOTAutograd reads off a Dynamo graph (which inputs are parameters)."""
    copied = fx.GraphModule(module, copy_graph(module.graph))
    copied.meta = dict(module.meta)
    pairs = [(module, copied, "_param_name_to_source")]
    placeholders = [graph.find_nodes(op="placeholder") for graph in (module.graph, copied.graph)]
    pairs += [(old, new, "_dynamo_source") for old, new in zip(*placeholders, strict=True)]
    for old, new, name in pairs:
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    return copied


def boxed_callable(module: GraphModule) -> Any:
    """Run `module` as one Python function that takes a list, empties it, and drops every value after its last use."""
    graph = module.graph
    graph.set_codegen(_BoxedCodeGen())
    compiled = torch.fx.GraphModule(module, graph)
    run = compiled.forward

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def static_metadata() -> Any:
    """The metadata AOTAutograd is tracing with right now, or None outside of it."""
    context = torch._guards.TracingContext.try_get()
    return getattr(context, "fw_metadata", None) if context is not None else None


def convolution_library(arguments: tuple[Any, ...]) -> str:
    """Which kernels ATen runs for the arguments of aten.convolution, as it names them ("Cudnn", "CudnnTranspose", ...).

    Tensors may be fake; call it inside their mode then.
    """
    choice: Any = torch._C._select_conv_backend(*arguments)
    return str(choice.name)


def donate_nothing() -> None:
    """Say to the step being traced that no saved tensor is donated: backward(retain_graph=True) is allowed then."""
    metadata = static_metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


@functools.cache
def inductor_generates(target: torch._ops.OpOverload) -> bool:
    """Whether Inductor has a lowering of its own for an operator, rather than a call of ATen's kernel."""
    lowering: Any = importlib.import_module("torch._inductor.lowering")
    return target in lowering.lowerings and target not in lowering.fallbacks


def graph_caches_off() -> dict[str, bool]:
    """Inductor's settings under which it compiles a graph that it may have in a cache.

    TORCHINDUCTOR_FX_GRAPH_CACHE in the environment is above `fx_graph_cache`: there all caches are off.
    """
    from torch._inductor import config

    off = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with config.patch(off):
        is_forced = bool(config.fx_graph_cache)
    return off | {"force_disable_caches": True} if is_forced else off


def optimizes_layouts() -> bool:
    """Whether Inductor may choose the layout of convolutions by itself, by the settings of this moment."""
    return bool(torch._inductor.config.layout_optimization)


def chooses_channels_last(forward: GraphModule) -> bool:
    """Whether Inductor would run the 2-d convolutions of a forward graph channels-last on a GPU."""
    graph: Any = importlib.import_module("torch._inductor.graph")
    # On CPU it always would; a graph may be traced there for a GPU.
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return bool(graph.GraphLowering.decide_layout_opt(forward, is_inference=False))
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def frugal_benchmarks(limit_bytes: int | None = None) -> Iterator[None]:
    """Inductor tries a kernel's variants on the step's own tensors: that takes no memory in here that no plan knows of.

    It does so beside a buffer of the device's cache size (in here beside none), and on copies of what the kernel
    overwrites. In a forward it makes those on the device whatever that takes. In here they go to the host where
    torch would have more than `limit_bytes` allocated with them (CUDA only; None: left as it is), and come back from
    there behind all trials of a variant rather than within each, whose time they would outweigh by far.
    """
    module: Any = importlib.import_module("torch._inductor.runtime.benchmarking")
    own = vars(module.benchmarker)
    before = own.get("L2_cache_size")
    own["L2_cache_size"] = 512
    try:
        with _copies_within(limit_bytes) if limit_bytes is not None else contextlib.nullcontext():
            yield
    finally:
        own.pop("L2_cache_size")
        if before is not None:
            own["L2_cache_size"] = before


def _computes_indices(source: str | None) -> bool:
    """Whether a Triton kernel may use values that it converts to integers as indices; one without source may."""
    if source is None:
        return True
    return "device_assert" in source and re.search(r"\.to\(tl\.u?int(8|16|32|64)\)", source) is not None


_COPY_GRANULE_BYTES = 1 << 20
"""What a copy may take of the allocator beyond its size."""


@contextlib.contextmanager
def _copies_within(limit_bytes: int) -> Iterator[None]:
    heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    tuner: Any = heuristics.CachingAutotuner
    original, original_bench = tuner.copy_args_to_cpu_if_needed, tuner.bench
    original_restore = tuner.restore_args_from_cpu
    on_the_host = False
    behind: dict[str, Any] = {}
    """What is restored behind the trials that run just now."""

    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal on_the_host
        named = [*zip(self.fn.arg_names, args, strict=False), *kwargs.items()]
        copied = [value for name, value in named if name in self.mutated_arg_names and isinstance(value, torch.Tensor)]
        copies_bytes = sum(value.untyped_storage().nbytes() + _COPY_GRANULE_BYTES for value in copied)
        if torch.cuda.memory_allocated() + copies_bytes <= limit_bytes:
            return {}
        is_asked, self.optimize_mem = self.optimize_mem, True
        try:
            chosen = original(self, *args, **kwargs)
        finally:
            self.optimize_mem = is_asked
        on_the_host = on_the_host or bool(chosen)
        return chosen

    def restore(self: Any, copies: dict[str, Any]) -> None:
        # A kernel takes as long on what it has overwritten already; indices, though, must stay within bounds.
        may_wait = not _computes_indices(getattr(self.fn, "src", None))
        later = {name: pair for name, pair in copies.items() if may_wait and pair[0].is_floating_point()}
        behind.update(later)
        original_restore(self, {name: pair for name, pair in copies.items() if name not in later})

    def bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_bench(self, *args, **kwargs)
        finally:
            for overwritten, copy in behind.values():
                overwritten.as_strided((copy.numel(),), (1,)).copy_(copy, non_blocking=True)
            behind.clear()

    tuner.copy_args_to_cpu_if_needed, tuner.restore_args_from_cpu, tuner.bench = choose, restore, bench
    try:
        yield
    finally:
        tuner.copy_args_to_cpu_if_needed, tuner.restore_args_from_cpu = original, original_restore
        tuner.bench = original_bench
        if on_the_host:
            # Pinned copies as large as activations: nothing asks for such again.
            torch._C._host_emptyCache()
