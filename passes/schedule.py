"""A simulated placement as the ordered list of instructions that the rewrite carries out.

    op relu          swap_out relu          op conv ...  swap_out_wait relu  ...  forward_end
    op conv_backward ...  swap_in relu  ...  swap_in_wait relu  op relu_backward ...

A `swap_out` stands right behind its producer; a wait right before the instruction at which the simulator saw the copy end
or needed the memory. The rewrite reads nothing else, so the same list gives the same graphs.
"""

import numpy as np

from fxhome.passes.facts import GraphFacts
from fxhome.passes.simulate import COMPRESS, KEEP, Placements, SimResult
from fxhome.placement import Instruction


def schedule(facts: GraphFacts, placement: Placements, result: SimResult) -> tuple[Instruction, ...]:
    """List what `result` runs, with every transfer at its simulated place."""
    total = len(result.program)
    starts: list[list[str]] = [[] for _ in range(total + 1)]
    waits: list[list[str]] = [[] for _ in range(total + 1)]
    issues: list[list[str]] = [[] for _ in range(total + 1)]
    arrivals: list[list[str]] = [[] for _ in range(total + 1)]
    moved = [s for s in range(len(facts.storages)) if result.saved[s] and placement[s] != KEEP]
    for s in sorted(moved, key=lambda s: (int(result.issue_in[s]), int(result.first_backward[s]), s)):
        name = facts.storages[s].name
        issues[result.issue_in[s]].append(name)
    for s in sorted(moved, key=lambda s: int(result.produced[s])):
        name = facts.storages[s].name
        starts[result.produced[s]].append(name)
        waits[result.wait_out[s]].append(name)
        arrivals[result.first_backward[s]].append(name)
    encoded = {facts.storages[s].name for s in moved if placement[s] == COMPRESS}
    out: list[Instruction] = []

    def emit(kind: str, names: list[str], when_encoded: str | None) -> None:
        for name in names:
            if name in encoded:
                if when_encoded is not None:
                    out.append(Instruction(when_encoded, name))
            else:
                out.append(Instruction(kind, name))

    for p in range(total + 1):
        # A copy that ends with the forward is waited for there, so that nothing of it crosses into the backward.
        emit("swap_out_wait", waits[p], "encode")
        if p == result.forward_length:
            out.append(Instruction("forward_end", ""))
        emit("swap_in", issues[p], "decode")
        emit("swap_in_wait", arrivals[p], None)
        if p < total:
            kind = "recompute" if result.recomputed[p] else "op"
            out.append(Instruction(kind, facts.node_names[result.program[p]]))
            emit("swap_out", starts[p], None)
    return tuple(out)


def kept_bytes(facts: GraphFacts, placement: Placements, result: SimResult) -> dict[int, int]:
    """Bytes of the saved set by placement code, as the report shows them."""
    codes = np.unique(placement)
    sizes = np.array([s.size_bytes for s in facts.storages], np.int64)
    saved = result.saved.astype(bool)
    return {int(code): int(sizes[(placement == code) & saved].sum()) for code in codes}
