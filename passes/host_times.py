"""What launching each node of a joint graph costs the host, and what a step and its copies add to that.

    inner "inductor"    one launch per generated kernel; a library call per product or convolution; views for those
    inner "aot_eager"   one launch per operator, views included

Nodes inside a fused kernel cost nothing: their kernel is launched once. Figures are those of the device's profile,
launches as much longer as real steps of this inner compiler have shown them to be; they enter times, never the peak.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fxhome.host_costs import HostCosts
from fxhome.passes.classify import is_effectful
from fxhome.passes.facts import GraphFacts
from fxhome.passes.fusion import (
    adds_bias_apart,
    elements,
    is_generated_loop,
    is_reduction,
    memory_sources,
    operator_name,
)
from fxhome.passes.simulate_kernels import (
    ALIAS,
    DECODE,
    ENCODE,
    ENTER_BACKWARD,
    ENTER_FORWARD,
    GETITEM,
    HOST_FIGURES,
    INPUT,
    LEAVE,
    OWNER,
    SWAP_IN,
    SWAP_OUT,
    VIRTUAL,
    WAIT,
    Float64,
)

NOTED_SHARE = 0.1
BOUND_BY_HOST = "bound by the host"
_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})


@dataclass(frozen=True, eq=False)
class HostTimes:
    """node_us: float64[nodes], in the order of the facts. step_us: float64[8], as `SimArrays.host_us`."""

    node_us: Float64
    step_us: Float64


def host_times(
    module: fx.GraphModule, facts: GraphFacts, host: HostCosts, called_us: Sequence[float | None] = ()
) -> HostTimes:
    """Host us of every node of a normalized joint graph, in the order of `facts`, under the costs' inner compiler.

    called_us: what calls cost the host where they were timed, by node; None, or empty: by their kind.
    """
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    of = _generated_us(nodes, facts, host) if host.inner == "inductor" else _eager_us(nodes, facts, host)
    of = [known if known is not None else us for us, known in zip(of, called_us or [None] * len(of), strict=True)]
    if host.inner == "inductor":
        of = [us + host.kernel_us if _adds_a_bias(node) else us for us, node in zip(of, nodes, strict=True)]
    step = np.zeros(HOST_FIGURES, np.float64)
    inputs = sum(phase == INPUT for phase in facts.node_phase) - len(facts.tangent_storages)
    step[ENTER_FORWARD] = host.forward_us + host.input_us * inputs
    step[ENTER_BACKWARD] = host.backward_us
    step[LEAVE] = host.gradient_us * len(facts.backward_outputs)
    step[[SWAP_OUT, SWAP_IN, WAIT]] = host.swap_out_us, host.swap_in_us, host.wait_us
    step[[ENCODE, DECODE]] = host.encode_us, host.decode_us
    return HostTimes(np.array(of, np.float64) * host.launch_factor, step)


def host_notes(idle_us: Float64, step_us: float) -> tuple[str, ...]:
    """What to tell where the device waits for the host, beyond the start of the step; nothing where it hardly does."""
    waits_us = float(idle_us[1:].sum())
    if waits_us <= NOTED_SHARE * step_us:
        return ()
    return (
        f"{BOUND_BY_HOST}: the device is expected to wait {waits_us / 1e3:.1f} of {step_us / 1e3:.1f} ms for its "
        "work to be launched; a larger batch takes hardly longer",
    )


def _eager_us(nodes: Sequence[fx.Node], facts: GraphFacts, host: HostCosts) -> list[float]:
    found = []
    for node, kind in zip(nodes, facts.node_kind, strict=True):
        if node.op != "call_function" or kind == GETITEM:
            found.append(0.0)
        else:
            found.append(host.view_us if kind == ALIAS and not is_effectful(node) else _operator_us(node, host))
    return found


def _generated_us(nodes: Sequence[fx.Node], facts: GraphFacts, host: HostCosts) -> list[float]:
    kinds = dict(zip(nodes, facts.node_kind, strict=True))
    aliases = {node for node, kind in kinds.items() if kind in (ALIAS, GETITEM)}
    sources = memory_sources(nodes, {node for node, kind in kinds.items() if kind == VIRTUAL} | aliases)
    loops = {node for node, kind in kinds.items() if kind == OWNER and is_generated_loop(node)}
    joined = _joined(nodes, facts.node_phase, sources, loops)
    found = []
    for node, kind in kinds.items():
        if node.op != "call_function" or kind in (VIRTUAL, GETITEM):
            found.append(0.0)
        elif kind == ALIAS and not is_effectful(node):
            # A kernel is told where to read; a library is given a tensor that says so.
            found.append(0.0 if all(is_generated_loop(user) for user in node.users) else host.view_us)
        elif not is_generated_loop(node):
            found.append(_operator_us(node, host))
        else:
            # A running statistic is written by the kernel that computes it.
            found.append(host.kernel_us if node in loops and node not in joined else 0.0)
    return found


def _joined(
    nodes: Sequence[fx.Node],
    phase: Sequence[int],
    sources: Mapping[fx.Node, frozenset[fx.Node]],
    loops: set[fx.Node],
) -> set[fx.Node]:
    """The loops that are part of an earlier loop's kernel: sums of what it sums, and what is made of its result element
    by element, of nothing that is made behind it.
    """
    place = {node: i for i, node in enumerate(nodes)}
    found: set[fx.Node] = set()
    sums: set[object] = set()
    for node in nodes:
        if node not in loops:
            continue
        if is_reduction(node):
            # Sums of the same elements are taken in one pass.
            one = (phase[place[node]], sources[node], str(node.args[1:]))
            if one in sums:
                found.add(node)
            sums.add(one)
        elif sources[node]:
            latest = max(sources[node], key=place.__getitem__)
            # The latest of what it reads is made element by element just before.
            if latest in loops and phase[place[latest]] == phase[place[node]] and elements(latest) == elements(node):
                found.add(node)
    return found


def _adds_a_bias(node: fx.Node) -> bool:
    """Whether a kernel of its own adds a convolution's bias."""
    return adds_bias_apart(node) and not all(is_generated_loop(user) for user in node.users)


def _operator_us(node: fx.Node, host: HostCosts) -> float:
    name = operator_name(node)
    if name == "aten::convolution":
        return host.convolution_us
    if name == "aten::convolution_backward":
        # One call of the library for each gradient that is wanted.
        wanted = node.args[10]
        assert isinstance(wanted, list | tuple)
        return host.convolution_us * max(1, sum(bool(one) for one in wanted[:2]))
    return host.library_us if name in _PRODUCTS else host.kernel_us
