"""What a generated kernel reads from memory, where a fusing compiler puts several loops into one kernel.

    sum(dy), sum(dy * x)       both over the same elements of dy, neither needs the other: dy is read once
    a = relu(g), b = a * 2     a is written, others read it too, but b has it in a register
    dx = dy - mean(dy)         needs a whole pass over dy first: dy is read again

Only for the backward: what the forward makes may be made again alone, where nothing is shared.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from fxhome.passes.fusion import is_generated_loop, is_reduction, iterations
from fxhome.passes.simulate_kernels import BACKWARD

MAX_LOOPS_BETWEEN = 64
"""Loops farther apart in the graph are not fused: what is between them would be alive for nothing."""


def unshared_reads(
    nodes: Sequence[fx.Node],
    phase: Sequence[int],
    reads: Mapping[fx.Node, frozenset[fx.Node]],
    loops: Collection[fx.Node],
    aliases: Collection[fx.Node],
) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each of `loops`, what it reads that no earlier loop of its kernel has at hand.

    reads: what each loop reads from memory. loops: those with a result in memory. aliases: nodes that only name memory.
    """
    number, behind = _behind_a_pass(nodes, loops, aliases)
    # The loops that have a tensor at hand while they run, since they read or make it, by their numbers.
    at_hand: dict[tuple[fx.Node, int], list[int]] = {}
    result: dict[fx.Node, frozenset[fx.Node]] = {}
    for i, node in enumerate(nodes):
        if node not in loops:
            continue
        result[node] = reads[node]
        if phase[i] != BACKWARD:
            continue
        space = iterations(node)
        own = set()
        for source in reads[node]:
            known = at_hand.setdefault((source, space), [])
            distances = [number[i] - other for other in known[-MAX_LOOPS_BETWEEN - 1 :]]
            if not any(distance <= MAX_LOOPS_BETWEEN and not behind[i] >> distance & 1 for distance in distances):
                own.add(source)
            known.append(number[i])
        if not is_reduction(node):
            at_hand.setdefault((node, space), []).append(number[i])
        result[node] = frozenset(own)
    return result


def _behind_a_pass(
    nodes: Sequence[fx.Node], loops: Collection[fx.Node], aliases: Collection[fx.Node]
) -> tuple[list[int], list[int]]:
    """(how many loops there are up to each node, which of the last ones must have ended before its kernel can begin).

    The latter are bit sets, bit k for the loop k before: farther ones do not matter, so they stay small.
    """
    index = {node: i for i, node in enumerate(nodes)}
    window = (1 << MAX_LOOPS_BETWEEN + 1) - 1
    number: list[int] = []
    closed: list[int] = []
    every: list[int] = []
    for node in nodes:
        here = (number[-1] if number else 0) + (node in loops)
        ended = known = 0
        for source in node.all_input_nodes:
            j = index[source]
            distance = here - number[j]
            if distance > MAX_LOOPS_BETWEEN:
                continue
            reached = (every[j] | (source in loops)) << distance
            known |= reached
            flows = source in aliases or (is_generated_loop(source) and not is_reduction(source))
            ended |= closed[j] << distance if flows or source.op == "placeholder" else reached
        number.append(here)
        closed.append(ended & window)
        every.append(known & window)
    return number, closed
