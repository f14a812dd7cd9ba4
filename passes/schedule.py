"""A simulated placement as the ordered list of instructions that the rewrite carries out.

    op relu          swap_out relu          op conv ...  swap_out_wait relu  ...  forward_end
    op conv_backward ...  swap_in relu  ...  swap_in_wait relu  op relu_backward ...

    op relu  op pool ...  encode relu ... forward_end ...  decode relu  op relu_backward     compressed on the device
    op relu  op pool ...  encode relu  swap_out relu ...  swap_in_wait relu  decode relu     ... and moved

A `swap_out` stands right behind its producer (or its encode), or at the layer beside which a synchronous policy copies;
a wait right before the instruction at which the simulator saw the copy end or needed the memory. The rewrite reads
nothing else but the codecs' names, so the same list gives the same graphs.
"""

import numpy as np

from fxhome.passes.facts import GraphFacts
from fxhome.passes.simulate import COMPRESS_SWAP, SWAP, Placements, SimResult
from fxhome.placement import Instruction


def schedule(facts: GraphFacts, placement: Placements, result: SimResult) -> tuple[Instruction, ...]:
    """List what `result` runs, with every transfer at its simulated place."""
    nodes, storages = len(facts.node_names), len(facts.storages)
    total = len(result.program)
    starts: list[list[str]] = [[] for _ in range(total + 1)]
    waits: list[list[str]] = [[] for _ in range(total + 1)]
    issues: list[list[str]] = [[] for _ in range(total + 1)]
    arrivals: list[list[str]] = [[] for _ in range(total + 1)]
    moved = [s for s in range(storages) if result.saved[s] and placement[s] in (SWAP, COMPRESS_SWAP)]
    for s in sorted(moved, key=lambda s: (int(result.issue_in[s]), int(result.first_backward[s]), s)):
        issues[result.issue_in[s]].append(facts.storages[s].name)
    for s in sorted(moved, key=lambda s: (int(result.issue_out[s]), s)):
        name = facts.storages[s].name
        starts[result.issue_out[s]].append(name)
        waits[result.wait_out[s]].append(name)
        arrivals[result.wait_in[s]].append(name)
    out: list[Instruction] = []
    for p in range(total + 1):
        out += [Instruction("swap_out", name) for name in starts[p]]
        # A copy that ends with the forward is waited for there, so that nothing of it crosses into the backward.
        out += [Instruction("swap_out_wait", name) for name in waits[p]]
        if p == result.forward_length:
            out.append(Instruction("forward_end", ""))
        out += [Instruction("swap_in", name) for name in issues[p]]
        out += [Instruction("swap_in_wait", name) for name in arrivals[p]]
        if p < total:
            entry = int(result.program[p])
            if entry >= nodes + storages:
                out.append(Instruction("decode", facts.storages[entry - nodes - storages].name))
            elif entry >= nodes:
                out.append(Instruction("encode", facts.storages[entry - nodes].name))
            else:
                out.append(Instruction("recompute" if result.recomputed[p] else "op", facts.node_names[entry]))
    return tuple(out)


def kept_bytes(facts: GraphFacts, placement: Placements, result: SimResult) -> dict[int, int]:
    """Bytes of the saved set by placement code, as the report shows them."""
    codes = np.unique(placement)
    sizes = np.array([s.size_bytes for s in facts.storages], np.int64)
    saved = result.saved.astype(bool)
    return {int(code): int(sizes[(placement == code) & saved].sum()) for code in codes}
