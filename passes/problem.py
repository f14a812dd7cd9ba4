"""Facts and costs as the flat arrays that the simulator and the search work on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fxhome.passes.codec_choice import NO_CODEC, StorageCodecs
from fxhome.passes.facts import GraphFacts, StorageFacts
from fxhome.passes.host_times import HostTimes
from fxhome.passes.simulate import (
    COMPRESS,
    COMPRESS_SWAP,
    KEEP,
    PLACEMENTS,
    RECOMPUTE,
    RECOMPUTE_EACH,
    SWAP,
    Link,
    Problem,
    SimArrays,
)

# A result this many times smaller than a sibling of the same operator (batch norm's statistics beside its output) is
# not rebuilt: while its operator ran again, the sibling would be allocated for it.
SIBLING_RATIO = 64

# Below this, moving or rebuilding a storage frees less than one allocator block and costs a launch each way.
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Costs:
    """Measured or estimated costs in node order: time, workspace (device bytes beyond results), and what the call was
    seen to cost the host (None: not timed by itself; empty: none was).
    """

    time_us: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    estimated: tuple[bool, ...]
    host_us: tuple[float | None, ...] = ()


def _csr(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.zeros(len(rows) + 1, np.int32)
    start[1:] = np.cumsum([len(row) for row in rows])
    return start, np.array([x for row in rows for x in row], np.int32)


def allowed_placements(storage: StorageFacts, allow: Collection[str], offer: StorageCodecs = NO_CODEC) -> list[bool]:
    """Which of the six placements a storage may take under the user's `allow`."""
    row = [False] * PLACEMENTS
    row[KEEP] = True
    if storage.is_activation:
        if storage.must_recompute:
            row[KEEP] = False
            row[RECOMPUTE] = True
        elif storage.may_recompute and "recompute" in allow:
            row[RECOMPUTE] = row[RECOMPUTE_EACH] = True
        if storage.may_move and "swap" in allow and storage.size_bytes >= SMALL_BYTES:
            row[SWAP] = True
        if storage.may_move and not storage.must_recompute and "compress" in allow:
            row[COMPRESS] = offer.compress != ""
            row[COMPRESS_SWAP] = offer.swap != "" and "swap" in allow
    return row


def build_problem(
    facts: GraphFacts,
    costs: Costs,
    link: Link,
    allow: Collection[str],
    *,
    outside_bytes: int = 0,
    between_bytes: int = 0,
    codecs: Sequence[StorageCodecs] | None = None,
    off_host: Collection[str] = (),
    host: HostTimes | None = None,
) -> Problem:
    """Assemble the numbers; storages under 4 KiB are never swapped, nor those under 64 KiB compressed.

    outside_bytes: held during the whole backward by nothing in this graph (an eager loss, other graphs' gradients).
    between_bytes: needed only between this forward and its backward (the graphs that run in between).
    codecs: what `choose_codecs` offers, per storage; None compresses nothing.
    off_host: names of storages for which the host has no room.
    host: what launching costs; None: nothing, as on a CPU, where the host is the device.
    """
    offers = tuple(codecs) if codecs is not None else (NO_CODEC,) * len(facts.storages)
    nodes = len(facts.node_names)
    root_storage = np.full(nodes, -1, np.int32)
    for storage, root in enumerate(facts.storage_root):
        if root >= 0:
            root_storage[root] = storage
    read_start, read_node = _csr(facts.reads)
    own_start, own_storage = _csr(facts.owns)
    taker_start, taker_node = _csr(facts.takers)
    sizes = np.array([s.size_bytes for s in facts.storages], np.int64)
    arrays = SimArrays(
        node_phase=np.array(facts.node_phase, np.int8),
        node_kind=np.array(facts.node_kind, np.int8),
        node_must_forward=np.array(facts.must_forward, np.int8),
        node_time_us=np.array(costs.time_us, np.float64),
        node_workspace=np.array(costs.workspace_bytes, np.int64),
        read_start=read_start,
        read_node=read_node,
        own_start=own_start,
        own_storage=own_storage,
        backward_alias=np.array(facts.backward_alias, np.int32),
        root_storage=root_storage,
        storage_bytes=sizes,
        storage_owner=np.array(facts.storage_owner, np.int32),
        storage_root=np.array(facts.storage_root, np.int32),
        storage_held=np.array(facts.storage_held, np.int8),
        storage_copy_bytes=np.array([s.copy_bytes for s in facts.storages], np.int64),
        storage_encoded_bytes=np.array(
            [o.encoded_bytes or s.size_bytes for o, s in zip(offers, facts.storages, strict=True)], np.int64
        ),
        storage_encode_us=np.array([o.encode_us for o in offers], np.float64),
        storage_decode_us=np.array([o.decode_us for o in offers], np.float64),
        storage_link_bytes=np.array(
            [o.link_bytes or s.copy_bytes for o, s in zip(offers, facts.storages, strict=True)], np.int64
        ),
        storage_slot_bytes=np.array(
            [o.slot_bytes or s.copy_bytes for o, s in zip(offers, facts.storages, strict=True)], np.int64
        ),
        forward_output=np.array(facts.forward_outputs, np.int32),
        backward_output=np.array(facts.backward_outputs, np.int32),
        tangent_storage=np.array(facts.tangent_storages, np.int32),
        outside_bytes=np.array([outside_bytes, between_bytes], np.int64),
        taker_start=taker_start,
        taker_node=taker_node,
    )
    if host is not None:
        arrays = arrays._replace(node_host_us=host.node_us, host_us=host.step_us)
    on_device = set(allow) - {"swap"}
    rows = [
        allowed_placements(s, on_device if s.name in off_host else allow, offer)
        for s, offer in zip(facts.storages, offers, strict=True)
    ]
    allowed = np.array(rows, bool).reshape(-1, PLACEMENTS)
    for siblings in facts.owns:
        largest = max((facts.storages[s].size_bytes for s in siblings), default=0)
        for s in siblings:
            if facts.storages[s].size_bytes * SIBLING_RATIO <= largest and allowed[s, KEEP]:
                allowed[s, [RECOMPUTE, RECOMPUTE_EACH]] = False
    names = tuple((offer.compress, offer.swap) for offer in offers)
    return Problem(arrays, link, allowed, np.array(facts.group, np.int32), names)
