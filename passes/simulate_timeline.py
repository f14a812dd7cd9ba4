"""The Numba kernels behind `simulate`, third part: what time everything takes, and all parts in one call.

`timeline` runs a program and its copies on three engines. `run_program` and `peak_and_step` are all four steps in one
call, outside Python's lock. Conventions are those of `simulate_kernels` and `simulate_transfers`.
"""

import numpy as np

from fxhome.passes.compiled import compiled
from fxhome.passes.simulate_kernels import (
    ENTER_BACKWARD,
    ENTER_FORWARD,
    LEAVE,
    SWAP,
    SWAP_IN,
    SWAP_OUT,
    WAIT,
    build,
    instruction_times,
    is_moved,
    launch_us,
    liveness,
)
from fxhome.passes.simulate_transfers import layer_transfers, transfers

OUT, IN = range(2)
ENDED, STARTED = range(2)


@compiled()
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
    idle_us,
):
    """Run the program on three engines; return (total us, stall us, d2h busy us, h2d busy us, host us).

    Fills `start_us[p]`, and `idle_us[p]`: how long the device waits for the host before it. The host launches one entry
    after the other and waits for none: nothing starts before it is launched. Copies of one direction run one after the
    other in issue order; while both directions run, each is slowed by the measured duplex factor. What a copy costs the
    kernels beside it is charged where the copy starts. A wait stalls compute until its copy has ended.
    """
    storages = g.storage_bytes.shape[0]
    times = instruction_times(program, total, g.node_time_us, g.storage_encode_us, g.storage_decode_us)
    # Per position, linked lists of the storages of which a copy is started or waited for there; row 0: out, row 1: in.
    start_at = np.full((2, total + 2), -1, np.int32)
    wait_at = np.full((2, total + 2), -1, np.int32)
    next_start = np.full((2, storages), -1, np.int32)
    next_wait = np.full((2, storages), -1, np.int32)
    copy_us = np.zeros((2, storages), np.float64)
    count = 0
    for s in range(storages - 1, -1, -1):
        if is_moved(placement, saved, s):
            count += 1
            moved = g.storage_copy_bytes[s] if placement[s] == SWAP else g.storage_link_bytes[s]
            copy_us[OUT, s] = link.latency_us + moved * link.d2h_us_per_byte
            copy_us[IN, s] = link.latency_us + moved * link.h2d_us_per_byte
            p = min(wait_out[s], total) if wait_out[s] >= 0 else total
            next_wait[OUT, s] = wait_at[OUT, p]
            wait_at[OUT, p] = s
            next_start[IN, s] = start_at[IN, issue_in[s]]
            start_at[IN, issue_in[s]] = s
            next_wait[IN, s] = wait_at[IN, wait_in[s]]
            wait_at[IN, wait_in[s]] = s
            next_start[OUT, s] = start_at[OUT, issue_out[s]]
            start_at[OUT, issue_out[s]] = s
    left = np.empty((2, count + 1), np.float64)  # us at full speed that a copy still takes
    ended = np.empty((2, count + 1), np.float64)
    place = np.full((2, storages), -1, np.int32)  # of a storage's copy in its queue
    # engine[0]: time up to which the copy engines have run. queue: each one's copies ended, and started.
    engine = np.zeros(1, np.float64)
    busy = np.zeros(2, np.float64)
    queue = np.zeros((2, 2), np.int64)
    slowdown = link.duplex_slowdown
    beside = link.compute_slowdown - 1.0
    start_host_us = (g.host_us[SWAP_OUT], g.host_us[SWAP_IN])
    now = 0.0
    host = g.host_us[ENTER_FORWARD]
    stall = 0.0
    for p in range(total + 1):
        if p == forward:
            host += g.host_us[ENTER_BACKWARD]
        for side in range(2):
            if p == total and side == IN:
                break
            s = start_at[side, p]
            while s >= 0:
                host += start_host_us[side]
                _run_engines(max(now, host), np.int32(-1), side, slowdown, engine, busy, queue, left, ended)
                k = queue[side, STARTED]
                place[side, s] = k
                left[side, k] = copy_us[side, s]
                now += beside * copy_us[side, s]
                queue[side, STARTED] += 1
                s = next_start[side, s]
            s = wait_at[side, p]
            while s >= 0:
                host += g.host_us[WAIT]
                k = place[side, s]
                if queue[side, ENDED] <= k:
                    _run_engines(np.inf, k, side, slowdown, engine, busy, queue, left, ended)
                stall += max(0.0, ended[side, k] - max(now, host))
                now = max(now, ended[side, k])
                s = next_wait[side, s]
        host += launch_us(g, program[p]) if p < total else g.host_us[LEAVE]
        idle_us[p] = max(0.0, host - now)
        now = max(now, host)
        start_us[p] = now
        now += times[p]
    return now, stall, busy[OUT], busy[IN], host


@compiled()
def _run_engines(until, goal, side, slowdown, engine, busy, queue, left, ended):  # type: ignore[no-untyped-def]
    """Let both copy engines run to time `until`, or until copy `goal` of queue `side` has ended (-1: no goal)."""
    while engine[0] < until:
        out_active = queue[OUT, ENDED] < queue[OUT, STARTED]
        in_active = queue[IN, ENDED] < queue[IN, STARTED]
        if not out_active and not in_active:
            break
        if goal >= 0 and queue[side, ENDED] > goal:
            return
        factor = slowdown if out_active and in_active else 1.0
        step = until - engine[0]
        if out_active:
            step = min(step, left[OUT, queue[OUT, ENDED]] * factor)
        if in_active:
            step = min(step, left[IN, queue[IN, ENDED]] * factor)
        engine[0] += step
        for one in range(2):
            if out_active if one == OUT else in_active:
                busy[one] += step
                k = queue[one, ENDED]
                left[one, k] -= step / factor
                if left[one, k] <= 1e-9:
                    ended[one, k] = engine[0]
                    queue[one, ENDED] += 1
    if until != np.inf and engine[0] < until:
        engine[0] = until


@compiled(nogil=True)
def run_program(g, link, placement, budget, synchronous):  # type: ignore[no-untyped-def]
    """Build, live, transfer and time one placement.

    Returns (program, recomputed, [forward length], saved, [produced, last_forward, first_backward, last_backward,
    issue_out, wait_out, issue_in, wait_in] as the rows of one array, curve, start_us, idle_us, [step, stall, d2h busy,
    h2d busy, host us], [peak bytes, peak position, host bytes]).
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
    nowhere = np.int64(-1)  # a bare constant is a type of its own, for which Numba would compile all of it once more
    liveness(g, placement, saved, program, forward, total, curve, at[0], at[1], at[2], at[3], nowhere, saved)
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
    idle_us = np.zeros(total + 1, np.float64)
    step, stall, out_busy, in_busy, launched = timeline(
        g, placement, saved, program, forward, total, link, at[4], at[5], at[6], at[7], start_us, idle_us
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
        idle_us,
        np.array([step, stall, out_busy, in_busy, launched]),
        np.array([curve[position], position, host]),
    )


@compiled(nogil=True)
def peak_and_step(g, link, placement, budget):  # type: ignore[no-untyped-def]
    """(peak bytes, step us) of one placement."""
    # No constant: see run_program.
    found = run_program(g, link, placement, budget, np.bool_(False))
    return found[9][0], found[8][0]
