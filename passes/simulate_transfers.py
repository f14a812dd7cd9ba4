"""The Numba kernels behind `simulate`, second part: where copies stand, and what time everything takes.

`transfers` places copies as we run them, `layer_transfers` as vDNN does (each beside one layer, waited for at its end);
`timeline` runs either on three engines. `run_program` and `peak_and_step` are all four steps in one call, outside
Python's lock. Conventions are those of `simulate_kernels`. Of each moved storage s:

    issue_out[s]   its copy to the host is started right before this instruction
    wait_out[s]    ... and waited for right before this one, when its source is released
    issue_in[s]    its device buffer is taken and its copy back started right before this instruction
    wait_in[s]     ... and waited for right before this one
"""

import numpy as np
from numba import njit

from fxhome.passes.simulate_kernels import (
    COMPRESS,
    SWAP,
    build,
    instruction_times,
    is_encoded,
    is_moved,
    liveness,
)


@njit(cache=True)
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
    """Place all copies: out behind the producer, back by the last moment that hides them, as far as memory allows.

    Adds what copies hold to `curve`. Times here ignore stalls.
    """
    n = g.node_phase.shape[0]
    storages = g.storage_bytes.shape[0]
    issue_out[:] = -1
    wait_out[:] = -1
    issue_in[:] = -1
    wait_in[:] = -1
    times = instruction_times(program, total, g.node_time_us, g.storage_encode_us, g.storage_decode_us)
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
    queue = np.empty(count, np.int32)
    place = np.full(storages, -1, np.int32)  # where in the queue a storage waits, -1 once it is released
    finish = np.empty(count, np.float64)
    head = 0  # everything in the queue before it is released
    queued = 0
    next_out = 0
    now = 0.0
    d2h_free = 0.0
    extra = 0  # bytes of sources that only wait for their copy
    for p in range(total):
        # Sources whose copy has ended are released for nothing; then, while memory is short, the oldest is waited for.
        while head < queued and place[queue[head]] < 0:
            head += 1
        i = head
        while i < queued and finish[i] <= now:
            s = queue[i]
            if place[s] >= 0 and p > last_forward[s]:
                wait_out[s] = p
                extra -= size_of[s]
                place[s] = -1
            i += 1
        i = head
        while i < queued and extra > 0 and curve[p] + extra > budget:
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
    return time_at[total]


@njit(cache=True)
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


@njit(cache=True)
def timeline(  # type: ignore[no-untyped-def]
    g,
    placement,
    saved,
    program,
    forward,
    total,
    link,
    issue_out,
    wait_out,
    issue_in,
    wait_in,
    start_us,
):
    """Run the program on three engines; fill `start_us[p]`; return (total us, stall us, d2h busy us, h2d busy us).

    Copies of one direction run one after the other in issue order; while both directions run, each is slowed by the
    measured duplex factor. What a copy costs the kernels beside it is charged where the copy starts. A wait stalls
    compute until its copy has ended.
    """
    storages = g.storage_bytes.shape[0]
    times = instruction_times(program, total, g.node_time_us, g.storage_encode_us, g.storage_decode_us)
    count = 0
    for s in range(storages):
        if is_moved(placement, saved, s):
            count += 1
    # Per position, linked lists of the storages of which a copy is started or waited for there.
    by_start = np.full(total + 2, -1, np.int32)
    by_wait = np.full(total + 2, -1, np.int32)
    by_issue = np.full(total + 2, -1, np.int32)
    by_use = np.full(total + 2, -1, np.int32)
    next_start = np.full(storages, -1, np.int32)
    next_wait = np.full(storages, -1, np.int32)
    next_issue = np.full(storages, -1, np.int32)
    next_use = np.full(storages, -1, np.int32)
    for s in range(storages - 1, -1, -1):
        if is_moved(placement, saved, s):
            p = min(wait_out[s], total) if wait_out[s] >= 0 else total
            next_wait[s] = by_wait[p]
            by_wait[p] = s
            next_issue[s] = by_issue[issue_in[s]]
            by_issue[issue_in[s]] = s
            next_use[s] = by_use[wait_in[s]]
            by_use[wait_in[s]] = s
            next_start[s] = by_start[issue_out[s]]
            by_start[issue_out[s]] = s
    out = np.empty((count + 1, 2), np.float64)  # [work left in us at full speed, time it ended]
    into = np.empty((count + 1, 2), np.float64)
    out_index = np.full(storages, -1, np.int32)
    in_index = np.full(storages, -1, np.int32)
    # engine[0]: time up to which the copy engines have run. busy[0], busy[1]: their busy time. ends: each queue's ends.
    engine = np.zeros(1, np.float64)
    busy = np.zeros(2, np.float64)
    ends = np.zeros(4, np.int64)
    slowdown = link.duplex_slowdown
    beside = link.compute_slowdown - 1.0
    now = 0.0
    stall = 0.0
    for p in range(total + 1):
        s = by_start[p]
        while s >= 0:
            _run_engines(now, -1, -1, slowdown, engine, busy, ends, out, into)
            out_index[s] = ends[1]
            moved = g.storage_copy_bytes[s] if placement[s] == SWAP else g.storage_link_bytes[s]
            out[ends[1], 0] = link.latency_us + moved * link.d2h_us_per_byte
            now += beside * out[ends[1], 0]
            ends[1] += 1
            s = next_start[s]
        s = by_wait[p]
        while s >= 0:
            i = out_index[s]
            if ends[0] <= i:
                _run_engines(np.inf, i, -1, slowdown, engine, busy, ends, out, into)
            if out[i, 1] > now:
                stall += out[i, 1] - now
                now = out[i, 1]
            s = next_wait[s]
        if p == total:
            break
        s = by_issue[p]
        while s >= 0:
            _run_engines(now, -1, -1, slowdown, engine, busy, ends, out, into)
            in_index[s] = ends[3]
            moved = g.storage_copy_bytes[s] if placement[s] == SWAP else g.storage_link_bytes[s]
            into[ends[3], 0] = link.latency_us + moved * link.h2d_us_per_byte
            now += beside * into[ends[3], 0]
            ends[3] += 1
            s = next_issue[s]
        s = by_use[p]
        while s >= 0:
            i = in_index[s]
            if ends[2] <= i:
                _run_engines(np.inf, -1, i, slowdown, engine, busy, ends, out, into)
            if into[i, 1] > now:
                stall += into[i, 1] - now
                now = into[i, 1]
            s = next_use[s]
        start_us[p] = now
        now += times[p]
    return now, stall, busy[0], busy[1]


@njit(cache=True)
def _run_engines(until, out_goal, in_goal, slowdown, engine, busy, ends, out, into):  # type: ignore[no-untyped-def]
    """Let both copy engines run to time `until`, or until copy `out_goal` / `in_goal` of its queue has ended."""
    while engine[0] < until:
        out_active = ends[0] < ends[1]
        in_active = ends[2] < ends[3]
        if not out_active and not in_active:
            break
        if out_goal >= 0 and ends[0] > out_goal:
            return
        if in_goal >= 0 and ends[2] > in_goal:
            return
        factor = slowdown if out_active and in_active else 1.0
        step = until - engine[0]
        if out_active:
            step = min(step, out[ends[0], 0] * factor)
        if in_active:
            step = min(step, into[ends[2], 0] * factor)
        engine[0] += step
        if out_active:
            busy[0] += step
            out[ends[0], 0] -= step / factor
            if out[ends[0], 0] <= 1e-9:
                out[ends[0], 1] = engine[0]
                ends[0] += 1
        if in_active:
            busy[1] += step
            into[ends[2], 0] -= step / factor
            if into[ends[2], 0] <= 1e-9:
                into[ends[2], 1] = engine[0]
                ends[2] += 1
    if until != np.inf and engine[0] < until:
        engine[0] = until


@njit(cache=True, nogil=True)
def run_program(g, link, placement, budget, synchronous):  # type: ignore[no-untyped-def]
    """Build, live, transfer and time one placement.

    Returns (program, recomputed, [forward length], saved, [produced, last_forward, first_backward, last_backward,
    issue_out, wait_out, issue_in, wait_in] as the rows of one array, curve, start_us, [step, stall, d2h busy, h2d
    busy], [peak bytes, peak position, host bytes]).
    """
    storages = g.storage_bytes.shape[0]
    capacity = 2 * g.node_phase.shape[0] + 64
    while True:
        program = np.empty(capacity, np.int32)
        recomputed = np.empty(capacity, np.int8)
        saved = np.zeros(storages, np.int8)
        forward, total = build(g, placement, program, recomputed, saved)
        if total >= 0:
            break
        capacity *= 4
    curve = np.zeros(total + 2, np.int64)
    at = np.empty((8, storages), np.int32)
    liveness(g, placement, saved, program, forward, total, curve, at[0], at[1], at[2], at[3], -1, saved)
    if synchronous:
        layer_transfers(
            g, placement, saved, forward, total, curve, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]
        )
    else:
        transfers(
            g,
            placement,
            saved,
            program,
            forward,
            total,
            link,
            budget,
            curve,
            at[0],
            at[1],
            at[2],
            at[3],
            at[4],
            at[5],
            at[6],
            at[7],
        )
    start_us = np.zeros(total + 1, np.float64)
    step, stall, out_busy, in_busy = timeline(
        g, placement, saved, program, forward, total, link, at[4], at[5], at[6], at[7], start_us
    )
    start_us[total] = step
    position = 0
    for p in range(total + 1):
        if curve[p] > curve[position]:
            position = p
    host = 0
    for s in range(storages):
        if is_moved(placement, saved, s):
            host += g.storage_copy_bytes[s] if placement[s] == SWAP else g.storage_slot_bytes[s]
    return (
        program[:total],
        recomputed[:total],
        np.array([forward]),
        saved,
        at,
        curve[: total + 1],
        start_us,
        np.array([step, stall, out_busy, in_busy]),
        np.array([curve[position], position, host]),
    )


@njit(cache=True, nogil=True)
def peak_and_step(g, link, placement, budget):  # type: ignore[no-untyped-def]
    """(peak bytes, step us) of one placement."""
    found = run_program(g, link, placement, budget, False)
    return found[8][0], found[7][0]
