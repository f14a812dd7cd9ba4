"""Published policies as placements for our simulator, so that only the decision differs.

Sources: vDNN (Rhu, MICRO'16), SuperNeurons (Wang, PPoPP'18), per-block checkpointing (Chen, 2016). Each returns the
placement it decides on; whether that fits the budget is for the caller to see.
Op classes come from `storage_class`, the class of the op that produces each storage; the class of a forward node is
that of a storage it owns. The papers' CONV layer is read as convolution, matmul or attention (they name only CNNs).
"""

from collections.abc import Callable, Sequence

import numpy as np

from fxhome.errors import OptionError
from fxhome.passes.search.evaluator import Evaluator, base_placement
from fxhome.passes.search.repair import Prices, repair
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Int64, Structure, read_storages
from fxhome.passes.simulate import KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP
from fxhome.passes.simulate_kernels import FORWARD

COMPUTE_CLASSES = ("convolution", "matmul", "attention")
CHEAP_CLASSES = ("pool", "activation", "norm")


def _classes(s: Structure, storage_class: Sequence[str] | None, policy: str) -> list[str]:
    classes = ["other"] * s.problem.num_storages if storage_class is None else list(storage_class)
    if not any(c in COMPUTE_CLASSES for c in classes):
        raise OptionError(
            f"policy {policy!r} decides by op class, and no storage of this graph is known to come from a convolution, "
            "matmul or attention; use policy 'vdnn_async', 'capuchin' or 'pso'"
        )
    return classes


def _swappable(s: Structure) -> Int64:
    chosen: Int64 = s.decisions[s.problem.allowed[s.decisions, SWAP] & s.demanded[s.decisions]]
    return chosen


def keep_all(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """Nothing moves."""
    return s.problem.keep_all()


def vdnn_all(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """The input of every layer is offloaded."""
    placement = base_placement(s.problem, s.demanded)
    placement[_swappable(s)] = SWAP
    return placement


def vdnn_conv(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """Only what a CONV layer reads is offloaded."""
    g = s.problem.arrays
    classes = _classes(s, storage_class, "vdnn_conv")
    read = np.zeros(s.problem.num_storages, np.bool_)
    for storage, name in enumerate(classes):
        node = int(g.storage_owner[storage])
        if name in COMPUTE_CLASSES and g.node_phase[node] == FORWARD:
            read[read_storages(g, node)] = True
    placement = base_placement(s.problem, s.demanded)
    chosen = _swappable(s)
    placement[chosen[read[chosen]]] = SWAP
    return placement


def superneurons(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """Cheap layers are recomputed from the checkpoints around them; CONV outputs are offloaded, oldest first.

    A segment whose bytes stay within the largest layer's footprint is recomputed once and held, else anew per reader.
    """
    problem, g = s.problem, s.problem.arrays
    if evaluator.score(problem.keep_all())[0] == 0:
        return problem.keep_all()
    classes = _classes(s, storage_class, "superneurons")
    placement = base_placement(problem, s.demanded)
    forward = g.node_phase[g.storage_owner] == FORWARD
    footprint = 0
    for storage in np.flatnonzero(forward).tolist():
        inputs = read_storages(g, int(g.storage_owner[storage]))
        footprint = max(footprint, int(g.storage_bytes[storage]) + int(g.storage_bytes[inputs].sum()))
    segment: list[int] = []
    order = s.decisions
    for d in [*order.tolist(), -1]:
        if d >= 0 and classes[d] in CHEAP_CLASSES:
            segment.append(d)
        elif d < 0 or classes[d] in COMPUTE_CLASSES:
            code = RECOMPUTE if sum(int(g.storage_bytes[x]) for x in segment) <= footprint else RECOMPUTE_EACH
            for x in segment:
                if s.demanded[x] and problem.allowed[x, code]:
                    placement[x] = code
            segment = []
    chosen = [int(d) for d in _swappable(s) if classes[d] in COMPUTE_CLASSES]

    def offload(count: int) -> Placements:
        trial = placement.copy()
        trial[chosen[:count]] = SWAP
        return trial

    return _fewest(evaluator, len(chosen), offload)


def _fewest(evaluator: Evaluator, most: int, make: Callable[[int], Placements]) -> Placements:
    """`make(k)` for the least k that fits, by bisection; `make(most)` where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if evaluator.score(make(middle))[0] == 0:
            high = middle
        else:
            low = middle + 1
    return make(low)


def checkpoint(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """Blocks are recomputed as a whole from their inputs, the first blocks first, as many as the budget asks for.

    Blocks end where the forward narrows to one storage. How many such places make a block is tried from one to all of
    them in powers of two, sqrt(n) included: a stronger baseline than any one choice.
    """
    waists = _waists(s)
    pool = waists if len(waists) >= 2 else s.decisions.tolist()
    spacings = sorted({1 << k for k in range(len(pool).bit_length())} | {max(1, round(np.sqrt(len(pool))))})
    tried = [_checkpointed(s, evaluator, pool[spacing - 1 :: spacing]) for spacing in spacings]
    return min(tried, key=evaluator.score, default=s.problem.keep_all())


def _checkpointed(s: Structure, evaluator: Evaluator, kept: list[int]) -> Placements:
    """Keep `kept` of the deciding storages and recompute the others, for as many blocks as are needed to fit."""
    problem, owner = s.problem, s.problem.arrays.storage_owner
    rebuilt = s.decisions[problem.allowed[s.decisions, RECOMPUTE]]
    base = base_placement(problem, s.demanded)
    base[kept] = np.where(problem.allowed[kept, KEEP], KEEP, RECOMPUTE)
    block_of = np.searchsorted(owner[kept], owner[rebuilt])
    droppable = ~np.isin(rebuilt, kept)

    def drop(count: int) -> Placements:
        trial = base.copy()
        trial[rebuilt[droppable & (block_of < count)]] = RECOMPUTE
        return trial

    return _fewest(evaluator, len(kept) + 1, drop)


def _waists(s: Structure) -> list[int]:
    """Deciding storages at which the forward narrows to one: every later forward node depends on them alone."""
    g = s.problem.arrays
    n = g.node_phase.shape[0]
    last = np.full(n, -1, np.int64)
    for v in range(n):
        if g.node_phase[v] == FORWARD:
            last[g.read_node[g.read_start[v] : g.read_start[v + 1]]] = v
    for v in range(n - 1, -1, -1):  # a view's readers read its base
        if g.node_phase[v] == FORWARD and g.own_start[v + 1] == g.own_start[v]:
            sources = g.read_node[g.read_start[v] : g.read_start[v + 1]]
            last[sources] = np.maximum(last[sources], last[v])
    change = np.zeros(n + 1, np.int64)
    for v in range(n):
        if g.node_phase[v] == FORWARD and last[v] > v:
            change[v] += 1
            change[last[v]] -= 1
    crossing = np.cumsum(change)
    return [int(d) for d in s.decisions if crossing[g.storage_root[d]] <= 1]


def greedy(s: Structure, evaluator: Evaluator, storage_class: Sequence[str] | None) -> Placements:
    """Knapsack by us per byte at the peak, copies priced as if never hidden; simulated again after each batch."""
    placement, _ = repair(s, evaluator, base_placement(s.problem, s.demanded), Prices(link=1.0, share=0.5))
    return placement
