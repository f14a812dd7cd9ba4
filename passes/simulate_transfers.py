"""The Numba kernels behind `simulate`, second part: where copies stand.

`transfers` places copies as we run them, `layer_transfers` as vDNN does (each beside one layer, waited for at its end).
Conventions are those of `simulate_kernels`. Of each moved storage s:

    issue_out[s]   its copy to the host is started right before this instruction
    wait_out[s]    ... and waited for right before this one, when its source is released
    issue_in[s]    its device buffer is taken and its copy back started right before this instruction
    wait_in[s]     ... and waited for right before this one
"""

import numpy as np

from fxhome.passes.compiled import compiled
from fxhome.passes.simulate_kernels import (
    COMPRESS,
    SWAP,
    host_idle,
    instruction_times,
    is_encoded,
    is_moved,
)

SLACK_SHARE = 0.5
"""Where memory allows, a copy may take this much longer (or what hides it be so much faster) before anyone waits."""


@compiled()
def transfers(  # type: ignore[no-untyped-def]
    g,
    placement,
    saved,
    program,
    forward,
    total,
    link,
    budget,
    curve,
    produced,
    last_forward,
    first_backward,
    last_backward,
    issue_out,
    wait_out,
    issue_in,
    wait_in,
):
    """Place all copies: out behind the producer, back by the last moment that hides them, as far as memory allows; then
    with slack, as far as memory still allows.

    Adds what copies hold to `curve`. Times here ignore stalls.
    """
    n = g.node_phase.shape[0]
    storages = g.storage_bytes.shape[0]
    issue_out[:] = -1
    wait_out[:] = -1
    issue_in[:] = -1
    wait_in[:] = -1
    times = instruction_times(program, total, g.node_time_us, g.storage_encode_us, g.storage_decode_us)
    idle = host_idle(g, placement, saved, program, forward, total, times, produced, first_backward)
    count = 0
    for s in range(storages):
        if is_moved(placement, saved, s):
            count += 1
    # What moves, in the order in which it is ready; device bytes and transfer bytes of each.
    order = np.empty(count, np.int32)
    ready = np.empty(count, np.int32)
    size_of = np.zeros(storages, np.int64)
    link_bytes = np.zeros(storages, np.int64)
    k = 0
    for p in range(forward):
        if program[p] >= n:
            s = program[p] - n
            if placement[s] == COMPRESS:
                continue
        else:
            s = g.root_storage[program[p]]
            if s < 0 or produced[s] != p or not is_moved(placement, saved, s) or is_encoded(placement[s]):
                continue
        order[k] = s
        ready[k] = p
        issue_out[s] = p + 1
        wait_in[s] = first_backward[s]
        k += 1
        size_of[s] = g.storage_encoded_bytes[s] if is_encoded(placement[s]) else g.storage_bytes[s]
        link_bytes[s] = g.storage_copy_bytes[s] if placement[s] == SWAP else g.storage_link_bytes[s]
    time_at = np.empty(total + 1, np.float64)

    # Per position, linked lists: whose last forward reader stands there, whose first backward reader does.
    by_last = np.full(total + 1, -1, np.int32)
    by_use = np.full(total + 1, -1, np.int32)
    next_last = np.full(storages, -1, np.int32)
    next_use = np.full(storages, -1, np.int32)
    for i in range(count):
        s = order[i]
        next_last[s] = by_last[last_forward[s]]
        by_last[last_forward[s]] = s
        next_use[s] = by_use[first_backward[s]]
        by_use[first_backward[s]] = s
    # Bytes of reloads that are needed at a position, wherever they start: nothing else may be held in their place.
    needed = np.zeros(total + 2, np.int64)
    for i in range(count):
        s = order[i]
        until = first_backward[s] if is_encoded(placement[s]) else last_backward[s]
        needed[first_backward[s]] += size_of[s]
        needed[until + 1] -= size_of[s]
    reloaded = 0
    queue = np.empty(count, np.int32)
    place = np.full(storages, -1, np.int32)  # where in the queue a storage waits, -1 once it is released
    finish = np.empty(count, np.float64)
    slack = np.empty(count, np.float64)
    head = 0  # everything in the queue before it is released
    queued = 0
    next_out = 0
    now = 0.0
    d2h_free = 0.0
    extra = 0  # bytes of sources that only wait for their copy
    for p in range(total):
        now += idle[p]
        # Sources whose copy has surely ended are released for nothing; while memory is short, the oldest is waited for.
        while head < queued and place[queue[head]] < 0:
            head += 1
        i = head
        while i < queued and finish[i] + slack[i] <= now:
            s = queue[i]
            if place[s] >= 0 and p > last_forward[s]:
                wait_out[s] = p
                extra -= size_of[s]
                place[s] = -1
            i += 1
        i = head
        reloaded += needed[p]
        while i < queued and extra > 0 and curve[p] + reloaded + extra > budget:
            s = queue[i]
            if place[s] >= 0 and p > last_forward[s]:
                now = max(now, finish[i])
                wait_out[s] = p
                extra -= size_of[s]
                place[s] = -1
            i += 1
        if p >= forward:
            # The host copy is read only after its wait.
            s = by_use[p]
            while s >= 0:
                if place[s] >= 0:
                    now = max(now, finish[place[s]])
                    wait_out[s] = p
                    extra -= size_of[s]
                    place[s] = -1
                s = next_use[s]
        curve[p] += extra
        time_at[p] = now
        now += times[p]
        s = by_last[p]
        while s >= 0:
            if place[s] >= 0:
                extra += size_of[s]
            s = next_last[s]
        while next_out < count and ready[next_out] <= p and p < forward:
            s = order[next_out]
            next_out += 1
            start = max(now, d2h_free)
            d2h_free = start + link.latency_us + link_bytes[s] * link.d2h_us_per_byte
            queue[queued] = s
            finish[queued] = d2h_free
            slack[queued] = SLACK_SHARE * (d2h_free - start)
            place[s] = queued
            queued += 1
            if last_forward[s] <= p:
                extra += size_of[s]
    time_at[total] = now

    # Prefetches: the latest start that still meets every later deadline, or as early as memory allows, by deadline.
    swaps = count
    keys = np.empty(swaps, np.int64)
    for i in range(swaps):
        keys[i] = first_backward[order[i]]
    rank = np.argsort(keys, kind="mergesort")
    latest = np.empty(swaps, np.float64)
    limit = np.inf
    for k in range(swaps - 1, -1, -1):
        s = order[rank[k]]
        stop = min(limit, time_at[first_backward[s]])
        latest[k] = stop - link.latency_us - link_bytes[s] * link.h2d_us_per_byte
        limit = latest[k]
    # Reloads placed so far are added to `curve` at the end, in one pass. Until then, as they start in order and are
    # placed
    # in order of use, those alive at a position are those that end at or behind it: two running sums tell.
    ending = np.zeros(total + 2, np.int64)  # bytes by last position
    change = np.zeros(total + 2, np.int64)
    alive = 0  # bytes of placed reloads whose last position is `at` or later
    at = forward
    previous = forward
    for k in range(swaps):
        s = order[rank[k]]
        use = first_backward[s]
        size = size_of[s]
        while at < use:
            alive -= ending[at]
            at += 1
        lowest = max(previous, wait_out[s])
        q = use
        beside = alive
        while q > lowest and time_at[q] > latest[k]:
            beside += ending[q - 1]
            if curve[q - 1] + beside + size > budget:
                break
            q -= 1
        issue_in[s] = q
        previous = q
        # What comes back encoded is gone after its decode, whose result `liveness` has counted.
        until = use if is_encoded(placement[s]) else last_backward[s]
        ending[until] += size
        alive += size
        change[q] += size
        change[until + 1] -= size
    running = 0
    for p in range(total + 1):
        running += change[p]
        curve[p] += running
    previous = forward
    for k in range(swaps):
        s = order[rank[k]]
        q = issue_in[s]
        start = latest[k] - SLACK_SHARE * (link.latency_us + link_bytes[s] * link.h2d_us_per_byte)
        lowest = max(previous, wait_out[s])
        while q > lowest and time_at[q] > start and curve[q - 1] + size_of[s] <= budget:
            q -= 1
            curve[q] += size_of[s]
        issue_in[s] = q
        previous = q
    return time_at[total]


@compiled()
def layer_transfers(  # type: ignore[no-untyped-def]
    g,
    placement,
    saved,
    forward,
    total,
    curve,
    produced,
    last_forward,
    first_backward,
    last_backward,
    issue_out,
    wait_out,
    issue_in,
    wait_in,
):
    """Place all copies as vDNN as published does, and add what they hold to `curve`; nothing moved may be encoded.

    Out: started with the last forward reader, waited for at that layer's end. Back: started with the backward layer
    that reads the storage due before it (the first one: with the instruction before its reader), waited for at that
    layer's end. The paper's search for the next layer to prefetch stops at the next one whose input was offloaded.
    """
    storages = g.storage_bytes.shape[0]
    issue_out[:] = -1
    wait_out[:] = -1
    issue_in[:] = -1
    wait_in[:] = -1
    # Whether a moved storage is first read at this position.
    due = np.zeros(total + 1, np.uint8)
    for s in range(storages):
        if is_moved(placement, saved, s):
            due[first_backward[s]] = 1
    beside = np.full(total + 1, -1, np.int32)
    previous = -1
    for p in range(forward, total):
        if due[p]:
            beside[p] = previous if previous >= 0 else max(forward, p - 1)
            previous = p
    change = np.zeros(total + 2, np.int64)
    for s in range(storages):
        if not is_moved(placement, saved, s):
            continue
        # Without a forward reader it runs beside whatever follows its producer.
        issue_out[s] = min(max(last_forward[s], produced[s] + 1), forward)
        wait_out[s] = min(issue_out[s] + 1, forward)
        change[last_forward[s] + 1] += g.storage_bytes[s]
        change[wait_out[s]] -= g.storage_bytes[s]
        use = first_backward[s]
        issue_in[s] = beside[use]
        wait_in[s] = min(issue_in[s] + 1, use)
        change[issue_in[s]] += g.storage_bytes[s]
        change[last_backward[s] + 1] -= g.storage_bytes[s]
    running = 0
    for p in range(total + 1):
        running += change[p]
        curve[p] += running
