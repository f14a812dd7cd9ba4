"""Greedy construction and repair: while the peak is over the target, convert who is alive there, cheapest first.

Used three ways: to build seeds (one per price of the link), to bring a particle back under the budget, and, driven to
the end, to find the smallest budget that can be met at all.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxhome.passes.search.evaluator import Evaluator
from fxhome.passes.search.result import Placements
from fxhome.passes.search.structure import Structure, holders_at, own_runs, recompute_price
from fxhome.passes.simulate import COMPRESS, COMPRESS_SWAP, KEEP, RECOMPUTE, RECOMPUTE_EACH, SWAP, SimResult


@dataclass(frozen=True)
class Prices:
    """What a us of link time and of recomputation is believed to cost, and the share of the overflow taken per step.

    hidden: what the link cannot hide, beside all that moves already, is not swapped.
    """

    link: float = 0.5
    recompute: float = 1.0
    share: float = 0.5
    hidden: bool = False


Tried = set[tuple[int, int]]
IDLE_RUNS = 30


@dataclass(frozen=True, eq=False)
class _Offers:
    storage: npt.NDArray[np.int64]
    choice: npt.NDArray[np.int8]
    price_us: npt.NDArray[np.float64]
    freed_bytes: npt.NDArray[np.float64]
    # unsaved[starts[h]:starts[h + 1]]: sources that recomputing holder h drags in; holder is -1 where nothing is.
    unsaved: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    holder: npt.NDArray[np.int64]


def _offers(s: Structure, placement: Placements, result: SimResult, prices: Prices, position: int) -> _Offers:
    """Every conversion of a holder at `position`, with its believed price and the bytes it frees there."""
    problem, g = s.problem, s.problem.arrays
    holders = holders_at(s, placement, result, position)
    stores = holders.storage
    none = np.empty(0, np.int64)
    if stores.shape[0] == 0:
        return _Offers(
            none, none.astype(np.int8), none.astype(float), none.astype(float), none.astype(np.int32), none, none
        )
    rebuilt = np.zeros(g.node_phase.shape[0], np.uint8)
    backward = result.program[result.forward_length :]
    rebuilt[backward[backward < rebuilt.shape[0]]] = 1
    recomputable = problem.allowed[:, RECOMPUTE]
    cost = np.empty(stores.shape[0])
    extra = np.empty(stores.shape[0], np.int64)
    starts = np.empty(stores.shape[0] + 1, np.int64)
    room = 16 * stores.shape[0] + 256
    while True:
        closure = np.empty(room, np.int32)
        used = recompute_price(g, placement, result.saved, rebuilt, recomputable, stores, cost, extra, closure, starts)
        if used >= 0:
            break
        room *= 4
    swap = prices.link * s.swap_us[stores]
    size = holders.size_bytes.astype(float)
    encode = (g.storage_encode_us + g.storage_decode_us)[stores]
    squeeze = g.storage_link_bytes[stores] / np.maximum(1, g.storage_copy_bytes[stores])
    again = np.where(holders.rebuilt, np.maximum(cost, g.node_time_us[g.storage_owner[stores]]), cost)
    small = 1e-3
    rows: list[tuple[int, npt.NDArray[np.float64], npt.NDArray[np.float64]]] = [
        (SWAP, swap, size),
        (RECOMPUTE, prices.recompute * cost, size - extra),
        (RECOMPUTE_EACH, prices.recompute * (cost + again) + small, size - extra),
        (COMPRESS, encode, size - g.storage_encoded_bytes[stores]),
        (COMPRESS_SWAP, encode + swap * squeeze, size),
    ]
    storage, choice, price, freed, origin = [], [], [], [], []
    index = np.arange(stores.shape[0])
    for code, us, gain in rows:
        ok = problem.allowed[stores, code] & (gain > 0) & (placement[stores] != code)
        if code == RECOMPUTE:
            ok &= placement[stores] != RECOMPUTE_EACH
        storage.append(stores[ok])
        choice.append(np.full(int(ok.sum()), code, np.int8))
        price.append(us[ok])
        freed.append(gain[ok])
        origin.append(index[ok])
    where = np.concatenate(origin)
    code_of = np.concatenate(choice)
    where = np.where((code_of == RECOMPUTE) | (code_of == RECOMPUTE_EACH), where, -1)
    return _Offers(
        np.concatenate(storage), code_of, np.concatenate(price), np.concatenate(freed), closure, starts, where
    )


class _Queues:
    """What the link carries out before a moment of the program and back after it, all of it hidden so far or not."""

    def __init__(self, s: Structure, placement: Placements, result: SimResult, position: int) -> None:
        self.s, self.result, self.now = s, result, float(result.start_us[position])
        g = s.problem.arrays
        places = own_runs(g, result)
        self.start_us = np.where(places >= 0, result.start_us[places], result.step_us)
        moved = np.flatnonzero((result.saved == 1) & (result.issue_out >= 0) & (result.produced < position))
        self.copies = [self._copy(int(d), int(placement[d])) for d in moved]

    def _copy(self, storage: int, choice: int) -> tuple[float, float, float, float]:
        """(when it is made, us out, us back, when it is read again)."""
        link, g = self.s.problem.link, self.s.problem.arrays
        moved = int((g.storage_copy_bytes if choice == SWAP else g.storage_link_bytes)[storage])
        made, first = int(self.result.produced[storage]), int(self.s.first_reader[storage])
        return (
            float(self.result.start_us[made + 1]) if made >= 0 else self.now,
            link.latency_us + moved * link.d2h_us_per_byte,
            link.latency_us + moved * link.h2d_us_per_byte,
            float(self.start_us[first]) if first >= 0 else self.result.step_us,
        )

    def take(self, storage: int, choice: int) -> bool:
        """Whether this copy is hidden too; it then counts for what follows."""
        copies = [*self.copies, self._copy(storage, choice)]
        out = 0.0
        for made, us, _, _ in sorted(copies):
            out = max(out, made) + us
        back, late = self.now, False
        for _, _, us, read in sorted(copies, key=lambda copy: copy[3]):
            back += us
            late = late or back > read
        if late or out > self.now:
            return False
        self.copies = copies
        return True


def convert(
    s: Structure,
    placement: Placements,
    result: SimResult,
    over_bytes: float,
    prices: Prices,
    tried: Tried,
) -> bool:
    """Change `placement` in place by the best offers at the peak, for about `over_bytes`; False where none is left."""
    offers = _offers(s, placement, result, prices, result.peak_position)
    useful = np.minimum(offers.freed_bytes, max(over_bytes, 1.0))
    order = np.argsort((offers.price_us + 1e-6) / useful, kind="stable")
    wanted = over_bytes * prices.share
    freed = 0.0
    done: set[int] = set()
    queues = _Queues(s, placement, result, result.peak_position) if prices.hidden else None
    for i in order:
        storage, choice = int(offers.storage[i]), int(offers.choice[i])
        if storage in done or (storage, choice) in tried:
            continue
        if queues is not None and choice in (SWAP, COMPRESS_SWAP) and not queues.take(storage, choice):
            continue
        done.add(storage)
        tried.add((storage, choice))
        placement[storage] = choice
        holder = offers.holder[i]
        if holder >= 0:
            for source in offers.unsaved[offers.starts[holder] : offers.starts[holder + 1]]:
                if source not in done and placement[source] == KEEP:
                    placement[source] = RECOMPUTE
        freed += float(offers.freed_bytes[i])
        if freed >= wanted:
            break
    return bool(done)


def repair(
    s: Structure,
    evaluator: Evaluator,
    placement: Placements,
    prices: Prices,
    *,
    max_runs: int = 64,
    target_bytes: int | None = None,
) -> tuple[Placements, SimResult]:
    """Convert until the peak is within the budget, nothing is left to convert, or `max_runs` simulations are spent.

    Returns the placement of the smallest overflow seen (the first that fits).
    """
    target = evaluator.budget_bytes if target_bytes is None else target_bytes
    current = placement.copy()
    tried: Tried = set()
    result = evaluator.run(current, target)
    best, best_result = current.copy(), result
    for _ in range(max_runs):
        over = result.peak_bytes - target
        if over <= 0 or not convert(s, current, result, over, prices, tried):
            break
        result = evaluator.run(current, target)
        if result.peak_bytes < best_result.peak_bytes:
            best, best_result = current.copy(), result
    return best, best_result


def relax(s: Structure, evaluator: Evaluator, placement: Placements, *, max_runs: int) -> Placements:
    """Undo conversions in bulk while that is better: dearest first, halving a batch that does not help.

    Ends after `max_runs` simulations, or `IDLE_RUNS` that did not help.
    """
    problem, g = s.problem, s.problem.arrays
    current = placement.copy()
    value = evaluator.score(current)
    moved = s.decisions[(current[s.decisions] != KEEP) & problem.allowed[s.decisions, KEEP] & s.demanded[s.decisions]]
    us = np.where(
        (current[moved] == SWAP) | (current[moved] == COMPRESS_SWAP),
        s.swap_us[moved],
        g.node_time_us[g.storage_owner[moved]],
    )
    order = moved[np.argsort(-us / np.maximum(1, g.storage_bytes[moved]), kind="stable")]
    pending = [order]
    runs, last_gain = 0, 0
    while pending and runs < max_runs and runs - last_gain < IDLE_RUNS:
        batch = pending.pop()
        if batch.shape[0] == 0:
            continue
        trial = current.copy()
        trial[batch] = KEEP
        runs += 1
        got = evaluator.score(trial)
        if got < value:
            current, value, last_gain = trial, got, runs
        elif batch.shape[0] > 1:
            half = batch.shape[0] // 2
            pending.append(batch[half:])
            pending.append(batch[:half])
    return current


def descend(s: Structure, evaluator: Evaluator, placement: Placements, *, max_runs: int) -> tuple[int, Placements]:
    """The smallest peak that greedy conversion reaches from `placement`: (peak bytes, placement).

    The copies are steered to release at once (a budget of zero): a program steered to its own peak never exceeds it.
    Batches while they help, then single conversions, each kept only where the peak falls.
    """
    current = placement.copy()
    result = evaluator.run(current, 0)
    best, best_peak = current.copy(), result.peak_bytes
    tried: Tried = set()
    runs = 0
    while runs < max_runs:
        prices = Prices(link=1e-3, recompute=1e-3, share=0.05)
        if not convert(s, current, result, result.peak_bytes, prices, tried):
            break
        result = evaluator.run(current, 0)
        runs += 1
        if result.peak_bytes < best_peak:
            best, best_peak = current.copy(), result.peak_bytes
    current = best.copy()
    result = evaluator.run(current, 0)
    runs += 1
    tried.clear()
    prices = Prices(link=1.0, recompute=1.0, share=0.0)
    value = _plateau(result)
    while runs < max_runs:
        trial = current.copy()
        if not convert(s, trial, result, result.peak_bytes, prices, tried):
            break
        got = evaluator.run(trial, 0)
        runs += 1
        if _plateau(got) < value:
            current, result, value = trial, got, _plateau(got)
            tried.clear()
    if result.peak_bytes < best_peak:
        best, best_peak = current, result.peak_bytes
    return best_peak, best


def _plateau(result: SimResult) -> tuple[int, int]:
    """(peak, number of instructions at it): identical layers peak together, so one conversion cannot lower the peak."""
    return result.peak_bytes, int((result.curve == result.peak_bytes).sum())
