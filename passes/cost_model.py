"""What every node of a joint graph costs: measured where it is a kernel of its own, by bytes where it would be fused.

    node costs = measured (each distinct operator, shapes, strides, dtypes once per device; cached on disk)
               | bytes / memory bandwidth + launch      pointwise operators and small reductions
               | max(operations / rate, bytes / bandwidth)   offline, or where the example does not fit (marked
               estimated)
               | nothing                                views, getitems, effects on inputs

Times steer the search; they never enter the peak. Workspace does, on CUDA.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxhome.device import DeviceProfile, allocatable_bytes, cache_directory, measuring_turn
from fxhome.passes.classify import is_effectful
from fxhome.passes.facts import GraphFacts
from fxhome.passes.fusion import (
    adds_bias_apart,
    is_generated_loop,
    is_pointwise,
    is_reduction,
    memory_sources,
    window_operations,
)
from fxhome.passes.kernel_reads import unshared_reads
from fxhome.passes.op_timing import OpTiming, example_bytes, outside_tracing, time_op
from fxhome.passes.problem import Costs
from fxhome.passes.simulate_kernels import ALIAS, GETITEM, OWNER, VIRTUAL
from fxhome.progress import progress

log = logging.getLogger("fxhome.cost")

SMALL_OP_BYTES = 1 << 16
_MEASURED_NAMESPACES = frozenset({"aten", "torchvision", "quantized_decomposed"})


def op_signature(node: fx.Node, args: Sequence[Any] | None = None) -> str:
    """Target, constants, and the layout of every tensor: what a measured time belongs to.

    `args`: in place of the node's own.
    """

    def describe(value: Any) -> str:
        if isinstance(value, fx.Node):
            return describe(value.meta.get("val"))
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(map(int, value.shape))}{tuple(map(int, value.stride()))}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(describe(leaf) for leaf in value) + "]"
        return repr(value)

    keywords = ",".join(f"{key}={describe(value)}" for key, value in sorted(node.kwargs.items()))
    return f"{node.target}({describe(list(node.args if args is None else args))},{keywords})"


def tensor_bytes(node: fx.Node) -> int:
    """Bytes that `node` must read and write at least once: every input and every result."""
    values = [source.meta.get("val") for source in node.all_input_nodes] + [node.meta.get("val")]
    return sum(_touched(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _touched(value: torch.Tensor) -> int:
    # An expanded tensor is read once, however often its elements repeat.
    real = math.prod(int(n) for n, s in zip(value.shape, value.stride(), strict=True) if int(s) != 0)
    return real * value.dtype.itemsize


def estimate_us(node: fx.Node, profile: DeviceProfile) -> float:
    """Roofline time of `node` from its operations and bytes."""
    move_us = tensor_bytes(node) / profile.memory_bytes_per_s * 1e6
    return profile.launch_us + max(move_us, _flops(node) / _rate(node, profile) * 1e6)


def _rate(node: fx.Node, profile: DeviceProfile) -> float:
    rates = dict(profile.flops_per_s)
    for leaf in tree_leaves([source.meta.get("val") for source in node.all_input_nodes]):
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            name = str(leaf.dtype).removeprefix("torch.")
            return rates.get(name, min(rates.values()))
    return min(rates.values())


def _flops(node: fx.Node) -> float:
    from torch.utils.flop_counter import flop_registry

    packet = getattr(node.target, "overloadpacket", None)
    counter: Callable[..., Any] | None = flop_registry.get(packet)
    if counter is None:
        return 0.0
    args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    kwargs = fx.node.map_arg(node.kwargs, lambda source: source.meta["val"])
    return float(counter(*args, **kwargs, out_val=node.meta["val"]))


class TimingCache:
    """Measured operator times of one device and set of versions, kept in one JSON file."""

    def __init__(self, profile: DeviceProfile, directory: Path | None = None) -> None:
        key = hashlib.sha256(f"{profile.fingerprint()}|{profile.versions}|6".encode()).hexdigest()[:16]
        self.path = (directory or cache_directory()) / f"ops-{profile.kind}-{key}.json"
        self.entries: dict[str, OpTiming] = {}
        self.read()

    def read(self) -> None:
        """Add what the file has by now: other processes measure, too."""
        if self.path.exists():
            try:
                stored = json.loads(self.path.read_text(encoding="utf-8"))
                self.entries |= {name: _timing(*figures) for name, figures in stored.items()}
            except (OSError, ValueError, TypeError, AttributeError) as error:
                log.warning("%s cannot be read (%s); operators are measured again", self.path, error)

    def save(self) -> None:
        """Write all entries; a reader never sees half a file. A read-only cache directory costs only the reuse."""
        document = json.dumps(
            {name: [t.time_us, t.workspace_bytes, t.host_us] for name, t in sorted(self.entries.items())}
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as handle:
                handle.write(document)
            os.replace(handle.name, self.path)
        except OSError as error:
            log.warning("%s cannot be written (%s); operators will be measured again next time", self.path, error)


def _timing(time_us: float, workspace_bytes: int, host_us: float | None = None) -> OpTiming:
    return OpTiming(float(time_us), int(workspace_bytes), None if host_us is None else float(host_us))


def _must_measure(node: fx.Node, kind: int, device_type: str) -> bool:
    target = node.target
    if kind in (ALIAS, GETITEM) or node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in _MEASURED_NAMESPACES or is_effectful(node) or is_pointwise(node):
        return False
    devices = {
        leaf.device.type
        for leaf in tree_leaves([s.meta.get("val") for s in node.all_input_nodes])
        if isinstance(leaf, torch.Tensor)
    }
    return devices == {device_type} and example_bytes(node) > SMALL_OP_BYTES


def node_costs(
    module: fx.GraphModule, facts: GraphFacts, profile: DeviceProfile, *, measure: bool, fusing: bool = False
) -> Costs:
    """Cost every node of a normalized joint graph, in the order of `facts`.

    measure: time distinct operators on the device of the graph (which must be `profile`'s); False: nothing is executed.
    fusing: pointwise operators and reductions are loops of generated kernels: they cost what these read and write.
    """
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    fused = _fused_costs(nodes, facts, profile) if fusing else {}
    biased = {i for i, node in enumerate(nodes) if fusing and profile.kind == "cuda" and adds_bias_apart(node)}
    cache = TimingCache(profile) if measure else None
    measured: dict[int, str] = {}
    if cache is not None:
        wanted: dict[str, tuple[fx.Node, tuple[Any, ...]]] = {}
        for i, node in enumerate(nodes):
            if i not in fused and _must_measure(node, facts.node_kind[i], facts.device_type):
                args = (*node.args[:2], None, *node.args[3:]) if i in biased else node.args
                measured[i] = op_signature(node, args)
                wanted[measured[i]] = node, args
        _measure_missing(wanted, cache, facts.device_type)
    times: list[float] = []
    workspaces: list[int] = []
    estimated: list[bool] = []
    hosts: list[float | None] = []
    for i, node in enumerate(nodes):
        timing = cache.entries.get(measured[i]) if cache is not None and i in measured else None
        hosts.append(timing.host_us if timing is not None else None)
        if i in fused:
            times.append(fused[i])
            workspaces.append(0)
            estimated.append(False)
        elif timing is not None:
            times.append(timing.time_us + (_bias_us(node, profile) if i in biased else 0.0))
            workspaces.append(timing.workspace_bytes)
            estimated.append(False)
        elif facts.node_kind[i] in (ALIAS, GETITEM) or node.op != "call_function":
            times.append(estimate_us(node, profile) if is_effectful(node) and node.op == "call_function" else 0.0)
            workspaces.append(0)
            estimated.append(False)
        else:
            times.append(estimate_us(node, profile))
            workspaces.append(0)
            estimated.append(i in measured or not measure)
    return Costs(tuple(times), tuple(workspaces), tuple(estimated), tuple(hosts))


def _bias_us(node: fx.Node, profile: DeviceProfile) -> float:
    """What adding the bias takes besides: nothing in the one loop that reads the result anyhow."""
    write_us = _result_bytes(node) / profile.memory_bytes_per_s * 1e6
    if not all(is_generated_loop(user) for user in node.users):
        return 2 * write_us + profile.kernel_us
    return 0.0 if len(node.users) == 1 else write_us


def _fused_costs(nodes: list[fx.Node], facts: GraphFacts, profile: DeviceProfile) -> dict[int, float]:
    """Time of generated loops by node index: bytes in memory that they read and write; nothing for what is inlined."""
    aliases = {node for i, node in enumerate(nodes) if facts.node_kind[i] in (ALIAS, GETITEM)}
    virtual = {node for i, node in enumerate(nodes) if facts.node_kind[i] == VIRTUAL}
    sources = memory_sources(nodes, virtual | aliases)
    written = {node for i, node in enumerate(nodes) if facts.node_kind[i] == OWNER and is_generated_loop(node)}
    reads = unshared_reads(nodes, facts.node_phase, sources, written, aliases)
    costs: dict[int, float] = {}
    seen: set[object] = set()
    for i, node in enumerate(nodes):
        if node in virtual:
            costs[i] = 0.0
        elif node in written:
            read, launch = sum(_result_bytes(source) for source in reads[node]), profile.kernel_us
            if is_reduction(node):
                # Sums of the same elements are taken in one pass: batch norm's backward needs two of them.
                loop = (facts.node_phase[i], sources[node], str(node.args[1:]))
                read, launch = (0, 0.0) if loop in seen else (read, launch)
                seen.add(loop)
            move_us = (read + _result_bytes(node)) / profile.memory_bytes_per_s * 1e6
            operations = window_operations(node, virtual | aliases) if profile.kind == "cuda" else 0
            costs[i] = launch + max(move_us, operations / integer_rate(profile) * 1e6)
        elif is_effectful(node) and is_generated_loop(node):
            # A running statistic is written by the kernel that computes it.
            costs[i] = tensor_bytes(node) / profile.memory_bytes_per_s * 1e6
    return costs


def _result_bytes(node: fx.Node) -> int:
    return sum(_touched(leaf) for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor))


def integer_rate(profile: DeviceProfile) -> float:
    """Integer operations per second: a CUDA core of today does one where it does a fused multiply and add (two) of
    float32 in half the time.
    """
    return dict(profile.flops_per_s)["float32"] / 4


def _measure_missing(wanted: dict[str, tuple[fx.Node, tuple[Any, ...]]], cache: TimingCache, device_type: str) -> None:
    if wanted.keys() <= cache.entries.keys():
        return
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    with measuring_turn(device):
        cache.read()
        missing = {signature: call for signature, call in wanted.items() if signature not in cache.entries}
        _measure(missing, cache, device)
        cache.save()


def _measure(missing: dict[str, tuple[fx.Node, tuple[Any, ...]]], cache: TimingCache, device: torch.device) -> None:
    with outside_tracing(device), progress("timing operators", total=len(missing)) as advance:
        for signature, (node, args) in missing.items():
            if device.type == "cuda" and 2 * example_bytes(node) > allocatable_bytes(device):
                log.info("'%s' (%s) was not timed: too little memory is left", node.name, node.target)
                advance()
                continue
            try:
                cache.entries[signature] = time_op(node, device, args)
            except (RuntimeError, ValueError, IndexError) as error:
                # Out of memory, or an operator that refuses invented inputs: it is costed by bytes and says so.
                log.info("'%s' (%s) was not timed: %s", node.name, node.target, str(error).partition("\n")[0])
            advance()
