"""The Numba kernels behind `simulate`, first part: the arrays, program building and liveness.

All kernels work on flat arrays and allocate only arrays whose length is the length of the program. The four steps are
separate functions, run in this order by `passes.simulate`, the last two in `simulate_transfers`, `simulate_timeline`:

    build      placements            -> the order of every executed node, forward then backward, recomputed ones
                                        included, and an instruction for every encode and decode on the device
    liveness   program               -> the interval during which each storage instance is alive
    transfers  program + intervals   -> where each copy starts and is waited for, so that memory stays under the budget
    timeline   program + transfers   -> time of every instruction on three engines (compute and one per direction)

A program entry below the number of nodes n is a node; n + s encodes storage s, n + storages + s decodes it.
Positions are indices into the program. A storage instance is alive from the instruction that defines it up to and
including the last instruction that reads it, which is what a Python frame that drops each name after its last use does.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxhome.passes.compiled import compiled

KEEP, SWAP, RECOMPUTE, RECOMPUTE_EACH, COMPRESS, COMPRESS_SWAP = range(6)
INPUT, FORWARD, BACKWARD = range(3)
OWNER, ALIAS, GETITEM, VIRTUAL = range(4)
# Entries of `SimArrays.host_us`.
ENTER_FORWARD, ENTER_BACKWARD, LEAVE, SWAP_OUT, SWAP_IN, WAIT, ENCODE, DECODE = range(8)
HOST_FIGURES = 8

# An instance of a RECOMPUTE_EACH storage is reused by readers that follow within this many instructions; a later reader
# gets a new instance. Below it, re-running the producer for a neighbour (conv backward after conv backward) is waste.
EACH_WINDOW = 12

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Int8 = npt.NDArray[np.int8]
Float64 = npt.NDArray[np.float64]


class SimArrays(NamedTuple):
    """A joint graph as numbers. Node and storage ids are indices; nodes stand in program order, forward first."""

    node_phase: Int8
    node_kind: Int8
    node_must_forward: Int8
    node_time_us: Float64
    node_workspace: Int64
    read_start: Int32
    read_node: Int32
    own_start: Int32
    own_storage: Int32
    backward_alias: Int32  # what a node of the backward reads instead of this node (a clone of a mutated input)
    root_storage: Int32  # the storage of which this node is the root (the tensor that is saved or copied), or -1
    storage_bytes: Int64
    storage_owner: Int32
    storage_root: Int32
    storage_held: Int8  # alive to the end of the backward once allocated: forward outputs, gradients
    storage_copy_bytes: Int64  # bytes a swap moves
    storage_encoded_bytes: Int64  # device bytes while encoded there: COMPRESS, and COMPRESS_SWAP on its way
    storage_encode_us: Float64
    storage_decode_us: Float64
    storage_link_bytes: Int64  # bytes that COMPRESS_SWAP moves: at the link's rate they take as long as the transfer
    storage_slot_bytes: Int64  # bytes of the host slot under COMPRESS_SWAP
    forward_output: Int32  # node ids
    backward_output: Int32  # node ids
    tangent_storage: Int32
    # [held by no graph during the whole backward, needed only between the forward and the backward]
    outside_bytes: Int64 = np.zeros(2, np.int64)
    # CSR by storage, empty where there is none at all: nodes whose result may be written over the storage
    taker_start: Int32 = np.empty(0, np.int32)
    taker_node: Int32 = np.empty(0, np.int32)
    # Host us of launching each node, empty where the host is not simulated; of what a step and its copies add to it
    node_host_us: Float64 = np.empty(0, np.float64)
    host_us: Float64 = np.zeros(HOST_FIGURES, np.float64)


class Link(NamedTuple):
    """Copy engine rates; durations in microseconds are bytes * us_per_byte + latency_us."""

    d2h_us_per_byte: float
    h2d_us_per_byte: float
    duplex_slowdown: float  # each direction takes this many times longer while both run
    latency_us: float
    compute_slowdown: float = 1.0  # computing takes this many times longer beside a copy


@compiled(inline="always")
def is_encoded(choice):  # type: ignore[no-untyped-def]
    """Whether a storage that is saved so is encoded and decoded by instructions of their own."""
    return choice == COMPRESS or choice == COMPRESS_SWAP


@compiled(inline="always")
def is_moved(placement, saved, s):  # type: ignore[no-untyped-def]
    """Whether storage s goes to the host."""
    return saved[s] == 1 and (placement[s] == SWAP or placement[s] == COMPRESS_SWAP)


@compiled()
def instruction_times(program, total, node_us, encode_us, decode_us):  # type: ignore[no-untyped-def]
    """Compute time of every program entry: a node, an encode or a decode."""
    n = node_us.shape[0]
    storages = encode_us.shape[0]
    times = np.empty(total + 1, np.float64)
    times[total] = 0.0
    for p in range(total):
        entry = program[p]
        if entry >= n + storages:
            times[p] = decode_us[entry - n - storages]
        elif entry >= n:
            times[p] = encode_us[entry - n]
        else:
            times[p] = node_us[entry]
    return times


@compiled(inline="always")
def launch_us(g, entry):  # type: ignore[no-untyped-def]
    """Host us of launching a program entry: a node, an encode or a decode; nothing where there is no host."""
    n = g.node_phase.shape[0]
    if entry >= n + g.storage_bytes.shape[0]:
        return g.host_us[DECODE]
    if entry >= n:
        return g.host_us[ENCODE]
    return g.node_host_us[entry] if g.node_host_us.shape[0] > 0 else 0.0


@compiled()
def host_idle(g, placement, saved, program, forward, total, times, produced, first_backward):  # type: ignore[no-untyped-def]
    """Us that the device waits for the host before each entry, if no copy ever holds it up.

    Copies have no places yet: each is taken to be started and waited for where it is ready, and where it is read.
    """
    idle = np.zeros(total + 1, np.float64)
    if g.node_host_us.shape[0] == 0:
        return idle
    n = g.node_phase.shape[0]
    back = np.zeros(total + 1, np.int64)
    for s in range(g.storage_bytes.shape[0]):
        if is_moved(placement, saved, s):
            back[first_backward[s]] += 1
    now = 0.0
    host = g.host_us[ENTER_FORWARD]
    for p in range(total):
        if p == forward:
            host += g.host_us[ENTER_BACKWARD]
        host += back[p] * (g.host_us[SWAP_IN] + g.host_us[WAIT]) + launch_us(g, program[p])
        idle[p] = max(0.0, host - now)
        now += idle[p] + times[p]
        if p < forward:
            s = program[p] - n if program[p] >= n else g.root_storage[program[p]]
            is_ready = program[p] >= n or (s >= 0 and produced[s] == p and not is_encoded(placement[s]))
            if is_ready and is_moved(placement, saved, s):
                host += g.host_us[SWAP_OUT] + g.host_us[WAIT]
    return idle


@compiled()
def build(g, placement, program, recomputed, saved):  # type: ignore[no-untyped-def]
    """Write the executed nodes into `program`; return (length of the forward, total length), or (-1, -1) on overflow.

    `saved[s]` becomes 1 where the backward demands storage s from the forward. In the backward, nodes are rebuilt right
    before the reader that needs them; views are replayed for each reader, so that no view prolongs its base. An encode
    stands right behind the last forward reader, a decode right before the first backward one.
    """
    n = g.node_phase.shape[0]
    storages = g.storage_bytes.shape[0]
    decoded = np.zeros(storages, np.uint8)
    capacity = program.shape[0]
    available = np.zeros(n, np.uint8)
    touched = np.zeros(n, np.int32)
    stamp = np.full(n, -1, np.int32)
    stack_node = np.empty(n + 1, np.int32)
    stack_edge = np.empty(n + 1, np.int32)
    saved[:] = 0
    backward = np.empty(capacity, np.int32)
    backward_recomputed = np.empty(capacity, np.int8)
    length = 0
    for reader in range(n):
        if g.node_phase[reader] != BACKWARD:
            continue
        depth = 0
        stack_node[0] = reader
        stack_edge[0] = g.read_start[reader]
        while depth >= 0:
            node = stack_node[depth]
            edge = stack_edge[depth]
            if edge < g.read_start[node + 1]:
                stack_edge[depth] += 1
                source = g.backward_alias[g.read_node[edge]]
                if g.node_phase[source] != FORWARD:
                    continue
                storage = g.root_storage[source]
                choice = -1
                if storage >= 0:
                    choice = placement[storage]
                    if choice != RECOMPUTE and choice != RECOMPUTE_EACH:
                        saved[storage] = 1
                        continue
                    # A fused node is never held: its readers compute it again, which prolongs nothing.
                    held = choice == RECOMPUTE and g.node_kind[source] != VIRTUAL
                    if available[source] and (held or length - touched[source] <= EACH_WINDOW):
                        touched[source] = length
                        continue
                if stamp[source] == reader:
                    continue
                stamp[source] = reader
                depth += 1
                stack_node[depth] = source
                stack_edge[depth] = g.read_start[source]
                continue
            depth -= 1
            for edge in range(g.read_start[node], g.read_start[node + 1]):
                storage = g.root_storage[g.backward_alias[g.read_node[edge]]]
                if storage >= 0 and saved[storage] and not decoded[storage] and is_encoded(placement[storage]):
                    if length + 1 >= capacity:
                        return -1, -1
                    decoded[storage] = 1
                    backward[length] = n + storages + storage
                    backward_recomputed[length] = 0
                    length += 1
            if length + 1 >= capacity:
                return -1, -1
            backward[length] = node
            backward_recomputed[length] = 1 if g.node_phase[node] == FORWARD else 0
            length += 1
            if g.node_phase[node] == FORWARD and g.root_storage[node] >= 0 and g.node_kind[node] != GETITEM:
                available[node] = 1
                touched[node] = length
            if g.node_phase[node] == FORWARD and g.own_start[node + 1] - g.own_start[node] >= 1:
                # All results of a multi-output node are bound at once: the tuple must not outlive this place.
                for i in range(g.own_start[node], g.own_start[node + 1]):
                    result = g.own_storage[i]
                    item = g.storage_root[result]
                    if item == node or item < 0:
                        continue
                    choice = placement[result]
                    if choice != RECOMPUTE and choice != RECOMPUTE_EACH:
                        continue
                    if length + 1 >= capacity:
                        return -1, -1
                    stamp[item] = reader
                    available[item] = 1
                    touched[item] = length
                    backward[length] = item
                    backward_recomputed[length] = 1
                    length += 1
                # The getitem that asked for this node may now stand on the stack with all edges done: drop it.
                while depth >= 0:
                    item = stack_node[depth]
                    result = g.root_storage[item]
                    if (
                        g.node_kind[item] != GETITEM
                        or not available[item]
                        or result < 0
                        or g.storage_owner[result] != node
                    ):
                        break
                    depth -= 1

    needed = np.zeros(n, np.uint8)
    for s in range(saved.shape[0]):
        if saved[s]:
            needed[g.storage_root[s]] = 1
    for node in range(n - 1, -1, -1):
        if g.node_phase[node] != FORWARD:
            continue
        if g.node_must_forward[node]:
            needed[node] = 1
        if needed[node]:
            for edge in range(g.read_start[node], g.read_start[node + 1]):
                needed[g.read_node[edge]] = 1
    forward = np.int64(0)  # a bare constant is a type of its own, for which Numba would compile once more
    for node in range(n):
        if g.node_phase[node] == FORWARD and needed[node]:
            if forward + length + 1 >= capacity:
                return -1, -1
            program[forward] = node
            recomputed[forward] = 0
            forward += 1
    encodes = np.int64(0)
    for s in range(storages):
        if saved[s] and is_encoded(placement[s]):
            encodes += 1
    if encodes > 0:
        if forward + encodes + length + 1 >= capacity:
            return -1, -1
        _insert_encodes(g, placement, saved, program, recomputed, forward, encodes)
        forward += encodes
    for i in range(length):
        program[forward + i] = backward[i]
        recomputed[forward + i] = backward_recomputed[i]
    return forward, forward + length


@compiled()
def _insert_encodes(g, placement, saved, program, recomputed, forward, encodes):  # type: ignore[no-untyped-def]
    """Make room in the forward for one instruction per encode, behind the last reader (views pass their use on)."""
    n = g.node_phase.shape[0]
    last = np.full(n, -1, np.int32)
    head = np.full(forward, -1, np.int32)  # the storages encoded behind each position, as linked lists
    following = np.full(g.storage_bytes.shape[0], -1, np.int32)
    for p in range(forward - 1, -1, -1):
        node = program[p]
        kind = g.node_kind[node]
        storage = g.root_storage[node]
        if storage >= 0 and saved[storage] and is_encoded(placement[storage]):
            behind = max(last[node], p)
            following[storage] = head[behind]
            head[behind] = storage
        passes_on = kind == ALIAS or (kind == GETITEM and storage < 0)
        if kind == VIRTUAL:
            passes_on = storage < 0 or not saved[storage]
        reach = max(p, last[node]) if passes_on else p
        for edge in range(g.read_start[node], g.read_start[node + 1]):
            source = g.read_node[edge]
            if last[source] < reach:
                last[source] = reach
    place = forward + encodes - 1
    for p in range(forward - 1, -1, -1):
        s = head[p]
        while s >= 0:
            program[place] = n + s
            recomputed[place] = 0
            place -= 1
            s = following[s]
        program[place] = program[p]
        recomputed[place] = recomputed[p]
        place -= 1


@compiled()
def _takes(g, s, node):  # type: ignore[no-untyped-def]
    """Whether the result of `node` may be written over storage s."""
    for i in range(g.taker_start[s], g.taker_start[s + 1]):
        if g.taker_node[i] == node:
            return True
    return False


@compiled()
def liveness(  # type: ignore[no-untyped-def]
    g,
    placement,
    saved,
    program,
    forward,
    total,
    curve,
    produced,
    last_forward,
    first_backward,
    last_backward,
    watch,
    held,
):
    """Fill `curve[p]` = bytes alive at instruction p, less what transfers add, and the use positions of what is moved.

    One pass from the end: when a definition is reached, every later reader of that instance has been seen. Views and
    virtual (fused, never materialised) nodes pass their last use on to what they read. What its last reader is written
    over (the operand made last; nothing that is saved, which the other graph knows) ends one instruction earlier.
    `held[s]` becomes 1 for each storage alive at position `watch` (-1: none is asked about).
    """
    n = g.node_phase.shape[0]
    storages = g.storage_bytes.shape[0]
    last = np.full(n, -1, np.int32)
    item_last = np.full(storages, -1, np.int32)
    first = np.full(n, -1, np.int32)
    delta = np.zeros(total + 2, np.int64)
    produced[:] = -1
    last_forward[:] = -1
    first_backward[:] = -1
    last_backward[:] = -1
    end = total
    node_phase = g.node_phase
    node_kind = g.node_kind
    root_storage = g.root_storage
    storage_root = g.storage_root
    storage_bytes = g.storage_bytes
    own_start = g.own_start
    own_storage = g.own_storage
    read_start = g.read_start
    read_node = g.read_node
    backward_alias = g.backward_alias
    takes = g.taker_start.shape[0] > 0
    written_over = np.zeros(total, np.uint8)
    for i in range(g.backward_output.shape[0]):
        last[g.backward_output[i]] = end
    in_backward = True
    for p in range(total - 1, -2, -1):
        if p == forward - 1:
            in_backward = False
            for s in range(storages):
                root = storage_root[s]
                if root >= 0 and saved[s] and is_encoded(placement[s]):
                    last[root] = -1
                elif root >= 0 and saved[s] and placement[s] != KEEP:
                    first_backward[s] = first[root]
                    last_backward[s] = last[root]
                    last[root] = -1
                item_last[s] = -1
            for node in range(n):
                # A forward node that is not saved has no reader across the boundary; its backward instances are done.
                if node_phase[node] == FORWARD and (root_storage[node] < 0 or not saved[root_storage[node]]):
                    last[node] = -1
            for i in range(g.tangent_storage.shape[0]):
                s = g.tangent_storage[i]
                stop = end if g.storage_held[s] else max(last[g.storage_owner[s]], forward)
                delta[forward] += storage_bytes[s]
                delta[stop + 1] -= storage_bytes[s]
                if forward <= watch <= stop:
                    held[s] = 1
            for i in range(g.forward_output.shape[0]):
                last[g.forward_output[i]] = end
        if p < 0:
            break
        node = program[p]
        if node >= n + storages:
            s = node - n - storages
            root = storage_root[s]
            first_backward[s] = p
            last_backward[s] = max(last[root], p)
            last[root] = -1
            delta[p] += storage_bytes[s]
            delta[last_backward[s] + 1] -= storage_bytes[s]
            if p <= watch <= last_backward[s]:
                held[s] = 1
            continue
        if node >= n:
            # What is encoded lives on to its decode; on its way to the host, `transfers` says how long.
            s = node - n
            until = first_backward[s] if placement[s] == COMPRESS else p
            delta[p] += g.storage_encoded_bytes[s]
            delta[until + 1] -= g.storage_encoded_bytes[s]
            last[storage_root[s]] = max(last[storage_root[s]], p)
            continue
        kind = node_kind[node]
        stop = last[node]
        last[node] = -1
        storage = root_storage[node]
        if not in_backward and storage >= 0 and saved[storage]:
            produced[storage] = p
            if placement[storage] != KEEP:
                last_forward[storage] = max(stop, p)
        passes_on = kind == ALIAS
        if kind == OWNER:
            for i in range(own_start[node], own_start[node + 1]):
                s = own_storage[i]
                until = stop if storage_root[s] == node else item_last[s]
                item_last[s] = -1
                until = max(until, p)
                if takes and p < until < total and saved[s] == 0 and (p < forward) == (until < forward):
                    if written_over[until] == 0 and _takes(g, s, program[until]):
                        written_over[until] = 1
                        until -= 1
                delta[p] += storage_bytes[s]
                delta[until + 1] -= storage_bytes[s]
                if p <= watch <= until:
                    held[s] = 1
        elif kind == GETITEM:
            if storage >= 0:
                # Alive at its own getitem too, though a moved result has no later reader here.
                item_last[storage] = max(item_last[storage], stop, p)
            else:
                passes_on = True
        elif kind == VIRTUAL:
            if storage >= 0 and saved[storage] and not in_backward:
                stop = max(stop, p)
                delta[p] += storage_bytes[storage]
                delta[stop + 1] -= storage_bytes[storage]
                if p <= watch <= stop:
                    held[storage] = 1
            else:
                passes_on = True
        reach = max(p, stop) if passes_on else p
        for edge in range(read_start[node], read_start[node + 1]):
            source = read_node[edge]
            if in_backward:
                source = backward_alias[source]
                first[source] = p
            if last[source] < reach:
                last[source] = reach
    running = 0
    for p in range(total + 1):
        running += delta[p]
        curve[p] = running
    for p in range(total):
        if program[p] < n:
            curve[p] += g.node_workspace[program[p]]
        if p >= forward:
            curve[p] += g.outside_bytes[0]
    if forward < total:
        # The moment between the two graphs belongs to the first instruction of the backward.
        curve[forward] += g.outside_bytes[1]
